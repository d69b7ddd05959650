//! A device without space: promised space is available, and other requests are refused at once.

use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{
    Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, RenameFlags, Result, SetAttr,
    SliceSource, WriteArgs, WriteBuf,
};

use super::random_operations::NameWorkload;
use super::{OPTIONS, cx, name, node, random};
use crate::commit::CommitRules;
use crate::format::superblock::{CHUNK_TABLE, CHUNKS, PADDED_RECORDS};
use crate::store::survey;
use crate::{Uhs, UhsOptions, check};

/// Groups are closed after so many changes, and only a sync makes them durable.
const RULES: CommitRules = CommitRules { full_group: 4, early_run: 2, ..CommitRules::ALL };

const PAGE: u64 = 4096;

struct FullVolume {
    ram: RamDevice,
    fs: Uhs,
}

impl FullVolume {
    fn new(units: u64, rules: CommitRules) -> FullVolume {
        let ram = RamDevice::new(4096, units * 512);
        Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
        let options = UhsOptions { dirty_pages: 4096, ..OPTIONS };
        let opened = Uhs::open_by(Arc::new(ram.clone()), options, rules, random());
        FullVolume { ram, fs: opened.unwrap().0 }
    }

    fn make(&self, text: &str) -> Ino {
        let node = node(FileKind::Regular);
        self.fs.mknod(&cx(), Ino::ROOT, name(text), &node).unwrap().ino
    }

    fn write(&self, ino: Ino, offset: u64, bytes: &[u8]) -> Result<usize> {
        let mut source = SliceSource::new(bytes);
        let args = WriteArgs { offset, ..WriteArgs::default() };
        self.fs.write(&cx(), File { ino, fh: Fh(0) }, args, &mut WriteBuf::new(&mut source))
    }

    /// Takes all space that files can have.
    fn fill(&self) -> Ino {
        let ino = self.make("filler");
        let mut offset = 0;
        for len in [1 << 20, 1 << 16, PAGE as usize] {
            let bytes = vec![7; len];
            while let Ok(written) = self.write(ino, offset, &bytes) {
                offset += written as u64;
            }
        }
        assert_eq!(self.write(ino, offset, &[7; 4096]), Err(Errno::ENOSPC));
        ino
    }

    fn chmod(&self, ino: Ino, perm: u32) -> Result<()> {
        let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
        self.fs.setattr(&cx(), ino, None, &set).map(drop)
    }

    fn truncate(&self, ino: Ino, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.fs.setattr(&cx(), ino, None, &set).map(drop)
    }

    /// Changes all of these inodes again and again, with nothing durable meanwhile.
    fn change_all(&self, inos: &[Ino], rounds: u32) {
        for round in 0..rounds {
            for ino in inos {
                assert_eq!(self.chmod(*ino, 0o600 | round & 7), Ok(()), "{ino:?}, round {round}");
            }
        }
        assert_eq!(self.fs.syncfs(&cx()), Ok(()));
    }

    /// Ends the file system and checks it. Nothing was lost.
    fn end(self) {
        assert_eq!(self.fs.syncfs(&cx()), Ok(()));
        let names = super::snapshot(&self.fs).names;
        drop(self.fs);
        let report = check(&(Arc::new(self.ram.clone()) as Arc<dyn BlockDevice>)).unwrap();
        assert_eq!(report.problems, []);
        let (fs, problems) = Uhs::open(Arc::new(self.ram), OPTIONS, random()).unwrap();
        assert_eq!((problems, super::snapshot(&fs).names == names), (Vec::new(), true));
    }
}

#[test]
fn one_call_allocates_nearly_all_space_that_is_free() {
    for mode in [0, Fallocate::KEEP_SIZE, Fallocate::ZERO_RANGE] {
        let full = FullVolume::new(64, RULES);
        let ino = full.make("file");
        // The records of so many extents need blocks, too.
        for page in 0..300 {
            full.write(ino, page * 2 * PAGE, b"data").unwrap();
        }
        full.fs.syncfs(&cx()).unwrap();
        let free = full.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
        let range = Fallocate { mode, offset: 5 * PAGE, length: free / 20 * 19 * PAGE };
        let file = File { ino, fh: Fh(0) };
        assert_eq!(full.fs.fallocate(&cx(), file, range), Ok(()), "mode {mode:#x}");
        full.end();
    }
}

