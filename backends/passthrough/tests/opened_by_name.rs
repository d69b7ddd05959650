//! Files that are opened together with their lookup, in an application that gets their descriptors.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{Credentials, Options};
use rustix::fs::{CWD, Mode, RenameFlags as LowerFlags, mkfifoat, renameat_with};

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

fn look_up(served: &Served, text: &str, bits: u32) -> Result<(Entry, Option<File>)> {
    let (entry, opened) = served.fs.lookup_to_open(&me(), Ino::ROOT, name(text), flags(bits))?;
    Ok((entry, opened.map(|opened| File { ino: entry.ino, fh: opened.fh })))
}

#[test]
fn a_file_that_is_read_is_opened_by_its_name_and_outlives_it() {
    everywhere(&options(), |served| {
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
    everywhere(&options(), |served| {
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
    let cached = Options { entry_valid_for: Duration::from_secs(1), ..options() };
    everywhere(&cached, |served| {
        fs::write(served.path("file"), "x").unwrap();
        assert_eq!(look_up(served, "file", 0).unwrap().1, None, "each cached name would be open");
    });
}

/// The name may lead to another file between the system calls.
#[test]
fn the_open_file_is_the_one_that_was_looked_up() {
    everywhere(&options(), |served| {
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
