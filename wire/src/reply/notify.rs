//! Notifications of a server to the kernel.
//!
//! Source: `fuse_notify` in `fs/fuse/dev.c`. They are written to the device (also if requests
//! travel over io_uring) as a reply with a `unique` of 0 and the code in place of the error.

use crate::abi::*;
use zerocopy::{Immutable, IntoBytes};

/// A notification, without the data of a STORE. [`Notification::data_len`] is the length of the
/// data that must follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification<'a> {
    /// The poll of handle `kh` may be ready.
    Poll {
        /// From [`PollIn::kh`].
        kh: u64,
    },
    /// Attributes of an inode changed, and data from `off` on.
    InvalInode {
        /// The inode.
        ino: u64,
        /// Start of the changed data; negative for attributes only.
        off: i64,
        /// Length of the changed data; 0 means to the end.
        len: i64,
    },
    /// A name no longer leads to the same inode.
    InvalEntry {
        /// The directory.
        parent: u64,
        /// The name.
        name: &'a [u8],
        /// Let the name expire and be looked up again, instead of unmounting or forgetting the tree
        /// below it. Needs [`FUSE_HAS_EXPIRE_ONLY`].
        expire_only: bool,
    },
    /// A name was removed; watchers are notified.
    Delete {
        /// The directory.
        parent: u64,
        /// The inode with that name.
        child: u64,
        /// The name.
        name: &'a [u8],
    },
    /// Store the data that follows in the page cache.
    Store {
        /// The inode.
        nodeid: u64,
        /// Start of the data.
        offset: u64,
        /// Length of the data.
        size: u32,
    },
    /// Request data of the page cache; NOTIFY_REPLY returns it.
    Retrieve {
        /// Becomes the unique number of NOTIFY_REPLY.
        notify_unique: u64,
        /// The inode.
        nodeid: u64,
        /// Start of the data.
        offset: u64,
        /// Requested length.
        size: u32,
    },
    /// Send every unanswered request again. Needs [`FUSE_HAS_RESEND`].
    Resend,
    /// Every name must be looked up again. Needs minor 44.
    IncEpoch,
    /// Drop these inodes if they are unused. Needs minor 45.
    Prune {
        /// The inodes.
        nodeids: &'a [u64],
    },
}

