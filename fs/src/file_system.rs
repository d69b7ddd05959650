//! The trait that every backend implements and every frontend calls.

use std::sync::Arc;
use std::time::Duration;

use crate::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, FailureDomain, Fallocate, Fh,
    Figure, File, Ino, Io, IoctlArgs, IoctlReply, Lifecycle, Lock, LockOwner, LockRequest,
    LockWait, Name, NewNode, Notify, OpenArgs, OpenFlags, OpenReply, Origin, PollHandle, ReadArgs,
    ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags, Shortcuts, StatFs, Whence,
    WriteArgs, WriteBuf, Xattr, XattrName,
};

/// A file system: inodes, and operations on them.
///
/// # Concurrency
///
/// Frontends call from any number of threads at once, also for one inode, one directory or one open
/// file. They use more threads if [`Caps::blocking`] is set. They guarantee only the following:
///
/// * A caller's next call begins after its previous call has been answered. Of two concurrent calls
///   either may take effect first, but each is atomic: a rename is never seen half done.
/// * [`release`](FileSystem::release) is called once for each open file, after all other calls on
///   its handle have returned. The same is true for `releasedir`, and for the last
///   [`forget`](FileSystem::forget) of an inode.
/// * `attached` is called before the first operation of a frontend, and `detached` after its last.
///
/// Some frontends serialize more. The kernel sends one change of a directory's names at a time, and
/// one write to a file at a time unless [`OpenReply::parallel_direct_writes`] is set. The
/// in-process client and sockets do not. A client on a socket may also violate the order of
/// `release` and `forget`: a file system that is served there answers calls with unknown handles or
/// inodes by `EBADF` or `ESTALE`.
///
/// # Permissions
///
/// The frontend checks mode bits and ACLs before it calls. The kernel does so with
/// `default_permissions`, and the in-process frontends follow its rules. Otherwise the frontend
/// calls [`access`](FileSystem::access). A backend need not check mode bits again, but must refuse
/// operations that it cannot perform for `cx.caller`.
///
/// # Inode numbers and lookups
///
/// `lookup`, `mknod`, `mkdir`, `symlink`, `link`, `create`, `tmpfile` and every entry that
/// [`DirBuf::push_with`] accepts add one *lookup* of the inode. The number remains valid until the
/// frontend has returned all lookups by [`forget`](FileSystem::forget), also after the last name
/// was removed: an unlinked file can be read and written through its number and its open handles.
/// [`Ino::ROOT`] needs no lookup. An unknown inode (a bug in the frontend, or a hostile client)
/// results in `ESTALE`.
///
/// # Errors
///
/// Methods return the errors of the system call with the same name, and those that they document. A
/// method that is not implemented returns `ENOSYS`, and the frontend then no longer calls it. A
/// method that does not support this file or these flags returns `EOPNOTSUPP` or `EINVAL`. `EIO`
/// means that the backend failed. The frontend catches panics, and answers `EIO` to that call only.
#[allow(unused_variables)]
pub trait FileSystem: Send + Sync {
    /// The properties from which the frontend derives its settings. Called once, before anything
    /// else.
    fn caps(&self) -> Caps {
        Caps::default()
    }

    /// The time for which the frontend `origin` may cache that a name does not exist. Called after
    /// each lookup that failed with `ENOENT`, unless [`Caps::negative_lifetime`] is 0, which is
    /// also the default.
    fn negative_lifetime(&self, origin: Origin) -> Duration {
        self.caps().negative_lifetime
    }

    /// Called once by the frontend when it is ready to serve. `origin` is the one in the contexts
    /// of its operations, and `notify` gives access to its caches. A file system with several
    /// frontends is attached several times, and keeps all notifiers
    /// ([`Frontends`](crate::Frontends)). One that a frontend has at several places is attached
    /// once for each, with one origin.
    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {}

    /// Called once by the frontend `origin` after its last operation (unmount, or the end of the
    /// session), and with [`Origin::NONE`] by a server at its end.
    /// Makes all acknowledged changes durable that the file system has kept in memory. Fails with
    /// the errors of syncfs(2) if that is not possible; the frontend reports them to the unmounting
    /// process.
    fn detach(&self, origin: Origin) -> Result<()> {
        Ok(())
    }

