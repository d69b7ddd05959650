//! The memory of a mount that reads all slots.

use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{
    Fh, File, FileKind, FileSystem, Ino, SetAttr, SetXattrFlags, SliceSource, WriteArgs, WriteBuf,
    XattrName,
};

use super::{OPTIONS, TreeSnapshot, cx, name, node, open, random, snapshot};
use crate::commit::CommitRules;
use crate::content::INODE_MEMORY;
use crate::store::{StoreError, survey};
use crate::{Uhs, UhsOptions, check, repair};

/// Files with a kilobyte each.
const FILES: usize = 1000;

fn file(fs: &Uhs, text: &str, bytes: usize) -> Ino {
    let ino = fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap().ino;
    let data: Vec<u8> = text.bytes().cycle().take(bytes).collect();
    let mut source = SliceSource::new(&data);
    let mut data = WriteBuf::new(&mut source);
    let file = File { ino, fh: Fh(0) };
    assert_eq!(fs.write(&cx(), file, WriteArgs::default(), &mut data), Ok(bytes));
    ino
}

/// A device with inodes of all kinds, and older copies of some, as a power failure leaves it.
fn make_filled() -> (RamDevice, TreeSnapshot) {
    let ram = RamDevice::new(4096, 32 * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    for number in 0..FILES {
        file(&fs, &format!("file {number}"), 1000);
    }
    for number in 0..20 {
        let one = file(&fs, &format!("linked {number}"), 500);
        fs.link(&cx(), one, Ino::ROOT, name(&format!("second {number}"))).unwrap();
        let other = file(&fs, &format!("attributes {number}"), 500);
        let key = XattrName::new(b"user.a").unwrap();
        fs.setxattr(&cx(), other, key, &[7; 3000], SetXattrFlags::default()).unwrap();
        file(&fs, &format!("blocks {number}"), 9000);
        let (link, new) = (format!("link {number}"), node(FileKind::Symlink));
        fs.symlink(&cx(), Ino::ROOT, name(&link), &[b't'; 3500], &new).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    for number in (0..FILES).step_by(7) {
        let ino = fs.lookup(&cx(), Ino::ROOT, name(&format!("file {number}"))).unwrap().ino;
        let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
        fs.setattr(&cx(), ino, None, &set).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    let (left, seen) = (ram.fork(), snapshot(&fs));
    fs.abandon();
    (left, seen)
}

/// The scan kept all slots, with the data of files, until all inodes were in memory a second time.
#[test]
fn a_scan_keeps_no_more_bodies_than_its_bound() {
    let (ram, _) = make_filled();
    for kept in [0, 50_000, 200_000] {
        let survey = survey(&ram, CommitRules { kept, ..CommitRules::ALL }).unwrap();
        let bytes = survey.bytes_kept() as u64;
        // A thread takes 64 KiB of the bound at a time.
        assert!(bytes <= kept && bytes >= kept.saturating_sub(70_000), "{bytes} of {kept}");
    }
    let all = survey(&ram, CommitRules::ALL).unwrap().bytes_kept();
    assert!(all < FILES * 1000, "{all} bytes with the data of files");
}

#[test]
fn a_mount_is_the_same_whatever_the_scan_keeps() {
    let (ram, expected) = make_filled();
    for kept in [0, 1000, 50_000, 200_000, CommitRules::ALL.kept] {
        let rules = CommitRules { kept, ..CommitRules::ALL };
        let (fs, problems) = open(ram.fork(), rules);
        assert_eq!(problems, []);
        assert!(snapshot(&fs) == expected, "{kept}");
        // Changed inodes are written with their data, and are mounted again.
        let ino = fs.lookup(&cx(), Ino::ROOT, name("file 1")).unwrap().ino;
        let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
        fs.setattr(&cx(), ino, None, &set).unwrap();
        fs.syncfs(&cx()).unwrap();
        let changed = snapshot(&fs);
        assert!(changed.data == expected.data, "{kept}");
        drop(fs);
    }
    let device: Arc<dyn BlockDevice> = Arc::new(ram.fork());
    assert_eq!(check(&device).unwrap().problems, []);
    assert_eq!(repair(&device, None, random()).unwrap(), []);
}

/// The bodies of all inodes were in memory before their number was compared with the bound.
#[test]
fn an_index_that_is_too_large_is_refused_before_bodies_are_read_again() {
    let (ram, _) = make_filled();
    let device: Arc<dyn BlockDevice> = Arc::new(ram);
    let inodes = survey(&*device, CommitRules::ALL).unwrap().found.live.len() as u64;
    let limit = 100 * INODE_MEMORY;
    let options = UhsOptions { index: limit, ..OPTIONS };
    let refused = Uhs::open_by(Arc::clone(&device), options, CommitRules::ALL, random()).map(drop);
    let bytes = inodes * INODE_MEMORY;
    assert_eq!(refused, Err(StoreError::Index { inodes, bytes, limit }));
}

/// A sparse file of any size takes no space, and the map of its space was made before its size was
/// checked: gigabytes for a petabyte.
#[test]
fn a_map_of_space_takes_no_more_memory_than_it_may() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse");
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let open = || {
        let file = defuse_block::OpenDeviceFile::open(&path, defuse_block::DeviceAccess::ReadWrite)
            .unwrap();
        Arc::new(file.device().unwrap()) as Arc<dyn BlockDevice>
    };
    let units = (1 << 40) / (2 << 20);
    Uhs::make(open(), (0o755, 0, 0), &mut random()).unwrap();
    for (index, fits) in [(units * 8, true), (units * 8 - 1, false), (1 << 16, false)] {
        let options = UhsOptions { index, ..OPTIONS };
        let opened = Uhs::open(open(), options, random());
        match opened {
            Ok((fs, problems)) => {
                assert!(fits && problems.is_empty() && fs.detach(defuse_fs::Origin::NONE).is_ok())
            }
            Err(error) => {
                let expected = StoreError::Space { units, bytes: units * 8, limit: index };
                assert_eq!((error, fits), (expected, false));
            }
        }
    }
}
