//! Files that are opened again soon after their release.

mod common;

use std::fs;
use std::os::unix::fs::OpenOptionsExt;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{LockPlace, PassthroughOptions};

const RDONLY: u32 = 0;

/// Runs `test` with file handles, on a file `a` that was read and released.
fn run_after_read(test: impl Fn(&ServedDirectory, Ino)) {
    for base in bases() {
        let served = ServedDirectory::new(&base, PassthroughOptions::default());
        if !served.fs.uses_file_handles() {
            eprintln!("not here: no file handles in {}", base.display());
            continue;
        }
        fs::write(served.path("a"), b"text").unwrap();
        let ino = served.lookup("a").unwrap().ino;
        served.release(served.open(ino, RDONLY).unwrap());
        test(&served, ino);
    }
}

fn open_fds(served: &ServedDirectory) -> usize {
    served.fs.stats().open_fds
}

#[test]
fn a_file_stays_open_after_reading_until_it_is_unused_between_two_trims() {
    run_after_read(|served, ino| {
        let kept = open_fds(served);
        let file = served.open(ino, RDONLY).unwrap();
        assert_eq!(open_fds(served), kept, "the descriptor that was kept is used");
        assert_eq!(served.read(file, 0, 9), Ok(b"text".to_vec()));
        served.release(file);
        served.fs.trim();
        assert_eq!(open_fds(served), kept);
        served.fs.trim();
        assert_eq!(open_fds(served), kept - 1);
    });
}

#[test]
fn a_file_that_is_kept_open_is_closed_where_memory_is_short() {
    run_after_read(|served, ino| {
        let kept = open_fds(served);
        served.fs.lifecycle().unwrap().memory_pressure();
        assert_eq!(open_fds(served), kept - 1);
        assert!(served.open(ino, RDONLY).is_ok(), "and it can be opened again");
    });
}

#[test]
fn two_concurrent_readers_have_a_descriptor_each() {
    run_after_read(|served, ino| {
        let kept = open_fds(served);
        let files = [RDONLY, RDONLY].map(|flags| served.open(ino, flags).unwrap());
        assert_eq!(open_fds(served), kept + 1);
        files.into_iter().for_each(|file| served.release(file));
        served.fs.forget(ino, 1);
        assert_eq!(open_fds(served), kept - 1, "a forgotten inode keeps nothing open");
    });
}

#[test]
fn a_reopened_file_that_was_removed_on_the_source_is_stale() {
    run_after_read(|served, ino| {
        fs::remove_file(served.path("a")).unwrap();
        fs::write(served.path("a"), b"newer").unwrap();
        assert_eq!(served.open(ino, RDONLY), Err(Errno::ESTALE));
        let new = served.lookup("a").unwrap();
        assert_ne!(new.ino, ino);
        let file = served.open(new.ino, RDONLY).unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"newer".to_vec()));
        served.release(file);
    });
}

#[test]
fn a_reopened_file_that_was_moved_on_the_source_is_the_same() {
    run_after_read(|served, ino| {
        fs::rename(served.path("a"), served.path("b")).unwrap();
        fs::write(served.path("b"), b"changed").unwrap();
        let file = served.open(ino, RDONLY).unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"changed".to_vec()));
        served.release(file);
    });
}

#[test]
fn a_file_unlinked_after_reading_is_kept_open_once() {
    run_after_read(|served, ino| {
        served.fs.unlink(&own_context(), Ino::ROOT, name("a")).unwrap();
        let pinned = open_fds(served);
        let file = served.open(ino, RDONLY).unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"text".to_vec()));
        served.release(file);
        assert_eq!(open_fds(served), pinned);
        served.fs.forget(ino, 1);
        assert_eq!(open_fds(served), pinned - 1);
    });
}

/// An unused descriptor for writing would prevent the file from being executed.
#[test]
fn a_file_that_was_written_is_closed_at_once() {
    run_after_read(|served, ino| {
        let before = open_fds(served);
        for flags in [OpenFlags::WRONLY, OpenFlags::RDWR, OpenFlags::TRUNC | OpenFlags::WRONLY] {
            served.release(served.open(ino, flags).unwrap());
            assert_eq!(open_fds(served), before);
        }
        fs::write(served.path("program"), b"#!/bin/sh\n").unwrap();
        let program = served.lookup("program").unwrap().ino;
        let file = served.open(program, OpenFlags::RDWR).unwrap();
        served.write_at(file, 0, b"#!/bin/true\n").unwrap();
        served.release(file);
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(served.path("program"), executable).unwrap();
        assert!(std::process::Command::new(served.path("program")).status().unwrap().success());
    });
}

/// Flags that change the behaviour of a descriptor must not affect the next open.
#[test]
fn a_file_read_with_direct_io_is_not_reused() {
    run_after_read(|served, ino| {
        let direct = fs::OpenOptions::new()
            .read(true)
            .custom_flags(OpenFlags::DIRECT as i32)
            .open(served.path("a"));
        if direct.is_err() {
            eprintln!("not here: no O_DIRECT in {}", served.path("a").display());
            return;
        }
        served.fs.trim();
        served.fs.trim();
        let before = open_fds(served);
        served.release(served.open(ino, OpenFlags::DIRECT).unwrap());
        assert_eq!(open_fds(served), before);
    });
}

/// flock(2) locks of the lower file system end with the last descriptor of the open file.
#[test]
fn with_locks_of_the_lower_file_system_no_descriptor_is_reused() {
    for base in bases() {
        let options =
            PassthroughOptions { locks: LockPlace::FileSystem, ..PassthroughOptions::default() };
        let served = ServedDirectory::new(&base, options);
        fs::write(served.path("a"), b"text").unwrap();
        let ino = served.lookup("a").unwrap().ino;
        let before = open_fds(&served);
        served.release(served.open(ino, RDONLY).unwrap());
        assert_eq!(open_fds(&served), before);
    }
}

#[test]
fn files_are_reopened_by_many_threads_while_they_are_trimmed_and_forgotten() {
    run_after_read(|served, ino| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let looked_up = served.lookup("a").unwrap().ino;
                        let file = served.open(looked_up, RDONLY).unwrap();
                        assert_eq!(served.read(file, 0, 9), Ok(b"text".to_vec()));
                        served.release(file);
                        served.fs.forget(looked_up, 1);
                    }
                });
            }
            scope.spawn(|| (0..2000).for_each(|_| served.fs.trim()));
        });
        served.fs.forget(ino, 1);
        let stats = served.fs.stats();
        assert_eq!((stats.inodes, stats.open_files, stats.pinned_fds), (1, 0, 1));
        assert_eq!(stats.cached_fds, 1, "the root alone");
    });
}
