//! The promises of the file system, tested through the contract.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::*;
use defuse_fs::*;
use defuse_memory::MemoryFileSystem;

#[test]
fn an_unlinked_file_lives_while_it_is_open_or_looked_up_and_gives_its_space_back_after() {
    let fs = memory(Some(1 << 20), Some(10));
    let ino = file(&fs, Ino::ROOT, "a");
    let open = open(&fs, ino);
    write_open(&fs, open, 0, &[1; 5000]).unwrap();
    fs.unlink(&root(), Ino::ROOT, name("a")).unwrap();
    assert_eq!(fs.getattr(&root(), ino, None).unwrap().nlink, 0);
    fs.forget(ino, 1);
    assert_eq!(read_open(&fs, open, 4999, 10).unwrap(), [1]);
    let before = fs.statfs(&root(), Ino::ROOT).unwrap();
    fs.release(&root(), open, ReleaseArgs::default()).unwrap();
    let after = fs.statfs(&root(), Ino::ROOT).unwrap();
    assert_eq!(after.blocks_free - before.blocks_free, 2);
    assert_eq!((after.files_free - before.files_free, after.files_free), (1, 9));
    assert_eq!(fs.getattr(&root(), ino, None), Err(Errno::ESTALE));
    // A forget of more lookups than were counted is tolerated.
    fs.forget(ino, 100);
    fs.forget(Ino::ROOT, 100);
    assert!(fs.getattr(&root(), Ino::ROOT, None).is_ok());
}

/// Handles lead to inodes, and are reused.
#[test]
fn a_handle_of_a_closed_file_never_leads_to_the_data_of_another_file() {
    let fs = memory(None, None);
    let (a, b) = (file(&fs, Ino::ROOT, "a"), file(&fs, Ino::ROOT, "b"));
    let (first, second) = (open(&fs, a), open(&fs, a));
    assert_ne!(first.fh, second.fh);
    write_open(&fs, first, 0, b"a").unwrap();
    fs.release(&root(), first, ReleaseArgs::default()).unwrap();
    assert_eq!(read_open(&fs, second, 0, 9).unwrap(), b"a");
    let reused = open(&fs, b);
    assert_eq!(reused.fh, first.fh);
    write_open(&fs, reused, 0, b"b").unwrap();
    // Operations with the old handle, and a second close, concern the inode that they name.
    assert_eq!(read_open(&fs, first, 0, 9).unwrap(), b"a");
    write_open(&fs, first, 1, b"a").unwrap();
    fs.release(&root(), first, ReleaseArgs::default()).unwrap();
    assert_eq!(read_open(&fs, second, 0, 9).unwrap(), b"aa");
    assert_eq!(read_open(&fs, reused, 0, 9).unwrap(), b"b");
    for wrong in [0, 63, 64, 1 << 20, u64::from(u32::MAX), u64::MAX] {
        assert_eq!(read_open(&fs, File { ino: b, fh: Fh(wrong) }, 0, 9).unwrap(), b"b");
    }
    assert_eq!(read_open(&fs, File { ino: Ino(99), ..reused }, 0, 9), Err(Errno::ESTALE));
}

/// A flag by which reads without a lock know that the access time is current.
#[test]
fn every_change_of_a_file_lets_the_next_read_update_its_access_time() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let open = open(&fs, ino);
    let atime = || fs.getattr(&root(), ino, None).unwrap().atime;
    type FileChange = fn(&MemoryFileSystem, File);
    let changes: [FileChange; 4] = [
        |fs, open| assert_eq!(write_open(fs, open, 0, b"x").unwrap(), 1),
        |fs, open| {
            let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
            fs.setattr(&root(), open.ino, None, &set).unwrap();
        },
        |fs, _| rename(fs, (Ino::ROOT, "a"), (Ino::ROOT, "b"), 0).unwrap(),
        |fs, open| assert!(fs.link(&root(), open.ino, Ino::ROOT, name("c")).is_ok()),
    ];
    for change in changes {
        change(&fs, open);
        let before = atime();
        thread::sleep(Duration::from_millis(2));
        read_open(&fs, open, 0, 1).unwrap();
        let after = atime();
        assert!(after > before);
        read_open(&fs, open, 0, 1).unwrap();
        assert_eq!(atime(), after);
    }
}