/// A device on which every second unit is free, and no other: files of 2 MiB were made, and every
/// second one was removed. `has_table` is false for a file system of the first version of the
/// format.
fn make_scattered(units: u64, has_table: bool) -> FullVolume {
    let ram = RamDevice::new(4096, units * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    if !has_table {
        crate::store::downgrade(&ram, PADDED_RECORDS);
    }
    let rules = CommitRules { listed_chunks: if has_table { 4 } else { CHUNKS }, ..RULES };
    let opened = Uhs::open_by(Arc::new(ram.clone()), OPTIONS, rules, random());
    let full = FullVolume { ram, fs: opened.unwrap().0 };
    let mut files = Vec::new();
    loop {
        let text = format!("large{}", files.len());
        let node = node(FileKind::Regular);
        let Ok(made) = full.fs.mknod(&cx(), Ino::ROOT, name(&text), &node) else { break };
        let range = Fallocate { mode: 0, offset: 0, length: 2 << 20 };
        if full.fs.fallocate(&cx(), File { ino: made.ino, fh: Fh(0) }, range).is_err() {
            break;
        }
        full.fs.forget(made.ino, 1);
        files.push(text);
    }
    assert!(files.len() as u64 >= units - 8, "{} files on {units} units", files.len());
    for text in files.iter().step_by(2) {
        full.fs.unlink(&cx(), Ino::ROOT, name(text)).unwrap();
    }
    full.fs.syncfs(&cx()).unwrap();
    full
}

/// Makes empty files until there is no space for one. Returns their number.
fn make_until_full(full: &FullVolume) -> u64 {
    for made in 0.. {
        let text = format!("small{made}");
        let node = node(FileKind::Regular);
        match full.fs.mknod(&cx(), Ino::ROOT, name(&text), &node) {
            Ok(made) => full.fs.forget(made.ino, 1),
            Err(errno) => {
                assert_eq!(errno, Errno::ENOSPC);
                return made;
            }
        }
    }
    unreachable!("a device has an end");
}

/// There were at most 220 chunks, each of them a run of units: on an aged device no file could be
/// made although half of the space was free, and statfs said otherwise.
#[test]
fn each_free_unit_can_hold_inodes_however_the_free_units_lie() {
    let full = make_scattered(64, true);
    let reported = full.fs.statfs(&cx(), Ino::ROOT).unwrap().files_free;
    let free = full.fs.engine().pool().space().units().free;
    assert!(free >= 28 && reported >= (free - 4) * 512, "{reported} files in {free} units");
    let made = make_until_full(&full);
    assert!(made >= reported, "{made} files were made, and statfs said {reported}");
    full.fs.syncfs(&cx()).unwrap();
    let chunks = survey(&full.ram, RULES).unwrap().superblock.chunks.len();
    assert!(chunks >= 28, "{chunks} chunks");
    full.end();
}

/// The file system of the first version has at most 220 chunks: statfs promises no more files than
/// these can hold.
#[test]
fn a_file_system_without_a_table_promises_the_files_that_its_chunks_can_hold() {
    let full = make_scattered(700, false);
    let reported = full.fs.statfs(&cx(), Ino::ROOT).unwrap().files_free;
    let units = full.fs.engine().pool().space().units().free;
    assert!(units > 330 && reported <= 220 * 512, "{reported} files in {units} units");
    let made = make_until_full(&full);
    assert!(
        made >= reported && reported > made / 10 * 8,
        "{made} files were made, and statfs said {reported}"
    );
    // An upgrade makes room for the others.
    full.fs.syncfs(&cx()).unwrap();
    let FullVolume { ram, fs } = full;
    drop(fs);
    assert_eq!(crate::store::upgrade(&ram), Ok(CHUNK_TABLE));
    let opened = Uhs::open_by(Arc::new(ram.clone()), OPTIONS, RULES, random());
    let full = FullVolume { ram, fs: opened.unwrap().0 };
    let reported = full.fs.statfs(&cx(), Ino::ROOT).unwrap().files_free;
    assert!(reported > 50_000, "{reported} files");
    for made in 0..2000 {
        full.make(&format!("more{made}"));
    }
    full.end();
}

/// Every change of a file writes the records of all its extents, names and attributes anew. A user
/// with write access to a few such files could make the file system read-only: there was no space
/// for the second copy.
#[test]
fn the_space_of_a_removed_file_counts_as_free_at_once_and_can_be_taken() {
    let full = FullVolume::new(8, RULES);
    let free = || full.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    let ino = full.fill();
    full.fs.syncfs(&cx()).unwrap();
    let (before, size) = (free(), full.fs.getattr(&cx(), ino, None).unwrap().size);
    full.fs.unlink(&cx(), Ino::ROOT, name("filler")).unwrap();
    full.fs.forget(ino, 1);
    assert!(free() >= before + size / PAGE, "{} {before} {size}", free());
    let again = full.make("again");
    let bytes = vec![8; size as usize / 2];
    assert_eq!(full.write(again, 0, &bytes), Ok(bytes.len()));
}

#[test]
fn files_with_many_extents_change_any_number_of_times_on_a_full_device() {
    let full = FullVolume::new(48, RULES);
    let inos: Vec<Ino> = (0..8).map(|n| full.make(&n.to_string())).collect();
    for page in 0..1000 {
        // Neighbours belong to different files.
        for ino in &inos {
            full.write(*ino, page * 2 * PAGE, &page.to_le_bytes()).unwrap();
        }
    }
    full.fill();
    full.change_all(&inos, 40);
    for ino in &inos {
        assert_eq!(full.truncate(*ino, 1001), Ok(()));
    }
    full.end();
}

#[test]
fn a_file_with_many_names_changes_any_number_of_times_on_a_full_device() {
    let full = FullVolume::new(24, RULES);
    let inos: Vec<Ino> = (0..4).map(|n| full.make(&n.to_string())).collect();
    let long = "n".repeat(240);
    let link = |ino: Ino, n: u32| {
        full.fs.link(&cx(), ino, Ino::ROOT, name(&format!("{long}{}-{n}", ino.0))).map(drop)
    };
    for n in 0..600 {
        inos.iter().for_each(|ino| link(*ino, n).unwrap());
    }
    let filler = full.fill();
    full.change_all(&inos, 40);
    // More names need more space, and get none.
    assert_eq!((600..700).find_map(|n| link(inos[0], n).err()), Some(Errno::ENOSPC));
    full.truncate(filler, 0).unwrap();
    assert_eq!(link(inos[0], 1000), Ok(()), "space that only waits for a group is found");
    // A longer name in the place of a shorter one is more, too.
    full.fs.link(&cx(), inos[1], Ino::ROOT, name("short")).unwrap();
    full.fs
        .rename(&cx(), (Ino::ROOT, name("short")), (Ino::ROOT, name(&long)), RenameFlags::default())
        .unwrap();
    full.end();
}

#[test]
fn long_symbolic_links_have_space_when_they_are_made_and_renamed() {
    let full = FullVolume::new(10, CommitRules::ALL);
    full.fill();
    let target = vec![b't'; 4000];
    let link = |n: u32| {
        let node = node(FileKind::Symlink);
        full.fs.symlink(&cx(), Ino::ROOT, name(&n.to_string()), &target, &node)
    };
    let refused = (0..2000).find_map(|n| link(n).err());
    assert_eq!(refused, Some(Errno::ENOSPC));
    assert_eq!(full.fs.syncfs(&cx()), Ok(()));
    full.end();
    // With a short name it fits into its slot.
    let full = FullVolume::new(10, CommitRules::ALL);
    let node = node(FileKind::Symlink);
    for n in 0..20 {
        full.fs.symlink(&cx(), Ino::ROOT, name(&n.to_string()), &target[..3700], &node).unwrap();
        full.fs.syncfs(&cx()).unwrap();
        let ino = full.fs.lookup(&cx(), Ino::ROOT, name(&n.to_string())).unwrap().ino;
        assert_eq!(full.fs.readlink(&cx(), ino).unwrap(), &target[..3700]);
    }
    let long = (Ino::ROOT, name(std::str::from_utf8(&target[..255]).unwrap()));
    full.fs.rename(&cx(), (Ino::ROOT, name("0")), long, RenameFlags::default()).unwrap();
    full.end();
}

/// Blocks that fallocate(2) allocates are one extent, until every other block is written.
#[test]
fn extents_that_are_cut_into_pieces_have_space_for_their_records() {
    let full = FullVolume::new(40, RULES);
    let ino = full.make("file");
    let file = File { ino, fh: Fh(0) };
    let pages = 12_000;
    full.fs.fallocate(&cx(), file, Fallocate { mode: 0, offset: 0, length: pages * PAGE }).unwrap();
    full.fs.syncfs(&cx()).unwrap();
    full.fill();
    let mut written = 0;
    for page in (0..pages).step_by(2) {
        match full.write(ino, page * PAGE, b"x") {
            Ok(_) => written += 1,
            Err(errno) => assert_eq!(errno, Errno::ENOSPC),
        }
    }
    println!("{written} of {}", pages / 2);
    full.change_all(&[ino], 10);
    let hole = |page: u64| Fallocate {
        mode: Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE,
        offset: page * PAGE,
        length: PAGE,
    };
    for page in (1..pages).step_by(2) {
        let done = full.fs.fallocate(&cx(), file, hole(page));
        assert!(matches!(done, Ok(()) | Err(Errno::ENOSPC)), "{done:?}");
    }
    full.change_all(&[ino], 10);
    full.end();
}

/// A file that is cut within a page needs a block for the page, while the old one is in use.
#[test]
fn any_number_of_files_is_cut_and_removed_on_a_full_device() {
    let full = FullVolume::new(32, CommitRules::ALL);
    let inos: Vec<Ino> = (0..2000).map(|n| full.make(&n.to_string())).collect();
    for ino in &inos {
        full.write(*ino, 0, &[1; 5000]).unwrap();
    }
    full.fill();
    for ino in &inos {
        assert_eq!(full.truncate(*ino, 4500), Ok(()));
    }
    assert_eq!(full.fs.syncfs(&cx()), Ok(()));
    for n in 0..2000 {
        full.fs.unlink(&cx(), Ino::ROOT, name(&n.to_string())).unwrap();
    }
    full.end();
}

/// Each directory has new times, which need a slot. There are not so many free slots at once.
#[test]
fn the_times_of_any_number_of_directories_are_written_when_all_slots_are_in_use() {
    let full = FullVolume::new(12, CommitRules::ALL);
    let dirs: Vec<Ino> = (0..)
        .map_while(|n: u32| {
            let text = n.to_string();
            let dir = full.fs.mkdir(&cx(), Ino::ROOT, name(&text), &node(FileKind::Directory));
            let made = dir.and_then(|dir| {
                full.fs.mknod(&cx(), dir.ino, name("file"), &node(FileKind::Regular)).map(|_| dir)
            });
            made.ok().map(|dir| dir.ino)
        })
        .collect();
    assert!(dirs.len() > 1000, "{}", dirs.len());
    for dir in &dirs {
        let (from, to) = ((*dir, name("file")), (*dir, name("other")));
        full.fs.rename(&cx(), from, to, RenameFlags::default()).unwrap();
    }
    full.change_all(&dirs, 3);
    full.end();
}

/// Performs random operations, for which there is no space after the first `promises`.
fn starve(seed: u64, promises: u64) -> Option<u64> {
    let full = FullVolume::new(8, CommitRules { full_group: 6, ..CommitRules::ALL });
    let pool = full.fs.engine().pool();
    let mut player = NameWorkload { fs: &full.fs, random: fastrand::Rng::with_seed(seed) };
    (0..20).for_each(|_| _ = player.step());
    pool.refuse_after(promises);
    for step in 0..30 {
        player.step();
        assert_eq!(full.fs.syncfs(&cx()), Ok(()), "seed {seed}, {promises} promises, step {step}");
    }
    let left = pool.remaining_promises();
    // All existing files can be removed.
    for text in super::list(&full.fs, Ino::ROOT) {
        let at = name(&text);
        let entry = full.fs.lookup(&cx(), Ino::ROOT, at).unwrap();
        for below in super::list(&full.fs, entry.ino) {
            let file = full.fs.unlink(&cx(), entry.ino, name(&below));
            file.or_else(|_| full.fs.rmdir(&cx(), entry.ino, name(&below))).unwrap();
        }
        let file = full.fs.unlink(&cx(), Ino::ROOT, at);
        file.or_else(|_| full.fs.rmdir(&cx(), Ino::ROOT, at)).unwrap();
        full.fs.forget(entry.ino, 1);
    }
    full.end();
    left
}

#[test]
fn whatever_finds_no_space_says_so_and_nothing_is_lost() {
    let mut starved = 0;
    for seed in 0..6 {
        for promises in 0.. {
            starved += 1;
            if starve(seed, promises).is_some_and(|left| left > 0) {
                break;
            }
        }
    }
    println!("{starved} runs");
}
