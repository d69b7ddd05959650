//! Every operation once, called through the contract, with and without file handles.

mod common;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{Passthrough, PassthroughOptions, SourceError};

#[test]
fn a_source_that_cannot_be_served_is_named_with_the_next_step() {
    let missing =
        Passthrough::new(Path::new("/nowhere/at/all"), PassthroughOptions::default()).unwrap_err();
    assert_eq!(missing, SourceError::NotFound("/nowhere/at/all".into()));
    assert!(missing.to_string().contains("/nowhere/at/all does not exist; create it"));
    let file =
        Passthrough::new(Path::new("/etc/passwd"), PassthroughOptions::default()).unwrap_err();
    assert_eq!(file, SourceError::NotADirectory("/etc/passwd".into()));
}

#[test]
fn a_file_is_created_written_read_and_removed() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        assert_eq!(entry.attr.kind, FileKind::Regular);
        assert_eq!(served.write_at(file, 0, b"hello world"), Ok(11));
        assert_eq!(served.read(file, 6, 100), Ok(b"world".to_vec()));
        assert_eq!(fs::read(served.path("a")).unwrap(), b"hello world");
        assert_eq!(served.fs.fsync(&own_context(), file, true), Ok(()));
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, Some(file.fh)).unwrap().size, 11);
        served.release(file);
        assert_eq!(served.read(file, 0, 1), Err(Errno::EBADF));

        let again = served.lookup("a").unwrap();
        assert_eq!(again.ino, entry.ino, "one inode, one number");
        assert_eq!(again.attr.st_ino, fs::metadata(served.path("a")).unwrap().ino());
        assert!(again.attr.btime.is_some());
        let file = served.open(entry.ino, OpenFlags::RDWR | OpenFlags::TRUNC).unwrap();
        assert_eq!(served.read(file, 0, 100), Ok(vec![]));
        served.release(file);
        assert_eq!(served.fs.unlink(&own_context(), Ino::ROOT, name("a")), Ok(()));
        assert_eq!(served.lookup("a").err(), Some(Errno::ENOENT));
        served.fs.forget(entry.ino, 2);
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).err(), Some(Errno::ESTALE));
        assert_eq!(served.fs.stats().inodes, 1);
    });
}

#[test]
fn a_listing_has_every_entry_once_for_any_buffer_size() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        for index in 0..2500 {
            fs::write(served.path(&format!("file-{index:04}")), b"").unwrap();
        }
        for (room, plus) in [(1, false), (7, true), (1 << 20, false), (1 << 20, true)] {
            let listed = served.list(Ino::ROOT, room, plus).unwrap();
            assert_eq!(listed.len(), 2502);
            assert_eq!((&*listed[0].name, &*listed[1].name), (".", ".."));
            for (index, item) in listed[2..].iter().enumerate() {
                assert_eq!(item.name, format!("file-{index:04}"));
                assert_eq!(item.kind, FileKind::Regular);
                assert_eq!(item.entry.is_some(), plus);
                if let Some(entry) = item.entry {
                    assert_eq!(entry.attr.st_ino, item.ino);
                    served.fs.forget(entry.ino, 1);
                }
            }
        }
        assert_eq!(served.fs.stats().inodes, 1);
    });
}

