//! Operations and their measurements, the same for every frontend.
