//! What several clients do to one name or inode, one after the other.
//!
//! A client that is guarded may remove a name, or change attributes, where the attributes of what is
//! there permit it. Between that look and the change nobody else may put another inode under the name,
//! or give the inode to another user: natively the kernel holds the lock of the directory, and of the
//! inode, meanwhile (`may_delete` of fs/namei.c, `notify_change` of fs/attr.c). Here the request of a
//! guarded client holds the inode alone, and requests of others that change the same thing share it.
//! What is changed at the source by other means is not held up.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::Ino;

use defuse_wire::abi;
use defuse_wire::request::Body;

const SHARDS: usize = 64;

/// The locks of a server. Inodes share them by their numbers.
pub(crate) struct Holds([RwLock<()>; SHARDS]);

impl Default for Holds {
    fn default() -> Self {
        Holds(std::array::from_fn(|_| RwLock::default()))
    }
}

/// Held until it is dropped.
#[derive(Default)]
#[must_use]
pub(crate) struct Held<'a> {
    _first: Option<One<'a>>,
    _second: Option<One<'a>>,
}

enum One<'a> {
    Alone(#[expect(dead_code, reason = "dropped at the end")] RwLockWriteGuard<'a, ()>),
    Shared(#[expect(dead_code, reason = "dropped at the end")] RwLockReadGuard<'a, ()>),
}

impl Holds {
    /// Holds what `body` changes on `ino`: alone for a client that `is_guarded` where it looks before.
    pub(crate) fn hold(&self, body: &Body<'_>, ino: Ino, is_guarded: bool) -> Held<'_> {
        match body {
            Body::Unlink { .. } | Body::Rmdir { .. } => self.of([ino, ino], is_guarded),
            Body::Rename { args, .. } => self.of([ino, Ino(args.newdir)], is_guarded),
            Body::Rename2 { args, .. } => self.of([ino, Ino(args.newdir)], is_guarded),
            Body::Create { .. }
            | Body::Mknod { .. }
            | Body::Mkdir { .. }
            | Body::Symlink { .. }
            | Body::Link { .. } => self.of([ino, ino], false),
            Body::Setattr(args) if is_guarded || changes_owner(args) => {
                self.of([ino, ino], is_guarded)
            }
            Body::Setxattr { .. } | Body::Removexattr { .. } if is_guarded => {
                self.of([ino, ino], true)
            }
            _ => Held::default(),
        }
    }

    /// In the order of the shards, so that two requests never wait for each other.
    fn of(&self, inodes: [Ino; 2], alone: bool) -> Held<'_> {
        let [one, other] = inodes.map(|ino| ino.0 as usize % SHARDS);
        let (first, second) = (one.min(other), one.max(other));
        let first = self.take(first, alone);
        Held { _first: Some(first), _second: (one != other).then(|| self.take(second, alone)) }
    }

    fn take(&self, shard: usize, alone: bool) -> One<'_> {
        let lock = &self.0[shard];
        match alone {
            true => One::Alone(lock.write().unwrap_or_else(PoisonError::into_inner)),
            false => One::Shared(lock.read().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

fn changes_owner(args: &abi::SetattrIn) -> bool {
    args.valid & (abi::FATTR_UID | abi::FATTR_GID | abi::FATTR_MODE) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guarded_removal_holds_its_directory_alone_and_others_share_theirs() {
        let holds = Holds::default();
        let (unlink, two) = (Body::Unlink { name: b"x" }, Ino(2));
        let held = holds.hold(&unlink, two, true);
        assert!(holds.0[2].try_read().is_err() && holds.0[3].try_write().is_ok());
        drop(held);
        let _shared = holds.hold(&unlink, two, false);
        let args = abi::RenameIn { newdir: 2 };
        let _renames =
            holds.hold(&Body::Rename { args, name: b"a", newname: b"b" }, Ino(66), false);
        assert!(holds.0[2].try_read().is_ok() && holds.0[2].try_write().is_err());
        let _reads = holds.hold(&Body::Readlink, Ino(3), true);
        assert!(holds.0[3].try_write().is_ok());
    }
}
