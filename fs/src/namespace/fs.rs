//! The tree as a file system: each call goes to the file system of its inode.

use std::sync::Arc;
use std::time::Duration;

use crate::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno,
    FailureDomain, Fallocate, Fh, Figure, File, FileKind, FileSystem, Ino, Io, IoOp, IoctlArgs,
    IoctlReply, Lifecycle, Lock, LockOwner, LockRequest, LockSupport, LockWait, Name, NewNode,
    NormalPath, Notify, OpenArgs, OpenFlags, OpenReply, Origin, PathResolution, PollHandle,
    PushOutcome, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags,
    Shortcuts, SourceRestrictions, StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
    shortcuts_of,
};

use crate::notify::RenumberedNotify;

use super::tree::{NamespaceChild, NamespaceTree};
use super::{BITS, MemberRef, Namespace, NamespacePlace, outer};

/// Bits of a part of the storage below the number of its file system.
const PART_BITS: u32 = u32::BITS - BITS;

/// Methods of an open file or inode that a directory of the namespace never has.
macro_rules! of_members {
    ($($name:ident($first:ident: $kind:ident $(, $arg:ident: $ty:ty)*) -> $out:ty,
        $refusal:ident;)*) => {
        $(fn $name(&self, cx: &Context<'_>, $first: $kind $(, $arg: $ty)*) -> Result<$out> {
            let (at, $first) = $first.resolve_member(self, Errno::$refusal)?;
            at.fs.$name(cx, $first $(, $arg)*).map_err(replace_enosys)
        })*
    };
}

/// The error of a file system that lacks an operation. The others may have it, and after `ENOSYS` a
/// frontend would no longer call them either.
fn replace_enosys(errno: Errno) -> Errno {
    if errno == Errno::ENOSYS { Errno::EOPNOTSUPP } else { errno }
}

/// The result of an operation that a file system without it need not carry out.
fn or_nothing<T: Default>(result: Result<T>) -> Result<T> {
    if result.as_ref().err() == Some(&Errno::ENOSYS) { Ok(T::default()) } else { result }
}

/// A number or an open file of the namespace.
trait NamespaceRef: Sized {
    /// The file system, and the same thing there.
    fn resolve_member(self, fs: &Namespace, refusal: Errno) -> Result<(MemberRef<'_>, Self)>;
}

impl NamespaceRef for Ino {
    fn resolve_member(self, fs: &Namespace, refusal: Errno) -> Result<(MemberRef<'_>, Ino)> {
        fs.resolve_inode(self, refusal)
    }
}

impl NamespaceRef for File {
    fn resolve_member(self, fs: &Namespace, refusal: Errno) -> Result<(MemberRef<'_>, File)> {
        let (at, ino) = fs.resolve_inode(self.ino, refusal)?;
        Ok((at, File { ino, ..self }))
    }
}

impl Namespace {
    /// The directory for a new name, in its file system.
    fn parent(&self, parent: Ino, name: Name<'_>) -> Result<(MemberRef<'_>, Ino)> {
        match self.place(parent)? {
            NamespacePlace::There(at, inner) => Ok((at, inner)),
            NamespacePlace::Here(dir) => match self.tree.child(dir, name) {
                Some(_) => Err(Errno::EEXIST),
                None => Err(Errno::EROFS),
            },
        }
    }

    /// The directory of a name that is to go, in its file system. Names of the namespace stay
    /// (`EBUSY`).
    fn removal(&self, parent: Ino, name: Name<'_>) -> Result<(MemberRef<'_>, Ino)> {
        match self.place(parent)? {
            NamespacePlace::There(at, inner) => Ok((at, inner)),
            NamespacePlace::Here(dir) => match self.tree.child(dir, name) {
                Some(_) => Err(Errno::EBUSY),
                None => Err(Errno::ENOENT),
            },
        }
    }

    /// The entry of a name in a directory of the namespace.
    fn entry_of(&self, cx: &Context<'_>, child: NamespaceChild) -> Result<Entry> {
        match child {
            NamespaceChild::Dir(dir) => Ok(self.tree.entry(dir)),
            NamespaceChild::Member(index) => {
                let at = self.member(index);
                let attr = at.attr(at.fs.getattr(cx, Ino::ROOT, None)?);
                Ok(Entry { ino: child.ino(), generation: 0, attr, valid_for: attr.valid_for })
            }
        }
    }

