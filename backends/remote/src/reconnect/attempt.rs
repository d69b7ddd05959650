//! One attempt of a call, on one connection: finds inodes and open files there.

use std::cell::Cell;

use defuse_fs::{
    Context, Entry, Errno, Fh, File, FileSystem, Ino, Name, OpenArgs, OpenFlags, OpenReply, Result,
};

use super::table::{
    ConnectionEpoch, HandleState, InodeIdentity, InodeSearch, InodeWhereabouts, NamePlace,
    ReturnedLookups,
};
use super::{CurrentConnection, ReconnectingClient, RepeatRule, unknown_outcome_error};

pub(super) struct CallAttempt<'a> {
    client: &'a ReconnectingClient,
    cx: &'a Context<'a>,
    connected: CurrentConnection,
    repeat: RepeatRule,
    /// True if an earlier attempt may have been carried out.
    unsure: bool,
    sent: Cell<bool>,
}

impl<'a> CallAttempt<'a> {
    pub(super) fn new(
        client: &'a ReconnectingClient,
        cx: &'a Context<'a>,
        connected: CurrentConnection,
        (repeat, unsure): (RepeatRule, bool),
    ) -> CallAttempt<'a> {
        CallAttempt { client, cx, connected, repeat, unsure, sent: Cell::new(false) }
    }

    /// Makes `name` in `dir`, a number of this connection. If an earlier attempt may have made it,
    /// fails with `EIO` if the name exists: this call or another client may have made it.
    pub(super) fn make_name<T>(
        &self,
        dir: Ino,
        name: Name<'_>,
        make: impl FnOnce(&dyn FileSystem) -> Result<T>,
    ) -> Result<T> {
        if self.unsure {
            let remote = self.connected.fs();
            match remote.lookup(self.cx, dir, name) {
                Err(Errno::ENOENT) => {}
                Err(Errno::ENOTCONN) => return Err(Errno::ENOTCONN),
                Err(_) => return Err(unknown_outcome_error()),
                Ok(entry) => {
                    remote.forget(entry.ino, 1);
                    return Err(unknown_outcome_error());
                }
            }
        }
        match make(self.server()?) {
            // The first server may still run without its clients.
            Err(Errno::EEXIST) if self.unsure => Err(unknown_outcome_error()),
            outcome => outcome,
        }
    }

    /// True if the server has ended. `ENOTCONN` alone may be the reply of a running server.
    pub(super) fn is_lost(&self) -> bool {
        self.connected.is_dead()
    }

    /// The request itself may have reached the server.
    pub(super) fn mark_sent(&self) -> bool {
        self.sent.get()
    }

    pub(super) fn epoch(&self) -> ConnectionEpoch {
        self.connected.epoch
    }

    /// The server, for the request itself, after everything that it names was found.
    pub(super) fn server(&self) -> Result<&dyn FileSystem> {
        if self.repeat != RepeatRule::Again {
            // A server that ended without a request in progress has not got the request.
            self.connected.check_for_end();
        }
        if self.connected.is_dead() {
            return Err(Errno::ENOTCONN);
        }
        self.sent.set(true);
        Ok(self.connected.fs())
    }

    /// Returns the number of an inode on this connection. Fails with `ESTALE` if the inode is not
    /// there.
    pub(super) fn ino(&self, ino: Ino) -> Result<Ino> {
        if let Some(known) = self.find_by_number(ino)? {
            return Ok(known);
        }
        let mut searches = Vec::new();
        let mut dir = self.collect_lost(ino, &mut searches)?;
        while let Some(search) = searches.pop() {
            dir = self.search(dir, &search)?;
        }
        Ok(dir)
    }

    /// Finds an inode by its last number, if numbers stay from one server to the next. `None` if
    /// they do not, or if the number belongs to another inode or to none.
    fn find_by_number(&self, ino: Ino) -> Result<Option<Ino>> {
        if !self.client.moves {
            return Ok(None);
        }
        let InodeWhereabouts::Lost(search) = self.client.table().locate(ino, self.epoch())? else {
            return Ok(None);
        };
        match self.connected.fs().getattr(self.cx, search.number, None) {
            Ok(attr) if search.is_same(&attr) => {
                self.client.table().record_found_by_number(ino, search.number, self.epoch());
                Ok(Some(search.number))
            }
            Err(Errno::ENOTCONN) => Err(Errno::ENOTCONN),
            _ => Ok(None),
        }
    }

    /// Collects the inodes that have to be found, from the inode up. Returns the number of the
    /// lowest directory that is known.
    fn collect_lost(&self, ino: Ino, searches: &mut Vec<InodeSearch>) -> Result<Ino> {
        let (mut next, table) = (ino, self.client.table());
        loop {
            match table.locate(next, self.epoch())? {
                InodeWhereabouts::Known(known) => return Ok(known),
                // A wrong server could make a directory lie in itself.
                InodeWhereabouts::Lost(_) if searches.len() > table.sizes().0 => {
                    return Err(Errno::ESTALE);
                }
                InodeWhereabouts::Lost(search) => {
                    let Some(place) = &search.place else { return Err(Errno::ESTALE) };
                    next = place.dir;
                    searches.push(search);
                }
            }
        }
    }

    fn search(&self, dir: Ino, search: &InodeSearch) -> Result<Ino> {
        let InodeSearch { ino, place, identity, birth, .. } = search;
        let Some(place) = place else { return self.record_missing(search) };
        let remote = self.connected.fs();
        let name = Name::new(&place.name).map_err(|_| Errno::ESTALE)?;
        let entry = match remote.lookup(self.cx, dir, name) {
            Ok(entry) => entry,
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE) => {
                return self.record_missing(search);
            }
            Err(errno) => return Err(errno),
        };
        let mut is_same = InodeIdentity::from_entry(&entry) == *identity;
        if is_same && birth.is_some() {
            let attr = remote.getattr(self.cx, entry.ino, None);
            match attr {
                Ok(attr) => is_same = attr.btime == *birth,
                Err(errno) => {
                    remote.forget(entry.ino, 1);
                    return Err(errno);
                }
            }
        }
        if !is_same {
            remote.forget(entry.ino, 1);
            return self.record_missing(search);
        }
        let superfluous = self.client.table().record_found(*ino, entry.ino, self.epoch());
        if let Some(ReturnedLookups { ino, lookups, .. }) = superfluous {
            remote.forget(ino, lookups);
        }
        Ok(entry.ino)
    }

    fn record_missing(&self, search: &InodeSearch) -> Result<Ino> {
        let name = search.place.as_ref().map(|place| place.name.escape_ascii().to_string());
        let name = name.unwrap_or_default();
        log::warn!("after the end of a server, {name} is not found again: ESTALE");
        self.client.table().is_gone(search.ino);
        Err(Errno::ESTALE)
    }

    /// Records an entry of this connection. Returns it with its number for the frontend.
    pub(super) fn learn(&self, place: Option<(Ino, Name<'_>)>, entry: Entry) -> Entry {
        let place = place.map(|(dir, name)| NamePlace { dir, name: name.as_bytes().into() });
        let opened = place.as_ref().and_then(|place| self.client.table().find_lost_open(place));
        if let Some(ino) = opened {
            // An inode that is found on this connection keeps its number.
            let _ = self.ino(ino);
        }
        let ino = self.client.table().learn(place, &entry, self.epoch());
        self.client.map_entry(Entry { ino, ..entry })
    }

    /// Returns an open file on this connection. Fails with `EIO` once after it has lost locks, and
    /// with `ESTALE` if the file is not there.
    pub(super) fn file(&self, file: File) -> Result<File> {
        self.file_or(file, Errno::EIO)
    }

    fn file_or(&self, file: File, lost_locks: Errno) -> Result<File> {
        if self.client.table().has_lost_locks(file.fh, self.epoch()) {
            log::error!("the locks of an open file were lost with a server: its next call fails");
            return Err(lost_locks);
        }
        let handle = self.client.table().handle(file, self.epoch())?;
        let ino = self.ino(file.ino)?;
        let (caller, flags, is_dir) = match handle {
            HandleState::Open(fh) => return Ok(File { ino, fh }),
            HandleState::Closed { caller, flags, is_dir } => (caller, flags, is_dir),
        };
        let remote = self.connected.fs();
        let cx = Context::new(caller);
        let opened = if is_dir {
            remote.opendir(&cx, ino, flags)
        } else {
            remote.open(&cx, ino, OpenArgs { flags, ..OpenArgs::default() })
        };
        let opened = match opened {
            Err(Errno::ENOTCONN) => return Err(Errno::ENOTCONN),
            Err(errno) => {
                log::warn!(
                    "after the end of a server, a file cannot be opened again ({errno}): ESTALE"
                );
                self.client.table().file_is_gone(file.fh);
                return Err(Errno::ESTALE);
            }
            Ok(opened) => opened,
        };
        let inner = File { ino, fh: opened.fh };
        if self.client.table().record_reopen(file.fh, opened.fh, self.epoch()) {
            return Ok(inner);
        }
        // Another thread was faster.
        self.close(inner, is_dir);
        match self.client.table().handle(file, self.epoch())? {
            HandleState::Open(fh) => Ok(File { ino, fh }),
            HandleState::Closed { .. } => Err(Errno::EBADF),
        }
    }

    pub(super) fn close(&self, inner: File, is_dir: bool) {
        let (remote, cx) = (self.connected.fs(), self.cx);
        let _ = if is_dir {
            remote.releasedir(cx, inner)
        } else {
            remote.release(cx, inner, defuse_fs::ReleaseArgs::default())
        };
    }

    /// Remembers the birth of a file, which distinguishes it from another one with its name and
    /// number.
    pub(super) fn remember_birth(&self, ino: Ino, inner: Ino) -> Result<()> {
        if self.client.table().lacks_birth(ino) {
            let attr = self.connected.fs().getattr(self.cx, inner, None);
            if attr == Err(Errno::ENOTCONN) {
                return Err(Errno::ENOTCONN);
            }
            self.client.table().record_birth(ino, attr.ok().and_then(|attr| attr.btime));
        }
        Ok(())
    }

    /// Records an acknowledged change of an inode.
    pub(super) fn record_change(&self, ino: Ino) {
        self.client.table().record_change(ino, self.epoch());
    }

    /// Records an open file. Returns it with its handle for the frontend.
    pub(super) fn record_open(
        &self,
        ino: Ino,
        how: (OpenFlags, bool),
        opened: OpenReply,
    ) -> OpenReply {
        let (caller, file) = (self.cx.caller, File { ino, fh: opened.fh });
        let mut table = self.client.table();
        let fh = table.record_open(file, (caller, how.0, how.1), self.epoch());
        if opened.no_flush {
            table.flush_ends_locks(fh);
        }
        // This client checks for lost changes at each close(2).
        self.client.map_open(OpenReply { fh, no_flush: false, ..opened })
    }

    /// An inode with an open file, if the call has one.
    pub(super) fn ino_and_file(&self, ino: Ino, fh: Option<Fh>) -> Result<(Ino, Option<Fh>)> {
        match fh {
            Some(fh) => self.file(File { ino, fh }).map(|file| (file.ino, Some(file.fh))),
            None => self.ino(ino).map(|ino| (ino, None)),
        }
    }

    /// Like [`file`](CallAttempt::file), but fails with `ENOLCK` for lost locks.
    pub(super) fn file_for_lock(&self, file: File) -> Result<File> {
        self.file_or(file, Errno::ENOLCK)
    }

    pub(super) fn connection(&self) -> CurrentConnection {
        self.connected.clone()
    }
}
