//! The bodies of slots.

use std::sync::{Arc, Mutex};

use defuse_fs::{FileKind, Result};

use super::record::{InodeRecord, RecordBody as Of, RecordExtra, TimeKind};
use super::{NameStore, data_in_record, settle};
use crate::content::FileContent;
use crate::format::inode::{DiskInode, InodeData, LINK_BYTES, RecordWriter};

/// An inode with its records.
pub(crate) struct EncodedInode {
    /// The head.
    pub(crate) inode: DiskInode,
    /// The whole body, which may be too large for a slot.
    pub(crate) body: Vec<u8>,
    /// Bytes of all names but the first, and of extended attributes.
    pub(crate) others: usize,
    /// The extents are missing: they lie in leaves.
    pub(crate) has_tree: bool,
}

/// An inode that the closing group examines.
pub(crate) enum ClosingBody {
    /// An inode without a content in memory.
    Whole {
        body: Vec<u8>,
        /// The data is missing: it is in the slot that the device has.
        data_is_stored: bool,
    },
    /// An inode whose content must be locked first, and be passed to [`NameStore::encode`].
    Content {
        content: Arc<Mutex<FileContent>>,
        /// Nothing but data of a file on the device has changed.
        only_data: bool,
    },
}

impl NameStore {
    /// Takes a changed inode out of the list of the running group. `None` where the inode is gone.
    pub(crate) fn take_changed(&self, ino: u64) -> Option<ClosingBody> {
        let rules = self.pool.commit_rules();
        let taken = self.records.change(ino, |changing| {
            let only_data = !changing.record.changed || !rules.changes_do_not_wait;
            (changing.record.dirty, changing.record.changed) = (false, false);
            let (record, extra) = (&*changing.record, changing.extra());
            Ok(match &record.body {
                Of::Live(live) => {
                    let content = Arc::clone(&live.content);
                    Some(ClosingBody::Content { content, only_data })
                }
                Of::Directory(dir) => {
                    let content = Arc::clone(&dir.content);
                    Some(ClosingBody::Content { content, only_data: false })
                }
                _ if !record.is_named() => None,
                _ => {
                    let data = data_in_record(record);
                    let data_is_stored = data.is_none();
                    let data = data.unwrap_or_default();
                    let put = |out: &mut RecordWriter| out.data(&data);
                    let body = encode(record, extra, (data.bytes(), put)).body;
                    Some(ClosingBody::Whole { body, data_is_stored })
                }
            })
        });
        taken.ok().flatten()
    }

    /// An inode with its records, as a group writes it. `None` for one without a name.
    pub(crate) fn encode(&self, ino: u64, content: &FileContent) -> Result<Option<EncodedInode>> {
        match content.has_tree(&self.pool) {
            true => {
                let none = |out: &mut RecordWriter| out.data(&InodeData::Extents(Vec::new()));
                let encoded = self.encode_with(ino, content, (0, none))?;
                Ok(encoded.map(|encoded| EncodedInode { has_tree: true, ..encoded }))
            }
            false => self.encode_whole(ino, content),
        }
    }

    /// An inode with all its records. `None` for one without a name.
    pub(super) fn encode_whole(
        &self,
        ino: u64,
        content: &FileContent,
    ) -> Result<Option<EncodedInode>> {
        let data = |out: &mut RecordWriter| content.encode_data(out);
        self.encode_with(ino, content, (content.bytes_of_data(), data))
    }

    fn encode_with(
        &self,
        ino: u64,
        content: &FileContent,
        data: (usize, impl Fn(&mut RecordWriter)),
    ) -> Result<Option<EncodedInode>> {
        self.records.change(ino, |mut changing| {
            settle(&mut changing, content.summarize());
            let named = changing.record.is_named();
            Ok(named.then(|| encode(changing.record, changing.extra(), data)))
        })
    }
}

/// Encodes an inode with data of so many bytes at most.
fn encode(
    record: &InodeRecord,
    extra: Option<&RecordExtra>,
    (bytes, put_data): (usize, impl Fn(&mut RecordWriter)),
) -> EncodedInode {
    let is_dir = record.kind() == FileKind::Directory;
    let inode = DiskInode {
        mode: record.mode(),
        uid: record.uid,
        gid: record.gid,
        rdev: record.rdev(),
        size: if is_dir { 0 } else { record.size },
        atime: record.time(TimeKind::Access, extra),
        mtime: record.time(TimeKind::Modification, extra),
        ctime: record.time(TimeKind::Change, extra),
        btime: record.time(TimeKind::Birth, extra),
        ..DiskInode::default()
    };
    let others = extra.map_or(0, RecordExtra::bytes);
    let mut out = inode.begin(LINK_BYTES + record.name.as_bytes().len() + others + bytes);
    if record.parent != 0 {
        out.link(record.parent, record.stamp, record.name.as_bytes());
    }
    for link in extra.iter().flat_map(|extra| &extra.links) {
        out.link(link.parent, link.stamp, &link.name);
    }
    for (name, value) in extra.iter().flat_map(|extra| extra.xattrs.iter()) {
        out.xattr(name, value);
    }
    put_data(&mut out);
    EncodedInode { inode, body: out.finish(), others, has_tree: false }
}