    fn list(&self, cx: &Context<'_>, dir: usize, from: u64, out: &mut DirBuf<'_>) {
        let here = self.tree.dir(dir);
        let dots = [(&b"."[..], dir), (b"..", here.parent)];
        let dots = dots.map(|(name, dir)| (name, NamespaceChild::Dir(dir)));
        let names = here.names.iter().map(|(name, child)| (&**name, *child));
        let all = dots.into_iter().chain(names).zip(1..);
        for ((name, child), next) in all.filter(|(_, next)| *next > from) {
            let ino = match child {
                NamespaceChild::Dir(dir) => NamespaceTree::ino(dir).0,
                NamespaceChild::Member(index) => self.member(index).st_ino(Ino::ROOT.0),
            };
            let item = DirItem { ino, next, kind: FileKind::Directory, name };
            let look_up = || (next > 2).then(|| self.entry_of(cx, child).ok()).flatten();
            if out.push_with(item, look_up) == PushOutcome::Full {
                return;
            }
        }
    }

    /// Calls every file system. Returns the first failure.
    fn call_all(&self, mut call: impl FnMut(&dyn FileSystem) -> Result<()>) -> Result<()> {
        let results: Vec<_> = self.members.iter().map(|member| call(&*member.fs)).collect();
        results.into_iter().collect()
    }

    /// True if all file systems are exclusive but those that others may change, and one is.
    fn is_exclusive(&self) -> bool {
        let mut own = self.members.iter().filter(|member| !member.apart).peekable();
        own.peek().is_some() && own.all(|member| member.fs.caps().exclusive)
    }

    fn caps_of_all(&self) -> impl Iterator<Item = Caps> {
        self.members.iter().map(|member| member.fs.caps())
    }
}

impl FileSystem for Namespace {
    /// The capabilities that every member has.
    fn caps(&self) -> Caps {
        let every = |has: fn(&Caps) -> bool| self.caps_of_all().all(|caps| has(&caps));
        let any = |has: fn(&Caps) -> bool| self.caps_of_all().any(|caps| has(&caps));
        let shared = any(|caps| caps.locks == LockSupport::FileSystem);
        Caps {
            read_only: every(|caps| caps.read_only),
            blocking: any(|caps| caps.blocking),
            exclusive: self.is_exclusive(),
            readdir_entries: every(|caps| caps.readdir_entries),
            listings_bring_entries: every(|caps| caps.listings_bring_entries),
            // Where only some file systems have lists, these must be part of the check.
            posix_acl: any(|caps| caps.posix_acl),
            xattrs: any(|caps| caps.xattrs),
            kill_suidgid: every(|caps| caps.kill_suidgid),
            open_truncates: every(|caps| caps.open_truncates),
            locks: if shared { LockSupport::FileSystem } else { LockSupport::Either },
            submits: any(|caps| caps.submits),
            backing_files: any(|caps| caps.backing_files),
            security_labels: every(|caps| caps.security_labels),
            birth_times: any(|caps| caps.birth_times),
            asks_for_groups: any(|caps| caps.asks_for_groups),
            decides_on_names: every(|caps| caps.decides_on_names),
            delays_changes: any(|caps| caps.delays_changes),
            of_one_process: any(|caps| caps.of_one_process),
            negative_lifetime: self
                .caps_of_all()
                .map(|caps| caps.negative_lifetime)
                .min()
                .unwrap_or_default(),
            time_granularity_ns: self
                .caps_of_all()
                .map(|caps| caps.time_granularity_ns)
                .max()
                .unwrap_or(1),
            denied: SourceRestrictions {
                suid: any(|caps| caps.denied.suid),
                dev: any(|caps| caps.denied.dev),
                exec: any(|caps| caps.denied.exec),
            },
        }
    }

    fn negative_lifetime(&self, origin: Origin) -> Duration {
        let times = self.members.iter().map(|member| member.fs.negative_lifetime(origin));
        times.min().unwrap_or_default()
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        for (index, member) in self.members.iter().enumerate() {
            let map = move |ino| outer(index, ino);
            let notify = Arc::new(RenumberedNotify::new(Arc::clone(&notify), map));
            member.fs.attach(origin, notify);
        }
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.call_all(|fs| fs.detach(origin))
    }

    /// None: each file system has its own, by the same names.
    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }

