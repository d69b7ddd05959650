//! Inodes that calls check or change, and files that are open before the permission is checked.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use defuse_fs::{
    Attr, Caller, Context, Errno, Fh, File, FileKind, Ino, OpenFlags, OpenReply, ReleaseArgs,
    Result,
};
use defuse_probe::Op;

use crate::access::{self, NeededAccess};
use crate::credentials::TaskCredentials;
use crate::description::FileDescription;
use crate::lifetime::CallMoment;
use crate::mount::ClientMount;
use crate::mounted_inode::MountedInode;
use crate::node::CachedInode;

/// An inode that a call checks or changes. A walk has reached it, or the file system has resolved
/// its path.
pub(crate) struct CallTarget<'a> {
    pub mount: &'a Arc<ClientMount>,
    pub ino: Ino,
    pub kind: FileKind,
    known: KnownInode,
    /// The file, if it was opened together with its path.
    opened: Option<UncheckedOpen>,
}

/// A file that was opened before the permission to do so was checked. It is released unless it is
/// taken.
pub(crate) struct UncheckedOpen {
    mount: Arc<ClientMount>,
    caller: Caller,
    ino: Ino,
    flags: OpenFlags,
    opened: Option<OpenReply>,
}

impl UncheckedOpen {
    /// `opened` is a file of the inode `ino`, opened for `who` with these flags.
    pub fn new(
        mount: &Arc<ClientMount>,
        who: &TaskCredentials,
        (ino, flags): (Ino, OpenFlags),
        opened: OpenReply,
    ) -> Self {
        let (mount, caller) = (Arc::clone(mount), who.caller());
        UncheckedOpen { mount, caller, ino, flags, opened: Some(opened) }
    }

    /// True if the kernel has decided that the caller may open it.
    pub fn is_permitted(&self) -> bool {
        self.opened.as_ref().is_some_and(|opened| opened.native().is_some())
    }
}

impl Drop for UncheckedOpen {
    fn drop(&mut self) {
        let Some(opened) = self.opened.take() else { return };
        let cx = Context::new(self.caller).from_origin(self.mount.origin);
        let file = File { ino: self.ino, fh: opened.fh };
        let args = ReleaseArgs::from_flags(self.flags);
        let _ = self.mount.call(Op::RELEASE, |fs| fs.release(&cx, file, args));
    }
}

enum KnownInode {
    /// An inode with a node.
    Node {
        node: Arc<CachedInode>,
        /// The attributes, if they have just arrived from the file system.
        known_attr: Option<Attr>,
        /// An open file of the inode.
        fh: Option<Fh>,
    },
    /// The attributes, and the moment before the call that returned them.
    Attr(Attr, CallMoment),
}

impl<'a> CallTarget<'a> {
    /// An inode with a node.
    pub fn from_node(here: &'a MountedInode) -> Self {
        CallTarget::with_node(&here.mount, Arc::clone(&here.node))
    }

    /// Returns an inode with a node, and its attributes if they have just arrived from the file
    /// system.
    pub fn from_node_with_attr(here: &'a MountedInode, known_attr: Option<Attr>) -> Self {
        CallTarget::with_parts(&here.mount, Arc::clone(&here.node), known_attr, None)
    }

    /// The inode of an open file.
    pub fn open(file: &'a FileDescription) -> Self {
        let here = file.inode();
        // The handle of a directory returns no more attributes than its inode.
        let fh = file.fh().filter(|_| file.kind != FileKind::Directory);
        CallTarget::with_parts(&here.mount, Arc::clone(&here.node), None, fh)
    }

    pub fn with_node(mount: &'a Arc<ClientMount>, node: Arc<CachedInode>) -> Self {
        CallTarget::with_parts(mount, node, None, None)
    }

    fn with_parts(
        mount: &'a Arc<ClientMount>,
        node: Arc<CachedInode>,
        known_attr: Option<Attr>,
        fh: Option<Fh>,
    ) -> Self {
        let (ino, kind) = (node.ino(), node.kind());
        CallTarget {
            mount,
            ino,
            kind,
            known: KnownInode::Node { node, known_attr, fh },
            opened: None,
        }
    }

    pub(crate) fn from_resolved(
        mount: &'a Arc<ClientMount>,
        ino: Ino,
        attr: Attr,
        moment: CallMoment,
    ) -> Self {
        CallTarget {
            mount,
            ino,
            kind: attr.kind,
            known: KnownInode::Attr(attr, moment),
            opened: None,
        }
    }

    /// Returns an inode of which only the attributes are known, and nothing is cached.
    pub fn from_attr(mount: &'a Arc<ClientMount>, attr: Attr) -> Self {
        CallTarget::from_resolved(mount, Ino(0), attr, mount.current_moment())
    }

    /// The inode, which was opened already if `opened` is a file.
    pub fn with_open(self, opened: Option<UncheckedOpen>) -> Self {
        CallTarget { opened, ..self }
    }

    /// Takes the open file, if there is one already.
    pub fn take_opened(&mut self) -> Option<OpenReply> {
        self.opened.take()?.opened.take()
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// True if another mount covers the inode.
    pub fn is_mount_point(&self) -> bool {
        match &self.known {
            KnownInode::Node { node, .. } => node.covers.load(Relaxed) > 0,
            KnownInode::Attr(..) => false,
        }
    }

    /// The attributes for a permission check.
    pub fn attr(&self, who: &TaskCredentials) -> Result<Attr> {
        match &self.known {
            KnownInode::Node { known_attr: Some(attr), .. } | KnownInode::Attr(attr, _) => {
                Ok(*attr)
            }
            KnownInode::Node { node, fh, .. } => self.mount.attr_of(node, *fh, who),
        }
    }

    /// Returns the attributes, if they are known to be current.
    pub fn present_attr(&self) -> Option<Attr> {
        match &self.known {
            KnownInode::Node { node, .. } => node.present_attr(),
            KnownInode::Attr(..) => None,
        }
    }

    /// Checks whether `who` has `access`; see [`access::check`].
    pub fn check(&self, who: &TaskCredentials, access: NeededAccess) -> Result<()> {
        match &self.known {
            KnownInode::Node { node, known_attr, .. } => {
                access::check_known(self.mount, (node, *known_attr), who, access)
            }
            KnownInode::Attr(attr, _) => {
                access::check_attr(self.mount, self.ino, attr, who, access)
            }
        }
    }

    /// Fails with `EROFS` on a read-only mount.
    pub fn writable(&self) -> Result<()> {
        if self.mount.read_only() { Err(Errno::EROFS) } else { Ok(()) }
    }

    /// Invalidates cached attributes. Call it after the change.
    pub fn invalidate(&self) {
        match &self.known {
            KnownInode::Node { node, .. } => node.invalidate(),
            // The inode may have got a node by a name or an open file.
            KnownInode::Attr(..) => self.mount.invalidate_node(self.ino),
        }
    }

    /// Keeps the attributes in the answer to a change that began after `moment`.
    pub fn keep_after_change(&self, attr: &Attr, moment: CallMoment) {
        if let KnownInode::Node { node, .. } = &self.known {
            node.keep_after_change(attr, moment);
        }
    }

    /// The inode with a node. Without a walk, that node has no lookup: the caller has opened the
    /// file.
    pub fn open_node(self) -> MountedInode {
        let node = match self.known {
            KnownInode::Node { node, .. } => node,
            KnownInode::Attr(attr, moment) => {
                let node = self.mount.core.node(self.ino, self.kind, 0);
                node.keep_known(&attr, moment);
                node
            }
        };
        MountedInode { node, mount: Arc::clone(self.mount) }
    }
}