#[test]
fn limits_are_never_exceeded() {
    let fs = memory(Some(8192), Some(3));
    let a = file(&fs, Ino::ROOT, "a");
    file(&fs, Ino::ROOT, "b");
    let third = fs.mkdir(&root(), Ino::ROOT, name("c"), &node(FileKind::Directory, 0o755));
    assert_eq!(third, Err(Errno::ENOSPC));
    assert_eq!(write(&fs, a, 0, &[1; 10000]), Ok(8192));
    assert_eq!(write(&fs, a, 8192, &[1]), Err(Errno::ENOSPC));
    assert_eq!(fs.statfs(&root(), a).unwrap().blocks_free, 0);
    fs.setattr(&root(), a, None, &SetAttr { size: Some(1), ..SetAttr::default() }).unwrap();
    assert_eq!(fs.statfs(&root(), a).unwrap().blocks_free, 1);
}

#[test]
fn a_directory_cannot_move_below_itself_and_its_parent_follows_it() {
    let fs = memory(None, None);
    let a = dir(&fs, Ino::ROOT, "a");
    let b = dir(&fs, a, "b");
    let c = dir(&fs, b, "c");
    assert_eq!(rename(&fs, (Ino::ROOT, "a"), (c, "x"), 0), Err(Errno::EINVAL));
    assert_eq!(rename(&fs, (Ino::ROOT, "a"), (a, "x"), 0), Err(Errno::EINVAL));
    assert_eq!(rename(&fs, (b, "c"), (Ino::ROOT, "a"), 0), Err(Errno::ENOTEMPTY));
    let exchange = RenameFlags::EXCHANGE;
    assert_eq!(rename(&fs, (b, "c"), (Ino::ROOT, "a"), exchange), Err(Errno::EINVAL));
    rename(&fs, (b, "c"), (Ino::ROOT, "c"), 0).unwrap();
    assert_eq!(fs.lookup_parent(&root(), c).unwrap().ino, Ino::ROOT);
    let nlink = |ino| fs.getattr(&root(), ino, None).unwrap().nlink;
    assert_eq!((nlink(Ino::ROOT), nlink(a), nlink(b), nlink(c)), (4, 3, 2, 2));
    rename(&fs, (a, "b"), (Ino::ROOT, "c"), exchange).unwrap();
    assert_eq!(fs.lookup_parent(&root(), c).unwrap().ino, a);
    file(&fs, Ino::ROOT, "f");
    rename(&fs, (Ino::ROOT, "f"), (a, "b"), exchange).unwrap();
    assert_eq!((nlink(Ino::ROOT), nlink(a)), (5, 2));
}

#[test]
fn a_rename_can_leave_a_whiteout() {
    let fs = memory(None, None);
    file(&fs, Ino::ROOT, "a");
    rename(&fs, (Ino::ROOT, "a"), (Ino::ROOT, "b"), RenameFlags::WHITEOUT).unwrap();
    let left = fs.lookup(&root(), Ino::ROOT, name("a")).unwrap();
    assert_eq!((left.attr.kind, left.attr.rdev), (FileKind::CharDevice, 0));
    let both = RenameFlags::WHITEOUT | RenameFlags::EXCHANGE;
    assert_eq!(rename(&fs, (Ino::ROOT, "a"), (Ino::ROOT, "b"), both), Err(Errno::EINVAL));
}

#[test]
fn names_that_stay_are_listed_once_while_others_come_and_go() {
    let fs = memory(None, None);
    for i in 0..100 {
        file(&fs, Ino::ROOT, &format!("stay{i}"));
        file(&fs, Ino::ROOT, &format!("go{i}"));
    }
    let mut listing = DirLister { entries: true, ..DirLister::default() };
    let mut round = 0;
    while listing.list_more(&fs, Ino::ROOT, 7) > 0 {
        if round < 100 {
            fs.unlink(&root(), Ino::ROOT, name(&format!("go{}", 99 - round))).unwrap();
            if round < 50 {
                file(&fs, Ino::ROOT, &format!("new{round}"));
            }
        }
        round += 1;
    }
    for i in 0..100 {
        let wanted = format!("stay{i}");
        assert_eq!(listing.names.iter().filter(|name| **name == wanted).count(), 1, "{wanted}");
    }
    assert_eq!(&listing.names[..2], [".", ".."]);
    assert!(listing.inos[..2].iter().all(Option::is_none));
    assert!(listing.inos[2..].iter().all(Option::is_some));
}

