//! Files that are opened together with their lookup, in an application that gets their descriptors.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use defuse_fs::native::NativeOpener;
use defuse_fs::source::CallingThreads;
use defuse_fs::*;
use defuse_passthrough::{CredentialsPolicy, FileHandles, PassthroughOptions};
use rustix::fs::{
    CWD, FlockOperation, Mode, RenameFlags as LowerFlags, flock, mkfifoat, renameat_with,
};
use rustix::io::{Errno as Io, FdFlags};

const NOW: FlockOperation = FlockOperation::NonBlockingLockExclusive;

/// The right of the program to native files.
fn opener() -> NativeOpener {
    CallingThreads::Callers.native_opener().unwrap()
}

/// The source in the process of a program.
fn options() -> PassthroughOptions {
    PassthroughOptions {
        credentials: CredentialsPolicy::Callers(opener()),
        backing_files: true,
        descriptors_from: 500,
        entry_valid_for: Duration::ZERO,
        attr_valid_for: Duration::ZERO,
        ..PassthroughOptions::default()
    }
}

/// Runs `test` in every base where files are opened by their names: without file handles, and where
/// a birth time is enough to know an inode.
fn run_by_name(test: impl Fn(&ServedDirectory)) {
    const OVERLAY: i64 = 0x794c_7630;
    for base in bases() {
        test(&ServedDirectory::new(
            &base,
            PassthroughOptions { file_handles: FileHandles::Off, ..options() },
        ));
        if rustix::fs::statfs(&base).unwrap().f_type != OVERLAY {
            test(&ServedDirectory::new(&base, options()));
        }
    }
}

/// Runs `test` on tmpfs with file handles, if this process may use them.
fn run_by_open_file(test: impl Fn(&ServedDirectory)) {
    let served = ServedDirectory::new("/dev/shm".as_ref(), options());
    if served.fs.uses_file_handles() {
        test(&served);
    } else {
        eprintln!("skipped: only root has file handles");
    }
}

/// Releases a file whose inode is forgotten next.
fn release_last(served: &ServedDirectory, file: File) {
    let last = Some(opener().file(None).last_release());
    let args = ReleaseArgs { last, ..ReleaseArgs::default() };
    served.fs.release(&own_context(), file, args).unwrap();
    served.fs.forget(file.ino, 1);
}

fn look_up(served: &ServedDirectory, text: &str, bits: u32) -> Result<(Entry, Option<File>)> {
    let (entry, opened) =
        served.fs.lookup_to_open(&own_context(), Ino::ROOT, name(text), flags(bits))?;
    Ok((entry, opened.map(|opened| File { ino: entry.ino, fh: opened.fh })))
}

#[test]
fn a_file_that_is_read_is_opened_by_its_name_and_outlives_it() {
    run_by_name(|served| {
        fs::write(served.path("a"), "kept").unwrap();
        fs::hard_link(served.path("a"), served.path("b")).unwrap();
        let pinned = served.fs.stats().pinned_fds;
        let (entry, file) = look_up(served, "a", 0).unwrap();
        let file = file.unwrap();
        assert_eq!((entry.attr.size, entry.attr.nlink), (4, 2));
        assert_eq!(served.read(file, 0, 9), Ok(b"kept".to_vec()));
        // It is one inode by all its names, and stays when it has lost them.
        assert_eq!(served.lookup("b").unwrap().ino, entry.ino);
        served.fs.unlink(&own_context(), Ino::ROOT, name("a")).unwrap();
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().nlink, 1);
        served.fs.unlink(&own_context(), Ino::ROOT, name("b")).unwrap();
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().nlink, 0);
        let again = served.open(entry.ino, OpenFlags::RDWR).unwrap();
        served.write_at(again, 0, b"more").unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"more".to_vec()));
        served.release(again);
        served.release(file);
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().size, 4);
        served.fs.forget(entry.ino, 2);
        assert_eq!(served.fs.stats().pinned_fds, pinned);
    });
}

