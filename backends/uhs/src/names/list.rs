//! Listings.

use std::sync::atomic::Ordering;

use defuse_fs::{AnswerLifetime, DirBuf, DirItem, Errno, FileKind, PushOutcome, Result};

use super::NameStore;
use super::record::InodeRecord;
use crate::locks::lock;

impl NameStore {
    /// The position of the next new name in any directory.
    pub(crate) fn next_stamp(&self) -> u64 {
        self.next_stamp.load(Ordering::Relaxed)
    }

    /// Lists the names after the position `from` and before `end`, with entries if the frontend may
    /// cache them (`lifetime`).
    pub(crate) fn list(
        &self,
        ino: u64,
        (from, end): (u64, u64),
        lifetime: Option<AnswerLifetime>,
        out: &mut DirBuf<'_>,
    ) -> Result<()> {
        let parent = self.parent_of(ino)?;
        for (next, name, ino) in [(1, &b"."[..], ino), (2, b"..", parent)] {
            let item = DirItem { ino, next, kind: FileKind::Directory, name };
            if from < next && out.push(item) == PushOutcome::Full {
                return Ok(());
            }
        }
        let dir = self.directory(ino)?;
        let entries = lock(&dir.entries);
        for (stamp, rid) in entries.from(from.max(2) + 1).take_while(|(stamp, _)| *stamp < end) {
            // Names of the directory change under its lock only.
            let push = self.records.with_record(rid, |record, extra| {
                let further = || {
                    extra.and_then(|extra| {
                        let link = extra.links.iter().find(|link| link.stamp == stamp)?;
                        Some(&link.name[..])
                    })
                };
                let name = match record.stamp == stamp {
                    true => record.name.as_bytes(),
                    false => further().ok_or(Errno::EIO)?,
                };
                let item =
                    DirItem { ino: record.ino, next: stamp, kind: InodeRecord::kind(record), name };
                Ok(out.push_with(item, || Some(self.entry(record, extra, lifetime?))))
            })?;
            if push == PushOutcome::Full {
                return Ok(());
            }
        }
        Ok(())
    }
}