/// Every rename gave the name a new position at the end, which the listing then reached again.
/// (xfstests 736)
#[test]
fn a_listing_ends_while_names_come_and_are_renamed() {
    let fs = memory(None, None);
    for i in 0..100 {
        file(&fs, Ino::ROOT, &format!("stay{i}"));
    }
    file(&fs, Ino::ROOT, "to");
    let below = dir(&fs, Ino::ROOT, "below");
    let fh = fs.opendir(&root(), Ino::ROOT, OpenFlags::default()).unwrap().fh;
    let mut listing = DirLister { fh, ..DirLister::default() };
    let mut rounds = 0;
    while listing.list_more(&fs, Ino::ROOT, 1) > 0 {
        rename(&fs, (Ino::ROOT, "to"), (Ino::ROOT, "fro"), 0).unwrap();
        rename(&fs, (Ino::ROOT, "fro"), (below, "away"), 0).unwrap();
        rename(&fs, (below, "away"), (Ino::ROOT, "to"), 0).unwrap();
        file(&fs, Ino::ROOT, &format!("new{rounds}"));
        rounds += 1;
        assert!(rounds < 1000, "the listing does not end");
    }
    assert_eq!(listing.names.iter().filter(|name| name.starts_with("stay")).count(), 100);
    // A rewound listing shows the current names, rewinddir(3).
    let mut again = DirLister { fh, ..DirLister::default() };
    while again.list_more(&fs, Ino::ROOT, 7) > 0 {}
    assert_eq!(again.names.len(), 2 + 100 + 2 + rounds);
    fs.releasedir(&root(), File { ino: Ino::ROOT, fh }).unwrap();
}

fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for &(tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn an_access_list_and_the_permission_bits_follow_each_other() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let access = xattr("system.posix_acl_access");
    let list = acl(&[(1, 7, !0), (2, 6, 5), (4, 5, !0), (16, 4, !0), (32, 1, !0)]);
    fs.setxattr(&root(), ino, access, &list, SetXattrFlags::default()).unwrap();
    assert_eq!(fs.getattr(&root(), ino, None).unwrap().perm, 0o741);
    fs.setattr(&root(), ino, None, &SetAttr { perm: Some(0o620), ..SetAttr::default() }).unwrap();
    let list = acl(&[(1, 6, !0), (2, 6, 5), (4, 5, !0), (16, 2, !0), (32, 0, !0)]);
    assert_eq!(fs.getxattr(&root(), ino, access, 100), Ok(Xattr::Value(list)));
    let minimal = acl(&[(1, 6, !0), (4, 4, !0), (32, 4, !0)]);
    fs.setxattr(&root(), ino, access, &minimal, SetXattrFlags::default()).unwrap();
    assert_eq!(fs.getxattr(&root(), ino, access, 100), Err(Errno::ENODATA));
    assert_eq!(fs.getattr(&root(), ino, None).unwrap().perm, 0o644);
    let default = xattr("system.posix_acl_default");
    let flags = SetXattrFlags::default();
    assert_eq!(fs.setxattr(&root(), ino, default, &minimal, flags), Err(Errno::EACCES));
    assert_eq!(fs.setxattr(&root(), ino, access, &list_without_mask(), flags), Err(Errno::EINVAL));
}

fn list_without_mask() -> Vec<u8> {
    acl(&[(1, 7, !0), (2, 6, 5), (4, 5, !0), (32, 1, !0)])
}

#[test]
fn a_default_list_takes_the_place_of_the_umask() {
    let fs = memory(None, None);
    let ino = dir(&fs, Ino::ROOT, "d");
    let default = xattr("system.posix_acl_default");
    let list = acl(&[(1, 7, !0), (2, 6, 5), (4, 5, !0), (16, 7, !0), (32, 0, !0)]);
    fs.setxattr(&root(), ino, default, &list, SetXattrFlags::default()).unwrap();
    let requested = NewNode { umask: 0o077, ..node(FileKind::Regular, 0o666) };
    let made = fs.mknod(&root(), ino, name("f"), &requested).unwrap();
    assert_eq!(made.attr.perm, 0o660);
    let access = acl(&[(1, 6, !0), (2, 6, 5), (4, 5, !0), (16, 6, !0), (32, 0, !0)]);
    let got = fs.getxattr(&root(), made.ino, xattr("system.posix_acl_access"), 100);
    assert_eq!(got, Ok(Xattr::Value(access)));
    let sub = dir(&fs, ino, "sub");
    assert_eq!(fs.getxattr(&root(), sub, default, 100), Ok(Xattr::Value(list)));
    let masked = fs.mknod(&root(), Ino::ROOT, name("g"), &requested).unwrap();
    assert_eq!(masked.attr.perm, 0o600);
}

