//! Small files that the server has opened before this client asks for each.
//!
//! A program that opens one file of a directory after the other gets several of them with one request: really open, with their bytes
//! and the versions of their attributes. As long as a file's version stays, to have opened it earlier is the same as to open it
//! now. Such files are closed together, too: with the next request of this kind, when there are many, before any request that could see
//! that one was read, and when this client has removed a name or ends.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use defuse_fs::{
    AccessMode, Caller, Context, Errno, Fh, File, FileKind, Ino, OpenArgs, OpenFlags, Opened,
    Resolved, Result, Versions,
};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode::{self, OpenBytes};
use defuse_wire::encode::Request;
use defuse_wire::vendor::{
    AHEAD_MAX, AheadEnd, AheadFile, Closing, OPEN_AHEAD, OPEN_BYTES_MAX, OpenAhead,
};
use zerocopy::{FromBytes, IntoBytes};

use super::files::ioctl_out;
use super::gains::{Asked, Gains};
use super::{Shared, lock, noted};

/// The most files that are ready. With more, all are closed.
const MOST_READY: usize = 4 * AHEAD_MAX;
/// The most directories that are remembered. With more, all are forgotten.
const MOST_DIRS: usize = 4096;

/// Files that were opened ahead.
#[derive(Default)]
pub(super) struct OpenedAhead {
    files: Mutex<Files>,
    /// The number of those that `files` knows.
    known: AtomicUsize,
    /// The server is to be told that one was read.
    owes: AtomicBool,
    lacks: AtomicBool,
}

#[derive(Default)]
struct Files {
    /// Files for those who will open them.
    ready: HashMap<Ino, Ready>,
    /// Files that are in use.
    given: HashSet<Fh>,
    /// Files that the server is to close.
    closing: Vec<Closing>,
    dirs: HashMap<Ino, Dir>,
    gains: Gains,
    /// Counts files that were given.
    hits: u64,
    /// The caller that asked last.
    caller: Caller,
}

#[derive(Default)]
struct Dir {
    asked: Asked,
    /// The position of the next request; 0 for the begin.
    next: u64,
}

/// An open file, as good as a new one while the version of its attributes stays.
struct Ready {
    version: u64,
    flags: OpenFlags,
    user: (u32, u32),
    opened: Opened,
    bytes: Box<[u8]>,
    read_is_due: bool,
}

impl Ready {
    fn is_for(&self, cx: &Context<'_>, flags: OpenFlags) -> bool {
        self.user == user(cx) && self.flags == flags
    }

    fn closing(&self, ino: Ino) -> Closing {
        Closing { ino: ino.0, fh: self.opened.fh.0, flags: self.flags.0, has_read: 0 }
    }
}

fn user(cx: &Context<'_>) -> (u32, u32) {
    (cx.caller.uid, cx.caller.gid)
}

impl Files {
    fn dir(&mut self, dir: Ino) -> (&mut Dir, &Gains) {
        if self.dirs.len() >= MOST_DIRS && !self.dirs.contains_key(&dir) {
            self.dirs.clear();
        }
        (self.dirs.entry(dir).or_default(), &self.gains)
    }

    /// Lets the ready files be closed for which `keeps` returns false.
    fn keep(&mut self, keeps: impl Fn(Ino, &Ready) -> bool) {
        let closing = &mut self.closing;
        self.ready.retain(|&ino, ready| {
            let stays = keeps(ino, ready);
            if !stays {
                closing.push(ready.closing(ino));
            }
            stays
        });
    }
}

impl OpenedAhead {
    /// Runs `run` on the files, and notes how many there are afterwards.
    fn with<T>(&self, run: impl FnOnce(&mut Files) -> T) -> T {
        let mut files = lock(&self.files);
        let result = run(&mut files);
        let Files { ready, given, closing, .. } = &*files;
        self.known.store(ready.len() + given.len() + closing.len(), Ordering::Relaxed);
        self.owes.store(closing.iter().any(|one| one.has_read != 0), Ordering::Release);
        result
    }

    fn knows_any(&self) -> bool {
        self.known.load(Ordering::Relaxed) > 0
    }

    /// True if the server is to be told that a file was read.
    pub(super) fn owes(&self) -> bool {
        self.owes.load(Ordering::Acquire)
    }

