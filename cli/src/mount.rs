//! `defuse mount`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::thread;

use defuse_fuse::{Session, mount};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::compose::Source;
use crate::error::{Failure, Result};
use crate::options::{self, Profile};

/// Mount a file system.
#[derive(clap::Args, Clone, Debug)]
pub struct MountArgs {
    /// What to mount: passthrough:DIR or memory:
    pub source: OsString,
    /// The directory to mount it on
    pub mountpoint: PathBuf,
    /// Options, separated by commas; see `defuse help options`
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// A set of options to start from
    #[arg(long, value_enum, default_value_t)]
    pub profile: Profile,
    /// Most worker threads (as -o workers=N)
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Stay in the foreground
    #[arg(short, long)]
    pub foreground: bool,
}

/// Mounts, and serves until the end.
pub fn run(args: MountArgs) -> Result {
    let _ = env_logger::Builder::new().filter_level(log::LevelFilter::Info).try_init();
    let source = Source::parse(&args.source)?;
    let mut lists = args.options.clone();
    lists.extend(args.workers.map(|workers| format!("workers={workers}")));
    let settings = options::parse(args.profile, source.backend.name, &lists)?;
    let fs = source.open(&settings)?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(Failure::failed)?;
    let mounted = mount::mount(&args.mountpoint, &settings.mount).map_err(Failure::failed)?;
    let session = Session::start(mounted.device, fs, &settings.session).map_err(Failure::failed)?;
    let mountpoint = mounted.mountpoint;
    thread::spawn(move || {
        for _ in signals.forever() {
            if let Err(error) = mount::unmount(&mountpoint, false) {
                log::warn!("{error}");
                let _ = mount::unmount(&mountpoint, true);
            }
        }
    });
    session.wait();
    Ok(())
}
