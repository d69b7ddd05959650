//! The keeper of a daemon: a process that stays in the mount namespace of the user, where the
//! daemon, in a namespace of its own, cannot reach anything.
//!
//! It unmounts, removes what the daemon registered, writes the file of statistics, and reads for
//! the daemon the groups of processes. The paths come once, before any request is served; what
//! comes later are orders without paths. If the daemon is killed, the keeper unmounts with
//! `auto_unmount`. Otherwise it ends and leaves everything as it is: the next command clears it
//! away.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::{Caller, Errno, OwnerCapability, SupplementaryGroups};
use defuse_fuse::ProcessGroups;
use defuse_socket::name::{self, SocketInode};
use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::filter;
use crate::error::{CommandFailure, Result};
use crate::registry::{RegisteredMount, RegistrationState, RegistryEntry};
use crate::{inherited, paths, signals};

/// Maximum length of a message in bytes. The longest is a snapshot of all counters.
const MESSAGE_MAX: u64 = 16 << 20;
/// A question about the groups of a process, whose number follows. Other questions are the number
/// of a capability, and then have the process, a user and a group.
const OF_GROUPS: u32 = u32::MAX;
/// In place of a number of groups: the process does not exist.
const NO_PROCESS: u32 = u32::MAX;
/// Maximum number of groups of a process, as in the kernel (`NGROUPS_MAX`).
const GROUPS_MAX: u32 = 65536;

/// All that a keeper may act on. Paths are bytes, because JSON has no others than UTF-8.
#[derive(Default, Serialize, Deserialize)]
pub struct KeeperTask {
    mount: Option<(Vec<u8>, Option<u32>)>,
    /// Unmount also if the daemon is killed.
    auto_unmount: bool,
    entry: Option<(Vec<u8>, RegistryEntry)>,
    files: Vec<Vec<u8>>,
    /// A socket in a directory of any user, and its inode.
    socket: Option<(Vec<u8>, SocketInode)>,
    stats_file: Option<Vec<u8>>,
    held: Vec<Vec<u8>>,
}

impl KeeperTask {
    /// Unmount `mountpoint`, if it still has this connection.
    pub fn unmount(mut self, mountpoint: &Path, connection: Option<u32>) -> KeeperTask {
        self.mount = Some((bytes(mountpoint), connection));
        self
    }

    /// If the daemon is killed, unmount and remove what it registered.
    pub fn unmount_at_death(mut self, auto_unmount: bool) -> KeeperTask {
        self.auto_unmount = auto_unmount;
        self
    }

    /// Remove `entry` and the socket beside it, or record a failure there.
    pub fn unregister(mut self, file: &Path, entry: RegistryEntry) -> KeeperTask {
        self.entry = Some((bytes(file), entry));
        self
    }

    /// Remove these files.
    pub fn remove(mut self, files: &[PathBuf]) -> KeeperTask {
        self.files = files.iter().map(|file| bytes(file)).collect();
        self
    }

    /// Remove the socket, if it still is the file with this inode.
    pub fn unname(mut self, socket: &Path, inode: Option<SocketInode>) -> KeeperTask {
        self.socket = inode.map(|inode| (bytes(socket), inode));
        self
    }

    /// Replace this file.
    pub fn write(mut self, stats_file: Option<&Path>) -> KeeperTask {
        self.stats_file = stats_file.map(bytes);
        self
    }

    /// Keep these directories busy: their file systems are in use, which the namespace of the user
    /// does not show otherwise.
    pub fn hold(mut self, directories: &[PathBuf]) -> KeeperTask {
        self.held = directories.iter().map(|path| bytes(path)).collect();
        self
    }
}

/// An order to the keeper.
#[derive(Serialize, Deserialize)]
pub enum KeeperOrder {
    /// Unmount, or detach if that is in use. True if data in the page cache is to be written first.
    Unmount(bool),
    /// The daemon ends: remove what it registered.
    Remove,
    /// The daemon ends: remove what it registered, but record this failure for the command that
    /// unmounts.
    Leave(String),
    /// Write these statistics to their file.
    Statistics(String),
}

/// The daemon's end of the connection to the keeper.
pub struct KeeperHandle {
    orders: Mutex<BufReader<UnixStream>>,
    groups: Arc<KeeperGroups>,
    process: Mutex<Option<Child>>,
}

impl KeeperHandle {
    /// Starts the process in the namespace of this thread. It executes the program again, so that
    /// it has neither memory nor addresses in common with the daemon.
    pub fn start() -> io::Result<KeeperHandle> {
        let (ours, theirs) = UnixStream::pair()?;
        let (asks, answers) = UnixStream::pair()?;
        inherited::keep_descriptors(&[]);
        let process = Command::new("/proc/self/exe")
            .args(["keep"])
            .env_clear()
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(OwnedFd::from(answers))
            .stderr(Stdio::null())
            .spawn()?;
        Ok(KeeperHandle {
            orders: Mutex::new(BufReader::new(ours)),
            groups: Arc::new(KeeperGroups(Mutex::new(asks))),
            process: Mutex::new(Some(process)),
        })
    }

