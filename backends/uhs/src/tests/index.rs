//! The memory that names and attributes may take.

use std::sync::Arc;

use defuse_block::BlockDevice;
use defuse_fs::{Errno, FileKind, FileSystem, Ino, Result, SetAttr, SetXattrFlags, XattrName};

use super::{OPTIONS, cx, make_fresh, name, node, open_with, random};
use crate::commit::CommitRules;
use crate::content::INODE_MEMORY;
use crate::{StoreError, Uhs, UhsOptions};

/// The root and this many more fit.
const FILES: u64 = 20;

fn limit_index(index: u64) -> UhsOptions {
    UhsOptions { index, ..OPTIONS }
}

fn make(fs: &Uhs, number: u64) -> Result<Ino> {
    fs.mknod(&cx(), Ino::ROOT, name(&format!("file {number}")), &node(FileKind::Regular))
        .map(|made| made.ino)
}

fn set(fs: &Uhs, ino: Ino, key: &str, bytes: usize) -> Result<()> {
    let key = XattrName::new(key.as_bytes()).unwrap();
    fs.setxattr(&cx(), ino, key, &vec![7; bytes], SetXattrFlags::default())
}

fn count_used(fs: &Uhs) -> u64 {
    fs.figures().iter().find(|figure| figure.name == "index_used").unwrap().value
}

#[test]
fn no_file_is_made_without_memory_for_its_name() {
    let (fs, _) =
        open_with(make_fresh(), limit_index((FILES + 1) * INODE_MEMORY), CommitRules::ALL);
    let free = |fs: &Uhs| fs.statfs(&cx(), Ino::ROOT).unwrap().files_free;
    assert_eq!(free(&fs), FILES);
    let made: Vec<Ino> = (0..FILES).map(|number| make(&fs, number).unwrap()).collect();
    assert_eq!((make(&fs, FILES), free(&fs)), (Err(Errno::ENOSPC), 0));
    // Existing files can be changed, and removed.
    let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
    fs.setattr(&cx(), made[0], None, &set).unwrap();
    fs.unlink(&cx(), Ino::ROOT, name("file 0")).unwrap();
    fs.forget(made[0], 1);
    assert_eq!(free(&fs), 1);
    make(&fs, FILES).unwrap();
}

#[test]
fn attributes_and_further_names_count() {
    let limit = 64 * 1024;
    let (fs, _) = open_with(make_fresh(), limit_index(limit), CommitRules::ALL);
    let before = count_used(&fs);
    let mut made = Vec::new();
    let refused = (0..1000).find_map(|number| {
        let ino = make(&fs, number).unwrap();
        made.push((number, ino));
        set(&fs, ino, "user.a", 3000).err()
    });
    assert_eq!(refused, Some(Errno::ENOSPC));
    assert!((10..30).contains(&made.len()), "{} files", made.len());
    let (_, last) = *made.last().unwrap();
    let linked = (0..1000).find_map(|number| {
        fs.link(&cx(), last, Ino::ROOT, name(&format!("link {number} {}", "x".repeat(200)))).err()
    });
    assert_eq!(linked, Some(Errno::ENOSPC));
    assert!(count_used(&fs) <= limit, "{}", count_used(&fs));
    fs.syncfs(&cx()).unwrap();
    assert!(count_used(&fs) <= limit, "{}", count_used(&fs));
    for (number, ino) in &made[..made.len() - 1] {
        fs.unlink(&cx(), Ino::ROOT, name(&format!("file {number}"))).unwrap();
        fs.forget(*ino, 1);
    }
    fs.syncfs(&cx()).unwrap();
    let names = fs.getattr(&cx(), last, None).unwrap().nlink;
    for number in 0..names - 1 {
        let text = format!("link {number} {}", "x".repeat(200));
        fs.unlink(&cx(), Ino::ROOT, name(&text)).unwrap();
    }
    fs.unlink(&cx(), Ino::ROOT, name(&format!("file {}", made.len() - 1))).unwrap();
    fs.forget(last, u64::from(names));
    fs.syncfs(&cx()).unwrap();
    assert_eq!(count_used(&fs), before, "all of it is given back");
}

#[test]
fn a_larger_file_system_is_refused_with_the_figure() {
    for rules in [CommitRules::ALL, CommitRules { snapshots: false, ..CommitRules::ALL }] {
        let ram = make_fresh();
        let (fs, _) = open_with(ram.clone(), OPTIONS, rules);
        let made: Vec<Ino> = (0..FILES).map(|number| make(&fs, number).unwrap()).collect();
        fs.syncfs(&cx()).unwrap();
        drop(fs);
        let device: Arc<dyn BlockDevice> = Arc::new(ram);
        let bytes = (FILES + 1) * INODE_MEMORY;
        let open = |limit, rules| {
            Uhs::open_by(Arc::clone(&device), limit_index(limit), rules, random()).map(|(fs, _)| fs)
        };
        let refused = open(bytes - 1, rules).map(drop).unwrap_err();
        let limit = bytes - 1;
        assert_eq!(refused, StoreError::Index { inodes: FILES + 1, bytes, limit });
        assert!(refused.to_string().contains(&bytes.to_string()), "{refused}");
        // The attributes of files count, too, and nothing of the image is changed by a refusal.
        let fs = open(bytes + 3 * 4096, rules).unwrap();
        set(&fs, made[3], "user.a", 5000).unwrap();
        drop(fs);
        let refused = open(bytes, rules).map(drop).unwrap_err();
        assert!(matches!(refused, StoreError::Index { bytes: more, .. } if more > bytes));
        let fs = open(bytes + 3 * 4096, rules).unwrap();
        assert!(count_used(&fs) > bytes);
    }
}
