//! Limits of this process, which its child processes inherit.

use std::fs;

/// Raises the limit on open files as far as root may, for daemons too: passthrough_hp holds one
/// descriptor for each inode that the kernel knows.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|n| n.trim().parse().ok());
    let most = most.unwrap_or(1 << 20);
    if setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }).is_err() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
