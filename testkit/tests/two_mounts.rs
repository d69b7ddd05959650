//! Two kernel mounts of one file system: each caches names and attributes, and shows each change of
//! the other at once.

use std::ffi::CString;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use defuse_block::RamDevice;
use defuse_fs::FileSystem;
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_uhs::Uhs;

struct PairedMount {
    dir: tempfile::TempDir,
    session: Option<Session>,
}

impl PairedMount {
    fn new(fs: Arc<dyn FileSystem>) -> PairedMount {
        let dir = tempfile::tempdir().unwrap();
        // Otherwise the kernel of root requests attributes less often.
        let options = MountOptions { default_permissions: true, ..MountOptions::default() };
        let mounted = mount::mount(dir.path(), &options).unwrap();
        let options = SessionOptions { default_permissions: true, ..SessionOptions::default() };
        let session = Session::start(mounted.device, fs, &options).unwrap();
        PairedMount { dir, session: Some(session) }
    }

    fn path_of(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// The lookups and requests of attributes so far. Others, such as RELEASE, may come later than
    /// their cause.
    fn requests(&self) -> u64 {
        // A request is counted a moment after its answer.
        let mut before = self.count_requests();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = self.count_requests();
            if now == before {
                return now;
            }
            before = now;
        }
    }

    fn count_requests(&self) -> u64 {
        let snapshot = self.session.as_ref().unwrap().statistics().snapshot();
        let requested = |name: &str| ["LOOKUP", "GETATTR", "STATX"].contains(&name);
        let ops = snapshot.ops.iter().filter(|op| requested(op.op.name()));
        ops.map(|op| op.latency.count).sum()
    }
}

impl Drop for PairedMount {
    fn drop(&mut self) {
        let _ = mount::abort(self.dir.path());
        let ended = self.session.take().map(Session::wait);
        if !std::thread::panicking() {
            assert!(ended.unwrap().clean);
        }
    }
}

fn uhs() -> Arc<dyn FileSystem> {
    let options = defuse_uhs::UhsOptions { commit: None, ..defuse_uhs::UhsOptions::default() };
    let device = Arc::new(RamDevice::new(4096, 16384));
    let mut random = fastrand::Rng::with_seed(1);
    Uhs::make(device.clone(), (0o1777, 0, 0), &mut random).unwrap();
    let (fs, problems) = Uhs::open(device, options, random).unwrap();
    assert_eq!(problems, []);
    Arc::new(fs)
}

/// The file systems to test, or none where they cannot be mounted.
fn run_on_each(test: impl Fn(&str, Arc<dyn FileSystem>)) {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    test("memory", Arc::new(MemoryFileSystem::new(MemoryOptions::default())));
    test("uhs", uhs());
}

/// True if the kernel can drop all names at once, without waiting.
fn has_epochs(mount: &PairedMount) -> bool {
    let has = mount.session.as_ref().unwrap().notifier().drops_at_once();
    if !has {
        println!("not here: needs Linux 6.16 for FUSE_NOTIFY_INC_EPOCH");
    }
    has
}

/// Everything that stat(2) shows of each file, or why not.
fn look(paths: &[PathBuf]) -> Vec<Result<String, ErrorKind>> {
    let shown = |path: &PathBuf| {
        let of = fs::symlink_metadata(path).map_err(|error| error.kind())?;
        let times = (of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec());
        let owner = (of.uid(), of.gid());
        Ok(format!("{} {:o} {} {} {owner:?} {times:?}", of.ino(), of.mode(), of.nlink(), of.len()))
    };
    paths.iter().map(shown).collect()
}

