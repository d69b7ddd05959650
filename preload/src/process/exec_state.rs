//! The execution state as text: the state of a program, for the next one.
//!
//! The first line has the limit of descriptors, the next id of an open file, the slot of the
//! process with the descriptor of its lock, user and group if they are in another user namespace,
//! and the working directory. Then come connections (`@`), each with the number of its mount, its
//! descriptors and its known properties, and the descriptors that are ours. Paths are written in
//! hexadecimal, so that any byte may be in them.
//!
//! If another process serves a mount, the next program takes its open files over by their numbers:
//! the program before makes a connection for it, which has exactly the open files that stay open,
//! and the rights of the user that the process is at that moment. So a file whose name is gone
//! stays open. All other files of that mount end with the old connection. On other mounts, open
//! files are opened again by their paths, or are descriptors of the kernel.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_direct::{OpenFileState, OpenHow, WalkStart};
use defuse_fs::{Fh, FileKind, Ino, LockOwner, OpenFlags};
use defuse_remote::{HandoverClient, InodeHandover, OpenFileHandover, RemoteClient};

use crate::machine::descriptors::{keep_above, take_owned};
use crate::machine::{state_pipe, sys};
use crate::process::compose::{InheritedConnection, RelayFileSystem};
use crate::process::opened_by::OpenPath;
use crate::process::state::RunProcess;
use crate::process::table::DescriptorEntry;
use crate::process::{holders, kernel_cwd, user_namespace};

/// The execution state for the next program.
pub struct OutgoingState {
    pub text: String,
    /// Connections and lower open files that the text names. They are closed if no program takes
    /// them over.
    _descriptors: Vec<OwnedFd>,
}

impl OutgoingState {
    /// All that the next program goes on with.
    pub fn collect(process: &'static RunProcess) -> OutgoingState {
        process.relays().for_each(RelayFileSystem::report_reads);
        let all = process.view().table.list_entries();
        let (closed, kept): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(fd, _)| closes_at_exec(*fd));
        let inherited = ExecHandover::prepare(process, &closed, &kept);
        let next = |(mount, handovers): (usize, &Vec<InodeHandover>)| {
            NextConnection::new(process, mount, handovers)
        };
        let successors = inherited.handovers.iter().enumerate().filter_map(next).collect();
        let mut writer = StateWriter { process, inherited, successors, lower: Vec::new() };
        let limit = process.limit.load(Ordering::Relaxed);
        let (slot, slot_fd) = holders::own_slot();
        let (next_id, cwd) = (process.client.next_file_id(), writer.cwd());
        let users = match user_namespace::is_entered() {
            true => {
                let own = process.task().credentials();
                format!("{}:{}", own.uid, own.gid)
            }
            false => "-".to_owned(),
        };
        let mut text = format!("{limit} {next_id} {slot} {slot_fd} {users} {cwd}\n");
        let lines = writer.lines(&kept);
        let mut descriptors = writer.lower;
        for NextConnection { mount, client, fd, lanes, .. } in writer.successors {
            let (fd_number, known) = (fd.as_raw_fd(), client.to_text());
            let lanes_number = lanes.as_ref().map_or(-1, AsRawFd::as_raw_fd);
            text += &format!("@ {mount} {fd_number} {lanes_number} {known}\n");
            descriptors.extend([fd].into_iter().chain(lanes));
            client.leave_to_child();
        }
        OutgoingState { text: text + &lines, _descriptors: descriptors }
    }
}

/// A number of the program, and its open file.
type NumberedEntry = (i32, Arc<DescriptorEntry>);

/// The things that the next program's connections take over, and where.
struct ExecHandover {
    /// Of each mount.
    handovers: Vec<Vec<InodeHandover>>,
    /// The mount of each open file, and its place among the files that are handed over. Duplicates
    /// are one open file.
    entries: HashMap<*const DescriptorEntry, (usize, usize)>,
    cwd: Option<(usize, usize)>,
}