/// Opens `text` as open(2) with `O_CREAT` and these flags, and returns the outcome.
fn open_or_create(served: &ServedDirectory, text: &str, bits: u32) -> Result<OpenOutcome> {
    let node = NewNode::new(FileKind::Regular, 0o600, own_context().caller);
    let args = flags(OpenFlags::CREAT | bits);
    shortcuts_of(&served.fs).open_or_create(&own_context(), Ino::ROOT, name(text), &node, args)
}

#[test]
fn a_file_is_opened_by_its_name_for_writing_and_with_o_creat() {
    run_by_name(|served| {
        fs::write(served.path("file"), "bytes").unwrap();
        fs::write(served.path("set-id"), "x").unwrap();
        let set_id = Mode::from_raw_mode(0o4700);
        rustix::fs::chmod(served.path("set-id"), set_id).unwrap();
        for bits in [OpenFlags::WRONLY, OpenFlags::RDWR] {
            let (_, file) = look_up(served, "file", bits).unwrap();
            release_last(served, file.unwrap());
            // The file system clears set-user-id at the first write: the program does not write
            // past it.
            let args = flags(bits);
            let found =
                served.fs.lookup_to_open(&own_context(), Ino::ROOT, name("set-id"), args).unwrap();
            let opened = found.1.unwrap();
            assert!(opened.native().is_none());
            release_last(served, File { ino: found.0.ino, fh: opened.fh });
        }
        match open_or_create(served, "file", OpenFlags::WRONLY | OpenFlags::TRUNC).unwrap() {
            OpenOutcome::Opened(entry, opened) => {
                assert_eq!(entry.attr.size, 0);
                release_last(served, File { ino: entry.ino, fh: opened.fh });
            }
            other => panic!("{other:?}"),
        }
        match open_or_create(served, "new", OpenFlags::WRONLY).unwrap() {
            OpenOutcome::Created(entry, opened) => {
                release_last(served, File { ino: entry.ino, fh: opened.fh });
            }
            other => panic!("{other:?}"),
        }
        fs::create_dir(served.path("dir")).unwrap();
        symlink("file", served.path("link")).unwrap();
        mkfifoat(CWD, served.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        for text in ["dir", "link", "fifo"] {
            let found = open_or_create(served, text, OpenFlags::WRONLY).unwrap();
            assert!(matches!(found, OpenOutcome::Found(PathResolution::Walk)), "{found:?}");
        }
    });
}

#[test]
fn everything_else_is_looked_up_alone() {
    run_by_name(|served| {
        fs::write(served.path("file"), "x").unwrap();
        fs::create_dir(served.path("dir")).unwrap();
        symlink("file", served.path("link")).unwrap();
        mkfifoat(CWD, served.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        for (text, bits) in [
            // It would change the file before the frontend has decided.
            ("file", OpenFlags::WRONLY | OpenFlags::TRUNC),
            ("dir", 0),
            ("link", 0),
            // It would wait for a writer.
            ("fifo", 0),
        ] {
            let (entry, file) = look_up(served, text, bits).unwrap();
            assert_eq!(file, None, "{text} {bits:o}");
            served.fs.forget(entry.ino, 1);
        }
        assert_eq!(look_up(served, "none", 0).unwrap_err(), Errno::ENOENT);
    });
    // A daemon would wait for a fifo, or open a device, that takes the name.
    run_everywhere(
        &PassthroughOptions { credentials: CredentialsPolicy::Sticky, ..options() },
        |served| {
            fs::write(served.path("file"), "x").unwrap();
            assert_eq!(look_up(served, "file", 0).unwrap().1, None);
        },
    );
    // Names that are kept keep inodes, for which an open by a file handle takes fewer system calls.
    let kept = PassthroughOptions { entry_valid_for: Duration::from_secs(1), ..options() };
    run_everywhere(&kept, |served| {
        fs::write(served.path("file"), "x").unwrap();
        let file = look_up(served, "file", 0).unwrap().1;
        assert_eq!(file.is_none(), served.fs.uses_file_handles());
    });
}

/// An open file is the only way to its inode until another operation needs the inode.
#[test]
fn an_inode_has_no_more_descriptors_than_its_open_file() {
    run_by_open_file(|served| {
        fs::write(served.path("a"), "x").unwrap();
        let before = (served.fs.stats().pinned_fds, descriptors(served));
        let (_, file) = look_up(served, "a", 0).unwrap();
        assert_eq!(descriptors(served), before.1 + 1, "ours; nobody took the program's");
        release_last(served, file.unwrap());
        assert_eq!((served.fs.stats().pinned_fds, descriptors(served)), before);
        let node = NewNode::new(FileKind::Regular, 0o600, own_context().caller);
        let args = flags(OpenFlags::WRONLY);
        let made = served.fs.create(&own_context(), Ino::ROOT, name("new"), &node, args).unwrap();
        let (entry, opened) = made;
        let file = File { ino: entry.ino, fh: opened.fh };
        drop(opened);
        // Another lookup finds it while it is open, and the open file ends before that.
        assert_eq!(served.lookup("new").unwrap().ino, entry.ino);
        served.fs.forget(entry.ino, 1);
        served.write_at(file, 0, b"12345").unwrap();
        served.release(file);
        assert_eq!(descriptors(served), before.1 + 1, "its own");
        fs::rename(served.path("new"), served.path("moved")).unwrap();
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().size, 5);
        assert_eq!(served.lookup("moved").unwrap().ino, entry.ino);
        served.fs.forget(entry.ino, 2);
        assert_eq!((served.fs.stats().pinned_fds, descriptors(served)), before);
    });
}

/// Number of descriptors of this process that are regular files of this source.
fn descriptors(served: &ServedDirectory) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap();
    let all = all.filter_map(|entry| Some(entry.ok()?.path()));
    let is_ours = |link: &std::path::PathBuf| {
        fs::read_link(link).is_ok_and(|path| path.starts_with(served.path(".")))
            && fs::metadata(link).is_ok_and(|file| file.is_file())
    };
    all.filter(is_ours).count()
}