    /// The file is closed. Returns `None` if it was not opened ahead; true if there are so many that the server is to close them now.
    pub(super) fn closed(&self, file: File, (flags, has_read): (u32, bool)) -> Option<bool> {
        if !self.knows_any() {
            return None;
        }
        self.with(|files| {
            files.given.remove(&file.fh).then(|| {
                let has_read = has_read.into();
                files.closing.push(Closing { ino: file.ino.0, fh: file.fh.0, flags, has_read });
                files.closing.len() >= AHEAD_MAX
            })
        })
    }

    /// The file is closed by a request of its own.
    pub(super) fn released(&self, fh: Fh) {
        if self.knows_any() {
            self.with(|files| files.given.remove(&fh));
        }
    }

    /// Takes some of the files that the server is to close.
    fn take_closing(&self) -> (Vec<Closing>, Caller) {
        self.with(|files| {
            let count = files.closing.len().min(AHEAD_MAX);
            (files.closing.drain(..count).collect(), files.caller)
        })
    }
}

impl Shared {
    /// The file that a name of `dir` leads to, if it is open already. Asks for several files of the directory when it is time.
    pub(super) fn open_from_ahead(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        (dir, found): (Ino, &Resolved),
        args: OpenArgs,
    ) -> Option<Opened> {
        let Resolved::Inode { ino, attr, .. } = found else { return None };
        let flags = args.flags;
        let is_small = attr.kind == FileKind::Regular && attr.size <= OPEN_BYTES_MAX as u64;
        let others = OpenFlags::DIRECT | OpenFlags::TRUNC | OpenFlags::DIRECTORY;
        let only_reads = flags.access() == AccessMode::Read && flags.0 & others == 0;
        let ahead = &self.opened_ahead;
        if !is_small || !only_reads || ahead.lacks.load(Ordering::Relaxed) {
            return None;
        }
        let next = match self.take_ready(cx, versions, *ino, flags) {
            Some(opened) => return Some(opened),
            None => self.counts_as_missed(dir)?,
        };
        match self.ask_for_open_files(cx, (dir, next), flags) {
            Ok(()) => self.take_ready(cx, versions, *ino, flags),
            Err(Errno::ENOSYS | Errno::ENOTTY) => {
                ahead.lacks.store(true, Ordering::Relaxed);
                None
            }
            // The open itself will tell.
            Err(_) => None,
        }
    }

    /// The file `ino`, if it is ready and has not changed.
    fn take_ready(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        ino: Ino,
        flags: OpenFlags,
    ) -> Option<Opened> {
        if !self.opened_ahead.knows_any() || self.connection.is_dead() {
            return None;
        }
        let ready = self.opened_ahead.with(|files| {
            let ready = files.ready.remove(&ino)?;
            if !ready.is_for(cx, flags) || versions.attributes(ino) != Some(ready.version) {
                files.closing.push(ready.closing(ino));
                return None;
            }
            files.given.insert(ready.opened.fh);
            files.hits += 1;
            Some(ready)
        })?;
        let Ready { version, opened, bytes, read_is_due, .. } = ready;
        let bytes = OpenBytes { bytes: &bytes, read_is_due };
        self.keep_whole((version, flags), File { ino, fh: opened.fh }, bytes);
        Some(opened)
    }

    /// Counts a file of `dir` that was not ready. The position from which to ask for several, if it is time.
    fn counts_as_missed(&self, dir: Ino) -> Option<u64> {
        if !self.whole.pays() {
            return None;
        }
        self.opened_ahead.with(|files| {
            let (dir, gains) = files.dir(dir);
            dir.asked.is_enough(gains).then_some(dir.next)
        })
    }

    /// A file of `dir` was opened by the request that resolved its path.
    pub(super) fn opened_with_path(&self, dir: Ino) {
        if !self.opened_ahead.lacks.load(Ordering::Relaxed) {
            self.opened_ahead.with(|files| files.dir(dir).0.asked.note());
        }
    }

