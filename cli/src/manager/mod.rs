//! `defuse manager`.

pub mod bind;
mod config;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use defuse_fs::namespace::{Namespace, NamespaceMember};
use defuse_fs::source::LockPlace;
use defuse_fs::{Caller, FileSystem};
use rustix::process::{getegid, geteuid};

use crate::error::{CommandFailure, Result};
use crate::sandbox::{FilterNeeds, SandboxExtent};
use crate::servers::TreeDevice;
use crate::serving::{self, ProcessArgs, ServePlan};
use crate::{daemon, mounted, paths};
use bind::{BindableDevice, DeviceBinder};
use config::{ConfiguredDevice, ManagerConfig};

/// Serve several file systems to other processes, as one tree
///
/// CONFIG is a TOML file with the socket, and with the source and path of each file system. Clients
/// connect to the source shared:SOCKET, and find each file system as a directory at its path.
/// Returns when the socket is ready. A background process serves until it receives SIGTERM, and
/// fails if not everything could be made durable then.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct ManagerArgs {
    /// The configuration
    config: PathBuf,
    /// Check the configuration, and do nothing
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    process: ProcessArgs,
}

const HELP: &str = "\
A configuration:
  socket = \"/run/user/1000/disks\"       # clients: shared:/run/user/1000/disks
  admit = [1001]                        # also this user (default: none)
  cache = \"2G\"                          # memory for cached pages (default: 512M)
  eviction = \"s3-fifo\"                  # by which pages leave it (default: e)
  max-connections = 100                 # of all users (default: 8192)
  max-connections-of-user = 10          # of each but root (default: an eighth of all)
  dead-after = 30                       # seconds until stopped processes lose locks (default: never)
  answer-within = 10                    # seconds until an application that has a device is given up (default: 10)
  sysfs = \"/host/sys\"                  # NUMA nodes and devices (default: /sys)

  [[device]]
  path = \"/fast\"                        # in the served tree
  source = \"uhs:/srv/image\"             # any source of `defuse mount`
  options = [\"cache=64M\"]               # of the source, as for `defuse mount -o`
  worker = false                        # no thread of its own for its I/O (default: true for uhs)
  bind = [1001]                         # applications of this user may have it (default: none may)

  [[device]]
  path = \"/archive/old\"
  source = \"uhs:/dev/sdb\"
  options = [\"ro\"]";

impl ManagerArgs {
    /// The arguments of the background process.
    fn to_command_line(&self) -> Vec<OsString> {
        let mut line = self.process.to_command_line("manager");
        line.extend(["--".into(), self.config.clone().into()]);
        line
    }
}

/// Manages in this process or in the background.
pub fn run(mut args: ManagerArgs) -> Result {
    args.config = paths::absolute(&args.config);
    args.process.log_file = args.process.log_file.as_deref().map(paths::absolute);
    let config = ManagerConfig::read(&args.config)?;
    if args.check {
        return Ok(());
    }
    if args.process.is_first() {
        return daemon::start(&args.to_command_line());
    }
    let ready = args.process.begin()?;
    let opened = args.process.start_log().and_then(|()| {
        let sources: Vec<_> = config.devices.iter().map(|device| &device.source).collect();
        let extent = SandboxExtent::Usual;
        let later = config.devices.iter().any(|device| device.bind.is_some());
        let stays = match (config.dead_after, later) {
            (Some(_), _) => Some("it looks at processes"),
            (None, true) => Some("it opens devices later"),
            (None, false) => None,
        };
        let namespaces = serving::namespaces(&sources, extent, stays)?;
        Ok((namespaces, open(&config)?))
    });
    match opened {
        Ok((namespaces, ManagerTree { fs, binder })) => {
            let offer = offer(&args, &config, Arc::clone(&fs), &binder);
            let outcome = serving::run(offer, namespaces, ready, || {
                binder.end();
                settle(&config, fs.members(), &binder)
            });
            mounted::release(fs);
            outcome
        }
        Err(failure) => {
            ready.tell(Err(&failure));
            Err(failure)
        }
    }
}

/// The file systems, and the file systems among them that applications may bind.
struct ManagerTree {
    fs: Arc<Namespace>,
    binder: Arc<DeviceBinder>,
}

fn offer(
    args: &ManagerArgs,
    config: &ManagerConfig,
    fs: Arc<Namespace>,
    binder: &Arc<DeviceBinder>,
) -> ServePlan {
    let device = |one: &ConfiguredDevice| TreeDevice { path: one.path.clone(), source: one.text() };
    ServePlan {
        text: format!("manager {}", args.config.display()),
        devices: config.devices.iter().map(device).collect(),
        tree: Some(Arc::clone(&fs)),
        binder: Some(Arc::clone(binder)),
        fs,
        socket: config.socket.clone(),
        shared: Some(config.pages),
        admit: config.admit.clone(),
        max_connections: config.max_connections,
        max_connections_of_user: config.max_connections_of_user,
        dead_after: config.dead_after,
        session: Default::default(),
        sandbox: Some(needs(config)),
    }
}

/// The system calls that all sources together need.
fn needs(config: &ManagerConfig) -> FilterNeeds {
    config.devices.iter().fold(FilterNeeds::default(), |all, device| {
        let one = mounted::needs(&device.source);
        FilterNeeds {
            handles: all.handles || one.handles,
            rings: all.rings || one.rings,
            network: all.network || one.network,
            unmounts: false,
        }
    })
}

/// Opens all file systems. If one cannot be opened, the others end as they would after SIGTERM.
fn open(config: &ManagerConfig) -> Result<ManagerTree> {
    if let Some(dir) = &config.sysfs {
        defuse_block::worker::use_sysfs(dir);
    }
    let (mut members, mut devices) = (Vec::new(), Vec::new());
    for device in &config.devices {
        match member(config, device, &mut devices) {
            Ok(member) => members.push(member),
            Err(failure) => {
                let binder = DeviceBinder::new(devices, config.answer_within);
                binder.end();
                settle(config, &members, &binder).unwrap_or_else(|other| log::error!("{other}"));
                return Err(config.locate_failure(device.place, &failure));
            }
        }
    }
    let owner = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), pid: 0 };
    let namespace = Namespace::new(members, owner);
    let namespace = namespace
        .map_err(|unfit| CommandFailure::Failed(format!("the paths make no tree: {unfit:?}")))?;
    let binder = Arc::new(DeviceBinder::new(devices, config.answer_within));
    Ok(ManagerTree { fs: Arc::new(namespace), binder })
}

