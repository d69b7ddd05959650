//! Operations that create, rename and remove names.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use defuse_fs::{
    Attr, Context, Entry, Errno, FileKind, Ino, Name, NewNode, OpenArgs, OpenFlags, OpenOutcome,
    OpenReply, PathResolution, RenameFlags, Result,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::creds::{CreateCredentials, as_owner, become_owner};
use crate::data::keeps_bits;
use crate::lower::{OrErrno, StatxResult, is_below, open_parent};
use crate::passthrough::{InodeFd, Passthrough};
use crate::proc_path::ProcPath;
use crate::tables::inode::LowerInode;

impl Passthrough {
    pub(crate) fn lookup(&self, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let dir = self.inodes.get(parent)?;
        let fd = self.dir_fd(&dir)?;
        self.lookup_in(&dir, fd.as_fd(), name.as_bytes())
    }

    /// Looks up a name, and opens its file if that takes fewer system calls than to open it
    /// afterwards.
    pub(crate) fn lookup_to_open(
        &self,
        parent: Ino,
        name: Name<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, Option<OpenReply>)> {
        let dir = self.inodes.get(parent)?;
        let fd = self.dir_fd(&dir)?;
        let (fd, name) = (fd.as_fd(), name.as_bytes());
        // Where its inode needs a handle, an open by that takes fewer calls.
        let mount = self.mounts.get(dir.key.mount)?;
        if !self.opens_by_name(args.flags) || mount.handles && !self.finds_by_open_files(&mount) {
            return Ok((self.lookup_in(&dir, fd, name)?, None));
        }
        self.lookup_in_to_open(&dir, fd, name, args.flags)
    }

    /// The attributes of a name. `ESTALE` where only a lookup finds them: on a lower mount that was
    /// not seen before.
    pub(crate) fn peek(&self, parent: Ino, name: Name<'_>) -> Result<Attr> {
        let dir = self.inodes.get(parent)?;
        if self.is_own_mount(&dir, name.as_bytes()) {
            return Err(Errno::ESTALE);
        }
        let stat = StatxResult::read_at(self.dir_fd(&dir)?.as_fd(), name.as_bytes())?;
        let mount = self.mounts.find(stat.mount_id(), dir.key.mount).ok_or(Errno::ESTALE)?;
        stat.attr(mount, self.options.attr_valid_for)
    }

    /// The descriptor of a directory, to start from.
    fn dir_fd(&self, inode: &LowerInode) -> Result<InodeFd> {
        if inode.kind == FileKind::Directory { self.fd(inode) } else { Err(Errno::ENOTDIR) }
    }

    /// True if new files in the directory `dir` may inherit an access list.
    fn has_acls(&self, dir: &LowerInode) -> bool {
        self.options.has_acls() && self.mounts.get(dir.key.mount).is_ok_and(|mount| mount.has_acls)
    }