impl ExecHandover {
    fn prepare(
        process: &'static RunProcess,
        closed: &[NumberedEntry],
        kept: &[NumberedEntry],
    ) -> ExecHandover {
        // Inodes with a descriptor that closes at exec: that releases the record locks of the
        // process.
        let files = closed.iter().filter(|(_, entry)| !entry.backed && !entry.file().is_path());
        let inode = |(_, entry): &NumberedEntry| {
            Some((process.index_of(entry.file().mount())?, entry.file().exec_state().ino))
        };
        let closed: HashSet<(usize, Ino)> = files.filter_map(inode).collect();

        let handovers = vec![Vec::new(); process.mounts.len()];
        let mut all = ExecHandover { handovers, entries: HashMap::new(), cwd: None };
        if let Some((mount, ino)) = process.task().cwd().working_directory()
            && let Some(mount) = process.index_of(mount)
        {
            all.cwd = all.add(process, mount, InodeHandover { ino, open: None });
        }
        for (_, entry) in kept.iter().filter(|(_, entry)| !entry.backed) {
            let known = all.entries.contains_key(&Arc::as_ptr(entry));
            let mount = process.index_of(entry.file().mount()).filter(|_| !known);
            if let Some(mount) = mount
                && let Some(relay) = &process.mounts[mount].relay
            {
                let OpenFileState { ino, fh, flags, id, .. } = entry.file().exec_state();
                // A connection that was not used has no locks of this process, and may still be the
                // parent's.
                let process_locks = !relay.is_unused() && !closed.contains(&(mount, ino));
                let (flags, owner) = (OpenFlags(flags), LockOwner(id));
                let open = fh.map(|fh| OpenFileHandover { fh, flags, owner, process_locks });
                let place = all.add(process, mount, InodeHandover { ino, open });
                all.entries.extend(place.map(|place| (Arc::as_ptr(entry), place)));
            }
        }
        all
    }

    /// Adds an open file to hand over, of a mount that another process serves.
    fn add(
        &mut self,
        process: &RunProcess,
        mount: usize,
        handover: InodeHandover,
    ) -> Option<(usize, usize)> {
        process.mounts[mount].relay.as_ref()?;
        let all = &mut self.handovers[mount];
        all.push(handover);
        Some((mount, all.len() - 1))
    }
}

/// The connection of the next program to a mount.
struct NextConnection {
    mount: usize,
    client: RemoteClient,
    /// The result for each open file that is handed over.
    taken: Vec<defuse_fs::Result<()>>,
    /// Duplicates of its descriptors, which the next program inherits.
    fd: OwnedFd,
    lanes: Option<OwnedFd>,
}

impl NextConnection {
    fn new(
        process: &RunProcess,
        mount: usize,
        handovers: &[InodeHandover],
    ) -> Option<NextConnection> {
        let HandoverClient { client, taken } =
            process.mounts[mount].relay.as_ref()?.prepare_exec(handovers)?;
        let inherited = |fd: &dyn AsRawFd| keep_above(fd.as_raw_fd(), process.floor, false);
        let fd = inherited(&client.as_fd()).ok()?;
        let lanes = client.unused_lanes().and_then(|lanes| inherited(&lanes).ok());
        Some(NextConnection {
            mount,
            client,
            taken,
            fd: take_owned(fd),
            lanes: lanes.map(take_owned),
        })
    }
}

/// The text in the making.
struct StateWriter {
    process: &'static RunProcess,
    inherited: ExecHandover,
    successors: Vec<NextConnection>,
    /// Lower open files, for the next program to inherit.
    lower: Vec<OwnedFd>,
}

impl StateWriter {
    fn is_taken(&self, (mount, place): (usize, usize)) -> bool {
        let successor = self.successors.iter().find(|successor| successor.mount == mount);
        successor.is_some_and(|successor| successor.taken.get(place).is_some_and(Result::is_ok))
    }

    /// The working directory: `mount:inode`, or its path.
    fn cwd(&self) -> String {
        let process = self.process;
        let cwd = process.task().cwd();
        let Some((_, ino)) = cwd.working_directory() else { return String::new() };
        match self.inherited.cwd {
            Some(place) if self.is_taken(place) => format!("{}:{}", place.0, ino.0),
            _ => hex(&process.client.getcwd(process.task()).unwrap_or_default()),
        }
    }

    /// All descriptors that stay open, a line for each.
    fn lines(&mut self, kept: &[NumberedEntry]) -> String {
        let mut known = HashMap::new();
        let mut lines = String::new();
        for (fd, entry) in kept {
            // Duplicates are one open file.
            let what = known.entry(Arc::as_ptr(entry));
            let what = what.or_insert_with(|| self.describe(entry));
            lines += &format!("{fd} {what}\n");
        }
        lines
    }

