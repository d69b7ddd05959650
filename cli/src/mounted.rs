//! A mount from its start to its end.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use defuse_compose::{ParsedSource, WriteSwitch};
use defuse_fs::FileSystem;
use defuse_fs::layer::SynchronousLayer;
use defuse_fuse::abi::{FUSE_OVER_IO_URING, FUSE_WRITEBACK_CACHE};
use defuse_fuse::mount::{
    self, HelperWatch, MountMethod, MountOptions, PreparedMount, SyncFs, connection_id,
};
use defuse_fuse::{Session, SessionEnd, SessionStatistics};
use signal_hook::iterator::Signals;

use crate::control;
use crate::daemon::{self, ReadyReceiver};
use crate::error::{CommandFailure, Result};
use crate::mount::CheckedMount;
use crate::options::OptionSettings;
use crate::registry::{self, RegisteredMount, RegistryEntry};
use crate::sandbox::keeper::{KeeperHandle, KeeperOrder, KeeperTask};
use crate::sandbox::{self, DaemonNamespaces, FilterNeeds, SandboxExtent};
use crate::signals;
use crate::unmount_watch::UnmountWatch;
use crate::{paths, umount};

/// Time between two writes of the file of statistics.
const STATS_EVERY: Duration = Duration::from_secs(5);

/// Time limit of threads that have the file system at its end.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// Mounts, reports to `ready`, and serves until the mount has ended.
pub fn run(plan: &CheckedMount, ready: ReadyReceiver) -> Result {
    let mut notes = Vec::new();
    let (session, mut companions, fs) = match start(plan, &mut notes) {
        Ok(started) => started,
        Err(failure) => {
            ready.tell(Err(&failure));
            return Err(failure);
        }
    };
    ready.tell(Ok(&notes));
    session.wait_for_end();
    companions.watches = None;
    // Until it ends, this process has the image or the directory. A process that opens it meanwhile
    // sees that it need not wait for long.
    daemon::show_the_end();
    let outcome = check_durable(&plan.mountpoint, session.wait());
    release(fs);
    if let Err(failure) = &outcome {
        log::error!("{failure}");
    }
    companions.end(outcome.as_ref().err());
    log::info!("{} has ended", plan.mountpoint.display());
    outcome
}

/// Detaches the last frontend of a file system, which makes everything durable.
///
/// # Errors
///
/// Fails if that is not possible, with the source.
pub fn make_durable(fs: &dyn FileSystem, source: &str) -> Result<()> {
    fs.detach(defuse_fs::Origin::NONE).map_err(|errno| {
        CommandFailure::Failed(format!("{source}: not all changes could be made durable: {errno}"))
    })
}