    /// Creates a node by `make(dir, name, mode)`, sets its label, and looks it up.
    fn make(
        &self,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        make: impl Fn(BorrowedFd<'_>, &[u8], Mode) -> rustix::io::Result<()>,
    ) -> Result<Entry> {
        let dir = self.inodes.get(parent)?;
        let fd = self.dir_fd(&dir)?;
        let (fd, name) = (fd.as_fd(), name.as_bytes());
        // Symbolic links have no permissions.
        let lists = self.has_acls(&dir) && node.kind != FileKind::Symlink;
        let how = self.options.credentials;
        as_owner(node, (fd, lists), how, |mode| make(fd, name, mode).or_errno())?;
        label(fd, name, node).inspect_err(|_| {
            let flags = match node.kind {
                FileKind::Directory => AtFlags::REMOVEDIR,
                _ => AtFlags::empty(),
            };
            let _ = rustix::fs::unlinkat(fd, name, flags);
        })?;
        self.lookup_new_in(&dir, fd, name)
    }

    pub(crate) fn mknod(&self, parent: Ino, name: Name<'_>, node: &NewNode<'_>) -> Result<Entry> {
        let kind = match node.kind {
            FileKind::Directory | FileKind::Symlink => return Err(Errno::EINVAL),
            other => FileType::from_raw_mode(other.mode_bits()),
        };
        self.make(parent, name, node, |dir, name, mode| {
            rustix::fs::mknodat(dir, name, kind, mode, node.rdev)
        })
    }

    pub(crate) fn mkdir(&self, parent: Ino, name: Name<'_>, node: &NewNode<'_>) -> Result<Entry> {
        self.make(parent, name, node, |dir, name, mode| rustix::fs::mkdirat(dir, name, mode))
    }

    pub(crate) fn symlink(
        &self,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(parent, name, node, |dir, name, _| rustix::fs::symlinkat(target, dir, name))
    }

    pub(crate) fn create(
        &self,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let dir = self.inodes.get(parent)?;
        let dir_fd = self.dir_fd(&dir)?;
        let lists = self.has_acls(&dir);
        let file = self.create_new((dir_fd.as_fd(), lists), name, node, args.flags)?;
        let made = self.enter_created(dir.key.mount, file, node, args.flags).inspect_err(|_| {
            let _ = rustix::fs::unlinkat(dir_fd.as_fd(), name.as_bytes(), AtFlags::empty());
        })?;
        self.note_place(made.0.ino, &dir, name.as_bytes());
        Ok(made)
    }

    /// Opens or creates a file as the kernel would for the program itself. `ENOSYS` where the
    /// program does not get the descriptor.
    pub(crate) fn open_or_create(
        &self,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        if !self.gives_descriptors() || !self.extra_flags().is_empty() {
            return Err(Errno::ENOSYS);
        }
        let exclusive = OpenFlags(args.flags.0 | OpenFlags::EXCL);
        match self.create(parent, name, node, OpenArgs { flags: exclusive, ..args }) {
            Ok((entry, opened)) => return Ok(OpenOutcome::Created(entry, opened)),
            Err(Errno::EEXIST) => {}
            Err(errno) => {
                // The kernel may refuse a creation before it looks for the name.
                let dir = self.inodes.get(parent)?;
                let is_there =
                    StatxResult::read_at(self.dir_fd(&dir)?.as_fd(), name.as_bytes()).is_ok();
                let walk = OpenOutcome::Found(PathResolution::Walk);
                return if is_there { Ok(walk) } else { Err(errno) };
            }
        }
        let dir = self.inodes.get(parent)?;
        let fd = self.dir_fd(&dir)?;
        let mode = Mode::from_raw_mode(node.perm & 0o7777);
        let opened = self.open_existing((&dir, fd.as_fd()), name.as_bytes(), args.flags, mode)?;
        let walk = OpenOutcome::Found(PathResolution::Walk);
        Ok(opened.map_or(walk, |(entry, opened)| OpenOutcome::Opened(entry, opened)))
    }

    /// Creates a file, always exclusively: no check was made whether the caller may open an
    /// existing file. Nor may this open a fifo or device or follow a symbolic link.
    fn create_new(
        &self,
        (dir, lists): (BorrowedFd<'_>, bool),
        name: Name<'_>,
        node: &NewNode<'_>,
        flags: OpenFlags,
    ) -> Result<(OwnedFd, OFlags)> {
        let creation = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let how = (self.lower_flags(flags) - OFlags::TRUNC) | creation | self.close_on_exec(flags);
        let name = name.as_bytes();
        let fd = self.with_spare_fds(|| {
            as_owner(node, (dir, lists), self.options.credentials, |mode| {
                rustix::fs::openat(dir, name, how, mode).or_errno()
            })
        })?;
        Ok((fd, how))
    }

    /// Adds a file that was just created. O_TRUNC is left out, since the file is empty.
    fn enter_created(
        &self,
        mount: u32,
        (fd, how): (OwnedFd, OFlags),
        node: &NewNode<'_>,
        flags: OpenFlags,
    ) -> Result<(Entry, OpenReply)> {
        if let Some((name, value)) = node.security {
            let none = rustix::fs::XattrFlags::empty();
            rustix::fs::fsetxattr(&fd, name.as_bytes(), value, none).or_errno()?;
        }
        let stat = StatxResult::read(fd.as_fd())?;
        let is_backed = !keeps_bits(flags, stat.perm());
        let file = self.divide((fd, how), flags, is_backed);
        let (index, entry) = self.enter_open_fd(mount, &file.own, &stat)?;
        if let Ok(inode) = self.inodes.get(entry.ino) {
            inode.without_capability.hold_for(self.options.attr_valid_for);
        }
        let opened =
            self.add_open_file(index, file, flags).inspect_err(|_| self.forget(entry.ino, 1))?;
        Ok((entry, opened))
    }

    pub(crate) fn tmpfile(
        &self,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let dir = self.inodes.get(parent)?;
        let dir_fd = self.dir_fd(&dir)?;
        let exclusive = OFlags::from_bits_retain(args.flags.0) & OFlags::EXCL;
        let how = self.lower_flags(args.flags) - OFlags::TRUNC;
        let how = how | OFlags::TMPFILE | exclusive | self.close_on_exec(args.flags);
        let (dir_fd, lists) = (dir_fd.as_fd(), self.has_acls(&dir));
        let fd = self.with_spare_fds(|| {
            as_owner(node, (dir_fd, lists), self.options.credentials, |mode| {
                rustix::fs::openat(dir_fd, c".", how, mode).or_errno()
            })
        })?;
        self.enter_created(dir.key.mount, (fd, how), node, args.flags)
    }

    pub(crate) fn link(&self, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let (inode, dir) = (self.inodes.get(ino)?, self.inodes.get(parent)?);
        if inode.kind == FileKind::Directory {
            return Err(Errno::EPERM);
        }
        let (inode_fd, dir_fd) = (self.fd(&inode)?, self.dir_fd(&dir)?);
        let (fd, dir_fd, name) = (inode_fd.as_fd(), dir_fd.as_fd(), name.as_bytes());
        match rustix::fs::linkat(fd, c"", dir_fd, name, AtFlags::EMPTY_PATH).or_errno() {
            // Without CAP_DAC_READ_SEARCH the empty path fails with ENOENT, but a `/proc` path
            // works.
            Err(Errno::ENOENT) => {
                let path = ProcPath::new(fd);
                let flags = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(rustix::fs::CWD, path.as_c_str(), dir_fd, name, flags)
                    .or_errno()?;
            }
            other => other?,
        }
        if self.changes_numbers(inode.key.mount)
            && let Ok(linked) = self.open_path_at(dir_fd, name)
        {
            self.link_known(&inode, linked.as_fd());
        }
        let entry = self.lookup_in(&dir, dir_fd, name)?;
        // It may have had no name before (`O_TMPFILE`).
        self.settle(self.victim(inode));
        Ok(entry)
    }

    pub(crate) fn unlinkat(&self, parent: Ino, name: Name<'_>, flags: AtFlags) -> Result<()> {
        let dir = self.inodes.get(parent)?;
        let fd = self.dir_fd(&dir)?;
        let is_dir = flags.contains(AtFlags::REMOVEDIR);
        let victim = self.pin_victim((&dir, fd.as_fd()), name.as_bytes(), is_dir);
        let removed = rustix::fs::unlinkat(fd.as_fd(), name.as_bytes(), flags).or_errno();
        match removed {
            Ok(()) => {
                self.note_absent(&dir, name.as_bytes());
                self.settle_removed(victim);
            }
            Err(_) => self.settle(victim),
        }
        removed
    }

    pub(crate) fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (old, new) = (self.inodes.get(from.0)?, self.inodes.get(to.0)?);
        let (old_fd, new_fd) = (self.dir_fd(&old)?, self.dir_fd(&new)?);
        let (old_name, new_name) = (from.1.as_bytes(), to.1.as_bytes());
        let victim = if flags.0 & (RenameFlags::NOREPLACE | RenameFlags::EXCHANGE) == 0 {
            self.pin_victim((&new, new_fd.as_fd()), new_name, true)
        } else {
            None
        };
        // The rename creates a whiteout, which belongs to the caller.
        let caller = cx.caller;
        let owner = CreateCredentials {
            uid: caller.uid,
            gid: caller.gid,
            supplementary_gid: None,
            umask: 0,
            sgid: false,
        };
        let _guard = if flags.has(RenameFlags::WHITEOUT) {
            Some(become_owner(owner, self.options.credentials)?)
        } else {
            None
        };
        let exchange = flags.has(RenameFlags::EXCHANGE);
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.0);
        let (old_fd, new_fd) = (old_fd.as_fd(), new_fd.as_fd());
        let moved = rustix::fs::renameat_with(old_fd, old_name, new_fd, new_name, flags).or_errno();
        if moved.is_ok() {
            self.note_moved(&new, new_fd, new_name);
            if exchange {
                self.note_moved(&old, old_fd, old_name);
            } else {
                self.note_absent(&old, old_name);
            }
        }
        self.settle(victim);
        moved
    }

