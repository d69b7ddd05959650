//! Small directories whose listing arrives with the reply to OPENDIR, so that reading them takes no
//! request.
//!
//! The entries hold as long as the version of the directory's attributes stays, which each read
//! checks: a change of names moves it.
//!
//! While a program works in one directory, the client opens and lists the next one, if the program
//! walks a tree from the top to the bottom: the first directory in a listing, or the next one in
//! the listing of the parent. No caller waits for that reply. A directory is listed in advance only
//! if this does not change its access time.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::{
    Context, DirBuf, Errno, Fh, File, FileKind, Ino, NormalPath, OpenFlags, OpenReply,
    PathResolution, Result, Timestamp, Versions,
};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::chain::{ChainLink, RequestChain};
use defuse_wire::decode::{self, ListingEntries};
use defuse_wire::encode::EncodedRequest;

use super::chained::decode_chain;
use super::files::OpenIdentity;
use super::fs::device_of;
use super::lanes::LaneRequest;
use super::prefetch_interest::PrefetchInterest;
use super::{RemoteShared, lock};

/// Opens request no entries while so many directories have entries: 5 MiB.
const MOST: usize = 256;
/// The size of the first part of a listing, in bytes.
const FIRST: u32 = 16 * 1024;
/// The size of the second part, which shows that the first one was all, in bytes.
const SECOND: u32 = 4 * 1024;

/// The maximum number of directories that are remembered as the next ones.
const MOST_NEXT: usize = 1024;
/// The number of directories that a program may skip.
const LEFT_OUT: usize = 16;

/// The inode and the handle of OPENDIR.
const OF_OPEN: ChainLink = ChainLink { uses: ChainLink::INODE | ChainLink::FILE, of: 0 };
/// The inode and the handle of OPENDIR, and the position after the first part.
const OF_FIRST_PART: ChainLink =
    ChainLink { uses: ChainLink::INODE | ChainLink::FILE | ChainLink::POSITION, of: 1 };

/// The open directories with entries.
#[derive(Default)]
pub(super) struct ListingPrefetch {
    dirs: RwLock<HashMap<Fh, Arc<PrefetchedListing>>>,
    prefetch_interest: PrefetchInterest,
    next: Mutex<NextListings>,
    /// True if there is a request whose reply was not taken.
    has_requested: AtomicBool,
    interest_in_next: PrefetchInterest,
}

/// The path of a program through a tree.
#[derive(Default)]
struct NextListings {
    /// The directories in the order in which they are probably opened, each with its parent and its
    /// name.
    dirs: VecDeque<(Ino, Ino, Box<[u8]>)>,
    pending: Option<PendingListing>,
}

/// A directory that was requested in advance, and whose reply has not arrived.
struct PendingListing {
    begun: LaneRequest,
    ino: Ino,
    by: OpenIdentity,
    version: u64,
}

/// A directory that was opened, and the beginning of its listing with its end, if it was listed.
type ListedDirectory = (OpenReply, Option<(Box<[u8]>, bool)>);

struct PrefetchedListing {
    ino: Ino,
    version: u64,
    /// The entries as READDIR has them.
    entries: Box<[u8]>,
    is_all: bool,
    was_read: AtomicBool,
}

impl ListingPrefetch {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<Fh, Arc<PrefetchedListing>>> {
        self.dirs.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Fh, Arc<PrefetchedListing>>> {
        self.dirs.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `run` on the way of the program, and notes if there is a request.
    fn with_next<T>(&self, run: impl FnOnce(&mut NextListings) -> T) -> T {
        let mut next = lock(&self.next);
        let result = run(&mut next);
        self.has_requested.store(next.pending.is_some(), Ordering::Relaxed);
        result
    }

    /// True if an open requests entries.
    fn wants(&self) -> bool {
        self.read().len() < MOST && self.prefetch_interest.should_request()
    }

    /// The directory is closed.
    pub(super) fn record_close(&self, fh: Fh) {
        let Some(ahead) = self.write().remove(&fh) else { return };
        self.prefetch_interest.note(ahead.was_read.load(Ordering::Relaxed));
    }
}

impl NextListings {
    /// Records that a directory is opened: the program has skipped the directories before it.
    fn record_open(&mut self, ino: Ino) {
        if let Some(at) = self.dirs.iter().take(LEFT_OUT).position(|(next, ..)| *next == ino) {
            self.dirs.drain(..=at);
        }
    }

