//! The defuse contract: one trait that every backend implements and every frontend calls.
