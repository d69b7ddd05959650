//! Files that are opened together with their lookup, in an application that gets their descriptors.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{Credentials, FileHandles, Options};
use rustix::fs::{
    CWD, FlockOperation, Mode, RenameFlags as LowerFlags, flock, mkfifoat, renameat_with,
};
use rustix::io::Errno as Io;

const NOW: FlockOperation = FlockOperation::NonBlockingLockExclusive;

/// The source in the process of a program.
fn options() -> Options {
    Options {
        credentials: Credentials::Callers,
        backing_files: true,
        descriptors_from: 500,
        entry_valid_for: Duration::ZERO,
        attr_valid_for: Duration::ZERO,
        ..Options::default()
    }
}

/// Runs `test` in every base where files are opened by their names: without file handles.
fn by_name(test: impl Fn(&Served)) {
    for base in bases() {
        test(&Served::new(&base, Options { file_handles: FileHandles::Off, ..options() }));
    }
}

fn look_up(served: &Served, text: &str, bits: u32) -> Result<(Entry, Option<File>)> {
    let (entry, opened) = served.fs.lookup_to_open(&me(), Ino::ROOT, name(text), flags(bits))?;
    Ok((entry, opened.map(|opened| File { ino: entry.ino, fh: opened.fh })))
}

#[test]
fn a_file_that_is_read_is_opened_by_its_name_and_outlives_it() {
    by_name(|served| {
        fs::write(served.path("a"), "kept").unwrap();
        fs::hard_link(served.path("a"), served.path("b")).unwrap();
        let pinned = served.fs.stats().pinned_fds;
        let (entry, file) = look_up(served, "a", 0).unwrap();
        let file = file.unwrap();
        assert_eq!((entry.attr.size, entry.attr.nlink), (4, 2));
        assert_eq!(served.read(file, 0, 9), Ok(b"kept".to_vec()));
        // It is one inode by all its names, and stays when it has lost them.
        assert_eq!(served.lookup("b").unwrap().ino, entry.ino);
        served.fs.unlink(&me(), Ino::ROOT, name("a")).unwrap();
        assert_eq!(served.fs.getattr(&me(), entry.ino, None).unwrap().nlink, 1);
        served.fs.unlink(&me(), Ino::ROOT, name("b")).unwrap();
        assert_eq!(served.fs.getattr(&me(), entry.ino, None).unwrap().nlink, 0);
        let again = served.open(entry.ino, OpenFlags::RDWR).unwrap();
        served.write_at(again, 0, b"more").unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"more".to_vec()));
        served.release(again);
        served.release(file);
        assert_eq!(served.fs.getattr(&me(), entry.ino, None).unwrap().size, 4);
        served.fs.forget(entry.ino, 2);
        assert_eq!(served.fs.stats().pinned_fds, pinned);
    });
}

#[test]
fn everything_else_is_looked_up_alone() {
    by_name(|served| {
        fs::write(served.path("file"), "x").unwrap();
        fs::create_dir(served.path("dir")).unwrap();
        symlink("file", served.path("link")).unwrap();
        mkfifoat(CWD, served.path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        for (text, bits) in [
            ("file", OpenFlags::RDWR),
            ("file", OpenFlags::WRONLY),
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
    everywhere(&Options { credentials: Credentials::Sticky, ..options() }, |served| {
        fs::write(served.path("file"), "x").unwrap();
        assert_eq!(look_up(served, "file", 0).unwrap().1, None);
    });
    // An open by a file handle takes fewer system calls.
    everywhere(&options(), |served| {
        fs::write(served.path("file"), "x").unwrap();
        let file = look_up(served, "file", 0).unwrap().1;
        assert_eq!(file.is_none(), served.fs.uses_file_handles());
    });
}

/// An inode that kept the descriptor by which it was found would keep the lock.
#[test]
fn a_lock_ends_with_its_open_file_while_another_one_is_open() {
    by_name(|served| {
        fs::write(served.path("a"), "x").unwrap();
        let open = || served.fs.lookup_to_open(&me(), Ino::ROOT, name("a"), flags(0)).unwrap();
        let ((entry, one), (_, other)) = (open(), open());
        let (one, other) = (one.unwrap(), other.unwrap());
        let (one_fh, other_fh) = (one.fh, other.fh);
        let lock = |opened: &Opened| flock(&opened.backing.as_ref().unwrap().fd, NOW);
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
    by_name(|served| {
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

/// A new file may have the inode number of the one that the name led to before the open.
#[test]
fn what_is_told_of_an_open_file_is_told_of_the_one_that_is_open() {
    by_name(|served| {
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
                    let now = served.fs.getattr(&me(), entry.ino, Some(file.fh)).unwrap();
                    assert_eq!((now.btime, now.st_ino), (entry.attr.btime, entry.attr.st_ino));
                    served.release(file);
                }
                served.fs.forget(entry.ino, 1);
            }
            ends.store(true, Ordering::Relaxed);
        });
    });
}