    /// The part of the file system, in the numbers of the namespace.
    fn failure_domain(&self, ino: Ino, name: Option<Name<'_>>) -> Option<FailureDomain> {
        let (index, inner) = self.member_of(ino)?;
        let FailureDomain(part) = self.members[index].fs.failure_domain(inner, name)?;
        Some(FailureDomain((index as u32 + 1) << PART_BITS | part & (u32::MAX >> BITS)))
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        Some(self)
    }

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    // ---- names ----------------------------------------------------------------------------

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        match self.place(parent)? {
            NamespacePlace::There(at, parent) => at.entry(at.fs.lookup(cx, parent, name)?),
            NamespacePlace::Here(dir) => {
                self.entry_of(cx, self.tree.child(dir, name).ok_or(Errno::ENOENT)?)
            }
        }
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        match self.place(ino)? {
            NamespacePlace::Here(dir) => Ok(self.tree.entry(self.tree.dir(dir).parent)),
            NamespacePlace::There(at, Ino::ROOT) => {
                Ok(self.tree.entry(self.tree.parent_of_member(at.index)))
            }
            NamespacePlace::There(at, inner) => at.entry(at.fs.lookup_parent(cx, inner)?),
        }
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        if let Ok(NamespacePlace::There(at, inner)) = self.place(ino)
            && inner != Ino::ROOT
        {
            at.fs.forget(inner, lookups);
        }
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let (at, parent) = self.parent(parent, name)?;
        at.entry(at.fs.mknod(cx, parent, name, node).map_err(replace_enosys)?)
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let (at, parent) = self.parent(parent, name)?;
        at.entry(at.fs.mkdir(cx, parent, name, node).map_err(replace_enosys)?)
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let (at, parent) = self.parent(parent, name)?;
        at.entry(at.fs.symlink(cx, parent, name, target, node).map_err(replace_enosys)?)
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let (at, parent) = self.parent(parent, name)?;
        let (other, ino) = self.resolve_inode(ino, Errno::EPERM)?;
        if other.index != at.index {
            return Err(Errno::EXDEV);
        }
        at.entry(at.fs.link(cx, ino, parent, name).map_err(replace_enosys)?)
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let (at, parent) = self.removal(parent, name)?;
        at.fs.unlink(cx, parent, name).map_err(replace_enosys)
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let (at, parent) = self.removal(parent, name)?;
        at.fs.rmdir(cx, parent, name).map_err(replace_enosys)
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (at, parent) = self.removal(from.0, from.1)?;
        match self.resolve_inode(to.0, Errno::EXDEV)? {
            (other, to_parent) if other.index == at.index => {
                at.fs.rename(cx, (parent, from.1), (to_parent, to.1), flags).map_err(replace_enosys)
            }
            _ => Err(Errno::EXDEV),
        }
    }

    of_members! {
        readlink(ino: Ino) -> Vec<u8>, EINVAL;
        setxattr(ino: Ino, name: XattrName<'_>, value: &[u8], flags: SetXattrFlags) -> (), EROFS;
        getxattr(ino: Ino, name: XattrName<'_>, room: usize) -> Xattr, ENODATA;
        removexattr(ino: Ino, name: XattrName<'_>) -> (), EROFS;
        read(file: File, args: ReadArgs, out: &mut ReadBuf<'_>) -> (), EISDIR;
        write(file: File, args: WriteArgs, data: &mut WriteBuf<'_>) -> usize, EBADF;
        release(file: File, args: ReleaseArgs) -> (), EBADF;
        fallocate(file: File, range: Fallocate) -> (), EBADF;
        lseek(file: File, offset: u64, whence: Whence) -> u64, EINVAL;
        ioctl(file: File, args: &IoctlArgs<'_>) -> IoctlReply, ENOTTY;
        bmap(ino: Ino, block_size: u32, index: u64) -> u64, EINVAL;
        getlk(file: File, request: &LockRequest) -> Option<Lock>, ENOLCK;
        setlk(file: File, request: &LockRequest) -> (), ENOLCK;
    }

    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        let (at, file) = file.resolve_member(self, Errno::EBADF)?;
        or_nothing(at.fs.flush(cx, file, owner))
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        let (at, file) = file.resolve_member(self, Errno::EINVAL)?;
        or_nothing(at.fs.fsync(cx, file, datasync))
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        let (at, file) = file.resolve_member(self, Errno::EINVAL)?;
        match at.fs.poll(cx, file, events, wake) {
            // Always ready.
            Err(Errno::ENOSYS) => Ok(events),
            polled => polled,
        }
    }

    // ---- attributes -----------------------------------------------------------------------

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        match self.place(ino)? {
            NamespacePlace::Here(dir) => Ok(self.tree.attr(dir)),
            NamespacePlace::There(at, inner) => Ok(at.attr(at.fs.getattr(cx, inner, fh)?)),
        }
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let (at, inner) = self.resolve_inode(ino, Errno::EROFS)?;
        Ok(at.attr(at.fs.setattr(cx, inner, fh, set).map_err(replace_enosys)?))
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        match self.place(ino)? {
            NamespacePlace::There(at, inner) => or_nothing(at.fs.access(cx, inner, mask)),
            // Every user may read and search, and there is nothing to write.
            NamespacePlace::Here(_) => Ok(()),
        }
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        match self.place(ino)? {
            NamespacePlace::There(at, inner) => {
                at.fs.listxattr(cx, inner, room).map_err(replace_enosys)
            }
            NamespacePlace::Here(_) if room == 0 => Ok(Xattr::Size(0)),
            NamespacePlace::Here(_) => Ok(Xattr::Value(Vec::new())),
        }
    }

    // ---- open files -----------------------------------------------------------------------

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let (at, inner) = self.resolve_inode(ino, Errno::EISDIR)?;
        at.fs.open(cx, inner, args).map_err(replace_enosys)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (at, parent) = self.parent(parent, name)?;
        at.register_created(cx, at.fs.create(cx, parent, name, node, args).map_err(replace_enosys)?)
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (at, parent) = self.resolve_inode(parent, Errno::EROFS)?;
        at.register_created(cx, at.fs.tmpfile(cx, parent, node, args).map_err(replace_enosys)?)
    }

    fn submit(&self, io: Io) {
        let ino = match io.op() {
            IoOp::Read { file, .. } | IoOp::Write { file, .. } | IoOp::Fsync { file, .. } => {
                file.ino
            }
            IoOp::Fsyncdir { dir, .. } => dir.ino,
            IoOp::Syncfs => {
                let result = io.with_context(|cx| self.syncfs(cx));
                return io.finish(result.map(|()| 0));
            }
        };
        match self.place(ino) {
            Ok(NamespacePlace::There(at, ino)) => {
                at.fs.submit(io.map_file(|file| File { ino, ..file }))
            }
            // Its names are always durable.
            Ok(NamespacePlace::Here(_)) if matches!(io.op(), IoOp::Fsyncdir { .. }) => {
                io.finish(Ok(0))
            }
            Ok(NamespacePlace::Here(_)) => io.finish(Err(Errno::EBADF)),
            Err(errno) => io.finish(Err(errno)),
        }
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let (at, src) = copy.src.resolve_member(self, Errno::EISDIR)?;
        let (other, dst) = copy.dst.resolve_member(self, Errno::EISDIR)?;
        if at.index != other.index {
            return Err(Errno::EXDEV);
        }
        at.fs.copy_file_range(cx, &CopyRange { src, dst, ..*copy }).map_err(replace_enosys)
    }

    fn setlkw(&self, wait: LockWait) {
        match wait.file().resolve_member(self, Errno::ENOLCK) {
            Ok((at, file)) => at.fs.setlkw(wait.map_file(|_| file)),
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    // ---- directories ----------------------------------------------------------------------

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        match self.place(ino)? {
            NamespacePlace::There(at, inner) => at.fs.opendir(cx, inner, flags),
            NamespacePlace::Here(_) => Ok(OpenReply::default()),
        }
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        match self.place(dir.ino)? {
            NamespacePlace::Here(here) => {
                self.list(cx, here, from, out);
                Ok(())
            }
            NamespacePlace::There(at, ino) => {
                let is_root = ino == Ino::ROOT;
                let above =
                    is_root.then(|| NamespaceTree::ino(self.tree.parent_of_member(at.index)).0);
                let mut listing = MemberListing { out, at, above };
                at.fs.readdir(cx, File { ino, ..dir }, from, &mut DirBuf::new(&mut listing))
            }
        }
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        match self.place(dir.ino)? {
            NamespacePlace::There(at, ino) => at.fs.releasedir(cx, File { ino, ..dir }),
            NamespacePlace::Here(_) => Ok(()),
        }
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        match self.place(dir.ino)? {
            NamespacePlace::There(at, ino) => {
                or_nothing(at.fs.fsyncdir(cx, File { ino, ..dir }, datasync))
            }
            NamespacePlace::Here(_) => Ok(()),
        }
    }

    // ---- the file system as a whole -------------------------------------------------------

    /// Space of the file system that has the inode; of all together for directories of the
    /// namespace.
    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        if let NamespacePlace::There(at, inner) = self.place(ino)? {
            return at.fs.statfs(cx, inner);
        }
        let mut all = StatFs { bsize: 4096, frsize: 4096, name_max: 255, ..StatFs::default() };
        for member in &self.members {
            let one = match member.fs.statfs(cx, Ino::ROOT) {
                // The process that serves this member may not answer.
                Err(_) if member.apart => continue,
                one => one?,
            };
            let blocks = |count: u64| count.saturating_mul(one.frsize.into()) / 4096;
            all.blocks = all.blocks.saturating_add(blocks(one.blocks));
            all.blocks_free = all.blocks_free.saturating_add(blocks(one.blocks_free));
            let available = blocks(one.blocks_available);
            all.blocks_available = all.blocks_available.saturating_add(available);
            all.files = all.files.saturating_add(one.files);
            all.files_free = all.files_free.saturating_add(one.files_free);
            all.name_max = all.name_max.min(one.name_max);
        }
        Ok(all)
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        self.call_all(|fs| or_nothing(fs.syncfs(cx)))
    }
}

impl Shortcuts for Namespace {
    fn resolve(&self, cx: &Context<'_>, from: Ino, path: NormalPath<'_>) -> Result<PathResolution> {
        let NamespacePlace::There(at, from) = self.place(from)? else {
            return Ok(PathResolution::Walk);
        };
        if self.members[at.index].apart {
            return Ok(PathResolution::Walk);
        }
        match shortcuts_of(at.fs).resolve(cx, from, path) {
            Ok(PathResolution::Inode { ino, attr, open_to_all }) => {
                let ino = at.ino(ino).ok_or(Errno::EOVERFLOW)?;
                Ok(PathResolution::Inode { ino, attr: at.attr(attr), open_to_all })
            }
            // The others may have it.
            Err(Errno::ENOSYS) => Ok(PathResolution::Walk),
            other => other,
        }
    }
}

impl Lifecycle for Namespace {
    fn trim(&self) {
        self.call_each_lifecycle(|one| one.trim());
    }
    fn memory_pressure(&self) {
        self.call_each_lifecycle(|one| one.memory_pressure());
    }
    fn prepare_privilege_drop(&self) {
        self.call_each_lifecycle(|one| one.prepare_privilege_drop());
    }
}

impl Namespace {
    fn call_each_lifecycle(&self, call: impl Fn(&dyn Lifecycle)) {
        self.members.iter().filter_map(|member| member.fs.lifecycle()).for_each(call);
    }
}

impl MemberRef<'_> {
    /// A file that was created and is open. It is closed again where the namespace has no number
    /// for it.
    fn register_created(
        self,
        cx: &Context<'_>,
        (entry, opened): (Entry, OpenReply),
    ) -> Result<(Entry, OpenReply)> {
        if self.ino(entry.ino).is_none() {
            let file = File { ino: entry.ino, fh: opened.fh };
            // The error of the call is the other one.
            let _ = self.fs.release(cx, file, ReleaseArgs::default());
        }
        Ok((self.entry(entry)?, opened))
    }
}

/// Entries of a directory of a file system, with numbers of the namespace.
struct MemberListing<'a, 'b> {
    out: &'a mut DirBuf<'b>,
    at: MemberRef<'a>,
    /// The number of `..`, if the directory is the root of its file system.
    above: Option<u64>,
}

impl DirSink for MemberListing<'_, '_> {
    fn wants_entries(&self) -> bool {
        self.out.wants_entries()
    }

    fn fits(&self, name_len: usize) -> bool {
        self.out.fits(name_len)
    }

    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        let ino = match self.above {
            Some(above) if item.name == b".." => above,
            _ => self.at.st_ino(item.ino),
        };
        // Without a number the name is listed, and its lookup fails.
        let entry = entry.and_then(|entry| self.at.entry(*entry).ok());
        self.out.push_with(DirItem { ino, ..item }, || entry);
    }
}
