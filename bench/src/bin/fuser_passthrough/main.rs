//! A directory served with the `fuser` crate: the peer that a Rust programmer would write today.
//!
//! It is meant as a fair competitor, so it uses the features of the crate without tricks. It has
//! real descriptors for open files, one `O_PATH` descriptor per inode, kernel caching as long as
//! the timeouts allow, READDIRPLUS, parallel directory operations and several event loops. Features
//! that the crate leaves off by default stay off unless requested: the write-back cache,
//! `HANDLE_KILLPRIV_V2`, and one `/dev/fuse` descriptor per thread.

#![forbid(unsafe_code)]

mod attr;
mod filesystem;
mod tables;

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use fuser::{Config, MountOption, SessionACL};

use crate::filesystem::{FuserPassthrough, MountTuning};

/// Serves SOURCE at MOUNTPOINT through the fuser crate, until it is unmounted.
#[derive(Parser)]
struct FuserArgs {
    /// Directory to serve.
    source: PathBuf,
    /// Mount point.
    mountpoint: PathBuf,
    /// Number of event loops; the default of the crate is 1.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Validity time of entries and attributes, in seconds.
    #[arg(long, default_value_t = 86400)]
    timeout: u64,
    /// Give each event loop its own /dev/fuse descriptor.
    #[arg(long)]
    clone_fd: bool,
    /// Enable the write-back cache (off by default in the crate).
    #[arg(long)]
    writeback: bool,
    /// Request HANDLE_KILLPRIV_V2 (off by default in the crate).
    #[arg(long)]
    killpriv: bool,
    /// Answer extended attribute requests with ENOSYS, like a file system that does not implement
    /// them.
    #[arg(long)]
    no_xattr: bool,
}

fn main() -> anyhow::Result<()> {
    let args = FuserArgs::parse();
    // Modes already include the caller's umask.
    rustix::process::umask(rustix::fs::Mode::empty());
    let tuning = MountTuning {
        timeout: Duration::from_secs(args.timeout),
        writeback: args.writeback,
        killpriv: args.killpriv,
        xattr: !args.no_xattr,
    };
    let passthrough = FuserPassthrough::new(&args.source, tuning)?;
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("fuser_passthrough".into()), MountOption::DefaultPermissions];
    config.acl = SessionACL::All;
    config.n_threads = Some(args.threads);
    config.clone_fd = args.clone_fd;
    fuser::mount(passthrough, &args.mountpoint, &config)?;
    Ok(())
}
