//! The inodes and open files of a frontend, by numbers that stay when the server changes. No I/O.
//!
//! A *connection* has a number, from 1 on. The numbers that a server assigned hold for its
//! connection only; the table has for each inode and open file the connection in which it was found
//! last.

use std::collections::{HashMap, HashSet};

use defuse_fs::{
    Attr, Caller, Entry, Errno, Fh, File, FileKind, Ino, OpenFlags, PollHandle, Result, Timestamp,
};

use super::unsynced::{KnownLosses, UnsyncedChanges};

/// The number of a connection.
pub(super) type ConnectionEpoch = u64;

/// The place of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamePlace {
    pub(super) dir: Ino,
    pub(super) name: Box<[u8]>,
}

/// The properties by which an inode is recognized on another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InodeIdentity {
    st_ino: u64,
    generation: u64,
    kind: FileKind,
}

impl InodeIdentity {
    pub(super) fn from_entry(entry: &Entry) -> InodeIdentity {
        let Attr { st_ino, kind, .. } = entry.attr;
        InodeIdentity { st_ino, generation: entry.generation, kind }
    }
}

/// An inode of the server, in one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerInode {
    pub(super) epoch: ConnectionEpoch,
    pub(super) ino: Ino,
    /// The lookups that the server counts.
    lookups: u64,
}

struct TrackedInode {
    /// The lookups that the frontend counts.
    lookups: u64,
    /// The names below it and the open files that need it.
    users: u64,
    place: Option<NamePlace>,
    identity: InodeIdentity,
    /// The time of creation, for a file that was opened. `Some(None)`: the file system has none.
    birth: Option<Option<Timestamp>>,
    found: ServerInode,
    /// True if a later connection does not have the inode.
    gone: bool,
    unsynced: UnsyncedChanges,
}

struct TrackedFile {
    ino: Ino,
    caller: Caller,
    flags: OpenFlags,
    is_dir: bool,
    epoch: ConnectionEpoch,
    fh: Fh,
    heard: KnownLosses,
    /// The connection in which the open file took a lock.
    locked: Option<ConnectionEpoch>,
    /// True if, by the server's reply, flush only ends locks.
    no_flush: bool,
    gone: bool,
}

/// The way to an inode that has to be found again.
pub(super) struct InodeSearch {
    pub(super) ino: Ino,
    /// The place of the inode; `None` without a known name.
    pub(super) place: Option<NamePlace>,
    /// Its number on the connection on which it was found last.
    pub(super) number: Ino,
    pub(super) identity: InodeIdentity,
    pub(super) birth: Option<Timestamp>,
}

impl InodeSearch {
    /// True if `attr` belongs to the inode, as far as attributes show.
    pub(super) fn is_same(&self, attr: &Attr) -> bool {
        let InodeIdentity { st_ino, kind, .. } = self.identity;
        let same_birth = self.birth.is_none() || attr.btime == self.birth;
        (attr.st_ino, attr.kind) == (st_ino, kind) && same_birth && attr.nlink > 0
    }
}

/// The state of an inode in a connection.
pub(super) enum InodeWhereabouts {
    Known(Ino),
    Lost(InodeSearch),
}

/// The state of an open file in a connection.
pub(super) enum HandleState {
    Open(Fh),
    Closed { caller: Caller, flags: OpenFlags, is_dir: bool },
}

/// Lookups to return to the server of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReturnedLookups {
    pub(super) epoch: ConnectionEpoch,
    pub(super) ino: Ino,
    pub(super) lookups: u64,
}

/// An open file that was closed, by its number at the server of a connection.
pub(super) struct ClosedFile {
    pub(super) epoch: ConnectionEpoch,
    pub(super) file: File,
    /// Lookups to return after the file.
    pub(super) returned: Vec<ReturnedLookups>,
}

#[derive(Default)]
pub(super) struct ReconnectTable {
    inodes: HashMap<Ino, TrackedInode>,
    names: HashMap<Ino, HashMap<Box<[u8]>, Ino>>,
    /// The numbers of the present server, with the numbers of the frontend.
    numbers: HashMap<Ino, Ino>,
    epoch: ConnectionEpoch,
    files: HashMap<Fh, TrackedFile>,
    last_ino: u64,
    last_fh: u64,
    /// Changes of inodes that the frontend has forgotten.
    forgotten: UnsyncedChanges,
    polled: HashSet<u64>,
}