    /// The directories in the listing of `dir` are the next ones.
    fn record_listing(&mut self, dir: Ino, entries: &[u8]) {
        let listed = ListingEntries::new(entries, false).filter_map(Result::ok);
        let dirs = listed.filter(|entry| {
            entry.kind == FileKind::Directory && !matches!(entry.name, b"." | b"..")
        });
        let dirs: Vec<_> = dirs.map(|entry| (Ino(entry.ino), dir, entry.name.into())).collect();
        dirs.into_iter().rev().for_each(|next| self.dirs.push_front(next));
        self.dirs.truncate(MOST_NEXT);
    }
}

impl RemoteShared {
    pub(super) fn opendir(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        flags: OpenFlags,
    ) -> Result<OpenReply> {
        let may_list = self.takes_chains() && !self.lacks(Opcode::Opendir);
        if may_list
            && let Some(versions) = self.paths.versions.get()
            && let Some(version) = versions.attributes(ino)
            && self.listed_ahead.wants()
        {
            match self.opendir_and_list(cx, &**versions, (ino, version), flags) {
                // ENOSYS is remembered only for an OPENDIR without a chain, which follows.
                Err(Errno::ENOSYS) => {}
                other => return other,
            }
        }
        let args = abi::OpenIn { flags: flags.0, open_flags: 0 };
        self.decode_open(
            cx,
            EncodedRequest::new(Opcode::Opendir, cx, ino).with(&args),
            decode::open_out,
        )
    }

    /// Opens a directory and reads its beginning, by one message, or takes the answer to an earlier
    /// one.
    fn opendir_and_list(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        (ino, version): (Ino, u64),
        flags: OpenFlags,
    ) -> Result<OpenReply> {
        let by = OpenIdentity::from_context(cx, flags);
        let (listed, version) = match self.take_next(cx, (ino, version), by)? {
            Some(next) => next,
            None => {
                let links = opening(cx, ino, flags);
                (self.request_chain(cx, (cx.caller, ino), (&links, 3), decode_answers)?, version)
            }
        };
        let (opened, entries) = listed;
        if let Some((entries, is_all)) = entries {
            self.paths.record_read(ino);
            self.listed_ahead.with_next(|next| next.record_listing(ino, &entries));
            let was_read = AtomicBool::new(false);
            let ahead = PrefetchedListing { ino, version, entries, is_all, was_read };
            self.listed_ahead.write().insert(opened.fh, Arc::new(ahead));
        }
        self.request_next(cx, versions, (ino, by));
        Ok(opened)
    }

    /// Returns the directory, if it was requested in advance, with the version of its attributes at
    /// that time.
    fn take_next(
        &self,
        cx: &Context<'_>,
        (ino, version): (Ino, u64),
        by: OpenIdentity,
    ) -> Result<Option<(ListedDirectory, u64)>> {
        let ahead = &self.listed_ahead;
        let is_this = |pending: &PendingListing| {
            (pending.ino, pending.version, pending.by) == (ino, version, by)
        };
        let pending = ahead.with_next(|next| {
            next.record_open(ino);
            // A caller must not wait for another device.
            next.pending.take_if(|pending| device_of(pending.ino) == device_of(ino))
        });
        let Some(pending) = pending else { return Ok(None) };
        let is_right = is_this(&pending);
        ahead.interest_in_next.note(is_right);
        if is_right {
            return match self.take_listed(cx, pending) {
                Ok(listed) => Ok(Some((listed, version))),
                // The loss of a lock is reported once.
                Err(Errno::EIO) => Err(Errno::EIO),
                Err(_) => Ok(None),
            };
        }
        // Another directory is opened, or this one has changed.
        self.close_pending(Some(pending));
        Ok(None)
    }

    /// Requests the directory that the program probably opens next.
    fn request_next(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        (now, by): (Ino, OpenIdentity),
    ) {
        let ahead = &self.listed_ahead;
        let next = ahead.with_next(|next| next.dirs.front().cloned());
        // A device that does not answer holds up only its own callers.
        let next = next.filter(|(ino, ..)| device_of(*ino) == device_of(now));
        let Some((ino, parent, name)) = next.filter(|_| ahead.interest_in_next.should_request())
        else {
            return;
        };
        let known =
            NormalPath::new(&name).map(|name| self.resolve_cached(versions, (parent, name)));
        let Some(Some(PathResolution::Inode { ino: found, attr, .. })) = known else { return };
        let is_read = attr.kind == FileKind::Directory && !attr.read_is_due(Timestamp::now());
        let Some(version) = versions.attributes(ino).filter(|_| is_read && found == ino) else {
            return;
        };
        let mut request = self.chain_request((cx.caller, ino), &opening(cx, ino, by.flags));
        let Ok(Some(begun)) = self.connection.begin(request.finish(0), &[]) else { return };
        let pending = PendingListing { begun, ino, by, version };
        // Another thread may have made a request meanwhile.
        self.close_pending(ahead.with_next(|next| next.pending.replace(pending)));
    }