impl Notification<'_> {
    /// The number of this notification.
    pub fn code(&self) -> NotifyCode {
        match self {
            Notification::Poll { .. } => NotifyCode::Poll,
            Notification::InvalInode { .. } => NotifyCode::InvalInode,
            Notification::InvalEntry { .. } => NotifyCode::InvalEntry,
            Notification::Delete { .. } => NotifyCode::Delete,
            Notification::Store { .. } => NotifyCode::Store,
            Notification::Retrieve { .. } => NotifyCode::Retrieve,
            Notification::Resend => NotifyCode::Resend,
            Notification::IncEpoch => NotifyCode::IncEpoch,
            Notification::Prune { .. } => NotifyCode::Prune,
        }
    }

    /// The length of the data that must follow [`Notification::encode`] in the same `writev(2)`.
    pub fn data_len(&self) -> usize {
        match self {
            Notification::Store { size, .. } => *size as usize,
            _ => 0,
        }
    }

    /// Encodes header, structure and name. The header's length includes the data.
    pub fn encode(&self) -> Vec<u8> {
        match *self {
            Notification::Poll { kh } => self.with(&NotifyPollWakeupOut { kh }, &[]),
            Notification::InvalInode { ino, off, len } => {
                self.with(&NotifyInvalInodeOut { ino, off, len }, &[])
            }
            Notification::InvalEntry { parent, name, expire_only } => {
                let flags = if expire_only { FUSE_EXPIRE_ONLY } else { 0 };
                let namelen = name.len() as u32;
                self.with(&NotifyInvalEntryOut { parent, namelen, flags }, &[name, b"\0"])
            }
            Notification::Delete { parent, child, name } => {
                let namelen = name.len() as u32;
                let out = NotifyDeleteOut { parent, child, namelen, padding: 0 };
                self.with(&out, &[name, b"\0"])
            }
            Notification::Store { nodeid, offset, size } => {
                self.with(&NotifyStoreOut { nodeid, offset, size, padding: 0 }, &[])
            }
            Notification::Retrieve { notify_unique, nodeid, offset, size } => {
                let out = NotifyRetrieveOut { notify_unique, nodeid, offset, size, padding: 0 };
                self.with(&out, &[])
            }
            Notification::Resend | Notification::IncEpoch => self.with(&[0u8; 0], &[]),
            Notification::Prune { nodeids } => {
                let out = NotifyPruneOut { count: nodeids.len() as u32, padding: 0, spare: 0 };
                self.with(&out, &[nodeids.as_bytes()])
            }
        }
    }

    fn with(&self, out: &(impl IntoBytes + Immutable), tail: &[&[u8]]) -> Vec<u8> {
        let tail_len: usize = tail.iter().map(|part| part.len()).sum();
        let len = super::HEADER_LEN + size_of_val(out) + tail_len;
        let total = u32::try_from(len + self.data_len()).expect("notifications are below 4 GiB");
        let header = OutHeader { len: total, error: self.code() as i32, unique: 0 };
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(out.as_bytes());
        tail.iter().for_each(|part| bytes.extend_from_slice(part));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    /// Checks the header and returns the body.
    fn body(notification: Notification<'_>, code: i32) -> Vec<u8> {
        let bytes = notification.encode();
        let (header, body) = OutHeader::read_from_prefix(&bytes).unwrap();
        assert_eq!(header.len as usize, bytes.len() + notification.data_len());
        assert_eq!((header.error, header.unique), (code, 0));
        body.to_vec()
    }

    #[test]
    fn names_end_with_a_nul_that_is_not_counted() {
        let entry = Notification::InvalEntry { parent: 1, name: b"abc", expire_only: true };
        let bytes = body(entry, 3);
        let (out, name) = NotifyInvalEntryOut::read_from_prefix(&bytes).unwrap();
        assert_eq!(out, NotifyInvalEntryOut { parent: 1, namelen: 3, flags: FUSE_EXPIRE_ONLY });
        assert_eq!(name, b"abc\0");
        let bytes = body(Notification::Delete { parent: 1, child: 2, name: b"x" }, 6);
        let (out, name) = NotifyDeleteOut::read_from_prefix(&bytes).unwrap();
        assert_eq!((out.parent, out.child, out.namelen, name), (1, 2, 1, &b"x\0"[..]));
    }

    #[test]
    fn data_is_counted_but_sent_separately() {
        let store = Notification::Store { nodeid: 1, offset: 4096, size: 1 << 20 };
        assert_eq!(store.data_len(), 1 << 20);
        let out = NotifyStoreOut::read_from_bytes(&body(store, 4)).unwrap();
        assert_eq!((out.nodeid, out.offset, out.size), (1, 4096, 1 << 20));
        let (notify_unique, nodeid, offset, size) = (9, 1, 0, 4096);
        let retrieve = Notification::Retrieve { notify_unique, nodeid, offset, size };
        assert_eq!(retrieve.data_len(), 0);
        let out = NotifyRetrieveOut::read_from_bytes(&body(retrieve, 5)).unwrap();
        assert_eq!((out.notify_unique, out.size), (9, 4096));
    }

    #[test]
    fn the_other_notifications_are_plain_structures() {
        assert_eq!(body(Notification::Poll { kh: 7 }, 1), 7u64.as_bytes());
        let inode = Notification::InvalInode { ino: 3, off: -1, len: 0 };
        let out = NotifyInvalInodeOut::read_from_bytes(&body(inode, 2)).unwrap();
        assert_eq!((out.ino, out.off, out.len), (3, -1, 0));
        assert!(body(Notification::Resend, 7).is_empty());
        assert!(body(Notification::IncEpoch, 8).is_empty());
        let bytes = body(Notification::Prune { nodeids: &[4, 5] }, 9);
        let (out, nodeids) = NotifyPruneOut::read_from_prefix(&bytes).unwrap();
        assert_eq!((out.count, nodeids), (2, [4u64, 5].as_bytes()));
    }
}