#[test]
fn each_of_two_mounts_answers_a_repeated_stat_without_a_request() {
    run_on_each(|what, fs| {
        let [a, b] = [(); 2].map(|()| PairedMount::new(fs.clone()));
        if !has_epochs(&a) {
            return;
        }
        fs::create_dir_all(a.path_of("1/2/3")).unwrap();
        let names: Vec<String> = (0..100).map(|i| format!("1/2/3/{i}")).collect();
        names.iter().for_each(|name| fs::write(a.path_of(name), name).unwrap());
        for mount in [&a, &b] {
            let mut paths: Vec<_> = names.iter().map(|name| mount.path_of(name)).collect();
            if !fs.caps().negative_lifetime.is_zero() {
                paths.push(mount.path_of("1/2/3/missing"));
            }
            let first = look(&paths);
            look(&paths);
            let before = mount.requests();
            for _ in 0..3 {
                assert_eq!(look(&paths), first);
            }
            assert_eq!(mount.requests() - before, 0, "{what}");
        }
        // The first mount's names and attributes are still valid: the second one has only looked.
        let paths: Vec<_> = names.iter().map(|name| a.path_of(name)).collect();
        let before = a.requests();
        look(&paths);
        assert_eq!(a.requests() - before, 0, "{what}");
        // A change of one file's attributes costs the other mount one request.
        fs::set_permissions(a.path_of("1/2/3/7"), fs::Permissions::from_mode(0o600)).unwrap();
        let before = b.requests();
        look(&names.iter().map(|name| b.path_of(name)).collect::<Vec<_>>());
        assert_eq!(b.requests() - before, 1, "{what}");
    });
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(path, name, value, flags).unwrap();
}

/// An access ACL that gives user 1000 `perm`.
fn acl(perm: u16) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    let none = u32::MAX;
    for (tag, perm, id) in
        [(1, 6, none), (2, perm, 1000), (4, 0, none), (16, 7, none), (32, 0, none)]
    {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(perm));
        bytes.extend(u32::to_le_bytes(id));
    }
    bytes
}

fn get_acl(path: &Path) -> Option<Vec<u8>> {
    let mut buffer = [0; 256];
    let len = rustix::fs::getxattr(path, "system.posix_acl_access", &mut buffer[..]).ok()?;
    Some(buffer[..len].to_vec())
}

fn rename_by(from: &Path, to: &Path, flags: rustix::fs::RenameFlags) {
    rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags).unwrap();
}

type PathChange = (&'static str, fn(&dyn Fn(&str) -> PathBuf));

/// Each changes names or attributes in a directory with the files `a`, `b`, `ab` (a link to `a`),
/// `dir`, `dir/x`, `empty` and `target` (a link to `a`).
const CHANGES: &[PathChange] = &[
    ("create", |at| drop(fs::File::create_new(at("new")).unwrap())),
    ("mkdir", |at| fs::create_dir(at("new")).unwrap()),
    ("symlink", |at| symlink("a", at("new")).unwrap()),
    ("mknod", |at| {
        let path = CString::new(at("new").as_os_str().as_bytes()).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path.as_c_str(),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
    }),
    ("link", |at| fs::hard_link(at("a"), at("new")).unwrap()),
    ("unlink", |at| fs::remove_file(at("a")).unwrap()),
    ("unlink one of two names", |at| fs::remove_file(at("ab")).unwrap()),
    ("rmdir", |at| fs::remove_dir(at("empty")).unwrap()),
    ("rename", |at| fs::rename(at("a"), at("new")).unwrap()),
    ("rename over", |at| fs::rename(at("a"), at("b")).unwrap()),
    ("rename into", |at| fs::rename(at("a"), at("dir/new")).unwrap()),
    ("rename of a directory", |at| fs::rename(at("dir"), at("new")).unwrap()),
    ("rename of a directory over", |at| fs::rename(at("dir"), at("empty")).unwrap()),
    ("exchange", |at| rename_by(&at("a"), &at("dir"), rustix::fs::RenameFlags::EXCHANGE)),
    ("whiteout", |at| rename_by(&at("a"), &at("new"), rustix::fs::RenameFlags::WHITEOUT)),
    ("chmod", |at| fs::set_permissions(at("a"), fs::Permissions::from_mode(0o600)).unwrap()),
    ("chmod of a directory", |at| {
        fs::set_permissions(at("dir"), fs::Permissions::from_mode(0o700)).unwrap();
    }),
    ("chown", |at| std::os::unix::fs::chown(at("a"), Some(7), Some(8)).unwrap()),
    ("utimes", |at| {
        let time = std::time::UNIX_EPOCH + Duration::from_secs(5);
        fs::File::open(at("a")).unwrap().set_modified(time).unwrap();
    }),
    ("truncate", |at| {
        fs::File::options().write(true).open(at("a")).unwrap().set_len(3).unwrap();
    }),
    ("open with O_TRUNC", |at| drop(fs::File::create(at("a")).unwrap())),
    ("write", |at| {
        let file = fs::File::options().write(true).open(at("a")).unwrap();
        file.write_all_at(b"x", 100).unwrap();
    }),
    ("append", |at| {
        fs::File::options().append(true).open(at("a")).unwrap().write_all(b"more").unwrap();
    }),
    ("fallocate", |at| {
        let file = fs::File::options().write(true).open(at("a")).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 10_000).unwrap();
    }),
    ("copy_file_range", |at| {
        let from = fs::File::open(at("b")).unwrap();
        let to = fs::File::options().write(true).open(at("a")).unwrap();
        rustix::fs::copy_file_range(&from, None, &to, Some(&mut 20), 5).unwrap();
    }),
    ("setxattr", |at| set_xattr(&at("a"), "user.n", b"value")),
    ("removexattr", |at| rustix::fs::removexattr(at("b"), "user.b").unwrap()),
    ("ACL", |at| set_xattr(&at("a"), "system.posix_acl_access", &acl(4))),
    ("two changes of one name", |at| {
        fs::rename(at("a"), at("new")).unwrap();
        fs::rename(at("new"), at("a")).unwrap();
        fs::remove_file(at("a")).unwrap();
    }),
];