#[test]
fn nodes_of_every_type_are_created() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        let cx = own_context();
        for (text, kind) in [
            ("reg", FileKind::Regular),
            ("fifo", FileKind::Fifo),
            ("sock", FileKind::Socket),
            ("chr", FileKind::CharDevice),
            ("blk", FileKind::BlockDevice),
        ] {
            let rdev = rustix::fs::makedev(1, 3);
            let node = NewNode { rdev, ..NewNode::new(kind, 0o640, cx.caller) };
            let entry = served.fs.mknod(&cx, Ino::ROOT, name(text), &node).unwrap();
            assert_eq!((entry.attr.kind, entry.attr.perm), (kind, 0o640), "{text}");
            let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
            assert_eq!(entry.attr.rdev, if device { rdev } else { 0 });
            let again = served.fs.mknod(&cx, Ino::ROOT, name(text), &node);
            assert_eq!(again.err(), Some(Errno::EEXIST));
            if kind != FileKind::Regular {
                assert_eq!(served.open(entry.ino, 0).err(), Some(Errno::ENXIO));
            }
        }
        assert!(fs::metadata(served.path("fifo")).unwrap().file_type().is_fifo());
        let dir = served.mkdir(Ino::ROOT, "dir");
        assert_eq!(dir.attr.kind, FileKind::Directory);
        let link = NewNode::new(FileKind::Symlink, 0o777, cx.caller);
        let link = served.fs.symlink(&cx, dir.ino, name("link"), b"../reg", &link).unwrap();
        assert_eq!(served.fs.readlink(&cx, link.ino), Ok(b"../reg".to_vec()));
        assert_eq!(served.fs.readlink(&cx, dir.ino), Err(Errno::EINVAL));
        assert_eq!(served.open(link.ino, 0).err(), Some(Errno::ELOOP), "never followed");
        assert_eq!(served.fs.lookup_parent(&cx, dir.ino).unwrap().ino, Ino::ROOT);
        assert_eq!(served.fs.lookup_parent(&cx, Ino::ROOT).unwrap().ino, Ino::ROOT);
        assert_eq!(served.fs.lookup(&cx, link.ino, name("x")).err(), Some(Errno::ENOTDIR));
    });
}

#[test]
fn names_are_renamed_and_linked() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let cx = own_context();
        let (a, file) = served.create("a");
        served.write_at(file, 0, b"a").unwrap();
        served.release(file);
        let linked = served.fs.link(&cx, a.ino, Ino::ROOT, name("b")).unwrap();
        assert_eq!((linked.ino, linked.attr.nlink), (a.ino, 2));
        let dir = served.mkdir(Ino::ROOT, "d");
        let (ino, rename) =
            (Ino::ROOT, |from, to, flags| served.fs.rename(&cx, from, to, RenameFlags(flags)));
        assert_eq!(rename((ino, name("b")), (dir.ino, name("c")), 0), Ok(()));
        let taken = rename((ino, name("a")), (dir.ino, name("c")), RenameFlags::NOREPLACE);
        assert_eq!(taken, Err(Errno::EEXIST));
        let (other, file) = served.create("e");
        served.release(file);
        let exchanged = rename((ino, name("e")), (dir.ino, name("c")), RenameFlags::EXCHANGE);
        assert_eq!(exchanged, Ok(()));
        assert_eq!(served.lookup("e").unwrap().ino, a.ino);
        assert_eq!(served.fs.lookup(&cx, dir.ino, name("c")).unwrap().ino, other.ino);
        assert_eq!(rename((ino, name("d")), (dir.ino, name("d")), 0), Err(Errno::EINVAL));
        assert_eq!(served.fs.rmdir(&cx, ino, name("d")), Err(Errno::ENOTEMPTY));
        assert_eq!(served.fs.unlink(&cx, ino, name("d")), Err(Errno::EISDIR));
        assert_eq!(served.fs.rmdir(&cx, ino, name("a")), Err(Errno::ENOTDIR));
        assert_eq!(served.fs.unlink(&cx, dir.ino, name("c")), Ok(()));
        assert_eq!(served.fs.rmdir(&cx, ino, name("d")), Ok(()));
        assert_eq!(served.fs.link(&cx, Ino::ROOT, ino, name("r")).err(), Some(Errno::EPERM));
        assert_eq!(served.fs.getattr(&cx, dir.ino, None).unwrap().nlink, 0, "pinned");
    });
}

#[test]
fn setattr_changes_the_given_attributes() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        let when = Timestamp { secs: 1_000_000, nanos: 5 };
        let set = SetAttr {
            perm: Some(0o4751),
            size: Some(5000),
            atime: Some(SetTime::At(when)),
            mtime: Some(SetTime::At(Timestamp { secs: -3, nanos: 7 })),
            ..SetAttr::default()
        };
        for fh in [Some(file.fh), None] {
            let attr = served.fs.setattr(&own_context(), entry.ino, fh, &set).unwrap();
            assert_eq!((attr.perm, attr.size, attr.atime), (0o4751, 5000, when));
            assert_eq!(attr.mtime, Timestamp { secs: -3, nanos: 7 });
        }
        let now = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
        let attr = served.fs.setattr(&own_context(), entry.ino, None, &now).unwrap();
        assert_eq!(attr.atime, when);
        assert!(attr.mtime > when);
        let size = SetAttr { size: Some(1), ..SetAttr::default() };
        assert_eq!(
            served.fs.setattr(&own_context(), Ino::ROOT, None, &size).err(),
            Some(Errno::EISDIR)
        );
        assert!(served.fs.statfs(&own_context(), entry.ino).unwrap().blocks > 0);
        assert_eq!(served.fs.syncfs(&own_context()), Ok(()));
    });
}

