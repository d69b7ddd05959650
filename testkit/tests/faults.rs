//! Faults below, beside and inside a mount, which it must survive.
//!
//! `DEFUSE_FULL=1` runs ten thousand mounts and a million files instead of two hundred and a
//! hundred thousand.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::Errno;
use defuse_fs::layer::{FaultAction, FaultLayer, FaultRule, FaultTrigger, Method};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{IoUring, Session, SessionOptions};
use defuse_memory::MemoryFileSystem;
use defuse_testkit::mounted::{self, Ext4Mount, ServedMount, scratch};

fn full() -> bool {
    std::env::var_os("DEFUSE_FULL").is_some()
}

fn passthrough(source: &Path) -> std::ffi::OsString {
    let mut text = std::ffi::OsString::from("passthrough:");
    text.push(source);
    text
}

/// A test in an empty directory.
type DirectoryTest = fn(&Path);

/// One test, because they count the descriptors, threads and mounts of this process and compare
/// times.
#[test]
fn faults_are_survived() {
    if let Some(reason) = mounted::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    // Built first, so that no time below includes compiling.
    mounted::program().unwrap();
    let tests: [(&str, DirectoryTest); 9] = [
        ("a killed server", a_killed_server_gives_errors_and_can_be_replaced),
        ("many mounts in this process", many_sessions_leave_nothing_behind),
        ("many mounts by the program", many_mounts_leave_nothing_behind),
        ("no space below", a_full_disk_below_is_reported_and_recovered_from),
        ("files removed below", files_removed_below_are_not_held_for_long),
        ("errors below", errors_of_the_file_system_arrive_and_end),
        ("few descriptors", running_out_of_descriptors_is_survived),
        ("many inodes", many_inodes_need_few_descriptors_and_little_memory),
        ("stale attributes", truncating_creation_shows_the_new_size),
    ];
    for (name, test) in tests {
        let begun = Instant::now();
        let place = scratch().unwrap();
        test(place.path());
        println!("{name}: {:.1?}", begun.elapsed());
        assert_eq!(mounts_below(place.path()), 0, "{name}: mounts are left");
    }
}

fn mounts_below(place: &Path) -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.contains(place.to_str().unwrap())).count()
}

fn source(place: &Path) -> PathBuf {
    let source = place.join("source");
    fs::create_dir_all(&source).unwrap();
    source
}

fn a_killed_server_gives_errors_and_can_be_replaced(place: &Path) {
    let source = source(place);
    let mut mount = ServedMount::new(&passthrough(&source), place, &[]).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let dir = mount.path().to_path_buf();
    let work = |number: u32| {
        for turn in 0.. {
            let path = dir.join(format!("{number}-{turn}"));
            let one = || -> std::io::Result<()> {
                fs::write(&path, b"content")?;
                fs::metadata(&path)?;
                fs::read_dir(&dir)?.next();
                (fs::read(&path)? == b"content").then_some(()).ok_or(ErrorKind::InvalidData.into())
            };
            match one() {
                Ok(()) => written.fetch_add(1, Ordering::Relaxed),
                Err(error) => return error,
            };
            if stop.load(Ordering::Relaxed) {
                return ErrorKind::Other.into();
            }
        }
        unreachable!()
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|number| scope.spawn(move || work(number))).collect();
        std::thread::sleep(Duration::from_millis(300));
        mount.kill().unwrap();
        let begun = Instant::now();
        while !workers.iter().all(|worker| worker.is_finished()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "callers hang");
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            let error = worker.join().unwrap();
            // ECANCELED: a ring had the request, and its thread had not yet taken it.
            let known =
                [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED, libc::EIO, libc::ENODEV];
            assert!(error.raw_os_error().is_some_and(|e| known.contains(&e)), "{error:?}");
        }
    });
    drop(mount);
    let mount = ServedMount::new(&passthrough(&source), place, &[]).unwrap();
    let kept = fs::read_dir(mount.path()).unwrap().count() as u64;
    assert!(kept >= written.load(Ordering::Relaxed) && kept > 0, "{kept} of {written:?}");
    mount.end().unwrap();
}

/// Number of descriptors, threads and resident KiB of a process.
fn count_held(pid: &str) -> (usize, usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    (count("fd"), count("task"), rss.trim().trim_end_matches(" kB").parse().unwrap())
}

fn serve_in_process(dir: &Path, fs: Arc<dyn defuse_fs::FileSystem>) -> Session {
    fs::create_dir_all(dir).unwrap();
    let mounted = mount::mount(dir, &MountOptions::default()).unwrap();
    let over_rings = std::env::var_os("DEFUSE_TRANSPORT").is_some_and(|name| name == "io_uring");
    let io_uring = if over_rings { IoUring::Required } else { IoUring::Off };
    let options = SessionOptions { io_uring, ..SessionOptions::default() };
    Session::start(mounted.device, fs, &options).unwrap()
}