    /// Closes the directory that was requested in advance, if `is_due` holds for its inode and the
    /// version of its attributes.
    pub(super) fn close_next(&self, is_due: impl Fn((Ino, u64)) -> bool) {
        let ahead = &self.listed_ahead;
        if ahead.has_requested.load(Ordering::Relaxed) {
            let is_due = |pending: &mut PendingListing| is_due((pending.ino, pending.version));
            self.close_pending(ahead.with_next(|next| next.pending.take_if(is_due)));
        }
    }

    fn close_pending(&self, pending: Option<PendingListing>) {
        let Some(pending) = pending else { return };
        let (ino, cx) = (pending.ino, Context::new(pending.by.caller()));
        if let Ok((opened, _)) = self.take_listed(&cx, pending) {
            let flags = OpenFlags::DIRECTORY;
            let release = abi::ReleaseIn { fh: opened.fh.0, flags, ..Default::default() };
            let _ = self.release(&cx, (Opcode::Releasedir, Opcode::Opendir), ino, &release);
        }
    }

    fn take_listed(&self, cx: &Context<'_>, pending: PendingListing) -> Result<ListedDirectory> {
        self.connection.take_begun(pending.begun, cx, |body| decode_chain(body, 3, decode_answers))
    }

    /// Lists from the entries in the reply to the open of the directory. Returns false if they do
    /// not hold, or if there are no more.
    pub(super) fn list_ahead(
        &self,
        cx: &Context<'_>,
        dir: File,
        from: u64,
        out: &mut DirBuf<'_>,
    ) -> Result<bool> {
        let Some(ahead) = self.listed_ahead.read().get(&dir.fh).cloned() else { return Ok(false) };
        let versions = self.paths.versions.get();
        let holds = versions.is_some_and(|versions| {
            ahead.ino == dir.ino && versions.attributes(dir.ino) == Some(ahead.version)
        });
        if !holds || self.connection.has_ended() {
            return Ok(false);
        }
        let mut listing = ListingEntries::new(&ahead.entries, false);
        if from != 0 && !listing.any(|listed| listed.is_ok_and(|listed| listed.next == from)) {
            return Ok(false);
        }
        ahead.was_read.store(true, Ordering::Relaxed);
        let mut listing = listing.peekable();
        // An incomplete listing continues by requests.
        if listing.peek().is_none() && !ahead.is_all {
            return Ok(false);
        }
        self.push_all(cx, dir.ino, listing, out).map(|()| true)
    }
}

/// The requests that open a directory and read its beginning.
fn opening(cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> RequestChain {
    let open = abi::OpenIn { flags: flags.0, open_flags: 0 };
    let mut links = RequestChain::default();
    let mut opening = EncodedRequest::new(Opcode::Opendir, cx, ino).with(&open);
    links.add(ChainLink::default(), &[opening.finish(0)]);
    for (link, size) in [(OF_OPEN, FIRST), (OF_FIRST_PART, SECOND)] {
        let read = abi::ReadIn { size, ..Default::default() };
        let mut reading = EncodedRequest::new(Opcode::Readdir, cx, Ino(0)).with(&read);
        links.add(link, &[reading.finish(0)]);
    }
    links
}

/// The answers to [`opening`].
fn decode_answers(answers: &[(i32, &[u8])]) -> Result<ListedDirectory> {
    let (error, body) = answers[0];
    if error != 0 {
        return Err(Errno::from_raw(-error));
    }
    let opened = decode::open_out(body)?;
    // A listing that has failed, or is longer than requested, fails again when it is requested
    // alone.
    let part = |at: usize, most: u32| {
        let (error, body) = answers.get(at)?;
        (*error == 0 && body.len() <= most as usize).then_some(*body)
    };
    let Some(first) = part(1, FIRST) else { return Ok((opened, None)) };
    let second = part(2, SECOND);
    let is_all = first.is_empty() || second.is_some_and(<[u8]>::is_empty);
    let entries = [first, second.unwrap_or_default()].concat();
    Ok((opened, Some((entries.into_boxed_slice(), is_all))))
}
