//! Directory streams.

use defuse_fs::{DirBuf, DirItem, DirSink, Entry, Errno, FileKind};
use defuse_probe::Op;

use crate::client::DirectClient;
use crate::description::FileDescription;
use crate::stop::Result;
use crate::task::ClientTask;

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// `d_ino`.
    pub ino: u64,
    /// `d_off`: the position after this entry.
    pub next: u64,
    /// `d_type`.
    pub kind: FileKind,
    /// The file name, or `.` or `..`.
    pub name: Vec<u8>,
}

impl DirectClient {
    /// Reads entries at the position of an open directory into `sink` until the sink is full, and
    /// advances the position, getdents(2). If no entry is added, the directory has ended. Fails
    /// with `ENOTDIR`, and with `EINVAL` if not even one entry fits.
    pub fn getdents(
        &self,
        task: &ClientTask,
        dir: &FileDescription,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let open = dir.file()?;
        if dir.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        let cx = task.context(dir.mount().origin);
        let listed = dir.with_position(|from| {
            let mut following = PositionTracker { sink, next: from, refused: false, added: false };
            let result = dir.mount().call(Op::READDIR, |fs| {
                fs.readdir(&cx, open, from, &mut DirBuf::new(&mut following))
            });
            let too_small = following.refused && !following.added;
            let result = result.and(if too_small { Err(Errno::EINVAL) } else { Ok(()) });
            (following.next, result)
        });
        dir.inode().node.record_read();
        Ok(listed?)
    }

    /// All entries from the position of an open directory to its end.
    pub fn read_dir(&self, task: &ClientTask, dir: &FileDescription) -> Result<Vec<DirEntry>> {
        let mut all = Vec::new();
        loop {
            let before = all.len();
            self.getdents(task, dir, &mut EntryCollector { all: &mut all, room: 512 })?;
            if all.len() == before {
                return Ok(all);
            }
        }
    }

    /// Sets the position of an open directory, seekdir(3): to the `next` of an entry, a result of
    /// telldir(3), or 0 for the start.
    pub fn seek_dir(&self, dir: &FileDescription, position: u64) -> Result<()> {
        if dir.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        dir.with_position(|_| (position, ()));
        Ok(())
    }
}

/// Forwards entries to another sink, and tracks the position after the last one that it took.
struct PositionTracker<'a> {
    sink: &'a mut dyn DirSink,
    next: u64,
    refused: bool,
    added: bool,
}

impl DirSink for PositionTracker<'_> {
    fn wants_entries(&self) -> bool {
        // An entry would take a lookup count, which the client does not need here.
        false
    }

    fn fits(&self, name_len: usize) -> bool {
        !self.refused && self.sink.fits(name_len)
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.added = true;
        self.next = item.next;
        self.sink.add(item, None);
    }
}

struct EntryCollector<'a> {
    all: &'a mut Vec<DirEntry>,
    room: usize,
}

impl DirSink for EntryCollector<'_> {
    fn wants_entries(&self) -> bool {
        false
    }

    fn fits(&self, _: usize) -> bool {
        self.room > 0
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.room -= 1;
        let DirItem { ino, next, kind, name } = item;
        self.all.push(DirEntry { ino, next, kind, name: name.to_vec() });
    }
}
