//! Whole paths.

use std::time::Duration;

use defuse_fs::{Ino, NormalPath, PathResolution, Result};

use super::NameStore;
use super::paths::PathDirectory;
use super::record::{InodeRecord, RecordExtra};
use super::xattrs::ACCESS;

/// The end of a walk along directories.
enum WalkOutcome {
    To(PathDirectory),
    /// There is no such name.
    Missing {
        open_to_all: bool,
    },
    /// Something on the way is no directory.
    Elsewhere,
}

impl NameStore {
    /// Resolves a whole path. The attributes may be cached for `valid_for`.
    pub(crate) fn resolve(
        &self,
        from: u64,
        path: NormalPath<'_>,
        valid_for: Duration,
    ) -> Result<PathResolution> {
        let (above, name) = path.split_last();
        let key = self.paths.key(from, above.map_or(b"", NormalPath::as_bytes));
        let dir = match key.and_then(|key| self.paths.find(key)) {
            Some(dir) => dir,
            None => match self.walk(from, above)? {
                WalkOutcome::To(dir) => {
                    key.into_iter().for_each(|key| self.paths.note(key, dir));
                    dir
                }
                WalkOutcome::Missing { open_to_all } => {
                    return Ok(PathResolution::Missing { open_to_all });
                }
                WalkOutcome::Elsewhere => return Ok(PathResolution::Walk),
            },
        };
        let open_to_all = dir.open_to_all;
        let found = self.with_name(dir.ino, name, |record, extra| PathResolution::Inode {
            ino: Ino(record.ino),
            attr: self.attr_of(record, extra, valid_for),
            open_to_all,
        });
        Ok(found.unwrap_or(PathResolution::Missing { open_to_all }))
    }

    /// Walks from one directory to another.
    fn walk(&self, from: u64, path: Option<NormalPath<'_>>) -> Result<WalkOutcome> {
        let step = |record: &InodeRecord, extra: Option<&RecordExtra>| {
            let open_to_all = is_open_to_all(record, extra);
            record.directory().map(|_| PathDirectory { ino: record.ino, open_to_all })
        };
        let mut next = self.records.with_inode(from, |record, extra| Ok(step(record, extra)))?;
        let mut open_to_all = true;
        let mut names = path.into_iter().flat_map(NormalPath::names);
        loop {
            let Some(dir) = next else { return Ok(WalkOutcome::Elsewhere) };
            open_to_all &= dir.open_to_all;
            let Some(name) = names.next() else {
                return Ok(WalkOutcome::To(PathDirectory { open_to_all, ..dir }));
            };
            match self.with_name(dir.ino, name, step) {
                Some(found) => next = found,
                None => return Ok(WalkOutcome::Missing { open_to_all }),
            }
        }
    }
}

/// True if everyone may search the directory.
fn is_open_to_all(record: &InodeRecord, extra: Option<&RecordExtra>) -> bool {
    let has_acl = || extra.is_some_and(|extra| extra.xattrs.get(ACCESS).is_some());
    record.perm() & 0o111 == 0o111 && !has_acl()
}
