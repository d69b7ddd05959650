//! The high-level way to write a file system: operations on paths, without inodes and lookups.
//!
//! [`PathFileSystem`] is the trait. [`PathAdapter`] turns it into a
//! [`FileSystem`](crate::FileSystem), by keeping the tree of the names that a frontend knows.
//!
//! # Concurrent operations
//!
//! The adapter passes a path to the backend only while no name on it is being changed through the
//! same adapter. An operation shares the names on its path. Operations that create, remove or
//! rename hold the changed name exclusively, until the backend has answered. A path therefore never
//! leads to another file than intended. The tree is not locked meanwhile: an operation waits only
//! if another one changes a name that it uses, or uses a name that it changes, and it fails with
//! `EINTR` if its caller gives up. An operation that waits for a lock (`setlk`) holds no names; its
//! path is a hint, and the handle identifies the file.
//!
//! Changes by other clients of the backend cannot be prevented. A path then leads to another file
//! or to `ENOENT`. With [`PathCaps::stable_ino`], getattr detects that and fails with `ESTALE`. A
//! file without a name and without an open handle results in `ESTALE`, and a name in a removed
//! directory in `ENOENT`.

mod adapter;
mod handles;
mod held;
mod remove;
#[cfg(test)]
pub(crate) mod tests;
mod tree;
mod types;

pub use adapter::PathAdapter;
pub use types::{PathCaps, PathCopy, PathDirEntry, PathFile, PathOperand, PathRef};

use std::sync::Arc;

use crate::{
    AccessMask, Attr, Context, Errno, Fallocate, IoctlArgs, IoctlReply, Lock, LockOwner,
    LockRequest, NewNode, Notify, OpenArgs, OpenFlags, OpenReply, Origin, PollHandle, ReadArgs,
    ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetTime, SetXattrFlags, StatFs, Whence,
    WriteArgs, WriteBuf, Xattr, XattrName,
};

/// A file system in terms of paths.
///
/// [`PathAdapter`] calls it from any number of threads at once. Methods return the errors of the
/// system call with the same name, and `ENOSYS` if not implemented. The methods with the same names
/// in [`FileSystem`](crate::FileSystem) have more details.
#[allow(unused_variables)]
pub trait PathFileSystem: Send + Sync {
    /// The properties. Called once, when the adapter is created.
    fn path_caps(&self) -> PathCaps {
        PathCaps::default()
    }

    /// Called once by each frontend when it is ready. `notify` uses the adapter's inode numbers,
    /// which [`PathAdapter::ino_of`] returns.
    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {}

    /// Called by each frontend after its last operation. Makes all acknowledged changes durable
    /// that the file system has kept in memory, or fails.
    fn detach(&self, origin: Origin) -> Result<()> {
        Ok(())
    }

    /// Returns the attributes of `target`, without following a symbolic link. Also serves lookups.
    /// Fails with `ENOENT` if the file does not exist.
    fn getattr(&self, cx: &Context<'_>, target: PathOperand<'_>) -> Result<Attr>;

    /// Returns the text of a symbolic link.
    fn readlink(&self, cx: &Context<'_>, path: PathRef<'_>) -> Result<Vec<u8>> {
        Err(Errno::ENOSYS)
    }

