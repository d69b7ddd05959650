//! A mount from its start to its end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use defuse_compose::{Source, Switch};
use defuse_fs::FileSystem;
use defuse_fuse::abi::FUSE_OVER_IO_URING;
use defuse_fuse::mount::{self, How, Mounted, connection_id};
use defuse_fuse::{Ended, Session, Statistics};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::iterator::Signals;

use crate::control;
use crate::daemon::Ready;
use crate::error::{Failure, Result};
use crate::mount::CheckedMount;
use crate::registry::{self, Entry, Found};
use crate::sandbox::{self, Needs};
use crate::signals;
use crate::{paths, umount};

/// Time between two writes of the file of statistics.
const STATS_EVERY: Duration = Duration::from_secs(5);

/// Mounts, reports to `ready`, and serves until the mount has ended.
pub fn run(plan: &CheckedMount, ready: Ready) -> Result {
    let mut notes = Vec::new();
    let (session, companions) = match start(plan, &mut notes) {
        Ok(started) => started,
        Err(failure) => {
            ready.tell(Err(&failure));
            return Err(failure);
        }
    };
    ready.tell(Ok(&notes));
    let outcome = not_durable(&plan.mountpoint, session.wait());
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
    fs.detached().map_err(|errno| {
        Failure::Failed(format!("{source}: not all changes could be made durable: {errno}"))
    })
}

/// Fails where the file system could not make everything durable at its end.
fn not_durable(mountpoint: &Path, ended: Ended) -> Result {
    ended.durable.map_err(|errno| {
        Failure::Failed(format!(
            "{}: unmounted, but not everything could be made durable: {errno}; look at the source for \
             the cause, and compare what was written last",
            mountpoint.display()
        ))
    })
}

/// Mounts and starts serving. Adds messages for the user to `notes`.
fn start(plan: &CheckedMount, notes: &mut Vec<String>) -> Result<(Session, Companions)> {
    raise_file_limit();
    let (fs, writable) = plan.source.open_with_switch(&plan.settings.source)?;
    // From here on a signal must not leave a mount behind.
    let caught = signals::catch().map_err(Failure::failed)?;
    umount::clear_dead(&plan.mountpoint)?;
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
    let mounted = mount::mount(&plan.mountpoint, &options).map_err(Failure::failed)?;
    // Others than root unmount with a set-user-id program.
    let sandboxed = plan.settings.sandbox && !matches!(mounted.how, How::Helper(_));
    if sandboxed {
        sandbox::enter();
    }
    log::info!("mounted {} on {}", plan.source.text().display(), mounted.mountpoint.display());
    let (session, companions) = serve(plan, (fs, writable), mounted, caught)?;
    if sandboxed {
        let needs = needs(&plan.source);
        let rings = needs.rings || session.negotiated().uses(FUSE_OVER_IO_URING);
        sandbox::filter(Needs { unmounts: true, rings, ..needs });
    }
    Ok((session, companions))
}

/// The system calls that serving `source` needs.
pub fn needs(source: &Source) -> Needs {
    let about = source.kind.about();
    let handles = source.directory().is_some();
    Needs { handles, rings: about.rings, network: about.network, unmounts: false }
}

/// Raises the limit of open files: every open file of the mount may need one here, so the usual 1024 would be
/// too few. The default is low for programs that use select(2), and this one does not.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::warn!("the limit of open files stays {:?}: {error}", limit.current);
    }
}

fn serve(
    plan: &CheckedMount,
    (fs, writable): (Arc<dyn FileSystem>, Switch),
    mounted: Mounted,
    caught: Signals,
) -> Result<(Session, Companions)> {
    let Mounted { device, mountpoint, .. } = mounted;
    let can_only_be_read = writable.is_none() && fs.caps().read_only;
    let session = Session::start(device, fs, &plan.settings.session).map_err(|error| {
        // The mount has no session.
        let _ = mount::unmount(&mountpoint, true);
        Failure::failed(error)
    })?;
    for decision in &session.negotiated().decisions {
        log::debug!("INIT: {decision}");
    }
    let writable = (writable, can_only_be_read);
    let companions = Companions::start(plan, &session, (mountpoint, writable), caught);
    Ok((session, companions))
}

/// Threads and files beside a session. The session works without them, so a failure is a warning.
struct Companions {
    registered: Option<Found>,
    stats_file: Option<StatsFile>,
}

