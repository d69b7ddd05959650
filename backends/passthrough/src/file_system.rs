//! The operations of the contract. Each calls one of the other modules.

use std::os::fd::AsFd;
use std::sync::Arc;

use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, Fallocate, Fh, File, FileSystem, Ino,
    IoctlArgs, IoctlReply, Lifecycle, Lock, LockOwner, LockRequest, LockSupport, LockWait, Name,
    NewNode, Notify, OpenArgs, OpenFlags, OpenOutcome, OpenReply, Origin, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags, Shortcuts, SourceRestrictions,
    StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};
use rustix::fs::AtFlags;

use crate::creds::{UNKNOWN, act_as};
use crate::lower::OrErrno;
use crate::passthrough::Passthrough;
use defuse_fs::source::LockPlace;

impl Passthrough {
    /// The first step of every operation: no state that the thread has from an earlier one may
    /// matter.
    fn act_as(&self, cx: &Context<'_>) {
        act_as(cx.caller, self.options.credentials);
    }

    /// Acts as the caller of a write. For data from the kernel's write-back cache, the caller is
    /// unknown.
    fn act_to_write(&self, cx: &Context<'_>, args: WriteArgs) {
        let caller = if args.from_cache { UNKNOWN } else { cx.caller };
        act_as(caller, self.options.credentials);
    }

    pub(crate) fn forwards_locks(&self) -> bool {
        self.options.locks != LockPlace::Frontend
    }

    /// True if other processes inherit the descriptors of open files.
    pub(crate) fn is_inherited(&self) -> bool {
        self.options.locks == LockPlace::Inherited
    }
}

impl Lifecycle for Passthrough {
    fn trim(&self) {
        self.recent.trim();
        self.release_grown(usize::MAX);
        self.locks.close_of_parent();
    }

    /// Closes all cached descriptors: each keeps an inode of the lower file system in memory.
    fn memory_pressure(&self) {
        self.recent.clear();
        self.cache.shrink(usize::MAX);
        if let Some(cache) = self.foreign.existing_cache() {
            cache.shrink(usize::MAX);
        }
    }

    fn prepare_privilege_drop(&self) {
        self.keep_descriptors();
    }
}