#[test]
fn a_lock_ends_with_an_open_file_whose_inode_stays() {
    run_by_name(|served| {
        fs::write(served.path("a"), "x").unwrap();
        for is_removed in [false, true] {
            let (entry, opened) =
                served.fs.lookup_to_open(&own_context(), Ino::ROOT, name("a"), flags(0)).unwrap();
            let (opened, other) = (opened.unwrap(), fs::File::open(served.path("a")).unwrap());
            assert_eq!(flock(&opened.backing.as_ref().unwrap().fd, NOW), Ok(()));
            if is_removed {
                served.fs.unlink(&own_context(), Ino::ROOT, name("a")).unwrap();
            }
            let file = File { ino: entry.ino, fh: opened.fh };
            drop(opened);
            assert_eq!(flock(&other, NOW), Err(Io::WOULDBLOCK));
            served.release(file);
            assert_eq!(flock(&other, NOW), Ok(()));
            let nlink = u32::from(!is_removed);
            assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().nlink, nlink);
            served.fs.forget(entry.ino, 1);
        }
    });
}

/// Threads that look a file up, while others open and close it, keep its inode.
#[test]
fn an_inode_that_is_found_while_its_open_file_ends_stays() {
    run_by_open_file(|served| {
        fs::write(served.path("a"), "x").unwrap();
        let before = served.fs.stats();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let (_, file) = look_up(served, "a", 0).unwrap();
                        release_last(served, file.unwrap());
                    }
                });
            }
            for _ in 0..5000 {
                let entry = served.lookup("a").unwrap();
                assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().size, 1);
                served.fs.forget(entry.ino, 1);
            }
        });
        let after = served.fs.stats();
        assert_eq!((after.inodes, after.pinned_fds), (before.inodes, before.pinned_fds));
    });
}

