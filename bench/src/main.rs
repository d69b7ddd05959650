//! Workloads, peers and the runner that compares them side by side.

fn main() {}