fn many_sessions_leave_nothing_behind(place: &Path) {
    let dir = place.join("mnt");
    let once = || {
        let session = serve_in_process(
            &dir,
            Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default())),
        );
        fs::write(dir.join("a"), b"content").unwrap();
        assert_eq!(fs::read(dir.join("a")).unwrap(), b"content");
        mount::unmount(&dir, false).unwrap();
        assert!(session.wait().clean);
    };
    // One-time allocations are not a leak.
    (0..20).for_each(|_| once());
    let before = count_held("self");
    (0..if full() { 10_000 } else { 200 }).for_each(|_| once());
    let after = count_held("self");
    assert_eq!((after.0, after.1), (before.0, before.1), "descriptors and threads");
    assert!(after.2 < before.2 + 8192, "{} KiB became {} KiB", before.2, after.2);
}

fn many_mounts_leave_nothing_behind(place: &Path) {
    let source = source(place);
    let before = count_held("self");
    for turn in 0..if full() { 1000 } else { 100 } {
        let what = if turn % 2 == 0 { passthrough(&source) } else { "memory:".into() };
        let mount = ServedMount::new(&what, place, &[]).unwrap();
        fs::write(mount.path().join("a"), b"content").unwrap();
        mount.end().unwrap();
    }
    assert_eq!(count_held("self").0, before.0);
    let registry = place.join("run");
    let left: Vec<_> = fs::read_dir(&registry).map_or(Vec::new(), |dir| dir.collect());
    assert!(left.is_empty(), "{left:?} is left in the registry");
}

/// A file stays open for a short time after reading, in the server and as the kernel's backing
/// file.
fn files_removed_below_are_not_held_for_long(place: &Path) {
    const LEN: u64 = 4 << 20;
    for args in [&[][..], &["-o", "no_passthrough"]] {
        let lower = Ext4Mount::new(&place.join("held"), 16 << 20, 1000).unwrap();
        let mount = ServedMount::new(&passthrough(lower.path()), place, args).unwrap();
        for through_us in [true, false] {
            fs::write(lower.path().join("file"), vec![7; LEN as usize]).unwrap();
            let path = mount.path().join("file");
            for _ in 0..3 {
                File::open(&path).unwrap().read_exact(&mut [0; 100]).unwrap();
            }
            rustix::fs::sync();
            let before = free_bytes(lower.path());
            let parent = if through_us { mount.path() } else { lower.path() };
            fs::remove_file(parent.join("file")).unwrap();
            wait_for_space(lower.path(), before + LEN / 2);
        }
    }
}

fn free_bytes(dir: &Path) -> u64 {
    let stat = rustix::fs::statvfs(dir).unwrap();
    stat.f_bfree * stat.f_frsize
}