#[test]
fn attributes_are_kept_by_namespace_and_flags() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let set = |text, value: &[u8], create, replace| {
        let flags = SetXattrFlags { create, replace, clear_sgid: false };
        fs.setxattr(&root(), ino, xattr(text), value, flags)
    };
    assert_eq!(set("user.a", b"1", false, true), Err(Errno::ENODATA));
    assert_eq!(set("user.a", b"1", true, false), Ok(()));
    assert_eq!(set("user.a", b"2", true, false), Err(Errno::EEXIST));
    assert_eq!(set("trusted.b", b"22", false, false), Ok(()));
    assert_eq!(set("other.c", b"", false, false), Err(Errno::EOPNOTSUPP));
    assert_eq!(set("user.", b"", false, false), Err(Errno::EINVAL));
    assert_eq!(set("user.big", &[0; 65537], false, false), Err(Errno::E2BIG));
    assert_eq!(fs.listxattr(&root(), ino, 0), Ok(Xattr::Size(17)));
    assert_eq!(fs.listxattr(&user(), ino, 99), Ok(Xattr::Value(b"user.a\0".to_vec())));
    assert_eq!(fs.getxattr(&root(), ino, xattr("trusted.b"), 1), Err(Errno::ERANGE));
    assert_eq!(fs.removexattr(&root(), ino, xattr("user.a")), Ok(()));
    assert_eq!(fs.removexattr(&root(), ino, xattr("user.a")), Err(Errno::ENODATA));
}

#[test]
fn set_user_id_is_cleared_by_unprivileged_writes_and_by_every_change_of_owner() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let chmod = |perm| {
        let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
        fs.setattr(&root(), ino, None, &set).unwrap();
        let flags = SetXattrFlags::default();
        fs.setxattr(&root(), ino, xattr("security.capability"), b"x", flags).unwrap();
    };
    let perm = || fs.getattr(&root(), ino, None).unwrap().perm;
    chmod(0o6755);
    write(&fs, ino, 0, b"x").unwrap();
    assert_eq!(perm(), 0o6755);
    let args = WriteArgs { kill_suidgid: true, ..WriteArgs::default() };
    let mut source = SliceSource::new(b"x");
    fs.write(&root(), handle(ino), args, &mut WriteBuf::new(&mut source)).unwrap();
    assert_eq!(perm(), 0o755);
    let capability = fs.getxattr(&root(), ino, xattr("security.capability"), 0);
    assert_eq!(capability, Err(Errno::ENODATA));
    chmod(0o6745);
    fs.setattr(&root(), ino, None, &SetAttr { uid: Some(1), ..SetAttr::default() }).unwrap();
    assert_eq!(perm(), 0o2745);
}

#[test]
fn a_nameless_file_can_be_linked_once_unless_it_is_exclusive() {
    let fs = memory(None, None);
    let new = node(FileKind::Regular, 0o600);
    let (entry, _) = fs.tmpfile(&root(), Ino::ROOT, &new, OpenArgs::default()).unwrap();
    assert_eq!(entry.attr.nlink, 0);
    assert_eq!(fs.link(&root(), entry.ino, Ino::ROOT, name("a")).unwrap().attr.nlink, 1);
    fs.unlink(&root(), Ino::ROOT, name("a")).unwrap();
    assert_eq!(fs.link(&root(), entry.ino, Ino::ROOT, name("a")), Err(Errno::ENOENT));
    let args = OpenArgs { flags: OpenFlags(OpenFlags::EXCL), ..OpenArgs::default() };
    let (entry, _) = fs.tmpfile(&root(), Ino::ROOT, &new, args).unwrap();
    assert_eq!(fs.link(&root(), entry.ino, Ino::ROOT, name("a")), Err(Errno::ENOENT));
}

