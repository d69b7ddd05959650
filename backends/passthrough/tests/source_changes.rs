//! Changes of the source from outside, shortage of descriptors, and file systems mounted below it.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::*;
use defuse_fs::*;
use defuse_passthrough::{FileHandles, PassthroughOptions};

#[test]
fn an_unlinked_file_lives_while_it_is_looked_up() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        served.write_at(file, 0, b"kept").unwrap();
        served.release(file);
        served.fs.unlink(&own_context(), Ino::ROOT, name("a")).unwrap();
        assert_eq!(served.fs.getattr(&own_context(), entry.ino, None).unwrap().nlink, 0);
        let file = served.open(entry.ino, OpenFlags::RDWR).unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"kept".to_vec()));
        served.release(file);
        // A file replaced by a rename also lives on.
        let (victim, file) = served.create("b");
        served.release(file);
        let (_, file) = served.create("c");
        served.release(file);
        let (c, b) = ((Ino::ROOT, name("c")), (Ino::ROOT, name("b")));
        served.fs.rename(&own_context(), c, b, RenameFlags::default()).unwrap();
        assert!(served.open(victim.ino, 0).is_ok());
        let pinned = served.fs.stats().pinned_fds;
        served.fs.forget(entry.ino, 1);
        served.fs.forget(victim.ino, 1);
        assert_eq!(served.fs.stats().pinned_fds, pinned - 2);
    });
}

/// While a new file got the number of a removed one, the old handle failed with `ENOMEM`: ext4
/// returns it for an incomplete inode.
#[test]
fn an_inode_whose_number_is_being_reused_is_stale() {
    for base in bases() {
        let served = ServedDirectory::new(
            &base,
            PassthroughOptions { fd_cache: 1, ..PassthroughOptions::default() },
        );
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in ["a", "b"] {
                let (path, ends) = (served.path(thread), &ends);
                scope.spawn(move || {
                    while !ends.load(Ordering::Relaxed) {
                        let _ = fs::write(&path, b"");
                        let _ = fs::remove_file(&path);
                    }
                });
            }
            let mut seen = Vec::new();
            for round in 0..40_000 {
                let Ok(entry) = served.lookup(["a", "b"][round % 2]) else { continue };
                let opened = served.open(entry.ino, OpenFlags::RDWR);
                seen.extend(opened.as_ref().err().copied());
                opened.into_iter().for_each(|file| served.release(file));
                served.fs.forget(entry.ino, 1);
            }
            ends.store(true, Ordering::Relaxed);
            seen.retain(|errno| ![Errno::ESTALE, Errno::ENOENT].contains(errno));
            assert_eq!(seen, []);
        });
    }
}

#[test]
fn a_file_replaced_on_the_source_is_a_new_inode_and_the_old_one_is_stale() {
    for base in bases() {
        let served = ServedDirectory::new(
            &base,
            PassthroughOptions { fd_cache: 1, ..PassthroughOptions::default() },
        );
        if !served.fs.uses_file_handles() {
            eprintln!("not here: no file handles in {}", base.display());
            continue;
        }
        fs::write(served.path("a"), b"old").unwrap();
        let old = served.lookup("a").unwrap();
        fs::remove_file(served.path("a")).unwrap();
        assert_eq!(served.lookup("a").err(), Some(Errno::ENOENT));
        fs::write(served.path("a"), b"newer").unwrap();
        let new = served.lookup("a").unwrap();
        assert_eq!(new.attr.size, 5);
        let listed = served.list(Ino::ROOT, 10, true).unwrap();
        assert_eq!(listed[2].entry.unwrap().ino, new.ino);
        // Evict the old inode from the cache of one descriptor.
        served.fs.getattr(&own_context(), new.ino, None).unwrap();
        if new.ino != old.ino {
            assert_eq!(served.open(old.ino, 0).err(), Some(Errno::ESTALE));
            assert_eq!(served.fs.getattr(&own_context(), old.ino, None).err(), Some(Errno::ESTALE));
        }
        let file = served.open(new.ino, 0).unwrap();
        assert_eq!(served.read(file, 0, 9), Ok(b"newer".to_vec()));
    }
}