    /// Figures of the file system about itself for its operator, such as requests to its device or
    /// memory in use, each name once. A frontend shows them with its own statistics, at any time
    /// between `attached` and `detached` and afterwards, from any thread. Must not wait for a
    /// device or a network.
    ///
    /// They concern all users of the file system. A layer for a client that is not the operator
    /// returns none.
    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }

    /// Sentences for the operator about the functions that the file system lacks at this moment,
    /// and why: one line each, and few of them. Empty without such a lack. A frontend shows them
    /// after the [`figures`](FileSystem::figures), at the same times, and to the same users.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    // ---- names ----------------------------------------------------------------------------

    /// Looks up `name` in the directory `parent`, which adds a lookup. Fails with `ENOENT` if there
    /// is none, and with `ENOTDIR` if `parent` is not a directory.
    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry>;

    /// Looks up the parent of a directory: LOOKUP of `..` in FUSE, and `..` in in-process path
    /// walks. Adds a lookup, except for the root, whose lookups do not count. The parent of the
    /// root is the root.
    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Returns `lookups` lookups of `ino`. Cannot fail: an excess, which is a bug of the frontend,
    /// is ignored. Never called for the root.
    fn forget(&self, ino: Ino, lookups: u64) {}

    /// The part of the storage that requests about `ino` need, if the file system has parts that
    /// fail apart from each other. A frontend with threads of its own then keeps some of them for
    /// requests that need other parts, so that one which does not answer holds up only what needs
    /// it. It is called before each request, for inodes that may be unknown, so it neither waits
    /// nor calls another process: it may err, which costs only this protection.
    ///
    /// `name` is the name in the directory `ino` that the request is about. It is not given where a
    /// directory is made or removed, which a distributed file system does in several parts.
    fn failure_domain(&self, ino: Ino, name: Option<Name<'_>>) -> Option<FailureDomain> {
        None
    }

    /// The reactions of the file system to the process that uses it, if any.
    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        None
    }

    /// Faster ways to results of the other methods, if the file system has any. A frontend looks
    /// for them by [`shortcuts_of`](crate::shortcuts_of) each time: the call must cost nothing.
    ///
    /// A layer hides the shortcuts of the inner file system, unless it passes them on (see
    /// [`Shortcuts`]).
    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        None
    }

    /// Creates a file, device, fifo or socket. Adds a lookup. Fails with `EEXIST` if the name
    /// exists.
    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Creates a directory. Adds a lookup.
    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Creates a symbolic link with the text `target` (no NUL, 1 to 4095 bytes). Adds a lookup.
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

    /// Creates another name of `ino`. Adds a lookup. Fails with `EPERM` for a directory.
    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::ENOSYS)
    }

    /// Removes a name that is not a directory's (`EISDIR`). The inode exists as long as it has
    /// lookups or is open.
    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Removes an empty directory. Fails with `ENOTEMPTY` or `ENOTDIR`.
    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Renames, renameat2(2). Fails with `EINVAL` for unknown flags, and for moving a directory
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

    /// Returns the text of a symbolic link. Fails with `EINVAL` for other files.
    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::ENOSYS)
    }

    // ---- attributes -----------------------------------------------------------------------

    /// Returns the attributes of an inode, through the open handle `fh` if the caller has one. Also
    /// serves statx(2): includes the birth time if it is known.
    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr>;

    /// Sets all attributes in `set`, or none. Returns the new attributes. Every change updates the
    /// change time of the inode.
    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        Err(Errno::ENOSYS)
    }

    /// Checks the permissions `mask` of the caller. Fails with `EACCES` or `EROFS`. A frontend
    /// calls it only if the file system checks permissions. `ENOSYS` permits everything.
    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets an extended attribute. Fails with `EEXIST` or `ENODATA` (see the flags), with
    /// `EOPNOTSUPP` for an unsupported namespace, and with `ENOSPC`.
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

    /// Returns the value of an extended attribute for a buffer of `room` bytes; [`Xattr::Size`] for
    /// a `room` of 0. Fails with `ENODATA` if it does not exist, and with `ERANGE` if it is larger.
    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Returns the names of all extended attributes, each followed by a NUL; `room` as for
    /// `getxattr`.
    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Removes an extended attribute. Fails with `ENODATA` if it does not exist.
    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    // ---- open files -----------------------------------------------------------------------

    /// Opens a file. Fails with `EISDIR` when a directory is opened for writing. The default suits
    /// a file system without state per open file.
    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        Ok(OpenReply::default())
    }

    /// Creates a regular file and opens it. Adds a lookup. Fails with `EEXIST` if the name exists:
    /// the permissions of the existing file were not checked, so that a frontend opens it by
    /// [`open`](FileSystem::open) after a lookup and a check. `args.flags` therefore always has
    /// `O_EXCL`, and `O_CREAT` and `O_TRUNC` as passed by the caller. The default calls `mknod` and
    /// `open`.
    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let entry = self.mknod(cx, parent, name, node)?;
        // A new file is empty, and truncating it would only take time.
        let creation = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
        let args = OpenArgs { flags: args.flags.difference(creation), ..args };
        match self.open(cx, entry.ino, args) {
            Ok(opened) => Ok((entry, opened)),
            Err(errno) => {
                self.forget(entry.ino, 1);
                Err(errno)
            }
        }
    }

    /// Creates an unnamed regular file in the file system of the directory `parent` and opens it
    /// (`O_TMPFILE`). Adds a lookup. With `O_EXCL` it can never be linked. Fails with `EOPNOTSUPP`
    /// if that is not supported.
    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Reads data from `args.offset` on into `out`. Fewer bytes than the buffer has room for mean
    /// end of file, except for a stream.
    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Writes `data`, and returns the number of bytes. It is smaller only if an error such as
    /// `ENOSPC` occurred after some bytes.
    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        Err(Errno::ENOSYS)
    }

    /// Starts an operation that may finish later. The result is passed to `io`, at any time and
    /// from any thread. Must not block for long. The default calls the synchronous method.
    ///
    /// Frontends submit reads, writes, fsync, fsyncdir and syncfs here if [`Caps::submits`] is set.
    fn submit(&self, io: Io) {
        io.perform(self);
    }

    /// Called at every close(2) of a descriptor of the open file. Reports errors of delayed writes,
    /// and drops the POSIX locks of `owner`. May be called several times, or never.
    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Called once, when the last descriptor of the open file is closed. No caller waits for the
    /// result.
    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        Ok(())
    }

    /// Makes the data durable, and all attributes unless `datasync` is set.
    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Allocates, punches, zeroes, collapses or inserts a range, fallocate(2). Fails with
    /// `EOPNOTSUPP` for an unsupported mode. Clears set-user-id and set-group-id (see
    /// [`SetAttr::kill_suidgid`]) unless the caller's user is 0, because FUSE does not pass more
    /// information.
    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Returns the next data or hole at or after `offset`. Fails with `ENXIO` past the end of the
    /// file.
    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Copies data between open files. Returns the number of bytes. After `ENOSYS`, `EOPNOTSUPP` or
    /// `EXDEV` the frontend copies by itself. Clears set-user-id like
    /// [`fallocate`](FileSystem::fallocate).
    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Device control, ioctl(2). Fails with `ENOTTY` for an unknown request.
    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        Err(Errno::ENOTTY)
    }

    /// Returns the events (`POLLIN`, ... of poll(2)) that are ready. With `wake`, the file system
    /// later calls [`Notify::poll_wake`] once when one of them becomes ready. `ENOSYS` means:
    /// always ready.
    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        Err(Errno::ENOSYS)
    }

    /// Returns the block on the underlying device that contains block `index` (in units of
    /// `block_size` bytes).
    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    // ---- locks ----------------------------------------------------------------------------

    /// Returns the first lock that conflicts with `request`, or `None`.
    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        Err(Errno::ENOSYS)
    }

    /// Takes, changes or drops a lock. Fails with `EAGAIN` if another owner's lock conflicts. With
    /// `wait` set, only the default of [`setlkw`](FileSystem::setlkw) calls it.
    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Takes a lock, and waits until it is available. The result is passed to `wait`, at any time
    /// and from any thread: `EDEADLK` for a deadlock, `EINTR` after an interrupt, `ENOSYS` if the
    /// file system keeps no locks. Must not block, because the thread must receive the unlock. The
    /// default suits a file system without locks; it calls [`setlk`](FileSystem::setlk) once.
    fn setlkw(&self, wait: LockWait) {
        let (file, request) = (wait.file(), wait.request());
        let result = wait.with_context(|cx| self.setlk(cx, file, &request));
        wait.finish(result);
    }

    // ---- directories ----------------------------------------------------------------------

    /// Opens a directory. Fails with `ENOTDIR`.
    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        Ok(OpenReply::default())
    }

    /// Lists entries from the position `from`: 0 for the start, otherwise the [`next`] of an entry.
    /// An entry that exists during the whole listing is listed exactly once. If nothing is pushed,
    /// the listing has ended.
    ///
    /// [`next`]: crate::DirItem::next
    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()>;

    /// Releases a directory from opendir.
    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        Ok(())
    }

    /// Makes the entries of a directory durable.
    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    // ---- the file system as a whole -------------------------------------------------------

    /// Returns space and inode counts of the file system that contains `ino`.
    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        Ok(StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() })
    }

    /// Makes all data durable, syncfs(2).
    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::{Caller, FileKind};

    /// A directory with one existing name.
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
        fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
            self.opened.fetch_add(1, Ordering::Relaxed);
            Ok(OpenReply::default())
        }
        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Err(Errno::ENOTDIR)
        }
    }

    /// CREATE opened an existing file of any owner. A frontend checks the permissions of files that
    /// it opens, but it took this file for new.
    #[test]
    fn create_never_opens_an_existing_file() {
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