#[test]
fn the_programs_descriptor_closes_at_exec_as_it_was_told() {
    run_by_name(|served| {
        fs::write(served.path("a"), "x").unwrap();
        let node = NewNode::new(FileKind::Regular, 0o600, own_context().caller);
        for (made, bits) in [("b", 0), ("c", OpenFlags::CLOEXEC)] {
            let (entry, by_name) = served
                .fs
                .lookup_to_open(&own_context(), Ino::ROOT, name("a"), flags(bits))
                .unwrap();
            let (_, created) = served
                .fs
                .create(&own_context(), Ino::ROOT, name(made), &node, flags(bits | OpenFlags::RDWR))
                .unwrap();
            let opened =
                served.fs.open(&own_context(), entry.ino, flags(bits | OpenFlags::RDWR)).unwrap();
            for opened in [by_name.unwrap(), created, opened] {
                let backing = opened.backing.unwrap();
                let closes = |fd: &std::os::fd::OwnedFd| {
                    rustix::io::fcntl_getfd(fd).unwrap() == FdFlags::CLOEXEC
                };
                assert_eq!(closes(&backing.native.unwrap().take_descriptor().unwrap()), bits != 0);
                assert!(closes(&backing.fd));
            }
        }
    });
}

/// An inode that kept the descriptor by which it was found would keep the lock.
#[test]
fn a_lock_ends_with_its_open_file_while_another_one_is_open() {
    run_by_name(|served| {
        fs::write(served.path("a"), "x").unwrap();
        let open =
            || served.fs.lookup_to_open(&own_context(), Ino::ROOT, name("a"), flags(0)).unwrap();
        let ((entry, one), (_, other)) = (open(), open());
        let (one, other) = (one.unwrap(), other.unwrap());
        let (one_fh, other_fh) = (one.fh, other.fh);
        let lock = |opened: &OpenReply| flock(&opened.backing.as_ref().unwrap().fd, NOW);
        assert_eq!((lock(&one), lock(&other)), (Ok(()), Err(Io::WOULDBLOCK)));
        served.release(File { ino: entry.ino, fh: one_fh });
        drop(one);
        assert_eq!(lock(&other), Ok(()));
        served.release(File { ino: entry.ino, fh: other_fh });
        served.fs.forget(entry.ino, 2);
    });
}

/// The name may lead to another file between the system calls.
#[test]
fn the_open_file_is_the_one_that_was_looked_up() {
    run_by_name(|served| {
        let (one, two) = (served.path("one"), served.path("two"));
        fs::write(&one, "1").unwrap();
        fs::write(&two, "22").unwrap();
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    renameat_with(CWD, &one, CWD, &two, LowerFlags::EXCHANGE).unwrap();
                }
            });
            let mut opened = 0;
            for _ in 0..5000 {
                let (entry, file) = look_up(served, "one", 0).unwrap();
                let file = file.inspect(|_| opened += 1);
                let file = file.or_else(|| served.open(entry.ino, 0).ok());
                if let Some(file) = file {
                    let read = served.read(file, 0, 9).unwrap();
                    assert_eq!(read.len() as u64, entry.attr.size);
                    served.release(file);
                }
                served.fs.forget(entry.ino, 1);
            }
            ends.store(true, Ordering::Relaxed);
            assert!(opened > 0, "no file was opened by its name");
        });
    });
}

/// A new file may have the inode number of the file that the name led to before the open.
#[test]
fn what_is_told_of_an_open_file_is_told_of_the_one_that_is_open() {
    run_by_name(|served| {
        let path = served.path("a");
        fs::write(&path, "1").unwrap();
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0.. {
                    if ends.load(Ordering::Relaxed) {
                        return;
                    }
                    let _ = fs::remove_file(&path);
                    let _ = fs::write(&path, ["1", "22", "333"][round % 3]);
                }
            });
            for _ in 0..5000 {
                let Ok((entry, file)) = look_up(served, "a", 0) else { continue };
                if let Some(file) = file {
                    let now = served.fs.getattr(&own_context(), entry.ino, Some(file.fh)).unwrap();
                    assert_eq!((now.btime, now.st_ino), (entry.attr.btime, entry.attr.st_ino));
                    served.release(file);
                }
                served.fs.forget(entry.ino, 1);
            }
            ends.store(true, Ordering::Relaxed);
        });
    });
}