#[test]
fn a_removed_directory_takes_no_more_names() {
    let fs = memory(None, None);
    let ino = dir(&fs, Ino::ROOT, "d");
    file(&fs, ino, "f");
    assert_eq!(fs.rmdir(&root(), Ino::ROOT, name("d")), Err(Errno::ENOTEMPTY));
    fs.unlink(&root(), ino, name("f")).unwrap();
    fs.rmdir(&root(), Ino::ROOT, name("d")).unwrap();
    let made = fs.mknod(&root(), ino, name("f"), &node(FileKind::Fifo, 0o600));
    assert_eq!(made, Err(Errno::ENOENT));
    let set_gid = SetAttr { perm: Some(0o2775), gid: Some(7), ..SetAttr::default() };
    fs.setattr(&root(), Ino::ROOT, None, &set_gid).unwrap();
    let sub = fs.getattr(&root(), dir(&fs, Ino::ROOT, "e"), None).unwrap();
    assert_eq!((sub.gid, sub.perm), (7, 0o2755));
}

fn lock(owner: u64, typ: LockType) -> LockRequest {
    let lock = Lock { typ, start: 0, end: 9, pid: owner as u32 };
    LockRequest { kind: LockKind::Posix, owner: LockOwner(owner), lock, wait: true }
}

#[test]
fn a_wait_for_a_lock_blocks_no_thread_and_ends_by_unlock_interrupt_or_close() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    fs.setlk(&root(), handle(ino), &lock(1, LockType::Write)).unwrap();
    let (first, _) = wait_lock(&fs, ino, lock(2, LockType::Write));
    let (second, token) = wait_lock(&fs, ino, lock(3, LockType::Write));
    assert!(first.try_recv().is_err());
    token.trip();
    assert_eq!(second.recv(), Ok(Err(Errno::EINTR)));
    fs.flush(&root(), handle(ino), LockOwner(1)).unwrap();
    assert_eq!(first.recv(), Ok(Ok(())));
    token.trip();
    let now = lock(4, LockType::Read);
    assert_eq!(fs.setlk(&root(), handle(ino), &now), Err(Errno::EAGAIN));
    assert_eq!(fs.getlk(&root(), handle(ino), &now).unwrap().unwrap().pid, 2);
}

/// FUSE does not report the end of a lock of an open file description, so the lock stayed for ever.
#[test]
fn the_last_close_of_a_file_drops_every_lock_on_it() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let open = open(&fs, ino);
    fs.setlk(&root(), open, &lock(1, LockType::Write)).unwrap();
    fs.release(&root(), open, ReleaseArgs::default()).unwrap();
    assert_eq!(fs.getlk(&root(), handle(ino), &lock(2, LockType::Write)), Ok(None));
}

#[test]
fn a_second_frontend_ends_the_validity_of_answers_for_those_that_are_not_told_of_changes() {
    let (fs, second) = (memory(None, None), Origin::new());
    let valid_for = |cx: Context<'_>| fs.getattr(&cx, Ino::ROOT, None).unwrap().valid_for;
    fs.attach(Origin::new(), std::sync::Arc::new(NoNotify));
    assert!(valid_for(root()).as_secs() >= 3600);
    fs.attach(second, std::sync::Arc::new(NoNotify));
    assert_eq!(valid_for(root()).as_secs(), 0);
    assert!(valid_for(root().from_origin(second)).as_secs() >= 3600);
}

#[test]
fn a_tree_of_any_depth_can_be_dropped() {
    let fs = memory(None, None);
    let mut at = Ino::ROOT;
    for _ in 0..100_000 {
        at = dir(&fs, at, "d");
    }
    drop(fs);
}