/// Releases the file system, which does what it does at its end alone, before this process ends:
/// threads that look at it for a moment must not be the last that have it.
pub fn release(fs: Arc<dyn FileSystem>) {
    let deadline = Instant::now() + RELEASE_PATIENCE;
    while Arc::strong_count(&fs) > 1 {
        if Instant::now() > deadline {
            log::debug!("handlers that do not return have the file system");
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    drop(fs);
}

/// Fails where the file system could not make everything durable at its end.
fn check_durable(mountpoint: &Path, ended: SessionEnd) -> Result {
    ended.durable.map_err(|errno| {
        CommandFailure::Failed(format!(
            "{}: unmounted, but not everything could be made durable: {errno}; look at the source for \
             the cause, and compare what was written last",
            mountpoint.display()
        ))
    })
}

/// A mount that is served, and its file system.
type Started = (Session, MountCompanions, Arc<dyn FileSystem>);

/// Mounts and starts serving. Adds messages for the user to `notes`.
fn start(plan: &CheckedMount, notes: &mut Vec<String>) -> Result<Started> {
    let namespaces = namespaces(plan)?;
    let (fs, writable) = plan.source.open_with_switch(&plan.settings.source)?;
    let MountOptions { sync, dirsync, .. } = plan.settings.mount;
    let fs: Arc<dyn FileSystem> = match sync || dirsync {
        true => Arc::new(SynchronousLayer::new(fs, !sync)),
        false => fs,
    };
    // From here on a signal must not leave a mount behind.
    let caught = signals::catch().map_err(CommandFailure::from_error)?;
    let at = plan.mountpoint.clone();
    namespaces.run_at_home(move || umount::clear_dead(&at))??;
    let mut options = plan.settings.mount.clone();
    if fs.caps().read_only && !options.ro {
        let source = plan.source.text();
        let source = source.display();
        notes.push(format!(
            "{source} can only be read: mounted read-only (with --foreground or --log-file the log has the \
             reason)"
        ));
        options.ro = true;
    }
    for taken in options.restrict(fs.caps().denied) {
        let source = plan.source.text();
        let source = source.display();
        notes.push(format!("the source {source} does not allow {taken}: mounted with no{taken}"));
    }
    notes.extend(fs.notes());
    let delays_changes = fs.caps().delays_changes && !options.ro;
    options.syncfs.get_or_insert(delays_changes);
    let at = plan.mountpoint.clone();
    let mounted = namespaces.run_at_home(move || mount::mount(&at, &options))?;
    let mounted = mounted.map_err(CommandFailure::from_error)?;
    notes.extend(explain_unsynced(&mounted.syncfs, delays_changes));
    // Others than root unmount with a set-user-id program.
    let by_helper = matches!(mounted.how, MountMethod::Helper(_));
    let sandboxed = plan.settings.sandbox != SandboxExtent::None && !by_helper;
    if sandboxed {
        sandbox::enter();
    }
    log::info!("mounted {} on {}", plan.source.text().display(), mounted.mountpoint.display());
    let mountpoint = mounted.mountpoint.clone();
    let offered = (Arc::clone(&fs), writable);
    let (session, companions) = serve(plan, offered, (mounted, &namespaces), caught)?;
    if companions.registered.is_none() {
        let why = namespaces.run_at_home(registry::ensure_dir)?.err();
        let why = why.map_or("see the log".to_owned(), |failure| failure.to_string());
        notes.push(format!(
            "the mount is not registered: `defuse list` and `defuse stat` know less about it, and only its user and \
             root wait for its end by `defuse umount`: {why}"
        ));
    }
    if let Err(failure) = namespaces.confine() {
        // No process would serve the mount.
        if let Some(keeper) = &companions.keeper {
            keeper.order(&KeeperOrder::Unmount(false));
            keeper.order(&KeeperOrder::Remove);
        }
        let _ = mount::unmount(&mountpoint, true);
        return Err(failure);
    }
    if sandboxed {
        let needs = needs(&plan.source);
        let rings = needs.rings || session.negotiated_init().uses(FUSE_OVER_IO_URING);
        let unmounts = companions.keeper.is_none();
        sandbox::filter(FilterNeeds { unmounts, rings, ..needs });
    }
    Ok((session, companions, fs))
}

/// The note about a mount whose file system sync(2) does not reach.
fn explain_unsynced(syncfs: &SyncFs, delays_changes: bool) -> Option<String> {
    let reason = match syncfs {
        SyncFs::Impossible { step, errno } => format!("{step}: {errno}"),
        SyncFs::Reached | SyncFs::NotWanted => return None,
    };
    let bound =
        if delays_changes { ", and a commit makes all durable in time (commit=)" } else { "" };
    Some(format!(
        "sync(1) and syncfs(2) make nothing durable on this mount, fsync(2) does{bound} ({reason}); \
         no_syncfs omits this note"
    ))
}

/// A namespace for the daemon, if its mount can be made and removed from there.
fn namespaces(plan: &CheckedMount) -> Result<DaemonNamespaces> {
    // The parent process mounted, and unmounts.
    let OptionSettings { sandbox, mount, .. } = &plan.settings;
    if plan.mountpoint.starts_with("/dev/fd") {
        if mount.auto_unmount {
            return Err(CommandFailure::Failed(format!(
                "auto_unmount is not possible for {}: the process that opened it mounts and unmounts; give the option to that one",
                plan.mountpoint.display()
            )));
        }
        return Ok(DaemonNamespaces::stay());
    }
    let namespaces = DaemonNamespaces::leave(&[&plan.source], *sandbox, !mount.nodev)?;
    if mount.auto_unmount { namespaces.start_keeper() } else { Ok(namespaces) }
}

/// Starts the process that unmounts what fusermount3 may not look at.
fn start_watch(mountpoint: &Path) -> Result<UnmountWatch> {
    UnmountWatch::start(mountpoint).map_err(|error| {
        let _ = mount::unmount(mountpoint, true);
        CommandFailure::Failed(format!(
            "no process for auto_unmount ({error}): leave the option out"
        ))
    })
}

/// The system calls that serving `source` needs.
pub fn needs(source: &ParsedSource) -> FilterNeeds {
    let about = source.kind.facts();
    let handles = source.directory().is_some();
    FilterNeeds { handles, rings: about.rings, network: about.network, unmounts: false }
}

fn serve(
    plan: &CheckedMount,
    (fs, writable): (Arc<dyn FileSystem>, WriteSwitch),
    (mounted, namespaces): (PreparedMount, &DaemonNamespaces),
    caught: Signals,
) -> Result<(Session, MountCompanions)> {
    let fstype = mounted.fstype(&plan.settings.mount.subtype);
    let PreparedMount { device, mountpoint, watch, .. } = mounted;
    let watches = match watch {
        Some(helper) => Some((helper, start_watch(&mountpoint)?)),
        None => None,
    };
    let can_only_be_read = writable.is_none() && fs.caps().read_only;
    let mut options = plan.settings.session.clone();
    namespaces.adapt(&mut options);
    let prepared = MountRegistration::prepare(plan, (&mountpoint, fstype), namespaces);
    let started = prepared.and_then(|registration| {
        let session = Session::start(device, fs, &options).map_err(CommandFailure::from_error)?;
        Ok((registration, session))
    });
    let (registration, session) = started.inspect_err(|_| {
        // The mount has no session.
        let _ = namespaces.run_at_home(move || mount::unmount(&mountpoint, true));
    })?;
    for decision in &session.negotiated_init().decisions {
        log::debug!("INIT: {decision}");
    }
    let writable = (writable, can_only_be_read);
    let companions =
        MountCompanions::start(plan, &session, (registration, writable), caught, namespaces);
    Ok((session, MountCompanions { watches, ..companions }))
}

/// The entry of a mount, and the process that removes it, before requests are served.
struct MountRegistration {
    mountpoint: PathBuf,
    connection: Option<u32>,
    /// The file, and its content.
    entry: Option<(PathBuf, RegistryEntry)>,
    abort: Option<OwnedFd>,
    keeper: Option<Arc<KeeperHandle>>,
}

impl MountRegistration {
    fn prepare(
        plan: &CheckedMount,
        (mountpoint, fstype): (&Path, String),
        namespaces: &DaemonNamespaces,
    ) -> Result<MountRegistration> {
        let mountpoint = mountpoint.to_path_buf();
        let entry = RegistryEntry { fstype, ..entry(plan, &mountpoint) };
        let find = move || {
            let connection = connection_id(&mountpoint);
            let abort = connection.and_then(signals::open_abort);
            let entry = connection.and_then(|connection| {
                let file = registry::place(connection);
                let file = file.map_err(|failure| log::warn!("{failure}")).ok()?;
                Some((file, RegistryEntry { connection, ..entry }))
            });
            MountRegistration { mountpoint, connection, entry, abort, keeper: None }
        };
        let found = namespaces.run_at_home(find)?;
        let auto_unmount = plan.settings.mount.auto_unmount;
        let mut task = KeeperTask::default()
            .unmount(&found.mountpoint, found.connection)
            .unmount_at_death(auto_unmount);
        if let Some((file, entry)) = &found.entry {
            task = task.unregister(file, entry.clone());
        }
        let keeper = namespaces.entrust(task.write(plan.args.stats_file.as_deref()))?;
        Ok(MountRegistration { keeper, ..found })
    }
}

fn entry(plan: &CheckedMount, mountpoint: &Path) -> RegistryEntry {
    let source = plan.source.text().to_string_lossy().into_owned();
    let mut entry = RegistryEntry::for_this_process(0, source, mountpoint);
    entry.options = plan.lists.clone();
    entry
}

/// Threads and files beside a session. The session works without them, so a failure is a warning.
struct MountCompanions {
    registered: Option<RegisteredMount>,
    stats_file: Option<StatsFile>,
    keeper: Option<Arc<KeeperHandle>>,
    /// The processes that unmount if this one is killed: fusermount3, and one of ours.
    watches: Option<(HelperWatch, UnmountWatch)>,
}

impl MountCompanions {
    fn start(
        plan: &CheckedMount,
        session: &Session,
        (registration, writable): (MountRegistration, (WriteSwitch, bool)),
        caught: Signals,
        namespaces: &DaemonNamespaces,
    ) -> MountCompanions {
        let MountRegistration { mountpoint, connection, entry, abort, keeper } = registration;
        let register = move || {
            let (file, entry) = entry?;
            // The socket first: a process that finds the entry may connect at once.
            let socket = registry::socket_beside(&file);
            let listener = control::listen(&socket);
            let no_socket = |error| log::warn!("no control socket {}: {error}", socket.display());
            let listener = listener.map_err(no_socket).ok();
            let found = registry::write(&entry);
            Some((listener, found.map_err(|failure| log::warn!("{failure}")).ok()))
        };
        let registered =
            namespaces.run_at_home(register).map_err(|failure| log::warn!("{failure}"));
        let (listener, registered) = registered.ok().flatten().unwrap_or_default();
        if let Some(listener) = listener
            && let Err(error) = control::serve(listener, control::for_session(session, writable))
        {
            log::warn!("the control socket does not answer: {error}");
        }
        let stats_file = plan.args.stats_file.as_deref();
        let stats_file =
            stats_file.map(|path| StatsFile::start(path, session.statistics(), keeper.clone()));
        let target = signals::SignalTarget {
            mountpoint,
            connection,
            abort,
            keeper: keeper.clone(),
            caches_writes: session.negotiated_init().uses(FUSE_WRITEBACK_CACHE),
            statistics: session.statistics(),
        };
        if let Err(error) = signals::serve(caught, target) {
            log::warn!("signals are not heard: {error}");
        }
        MountCompanions { registered, stats_file, keeper, watches: None }
    }

    /// Ends them. Leaves a failure in the registry, for the process that unmounts to report.
    fn end(self, failure: Option<&CommandFailure>) {
        if let Some(file) = self.stats_file {
            file.end();
        }
        // Last, because other processes take it for the end.
        match (self.keeper, self.registered, failure) {
            (Some(keeper), registered, failure) => {
                match failure {
                    Some(failure) if registered.is_some() => {
                        keeper.order(&KeeperOrder::Leave(failure.to_string()));
                    }
                    _ => {
                        keeper.order(&KeeperOrder::Remove);
                    }
                }
                keeper.end();
            }
            (None, Some(found), Some(failure)) => found.leave_failure(&failure.to_string()),
            (None, Some(found), None) => found.remove(),
            (None, None, _) => {}
        }
    }
}

/// A file with the statistics, at most [`STATS_EVERY`] old.
struct StatsFile {
    path: PathBuf,
    keeper: Option<Arc<KeeperHandle>>,
    statistics: SessionStatistics,
    end: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl StatsFile {
    fn start(
        path: &Path,
        statistics: SessionStatistics,
        keeper: Option<Arc<KeeperHandle>>,
    ) -> StatsFile {
        let (end, ended) = mpsc::channel();
        let (file, source) = (path.to_path_buf(), statistics.clone());
        let by = keeper.clone();
        let run = move || {
            write_stats(&file, &source, by.as_deref());
            while ended.recv_timeout(STATS_EVERY) == Err(RecvTimeoutError::Timeout) {
                write_stats(&file, &source, by.as_deref());
            }
        };
        let thread = thread::Builder::new().name("defuse-stats".to_owned()).spawn(run);
        let thread = thread.map_err(|error| log::warn!("no statistics file: {error}")).ok();
        StatsFile { path: path.to_path_buf(), keeper, statistics, end, thread }
    }

    fn end(self) {
        drop(self.end);
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
        write_stats(&self.path, &self.statistics, self.keeper.as_deref());
    }
}

fn write_stats(path: &Path, statistics: &SessionStatistics, keeper: Option<&KeeperHandle>) {
    let text = serde_json::to_string(&statistics.snapshot()).map_err(std::io::Error::from);
    let written = text.and_then(|text| match keeper {
        Some(keeper) => {
            keeper.order(&KeeperOrder::Statistics(text));
            Ok(())
        }
        None => paths::write_atomically(path, text.as_bytes()),
    });
    if let Err(error) = written {
        log::warn!("cannot write statistics to {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::Errno;
    use defuse_fs::layer::{FaultAction, FaultLayer, FaultRule, FaultTrigger, Method};
    use defuse_fuse::SessionOptions;
    use defuse_fuse::mount::MountOptions;

    use super::*;
    use crate::sources::SOURCES;

    #[test]
    fn only_a_source_that_does_its_own_io_by_rings_may_make_them() {
        let needs = |text: &str| needs(&SOURCES.parse(text.as_ref()).unwrap());
        assert!(needs("uhs:/image").rings && !needs("uhs:/image").handles);
        for text in ["memory:", "passthrough:/srv", "socket:/s", "fuse:sshfs", "example:"] {
            assert!(!needs(text).rings, "{text}");
        }
    }

    /// A mount ended with exit code 0 whatever its file system had lost at the end.
    #[test]
    fn a_mount_that_could_not_make_all_data_durable_fails_with_its_path() {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            println!("skipped: needs root and /dev/fuse");
            return;
        }
        for (action, code) in
            [(FaultAction::Fail(Errno::ENOSPC), Some(1)), (FaultAction::Short(0), None)]
        {
            let dir = tempfile::tempdir().unwrap();
            let fault = Arc::new(FaultLayer::new(
                defuse_memory::MemoryFileSystem::new(Default::default()),
                1,
            ));
            fault.set_rules(&[FaultRule {
                method: Some(Method::Syncfs),
                when: FaultTrigger::Always,
                action,
            }]);
            let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
            let session =
                Session::start(mounted.device, fault, &SessionOptions::default()).unwrap();
            mount::unmount(dir.path(), false).unwrap();
            let outcome = check_durable(dir.path(), session.wait());
            assert_eq!(outcome.as_ref().err().map(CommandFailure::code), code);
            let text = outcome.err().map_or(String::new(), |failure| failure.to_string());
            assert_eq!(text.contains(dir.path().to_str().unwrap()), code.is_some(), "{text}");
        }
    }
}