    /// All but the number of a descriptor's line.
    fn describe(&mut self, entry: &Arc<DescriptorEntry>) -> String {
        let process = self.process;
        let taken = self.describe_taken_over(entry);
        // An open file that is taken over needs no other number.
        let ino = match &taken {
            Some(_) => 0,
            None => {
                let stat = process.client.fstat(self.process.task(), entry.file());
                stat.map_or(0, |stat| stat.attr.st_ino)
            }
        };
        let mut open = entry.file().flags().0;
        if entry.file().kind() == FileKind::Directory {
            open |= libc::O_DIRECTORY as u32;
        }
        let cells = entry.cells.map_or(-1, i64::from);
        let backed = u8::from(entry.backed);
        let (lower, taken) = (self.add_lower(entry), taken.unwrap_or_default());
        format!(
            "{backed} {open} {cells} {ino} {lower} {}{taken}",
            hex(&entry.opened_by.path(&process.client, process.task()))
        )
    }

    /// The number at which the next program finds the lower open file, with the locks on it; -1
    /// where there is none.
    fn add_lower(&mut self, entry: &DescriptorEntry) -> i32 {
        let floor = self.process.floor;
        let kept = entry.lower.as_ref().map(|fd| keep_above(fd.as_raw_fd(), floor, false));
        let Some(Ok(fd)) = kept else { return -1 };
        self.lower.push(take_owned(fd));
        fd
    }