/// Renames, listings, lookups and removals in all directions. Finishing proves the absence of
/// deadlock.
#[test]
fn threads_that_move_directories_around_neither_deadlock_nor_lose_anything() {
    let fs = memory(None, None);
    let dirs: Vec<Ino> = (0..4).map(|i| dir(&fs, Ino::ROOT, &format!("d{i}"))).collect();
    for (i, &parent) in dirs.iter().enumerate() {
        dir(&fs, parent, &format!("s{i}"));
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let movers: Vec<_> = (0..4)
            .map(|t| {
                let (fs, dirs) = (&fs, &dirs);
                scope.spawn(move || {
                    for i in 0..3000 {
                        let (from, to) = (dirs[(t + i) % 4], dirs[(t * 7 + i * 3) % 4]);
                        let moved = format!("s{}", i % 4);
                        let _ = rename(fs, (from, &moved), (to, &moved), 1 + (i % 3 == 0) as u32);
                        let _ = rename(fs, (Ino::ROOT, &format!("d{}", i % 4)), (to, "d"), 1);
                        let _ = rename(fs, (to, "d"), (Ino::ROOT, &format!("d{}", i % 4)), 1);
                        let _ = fs.rmdir(&root(), Ino::ROOT, name(&moved));
                    }
                })
            })
            .collect();
        let (fs, stop) = (&fs, &stop);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let mut listing = DirLister { entries: true, ..DirLister::default() };
                while listing.list_more(fs, Ino::ROOT, 3) > 0 {}
            }
        });
        for mover in movers {
            mover.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut inodes = 0;
    let mut pending = vec![Ino::ROOT];
    while let Some(at) = pending.pop() {
        inodes += 1;
        let mut listing = DirLister { entries: true, ..DirLister::default() };
        listing.list_more(&fs, at, 100);
        let subdirs = listing.inos.iter().flatten();
        pending.extend(subdirs.clone());
        let nlink = fs.getattr(&root(), at, None).unwrap().nlink as usize;
        assert_eq!(nlink, 2 + subdirs.count());
    }
    assert_eq!(inodes, 9);
}

#[test]
fn threads_that_write_truncate_and_unlink_never_exceed_the_limit_and_give_everything_back() {
    const PAGES: u64 = 64;
    let fs = memory(Some(PAGES * 4096), Some(20));
    thread::scope(|scope| {
        for t in 0..4u64 {
            let fs = &fs;
            scope.spawn(move || {
                for i in 0..2000 {
                    let text = format!("f{}", (t + i) % 3);
                    let new = node(FileKind::Regular, 0o600);
                    let args = OpenArgs::default();
                    let Ok((entry, opened)) =
                        fs.create(&root(), Ino::ROOT, name(&text), &new, args)
                    else {
                        continue;
                    };
                    let open = File { ino: entry.ino, fh: opened.fh };
                    let _ = write_open(fs, open, i * 3777 % 400_000, &[t as u8 + 1; 9000]);
                    let set = SetAttr { size: Some(i * 7919 % 300_000), ..SetAttr::default() };
                    if i % 3 == 0 {
                        fs.setattr(&root(), entry.ino, None, &set).unwrap();
                    }
                    if i % 5 == 0 {
                        let _ = fs.unlink(&root(), Ino::ROOT, name(&text));
                    }
                    let free = fs.statfs(&root(), Ino::ROOT).unwrap().blocks_free;
                    assert!(free <= PAGES);
                    fs.release(&root(), open, ReleaseArgs::default()).unwrap();
                    fs.forget(entry.ino, 1);
                }
            });
        }
    });
    for i in 0..3 {
        let _ = fs.unlink(&root(), Ino::ROOT, name(&format!("f{i}")));
    }
    let end = fs.statfs(&root(), Ino::ROOT).unwrap();
    assert_eq!((end.blocks_free, end.files_free), (PAGES, 19));
}

/// A source that fails half-way, as the memory of a frontend may.
struct FailingSource(usize);

impl WriteSource for FailingSource {
    fn remaining(&self) -> usize {
        self.0
    }
    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        // Some bytes are copied before the error.
        let half = out.len() / 2;
        out[..half].fill(7);
        Err(Errno::EFAULT)
    }
    fn drain_to(&mut self, _: std::os::fd::BorrowedFd<'_>, _: u64, _: usize) -> Result<usize> {
        Err(Errno::EFAULT)
    }
}

#[test]
fn a_write_that_fails_half_way_leaves_nothing_past_the_end() {
    let fs = memory(Some(8192), None);
    let ino = file(&fs, Ino::ROOT, "a");
    write(&fs, ino, 0, b"12345").unwrap();
    for offset in [5, 4096] {
        let args = WriteArgs { offset, ..WriteArgs::default() };
        let result =
            fs.write(&root(), handle(ino), args, &mut WriteBuf::new(&mut FailingSource(100)));
        assert_eq!(result, Err(Errno::EFAULT));
    }
    fs.setattr(&root(), ino, None, &SetAttr { size: Some(200), ..SetAttr::default() }).unwrap();
    assert_eq!(read(&fs, ino, 5, 300).unwrap(), [0; 195]);
    assert_eq!(fs.statfs(&root(), ino).unwrap().blocks_free, 1);
}

