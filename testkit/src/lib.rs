//! POSIX cases and a reference model: one suite for every backend and frontend.