/// The file system of a device, in the tree. One that applications may bind is added to `devices`.
fn member(
    config: &ManagerConfig,
    device: &ConfiguredDevice,
    devices: &mut Vec<Arc<BindableDevice>>,
) -> Result<NamespaceMember> {
    let path = device.path_of_names().to_owned();
    let Some(users) = &device.bind else {
        return Ok(NamespaceMember { path, fs: open_device(device)?, apart: false });
    };
    let bindable = Arc::new(BindableDevice::new(device, users.clone(), config.answer_within));
    bindable.begin()?;
    let fs = Arc::clone(&bindable.moving) as Arc<dyn FileSystem>;
    devices.push(bindable);
    Ok(NamespaceMember { path, fs, apart: true })
}

fn open_device(device: &ConfiguredDevice) -> Result<Arc<dyn FileSystem>> {
    let mut settings = device.settings.clone();
    // The server keeps no locks, so that locks of a frontend would hold for one client only.
    settings.frontend.locks = LockPlace::FileSystem;
    Ok(device.source.open(&settings)?)
}

/// Makes every file system durable, whatever happens with the others. Fails with all that could not
/// be. An application that has a device goes on with it.
fn settle(config: &ManagerConfig, members: &[NamespaceMember], binder: &DeviceBinder) -> Result {
    let is_own = |path: &str| binder.device(path).is_none_or(|device| device.is_own());
    let each = config.devices.iter().zip(members).filter(|(device, _)| is_own(&device.path));
    let failures: Vec<String> = each
        .filter_map(|(device, member)| mounted::make_durable(&*member.fs, &device.text()).err())
        .map(|failure| failure.to_string())
        .collect();
    if failures.is_empty() { Ok(()) } else { Err(CommandFailure::Failed(failures.join("; "))) }
}