/// If an inode number is reused within a tick of the clock, the birth time is the same, too.
#[test]
fn a_stale_inode_does_not_hide_its_successor() {
    let served = ServedDirectory::new(
        &bases()[0],
        PassthroughOptions { fd_cache: 1, ..PassthroughOptions::default() },
    );
    for round in 0..200 {
        fs::write(served.path("a"), b"x").unwrap();
        let old = served.lookup("a").unwrap();
        fs::remove_file(served.path("a")).unwrap();
        fs::write(served.path("a"), b"xy").unwrap();
        // The first try may fail with ESTALE, after which the caller looks the name up again.
        let open = || served.lookup("a").and_then(|entry| served.open(entry.ino, 0));
        let file = open().or_else(|_| open()).unwrap_or_else(|errno| panic!("{round}: {errno}"));
        assert_eq!(served.read(file, 0, 9), Ok(b"xy".to_vec()));
        served.release(file);
        served.fs.forget(old.ino, 1);
        fs::remove_file(served.path("a")).unwrap();
    }
}

#[test]
fn a_listing_shows_every_lasting_entry_once_while_others_change() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        for index in 0..500 {
            fs::write(served.path(&format!("stays-{index}")), b"").unwrap();
            fs::write(served.path(&format!("goes-{index}")), b"").unwrap();
        }
        let opened = served.fs.opendir(&own_context(), Ino::ROOT, OpenFlags::default()).unwrap();
        let dir = File { ino: Ino::ROOT, fh: opened.fh };
        let (mut from, mut seen, mut round) = (0, Vec::new(), 0);
        loop {
            let got = served.list_some(dir, from, 10, round % 2 == 0).unwrap();
            let Some(last) = got.last() else { break };
            from = last.next;
            seen.extend(got.into_iter().map(|item| item.name));
            let _ = fs::remove_file(served.path(&format!("goes-{round}")));
            let _ = fs::write(served.path(&format!("comes-{round}")), b"");
            round += 1;
            // A second stream of the same directory, and a seek back, have no influence.
            assert!(!served.list_some(dir, 0, 3, false).unwrap().is_empty());
        }
        seen.sort();
        for index in 0..500 {
            let name = format!("stays-{index}");
            assert_eq!(seen.iter().filter(|seen| **seen == name).count(), 1, "{name}");
        }
    });
}

#[test]
fn renames_and_lookups_may_race() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        fs::write(served.path("a"), b"a").unwrap();
        fs::write(served.path("b"), b"bb").unwrap();
        let (done, opens) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (a, b) = ((Ino::ROOT, name("a")), (Ino::ROOT, name("b")));
                for _ in 0..3000 {
                    let exchange = RenameFlags(RenameFlags::EXCHANGE);
                    served.fs.rename(&own_context(), a, b, exchange).unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let entry = served.lookup("a").unwrap();
                        let file = match served.open(entry.ino, 0) {
                            // Without file handles the name leads to the other file by now. The
                            // kernel then repeats the lookup, as this test does.
                            Err(Errno::ESTALE) => {
                                served.fs.forget(entry.ino, 1);
                                continue;
                            }
                            opened => opened.unwrap(),
                        };
                        opens.fetch_add(1, Ordering::Relaxed);
                        let bytes = served.read(file, 0, 9).unwrap();
                        assert_eq!(bytes.len() as u64, entry.attr.size, "one inode, one file");
                        served.release(file);
                        served.fs.forget(entry.ino, 1);
                    }
                });
            }
        });
        assert!(opens.into_inner() > 0, "no open succeeds");
        assert_eq!(served.fs.stats().inodes, 1);
        assert_eq!(served.fs.stats().open_files, 0);
    });
}

#[test]
fn files_come_and_go_from_many_threads() {
    run_everywhere(
        &PassthroughOptions { fd_cache: 4, ..PassthroughOptions::default() },
        |served| {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    scope.spawn(move || {
                        let dir = served.mkdir(Ino::ROOT, &format!("dir-{thread}"));
                        for _ in 0..300 {
                            let made = served.mkdir(dir.ino, "sub");
                            let all = served.list(dir.ino, 10, true).unwrap();
                            assert_eq!(all[2].entry.unwrap().ino, made.ino);
                            served.fs.rmdir(&own_context(), dir.ino, name("sub")).unwrap();
                            served.fs.forget(made.ino, 2);
                        }
                        served.fs.forget(dir.ino, 1);
                    });
                }
            });
            let stats = served.fs.stats();
            assert_eq!((stats.inodes, stats.pinned_fds, stats.open_files), (1, 1, 0));
        },
    );
}

const SMALL: &str = "DEFUSE_TEST_NOFILE";

