//! Random operations.

use defuse_fs::{
    Entry, Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, Name, OpenFlags, ReleaseArgs,
    RenameFlags, SetAttr, SliceSource, WriteArgs, WriteBuf,
};

use super::{cx, name, node};
use crate::Uhs;

/// The byte that files without names are filled with.
pub(super) const OF_THE_DEAD: u8 = 7;

/// Operations on a few names, by chance.
pub(super) struct NameWorkload<'a> {
    pub(super) fs: &'a Uhs,
    pub(super) random: fastrand::Rng,
}

impl NameWorkload<'_> {
    /// A directory, and how many lookups it takes to forget it.
    fn dir(&mut self) -> (Ino, u64) {
        let at = ["d", "e", "x"][self.random.usize(..3)];
        match self.fs.lookup(&cx(), Ino::ROOT, name(at)) {
            Ok(entry) if entry.attr.kind == FileKind::Directory => (entry.ino, 1),
            Ok(entry) => {
                self.fs.forget(entry.ino, 1);
                (Ino::ROOT, 0)
            }
            Err(_) => (Ino::ROOT, 0),
        }
    }

    fn name(&mut self) -> Name<'static> {
        name(["a", "b", "c", "d", "e"][self.random.usize(..5)])
    }

    /// One operation. True for a sync that succeeded.
    pub(super) fn step(&mut self) -> bool {
        let dirs = [self.dir(), self.dir()];
        let synced = self.operation(dirs[0].0, dirs[1].0);
        dirs.iter().for_each(|(ino, lookups)| self.fs.forget(*ino, *lookups));
        synced
    }

    /// Syncs a file now and then. Returns its number, and true if only its data was synced.
    pub(super) fn sync_file(&mut self) -> Option<(u64, bool)> {
        if self.random.u8(..4) != 0 {
            return None;
        }
        let (dir, lookups) = self.dir();
        let at = self.name();
        let at = self.pick(dir, at);
        let (mut synced, datasync) = (None, self.random.bool());
        self.with_file(dir, at, |player, ino, _| {
            let file = File { ino, fh: Fh(0) };
            synced = player.fs.fsync(&cx(), file, datasync).is_ok().then_some((ino.0, datasync));
        });
        self.fs.forget(dir, lookups);
        synced
    }

    fn operation(&mut self, dir: Ino, other: Ino) -> bool {
        let (from, to) = (self.name(), self.name());
        let cx = cx();
        let entered = |entry: Result<Entry, Errno>| {
            if let Ok(entry) = entry {
                self.fs.forget(entry.ino, 1);
            }
        };
        match self.random.u8(..25) {
            0 | 1 => entered(self.fs.mknod(&cx, dir, from, &node(FileKind::Regular))),
            2 => entered(self.fs.mkdir(&cx, dir, from, &node(FileKind::Directory))),
            3 => entered(self.fs.symlink(&cx, dir, from, b"target", &node(FileKind::Symlink))),
            4 => drop(self.fs.unlink(&cx, dir, from).ok()),
            5 => drop(self.fs.rmdir(&cx, dir, from).ok()),
            6 | 7 => {
                let flags =
                    [0, 0, RenameFlags::NOREPLACE, RenameFlags::EXCHANGE, RenameFlags::WHITEOUT];
                let flags = RenameFlags(flags[self.random.usize(..5)]);
                let _ = self.fs.rename(&cx, (dir, from), (other, to), flags);
            }
            8 => {
                if let Ok(entry) = self.fs.lookup(&cx, dir, from) {
                    entered(self.fs.link(&cx, entry.ino, other, to));
                    self.fs.forget(entry.ino, 1);
                }
            }
            operation @ 9..19 => {
                let file = self.pick(dir, from);
                match operation {
                    9..13 => self.write(dir, file),
                    13 | 14 => self.set(dir, file),
                    15 => self.use_while_unlinked(dir, file),
                    16 | 17 => self.allocate(dir, file),
                    _ => self.empty(dir, file),
                }
            }
            // This step commits, but is not reported as a sync.
            23 => drop(self.fs.engine().move_everything().ok()),
            24 => {
                let _ = self.fs.engine().give_back_slots((0, 1), true);
                let _ = self.fs.engine().vacate_slots((0, 1), (2, 512));
            }
            _ => return self.fs.syncfs(&cx).is_ok(),
        }
        false
    }

    /// The name of a file in the directory: `at`, or another one.
    fn pick(&mut self, dir: Ino, at: Name<'static>) -> Name<'static> {
        let is_file = |at: &Name<'_>| {
            let Ok(entry) = self.fs.lookup(&cx(), dir, *at) else { return false };
            self.fs.forget(entry.ino, 1);
            entry.attr.kind == FileKind::Regular
        };
        let names = [at, name("a"), name("b"), name("c"), name("d"), name("e")];
        names.into_iter().find(is_file).unwrap_or(at)
    }

    fn with_file(&mut self, dir: Ino, at: Name<'_>, run: impl FnOnce(&mut Self, Ino, u64)) {
        let Ok(entry) = self.fs.lookup(&cx(), dir, at) else { return };
        if entry.attr.kind == FileKind::Regular {
            run(self, entry.ino, entry.attr.size);
        }
        self.fs.forget(entry.ino, 1);
    }

    fn write(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, size| {
            let ends = [0, size.saturating_sub(100), size, size + 5000, 3000];
            let offset = ends[player.random.usize(..5)];
            let lengths = [1, 100, 2500, 4096, 9000, 30_000];
            let longest = lengths[player.random.usize(..6)];
            let mut len = player.random.usize(1..=longest);
            let direct = player.random.u8(..3) == 0;
            let mut offset = offset;
            if direct {
                offset = offset / 4096 * 4096;
                len = len.next_multiple_of(4096);
            }
            // No two writes have the same bytes, so that every sector identifies its write.
            let mut bytes = vec![0; len];
            player.random.fill(&mut bytes);
            let mut source = SliceSource::new(&bytes);
            let flags = OpenFlags(if direct { OpenFlags::DIRECT } else { 0 });
            let args = WriteArgs { offset, flags, ..WriteArgs::default() };
            let file = File { ino, fh: Fh(0) };
            let _ = player.fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
        });
    }

    fn set(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, size| {
            let sizes = [0, size / 2, size / 3, size.saturating_sub(1), size + 10_000, 4096];
            let set = match player.random.u8(..4) == 0 {
                true => SetAttr { perm: Some(player.random.u32(..0o1000)), ..SetAttr::default() },
                false => {
                    let size = Some(sizes[player.random.usize(..6)]);
                    SetAttr { size, ..SetAttr::default() }
                }
            };
            let _ = player.fs.setattr(&cx(), ino, None, &set);
        });
    }

    fn allocate(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, size| {
            let modes = [
                0,
                Fallocate::KEEP_SIZE,
                Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE,
                Fallocate::ZERO_RANGE,
                Fallocate::COLLAPSE_RANGE,
                Fallocate::COLLAPSE_RANGE,
                Fallocate::INSERT_RANGE,
            ];
            let mode = modes[player.random.usize(..7)];
            let offset = player.random.u64(..=size);
            let length = player.random.u64(1..9000);
            let (mut range, mut shifts) = (Fallocate { mode, offset, length }, false);
            if let Fallocate::COLLAPSE_RANGE | Fallocate::INSERT_RANGE = mode {
                range.offset = offset / 4096 * 4096;
                range.length = length.div_ceil(4096) * 4096;
                shifts = true;
            }
            let file = File { ino, fh: Fh(0) };
            let _ = player.fs.fallocate(&cx(), file, range);
            // Moved blocks are overwritten at once.
            if shifts && player.random.bool() {
                player.write(dir, at);
            }
        });
    }

    /// Frees the blocks of a file, so that others may take them.
    fn empty(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, _| {
            let set = SetAttr { size: Some(0), ..SetAttr::default() };
            let _ = player.fs.setattr(&cx(), ino, None, &set);
        });
    }

    fn use_while_unlinked(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, _| {
            let file = File { ino, fh: Fh(0) };
            player.fs.open(&cx(), ino, Default::default()).unwrap();
            let _ = player.fs.unlink(&cx(), dir, at);
            let mut source = SliceSource::new(&[OF_THE_DEAD; 18 * 512]);
            let mut data = WriteBuf::new(&mut source);
            let _ = player.fs.write(&cx(), file, WriteArgs::default(), &mut data);
            if player.random.bool() {
                let _ = player.fs.syncfs(&cx());
            }
            player.fs.release(&cx(), file, ReleaseArgs::default()).unwrap();
        });
    }
}
