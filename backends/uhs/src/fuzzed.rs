//! Forged images, for the fuzzer.

use std::sync::{Arc, OnceLock};

use defuse_block::{BlockDevice, BlockingQueue, RamDevice};
use defuse_fs::source::NoWatch;
use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, Fh, File, FileKind, FileSystem, Ino, Name,
    NewNode, OpenFlags, ReadArgs, ReadBuf, SliceSink, SliceSource, WriteArgs, WriteBuf,
};

use crate::commit::CommitRules;
use crate::format::snapshot::SnapshotPointer;
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::image::tables;
use crate::{Uhs, UhsOptions, check, repair, store};

/// Bytes of an identity of a slot.
const IDENTITY: usize = 96;

/// Slots of the image that a script changes: nearly all that are in use.
const SLOTS: u64 = 32;

/// Bytes of one change of a script.
const CHANGE: usize = 8;

/// Changes a small image by `script`, and mounts, walks, checks and repairs the result. A change is
/// the number of a block, its form, a place (2 bytes), and 4 bytes to put there; the form
/// determines how many of these bytes are used, and whether checksums are recomputed.
///
/// # Panics
///
/// Panics if a repair leaves something to repair, or if a bug shows itself.
pub fn image(script: &[u8]) {
    let ram = base().fork();
    for change in script.chunks_exact(CHANGE) {
        forge(&ram, change);
    }
    let device: Arc<dyn BlockDevice> = Arc::new(ram);
    let random = || fastrand::Rng::with_seed(1);
    let options = UhsOptions {
        commit: None,
        discard: false,
        worker: false,
        cache_pages: 256,
        dirty_pages: 64,
        read_only: true,
        ..UhsOptions::default()
    };
    let Ok(report) = check(&device) else {
        // The tables show at least the copies of the superblock.
        assert!(tables(&*device, None, &NoWatch).is_ok(), "nothing is shown");
        assert!(repair(&device, None, random()).is_err(), "a repair of what cannot be checked");
        return;
    };
    for ino in [None, Some(1), Some(2), Some(4)] {
        assert!(tables(&*device, ino, &NoWatch).is_ok(), "what can be checked can be shown");
    }
    if let Ok((fs, problems)) = Uhs::open(Arc::clone(&device), options, random()) {
        assert_eq!(problems, report.problems);
        walk(&fs);
    }
    // The image may have no space for the blocks that a repair must write.
    let Ok(_) = repair(&device, None, random()) else { return };
    let again = check(&device).map(|report| report.problems);
    assert_eq!(again, Ok(Vec::new()), "{:?} were repaired", report.problems);
    let options = UhsOptions { read_only: false, ..options };
    if let Ok((fs, problems)) = Uhs::open(device, options, random()) {
        assert_eq!(problems, []);
        walk(&fs);
    }
}

/// Changes the snapshot of a small image by `script`, with right checksums, and uses the result. A
/// change is a place (2 bytes) and the byte to put there.
///
/// # Panics
///
/// When a bug shows itself.
pub fn snapshot(script: &[u8]) {
    let ram = make_clean_image().fork();
    forge_snapshot(&ram, script);
    let device: Arc<dyn BlockDevice> = Arc::new(ram);
    let options = UhsOptions {
        commit: None,
        discard: false,
        worker: false,
        cache_pages: 256,
        dirty_pages: 64,
        read_only: false,
        ..UhsOptions::default()
    };
    let opened = Uhs::open(Arc::clone(&device), options, fastrand::Rng::with_seed(1));
    if let Ok((fs, problems)) = opened {
        assert_eq!(problems, [], "the slots are as they were");
        walk(&fs);
        // The device may not match the forged snapshot.
        let _ = fill(&fs);
    }
}

/// An image after a clean end.
fn make_clean_image() -> &'static RamDevice {
    static ENDED: OnceLock<RamDevice> = OnceLock::new();
    ENDED.get_or_init(|| {
        let ram = base().fork();
        let options = UhsOptions { commit: None, ..UhsOptions::default() };
        drop(Uhs::open(Arc::new(ram.clone()), options, fastrand::Rng::with_seed(1)));
        ram
    })
}

