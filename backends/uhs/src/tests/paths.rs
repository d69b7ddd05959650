//! Whole paths, while directories on the way change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use defuse_fs::{
    Errno, FileKind, FileSystem, Ino, NormalPath, PathResolution, RenameFlags, SetAttr,
    SetXattrFlags, Shortcuts, XattrName,
};

use super::{cx, make_fresh, name, node, open};
use crate::Uhs;
use crate::commit::CommitRules;

const ACCESS: &str = "system.posix_acl_access";

/// An access ACL with an entry for a user, acl(5): version 2, then tag, permissions and id of each
/// entry.
fn make_acl() -> Vec<u8> {
    let entries: [(u16, u32); 5] =
        [(1, u32::MAX), (2, 1000), (4, u32::MAX), (0x10, u32::MAX), (0x20, u32::MAX)];
    let entry = |(tag, id): (u16, u32)| {
        [&tag.to_le_bytes()[..], &7u16.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    [vec![2, 0, 0, 0], entries.map(entry).concat()].concat()
}

fn path(text: &str) -> NormalPath<'_> {
    NormalPath::new(text.as_bytes()).unwrap()
}

/// The end of a walk by lookups of each name.
fn walk(fs: &Uhs, text: &str) -> PathResolution {
    let (mut at, mut open_to_all) = (Ino::ROOT, true);
    let mut names = text.split('/').peekable();
    while let Some(part) = names.next() {
        let dir = fs.getattr(&cx(), at, None).unwrap();
        if dir.kind != FileKind::Directory {
            return PathResolution::Walk;
        }
        let acl = fs.getxattr(&cx(), at, XattrName::new(ACCESS.as_bytes()).unwrap(), 0);
        open_to_all &= dir.perm & 0o111 == 0o111 && acl == Err(Errno::ENODATA);
        match fs.lookup(&cx(), at, name(part)) {
            Ok(entry) => {
                fs.forget(entry.ino, 1);
                at = entry.ino;
                if names.peek().is_none() {
                    return PathResolution::Inode { ino: at, attr: entry.attr, open_to_all };
                }
            }
            Err(errno) => {
                assert_eq!(errno, Errno::ENOENT);
                return PathResolution::Missing { open_to_all };
            }
        }
    }
    unreachable!("a path has a name")
}

/// Directories of two names, two deep, with a file in each, and everything that can become of a
/// directory.
#[test]
fn a_path_leads_where_a_walk_leads_whatever_became_of_its_directories() {
    let (fs, _) = open(make_fresh(), CommitRules::ALL);
    let mut random = fastrand::Rng::with_seed(5);
    let (mut found, mut changed) = (0, 0);
    for round in 0..4000 {
        let [one, other] = [(); 2].map(|()| ["a", "b"][random.usize(..2)]);
        let upper = fs.lookup(&cx(), Ino::ROOT, name(one)).map(|entry| entry.ino);
        let parent = if random.bool() { Ok(Ino::ROOT) } else { upper };
        let Ok(parent) = parent else { continue };
        let child = fs.lookup(&cx(), parent, name(other)).map(|entry| entry.ino);
        let done = match random.u32(..9) {
            0 | 1 => fs.mkdir(&cx(), parent, name(other), &node(FileKind::Directory)).map(drop),
            2 => fs.mknod(&cx(), parent, name(other), &node(FileKind::Regular)).map(drop),
            3 => fs.rmdir(&cx(), parent, name(other)),
            4 => fs.unlink(&cx(), parent, name(other)),
            5 => {
                let flags = [RenameFlags(0), RenameFlags(RenameFlags::EXCHANGE)];
                let to = (Ino::ROOT, name(["a", "b"][random.usize(..2)]));
                fs.rename(&cx(), (parent, name(other)), to, flags[random.usize(..2)])
            }
            6 => child.and_then(|ino| {
                let perm = Some([0o755, 0o750][random.usize(..2)]);
                fs.setattr(&cx(), ino, None, &SetAttr { perm, ..SetAttr::default() }).map(drop)
            }),
            7 => child.and_then(|ino| {
                let acl = XattrName::new(ACCESS.as_bytes()).unwrap();
                fs.setxattr(&cx(), ino, acl, &make_acl(), SetXattrFlags::default())
            }),
            _ => child.and_then(|ino| {
                fs.removexattr(&cx(), ino, XattrName::new(ACCESS.as_bytes()).unwrap())
            }),
        };
        changed += usize::from(done.is_ok());
        for text in ["a", "b", "a/a", "a/b", "b/a", "b/b", "a/a/a", "a/b/a", "b/a/b", "b/b/b"] {
            // Each path is resolved twice: the second answer comes from the cache that the first
            // one filled.
            for _ in 0..2 {
                let resolved = fs.resolve(&cx(), Ino::ROOT, path(text)).unwrap();
                assert_eq!(resolved, walk(&fs, text), "round {round}: {text}");
                found += usize::from(matches!(resolved, PathResolution::Inode { .. }));
            }
        }
    }
    assert!(found > 4000 && changed > 1000, "{found} paths, {changed} changes");
}

/// Ends the other threads, also after a failure.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Others resolve paths all the time, and note where they led before the change.
#[test]
fn a_change_of_a_directory_shows_in_the_next_path_of_its_thread() {
    let (fs, _) = open(make_fresh(), CommitRules::ALL);
    for dir in ["dir", "spare"] {
        fs.mkdir(&cx(), Ino::ROOT, name(dir), &node(FileKind::Directory)).unwrap();
    }
    let dir = fs.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
    fs.mknod(&cx(), dir, name("file"), &node(FileKind::Regular)).unwrap();
    let resolve = || fs.resolve(&cx(), Ino::ROOT, path("dir/file")).unwrap();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    resolve();
                }
            });
        }
        let _ended = StopOnDrop(&ends);
        for round in 0..20_000 {
            let perm = if round % 2 == 0 { 0o700 } else { 0o755 };
            let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
            fs.setattr(&cx(), dir, None, &set).unwrap();
            match resolve() {
                PathResolution::Inode { open_to_all, .. } => assert_eq!(open_to_all, perm == 0o755),
                other => panic!("{other:?}"),
            }
            let (from, to) = (name("dir"), name("spare"));
            let flags = RenameFlags(RenameFlags::EXCHANGE);
            for missing in [true, false] {
                fs.rename(&cx(), (Ino::ROOT, from), (Ino::ROOT, to), flags).unwrap();
                assert_eq!(matches!(resolve(), PathResolution::Missing { .. }), missing);
            }
        }
    });
}