    /// The parent of a directory, if it is below the source. A directory that was moved out of the
    /// source must not lead further out.
    pub(crate) fn lookup_parent(&self, ino: Ino) -> Result<Entry> {
        let inode = self.inodes.get(ino)?;
        let fd = self.dir_fd(&inode)?;
        if ino == Ino::ROOT {
            return self.enter_path_fd(0, fd.as_fd().try_clone_to_owned()?, false);
        }
        let open_parent = |fd: BorrowedFd<'_>| self.with_spare_fds(|| open_parent(fd));
        let parent = open_parent(fd.as_fd())?;
        let root = StatxResult::read(self.fd(self.inodes.root())?.as_fd())?;
        match is_below(parent.as_fd(), &root, open_parent)? {
            true => self.enter_path_fd(inode.key.mount, parent, false),
            false => Err(Errno::ESTALE),
        }
    }

    pub(crate) fn readlink(&self, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.inodes.get(ino)?;
        if inode.kind != FileKind::Symlink {
            return Err(Errno::EINVAL);
        }
        let fd = self.fd(&inode)?;
        let target = rustix::fs::readlinkat(fd.as_fd(), c"", Vec::new()).or_errno()?;
        Ok(target.into_bytes())
    }
}

/// Sets the initial security label of the new inode `name` in `dir`.
fn label(dir: BorrowedFd<'_>, name: &[u8], node: &NewNode<'_>) -> Result<()> {
    let Some((label, value)) = node.security else { return Ok(()) };
    let path = ProcPath::new(dir).join(name);
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(path, label.as_bytes(), value, flags).or_errno()
}