impl FileSystem for Passthrough {
    fn caps(&self) -> Caps {
        let options = &self.options;
        Caps {
            read_only: self.read_only,
            blocking: true,
            exclusive: options.exclusive,
            readdir_entries: true,
            listings_bring_entries: false,
            // Of the whole tree: a file system with ACLs may be mounted below one without.
            posix_acl: options.has_acls(),
            xattrs: options.xattrs,
            kill_suidgid: true,
            open_truncates: true,
            // An inode number is not valid again after a forget, since it is not derived from the
            // handle.
            locks: match options.locks {
                LockPlace::Frontend => LockSupport::Frontend,
                LockPlace::FileSystem | LockPlace::Inherited => LockSupport::FileSystem,
            },
            submits: false,
            backing_files: options.backing_files,
            security_labels: options.xattrs,
            negative_lifetime: options.negative_lifetime,
            time_granularity_ns: 1,
            birth_times: true,
            asks_for_groups: false,
            decides_on_names: true,
            delays_changes: false,
            of_one_process: false,
            denied: self.mounts.get(0).map_or(SourceRestrictions::default(), |mount| mount.denied),
        }
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.pruning.attach(origin, notify);
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.pruning.detach(origin);
        Ok(())
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.act_as(cx);
        self.lookup(parent, name)
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        self.act_as(cx);
        self.lookup_parent(ino)
    }

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        self.forget(ino, lookups);
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        Some(self)
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.mknod(parent, name, node))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.mkdir(parent, name, node))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.symlink(parent, name, target, node))
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.act_as(cx);
        self.with_numbers_of((&[ino, parent], true), || self.link(ino, parent, name))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.unlinkat(parent, name, AtFlags::empty()))
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.unlinkat(parent, name, AtFlags::REMOVEDIR))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        self.act_as(cx);
        let moved = self.find_known([from, to]);
        let [old, new] = moved.map(|ino| ino.unwrap_or(from.0));
        let inodes = [from.0, to.0, old, new];
        self.with_numbers_of((&inodes, false), || self.rename(cx, from, to, flags))
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.act_as(cx);
        self.readlink(ino)
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        self.act_as(cx);
        self.getattr(ino, fh)
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        self.act_as(cx);
        self.with_numbers_of((&[ino], true), || self.setattr(cx, ino, fh, set))
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.act_as(cx);
        self.with_numbers_of((&[ino], true), || self.setxattr(cx, ino, name, value, flags))
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        self.act_as(cx);
        self.getxattr(cx, ino, name, room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.act_as(cx);
        self.listxattr(cx, ino, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.act_as(cx);
        self.with_numbers_of((&[ino], true), || self.removexattr(cx, ino, name))
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.act_as(cx);
        if !args.flags.writable() && !args.flags.has(OpenFlags::TRUNC) {
            return self.open(ino, args);
        }
        self.with_numbers_of((&[ino], true), || self.open(ino, args))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.create(parent, name, node, args))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.tmpfile(parent, node, args))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.act_as(cx);
        self.read(file, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.act_to_write(cx, args);
        self.write(file, args, data)
    }

    fn flush(&self, _: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        if self.forwards_locks() {
            self.drop_posix_locks(file.ino, owner);
        }
        self.flush(file)
    }

    fn release(&self, _: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        self.prepare_close(file, args.last);
        let open = self.close_file(file)?;
        if args.flock_owner.is_some() && self.forwards_locks() && !self.is_inherited() {
            self.drop_flock(open.fd.as_fd());
        }
        Ok(())
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        self.act_as(cx);
        self.fsync(file, datasync)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.act_as(cx);
        self.fallocate(cx, file, range)
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        self.act_as(cx);
        self.lseek(file, offset, whence)
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.act_as(cx);
        self.copy_file_range(cx, copy)
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.act_as(cx);
        self.with_numbers_of((&[file.ino], false), || self.ioctl(cx, file, args))
    }

    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        self.act_as(cx);
        self.bmap(ino, block_size, index)
    }

    fn getlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        if self.forwards_locks() { self.getlk(file, request) } else { Err(Errno::ENOSYS) }
    }

    fn setlk(&self, _: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        if self.forwards_locks() { self.setlk(file, request) } else { Err(Errno::ENOSYS) }
    }

    fn setlkw(&self, wait: LockWait) {
        if self.forwards_locks() {
            self.wait_for_lock(wait)
        } else {
            wait.finish(Err(Errno::ENOSYS))
        }
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, _: OpenFlags) -> Result<OpenReply> {
        self.act_as(cx);
        self.opendir(ino)
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        self.act_as(cx);
        self.readdir(dir, from, out)
    }

    fn releasedir(&self, _: &Context<'_>, dir: File) -> Result<()> {
        self.files.remove(dir.fh).map(drop)
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        self.act_as(cx);
        let open = self.dir_file(dir)?;
        let sync = if datasync { rustix::fs::fdatasync } else { rustix::fs::fsync };
        sync(&open.fd).or_errno()
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        self.act_as(cx);
        self.statfs(ino)
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        self.act_as(cx);
        self.syncfs()
    }
}

impl Shortcuts for Passthrough {
    fn lookup_to_open(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, Option<OpenReply>)> {
        self.act_as(cx);
        self.lookup_to_open(parent, name, args)
    }

    fn open_or_create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        self.act_as(cx);
        self.with_numbers_of((&[parent], true), || self.open_or_create(parent, name, node, args))
    }

    fn peek(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Attr> {
        self.act_as(cx);
        self.peek(parent, name)
    }
}