    fn ask_for_open_files(
        &self,
        cx: &Context<'_>,
        (dir, from): (Ino, u64),
        flags: OpenFlags,
    ) -> Result<()> {
        self.opened_ahead.with(|files| {
            files.caller = cx.caller;
            if files.ready.len() + AHEAD_MAX > MOST_READY {
                files.keep(|_, _| false);
            }
        });
        let most = AHEAD_MAX as u32;
        let output = self.ask_ahead(cx, dir, OpenAhead { from, flags: flags.0, most })?;
        let decoded = opened_files(&output, (user(cx), flags));
        let (next, all) = noted(Opcode::Ioctl, output.len(), decoded)?;
        self.opened_ahead.with(|files| {
            files.gains.count(all.len() as u64, files.hits);
            let Files { dirs, gains, ready, closing, .. } = files;
            let dir = dirs.entry(dir).or_default();
            dir.next = next;
            if gains.have_paid() {
                dir.asked.go_on();
            }
            for (ino, one) in all {
                // A file with two names is opened twice.
                closing.extend(ready.insert(ino, one).map(|former| former.closing(ino)));
            }
        });
        Ok(())
    }

    /// Sends `OPEN_AHEAD`, with some of the files to close.
    fn ask_ahead(&self, cx: &Context<'_>, dir: Ino, what: OpenAhead) -> Result<Vec<u8>> {
        let (closing, _) = self.opened_ahead.take_closing();
        let input = [what.as_bytes(), closing.as_bytes()].concat();
        let room = self.agreement.max_received();
        let ioctl = abi::IoctlIn {
            cmd: OPEN_AHEAD,
            in_size: input.len() as u32,
            out_size: room as u32,
            ..abi::IoctlIn::default()
        };
        let mut request = Request::new(Opcode::Ioctl, cx, dir).with(&ioctl);
        let head = request.finish(input.len());
        // Not as other requests, before which files are closed.
        self.connection.ask(cx, head, &input, |body| {
            noted(Opcode::Ioctl, body.len(), ioctl_out(body, room)).map(|reply| reply.output)
        })
    }

    /// Lets the server close the files that are closed here.
    pub(super) fn send_closing(&self) {
        while self.opened_ahead.knows_any() {
            let caller =
                self.opened_ahead.with(|files| (!files.closing.is_empty()).then_some(files.caller));
            let Some(caller) = caller else { return };
            let cx = Context::new(caller);
            if let Err(errno) = self.ask_ahead(&cx, Ino::ROOT, OpenAhead::default()) {
                // Otherwise the end of the connection closes them.
                log::debug!("some files are not closed yet: {errno}");
                return;
            }
        }
    }

    /// A name was removed: its file must not stay open here.
    pub(super) fn close_removed(&self) {
        if !self.opened_ahead.knows_any() {
            return;
        }
        if let Some(versions) = self.paths.versions.get() {
            self.opened_ahead.with(|files| {
                files.keep(|ino, ready| versions.attributes(ino) == Some(ready.version));
            });
        }
        self.send_closing();
    }

    /// Closes all files that nobody has opened, and tells the server what was read.
    pub(super) fn close_ahead(&self) {
        if self.opened_ahead.knows_any() {
            self.opened_ahead.with(|files| files.keep(|_, _| false));
            self.send_closing();
        }
    }
}

/// The position for the next request, and the open files in an answer.
fn opened_files(
    output: &[u8],
    (user, flags): ((u32, u32), OpenFlags),
) -> Result<(u64, Vec<(Ino, Ready)>)> {
    let (end, mut rest) = AheadEnd::read_from_prefix(output).map_err(|_| Errno::EIO)?;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (file, after) = AheadFile::read_from_prefix(rest).map_err(|_| Errno::EIO)?;
        let len = file.len as usize;
        let padded = len.checked_next_multiple_of(8).ok_or(Errno::EIO)?;
        let (opened, bytes) = decode::open_out_with_bytes(after.get(..len).ok_or(Errno::EIO)?)?;
        rest = after.get(padded..).ok_or(Errno::EIO)?;
        if file.ino <= Ino::ROOT.0 || all.len() == AHEAD_MAX {
            return Err(Errno::EIO);
        }
        let OpenBytes { bytes, read_is_due } = bytes.ok_or(Errno::EIO)?;
        let (version, bytes) = (file.version, bytes.into());
        all.push((Ino(file.ino), Ready { version, flags, user, opened, bytes, read_is_due }));
    }
    Ok((end.next, all))
}