    /// Creates a file, device, fifo or socket. Fails with `EEXIST`.
    fn mknod(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Creates a directory. Fails with `EEXIST`.
    fn mkdir(&self, cx: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Creates a symbolic link at `path` with the text `target`. Fails with `EEXIST`.
    fn symlink(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Creates the name `new` for the file at `old`. Fails with `EEXIST`.
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

    /// Renames. Never called with a new name that is the old one or below it. Fails with `EINVAL`
    /// for unknown flags.
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
    fn chmod(&self, cx: &Context<'_>, target: PathOperand<'_>, perm: u32) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets owner, group or both.
    fn chown(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets the file size in bytes. Added bytes read as zeros.
    fn truncate(&self, cx: &Context<'_>, target: PathOperand<'_>, size: u64) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets the given times.
    fn utimens(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Changes several attributes and returns the new ones. The default calls chown, chmod,
    /// truncate and utimens in this order, because each of the first three may change attributes
    /// that a later one sets. If one fails, the earlier changes remain.
    fn setattr(&self, cx: &Context<'_>, target: PathOperand<'_>, set: &SetAttr) -> Result<Attr> {
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
    fn access(&self, cx: &Context<'_>, target: PathOperand<'_>, mask: AccessMask) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Sets an extended attribute.
    fn setxattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Returns the value of an extended attribute for a buffer of `room` bytes, see
    /// [`Xattr::answer`].
    fn getxattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Returns the names of all extended attributes, each followed by a NUL; `room` as for
    /// `getxattr`.
    fn listxattr(&self, cx: &Context<'_>, target: PathOperand<'_>, room: usize) -> Result<Xattr> {
        Err(Errno::ENOSYS)
    }

    /// Removes an extended attribute.
    fn removexattr(
        &self,
        cx: &Context<'_>,
        target: PathOperand<'_>,
        name: XattrName<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Opens a file. The default suits a file system without state per open file.
    fn open(&self, cx: &Context<'_>, path: PathRef<'_>, args: OpenArgs) -> Result<OpenReply> {
        Ok(OpenReply::default())
    }

    /// Creates a regular file and opens it. Fails with `EEXIST` if the name exists, because the
    /// permissions of the existing file were not checked; `args.flags` always has `O_EXCL`. The
    /// default calls mknod and open. No other operation of this adapter can use the name in
    /// between.
    fn create(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenReply> {
        self.mknod(cx, path, node)?;
        // A new file is empty, and truncating it would only take time.
        let creation = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC;
        self.open(cx, path, OpenArgs { flags: args.flags.difference(creation), ..args })
    }

    /// Reads data from `args.offset` on into `out`. Fewer bytes than fit mean end of file.
    fn read(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Writes `data`. Returns the number of bytes.
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

    /// Called once for each open file, at its last close.
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

    /// Returns the next data or hole at or after `offset`.
    fn lseek(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        offset: u64,
        whence: Whence,
    ) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Copies data between open files. Returns the number of bytes.
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

    /// Returns the block on the underlying device that contains block `index`, in units of
    /// `block_size` bytes.
    fn bmap(
        &self,
        cx: &Context<'_>,
        path: PathRef<'_>,
        block_size: u32,
        index: u64,
    ) -> Result<u64> {
        Err(Errno::ENOSYS)
    }

    /// Returns the first lock that conflicts with `request`.
    fn getlk(
        &self,
        cx: &Context<'_>,
        file: PathFile<'_>,
        request: &LockRequest,
    ) -> Result<Option<Lock>> {
        Err(Errno::ENOSYS)
    }

    /// Takes, changes or drops a lock. The path is only a hint: the name may change meanwhile,
    /// because waiting for a lock must not prevent renames.
    fn setlk(&self, cx: &Context<'_>, file: PathFile<'_>, request: &LockRequest) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Opens a directory.
    fn opendir(&self, cx: &Context<'_>, path: PathRef<'_>, flags: OpenFlags) -> Result<OpenReply> {
        Ok(OpenReply::default())
    }

    /// Returns all entries of the directory, in any order. Called when a listing begins. The
    /// adapter keeps the listing until it begins again or the directory is closed.
    fn readdir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<Vec<PathDirEntry>>;

    /// Releases a directory from opendir.
    fn releasedir(&self, cx: &Context<'_>, dir: PathFile<'_>) -> Result<()> {
        Ok(())
    }

    /// Makes the entries of a directory durable.
    fn fsyncdir(&self, cx: &Context<'_>, dir: PathFile<'_>, datasync: bool) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Returns space and inode counts.
    fn statfs(&self, cx: &Context<'_>, target: PathOperand<'_>) -> Result<StatFs> {
        Ok(StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() })
    }

    /// Makes all data durable.
    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }
}
