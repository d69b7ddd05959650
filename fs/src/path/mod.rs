//! The high-level way to write a file system: operations on paths, without inodes and lookups.
//!
//! [`PathFileSystem`] is the trait; [`PathAdapter`] makes a [`FileSystem`](crate::FileSystem) of
//! it, by keeping the tree of those names that a frontend knows.
//!
//! # What happens at the same time
//!
//! The adapter gives a path to the backend only while no name on it is being changed through the
//! same adapter: an operation shares the names on its path, and unlink, rmdir, rename and whatever
//! makes a name have the name they change for themselves, until the backend has answered. So a path
//! never leads to a file other than the one that was meant. No lock of the tree is held meanwhile:
//! an operation waits for another only where one of them changes a name that the other uses, and
//! gives up with `EINTR` when its caller does. Waiting for a lock (`setlk`) holds no names; there
//! the path is a hint and the handle counts.
//!
//! Changes by others behind the adapter's back cannot be prevented: a path then leads to
//! what is there now, or to `ENOENT`; with [`PathCaps::stable_ino`], getattr notices and answers
//! `ESTALE`. A file that has no name left and no open handle gives `ESTALE`; a name in a removed
//! directory gives `ENOENT`.

mod adapter;
mod handles;
mod held;
mod remove;
#[cfg(test)]
pub(crate) mod tests;
mod tree;
mod types;

pub use adapter::PathAdapter;
pub use types::{PathCaps, PathCopy, PathDirEntry, PathFile, PathRef, Target};

use std::sync::Arc;

use crate::{
    AccessMask, Attr, Context, Errno, Fallocate, IoctlArgs, IoctlReply, Lock, LockOwner,
    LockRequest, NewNode, Notify, OpenArgs, OpenFlags, Opened, PollHandle, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, Result, SetAttr, SetTime, SetXattrFlags, StatFs, Whence, WriteArgs,
    WriteBuf, Xattr, XattrName,
};

/// A file system in terms of paths.
///
/// Called by [`PathAdapter`], from any number of threads at once. Errors are those of the system
/// call with the same name, `ENOSYS` for what is not implemented; more in
/// [`FileSystem`](crate::FileSystem), whose methods of the same names these serve.
#[allow(unused_variables)]
pub trait PathFileSystem: Send + Sync {
    /// Facts. Called once, when the adapter is made.
    fn path_caps(&self) -> PathCaps {
        PathCaps::default()
    }

    /// Called once by each frontend when it is ready. The inode numbers of `notify` are the
    /// adapter's: [`PathAdapter::ino_of`] finds them.
    fn attached(&self, notify: Arc<dyn Notify>) {}

    /// Called by each frontend after its last operation. Makes durable what the file system acknowledged
    /// and holds back itself; an error says that it could not.
    fn detached(&self) -> Result<()> {
        Ok(())
    }

    /// The attributes of `target`; `ENOENT` where nothing is there. This is also how names are
    /// looked up. Does not follow a symbolic link.
    fn getattr(&self, cx: &Context<'_>, target: Target<'_>) -> Result<Attr>;