impl Companions {
    fn start(
        plan: &CheckedMount,
        session: &Session,
        (mountpoint, writable): (PathBuf, (Switch, bool)),
        caught: Signals,
    ) -> Companions {
        let connection = connection_id(&mountpoint);
        let registered = connection.and_then(|connection| {
            // The socket first: a process that finds the entry may connect at once.
            let found = registry::place(connection).and_then(|file| {
                listen(&registry::socket_beside(&file), session, writable);
                register(plan, connection, &mountpoint)
            });
            found.map_err(|failure| log::warn!("{failure}")).ok()
        });
        let stats_file = plan.args.stats_file.as_deref();
        let stats_file = stats_file.map(|path| StatsFile::start(path, session.statistics()));
        let target = signals::Target {
            mountpoint,
            connection,
            connections: signals::connections(),
            statistics: session.statistics(),
        };
        if let Err(error) = signals::serve(caught, target) {
            log::warn!("signals are not heard: {error}");
        }
        Companions { registered, stats_file }
    }

    /// Ends them. Leaves a failure in the registry, for the process that unmounts to report.
    fn end(self, failure: Option<&Failure>) {
        if let Some(file) = self.stats_file {
            file.end();
        }
        // Last, because other processes take it for the end.
        if let Some(found) = self.registered {
            match failure {
                Some(failure) => found.leave_failure(&failure.to_string()),
                None => found.remove(),
            }
        }
    }
}

fn listen(socket: &Path, session: &Session, writable: (Switch, bool)) {
    if let Err(error) = control::serve(socket, session, writable) {
        log::warn!("no control socket {}: {error}", socket.display());
    }
}

fn register(plan: &CheckedMount, connection: u32, mountpoint: &Path) -> Result<Found> {
    let source = plan.source.text().to_string_lossy().into_owned();
    let mut entry = Entry::of_this_process(connection, source, mountpoint);
    entry.fstype = format!("fuse.{}", plan.settings.mount.subtype);
    entry.options = plan.lists.clone();
    registry::write(&entry)
}

/// A file with the statistics, at most [`STATS_EVERY`] old.
struct StatsFile {
    path: PathBuf,
    statistics: Statistics,
    end: mpsc::Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl StatsFile {
    fn start(path: &Path, statistics: Statistics) -> StatsFile {
        let (end, ended) = mpsc::channel();
        let (file, source) = (path.to_path_buf(), statistics.clone());
        let run = move || {
            write_stats(&file, &source);
            while ended.recv_timeout(STATS_EVERY) == Err(RecvTimeoutError::Timeout) {
                write_stats(&file, &source);
            }
        };
        let thread = thread::Builder::new().name("defuse-stats".to_owned()).spawn(run);
        let thread = thread.map_err(|error| log::warn!("no statistics file: {error}")).ok();
        StatsFile { path: path.to_path_buf(), statistics, end, thread }
    }

    fn end(self) {
        drop(self.end);
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
        write_stats(&self.path, &self.statistics);
    }
}

fn write_stats(path: &Path, statistics: &Statistics) {
    let written = serde_json::to_vec(&statistics.snapshot())
        .map_err(std::io::Error::from)
        .and_then(|text| paths::write_atomically(path, &text));
    if let Err(error) = written {
        log::warn!("cannot write statistics to {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::Errno;
    use defuse_fs::layer::{Action, Fault, Method, Rule, When};
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
        for (action, code) in [(Action::Fail(Errno::ENOSPC), Some(1)), (Action::Short(0), None)] {
            let dir = tempfile::tempdir().unwrap();
            let fault = Arc::new(Fault::new(defuse_memory::Memory::new(Default::default()), 1));
            fault.set_rules(&[Rule { method: Some(Method::Syncfs), when: When::Always, action }]);
            let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
            let session =
                Session::start(mounted.device, fault, &SessionOptions::default()).unwrap();
            mount::unmount(dir.path(), false).unwrap();
            let outcome = not_durable(dir.path(), session.wait());
            assert_eq!(outcome.as_ref().err().map(Failure::code), code);
            let text = outcome.err().map_or(String::new(), |failure| failure.to_string());
            assert_eq!(text.contains(dir.path().to_str().unwrap()), code.is_some(), "{text}");
        }
    }
}
