//! The trait that every backend implements and every frontend calls.

use std::sync::Arc;

use crate::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, Fallocate, Fh, File, Ino, Io,
    IoOp, IoctlArgs, IoctlReply, Lifecycle, Lock, LockOwner, LockRequest, LockWait, Name, NewNode,
    Notify, OpenArgs, OpenFlags, Opened, PollHandle, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags,
    Result, SetAttr, SetXattrFlags, StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};

/// A file system: inodes, and operations on them.
///
/// # Concurrency
///
/// Frontends call from any number of threads at once, also on one inode, one directory and one open
/// file; more of them where [`Caps::blocking`] is set. They promise no more than this:
///
/// * A caller's next call begins after the answer to its last one. Of two calls at the same time,
///   either may take effect first, but each takes effect at one moment: a rename is never half seen.
/// * [`release`](FileSystem::release) comes once for each open file, after every other call on its
///   handle has returned. The same holds for `releasedir`, and for the last
///   [`forget`](FileSystem::forget) of an inode.
/// * `attached` comes before the first operation of a frontend, and `detached` after its last one.
///
/// Some frontends keep more apart. The kernel sends one change of a directory's names at a time, and
/// one write to a file at a time unless [`Opened::parallel_direct_writes`] is set. The in-process client
/// and sockets do not. A client on a socket may also break the order of `release` and `forget`: a file
/// system that is served there answers calls on what it no longer knows by `EBADF` or `ESTALE`.
///
/// # Permissions
///
/// The frontend checks mode bits and ACLs before it calls (the kernel does with
/// `default_permissions`; the in-process frontends do as the kernel would), or calls
/// [`access`](FileSystem::access) where the file system decides. A backend need not check mode bits
/// again, but must refuse what it cannot do for `cx.caller`.
///
/// # Inode numbers and lookups
///
/// `lookup`, `mknod`, `mkdir`, `symlink`, `link`, `create`, `tmpfile` and every entry that
/// [`DirBuf::push_with`] accepts give the frontend one *lookup* of the inode. The number stays
/// valid until the frontend has given all of them back by [`forget`](FileSystem::forget), also
/// after the last name is gone: an unlinked file can be read and written through its number and
/// its open handles. [`Ino::ROOT`] needs no lookup. An inode that is not known any more (a frontend
/// bug, or a hostile client) gives `ESTALE`.
///
/// # Errors
///
/// Those of the system call with the same name, unless a method says more. A method that is not
/// implemented returns `ENOSYS`, and the frontend then does without for good; a method that
/// exists but not for this file or these flags returns `EOPNOTSUPP` or `EINVAL`. `EIO` says that
/// the backend failed. A panic is caught by the frontend and answers `EIO` to that call alone.
#[allow(unused_variables)]
pub trait FileSystem: Send + Sync {
    /// Facts from which the frontend derives its settings. Called once, before anything else.
    fn caps(&self) -> Caps {
        Caps::default()
    }

    /// Called once by the frontend when it is ready to serve; `notify` leads back to its caches. A
    /// file system with several frontends is attached several times and keeps all notifiers.
    fn attached(&self, notify: Arc<dyn Notify>) {}

    /// Called once by a frontend after its last operation (unmount, or the end of the session). Makes
    /// durable what the file system acknowledged and holds back itself. Errors: those of syncfs(2),
    /// where something could not be made durable; the frontend reports them to whoever unmounts.
    fn detached(&self) -> Result<()> {
        Ok(())
    }

    // ---- names ----------------------------------------------------------------------------

    /// The inode that `name` leads to in the directory `parent`; one lookup more. `ENOENT` where
    /// there is none, `ENOTDIR` where `parent` is not a directory.
    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry>;

    /// The parent of a directory, for `..` (in-process walks); one lookup more, unless it is the
    /// root, whose lookups do not count. The root's parent is the root.
    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Gives back `lookups` lookups of `ino`. No error is possible; too many are a frontend bug and
    /// are ignored. Never called for the root.
    fn forget(&self, ino: Ino, lookups: u64) {}

