//! User-space file systems without the cost of FUSE: the program.

fn main() {}
