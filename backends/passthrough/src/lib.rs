//! A directory of another file system, served through the defuse contract (Stackfs).