fn every_name(of: &Path) -> Vec<PathBuf> {
    let names = [
        "", "a", "b", "ab", "dir", "dir/x", "dir/new", "empty", "empty/x", "target", "new", "new/x",
    ];
    names.iter().map(|name| of.join(name)).collect()
}

fn fill(dir: &Path) {
    fs::create_dir_all(dir.join("dir")).unwrap();
    fs::create_dir(dir.join("empty")).unwrap();
    fs::write(dir.join("a"), "aaaaaaaaaa").unwrap();
    fs::write(dir.join("b"), "bbbbbbbbbb").unwrap();
    fs::write(dir.join("dir/x"), "x").unwrap();
    fs::hard_link(dir.join("a"), dir.join("ab")).unwrap();
    symlink("a", dir.join("target")).unwrap();
    set_xattr(&dir.join("b"), "user.b", b"value");
}

#[test]
fn each_change_in_one_of_two_mounts_is_seen_at_once_in_the_other() {
    run_on_each(|what, fs| {
        let [a, b] = [(); 2].map(|()| PairedMount::new(fs.clone()));
        for (number, (name, change)) in CHANGES.iter().enumerate() {
            for (from, to) in [(&a, &b), (&b, &a)] {
                let case = format!(
                    "{what}, {name}, {}",
                    if from.dir.path() == a.dir.path() { 1 } else { 2 }
                );
                let base = format!("{number}{}", &case[case.len() - 1..]);
                fill(&from.path_of(&base));
                // The two mounts cache, and each has looked after the other.
                for mount in [from, to, from, to] {
                    look(&every_name(&mount.path_of(&base)));
                    get_acl(&mount.path_of(&base).join("a"));
                }
                let old = look(&every_name(&to.path_of(&base)));
                change(&|name| from.path_of(&base).join(name));
                let seen = look(&every_name(&to.path_of(&base)));
                assert_ne!(seen, old, "{case}: nothing was changed");
                assert_eq!(seen, look(&every_name(&from.path_of(&base))), "{case}");
                let acls = [from, to].map(|mount| get_acl(&mount.path_of(&base).join("a")));
                assert_eq!(acls[0], acls[1], "{case}");
                let text = [from, to].map(|mount| fs::read(mount.path_of(&base).join("b")).ok());
                assert_eq!(text[0], text[1], "{case}");
            }
        }
    });
}

