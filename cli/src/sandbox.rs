//! The sandbox of a daemon: after mounting, it drops privileges, system calls and files that no
//! request needs.
//!
//! A bug in the daemon then gives an attacker no more than the file system and the mount need.
//! `-o no_sandbox` keeps everything.

mod filter;
mod home;
pub mod keeper;
mod root;

use std::os::fd::{AsRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::Arc;

pub use filter::FilterNeeds;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use crate::error::{CommandFailure, Result};
use defuse_compose::ParsedSource;
use defuse_fs::source::FileAccess;
use defuse_fuse::{GroupSource, SessionOptions};
use home::HomeThread;
use keeper::{KeeperHandle, KeeperTask};
use root::SandboxDirectory;

/// The extent of a sandbox (`-o sandbox=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxExtent {
    /// No sandbox.
    None,
    /// Privileges and system calls are dropped. The daemon stays in the mount namespace of its
    /// user.
    Privileges,
    /// In addition, a mount namespace of its own, where that changes nothing for users.
    #[default]
    Usual,
    /// In addition, a mount namespace of its own, also where later mounts are then not served.
    Namespace,
}

/// The mount namespaces of a daemon that starts: its own, if it has one, and its user's.
pub struct DaemonNamespaces {
    home: HomeThread,
    /// The process that unmounts: for a daemon with a namespace of its own, and for `auto_unmount`.
    keeper: Option<Arc<KeeperHandle>>,
    /// `None` if the daemon stays in the namespace of its user.
    own: Option<OwnNamespace>,
}

struct OwnNamespace {
    served: Vec<SandboxDirectory>,
    directories: Vec<PathBuf>,
}

impl DaemonNamespaces {
    /// The daemon stays in the namespace of its user.
    pub fn stay() -> DaemonNamespaces {
        DaemonNamespaces { home: HomeThread::new_local(), keeper: None, own: None }
    }

    /// Gives this process, which has one thread, a namespace of its own for serving `sources`,
    /// unless they need the user's. The log then has the reason. With `devices`, device nodes can
    /// be opened.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses, and if [`SandboxExtent::Namespace`] is impossible.
    pub fn leave(
        sources: &[&ParsedSource],
        extent: SandboxExtent,
        devices: bool,
    ) -> Result<DaemonNamespaces> {
        let may = may_unmount();
        let forced = extent == SandboxExtent::Namespace;
        if matches!(extent, SandboxExtent::None | SandboxExtent::Privileges) || !(may || forced) {
            return Ok(DaemonNamespaces::stay());
        }
        let directories =
            sources.iter().filter(|one| one.kind.facts().files == FileAccess::InDirectory);
        let directories = directories.filter_map(|one| root::resolve(one.rest.as_ref()));
        let directories: Vec<_> = directories.collect();
        let unfit = match sources.iter().find(|one| opens_any(one)) {
            _ if !may => Some("only root may leave it".to_owned()),
            Some(one) => {
                Some(format!("sources of type {} open files later", one.kind.facts().name))
            }
            None => root::explain_unfit(&directories, forced),
        };
        match unfit {
            Some(reason) if forced => {
                return Err(CommandFailure::Failed(format!(
                    "there can be no mount namespace for the daemon: {reason}; leave sandbox=namespace out"
                )));
            }
            Some(reason) => {
                log::info!("the daemon stays in the mount namespace of its user: {reason}");
                return Ok(DaemonNamespaces::stay());
            }
            None => {}
        }
        let failed = |step: &'static str| {
            move |error: std::io::Error| {
                CommandFailure::Failed(format!(
                    "no mount namespace for the daemon ({step}): {error}; mount with -o \
                     sandbox=privileges to do without"
                ))
            }
        };
        let keeper = Arc::new(KeeperHandle::start().map_err(failed("keeper"))?);
        let home = HomeThread::stay().map_err(failed("thread"))?;
        root::leave().map_err(|errno| failed("unshare")(errno.into()))?;
        let cover = |path: &PathBuf| root::cover(path, devices);
        let served = directories.iter().map(cover).collect::<rustix::io::Result<Vec<_>>>();
        let served = served.map_err(|errno| failed("copy of the source")(errno.into()))?;
        Ok(DaemonNamespaces {
            home,
            keeper: Some(keeper),
            own: Some(OwnNamespace { served, directories }),
        })
    }

    /// Starts a process that unmounts when this one is killed, if this one may unmount and has none
    /// yet.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be started.
    pub fn start_keeper(self) -> Result<DaemonNamespaces> {
        if self.keeper.is_some() || !may_unmount() {
            return Ok(self);
        }
        let keeper = KeeperHandle::start().map_err(|error| {
            CommandFailure::Failed(format!(
                "no process for auto_unmount ({error}): leave the option out"
            ))
        })?;
        Ok(DaemonNamespaces { keeper: Some(Arc::new(keeper)), ..self })
    }

    /// Runs `job` in the namespace of the user.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`HomeThread::run`].
    pub fn run_at_home<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        self.home.run(job)
    }

    /// Changes `options` of a session so that it works in the own namespace.
    pub fn adapt(&self, options: &mut SessionOptions) {
        let (Some(keeper), Some(_)) = (&self.keeper, &self.own) else { return };
        options.groups = Some(GroupSource(keeper.groups()));
        // Open for the life of the process, and opened again at each look.
        if let Ok(file) = std::fs::File::open(&options.memory_pressure) {
            options.memory_pressure = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
            let _ = file.into_raw_fd();
        }
    }

    /// Sends the keeper the list of all that it may act on. Comes before requests are served.
    /// Returns the keeper, if there is one.
    pub fn entrust(&self, task: KeeperTask) -> Result<Option<Arc<KeeperHandle>>> {
        let Some(keeper) = &self.keeper else { return Ok(None) };
        let directories = self.own.as_ref().map_or(&[][..], |own| &own.directories);
        keeper.begin(&task.hold(directories))?;
        Ok(Some(Arc::clone(keeper)))
    }

    /// From now on nothing else than the source can be reached, neither by this thread nor by
    /// others.
    pub fn confine(self) -> Result {
        let DaemonNamespaces { home, own, .. } = self;
        drop(home);
        let Some(own) = own else { return Ok(()) };
        root::confine(&own.served).map_err(|errno| {
            CommandFailure::Failed(format!(
                "no root directory for the daemon: {errno}; mount with -o sandbox=privileges to do without"
            ))
        })
    }
}