#[test]
fn extended_attributes_are_those_of_the_lower_file() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, _) = served.create("a");
        if let Err(Errno::EOPNOTSUPP) = served.set_xattr(entry.ino, "user.one", b"1") {
            eprintln!("not here: no user attributes here");
            return;
        }
        assert_eq!(served.xattr(entry.ino, "user.one"), Ok(b"1".to_vec()));
        assert_eq!(served.xattr(entry.ino, "user.two"), Err(Errno::ENODATA));
        let one = XattrName::new(b"user.one").unwrap();
        assert_eq!(served.fs.getxattr(&own_context(), entry.ino, one, 0), Ok(Xattr::Size(1)));
        let create = SetXattrFlags { create: true, ..SetXattrFlags::default() };
        let taken = served.fs.setxattr(&own_context(), entry.ino, one, b"x", create);
        assert_eq!(taken, Err(Errno::EEXIST));
        served.set_xattr(entry.ino, "user.long", &[7; 600]).unwrap();
        assert_eq!(served.xattr(entry.ino, "user.long"), Ok(vec![7; 600]));
        let long = XattrName::new(b"user.long").unwrap();
        assert_eq!(served.fs.getxattr(&own_context(), entry.ino, long, 10), Err(Errno::ERANGE));
        if is_root() {
            served.set_xattr(entry.ino, "trusted.t", b"t").unwrap();
            let Ok(Xattr::Value(names)) = served.fs.listxattr(&cx(1000, 1000), entry.ino, 4096)
            else {
                panic!("no names");
            };
            assert_eq!(names.len(), b"user.one\0user.long\0".len());
        }
        assert_eq!(served.fs.removexattr(&own_context(), entry.ino, one), Ok(()));
        assert_eq!(served.xattr(entry.ino, "user.one"), Err(Errno::ENODATA));
    });
}

#[test]
fn fallocate_lseek_and_copy_file_range_reach_the_lower_file() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let ((_, a), (_, b)) = (served.create("a"), served.create("b"));
        let range = Fallocate { mode: 0, offset: 0, length: 1 << 20 };
        assert_eq!(served.fs.fallocate(&own_context(), a, range), Ok(()));
        served.write_at(a, 0, &[1; 1 << 20]).unwrap();
        let mode = Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE;
        let hole = Fallocate { mode, offset: 65536, length: 65536 };
        assert_eq!(served.fs.fallocate(&own_context(), a, hole), Ok(()));
        assert_eq!(served.fs.lseek(&own_context(), a, 0, Whence::Hole), Ok(65536));
        assert_eq!(served.fs.lseek(&own_context(), a, 65536, Whence::Data), Ok(131072));
        assert_eq!(served.fs.lseek(&own_context(), a, 1 << 21, Whence::Data), Err(Errno::ENXIO));
        assert_eq!(served.fs.lseek(&own_context(), a, u64::MAX, Whence::Data), Err(Errno::ENXIO));
        let copy = CopyRange { src: a, src_offset: 0, dst: b, dst_offset: 3, length: 10, flags: 0 };
        assert_eq!(served.fs.copy_file_range(&own_context(), &copy), Ok(10));
        assert_eq!(served.read(b, 0, 100).unwrap().len(), 13);
    });
}