/// Neither the path nor the inode of an open file is looked up again.
#[test]
fn an_open_file_shows_the_attributes_that_the_other_mount_has_changed() {
    run_on_each(|what, fs| {
        let [a, b] = [(); 2].map(|()| PairedMount::new(fs.clone()));
        for (from, to) in [(&a, &b), (&b, &a)] {
            fs::write(from.path_of("f"), "text").unwrap();
            let (file, here) =
                (fs::File::open(to.path_of("f")).unwrap(), fs::File::open(to.dir.path()).unwrap());
            for number in 1..50 {
                assert_eq!(file.metadata().unwrap().len(), 3 + number, "{what}");
                let mtime = here.metadata().unwrap().mtime_nsec();
                fs::OpenOptions::new()
                    .append(true)
                    .open(from.path_of("f"))
                    .unwrap()
                    .write_all(b"x")
                    .unwrap();
                fs::write(from.path_of(&format!("n{number}")), "").unwrap();
                assert_eq!(file.metadata().unwrap().len(), 4 + number, "{what}");
                assert_ne!(here.metadata().unwrap().mtime_nsec(), mtime, "{what}");
            }
            fs::remove_file(from.path_of("f")).unwrap();
            assert_eq!(file.metadata().unwrap().nlink(), 0, "{what}");
            (1..50)
                .for_each(|number| fs::remove_file(from.path_of(&format!("n{number}"))).unwrap());
        }
    });
}

