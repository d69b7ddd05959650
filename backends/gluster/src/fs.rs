//! The implementation of the trait `FileSystem`.

use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, FailureDomain, Fallocate, Fh, Figure,
    File, FileKind, FileSystem, Ino, Io, IoOp, Lock, LockKind, LockOwner, LockRequest, LockSupport,
    LockWait, Name, NewNode, Notify, OpenArgs, OpenFlags, OpenReply, Origin, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags, StatFs, Whence, WriteArgs, WriteBuf,
    Xattr, XattrName,
};

use crate::attributes::space;
use crate::gluster::Gluster;
use crate::locks::LockTarget;

/// The bit of failure domains that are subvolumes. A namespace keeps 24 bits of a domain.
const OF_PARTS: u32 = 1 << 23;

impl FileSystem for Gluster {
    fn caps(&self) -> Caps {
        Caps {
            readdir_entries: true,
            listings_bring_entries: true,
            posix_acl: self.settings.posix_acl,
            locks: LockSupport::FileSystem,
            // The servers clear file capabilities at each write. This crate clears the mode bits
            // before the write.
            kill_suidgid: true,
            submits: self.settings.submits,
            negative_lifetime: Duration::ZERO,
            birth_times: false,
            asks_for_groups: true,
            of_one_process: true,
            ..Caps::default()
        }
    }

    fn failure_domain(&self, ino: Ino, name: Option<Name<'_>>) -> Option<FailureDomain> {
        if !self.settings.submits {
            return None;
        }
        let part = match name {
            Some(name) => self.nodes.part_of_name(ino, name.as_bytes()),
            None => self.nodes.part(ino),
        };
        // Directories are in all subvolumes. If its subvolume is unknown, each inode may be in a
        // lost one, and so is a domain of its own.
        let domain = part.map_or(ino.0 as u32 & !OF_PARTS, |part| OF_PARTS | u32::from(part.0));
        Some(FailureDomain(domain))
    }

    fn figures(&self) -> Vec<Figure> {
        self.cache_figures()
    }

