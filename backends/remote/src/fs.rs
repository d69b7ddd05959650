//! Every method of the contract as the request that the kernel would send.

use std::sync::Arc;

use defuse_fs::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, Entry, Errno, FailureDomain, Fallocate, Fh,
    Figure, File, FileKind, FileSystem, Ino, IoctlArgs, IoctlReply, Lock, LockOwner, LockRequest,
    LockWait, Name, NewNode, NormalPath, Notify, OpenArgs, OpenFlags, OpenOutcome, OpenReply,
    Origin, PathResolution, PollHandle, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result,
    SetAttr, SetXattrFlags, Shortcuts, StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};

use super::{ClientLaneCounts, RemoteClient};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::encode::{self, EncodedRequest};

/// The bit position of a device's number within an inode number of a manager.
const DEVICE_SHIFT: u32 = 56;

/// The device of a manager that has the inode; 0 for other servers.
pub(super) fn device_of(ino: Ino) -> u32 {
    (ino.0 >> DEVICE_SHIFT) as u32
}

/// True for an attribute that is in the list if it exists, xattr(7).
fn is_of_list(name: &[u8]) -> bool {
    let spaces = [&b"user."[..], b"trusted.", b"security.", b"system.posix_acl_"];
    spaces.iter().any(|space| name.starts_with(space))
}