/// A listing gave entries whose names the kernel took for new, whatever had happened since.
#[test]
fn a_listing_in_one_mount_does_not_bring_back_names_that_the_other_has_removed() {
    run_on_each(|what, fs| {
        let [a, b] = [(); 2].map(|()| PairedMount::new(fs.clone()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = fs::read_dir(b.dir.path()).unwrap().count();
                    }
                });
            }
            for number in 0..2000 {
                let name = format!("f{}", number % 7);
                fs::write(a.path_of(&name), "").unwrap();
                let made = b.path_of(&name).exists();
                fs::remove_file(a.path_of(&name)).unwrap();
                let gone = !b.path_of(&name).exists();
                if !(made && gone) {
                    stop.store(true, Ordering::Relaxed);
                }
                assert!(made && gone, "{what}: {number}: {made} {gone}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}

/// Two mounts that dropped single names waited for each other here.
#[test]
fn two_mounts_that_change_one_directory_at_full_speed_neither_wait_for_each_other_nor_disagree() {
    run_on_each(|what, fs| {
        let [a, b] = [(); 2].map(|()| PairedMount::new(fs.clone()));
        fs::create_dir(a.path_of("d")).unwrap();
        let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        let round = |own: &Path, other: &Path, who: &str, number: u64| {
            let name = |base: &Path, what: &str| base.join(format!("d/{who}{what}{}", number % 5));
            let is = |path: &Path, len: Option<u64>, when: &str| {
                let found = fs::symlink_metadata(path).ok().map(|of| of.len());
                assert_eq!(found, len, "{when}: {number} of {who}, {}", path.display());
            };
            is(&name(other, "f"), None, "before");
            fs::write(name(own, "f"), "1").unwrap();
            is(&name(other, "f"), Some(1), "created");
            fs::write(name(own, "g"), "22").unwrap();
            is(&name(other, "g"), Some(2), "created");
            fs::rename(name(own, "g"), name(own, "f")).unwrap();
            is(&name(other, "f"), Some(2), "renamed over");
            is(&name(other, "g"), None, "renamed away");
            let file = fs::OpenOptions::new().write(true).open(name(own, "f")).unwrap();
            file.set_len(number).unwrap();
            is(&name(other, "f"), Some(number), "truncated");
            fs::set_permissions(name(own, "f"), fs::Permissions::from_mode(0o640)).unwrap();
            let mode = fs::symlink_metadata(name(other, "f")).unwrap().mode() & 0o777;
            assert_eq!(mode, 0o640, "{number} of {who}");
            fs::hard_link(name(own, "f"), name(own, "h")).unwrap();
            assert_eq!(fs::symlink_metadata(name(other, "f")).unwrap().nlink(), 2);
            // The other mount removes what this one has made.
            fs::remove_file(name(other, "f")).unwrap();
            is(&name(own, "f"), None, "removed");
            assert_eq!(fs::symlink_metadata(name(own, "h")).unwrap().nlink(), 1);
            fs::remove_file(name(own, "h")).unwrap();
            is(&name(other, "h"), None, "removed");
            fs::create_dir(name(own, "d")).unwrap();
            assert!(name(other, "d").is_dir());
            fs::remove_dir(name(other, "d")).unwrap();
            is(&name(own, "d"), None, "removed");
        };
        let (a, b) = (a.dir.path(), b.dir.path());
        std::thread::scope(|scope| {
            let workers: Vec<_> = [(a, b, "p"), (b, a, "q"), (a, b, "r"), (b, a, "s")]
                .into_iter()
                .map(|(own, other, who)| {
                    let (done, rounds, round) = (&done, &rounds, &round);
                    scope.spawn(move || {
                        let mut number = 0;
                        while !done.load(Ordering::Relaxed) {
                            number += 1;
                            round(own, other, who, number);
                            rounds.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let end = Instant::now() + Duration::from_secs(4);
            let mut last = 0;
            while Instant::now() < end && workers.iter().all(|worker| !worker.is_finished()) {
                std::thread::sleep(Duration::from_secs(1));
                let now = rounds.load(Ordering::Relaxed);
                if now == last {
                    // Ends the calls that wait.
                    [a, b].iter().for_each(|dir| drop(mount::abort(dir)));
                    done.store(true, Ordering::Relaxed);
                    panic!("{what}: they wait for each other after {now} rounds");
                }
                last = now;
            }
            done.store(true, Ordering::Relaxed);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        println!("{what}: {} rounds", rounds.load(Ordering::Relaxed));
    });
}

/// Attributes were valid for a day where a mount was alone, and data stays in its page cache.
#[test]
fn what_the_first_mount_has_cached_alone_is_dropped_for_the_second() {
    run_on_each(|what, fs| {
        let a = PairedMount::new(fs.clone());
        let held = fs::File::create(a.path_of("held")).unwrap();
        fs::write(a.path_of("f"), "old").unwrap();
        fs::create_dir(a.path_of("d")).unwrap();
        let (kept, dir) = (a.path_of("f"), fs::File::open(a.path_of("d")).unwrap());
        assert_eq!(fs::read(&kept).unwrap(), b"old");
        assert_eq!(held.metadata().unwrap().len(), 0);
        let seen = dir.metadata().unwrap().mtime_nsec();
        assert!(!a.path_of("missing").exists());
        let b = PairedMount::new(fs.clone());
        fs::write(b.path_of("held"), "more").unwrap();
        fs::OpenOptions::new().write(true).open(b.path_of("f")).unwrap().write_all(b"new").unwrap();
        fs::write(b.path_of("d/x"), "").unwrap();
        fs::write(b.path_of("missing"), "").unwrap();
        assert_eq!(held.metadata().unwrap().len(), 4, "{what}");
        assert_eq!(fs::read(&kept).unwrap(), b"new", "{what}");
        assert_ne!(dir.metadata().unwrap().mtime_nsec(), seen, "{what}");
        assert!(a.path_of("missing").exists(), "{what}");
        // Alone again, the other one finds what is there, and nothing that was.
        drop(a);
        assert_eq!(fs::read(b.path_of("f")).unwrap(), b"new", "{what}");
        fs::write(b.path_of("f"), "newest").unwrap();
        let c = PairedMount::new(fs.clone());
        assert_eq!(fs::read(c.path_of("f")).unwrap(), b"newest", "{what}");
        fs::write(c.path_of("f"), "last").unwrap();
        assert_eq!(fs::read(b.path_of("f")).unwrap(), b"last", "{what}");
    });
}