impl ReconnectTable {
    pub(super) fn new() -> ReconnectTable {
        ReconnectTable { epoch: 1, last_ino: Ino::ROOT.0, ..ReconnectTable::default() }
    }

    /// Begins a connection. Returns the handles on which a poll waits, whose files have no waker
    /// any more.
    pub(super) fn begin(&mut self, epoch: ConnectionEpoch) -> Vec<PollHandle> {
        self.epoch = epoch;
        self.numbers.clear();
        self.polled.drain().map(PollHandle).collect()
    }

    /// The number for the frontend of an inode of the present connection.
    pub(super) fn outer(&self, ino: Ino) -> Option<Ino> {
        if ino == Ino::ROOT { Some(ino) } else { self.numbers.get(&ino).copied() }
    }

    /// Like [`outer`](ReconnectTable::outer), for the connection `epoch`; `None` if it is not the
    /// present one.
    pub(super) fn outer_in(&self, ino: Ino, epoch: ConnectionEpoch) -> Option<Ino> {
        self.outer(ino).filter(|_| epoch == self.epoch)
    }

    /// Returns the number of inodes, and the number of open files.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.inodes.len(), self.files.len())
    }

    /// The inode that had this name in an earlier connection, if it was opened.
    pub(super) fn find_lost_open(&self, place: &NamePlace) -> Option<Ino> {
        let ino = *self.names.get(&place.dir)?.get(&place.name)?;
        let inode = self.inodes.get(&ino)?;
        let was_opened = matches!(inode.birth, Some(Some(_)));
        (inode.found.epoch < self.epoch && !inode.gone && was_opened).then_some(ino)
    }

    /// All inodes.
    pub(super) fn list_inodes(&self) -> Vec<Ino> {
        self.inodes.keys().copied().collect()
    }

    pub(super) fn record_poll(&mut self, handle: PollHandle) {
        self.polled.insert(handle.0);
    }

    // ---- inodes -----------------------------------------------------------------------------

    /// Records an entry of a server, with one lookup. Returns its number for the frontend.
    pub(super) fn learn(
        &mut self,
        place: Option<NamePlace>,
        entry: &Entry,
        epoch: ConnectionEpoch,
    ) -> Ino {
        if entry.ino == Ino::ROOT {
            return Ino::ROOT;
        }
        let is_present = epoch == self.epoch;
        let known = self.numbers.get(&entry.ino).copied().filter(|_| is_present);
        let ino = known
            .or_else(|| self.find_known(place.as_ref()?, entry))
            .unwrap_or_else(|| self.add(entry, epoch));
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.lookups += 1;
            if inode.found.epoch == epoch {
                inode.found.lookups += 1;
            } else if is_present {
                inode.found = ServerInode { epoch, ino: entry.ino, lookups: 1 };
            }
        }
        if is_present {
            self.numbers.entry(entry.ino).or_insert(ino);
        }
        if let Some(place) = place {
            self.set_place(ino, place);
        }
        ino
    }

    /// The inode of an earlier connection that had this name, if `entry` is the same one.
    fn find_known(&self, place: &NamePlace, entry: &Entry) -> Option<Ino> {
        let ino = *self.names.get(&place.dir)?.get(&place.name)?;
        let inode = self.inodes.get(&ino)?;
        let earlier = inode.found.epoch < self.epoch && !inode.gone;
        // The birth of an opened file is compared only where it is found again.
        let same = inode.identity == InodeIdentity::from_entry(entry)
            && !matches!(inode.birth, Some(Some(_)));
        (earlier && same).then_some(ino)
    }

    fn add(&mut self, entry: &Entry, epoch: ConnectionEpoch) -> Ino {
        self.last_ino += 1;
        let inode = TrackedInode {
            lookups: 0,
            users: 0,
            place: None,
            identity: InodeIdentity::from_entry(entry),
            birth: None,
            found: ServerInode { epoch, ino: entry.ino, lookups: 0 },
            gone: false,
            unsynced: UnsyncedChanges::default(),
        };
        self.inodes.insert(Ino(self.last_ino), inode);
        Ino(self.last_ino)
    }

    /// Returns the place of the inode in a connection. Fails with `ESTALE` for an unknown inode,
    /// and for an inode that cannot be found again.
    pub(super) fn locate(&self, ino: Ino, epoch: ConnectionEpoch) -> Result<InodeWhereabouts> {
        if ino == Ino::ROOT {
            return Ok(InodeWhereabouts::Known(ino));
        }
        let inode = self.inodes.get(&ino).filter(|inode| !inode.gone).ok_or(Errno::ESTALE)?;
        if inode.found.epoch == epoch {
            return Ok(InodeWhereabouts::Known(inode.found.ino));
        }
        let (place, number) = (inode.place.clone(), inode.found.ino);
        let (identity, birth) = (inode.identity, inode.birth.flatten());
        Ok(InodeWhereabouts::Lost(InodeSearch { ino, place, number, identity, birth }))
    }

    /// Records that an inode was found again, with one lookup. Returns the excess lookups.
    pub(super) fn record_found(
        &mut self,
        ino: Ino,
        inner: Ino,
        epoch: ConnectionEpoch,
    ) -> Option<ReturnedLookups> {
        let superfluous = Some(ReturnedLookups { epoch, ino: inner, lookups: 1 });
        let Some(inode) = self.inodes.get_mut(&ino).filter(|_| epoch == self.epoch) else {
            return superfluous;
        };
        if inode.found.epoch == epoch {
            return superfluous;
        }
        inode.found = ServerInode { epoch, ino: inner, lookups: 1 };
        self.numbers.entry(inner).or_insert(ino);
        None
    }

    /// Records that an inode was found again without a lookup.
    pub(super) fn record_found_by_number(&mut self, ino: Ino, number: Ino, epoch: ConnectionEpoch) {
        let is_present = epoch == self.epoch;
        if let Some(inode) = self.inodes.get_mut(&ino).filter(|_| is_present)
            && inode.found.epoch != epoch
        {
            inode.found = ServerInode { epoch, ino: number, lookups: 0 };
            self.numbers.entry(number).or_insert(ino);
        }
    }

    pub(super) fn is_gone(&mut self, ino: Ino) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.gone = true;
        }
    }

    /// Returns lookups of the frontend.
    pub(super) fn forget(&mut self, ino: Ino, lookups: u64) -> Vec<ReturnedLookups> {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.lookups = inode.lookups.saturating_sub(lookups);
        }
        self.remove_unused(ino)
    }

    /// Removes an unused inode, and then perhaps the directories above it.
    fn remove_unused(&mut self, ino: Ino) -> Vec<ReturnedLookups> {
        let mut returned = Vec::new();
        let mut next = Some(ino);
        while let Some(ino) = next.take() {
            let unused =
                self.inodes.get(&ino).is_some_and(|inode| inode.lookups == 0 && inode.users == 0);
            let Some(inode) = unused.then(|| self.inodes.remove(&ino)).flatten() else { break };
            if self.numbers.get(&inode.found.ino) == Some(&ino) {
                self.numbers.remove(&inode.found.ino);
            }
            self.forgotten.add(&inode.unsynced);
            let ServerInode { epoch, ino: inner, lookups } = inode.found;
            returned.push(ReturnedLookups { epoch, ino: inner, lookups });
            if let Some(place) = inode.place {
                self.clear(&place);
                next = Some(place.dir);
            }
        }
        returned
    }

    /// Removes a name and its use of the directory.
    fn clear(&mut self, place: &NamePlace) {
        if let Some(names) = self.names.get_mut(&place.dir) {
            names.remove(&place.name);
            if names.is_empty() {
                self.names.remove(&place.dir);
            }
        }
        if let Some(dir) = self.inodes.get_mut(&place.dir) {
            dir.users = dir.users.saturating_sub(1);
        }
    }

    /// Sets the place of an inode. An inode that had the name before no longer has a place.
    fn set_place(&mut self, ino: Ino, place: NamePlace) {
        if self.inodes.get(&ino).is_none_or(|inode| inode.place.as_ref() == Some(&place)) {
            return;
        }
        // A directory that was forgotten meanwhile cannot be used in requests.
        if place.dir != Ino::ROOT && !self.inodes.contains_key(&place.dir) {
            return;
        }
        if let Some(dir) = self.inodes.get_mut(&place.dir) {
            dir.users += 1;
        }
        let (from, before) = (place.clone(), self.take(&place));
        let names = self.names.entry(from.dir).or_default();
        names.insert(from.name, ino);
        let old = self.inodes.get_mut(&ino).and_then(|inode| inode.place.replace(place));
        if let Some(old) = old {
            self.clear(&old);
        }
        debug_assert_ne!(before, Some(ino));
    }

    /// Removes the name from its inode.
    fn take(&mut self, place: &NamePlace) -> Option<Ino> {
        let ino = *self.names.get(&place.dir)?.get(&place.name)?;
        self.clear(place);
        self.inodes.get_mut(&ino)?.place = None;
        Some(ino)
    }

    /// Records that a name does not exist any more.
    pub(super) fn record_removal(&mut self, place: &NamePlace) {
        self.take(place);
    }

    /// Records the new place of a renamed inode; with `exchanged` the other inode gets the old
    /// place.
    pub(super) fn record_rename(&mut self, from: &NamePlace, to: &NamePlace, exchanged: bool) {
        if from == to {
            return;
        }
        let (moved, other) = (self.take(from), self.take(to));
        if let Some(moved) = moved {
            self.set_place(moved, to.clone());
        }
        if let Some(other) = other.filter(|_| exchanged) {
            self.set_place(other, from.clone());
        }
    }

    // ---- open files -------------------------------------------------------------------------

    pub(super) fn record_open(
        &mut self,
        file: File,
        (caller, flags, is_dir): (Caller, OpenFlags, bool),
        epoch: ConnectionEpoch,
    ) -> Fh {
        self.last_fh += 1;
        let fh = Fh(self.last_fh);
        let mut heard = KnownLosses::default();
        if let Some(inode) = self.inodes.get_mut(&file.ino) {
            inode.users += 1;
            heard = inode.unsynced.losses_at_open(epoch);
        }
        let open = TrackedFile {
            ino: file.ino,
            caller,
            flags: reopen_flags(flags),
            is_dir,
            epoch,
            fh: file.fh,
            heard,
            locked: None,
            no_flush: false,
            gone: false,
        };
        self.files.insert(fh, open);
        fh
    }

    /// Records that flush of an open file only ends locks.
    pub(super) fn flush_ends_locks(&mut self, fh: Fh) {
        if let Some(open) = self.files.get_mut(&fh) {
            open.no_flush = true;
        }
    }

    /// Returns the open file in a connection. Fails with `EBADF` for an unknown file, and with
    /// `ESTALE` for a file that was not found again.
    pub(super) fn handle(&self, file: File, epoch: ConnectionEpoch) -> Result<HandleState> {
        let open = self.files.get(&file.fh).filter(|open| open.ino == file.ino);
        let open = open.ok_or(Errno::EBADF)?;
        if open.gone {
            return Err(Errno::ESTALE);
        }
        if open.epoch == epoch {
            return Ok(HandleState::Open(open.fh));
        }
        let TrackedFile { caller, flags, is_dir, .. } = *open;
        Ok(HandleState::Closed { caller, flags, is_dir })
    }

    /// Records that a file was opened again. Returns false if it is open in this connection
    /// already, or was closed.
    pub(super) fn record_reopen(&mut self, fh: Fh, inner: Fh, epoch: ConnectionEpoch) -> bool {
        let Some(open) = self.files.get_mut(&fh).filter(|open| open.epoch < epoch) else {
            return false;
        };
        (open.epoch, open.fh, open.no_flush) = (epoch, inner, false);
        true
    }

    pub(super) fn file_is_gone(&mut self, fh: Fh) {
        if let Some(open) = self.files.get_mut(&fh) {
            open.gone = true;
        }
    }

    /// Removes an open file.
    pub(super) fn remove_open_file(&mut self, fh: Fh) -> Option<ClosedFile> {
        let open = self.files.remove(&fh)?;
        let inner = match self.inodes.get_mut(&open.ino) {
            Some(inode) => {
                inode.users = inode.users.saturating_sub(1);
                if inode.found.epoch == open.epoch { inode.found.ino } else { open.ino }
            }
            None => open.ino,
        };
        let returned = self.remove_unused(open.ino);
        Some(ClosedFile { epoch: open.epoch, file: File { ino: inner, fh: open.fh }, returned })
    }

    /// True once after the locks that an open file took were lost.
    pub(super) fn has_lost_locks(&mut self, fh: Fh, epoch: ConnectionEpoch) -> bool {
        let open = self.files.get_mut(&fh);
        open.is_some_and(|open| open.locked.take_if(|taken| *taken < epoch).is_some())
    }

    pub(super) fn record_lock(&mut self, fh: Fh, epoch: ConnectionEpoch) {
        if let Some(open) = self.files.get_mut(&fh) {
            open.locked.get_or_insert(epoch);
        }
    }

    /// True if the birth time of a file is unknown and has to be requested.
    pub(super) fn lacks_birth(&self, ino: Ino) -> bool {
        self.inodes.get(&ino).is_some_and(|inode| inode.birth.is_none())
    }

    pub(super) fn record_birth(&mut self, ino: Ino, birth: Option<Timestamp>) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.birth.get_or_insert(birth);
        }
    }

    // ---- durability -------------------------------------------------------------------------

    /// Records a change that the server of a connection has acknowledged.
    pub(super) fn record_change(&mut self, ino: Ino, epoch: ConnectionEpoch) {
        match self.inodes.get_mut(&ino) {
            Some(inode) => inode.unsynced.record_change(epoch),
            None => self.forgotten.record_change(epoch),
        }
    }

    /// Before fsync(2): the count of changes. Fails with `EIO`, once for each open file, if changes
    /// may be lost.
    pub(super) fn begin_sync(&mut self, file: File, epoch: ConnectionEpoch) -> Result<u64> {
        let (Some(inode), Some(open)) =
            (self.inodes.get_mut(&file.ino), self.files.get_mut(&file.fh))
        else {
            return Ok(0);
        };
        inode.unsynced.begin_sync(&mut open.heard, epoch)
    }

    /// Before flush, which a program also causes by ending a child process. Returns the open file
    /// on the present connection, if it is open there, and true if flush only ends locks: all
    /// changes are durable, so that the server need not be reached. Fails with `EIO`, any number of
    /// times, if locks may be lost, or if changes since the file was opened for writing were lost
    /// and no call on the open file has failed for it.
    pub(super) fn begin_flush(
        &mut self,
        file: File,
        epoch: ConnectionEpoch,
    ) -> Result<Option<(File, bool)>> {
        let open = self.files.get(&file.fh).ok_or(Errno::EBADF)?;
        let lost_locks = open.locked.is_some_and(|taken| taken < epoch);
        let Some(inode) = self.inodes.get_mut(&file.ino) else { return Ok(None) };
        let writes = open.flags.writable();
        if lost_locks || writes && inode.unsynced.is_news_at_close(open.heard, epoch) {
            return Err(Errno::EIO);
        }
        let is_open = open.epoch == epoch && inode.found.epoch == epoch;
        let file = File { ino: inode.found.ino, fh: open.fh };
        Ok(is_open.then_some((file, open.no_flush && inode.unsynced.is_clean())))
    }

    /// Everything that the present connection has acknowledged is durable. Changes of earlier ones
    /// stay lost until a call has failed for them.
    pub(super) fn record_syncfs(&mut self) {
        let epoch = self.epoch;
        let inodes = self.inodes.values_mut().map(|inode| &mut inode.unsynced);
        for unsynced in inodes.chain([&mut self.forgotten]) {
            unsynced.lose(epoch);
            unsynced.record_sync_all();
        }
    }

    pub(super) fn record_sync(&mut self, ino: Ino, count: u64) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.unsynced.record_sync(count);
        }
    }

    /// Before syncfs(2). Fails with `EIO`, once, if changes of any file may be lost.
    pub(super) fn begin_syncfs(&mut self, epoch: ConnectionEpoch) -> Result<()> {
        let mut lost = self.forgotten.lose(epoch);
        for inode in self.inodes.values_mut() {
            lost |= inode.unsynced.lose(epoch);
        }
        if lost { Err(Errno::EIO) } else { Ok(()) }
    }
}

/// Returns the flags of an open file, without the flags that open(2) applies once.
fn reopen_flags(flags: OpenFlags) -> OpenFlags {
    let once = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
    OpenFlags(flags.0 & !once)
}