    fn notes(&self) -> Vec<String> {
        self.explain_short_times()
    }

    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        if self.watch.attach(notify) {
            self.start_telling();
            if self.settings.submits {
                self.start_asking_for_parts();
            }
        }
    }

    fn detach(&self, _: Origin) -> Result<()> {
        let open = self.open.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let files = open.values().filter_map(|open| match open {
            crate::gluster::OpenObject::File(file) => Some(file.clone()),
            crate::gluster::OpenObject::Dir(_) => None,
        });
        let files: Vec<_> = files.collect();
        drop(open);
        files.iter().try_for_each(|file| self.flush_file(file, LockOwner(0)))
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.look_up(cx, parent, name)
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        self.look_up_parent(cx, ino)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        if let Some(gfid) = self.nodes.forget(ino, lookups) {
            self.volume.release_inode(gfid);
        }
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, node)
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, &NewNode { kind: FileKind::Directory, ..*node })
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make_link_to(cx, (parent, name), target, node)
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.make_name(cx, ino, (parent, name))
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (parent, name), false)
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (parent, name), true)
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        // The protocol of GlusterFS has no flags, and a check before a rename would not be atomic.
        if flags != RenameFlags::default() {
            return Err(Errno::EINVAL);
        }
        self.move_name(cx, from, to)
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        let _acting = self.act(cx);
        let _read = self.begin_own_change_of(ino);
        self.volume.readlink(&self.object(ino)?).map_err(|errno| self.map_inode_error(ino, errno))
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let acting = self.act(cx);
        let known = self.find_kept_attributes(&acting, ino);
        if let Some(attr) = known.or_else(|| self.find_recent_attributes(ino)) {
            return Ok(attr);
        }
        let open = match fh {
            Some(fh) => {
                let is_watched = self.listen_to(ino);
                // A file that is not opened yet is asked for by its identity.
                let file = self.file(fh).ok().filter(|file| file.handle.unopened_file().is_none());
                file.and_then(|file| Some((file.handle().ok()?.stat().ok()?, is_watched)))
            }
            None => None,
        };
        match open {
            Some((stat, is_watched)) => self.attr_of(ino, &stat, (is_watched, &acting.query)),
            // This also serves the handle of a directory.
            _ => self.fetch_attributes(ino, &acting.query),
        }
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        self.set_attributes(cx, (ino, fh), set)
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.set_value(cx, ino, name, (value, flags))
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        self.value(cx, ino, name, room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.names(cx, ino, room)
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.remove_value(cx, ino, name)
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.open_file(cx, ino, args)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.make_and_open(cx, (parent, name), node, args)
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let _acting = self.act_on_open(cx);
        // The read changes the access time.
        let _read = self.begin_own_change_of(file.ino);
        self.read_file(&*self.file(file.fh)?, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let _acting = self.act_on_open(cx);
        let _change = self.begin_own_change_of(file.ino);
        self.write_file(cx, &*self.file(file.fh)?, args, data)
    }

    fn submit(&self, io: Io) {
        match io.op() {
            IoOp::Fsyncdir { dir, datasync } => {
                let synced = io.with_context(|cx| self.fsyncdir(cx, dir, datasync));
                io.finish(synced.map(|()| 0));
            }
            _ => self.start(io),
        }
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        let _acting = self.act_on_open(cx);
        self.flush_file(&*self.file(file.fh)?, owner)
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let _acting = self.act_on_open(cx);
        self.release_file(file.fh, args);
        Ok(())
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        let _acting = self.act_on_open(cx);
        self.file(file.fh)?.handle()?.sync(datasync)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let acting = self.act_on_open(cx);
        let _change = self.begin_own_change_of(file.ino);
        self.allocate(cx, &*self.file(file.fh)?, range, &acting.query)
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        let _acting = self.act_on_open(cx);
        let whence = match whence {
            Whence::Data => libc::SEEK_DATA,
            Whence::Hole => libc::SEEK_HOLE,
        };
        self.file(file.fh)?.handle()?.seek(offset, whence)
    }

    fn copy_file_range(&self, _: &Context<'_>, _: &CopyRange) -> Result<u64> {
        // glfs_copy_file_range copies on the servers, but leaves the former data of the target in
        // the caches of libgfapi, where a read finds it. The frontend copies.
        Err(Errno::EOPNOTSUPP)
    }

    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        let _acting = self.act_on_open(cx);
        if request.kind == LockKind::Flock {
            return self.locks.flocks.conflict(file.ino.0, request);
        }
        let open = self.file(file.fh)?;
        self.locks.conflict(
            &LockTarget {
                ino: open.ino,
                fh: file.fh,
                handle: &*open.handle()?,
                uid: cx.caller.uid,
            },
            request,
        )
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        let _acting = self.act_on_open(cx);
        let open = self.file(file.fh)?;
        if request.kind == LockKind::Flock {
            return self.locks.flocks.set(open.ino.0, request);
        }
        self.locks.set(
            &LockTarget {
                ino: open.ino,
                fh: file.fh,
                handle: &*open.handle()?,
                uid: cx.caller.uid,
            },
            request,
        )
    }

    fn setlkw(&self, wait: LockWait) {
        let file = wait.file();
        let open = match self.file(file.fh) {
            Ok(open) => open,
            Err(errno) => return wait.finish(Err(errno)),
        };
        if wait.request().kind == LockKind::Flock {
            return self.locks.flocks.wait(open.ino.0, wait);
        }
        let handle = match open.handle() {
            Ok(handle) => handle,
            Err(errno) => return wait.finish(Err(errno)),
        };
        let uid = wait.caller().uid;
        self.locks.wait(&LockTarget { ino: open.ino, fh: file.fh, handle: &handle, uid }, wait);
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, _: OpenFlags) -> Result<OpenReply> {
        self.open_listing(cx, ino)
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let acting = self.act(cx);
        let _read = self.begin_own_change_of(dir.ino);
        self.list((&*self.dir(dir.fh)?, &acting.query), from, out)
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        let _acting = self.act_on_open(cx);
        self.remove_open(dir.fh);
        Ok(())
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        let _acting = self.act_on_open(cx);
        self.sync_listing(&*self.dir(dir.fh)?, datasync)
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        let _acting = self.act(cx);
        let object = self.object(ino).or_else(|_| self.object(Ino::ROOT))?;
        self.volume.statvfs(&object).map(|found| space(&found))
    }
}