/// True if this process mounts and unmounts by itself.
fn may_unmount() -> bool {
    let held = capabilities(None).map(|held| held.effective).unwrap_or(CapabilitySet::empty());
    held.contains(CapabilitySet::SYS_ADMIN) && rustix::process::geteuid().is_root()
}

/// True for a source that opens files outside of a directory after it is open.
fn opens_any(source: &ParsedSource) -> bool {
    // A controller is driven through files in /sys and /dev.
    source.kind.facts().files == FileAccess::Any || defuse_block::driver_of(&source.rest).is_some()
}

/// The capabilities that stay: to act on files as any user (a directory), to register backing
/// files, unmount and abort the connection (`CAP_SYS_ADMIN`), to lock the memory of rings, and to
/// assume and drop the identity of callers (`CAP_SETPCAP` for `SECBIT_NO_SETUID_FIXUP`).
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::LEASE)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::MAC_ADMIN);

/// The capabilities of the keeper: to unmount, and to remove files in directories of users.
const KEPT_OF_KEEPER: CapabilitySet = CapabilitySet::SYS_ADMIN.union(CapabilitySet::DAC_OVERRIDE);

/// Drops all other capabilities, for this thread and those that it starts. Executed programs gain
/// no privileges (`no_new_privs`, prctl(2)) and have no capabilities (the bounding set,
/// capabilities(7)). A failure is a warning.
pub fn enter() {
    keep_only(KEPT);
}

fn keep_only(kept: CapabilitySet) {
    let given_up = set_no_new_privs(true).and_then(|()| {
        let caps = capabilities(None)?;
        // The first unknown capability ends the set.
        for number in 0..u64::BITS {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            if remove_capability_from_bounding_set(capability).is_err() {
                break;
            }
        }
        let rest = CapabilitySets {
            effective: caps.effective & kept,
            permitted: caps.permitted & kept,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, rest)
    });
    if let Err(errno) = given_up {
        log::warn!("not all privileges were dropped: {errno}");
    }
}

/// Installs the filter of system calls for all threads. Comes last, because the filter also refuses
/// calls that mounting and starting a session need.
pub fn filter(needs: FilterNeeds) {
    if let Err(error) = filter::install(needs) {
        log::warn!("no system calls are refused (seccomp): {error}");
    }
}
