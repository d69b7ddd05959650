//! Lookups: from a name to an inode.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Entry, Errno, FileKind, Ino, OpenFlags, OpenReply, Result};
use rustix::fs::{Mode, OFlags};
use rustix::path::Arg;

use crate::data::{OpenDescriptors, keeps_bits};
use crate::handle::CompactHandle;
use crate::lower::{OrErrno, StatxResult};
use crate::passthrough::Passthrough;
use crate::proc_path::ProcPath;
use crate::sys;
use crate::tables::inode::{FoundInode, InodeKey, LowerInode, ReopenMethod};
use crate::tables::young::ClockTick;

/// The use of the descriptor by which an inode was found.
enum DescriptorUse {
    Nothing,
    Pinned(OwnedFd),
    /// Until the clock has passed the birth time.
    PinnedYoung(OwnedFd),
    Cached(OwnedFd),
}

impl Passthrough {
    /// Looks up `name` in the directory `dir`, which is open as `fd`. Counts a lookup.
    pub(crate) fn lookup_in(
        &self,
        dir: &Arc<LowerInode>,
        fd: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<Entry> {
        if let Some(covered) = self.lookup_covered(dir, name) {
            return covered;
        }
        let stat = self.stat_at(dir, fd, name)?;
        let entry = self.find_in(dir.key.mount, fd, name, &stat)?;
        self.note_place(entry.ino, dir, name);
        Ok(entry)
    }

    /// Looks up `name`, which was made just now, in the directory `dir`, which is open as `fd`.
    /// Counts a lookup.
    pub(crate) fn lookup_new_in(
        &self,
        dir: &Arc<LowerInode>,
        fd: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<Entry> {
        let entry = self.find_new_in(dir.key.mount, fd, name)?;
        self.note_place(entry.ino, dir, name);
        Ok(entry)
    }

    /// Looks up `name` like [`lookup_in`](Self::lookup_in), and opens it if it is a regular file
    /// that can be opened.
    pub(crate) fn lookup_in_to_open(
        &self,
        dir: &Arc<LowerInode>,
        fd: BorrowedFd<'_>,
        name: &[u8],
        flags: OpenFlags,
    ) -> Result<(Entry, Option<OpenReply>)> {
        if let Some(covered) = self.lookup_covered(dir, name) {
            return Ok((covered?, None));
        }
        let stat = self.stat_at(dir, fd, name)?;
        if stat.kind() == Ok(FileKind::Regular)
            && let Some((entry, opened)) = self.open_in(dir, fd, name, flags)?
        {
            return Ok((entry, Some(opened)));
        }
        let entry = self.find_in(dir.key.mount, fd, name, &stat)?;
        self.note_place(entry.ino, dir, name);
        Ok((entry, None))
    }

    fn stat_at(
        &self,
        dir: &Arc<LowerInode>,
        fd: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<StatxResult> {
        StatxResult::read_at(fd, name).inspect_err(|_| self.note_absent(dir, name))
    }

    /// Opens `name` in `dir`, which was a regular file just now. All results describe the open
    /// file, because the name may have changed meanwhile. Returns `None` if it cannot be opened, or
    /// is another kind of file. Fails with `EINTR`.
    fn open_in(
        &self,
        dir: &Arc<LowerInode>,
        fd: BorrowedFd<'_>,
        name: &[u8],
        flags: OpenFlags,
    ) -> Result<Option<(Entry, OpenReply)>> {
        let how = self.lower_flags(flags);
        self.open_by_name((dir, fd), name, (flags, how), Mode::empty())
    }

    /// Opens the file `name` in `dir` with `O_CREAT`, if it is a regular file. The kernel checks
    /// everything, among others if `O_CREAT` may open files of others there. Returns `None` and
    /// fails like [`open_in`](Self::open_in).
    pub(crate) fn open_existing(
        &self,
        (dir, fd): (&Arc<LowerInode>, BorrowedFd<'_>),
        name: &[u8],
        flags: OpenFlags,
        mode: Mode,
    ) -> Result<Option<(Entry, OpenReply)>> {
        if self.is_own_mount(dir, name) {
            return Ok(None);
        }
        let stat = self.stat_at(dir, fd, name);
        if !stat.is_ok_and(|stat| stat.kind() == Ok(FileKind::Regular)) {
            return Ok(None);
        }
        let how = self.lower_flags(flags) | OFlags::CREATE;
        self.open_by_name((dir, fd), name, (flags, how), mode)
    }

    fn open_by_name(
        &self,
        (dir, fd): (&Arc<LowerInode>, BorrowedFd<'_>),
        name: &[u8],
        (flags, how): (OpenFlags, OFlags),
        mode: Mode,
    ) -> Result<Option<(Entry, OpenReply)>> {
        let how = how | OFlags::NOFOLLOW | OFlags::NOCTTY | self.close_on_exec(flags);
        let open = || rustix::fs::openat(fd, name, how, mode).or_errno();
        let file = match self.with_spare_fds(open) {
            Ok(file) => file,
            Err(Errno::EINTR) => return Err(Errno::EINTR),
            Err(_) => return Ok(None),
        };
        let stat = StatxResult::read(file.as_fd());
        let Some(stat) = stat.ok().filter(|stat| stat.kind() == Ok(FileKind::Regular)) else {
            return Ok(None);
        };
        let file = self.divide((file, how), flags, !keeps_bits(flags, stat.perm()));
        Ok(self.enter_open(dir, name, (file, &stat), flags).ok())
    }

    /// Adds the open file that has the name `name` in `dir`, with its inode. Counts a lookup.
    fn enter_open(
        &self,
        dir: &Arc<LowerInode>,
        name: &[u8],
        (file, stat): (OpenDescriptors, &StatxResult),
        flags: OpenFlags,
    ) -> Result<(Entry, OpenReply)> {
        let (mount, entry) = self.enter_open_fd(dir.key.mount, &file.own, stat)?;
        self.note_place(entry.ino, dir, name);
        let opened =
            self.add_open_file(mount, file, flags).inspect_err(|_| self.forget(entry.ino, 1))?;
        Ok((entry, opened))
    }

    /// Looks up `name` in `dir`, a directory on the mount `likely`. It had this status just now.
    fn find_in(
        &self,
        likely: u32,
        dir: BorrowedFd<'_>,
        name: &[u8],
        stat: &StatxResult,
    ) -> Result<Entry> {
        let Some(index) = self.mounts.find(stat.mount_id(), likely) else {
            return self.lookup_by_fd(likely, dir, name);
        };
        if self.needs_descriptor(index, stat) {
            return self.lookup_by_fd(index, dir, name);
        }
        let mount = self.mounts.get(index)?;
        let kept = self.keeps_descriptors();
        let is_usable =
            |key: &InodeKey| !kept || self.inodes.peek(key).is_some_and(|inode| inode.is_pinned());
        if let Some(key) = mount.key(index, stat, None)
            && is_usable(&key)
            && let Some(ino) = self.acquire(&key)
        {
            return self.entry(ino, index, stat);
        }
        self.find_new_in(index, dir, name)
    }

    /// Looks up `name` in `dir`, where it leads to an inode on the mount `index` that is probably
    /// new.
    ///
    /// The name may change between the system calls. This is detected, because the file handle
    /// contains the inode number. The lookup then uses a descriptor, which always refers to one
    /// inode.
    fn find_new_in(&self, index: u32, dir: BorrowedFd<'_>, name: &[u8]) -> Result<Entry> {
        let mount = self.mounts.get(index)?;
        if !mount.handles || self.keeps_descriptors() {
            return self.lookup_by_fd(index, dir, name);
        }
        let tick = ClockTick::now();
        let handle = handle_of(dir, name)?;
        // After the handle: the attributes of a predecessor would let its owner open the inode of
        // the handle.
        let stat = StatxResult::read_at(dir, name)?;
        let is_same = handle.names(mount.f_type, stat.ino()) == Some(true);
        if !is_same || stat.mount_id() != mount.id {
            return self.lookup_by_fd(index, dir, name);
        }
        let is_unique = self.is_unique(&mount, &stat, tick);
        self.enter(index, &stat, Some(handle), (DescriptorUse::Nothing, is_unique))
    }

    /// Looks up a name by opening it: without file handles, at mount points, and if the name
    /// changes meanwhile.
    fn lookup_by_fd(&self, likely: u32, dir: BorrowedFd<'_>, name: &[u8]) -> Result<Entry> {
        let fd = self.open_path_at(dir, name)?;
        self.enter_path_fd(likely, fd, true)
    }

    /// An `O_PATH` descriptor of `name` in `dir`.
    pub(crate) fn open_path_at(&self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.with_spare_fds(|| rustix::fs::openat(dir, name, flags, Mode::empty()).or_errno())
    }

    /// Adds the inode of an `O_PATH` descriptor. Counts a lookup. If `named` is set, the caller
    /// knows its name and records it.
    pub(crate) fn enter_path_fd(&self, likely: u32, fd: OwnedFd, named: bool) -> Result<Entry> {
        let stat = StatxResult::read(fd.as_fd())?;
        let (index, handle) = self.identify(likely, fd.as_fd(), &stat)?;
        let is_unique = self.is_unique(&*self.mounts.get(index)?, &stat, ClockTick::now());
        let kept = match &handle {
            Some(_) if !self.keeps_descriptors() => DescriptorUse::Nothing,
            None if named && self.is_reopened(&stat) && is_unique => DescriptorUse::Cached(fd),
            None if named && self.is_reopened(&stat) => DescriptorUse::PinnedYoung(fd),
            _ => DescriptorUse::Pinned(fd),
        };
        self.enter(index, &stat, handle, (kept, is_unique))
    }

    /// Adds the inode of a file that is open as `fd` and has this status. Counts a lookup. The
    /// caller records its name. Also returns the index of its mount.
    pub(crate) fn enter_open_fd(
        &self,
        likely: u32,
        fd: &Arc<OwnedFd>,
        stat: &StatxResult,
    ) -> Result<(u32, Entry)> {
        if let Some((index, key)) = self.key_of_open_file(likely, stat) {
            let way = ReopenMethod::OpenFile(Arc::clone(fd));
            let kind = stat.kind()?;
            let new = FoundInode { key, kind, way, pin: None, key_is_unique: true };
            let ino = self.keep_added(self.inodes.insert(new)?);
            return Ok((index, self.entry(ino, index, stat)?));
        }
        let (index, handle) = self.identify(likely, fd.as_fd(), stat)?;
        // A file without a name cannot be found by its handle.
        let is_unique = self.is_unique(&*self.mounts.get(index)?, stat, ClockTick::now());
        let by_handle = handle.is_some() && !self.keeps_descriptors() && stat.nlink() > 0;
        let kept = match (by_handle, self.is_reopened(stat)) {
            (true, _) => DescriptorUse::Nothing,
            (false, true) if is_unique => DescriptorUse::Nothing,
            (false, true) => DescriptorUse::PinnedYoung(self.path_of(fd.as_fd())?),
            (false, false) => DescriptorUse::Pinned(self.path_of(fd.as_fd())?),
        };
        Ok((index, self.enter(index, stat, handle, (kept, is_unique))?))
    }

    /// An `O_PATH` descriptor of an open file.
    pub(crate) fn path_of(&self, fd: BorrowedFd<'_>) -> Result<OwnedFd> {
        let path = ProcPath::new(fd);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        self.with_spare_fds(|| rustix::fs::open(path.as_c_str(), flags, Mode::empty()).or_errno())
    }

    pub(crate) fn identify(
        &self,
        likely: u32,
        fd: BorrowedFd<'_>,
        stat: &StatxResult,
    ) -> Result<(u32, Option<CompactHandle>)> {
        let index = match self.mounts.find(stat.mount_id(), likely) {
            Some(index) => index,
            None => {
                let (index, root) = self.enter_mount(fd, stat)?;
                if let Some(root) = root {
                    self.keep_root(index, root);
                }
                index
            }
        };
        let handles = self.mounts.get(index)?.handles;
        let handle = if handles { Some(sys::name_to_handle(fd, c"")?) } else { None };
        Ok((index, handle))
    }

    /// Adds an inode. With `key_is_unique`, no later one can have its key.
    fn enter(
        &self,
        index: u32,
        stat: &StatxResult,
        handle: Option<CompactHandle>,
        (kept, key_is_unique): (DescriptorUse, bool),
    ) -> Result<Entry> {
        let key = self.mounts.get(index)?.key(index, stat, handle.as_ref()).ok_or(Errno::EIO)?;
        let is_young = matches!(kept, DescriptorUse::PinnedYoung(_));
        let is_pinned = matches!(kept, DescriptorUse::Pinned(_));
        let (pin, cached) = match kept {
            DescriptorUse::Nothing => (None, None),
            DescriptorUse::Pinned(fd) | DescriptorUse::PinnedYoung(fd) => {
                (Some(self.place_descriptor(fd)), None)
            }
            DescriptorUse::Cached(fd) => (None, Some(Arc::new(self.place_descriptor(fd)))),
        };
        let way = handle.map_or(ReopenMethod::Names, ReopenMethod::Handle);
        let new = FoundInode { key, kind: stat.kind()?, way, pin, key_is_unique };
        let by_descriptor = is_pinned && new.pin.is_some() && self.changes_numbers(index);
        let inserted = if by_descriptor {
            self.insert_by_descriptor(new, self.needs_descriptor(index, stat))?
        } else {
            self.inodes.insert(new)?
        };
        if by_descriptor && !inserted.1 {
            return self.entry_by_descriptor(inserted.0);
        }
        let ino = self.keep_added(inserted);
        if is_young {
            self.note_young(ino);
        }
        if is_pinned {
            self.prune_if_many();
            if self.is_foreign(index)
                && let Ok(inode) = self.inodes.get(ino)
            {
                self.foreign.add_pinned(&inode);
            }
        }
        if let Some(fd) = cached
            && let Ok(inode) = self.inodes.get(ino)
            && !inode.is_pinned()
        {
            self.cache_fd(&inode, &fd, inode.kind == FileKind::Directory);
        }
        self.entry(ino, index, stat)
    }

    /// The entry of a known inode that has a descriptor, by which it may have other numbers than by
    /// its name.
    fn entry_by_descriptor(&self, ino: Ino) -> Result<Entry> {
        let attr = self.getattr(ino, None).inspect_err(|_| self.forget(ino, 1))?;
        Ok(Entry { ino, generation: 0, attr, valid_for: self.options.entry_valid_for })
    }

    fn entry(&self, ino: Ino, mount: u32, stat: &StatxResult) -> Result<Entry> {
        let attr = stat.attr(mount, self.options.attr_valid_for).inspect_err(|_| {
            self.forget(ino, 1);
        })?;
        Ok(Entry { ino, generation: 0, attr, valid_for: self.options.entry_valid_for })
    }

    /// Decreases the lookup count. After the last lookup, closes the descriptors of the inode.
    pub(crate) fn forget(&self, ino: Ino, lookups: u64) {
        if let Some(inode) = self.inodes.forget(ino, lookups) {
            self.cache_of(&inode).remove(&inode);
            drop(self.recent.take(inode.number));
            self.positions.forget(ino);
            if self.changes_numbers(inode.key.mount) {
                self.watches.forget(ino);
            }
            if self.forwards_locks() {
                self.locks.forget(ino);
            }
        }
    }

    /// The directory below the own mount, if that is `name` in `dir`.
    fn find_covered(&self, dir: &LowerInode, name: &[u8]) -> Option<BorrowedFd<'_>> {
        let own = self.own_mount.as_ref()?;
        let mount = self.mounts.get(dir.key.mount).ok()?;
        own.is_at(mount.id, dir.key.ino, name).then(|| own.covered_dir())
    }

    /// True if the own mount is `name` in `dir`. A system call with that name would call this file
    /// system.
    pub(crate) fn is_own_mount(&self, dir: &LowerInode, name: &[u8]) -> bool {
        self.find_covered(dir, name).is_some()
    }

    /// Looks up the directory below the own mount, if that is `name` in `dir`. Counts a lookup.
    fn lookup_covered(&self, dir: &LowerInode, name: &[u8]) -> Option<Result<Entry>> {
        let covered = self.find_covered(dir, name)?;
        let copy = self.with_spare_fds(|| rustix::io::fcntl_dupfd_cloexec(covered, 0).or_errno());
        Some(copy.and_then(|fd| self.enter_path_fd(dir.key.mount, fd, false)))
    }
}

/// The file handle of `name` in `dir`.
fn handle_of(dir: BorrowedFd<'_>, name: &[u8]) -> Result<CompactHandle> {
    // Names of up to 255 bytes are NUL-terminated on the stack.
    name.into_with_c_str(|name| Ok(sys::name_to_handle(dir, name))).or_errno()?
}