#[test]
fn appends_go_to_the_end_except_for_writes_from_a_cache() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        served.write_at(file, 0, b"0123456789").unwrap();
        let append = OpenFlags(OpenFlags::WRONLY | OpenFlags::APPEND);
        let opened = served.open(entry.ino, append.0).unwrap();
        let args = WriteArgs { flags: append, ..WriteArgs::default() };
        assert_eq!(served.write(opened, args, b"end"), Ok(3));
        let cached = WriteArgs { offset: 2, from_cache: true, ..WriteArgs::default() };
        assert_eq!(served.write(opened, cached, b"xx"), Ok(2));
        assert_eq!(served.read(file, 0, 99), Ok(b"01xx456789end".to_vec()));
        // fcntl(2) has set O_APPEND for the other descriptor.
        assert_eq!(served.write(file, args, b"!"), Ok(1));
        assert_eq!(served.read(file, 0, 99), Ok(b"01xx456789end!".to_vec()));
    });
    let options = PassthroughOptions { writeback: true, ..PassthroughOptions::default() };
    run_everywhere(&options, |served| {
        let (entry, file) = served.create("a");
        served.write_at(file, 0, b"0123").unwrap();
        let opened = served.open(entry.ino, OpenFlags::WRONLY | OpenFlags::APPEND).unwrap();
        assert_eq!(served.read(opened, 0, 9), Ok(b"0123".to_vec()), "read for the cache");
        let args = WriteArgs { flags: OpenFlags(OpenFlags::APPEND), ..WriteArgs::default() };
        served.write(opened, args, b"x").unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"x123".to_vec()));
    });
}

#[test]
fn an_unnamed_file_can_be_linked() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let cx = own_context();
        let args = flags(OpenFlags::RDWR);
        let made = served.fs.tmpfile(&cx, Ino::ROOT, &regular(&cx, 0o600), args);
        let (entry, opened) = made.unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        served.write_at(file, 0, b"tmp").unwrap();
        served.release(file);
        assert_eq!(served.fs.getattr(&cx, entry.ino, None).unwrap().size, 3);
        let linked = served.fs.link(&cx, entry.ino, Ino::ROOT, name("t")).unwrap();
        assert_eq!(linked.ino, entry.ino);
        assert_eq!(fs::read(served.path("t")).unwrap(), b"tmp");
    });
}

/// CREATE once opened an existing file with the rights of the daemon, although the frontend checks
/// no permission of the file for a create.
#[test]
fn create_does_not_open_an_existing_file() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let cx = own_context();
        fs::write(served.path("a"), b"kept").unwrap();
        std::os::unix::fs::symlink("a", served.path("l")).unwrap();
        let node = NewNode::new(FileKind::Fifo, 0o600, cx.caller);
        served.fs.mknod(&cx, Ino::ROOT, name("f"), &node).unwrap();
        let before = served.fs.stats();
        for text in ["a", "l", "f"] {
            for bits in [0, OpenFlags::EXCL, OpenFlags::TRUNC] {
                let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | bits);
                let made = served.fs.create(&cx, Ino::ROOT, name(text), &regular(&cx, 0o644), args);
                assert_eq!(made.err(), Some(Errno::EEXIST));
            }
        }
        assert_eq!(fs::read(served.path("a")).unwrap(), b"kept");
        assert_eq!(served.fs.stats().open_files, before.open_files);
    });
}

#[test]
fn inode_flags_and_blocks_can_be_asked_for() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        let get = IoctlArgs {
            cmd: 0x8008_6601,
            arg: 0,
            input: &[],
            output_len: 8,
            dir: false,
            compat32: false,
        };
        match served.fs.ioctl(&own_context(), file, &get) {
            Ok(reply) => assert_eq!(reply.output.len(), 4),
            Err(errno) => assert_eq!(errno, Errno::ENOTTY),
        }
        let foreign = IoctlArgs { cmd: 0x5401, ..get };
        assert_eq!(served.fs.ioctl(&own_context(), file, &foreign), Err(Errno::ENOTTY));
        served.write_at(file, 0, &[1; 8192]).unwrap();
        served.fs.fsync(&own_context(), file, false).unwrap();
        match served.fs.bmap(&own_context(), entry.ino, 512, 9) {
            Ok(block) => assert!(block > 0),
            Err(errno) => eprintln!("no block numbers here: {errno}"),
        }
    });
}

