//! Extended attributes and ACLs: on the device, and their space.

use std::sync::Arc;

use defuse_block::RamDevice;
use defuse_fs::posix::acl::Acl;
use defuse_fs::{
    Errno, FileKind, FileSystem, Ino, NewNode, Result, SetXattrFlags, Xattr, XattrName,
};

use super::{OPTIONS, cx, list, make_fresh, name, node, open, random};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

fn set(fs: &Uhs, ino: Ino, name: &str, value: &[u8]) -> Result<()> {
    let name = XattrName::new(name.as_bytes()).unwrap();
    fs.setxattr(&cx(), ino, name, value, SetXattrFlags::default())
}

fn get(fs: &Uhs, ino: Ino, name: &str) -> Result<Vec<u8>> {
    match fs.getxattr(&cx(), ino, XattrName::new(name.as_bytes()).unwrap(), 1 << 17)? {
        Xattr::Value(value) => Ok(value),
        Xattr::Size(size) => panic!("{size} bytes"),
    }
}

fn make(fs: &Uhs, text: &str, kind: FileKind) -> Ino {
    match kind {
        FileKind::Directory => fs.mkdir(&cx(), Ino::ROOT, name(text), &node(kind)),
        _ => fs.mknod(&cx(), Ino::ROOT, name(text), &node(kind)),
    }
    .unwrap()
    .ino
}

/// Owner rwx, user 5 r-x, group r--, mask rwx, other nothing.
fn make_acl() -> Vec<u8> {
    let entries =
        [(1, 7, u32::MAX), (2, 5, 5), (4, 4, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(perm));
        bytes.extend(u32::to_le_bytes(id));
    }
    assert!(Acl::parse(&bytes).unwrap().is_some());
    bytes
}

#[test]
fn attributes_of_any_size_survive_a_mount() {
    let disk = Arc::new(RamDevice::new(4096, 16 * 1024));
    Uhs::make(disk.clone(), (0o755, 0, 0), &mut random()).unwrap();
    let values: Vec<(String, Vec<u8>)> = [0, 1, 400, 65_000, 65_001, 65_536]
        .into_iter()
        .map(|len| (format!("user.{len}"), vec![len as u8; len]))
        .collect();
    let kinds = [FileKind::Regular, FileKind::Directory];
    let looking = UhsOptions { read_only: true, ..OPTIONS };
    let (fs, _) = Uhs::open(disk.clone(), OPTIONS, random()).unwrap();
    let inos = kinds.map(|kind| make(&fs, &format!("{kind:?}"), kind));
    for (ino, (name, value)) in inos.iter().flat_map(|ino| values.iter().map(move |v| (ino, v))) {
        set(&fs, *ino, name, value).unwrap();
    }
    set(&fs, Ino::ROOT, "trusted.root", b"r").unwrap();
    let fifo = make(&fs, "fifo", FileKind::Fifo);
    assert_eq!(set(&fs, fifo, "user.x", b""), Err(Errno::EPERM));
    set(&fs, fifo, "security.x", b"y").unwrap();
    for round in 0..2 {
        fs.syncfs(&cx()).unwrap();
        assert_eq!(check(&(disk.clone() as _)).unwrap().problems, []);
        let (again, problems) = Uhs::open(disk.clone(), looking, random()).unwrap();
        assert_eq!(problems, []);
        for ino in inos {
            for (name, value) in &values {
                assert!(get(&again, ino, name).as_ref() == Ok(value), "{name} of {ino:?}, {round}");
            }
        }
        assert_eq!(get(&again, Ino::ROOT, "trusted.root").unwrap(), b"r");
        assert_eq!(get(&again, fifo, "security.x").unwrap(), b"y");
        // Another change of the inode keeps them.
        fs.link(&cx(), inos[0], Ino::ROOT, name(&format!("link{round}"))).unwrap();
    }
    for (name, _) in &values {
        let name = XattrName::new(name.as_bytes()).unwrap();
        fs.removexattr(&cx(), inos[0], name).unwrap();
        assert_eq!(fs.removexattr(&cx(), inos[0], name), Err(Errno::ENODATA));
    }
    fs.syncfs(&cx()).unwrap();
    let (again, _) = Uhs::open(disk, looking, random()).unwrap();
    assert_eq!(get(&again, inos[0], "user.400"), Err(Errno::ENODATA));
}

#[test]
fn the_attributes_of_an_inode_are_bounded() {
    let (fs, _) = open(make_fresh(), CommitRules::ALL);
    let ino = make(&fs, "file", FileKind::Regular);
    assert_eq!(set(&fs, ino, "user.large", &vec![0; 65_537]), Err(Errno::E2BIG));
    assert_eq!(set(&fs, ino, "user.", b""), Err(Errno::EINVAL));
    assert_eq!(set(&fs, ino, "other.x", b""), Err(Errno::EOPNOTSUPP));
    let set_up_to =
        |len: usize| (0..).find(|n| set(&fs, ino, &format!("user.{n}"), &vec![1; len]).is_err());
    assert_eq!(set_up_to(65_000), Some(4));
    assert_eq!(set(&fs, ino, "user.4", &vec![1; 65_000]), Err(Errno::ENOSPC));
}