    /// The facts about an open file that the next program, whose connection has taken it over,
    /// needs.
    fn describe_taken_over(&self, entry: &Arc<DescriptorEntry>) -> Option<String> {
        let place = *self.inherited.entries.get(&Arc::as_ptr(entry))?;
        if !self.is_taken(place) {
            return None;
        }
        let OpenFileState { ino, fh, kind, stream, needs_flush, id, .. } =
            entry.file().exec_state();
        let (mount, stream, flush) = (place.0, u8::from(stream), u8::from(needs_flush));
        let fh = fh.map_or("-".to_owned(), |fh| fh.0.to_string());
        Some(format!(" {mount} {} {fh} {} {stream} {flush} {id}", ino.0, kind.mode_bits()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn closes_at_exec(fd: i32) -> bool {
    let flags = sys::plain(libc::SYS_fcntl, fd as u64, libc::F_GETFD as u64, 0);
    flags.is_ok_and(|flags| flags & i64::from(libc::FD_CLOEXEC) != 0)
}

/// Reads the execution state that the program before left in `fd`.
pub fn read(fd: i32) -> Option<IncomingState> {
    let text = state_pipe::read(fd)?;
    let (first, rest) = text.split_once('\n')?;
    let mut words = first.split(' ');
    let (limit, next_id) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let holder = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    if let Some((user, group)) = words.next()?.split_once(':') {
        user_namespace::enter(user.parse().ok()?, group.parse().ok()?);
    }
    let cwd = words.next()?.to_owned();
    let (connections, lines): (Vec<_>, Vec<_>) =
        rest.lines().partition(|line| line.starts_with('@'));
    let connections = connections.into_iter().filter_map(connection).collect();
    let lines = lines.into_iter().map(str::to_owned).collect();
    Some(IncomingState { limit, connections, holder, next_id, cwd, lines })
}

/// The connection of a line that begins with `@`.
fn connection(line: &str) -> Option<InheritedConnection> {
    let mut words = line.split(' ').skip(1);
    let (mount, fd) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let lanes = words.next()?.parse().ok().filter(|lanes| *lanes >= 0);
    let known = words.next()?.to_owned();
    let closing = |fd: i32| {
        let close = libc::FD_CLOEXEC as u64;
        sys::plain(libc::SYS_fcntl, fd as u64, libc::F_SETFD as u64, close).ok()?;
        Some(take_owned(fd))
    };
    Some(InheritedConnection { mount, fd: closing(fd)?, lanes: lanes.and_then(closing), known })
}

/// The execution state that the program before left.
pub struct IncomingState {
    /// The limit of descriptors that the program sees.
    pub limit: u32,
    /// The connections that this program has.
    pub connections: Vec<InheritedConnection>,
    /// The slot of this process, and the descriptor of its lock: see [`holders`].
    pub holder: (u32, i32),
    next_id: u64,
    cwd: String,
    lines: Vec<String>,
}

impl IncomingState {
    /// Makes it this process's state.
    pub fn apply(&self, process: &'static RunProcess) {
        process.client.set_next_file_id(self.next_id);
        self.restore_cwd(process);
        let view = process.view();
        // Duplicates of one open file share it: they have the same cells.
        let mut known: Vec<(u32, Arc<DescriptorEntry>)> = Vec::new();
        for line in &self.lines {
            let Some(record) = DescriptorRecord::parse(line) else { continue };
            let shared = known.iter().find(|(cells, _)| Some(*cells) == record.cells);
            let entry = match shared {
                Some((_, entry)) => Some(Arc::clone(entry)),
                None => record.open(process),
            };
            let Some(entry) = entry else { continue };
            if shared.is_none() {
                known.extend(record.cells.map(|cells| (cells, Arc::clone(&entry))));
            }
            let _ = view.table.set(record.fd, entry);
        }
        let kept: HashSet<u32> = known.into_iter().map(|(cells, _)| cells).collect();
        holders::keep_only(&process.shared, |cells| kept.contains(&cells));
    }

    fn restore_cwd(&self, process: &'static RunProcess) {
        if !self.cwd.is_empty() {
            kernel_cwd::note_inherited();
        }
        if let Some((mount, ino)) = self.cwd.split_once(':') {
            let mount = mount.parse().ok().and_then(|at: usize| process.mounts.get(at));
            if let (Some(mount), Ok(ino)) = (mount, ino.parse()) {
                process.client.take_over_cwd(process.task(), &mount.mount, Ino(ino));
            }
        } else if let Some(path) = unhex(&self.cwd).filter(|path| !path.is_empty()) {
            let _ = process.client.chdir(process.task(), &path);
        }
    }
}

struct DescriptorRecord {
    fd: i32,
    backed: bool,
    flags: u32,
    cells: Option<u32>,
    ino: u64,
    /// The number of the lower open file, the same in all lines of duplicates; -1 for none.
    lower: i32,
    path: Vec<u8>,
    /// The place of the mount, and the open file that this program's connection has been given.
    taken: Option<(usize, OpenFileState)>,
}

impl DescriptorRecord {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let record = DescriptorRecord {
            fd: words.next()?.parse().ok()?,
            backed: words.next()? == "1",
            flags: words.next()?.parse().ok()?,
            cells: u32::try_from(words.next()?.parse::<i64>().ok()?).ok(),
            ino: words.next()?.parse().ok()?,
            lower: words.next()?.parse().ok()?,
            path: unhex(words.next()?)?,
            taken: None,
        };
        let taken = parse_taken_over(&mut words, record.flags);
        Some(DescriptorRecord { taken, ..record })
    }

    /// The open file in this process: taken over, or opened again by its path, where that still
    /// leads to the same file. A descriptor that has the bytes needs no more than the inode, and
    /// works without it.
    fn open(&self, process: &'static RunProcess) -> Option<Arc<DescriptorEntry>> {
        let lower = take_inherited(self.lower);
        if let Some(cells) = self.cells {
            process.shared.take_over(cells);
        }
        let file = match &self.taken {
            Some((mount, state)) => {
                let mount = process.mounts.get(*mount)?;
                process.client.take_over(process.task(), &mount.mount, state)
            }
            None => {
                let flags = if self.backed { libc::O_PATH as u32 } else { self.flags };
                let how = OpenHow { flags: flags | libc::O_CLOEXEC as u32, ..OpenHow::default() };
                process.client.open(process.task(), WalkStart::Cwd, &self.path, how)
            }
        };
        process.shared.end_take_over();
        let file = file.ok()?;
        if self.taken.is_none() {
            let stat = process.client.fstat(process.task(), &file).ok()?;
            if stat.attr.st_ino != self.ino {
                return None;
            }
        }
        let cells = file.arena_cells().map(|cells| process.shared.index(cells));
        let entry = DescriptorEntry::new(
            file,
            self.backed,
            OpenPath::from_absolute(self.path.clone()),
            cells,
        );
        Some(Arc::new(entry.with_lower(lower)))
    }
}

/// A descriptor that the program before has left; -1 stands for none.
fn take_inherited(fd: i32) -> Option<OwnedFd> {
    let fd = if fd < 0 { None } else { Some(take_owned(fd)) };
    let close = libc::FD_CLOEXEC as u64;
    fd.filter(|fd| {
        sys::plain(libc::SYS_fcntl, fd.as_raw_fd() as u64, libc::F_SETFD as u64, close).is_ok()
    })
}

/// The end of a descriptor's line: an open file that this program's connection has been given.
fn parse_taken_over<'a>(
    words: &mut impl Iterator<Item = &'a str>,
    flags: u32,
) -> Option<(usize, OpenFileState)> {
    let mut number = || words.next()?.parse::<u64>().ok();
    let (mount, ino) = (usize::try_from(number()?).ok()?, Ino(number()?));
    // `-` for no handle.
    let fh = words.next()?.parse().ok().map(Fh);
    let mut number = || words.next()?.parse::<u64>().ok();
    let kind = FileKind::from_mode(number()? as u32)?;
    let (stream, needs_flush, id) = (number()? == 1, number()? == 1, number()?);
    Some((mount, OpenFileState { ino, fh, kind, flags, stream, needs_flush, id }))
}