/// The work of the next test, in a process with few descriptors.
#[test]
fn small_limit_child() {
    let Ok(base) = std::env::var(SMALL) else { return };
    let served = ServedDirectory::new(Path::new(&base), PassthroughOptions::default());
    if !served.fs.uses_file_handles() {
        eprintln!("not here: no file handles");
        return;
    }
    let mut inodes = Vec::new();
    for dir in 0..500 {
        let dir = served.mkdir(Ino::ROOT, &format!("dir-{dir}"));
        for file in 0..60 {
            let text = format!("file-{file}");
            let node = regular(&own_context(), 0o600);
            inodes.push(served.fs.mknod(&own_context(), dir.ino, name(&text), &node).unwrap().ino);
        }
    }
    for ino in &inodes {
        assert_eq!(served.fs.getattr(&own_context(), *ino, None).unwrap().size, 0);
    }
    let mut open = Vec::new();
    while open.len() < 200 {
        open.push(served.open(inodes[open.len() * 100], OpenFlags::RDWR).unwrap());
    }
    let stats = served.fs.stats();
    eprintln!("{stats:?}");
    assert_eq!(stats.inodes, 30_501);
    assert!(stats.open_fds < 256);
    assert!(stats.inode_bytes / stats.inodes < 200);
}

#[test]
fn thirty_thousand_inodes_fit_in_256_descriptors() {
    if !is_root() {
        return;
    }
    for base in bases() {
        let output = Command::new("sh")
            .args(["-c", "ulimit -n 256 && exec \"$0\" --exact small_limit_child --nocapture"])
            .arg(std::env::current_exe().unwrap())
            .env(SMALL, base)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        eprintln!("{text}");
    }
}

struct PathMount<'a>(&'a Path);

impl Drop for PathMount<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn file_systems_mounted_below_the_source_are_served_too() {
    if !is_root() {
        return;
    }
    for file_handles in [FileHandles::Auto, FileHandles::Off] {
        let served = ServedDirectory::new(
            &bases()[0],
            PassthroughOptions { file_handles, ..PassthroughOptions::default() },
        );
        let (tmpfs, bind, source) = (served.path("tmpfs"), served.path("bind"), served.path("s"));
        for dir in [&tmpfs, &bind, &source] {
            fs::create_dir(dir).unwrap();
        }
        let flags = rustix::mount::MountFlags::empty();
        if rustix::mount::mount("none", &tmpfs, "tmpfs", flags, None).is_err() {
            eprintln!("skipped: no permission to mount");
            return;
        }
        let _first = PathMount(&tmpfs);
        rustix::mount::mount_bind(&source, &bind).unwrap();
        let _second = PathMount(&bind);
        fs::write(source.join("file"), b"bound").unwrap();
        let (a, b) = (served.lookup("s").unwrap(), served.lookup("bind").unwrap());
        assert_ne!(a.ino, b.ino, "a directory has one parent");
        assert_ne!(a.attr.st_ino, b.attr.st_ino);
        let dir = served.lookup("tmpfs").unwrap();
        let cx = own_context();
        let args = common::flags(OpenFlags::RDWR);
        let made = served.fs.create(&cx, dir.ino, name("f"), &regular(&cx, 0o600), args);
        let (entry, opened) = made.unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        served.write_at(file, 0, b"mounted").unwrap();
        served.release(file);
        assert_eq!(fs::read(tmpfs.join("f")).unwrap(), b"mounted");
        let again = served.open(entry.ino, OpenFlags::RDWR).unwrap();
        assert_eq!(served.read(again, 0, 9), Ok(b"mounted".to_vec()));
        let out = (Ino::ROOT, name("f"));
        let moved = served.fs.rename(&cx, (dir.ino, name("f")), out, RenameFlags::default());
        assert_eq!(moved, Err(Errno::EXDEV));
        assert_eq!(served.fs.lookup_parent(&cx, dir.ino).unwrap().ino, Ino::ROOT);
        let listed = served.list(dir.ino, 10, true).unwrap();
        assert_eq!(listed[2].ino, listed[2].entry.unwrap().attr.st_ino);
        assert_ne!(listed[2].ino, fs::metadata(tmpfs.join("f")).unwrap().ino());
        assert_eq!(served.fs.syncfs(&cx), Ok(()));
    }
}

#[test]
fn a_directory_moved_out_of_the_source_gives_no_access_to_its_parent() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let inner = served.mkdir(Ino::ROOT, "dir");
        let deeper = served.mkdir(inner.ino, "deeper");
        let outside = served.path("").with_extension("outside");
        fs::rename(served.path("dir"), &outside).unwrap();
        assert_eq!(served.fs.lookup_parent(&own_context(), inner.ino).err(), Some(Errno::ESTALE));
        assert_eq!(served.fs.lookup_parent(&own_context(), deeper.ino).err(), Some(Errno::ESTALE));
        fs::remove_dir_all(outside).unwrap();
    });
}