/// Records with attributes go to blocks when the group closes, which is too late for ENOSPC: the
/// file system would be read-only.
#[test]
fn attributes_take_space_that_is_promised_when_they_are_set() {
    let disk = make_fresh();
    let (fs, _) = open(disk.clone(), CommitRules::ALL);
    let free = || fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    let before = free();
    let made: Vec<Ino> = (0..200).map(|n| make(&fs, &n.to_string(), FileKind::Regular)).collect();
    let full =
        (0..made.len()).find_map(|n| set(&fs, made[n], "user.x", &vec![n as u8; 60_000]).err());
    assert_eq!((full, free() < 40), (Some(Errno::ENOSPC), true), "{} of {before}", free());
    fs.syncfs(&cx()).unwrap();
    // All of them can change at a time, although nothing is free.
    for ino in &made {
        let set = defuse_fs::SetAttr { perm: Some(0o600), ..defuse_fs::SetAttr::default() };
        fs.setattr(&cx(), *ino, None, &set).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    assert_eq!(get(&fs, made[3], "user.x").unwrap(), vec![3; 60_000]);
    for (n, ino) in made.into_iter().enumerate() {
        fs.unlink(&cx(), Ino::ROOT, name(&n.to_string())).unwrap();
        fs.forget(ino, 1);
    }
    fs.syncfs(&cx()).unwrap();
    fs.syncfs(&cx()).unwrap();
    assert!(free() + 4 >= before, "{} of {before}", free());
    drop(fs);
    assert_eq!(list(&open(disk, CommitRules::ALL).0, Ino::ROOT), [] as [&str; 0]);
}

#[test]
fn acls_are_inherited_and_follow_the_mode_also_after_a_mount() {
    let disk = make_fresh();
    let (fs, _) = open(disk.clone(), CommitRules::ALL);
    let dir = make(&fs, "dir", FileKind::Directory);
    set(&fs, dir, DEFAULT, &make_acl()).unwrap();
    let file = make(&fs, "file", FileKind::Regular);
    assert_eq!(set(&fs, file, DEFAULT, &make_acl()), Err(Errno::EACCES));
    assert_eq!(set(&fs, file, ACCESS, b"bad"), Err(Errno::EINVAL));
    set(&fs, file, ACCESS, &make_acl()).unwrap();
    assert_eq!(fs.getattr(&cx(), file, None).unwrap().perm, 0o770);
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    let (fs, _) = open(disk.clone(), CommitRules::ALL);
    let new = NewNode::new(FileKind::Regular, 0o666, cx().caller);
    let made = fs.mknod(&cx(), dir, name("made"), &new).unwrap();
    let below = fs.mkdir(&cx(), dir, name("below"), &node(FileKind::Directory)).unwrap();
    assert_eq!(made.attr.perm, 0o660);
    let chmod = defuse_fs::SetAttr { perm: Some(0o640), ..defuse_fs::SetAttr::default() };
    fs.setattr(&cx(), file, None, &chmod).unwrap();
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    let (fs, problems) = open(disk, CommitRules::ALL);
    assert_eq!(problems, []);
    let acl = |ino, name| Acl::parse(&get(&fs, ino, name).unwrap()).unwrap().unwrap();
    assert_eq!(acl(made.ino, ACCESS).perm(), 0o660);
    assert_eq!(get(&fs, below.ino, DEFAULT).unwrap(), make_acl());
    // The mask takes the bits of the group.
    assert_eq!((acl(file, ACCESS).perm(), get(&fs, file, ACCESS).unwrap().len()), (0o640, 44));
}

/// A program with capabilities must not keep them when others write to it.
#[test]
fn capabilities_of_a_program_go_with_a_write_and_with_a_change_of_owner() {
    let (fs, _) = open(make_fresh(), CommitRules::ALL);
    let ino = make(&fs, "file", FileKind::Regular);
    let gone = |set_to: defuse_fs::SetAttr| {
        set(&fs, ino, "security.capability", b"c").unwrap();
        fs.setattr(&cx(), ino, None, &set_to).unwrap();
        get(&fs, ino, "security.capability") == Err(Errno::ENODATA)
    };
    assert!(gone(defuse_fs::SetAttr { uid: Some(5), ..Default::default() }));
    assert!(gone(defuse_fs::SetAttr { size: Some(9), kill_suidgid: true, ..Default::default() }));
    assert!(!gone(defuse_fs::SetAttr { perm: Some(0o700), ..Default::default() }));
}
