//! A directory served through the `fuser` crate: the peer that a Rust programmer would write today.
//!
//! It is meant as a fair opponent, so it does what the crate makes possible without tricks: real descriptors for open
//! files, one `O_PATH` descriptor per inode, kernel caching as long as the timeouts allow, READDIRPLUS, parallel
//! directory operations and several event loops. What the crate leaves off by default stays off unless asked for:
//! the writeback cache, `HANDLE_KILLPRIV_V2` and one `/dev/fuse` descriptor per thread.

#![forbid(unsafe_code)]

mod attr;
mod filesystem;
mod tables;

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use fuser::{Config, MountOption, SessionACL};

use crate::filesystem::{Passthrough, Tuning};

/// Serves SOURCE at MOUNTPOINT through the fuser crate, until it is unmounted.
#[derive(Parser)]
struct Args {
    /// Directory to serve.
    source: PathBuf,
    /// Where to mount it.
    mountpoint: PathBuf,
    /// Event loops; the crate's own default is 1.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// How long the kernel may keep entries and attributes, in seconds.
    #[arg(long, default_value_t = 86400)]
    timeout: u64,
    /// Give each event loop a /dev/fuse descriptor of its own.
    #[arg(long)]
    clone_fd: bool,
    /// Let the kernel collect writes (off by default in the crate).
    #[arg(long)]
    writeback: bool,
    /// Ask for HANDLE_KILLPRIV_V2 (off by default in the crate).
    #[arg(long)]
    killpriv: bool,
    /// Answer extended attribute requests with ENOSYS, as a file system does that does not implement them.
    #[arg(long)]
    no_xattr: bool,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // Modes arrive with the caller's umask applied already.
    rustix::process::umask(rustix::fs::Mode::empty());
    let tuning = Tuning {
        timeout: Duration::from_secs(args.timeout),
        writeback: args.writeback,
        killpriv: args.killpriv,
        xattr: !args.no_xattr,
    };
    let passthrough = Passthrough::new(&args.source, tuning)?;
    let mut config = Config::default();
    config.mount_options =
        vec![MountOption::FSName("fuser_passthrough".into()), MountOption::DefaultPermissions];
    config.acl = SessionACL::All;
    config.n_threads = Some(args.threads);
    config.clone_fd = args.clone_fd;
    fuser::mount(passthrough, &args.mountpoint, &config)?;
    Ok(())
}