/// A new file was known to have no capability, and that answer came before the ENOSYS that the
/// kernel remembers, so the kernel queried it again at every write.
#[test]
fn with_the_options_of_stackfs_there_are_no_xattrs_and_every_close_is_flushed() {
    run_everywhere(&PassthroughOptions::stackfs(), |served| {
        let cx = own_context();
        let args = flags(OpenFlags::RDWR | OpenFlags::CREAT);
        let made = served.fs.create(&cx, Ino::ROOT, name("a"), &regular(&cx, 0o644), args);
        let (entry, opened) = made.unwrap();
        assert!(!opened.no_flush && opened.backing.is_none());
        for attribute in [&b"security.capability"[..], b"trusted.x", b"user.x"] {
            let attribute = XattrName::new(attribute).unwrap();
            let got = served.fs.getxattr(&cx, entry.ino, attribute, 64);
            assert_eq!(got.err(), Some(Errno::ENOSYS));
        }
        served.release(File { ino: entry.ino, fh: opened.fh });
    });
}

/// A descriptor was opened for every file that might lose its last name, and was kept where the
/// removal failed or another name was left: `cp -al a b; rm -r a` of many files failed with
/// `EMFILE` for all users.
#[test]
fn only_inodes_without_a_name_keep_a_descriptor() {
    let root = std::env::temp_dir();
    let served = ServedDirectory::new(&root, PassthroughOptions::default());
    if !served.fs.uses_file_handles() {
        return println!("not here: no file handles here");
    }
    let pinned = || served.fs.stats().pinned_fds;
    let only_the_root = pinned();
    let cx = own_context();
    // Directories that cannot be removed.
    let dir = served.mkdir(Ino::ROOT, "dir");
    served.mkdir(dir.ino, "below");
    assert_eq!(served.fs.rmdir(&cx, Ino::ROOT, name("dir")), Err(Errno::ENOTEMPTY));
    assert_eq!(pinned(), only_the_root);
    // One of two names, removed and replaced.
    for text in ["a", "b", "c"] {
        let (entry, file) = served.create(text);
        served.release(file);
        served.fs.link(&cx, entry.ino, Ino::ROOT, name(&format!("{text}2"))).unwrap();
    }
    served.fs.unlink(&cx, Ino::ROOT, name("a")).unwrap();
    let (from, to) = ((Ino::ROOT, name("b")), (Ino::ROOT, name("c")));
    served.fs.rename(&cx, from, to, RenameFlags(0)).unwrap();
    assert_eq!(pinned(), only_the_root);
    // The last name.
    let a = served.lookup("a2").unwrap();
    served.fs.unlink(&cx, Ino::ROOT, name("a2")).unwrap();
    assert_eq!(pinned(), only_the_root + 1);
    assert_eq!(served.fs.getattr(&cx, a.ino, None).unwrap().nlink, 0);
    served.fs.forget(a.ino, 3);
    assert_eq!(pinned(), only_the_root);
    // A first name.
    let made = served.fs.tmpfile(&cx, Ino::ROOT, &regular(&cx, 0o600), flags(OpenFlags::RDWR));
    let (entry, opened) = made.unwrap();
    served.release(File { ino: entry.ino, fh: opened.fh });
    assert_eq!(pinned(), only_the_root + 1);
    served.fs.link(&cx, entry.ino, Ino::ROOT, name("named")).unwrap();
    assert_eq!(pinned(), only_the_root);
    assert_eq!(served.fs.getattr(&cx, entry.ino, None).unwrap().nlink, 1);
}

/// Two threads remove the two names of a file: neither may release the pin that the other one
/// needs.
#[test]
fn removing_both_names_of_a_file_at_once_leaves_its_pin() {
    let served = ServedDirectory::new(&std::env::temp_dir(), PassthroughOptions::default());
    for round in 0..200 {
        let (one, other) = (format!("one{round}"), format!("other{round}"));
        let (entry, file) = served.create(&one);
        served.release(file);
        served.fs.link(&own_context(), entry.ino, Ino::ROOT, name(&other)).unwrap();
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for text in [&one, &other] {
                scope.spawn(|| {
                    start.wait();
                    served.fs.unlink(&own_context(), Ino::ROOT, name(text)).unwrap();
                });
            }
        });
        let attr = served.fs.getattr(&own_context(), entry.ino, None);
        assert_eq!(attr.map(|attr| attr.nlink), Ok(0), "round {round}");
        served.fs.forget(entry.ino, 2);
    }
    assert_eq!(served.fs.stats().inodes, 1);
}