/// A removed file is held until the server has handled its FORGET, for which no caller waits.
fn wait_for_space(dir: &Path, bytes: u64) {
    let begun = Instant::now();
    while free_bytes(dir) < bytes {
        assert!(begun.elapsed() < Duration::from_secs(20), "its space is not free");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn a_full_disk_below_is_reported_and_recovered_from(place: &Path) {
    for args in [&[][..], &["-o", "writeback"], &["-o", "no_passthrough"]] {
        let lower = Ext4Mount::new(&place.join("small"), 16 << 20, 1000).unwrap();
        let mount = ServedMount::new(&passthrough(lower.path()), place, args).unwrap();
        let mut kept = Vec::new();
        let error = (0..).find_map(|number: u32| {
            let (path, bytes) = (format!("f{number}"), vec![number as u8; 100_000]);
            let write = || -> std::io::Result<()> {
                let mut file = File::create(mount.path().join(&path))?;
                file.write_all(&bytes)?;
                file.sync_all()
            };
            assert!(number < 1000, "16 MiB take 100 MB");
            match write() {
                Ok(()) => kept.push((path, bytes)),
                Err(error) => return Some(error),
            }
            None
        });
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error} with {args:?}");
        assert!(kept.len() > 20, "only {} files with {args:?}", kept.len());
        for dir in [mount.path(), lower.path()] {
            for (name, bytes) in &kept {
                let read = fs::read(dir.join(name)).unwrap();
                assert_eq!(read.len(), bytes.len(), "{name} in {} with {args:?}", dir.display());
                assert!(read == *bytes, "{name} in {} with {args:?}", dir.display());
            }
        }
        for (name, _) in &kept[..20] {
            fs::remove_file(mount.path().join(name)).unwrap();
        }
        wait_for_space(lower.path(), 10 * 100_000);
        let again = mount.path().join("again");
        fs::write(&again, vec![7; 500_000]).unwrap();
        File::open(&again).unwrap().sync_all().unwrap();
        assert_eq!(fs::read(lower.path().join("again")).unwrap(), vec![7; 500_000]);
        mount.end().unwrap();
    }
}

fn errors_of_the_file_system_arrive_and_end(place: &Path) {
    let dir = place.join("mnt");
    let memory = MemoryFileSystem::new(defuse_memory::MemoryOptions::default());
    let fault = Arc::new(FaultLayer::new(memory, 1));
    let session = serve_in_process(&dir, Arc::clone(&fault) as Arc<dyn defuse_fs::FileSystem>);
    let rule = |method, errno| FaultRule {
        method: Some(method),
        when: FaultTrigger::Always,
        action: FaultAction::Fail(errno),
    };
    fs::write(dir.join("a"), b"content").unwrap();
    let file = File::options().read(true).write(true).open(dir.join("a")).unwrap();
    fault.set_rules(&[rule(Method::Write, Errno::EIO), rule(Method::Fsync, Errno::EIO)]);
    for error in [file.write_at(b"x", 0).unwrap_err(), file.sync_all().unwrap_err()] {
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    fault.set_rules(&[rule(Method::Lookup, Errno::EIO), rule(Method::Readdir, Errno::EIO)]);
    assert!(
        fs::metadata(dir.join("b")).is_err()
            && fs::read_dir(&dir).unwrap().next().unwrap().is_err()
    );
    fault.set_rules(&[FaultRule {
        method: None,
        when: FaultTrigger::Always,
        action: FaultAction::Panic,
    }]);
    assert!(fs::create_dir(dir.join("d")).is_err());
    fault.set_rules(&[]);
    fs::create_dir(dir.join("d")).unwrap();
    let mut read = String::new();
    file.try_clone().unwrap().read_to_string(&mut read).unwrap();
    assert_eq!(read, "content");
    drop(file);
    mount::unmount(&dir, false).unwrap();
    fault.set_rules(&[rule(Method::Syncfs, Errno::ENOSPC)]);
    let ended = session.wait();
    assert_eq!((ended.clean, ended.durable), (true, Err(Errno::ENOSPC)));
}

fn running_out_of_descriptors_is_survived(place: &Path) {
    let source = source(place);
    (0..500).for_each(|number| fs::write(source.join(format!("f{number}")), b"content").unwrap());
    let few = ["prlimit", "--nofile=64:64"];
    for args in [&[][..], &["-o", "handles=off"]] {
        let mount = ServedMount::mount_under(&few, &passthrough(&source), place, args).unwrap();
        let mut open = Vec::new();
        let error = (0..500).find_map(|number| {
            let file = File::open(mount.path().join(format!("f{number}")));
            file.map(|file| open.push(file)).err()
        });
        let error = error.expect("64 descriptors cannot hold 500 files");
        assert!([libc::EMFILE, libc::ENFILE].contains(&error.raw_os_error().unwrap()), "{error}");
        assert!(open.len() > 10, "only {} with {args:?}", open.len());
        for file in &mut open {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "content");
        }
        drop(open);
        // Without file handles a known inode holds its descriptor until the kernel forgets it,
        // which it does not before the file is released.
        let works = || fs::write(mount.path().join("new"), b"x").is_ok();
        assert!((0..100).any(|_| {
            fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
            std::thread::sleep(Duration::from_millis(10));
            works()
        }));
        mount.end().unwrap();
    }
}

fn many_inodes_need_few_descriptors_and_little_memory(place: &Path) {
    let (dirs, per_dir) = if full() { (1000, 1000) } else { (100, 1000) };
    let files = dirs * per_dir;
    let lower =
        Ext4Mount::new(&place.join("lower"), 16 << 30, files as u64 * 11 / 10 + 5000).unwrap();
    for dir in 0..dirs {
        let path = lower.path().join(format!("d{dir}"));
        fs::create_dir(&path).unwrap();
        (0..per_dir).for_each(|file| drop(File::create(path.join(format!("f{file}"))).unwrap()));
    }
    let few = ["prlimit", "--nofile=1024:1024"];
    let mount = ServedMount::mount_under(&few, &passthrough(lower.path()), place, &[]).unwrap();
    let pid = mount.pid().to_string();
    let (before, begun) = (count_held(&pid), Instant::now());
    let (mut seen, mut most) = (0, 0);
    for dir in fs::read_dir(mount.path()).unwrap() {
        let dir = dir.unwrap();
        if dir.file_name() == "lost+found" {
            continue;
        }
        for file in fs::read_dir(dir.path()).unwrap() {
            assert_eq!(file.unwrap().metadata().unwrap().len(), 0);
            seen += 1;
        }
        most = most.max(count_held(&pid).0);
    }
    let (took, after) = (begun.elapsed(), count_held(&pid));
    assert_eq!(seen, files);
    assert!(most <= 1024);
    let per_inode = (after.2 - before.2) * 1024 / files;
    println!("{files} files: {took:.1?}, {most} descriptors, {per_inode} bytes of RSS per inode");
    assert!(per_inode < 600, "{per_inode} bytes of memory for each inode");
    mount.end().unwrap();
}

/// The entry of a truncating create was once outdated, and the size was then cached.
fn truncating_creation_shows_the_new_size(place: &Path) {
    let source = source(place);
    for (what, args) in [(passthrough(&source), &[][..]), ("memory:".into(), &["-o", "writeback"])]
    {
        let mount = ServedMount::new(&what, place, args).unwrap();
        let path = mount.path().join("a");
        for turn in 0..50 {
            fs::write(&path, vec![1; 5000]).unwrap();
            let file = File::create(&path).unwrap();
            assert_eq!(file.metadata().unwrap().size(), 0, "turn {turn}");
            assert_eq!(fs::metadata(&path).unwrap().size(), 0, "turn {turn}");
        }
        mount.end().unwrap();
    }
}