    /// The reactions of the file system to the process that uses it, where it has any.
    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        None
    }

    /// Makes a file, device, fifo or socket; one lookup more. `EEXIST` where the name is taken.
    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Makes a directory; one lookup more.
    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Makes a symbolic link with the text `target` (no NUL, 1 to 4095 bytes); one lookup more.
    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Gives `ino` another name; one lookup more of `ino`. `EPERM` for a directory.
    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Removes the name of something that is not a directory (`EISDIR`). The inode lives on while
    /// it is looked up or open.
    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Removes an empty directory. `ENOTEMPTY`, `ENOTDIR`.
    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Moves a name, renameat2(2). `EINVAL` for flags that are not known, or for moving a directory
    /// below itself.
    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The text of a symbolic link; `EINVAL` for anything else.
    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::ENOSYS)
    }

    // ---- attributes -----------------------------------------------------------------------

    /// The attributes of an inode, through the open handle `fh` where the caller has one. Also
    /// serves statx(2): a birth time is returned wherever it is known.
    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr>;

    /// Changes attributes, all those in `set` or none; returns the new ones. The change time of the
    /// inode moves with every change.
    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        Err(Errno::ENOSYS)
    }

    /// Checks the permissions `mask` of the caller: `EACCES`, `EROFS`. A frontend calls it only if the
    /// file system decides about permissions. `ENOSYS` permits everything.
    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets an extended attribute. `EEXIST`, `ENODATA` (see the flags), `EOPNOTSUPP` for a namespace
    /// that is not kept, `ENOSPC`.
    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The value of an extended attribute, for a caller with `room` bytes; [`Xattr::Size`] for a
    /// `room` of 0. `ENODATA` where it does not exist, `ERANGE` where it is larger.
    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// The names of all extended attributes, each followed by a NUL; `room` as for `getxattr`.
    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Removes an extended attribute. `ENODATA` where it does not exist.
    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    // ---- open files -----------------------------------------------------------------------

    /// Opens a file. `EISDIR` for writing to a directory. The default suits a file system without
    /// state per open file.
    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Makes a regular file and opens it; one lookup more. `EEXIST` where the name is taken: nobody
    /// has checked whether the caller may open what is there, so that a frontend opens it by
    /// [`open`](FileSystem::open) after a lookup and a check. `args.flags` always holds `O_EXCL`
    /// for that reason, and `O_CREAT` and `O_TRUNC` as the caller gave them. The default makes the
    /// node first and then opens it.
    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, Opened)> {
        let entry = self.mknod(cx, parent, name, node)?;
        // A new file is empty, so truncating it would only cost time.
        let creation = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
        let args = OpenArgs { flags: args.flags.without(creation), ..args };
        match self.open(cx, entry.ino, args) {
            Ok(opened) => Ok((entry, opened)),
            Err(errno) => {
                self.forget(entry.ino, 1);
                Err(errno)
            }
        }
    }

    /// Makes a regular file without a name in the file system of the directory `parent` and opens
    /// it (`O_TMPFILE`); one lookup more. With `O_EXCL` it can never be linked. `EOPNOTSUPP` where
    /// that cannot be done.
    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, Opened)> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Puts bytes from `args.offset` on into `out`. Fewer than there is room for means the end of
    /// the file (unless the file is a stream).
    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Writes the bytes of `data`; returns how many were taken. Fewer only where an error came
    /// after some (`ENOSPC`).
    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        Err(Errno::ENOSYS)
    }

    /// Starts an operation that may finish later; the answer goes through `io`, now or later, from any
    /// thread. Must not block for long. The default runs the synchronous method.
    ///
    /// Frontends send reads, writes, fsync, fsyncdir and syncfs here where [`Caps::submits`] is set.
    fn submit(&self, mut io: Io) {
        match io.op() {
            IoOp::Read { file, args, .. } => {
                let result = io.with_read_buf(|cx, out| self.read(cx, file, args, out));
                io.finish_filled(result);
            }
            IoOp::Write { file, args, .. } => {
                let result = io.with_write_buf(|cx, data| self.write(cx, file, args, data));
                io.finish(result);
            }
            IoOp::Fsync { file, datasync } => {
                let result = io.with_context(|cx| self.fsync(cx, file, datasync));
                io.finish(result.map(|()| 0));
            }
            IoOp::Fsyncdir { dir, datasync } => {
                let result = io.with_context(|cx| self.fsyncdir(cx, dir, datasync));
                io.finish(result.map(|()| 0));
            }
            IoOp::Syncfs => {
                let result = io.with_context(|cx| self.syncfs(cx));
                io.finish(result.map(|()| 0));
            }
        }
    }

    /// Called at every close(2) of a descriptor of the open file: reports errors of writes that
    /// were held back, and drops the POSIX locks of `owner`. May come more than once, or never.
    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Called once, when the last descriptor of the open file is closed; nobody waits for the
    /// result.
    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        Ok(())
    }

    /// Makes the data, and unless `datasync` all attributes, durable.
    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Allocates, punches, zeroes, collapses or inserts, fallocate(2). `EOPNOTSUPP` for a mode that
    /// is not supported. Set-user-id and its kin are cleared (see [`SetAttr::kill_suidgid`]) unless
    /// the caller's user is 0: FUSE does not say more.
    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The next data or hole at or after `offset`. `ENXIO` past the end of the file.
    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Copies bytes between open files; returns how many. The frontend copies by itself after
    /// `ENOSYS`, `EOPNOTSUPP` or `EXDEV`. Set-user-id is cleared as by
    /// [`fallocate`](FileSystem::fallocate).
    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Device control. `ENOTTY` for a request that is not known.
    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        Err(Errno::ENOTTY)
    }

    /// Returns those of the events (`POLLIN`, ... of poll(2)) that are ready. With `wake`, the file system later
    /// calls [`Notify::poll_wake`] once when one of them becomes ready. `ENOSYS` means: always ready.
    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        Err(Errno::ENOSYS)
    }

    /// The block on the underlying device that holds block `index` (in units of `block_size` bytes).
    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    // ---- locks ----------------------------------------------------------------------------

    /// The first lock that stands against `request`, or `None`.
    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        Err(Errno::ENOSYS)
    }

    /// Takes, changes or drops a lock. `EAGAIN` where another owner's lock conflicts. With `wait` it is
    /// called by the default of [`setlkw`](FileSystem::setlkw) only.
    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Takes a lock, waiting until it can be had. The answer goes through `wait`, now or later, from
    /// any thread: `EDEADLK` where waiting could never end, `EINTR` when interrupted, `ENOSYS` where
    /// the file system keeps no locks. Must not block: the thread has to receive the unlock. The
    /// default suits a file system without locks; it calls [`setlk`](FileSystem::setlk) once.
    fn setlkw(&self, wait: LockWait) {
        let (file, request) = (wait.file(), wait.request());
        let result = wait.with_context(|cx| self.setlk(cx, file, &request));
        wait.finish(result);
    }

    // ---- directories ----------------------------------------------------------------------

    /// Opens a directory. `ENOTDIR`.
    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Lists entries from the position `from`: 0 for the start, otherwise a [`next`] that an entry
    /// gave. An entry that stays during the whole listing is seen exactly once. Nothing pushed
    /// means the end.
    ///
    /// [`next`]: crate::DirItem::next
    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()>;

    /// Ends what opendir began.
    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        Ok(())
    }

    /// Makes the names of a directory durable.
    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    // ---- the file system as a whole -------------------------------------------------------

    /// Space and inodes, of the file system that holds `ino`.
    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        Ok(StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() })
    }

    /// Makes everything durable, syncfs(2).
    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::{Caller, FileKind};

    /// A directory in which one name is taken.
    #[derive(Default)]
    struct OneName {
        opened: AtomicU64,
    }

    impl FileSystem for OneName {
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::EIO)
        }
        fn mknod(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
            Err(Errno::EEXIST)
        }
        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
            Err(Errno::EIO)
        }
        fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<Opened> {
            self.opened.fetch_add(1, Ordering::Relaxed);
            Ok(Opened::default())
        }
        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Err(Errno::ENOTDIR)
        }
    }

    /// CREATE once opened what had the name, whoever owned it: a frontend checks permissions of what
    /// it opens, and it believed that this file was new.
    #[test]
    fn create_never_opens_what_is_there() {
        let fs = OneName::default();
        let cx = Context::new(Caller::default());
        let name = Name::new(b"a").unwrap();
        let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
        for flags in [OpenFlags::CREAT, OpenFlags::CREAT | OpenFlags::EXCL] {
            let args = OpenArgs { flags: OpenFlags(flags), kill_suidgid: false };
            let made = fs.create(&cx, Ino::ROOT, name, &node, args);
            assert_eq!(made.err(), Some(Errno::EEXIST));
        }
        assert_eq!(fs.opened.load(Ordering::Relaxed), 0);
    }
}
