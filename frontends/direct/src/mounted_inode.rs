//! An inode as a walk reaches it.

use std::sync::Arc;

use crate::mount::ClientMount;
use crate::node::CachedInode;

/// An inode, and the mount through which it was reached.
#[derive(Clone, Debug)]
pub(crate) struct MountedInode {
    pub node: Arc<CachedInode>,
    pub mount: Arc<ClientMount>,
}

impl MountedInode {
    /// The root of a mount.
    pub fn root(mount: &Arc<ClientMount>) -> Self {
        MountedInode { node: Arc::clone(&mount.root), mount: Arc::clone(mount) }
    }

    /// True if both are one inode of one mount.
    pub fn is(&self, other: &MountedInode) -> bool {
        Arc::ptr_eq(&self.mount, &other.mount) && self.node.ino() == other.node.ino()
    }
}