    /// Sends the keeper the list of all that it may act on, once, and waits until it has given up
    /// everything else.
    pub fn begin(&self, task: &KeeperTask) -> Result {
        self.ask(task).map(|_| ()).map_err(|error| {
            CommandFailure::Failed(format!("the process that unmounts did not start: {error}"))
        })
    }

    /// Carries out `order`. Its messages go to the log. Returns true after an unmount that has
    /// succeeded.
    pub fn order(&self, order: &KeeperOrder) -> bool {
        match self.ask(order) {
            Ok(notes) => {
                notes.log();
                notes.unmounted
            }
            Err(error) => {
                log::error!(
                    "the process that unmounts and removes files does not answer ({error}): use `defuse umount`"
                );
                false
            }
        }
    }

    /// The groups of processes.
    pub fn groups(&self) -> Arc<dyn SupplementaryGroups> {
        Arc::clone(&self.groups) as Arc<dyn SupplementaryGroups>
    }

    /// Ends it, and waits for that: until then it keeps directories busy.
    pub fn end(&self) {
        let orders = lock(&self.orders);
        let _ = orders.get_ref().shutdown(std::net::Shutdown::Both);
        if let Some(mut process) = lock(&self.process).take() {
            let _ = process.wait();
        }
    }

    fn ask(&self, message: &impl Serialize) -> io::Result<KeeperNotes> {
        let mut orders = lock(&self.orders);
        send(orders.get_mut(), message)?;
        receive(&mut orders)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// Lines for the log of the daemon, with their levels.
#[derive(Default, Serialize, Deserialize)]
pub struct KeeperNotes {
    lines: Vec<(String, String)>,
    /// An unmount has succeeded, and nothing was in use.
    pub unmounted: bool,
}

impl KeeperNotes {
    /// Adds a line.
    pub fn add(&mut self, level: log::Level, text: impl fmt::Display) {
        self.lines.push((level.to_string(), text.to_string()));
    }

    /// Writes them to the log.
    pub fn log(&self) {
        for (level, text) in &self.lines {
            log::log!(level.parse().unwrap_or(log::Level::Error), "{text}");
        }
    }
}

/// The groups of processes, from the keeper: the directory /proc of the daemon has no other
/// processes.
struct KeeperGroups(Mutex<UnixStream>);

impl SupplementaryGroups for KeeperGroups {
    fn groups_of(&self, caller: Caller) -> defuse_fs::Result<Vec<u32>> {
        let mut socket = lock(&self.0);
        write_numbers(&mut socket, [OF_GROUPS, caller.pid])?;
        match read_number(&mut socket)? {
            count @ 0..=GROUPS_MAX => (0..count).map(|_| Ok(read_number(&mut socket)?)).collect(),
            _ => Err(Errno::ESRCH),
        }
    }

    fn has_capability(&self, caller: Caller, number: OwnerCapability, owner: (u32, u32)) -> bool {
        let mut socket = lock(&self.0);
        let question = [number as u32, caller.pid, owner.0, owner.1];
        write_numbers(&mut socket, question)
            .and_then(|()| read_number(&mut socket))
            .is_ok_and(|has| has == 1)
    }
}

/// The process of the keeper, which the program starts as `defuse keep`: orders come from the
/// standard input, and process numbers from the standard output.
pub fn run() -> Result {
    inherited::give_up();
    let mut orders = BufReader::new(stream(rustix::stdio::stdin())?);
    let groups = stream(rustix::stdio::stdout())?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    null.and_then(|null| {
        rustix::stdio::dup2_stdin(&null).and_then(|()| rustix::stdio::dup2_stdout(&null))
    })
    .map_err(CommandFailure::from_error)?;
    // Shown by ps(1).
    let _ = rustix::thread::set_name(c"defuse-keeper");
    // A terminal or a service manager signals all processes; this one ends after the daemon.
    let _ = rustix::process::setsid();
    let _caught = signals::catch().map_err(CommandFailure::from_error)?;
    let Some(task) = receive::<KeeperTask>(&mut orders).map_err(CommandFailure::from_error)? else {
        return Ok(());
    };
    let held = task.held.iter().map(|path| {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::open(path_of(path), flags, Mode::empty())
    });
    let _held: Vec<_> = held.collect();
    let socket = task.socket.as_ref().and_then(SocketFile::open);
    give_up(groups)?;
    send(orders.get_mut(), &KeeperNotes::default()).map_err(CommandFailure::from_error)?;
    let mut is_killed = true;
    // A connection that fails is the end of the daemon, too.
    while let Ok(Some(order)) = receive(&mut orders) {
        is_killed &= !matches!(order, KeeperOrder::Remove | KeeperOrder::Leave(_));
        if let (KeeperOrder::Remove, Some(socket)) = (&order, &socket) {
            name::remove_in(&socket.directory, &socket.name, Some(socket.inode));
        }
        let notes = carry_out(&task, order);
        if send(orders.get_mut(), &notes).is_err() {
            break;
        }
    }
    if is_killed && task.auto_unmount {
        carry_out(&task, KeeperOrder::Unmount(false));
        carry_out(&task, KeeperOrder::Remove);
    }
    Ok(())
}

/// A socket in an open directory, which another user may exchange for a link meanwhile.
struct SocketFile {
    directory: OwnedFd,
    name: OsString,
    inode: SocketInode,
}

impl SocketFile {
    fn open((path, inode): &(Vec<u8>, SocketInode)) -> Option<SocketFile> {
        let path = path_of(path);
        let (directory, name) = name::parts(&path).ok()?;
        let directory = name::open_directory(directory).ok()?;
        Some(SocketFile { directory, name: name.to_owned(), inode: *inode })
    }
}

/// Drops what orders do not need. A thread answers about groups, because unmounting can wait for a
/// request for which the daemon needs the groups.
fn give_up(groups: UnixStream) -> Result {
    super::keep_only(super::KEPT_OF_KEEPER);
    // The daemon has the same user. Without this it could enter the namespace by /proc/PID.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(CommandFailure::from_error)?;
    let answer = move || drop(tell_groups(groups));
    std::thread::Builder::new()
        .name("defuse-groups".to_owned())
        .spawn(answer)
        .map_err(CommandFailure::from_error)?;
    if let Err(error) = filter::install_for_keeper() {
        log::warn!("no system calls are refused (seccomp): {error}");
    }
    Ok(())
}

fn carry_out(task: &KeeperTask, order: KeeperOrder) -> KeeperNotes {
    let mut notes = KeeperNotes::default();
    match (order, &task.mount, &task.entry, &task.stats_file) {
        (KeeperOrder::Unmount(syncs), Some((mountpoint, connection)), ..) => {
            return signals::unmount_or_detach(&path_of(mountpoint), *connection, syncs);
        }
        (KeeperOrder::Remove, _, entry, _) => {
            if let Some((file, entry)) = entry {
                make_found(file, entry).remove();
            }
            for file in &task.files {
                // It may be gone.
                let _ = std::fs::remove_file(path_of(file));
            }
        }
        (KeeperOrder::Leave(failure), _, Some((file, entry)), _) => {
            make_found(file, entry).leave_failure(&failure)
        }
        (KeeperOrder::Statistics(text), .., Some(file)) => {
            if let Err(error) = paths::write_atomically(&path_of(file), text.as_bytes()) {
                let path = path_of(file);
                let text = format!("cannot write statistics to {}: {error}", path.display());
                notes.add(log::Level::Warn, text);
            }
        }
        _ => notes.add(log::Level::Error, "an order without an object"),
    }
    notes
}

fn make_found(file: &[u8], entry: &RegistryEntry) -> RegisteredMount {
    RegisteredMount {
        entry: entry.clone(),
        state: RegistrationState::Serving,
        file: path_of(file),
        mounted: None,
    }
}

fn tell_groups(mut socket: UnixStream) -> io::Result<()> {
    loop {
        let question = read_number(&mut socket)?;
        let caller = Caller { pid: read_number(&mut socket)?, ..Caller::default() };
        let capabilities = [OwnerCapability::Chown, OwnerCapability::Fowner];
        if let Some(number) = capabilities.into_iter().find(|number| *number as u32 == question) {
            let owner = (read_number(&mut socket)?, read_number(&mut socket)?);
            let has = ProcessGroups.has_capability(caller, number, owner);
            write_numbers(&mut socket, [u32::from(has)])?;
            continue;
        }
        let answer = match ProcessGroups.groups_of(caller) {
            Ok(groups) if groups.len() <= GROUPS_MAX as usize => {
                std::iter::once(groups.len() as u32)
                    .chain(groups)
                    .flat_map(u32::to_ne_bytes)
                    .collect()
            }
            _ => NO_PROCESS.to_ne_bytes().to_vec(),
        };
        socket.write_all(&answer)?;
    }
}

fn write_numbers<const N: usize>(socket: &mut UnixStream, numbers: [u32; N]) -> io::Result<()> {
    socket.write_all(&numbers.map(u32::to_ne_bytes).concat())
}

fn read_number(socket: &mut UnixStream) -> io::Result<u32> {
    let mut number = [0; 4];
    socket.read_exact(&mut number)?;
    Ok(u32::from_ne_bytes(number))
}

/// A message is a line of JSON.
fn send(socket: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// The next message; `None` if the other process has ended.
fn receive<T: DeserializeOwned>(socket: &mut BufReader<UnixStream>) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    socket.take(MESSAGE_MAX).read_until(b'\n', &mut line)?;
    if line.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_slice(&line)?)) }
}

fn stream(standard: rustix::fd::BorrowedFd<'_>) -> Result<UnixStream> {
    rustix::io::fcntl_dupfd_cloexec(standard, 3)
        .map(UnixStream::from)
        .map_err(CommandFailure::from_error)
}

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn path_of(bytes: &[u8]) -> PathBuf {
    OsString::from_vec(bytes.to_vec()).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