/// Nothing, if there is no snapshot.
fn forge_snapshot(ram: &RamDevice, script: &[u8]) -> Option<()> {
    let superblock = store::superblock(ram).ok()?;
    let mut header = store::snapshot::header(ram, &superblock)?;
    let segment = header.segments.first_mut()?;
    let mut bytes = store::snapshot::segment(ram, segment)?;
    for change in script.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len();
        bytes[at] = change[2];
    }
    segment.crc = crc32c::crc32c(&bytes);
    bytes.resize(segment.blocks() as usize * BLOCK, 0);
    let mut line = BlockingQueue::new(ram).ok()?;
    line.write(segment.block, &bytes).ok()?;
    let bytes = header.encode()?;
    let at = SnapshotPointer { crc: crc32c::crc32c(&bytes), ..superblock.snapshot? };
    line.write(at.block, &bytes).ok()?;
    let superblock = Superblock { snapshot: Some(at), ..superblock };
    COPIES.iter().try_for_each(|block| line.write(*block, &superblock.encode()).ok())
}

fn forge(ram: &RamDevice, change: &[u8]) {
    let (which, form, place) = (change[0], change[1], [change[2], change[3]]);
    let block = match which {
        0..4 => COPIES[which as usize % COPIES.len()],
        _ => UNIT_BLOCKS + u64::from(which) % SLOTS,
    };
    let Ok(mut line) = BlockingQueue::new(ram) else { return };
    let mut bytes = [0; BLOCK];
    if line.read(block, &mut bytes).is_err() {
        return;
    }
    let at = usize::from(u16::from_le_bytes(place)) % (BLOCK - CHANGE);
    let len = usize::from(form % 4) + 1;
    bytes[at..at + len].copy_from_slice(&change[4..][..len]);
    let is_sealed = form & 4 != 0;
    let superblock = COPIES.contains(&block);
    if is_sealed && superblock {
        seal(&mut bytes);
    } else if is_sealed {
        // Both identities are equal.
        let (head, tail) = bytes.split_at_mut(BLOCK - IDENTITY);
        tail.copy_from_slice(&head[..IDENTITY]);
        let len = usize::from(u16::from_le_bytes([head[80], head[81]])).min(BLOCK - 2 * IDENTITY);
        let crc = crc32c::crc32c(&bytes[IDENTITY..][..len]).to_le_bytes();
        for end in [0, BLOCK - IDENTITY] {
            bytes[end + 84..][..4].copy_from_slice(&crc);
            seal(&mut bytes[end..end + IDENTITY]);
        }
    }
    let all = if superblock && is_sealed { &COPIES[..] } else { &[block] };
    for block in all {
        let _ = line.write(*block, &bytes);
    }
}

/// Puts the checksum of all bytes before it at the end.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

/// An image with a few of everything.
fn base() -> &'static RamDevice {
    static BASE: OnceLock<RamDevice> = OnceLock::new();
    BASE.get_or_init(|| {
        let ram = RamDevice::new(BLOCK as u32, 8 * UNIT_BLOCKS);
        let mut random = fastrand::Rng::with_seed(1);
        let device: Arc<dyn BlockDevice> = Arc::new(ram.clone());
        let made = Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random).is_ok();
        let options = UhsOptions { commit: None, ..UhsOptions::default() };
        // A snapshot would replace the content of the slots.
        let rules = CommitRules { snapshots: false, ..CommitRules::ALL };
        if let Ok((fs, _)) = Uhs::open_by(device, options, rules, random) {
            let filled = made && fill(&fs).is_ok();
            assert!(filled, "the image cannot be made");
        }
        ram
    })
}

