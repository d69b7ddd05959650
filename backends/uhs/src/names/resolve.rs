//! Whole paths.

use defuse_fs::{Attr, Ino, NormalPath, Resolved, Result};

use super::Names;
use super::record::{Extra, Record};
use super::xattrs::ACCESS;

/// A step on a path.
struct Step {
    ino: u64,
    /// It is a directory, which everyone may search or not.
    dir: Option<bool>,
    /// That of the last name.
    attr: Option<Attr>,
}

impl Names {
    pub(crate) fn resolve(&self, from: u64, path: NormalPath<'_>) -> Result<Resolved> {
        let step = |record: &Record, extra: Option<&Extra>, is_last: bool| Step {
            ino: record.ino,
            dir: record.directory().map(|_| is_open_to_all(record, extra)),
            attr: is_last.then(|| self.attr_of(record, extra)),
        };
        let mut at = self.records.see(from, |record, extra| Ok(step(record, extra, false)))?;
        let mut open_to_all = true;
        let mut names = path.names().peekable();
        while let Some(name) = names.next() {
            let Some(open) = at.dir else { return Ok(Resolved::Walk) };
            open_to_all &= open;
            let is_last = names.peek().is_none();
            match self.look(at.ino, name, |record, extra| step(record, extra, is_last)) {
                Some(next) => at = next,
                None => return Ok(Resolved::Missing { open_to_all }),
            }
        }
        Ok(match at.attr {
            Some(attr) => Resolved::Inode { ino: Ino(at.ino), attr, open_to_all },
            None => Resolved::Walk,
        })
    }
}

/// True if everyone may search the directory.
fn is_open_to_all(record: &Record, extra: Option<&Extra>) -> bool {
    let has_acl = || extra.is_some_and(|extra| extra.xattrs.get(ACCESS).is_some());
    record.perm() & 0o111 == 0o111 && !has_acl()
}