#[test]
fn the_mtime_differs_before_and_after_an_observed_write() {
    let fs = memory(None, None);
    let ino = file(&fs, Ino::ROOT, "a");
    let looked = || fs.getattr(&root(), ino, None).unwrap();
    for number in 0..1000 {
        let before = looked();
        // Unobserved writes have coarse times, but never older than an observed one.
        for byte in 0..3 {
            write(&fs, ino, byte, &[number as u8]).unwrap();
        }
        let after = looked();
        assert!(after.mtime > before.mtime && after.ctime > before.ctime, "{before:?} {after:?}");
    }
    // Nor older than an earlier change of another file.
    let mut last = looked().mtime;
    for number in 0..1000 {
        let made = file(&fs, Ino::ROOT, &format!("b{number}"));
        let made = fs.getattr(&root(), made, None).unwrap().mtime;
        write(&fs, ino, 0, &[1]).unwrap();
        assert!(made >= last, "{made:?} {last:?}");
        last = looked().mtime;
        assert!(last >= made, "{last:?} {made:?}");
    }
}

/// Calls `make` with the numbers from 0 on until the space is used up. Returns the number of
/// successes.
fn fill(limit: usize, make: impl Fn(usize) -> Result<()>) -> usize {
    for number in 0..limit {
        match make(number) {
            Ok(()) => {}
            Err(Errno::ENOSPC) => return number,
            Err(errno) => panic!("{errno:?}"),
        }
    }
    panic!("there is no limit");
}

/// With `size=1M` there was room for 120 MiB of attributes, 60,000 names and as many symbolic
/// links, because only pages of files were counted.
#[test]
fn names_links_attributes_and_lists_count_against_the_limit_on_bytes() {
    const SIZE: usize = 1 << 20;
    let fs = memory(Some(SIZE as u64), Some(1 << 20));
    let used = || {
        let statfs = fs.statfs(&root(), Ino::ROOT).unwrap();
        statfs.blocks - statfs.blocks_free
    };
    let value = vec![7; 60_000];
    let flags = SetXattrFlags::default();
    let attributed = |number: usize| {
        let node = node(FileKind::Regular, 0o600);
        let ino = fs.mknod(&root(), Ino::ROOT, name(&format!("f{number}")), &node)?.ino;
        fs.setxattr(&root(), ino, xattr("user.x"), &value, flags)
    };
    let files = fill(1000, attributed);
    assert!((10..=SIZE / value.len()).contains(&files), "{files} files");
    for number in 0..=files {
        let ino = fs.lookup(&root(), Ino::ROOT, name(&format!("f{number}"))).unwrap().ino;
        // The second half is released with the inode.
        if number % 2 == 0 && number < files {
            fs.removexattr(&root(), ino, xattr("user.x")).unwrap();
        }
        fs.unlink(&root(), Ino::ROOT, name(&format!("f{number}"))).unwrap();
        fs.forget(ino, 2);
    }
    assert_eq!(used(), 0);
    let target = vec![b't'; 4000];
    let links = fill(1000, |number| {
        let node = node(FileKind::Symlink, 0o777);
        let made = fs.symlink(&root(), Ino::ROOT, name(&format!("l{number}")), &target, &node);
        made.map(|entry| fs.forget(entry.ino, 1))
    });
    assert!((100..=SIZE / target.len()).contains(&links), "{links} links");
    for number in 0..links {
        fs.unlink(&root(), Ino::ROOT, name(&format!("l{number}"))).unwrap();
    }
    assert_eq!(used(), 0);
    let kept = file(&fs, Ino::ROOT, "kept");
    let long = |number: usize| format!("{number:0246}");
    let names =
        fill(60_000, |number| fs.link(&root(), kept, Ino::ROOT, name(&long(number))).map(drop));
    assert!((1000..=SIZE / 246).contains(&names), "{names} names");
    // Files can be removed from a full file system, and renamed over each other.
    fs.unlink(&root(), Ino::ROOT, name(&long(0))).unwrap();
    rename(&fs, (Ino::ROOT, &long(1)), (Ino::ROOT, &long(0)), 0).unwrap();
    for number in (0..names).filter(|number| *number != 1) {
        fs.unlink(&root(), Ino::ROOT, name(&long(number))).unwrap();
    }
    assert_eq!(used(), 0);
}