fn fill(fs: &Uhs) -> defuse_fs::Result<()> {
    let node = |kind| NewNode::new(kind, 0o755, cx().caller);
    let name = |text: &'static str| Name::new(text.as_bytes());
    let dir = fs.mkdir(&cx(), Ino::ROOT, name("dir")?, &node(FileKind::Directory))?.ino;
    let below = fs.mkdir(&cx(), dir, name("below")?, &node(FileKind::Directory))?.ino;
    for (at, text, len) in [(dir, "a", 10), (below, "b", 9000), (below, "c", 70_000), (dir, "d", 0)]
    {
        let file = fs.mknod(&cx(), at, name(text)?, &node(FileKind::Regular))?;
        let bytes = vec![5; len];
        let mut source = SliceSource::new(&bytes);
        let file = File { ino: file.ino, fh: Fh(0) };
        fs.write(&cx(), file, WriteArgs::default(), &mut WriteBuf::new(&mut source))?;
        fs.syncfs(&cx())?;
    }
    fs.symlink(&cx(), dir, name("link")?, b"target", &node(FileKind::Symlink))?;
    let linked = fs.lookup(&cx(), dir, name("a")?)?.ino;
    fs.link(&cx(), linked, below, name("two")?)?;
    fs.unlink(&cx(), dir, name("d")?)?;
    fs.syncfs(&cx())
}

#[derive(Default)]
struct FuzzedNames(Vec<Vec<u8>>);

impl DirSink for FuzzedNames {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push(item.name.to_vec());
    }
}

/// Reads the attributes of all files that can be reached, and the beginning of their data.
fn walk(fs: &Uhs) {
    let (mut dirs, mut seen) = (vec![Ino::ROOT], 0);
    while let Some(dir) = dirs.pop() {
        let Ok(opened) = fs.opendir(&cx(), dir, OpenFlags(0)) else { continue };
        let (mut names, file) = (FuzzedNames::default(), File { ino: dir, fh: opened.fh });
        let _ = fs.readdir(&cx(), file, 0, &mut DirBuf::new(&mut names));
        let _ = fs.releasedir(&cx(), file);
        for child in names.0.iter().filter(|name| !matches!(&name[..], b"." | b"..")) {
            seen += 1;
            assert!(seen < 10_000, "a walk without an end");
            let Ok(child) = Name::new(child) else { panic!("a name that is none") };
            let Ok(entry) = fs.lookup(&cx(), dir, child) else { continue };
            match entry.attr.kind {
                FileKind::Directory => dirs.push(entry.ino),
                FileKind::Regular => {
                    let mut bytes = [0; 20_000];
                    let mut sink = SliceSink::new(&mut bytes);
                    let mut out = ReadBuf::new(&mut sink, 20_000);
                    let file = File { ino: entry.ino, fh: Fh(0) };
                    let _ = fs.read(&cx(), file, ReadArgs::default(), &mut out);
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    /// The first inputs of the fuzzer, so that its image and its forms stay as they are meant.
    #[test]
    fn random_scripts_are_survived() {
        let mut random = fastrand::Rng::with_seed(9);
        for _ in 0..300 {
            let mut script = vec![0; 8 * random.usize(0..4)];
            random.fill(&mut script);
            // Places beyond the fields of a slot mean nothing.
            script.chunks_exact_mut(8).filter(|_| random.bool()).for_each(|change| change[3] = 0);
            super::image(&script);
        }
    }

    /// A forged snapshot is either used or ignored.
    #[test]
    fn a_forged_snapshot_does_no_harm() {
        let (mut random, mut used) = (fastrand::Rng::with_seed(9), 0);
        for _ in 0..1000 {
            let mut script = vec![0; 3 * random.usize(1..3)];
            random.fill(&mut script);
            for change in script.chunks_exact_mut(3) {
                change[2] = [0, 1, 2, 0xff, change[2]][random.usize(..5)];
            }
            super::snapshot(&script);
            let ram = super::make_clean_image().fork();
            let forged = super::forge_snapshot(&ram, &script);
            assert!(forged.is_some(), "there is a snapshot");
            let superblock = crate::store::superblock(&ram).unwrap();
            used +=
                usize::from(crate::load::restore(&ram, &superblock, u64::MAX).unwrap().is_some());
        }
        assert!((10..990).contains(&used), "{used} were used");
    }
}