    /// The text of a symbolic link.
    fn readlink(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<Vec<u8>> {
        Err(Errno::ENOSYS)
    }

    /// Makes a file, device, fifo or socket. `EEXIST`.
    fn mknod(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Makes a directory. `EEXIST`.
    fn mkdir(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Makes a symbolic link at `path` with the text `target`. `EEXIST`.
    fn symlink(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Gives the file at `old` the second name `new`. `EEXIST`.
    fn link(&self, cx: &Context<'_>, old: PathRef<'_>, new: PathRef<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Removes a name that is not a directory's.
    fn unlink(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Removes an empty directory.
    fn rmdir(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Moves a name. Never to below itself, and never to itself. `EINVAL` for flags that are not
    /// known.
    fn rename(
        &self,
        cx: &Context<'_>,
        from: PathRef<'_>,
        to: PathRef<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets the permission bits, 0 to 0o7777.
    fn chmod(&self, cx: &Context<'_>, target: Target<'_>, perm: u32) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets owner, group or both.
    fn chown(
        &self,
        cx: &Context<'_>,
        target: Target<'_>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets the length in bytes; what is added reads as zeros.
    fn truncate(&self, cx: &Context<'_>, target: Target<'_>, size: u64) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets the times that are given.
    fn utimens(
        &self,
        cx: &Context<'_>,
        target: Target<'_>,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Changes several attributes and returns the new ones. The default does it with chown, chmod,
    /// truncate and utimens one after the other, in this order, because each of the first three
    /// may undo what comes before it in the other order; an error in between leaves the earlier
    /// ones done.
    fn setattr(&self, cx: &Context<'_>, target: Target<'_>, set: &SetAttr) -> Result<Attr> {
        if set.uid.is_some() || set.gid.is_some() {
            self.chown(cx, target, set.uid, set.gid)?;
        }
        if let Some(perm) = set.perm {
            self.chmod(cx, target, perm)?;
        }
        if let Some(size) = set.size {
            self.truncate(cx, target, size)?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            self.utimens(cx, target, set.atime, set.mtime)?;
        }
        self.getattr(cx, target)
    }

    /// Checks the permissions `mask` of the caller.
    fn access(&self, cx: &Context<'_>, target: Target<'_>, mask: AccessMask) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets an extended attribute.
    fn setxattr(
        &self,
        cx: &Context<'_>,
        target: Target<'_>,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The value of an extended attribute for a caller with `room` bytes, see [`Xattr::answer`].
    fn getxattr(
        &self,
        cx: &Context<'_>,
        target: Target<'_>,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// The names of all extended attributes, each followed by a NUL; `room` as for `getxattr`.
    fn listxattr(&self, cx: &Context<'_>, target: Target<'_>, room: usize) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Removes an extended attribute.
    fn removexattr(&self, cx: &Context<'_>, target: Target<'_>, name: XattrName<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Opens a file. The default suits a file system without state per open file.
    fn open(&self, cx: &Context<'_>, path: PathRef<'_>, args: OpenArgs) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// Makes a regular file and opens it. `EEXIST` where the name is taken, because nobody has checked
    /// whether the caller may open what is there; `args.flags` always holds `O_EXCL`. The default
    /// calls mknod and open; nobody else can use the name in between, through this adapter.
    fn create(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<Opened> {
        self.mknod(cx, path, node)?;
        // A new file is empty, so truncating it would only cost time.
        let creation = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
        self.open(cx, path, OpenArgs { flags: args.flags.without(creation), ..args })
    }

    /// Puts bytes from `args.offset` on into `out`; fewer than fit mean the end of the file.
    fn read(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Writes the bytes of `data`; returns how many were taken.
    fn write(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        Err(Errno::ENOSYS)
    }

    /// Called at every close(2).
    fn flush(&self, cx: &Context<'_>, file: PathFile<'_>, owner: LockOwner) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Called once for each open file, at its end.
    fn release(&self, cx: &Context<'_>, file: PathFile<'_>, args: ReleaseArgs) -> Result<()> {
        Ok(())
    }

    /// Makes an open file durable.
    fn fsync(&self, cx: &Context<'_>, file: PathFile<'_>, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// fallocate(2).
    fn fallocate(&self, cx: &Context<'_>, file: PathFile<'_>, range: Fallocate) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The next data or hole at or after `offset`.
    fn lseek(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        offset: u64,
        whence: Whence,
    ) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Copies bytes between open files; returns how many.
    fn copy_file_range(&self, cx: &Context<'_>, copy: &PathCopy<'_>) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Device control.
    fn ioctl(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: &IoctlArgs<'_>,
    ) -> Result<IoctlReply> {
        Err(Errno::ENOTTY)
    }

    /// Returns the events that are ready.
    fn poll(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        Err(Errno::ENOSYS)
    }

    /// The block on the underlying device that holds block `index`, in units of `block_size` bytes.
    fn bmap(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        block_size: u32,
        index: u64,
    ) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// The first lock that stands against `request`.
    fn getlk(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        request: &LockRequest,
    ) -> Result<Option<Lock>> {
        Err(Errno::ENOSYS)
    }

    /// Takes, changes or drops a lock. The path, where there is one, is only a hint: the name may
    /// be changed meanwhile, because waiting for a lock must not keep others from renaming.
    fn setlk(&self, cx: &Context<'_>, file: PathFile<'_>, request: &LockRequest) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Opens a directory.
    fn opendir(&self, cx: &Context<'_>, path: PathRef<'_>, flags: OpenFlags) -> Result<Opened> {
        Ok(Opened::default())
    }

    /// The whole directory, in any order. Called when a listing begins; the adapter keeps it until
    /// it begins anew or the directory is closed.
    fn readdir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<Vec<PathDirEntry>>;

    /// Ends what opendir began.
    fn releasedir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<()> {
        Ok(())
    }

    /// Makes the names of a directory durable.
    fn fsyncdir(&self, cx: &Context<'_>, dir: PathFile<'_>, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Space and inodes.
    fn statfs(&self, cx: &Context<'_>, target: Target<'_>) -> Result<StatFs> {
        Ok(StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() })
    }

    /// Makes everything durable.
    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }
}