impl FileSystem for RemoteClient {
    fn caps(&self) -> Caps {
        self.shared.caps.clone()
    }

    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        if let Some(versions) = self.shared.request_versions() {
            let _ = self.shared.paths.versions.set(Arc::clone(&versions));
            notify.versions(versions);
        }
        self.shared.notices.add(notify);
    }

    /// Returns the figures of this client's lanes and pages. The server has figures of its own,
    /// which no client sees.
    fn figures(&self) -> Vec<Figure> {
        let Some(counts) = self.lane_counts() else { return Vec::new() };
        let ClientLaneCounts { requests, posted, bells, page_reads, sleeps } = counts;
        let total = |name, value| Figure::count(name, value).since_start();
        vec![
            total("lane_requests", requests),
            total("lane_posted", posted),
            total("lane_bells", bells),
            total("lane_sleeps", sleeps),
            total("page_reads", page_reads),
        ]
    }

    fn detach(&self, _: Origin) -> Result<()> {
        self.shared.send_forgets();
        Ok(())
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let request = EncodedRequest::new(Opcode::Lookup, cx, parent).with_name(name);
        self.shared.request_entry(cx, request, |body| decode::lookup_out(body, false))
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        if !self.shared.agreement.uses(abi::FUSE_EXPORT_SUPPORT) {
            return Err(Errno::ENOSYS);
        }
        let request = EncodedRequest::new(Opcode::Lookup, cx, ino).with_text(b"..");
        self.shared.request_entry(cx, request, |body| decode::lookup_out(body, true))
    }

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    /// Returns the device of a manager, whose number is in the highest bits of an inode's number.
    /// Numbers of other servers are small.
    fn failure_domain(&self, ino: Ino, _: Option<Name<'_>>) -> Option<FailureDomain> {
        let device = device_of(ino);
        (device != 0).then_some(FailureDomain(device))
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        self.shared.forget(ino, lookups);
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let flags = self.shared.agreement.flags;
        let request = EncodedRequest::for_caller(Opcode::Mknod, owner(cx, node), parent)
            .with(&encode::mknod_in(node, flags))
            .with_name(name)
            .with_extensions(node, flags);
        self.shared.request_new_name(cx, (parent, name), request, Some(node.kind))
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let flags = self.shared.agreement.flags;
        let mode = encode::mode_of(node, flags) & 0o7777;
        let request = EncodedRequest::for_caller(Opcode::Mkdir, owner(cx, node), parent)
            .with(&abi::MkdirIn { mode, umask: node.umask })
            .with_name(name)
            .with_extensions(node, flags);
        self.shared.request_new_name(cx, (parent, name), request, Some(FileKind::Directory))
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        if target.is_empty() || target.contains(&0) {
            return Err(Errno::EINVAL);
        }
        let flags = self.shared.agreement.flags;
        let request = EncodedRequest::for_caller(Opcode::Symlink, owner(cx, node), parent)
            .with_name(name)
            .with_text(target)
            .with_extensions(node, flags);
        self.shared.request_new_name(cx, (parent, name), request, Some(FileKind::Symlink))
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let request = EncodedRequest::new(Opcode::Link, cx, parent)
            .with(&abi::LinkIn { oldnodeid: ino.0 })
            .with_name(name);
        self.shared.request_and_resolve(cx, (parent, name), request, |body| {
            decode::decode_created_entry(body, None).inspect_err(|_| {
                self.shared.give_back(decode::find_granted(body, false).0);
            })
        })
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let request = EncodedRequest::new(Opcode::Unlink, cx, parent).with_name(name);
        self.shared.request(cx, request, decode::check_empty)?;
        self.shared.record_removed_name(parent);
        Ok(())
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let request = EncodedRequest::new(Opcode::Rmdir, cx, parent).with_name(name);
        self.shared.request(cx, request, decode::check_empty)?;
        self.shared.record_removed_name(parent);
        Ok(())
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let newdir = to.0.0;
        let request = if flags.0 == 0 {
            EncodedRequest::new(Opcode::Rename, cx, from.0).with(&abi::RenameIn { newdir })
        } else {
            let args = abi::Rename2In { newdir, flags: flags.0, padding: 0 };
            EncodedRequest::new(Opcode::Rename2, cx, from.0).with(&args)
        };
        let request = request.with_name(from.1).with_name(to.1);
        let renamed = self.shared.request_and_resolve(cx, to, request, decode::check_empty);
        // Without RENAME2, the kernel returns EINVAL for flags.
        renamed.map_err(|errno| match errno {
            Errno::ENOSYS if flags.0 != 0 => Errno::EINVAL,
            other => other,
        })?;
        self.shared.record_removed_name(to.0);
        Ok(())
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        let request = EncodedRequest::new(Opcode::Readlink, cx, ino);
        let text = self.shared.request(cx, request, decode::link_out);
        self.shared.paths.record_read(ino);
        text
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        self.shared.getattr(cx, ino, fh)
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let args = encode::setattr_in(fh.map(|fh| fh.0), set);
        let request = EncodedRequest::new(Opcode::Setattr, cx, ino).with(&args);
        self.shared.request(cx, request, decode::attr_out)
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        let args = abi::AccessIn { mask: mask.0, padding: 0 };
        self.shared.request(
            cx,
            EncodedRequest::new(Opcode::Access, cx, ino).with(&args),
            decode::check_empty,
        )
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        self.shared.setxattr(cx, ino, name, value, flags)
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        if is_of_list(name.as_bytes()) && self.shared.is_bare(ino) {
            return Err(Errno::ENODATA);
        }
        let request = EncodedRequest::new(Opcode::Getxattr, cx, ino);
        self.shared.xattr(cx, request, Some(name.as_bytes()), room)
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        if self.shared.is_bare(ino) {
            return Ok(if room == 0 { Xattr::Size(0) } else { Xattr::Value(Vec::new()) });
        }
        let request = EncodedRequest::new(Opcode::Listxattr, cx, ino);
        let found = self.shared.xattr(cx, request, None, room)?;
        match &found {
            // Each name ends with a NUL (fuse_verify_xattr_list).
            Xattr::Value(names) if names.last().is_some_and(|&byte| byte != 0) => Err(Errno::EIO),
            _ => Ok(found),
        }
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        let request = EncodedRequest::new(Opcode::Removexattr, cx, ino).with_text(name.as_bytes());
        self.shared.request(cx, request, decode::check_empty)
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.shared.open(cx, ino, args)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.create_or_make(cx, parent, name, node, args)
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let made = self.shared.create(cx, (Opcode::Tmpfile, parent, b""), node, args);
        made.map_err(|errno| if errno == Errno::ENOSYS { Errno::EOPNOTSUPP } else { errno })
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        self.shared.read(cx, file, args, out)
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        self.shared.write(cx, file, args, data)
    }

    fn setlkw(&self, wait: LockWait) {
        self.wait_for_lock(wait);
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        let args = abi::FlushIn { fh: file.fh.0, lock_owner: owner.0, ..Default::default() };
        self.shared.request(
            cx,
            EncodedRequest::new(Opcode::Flush, cx, file.ino).with(&args),
            decode::check_empty,
        )
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let flock = args.flock_owner;
        let release = abi::ReleaseIn {
            fh: file.fh.0,
            flags: args.flags.0,
            release_flags: if flock.is_some() { abi::FUSE_RELEASE_FLOCK_UNLOCK } else { 0 },
            lock_owner: flock.map_or(0, |owner| owner.0),
        };
        self.shared.release(cx, (Opcode::Release, Opcode::Open), file.ino, &release)
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        self.shared.fsync(cx, Opcode::Fsync, file, datasync)
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let args = abi::FallocateIn {
            fh: file.fh.0,
            offset: range.offset,
            length: range.length,
            mode: range.mode,
            padding: 0,
        };
        let request = EncodedRequest::new(Opcode::Fallocate, cx, file.ino).with(&args);
        let done = self.shared.request(cx, request, decode::check_empty);
        done.map_err(|errno| if errno == Errno::ENOSYS { Errno::EOPNOTSUPP } else { errno })
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        // SEEK_DATA and SEEK_HOLE of lseek(2).
        let number = if whence == Whence::Data { 3 } else { 4 };
        let args = abi::LseekIn { fh: file.fh.0, offset, whence: number, padding: 0 };
        let request = EncodedRequest::new(Opcode::Lseek, cx, file.ino).with(&args);
        self.shared.request(cx, request, |body| {
            let found = decode::decode_whole::<abi::LseekOut>(body)?.offset;
            if found < offset || found > i64::MAX as u64 { Err(Errno::EIO) } else { Ok(found) }
        })
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.shared.copy_file_range(cx, copy)
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.shared.ioctl(cx, file, args)
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        self.poll_file(cx, file, events, wake)
    }

    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        let args = abi::BmapIn { block: index, blocksize: block_size, padding: 0 };
        let request = EncodedRequest::new(Opcode::Bmap, cx, ino).with(&args);
        self.shared
            .request(cx, request, |body| Ok(decode::decode_whole::<abi::BmapOut>(body)?.block))
    }

    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        let args = encode::lk_in(file, request);
        let request = EncodedRequest::new(Opcode::Getlk, cx, file.ino).with(&args);
        self.shared.request(cx, request, decode::lk_out)
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        let opcode = if request.wait { Opcode::Setlkw } else { Opcode::Setlk };
        let request = EncodedRequest::new(opcode, cx, file.ino).with(&encode::lk_in(file, request));
        self.shared.request(cx, request, decode::check_empty)
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        self.shared.opendir(cx, ino, flags)
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        self.shared.readdir(cx, dir, from, out)
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        self.shared.listed_ahead.record_close(dir.fh);
        let flags = OpenFlags::DIRECTORY;
        let release = abi::ReleaseIn { fh: dir.fh.0, flags, ..Default::default() };
        self.shared.release(cx, (Opcode::Releasedir, Opcode::Opendir), dir.ino, &release)
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        self.shared.fsync(cx, Opcode::Fsyncdir, dir, datasync)
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        self.shared.request(cx, EncodedRequest::new(Opcode::Statfs, cx, ino), decode::statfs_out)
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        let args = abi::SyncfsIn { padding: 0 };
        let request = EncodedRequest::new(Opcode::Syncfs, cx, Ino::ROOT).with(&args);
        self.shared.request(cx, request, decode::check_empty)
    }
}

impl Shortcuts for RemoteClient {
    fn resolve(&self, cx: &Context<'_>, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        self.shared.resolve(cx, from, path)
    }

    fn resolve_to_open(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
        args: OpenArgs,
    ) -> Result<(PathResolution, Option<OpenReply>)> {
        self.shared.resolve_to_open(cx, from, path, args)
    }

    fn open_or_create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        self.create_unless_known(cx, parent, name, node, args)
    }

    fn create_with(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        data: &[u8],
    ) -> Result<Entry> {
        self.create_chained(cx, parent, name, node, data).unwrap_or(Err(Errno::ENOSYS))
    }
}

/// The caller of a creation. FUSE has no other field for the owner of the new inode.
pub(super) fn owner(cx: &Context<'_>, node: &NewNode<'_>) -> defuse_fs::Caller {
    defuse_fs::Caller { uid: node.uid, gid: node.gid, pid: cx.caller.pid }
}
