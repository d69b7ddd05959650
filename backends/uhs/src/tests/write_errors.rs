//! Devices that do not take data. Slots and superblocks are written.

use std::sync::Arc;

use defuse_block::sim::SimOpKind;
use defuse_block::{BlockDevice, Errno as Failure, SimDevice};
use defuse_fs::{
    Errno, Fh, File, FileKind, FileSystem, Ino, Result, SliceSource, WriteArgs, WriteBuf,
};

use super::{EARLY, OPTIONS, contents, cx, make_fresh, name, node, random};
use crate::commit::CommitRules;
use crate::format::UNIT_BLOCKS;
use crate::format::superblock::COPIES;
use crate::store::survey;
use crate::{Uhs, UhsOptions, check};

/// A device, and a file system on it.
fn new(dirty_pages: usize, rules: CommitRules) -> (SimDevice, Uhs) {
    let sim = SimDevice::from_ram(&make_fresh(), 1);
    let options = UhsOptions { dirty_pages, ..OPTIONS };
    let (fs, _) = Uhs::open_by(Arc::new(sim.clone()), options, rules, random()).unwrap();
    (sim, fs)
}

/// Lets writes to these data blocks fail.
fn refuse(sim: &SimDevice, refused: impl Fn(u64) -> bool + Send + 'static) {
    let chunks = survey(sim, CommitRules::ALL).unwrap().superblock.chunks;
    let is_slot = move |block: u64| {
        let unit = (block / UNIT_BLOCKS) as u32;
        chunks
            .iter()
            .any(|chunk| (chunk.first_unit..chunk.first_unit + chunk.units).contains(&unit))
    };
    sim.fail(move |victim| {
        let mut blocks = victim.block..victim.block + victim.blocks;
        let data = |block: u64| !is_slot(block) && !COPIES.contains(&block) && refused(block);
        (victim.call == SimOpKind::Write && blocks.any(data)).then_some(Failure::IO)
    });
}

fn make(fs: &Uhs, text: &str) -> Ino {
    fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap().ino
}

fn write(fs: &Uhs, ino: Ino, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, ..WriteArgs::default() };
    fs.write(&cx(), File { ino, fh: Fh(0) }, args, &mut WriteBuf::new(&mut source))
}

fn fsync(fs: &Uhs, ino: Ino) -> Result<()> {
    fs.fsync(&cx(), File { ino, fh: Fh(0) }, false)
}

/// Checks that the present device has no damage, and these bytes in the file.
fn expect(sim: &SimDevice, ino: Ino, bytes: &[u8]) {
    let ram = Arc::new(sim.copy_present());
    assert_eq!(check(&(ram.clone() as Arc<dyn BlockDevice>)).unwrap().problems, []);
    let (fs, problems) = Uhs::open(ram, OPTIONS, random()).unwrap();
    assert_eq!(
        (problems.len(), fs.getattr(&cx(), ino, None).unwrap().size),
        (0, bytes.len() as u64)
    );
    assert!(contents(&fs, ino, bytes.len() as u64) == bytes);
}

#[test]
fn data_whose_block_cannot_be_written_lies_elsewhere() {
    for rules in [CommitRules::ALL, EARLY] {
        let (sim, fs) = new(64, rules);
        let (file, other) = (make(&fs, "file"), make(&fs, "other"));
        write(&fs, file, 0, &[1; 40_000]).unwrap();
        fsync(&fs, file).unwrap();
        // Every third block, old ones and new ones.
        refuse(&sim, |block| block % 3 == 0);
        write(&fs, file, 10_000, &[2; 50_000]).unwrap();
        write(&fs, other, 0, &[3; 30_000]).unwrap();
        let mut bytes = [vec![1; 10_000], vec![2; 50_000]].concat();
        // Some of the new blocks are bad, too: the next sync writes stuck pages.
        let synced = (0..20).find(|_| fs.syncfs(&cx()).is_ok());
        assert!(synced.is_some());
        expect(&sim, file, &bytes);
        expect(&sim, other, &[3; 30_000]);
        bytes[..5000].fill(4);
        write(&fs, file, 0, &[4; 5000]).unwrap();
        sim.end_faults();
        fsync(&fs, file).unwrap();
        expect(&sim, file, &bytes);
    }
}

#[test]
fn every_fsync_of_a_file_fails_until_its_data_is_written_and_other_files_go_on() {
    for rules in [CommitRules::ALL, EARLY] {
        let (sim, fs) = new(64, rules);
        let (file, good) = (make(&fs, "file"), make(&fs, "good"));
        write(&fs, file, 0, &[1; 40_000]).unwrap();
        fsync(&fs, file).unwrap();
        refuse(&sim, |_| true);
        write(&fs, file, 20_000, &[2; 50_000]).unwrap();
        for round in 0..3 {
            assert_eq!(fsync(&fs, file), Err(Errno::EIO), "round {round}");
            assert_eq!(fs.syncfs(&cx()), Err(Errno::EIO));
            // Small files lie in slots, and writes of slots succeed.
            write(&fs, good, 0, format!("{round}").as_bytes()).unwrap();
            assert_eq!(fsync(&fs, good), Ok(()));
            expect(&sim, good, format!("{round}").as_bytes());
        }
        assert_eq!(fs.detach(defuse_fs::Origin::NONE), Err(Errno::EIO), "an unmount says so");
        assert!(!fs.engine().is_read_only());
        let bytes = [vec![1; 20_000], vec![2; 50_000]].concat();
        assert!(contents(&fs, file, 70_000) == bytes, "readers see what was written");
        sim.end_faults();
        assert_eq!((fsync(&fs, file), fs.syncfs(&cx())), (Ok(()), Ok(())));
        expect(&sim, file, &bytes);
    }
}

#[test]
fn data_that_no_device_takes_is_given_up_before_it_fills_the_memory() {
    for rules in [CommitRules::ALL, EARLY] {
        let (sim, fs) = new(64, rules);
        let file = make(&fs, "file");
        refuse(&sim, |_| true);
        for part in 0..200 {
            write(&fs, file, part * 20_000, &[1; 20_000]).unwrap();
            assert!(fs.engine().pool().dirty() <= 64 + 5, "part {part}");
        }
        assert_eq!(fsync(&fs, file), Err(Errno::EIO), "somebody is told");
        fs.unlink(&cx(), Ino::ROOT, name("file")).unwrap();
        fs.forget(file, 1);
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        sim.end_faults();
        let (other, free) = (make(&fs, "other"), fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free);
        write(&fs, other, 0, &[5; 100_000]).unwrap();
        assert_eq!((fsync(&fs, other), free > 1000), (Ok(()), true));
        expect(&sim, other, &[5; 100_000]);
    }
}

#[test]
fn a_mount_whose_data_the_device_refused_leaves_no_snapshot() {
    for (refuses, rules) in [(false, EARLY), (true, CommitRules::ALL), (true, EARLY)] {
        let (sim, fs) = new(64, rules);
        let file = make(&fs, "file");
        if refuses {
            refuse(&sim, |_| true);
        }
        write(&fs, file, 0, &[1; 20_000]).unwrap();
        assert_eq!(fsync(&fs, file).is_ok(), !refuses);
        sim.end_faults();
        assert_eq!(fsync(&fs, file), Ok(()));
        drop(fs);
        let superblock = survey(&sim, CommitRules::ALL).unwrap().superblock;
        assert_eq!(superblock.snapshot.is_none(), refuses);
        expect(&sim, file, &[1; 20_000]);
    }
}
