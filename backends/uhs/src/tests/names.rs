//! Names and attributes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{
    Fh, File, FileKind, FileSystem, Ino, NoNotify, NormalPath, PathResolution, SetAttr, Shortcuts,
    SliceSource, WriteArgs, WriteBuf,
};

use super::{OPTIONS, contents, cx, make_fresh, name, node, open, random};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

fn make(fs: &Uhs, parent: Ino, text: &str, kind: FileKind) -> Ino {
    let made = match kind {
        FileKind::Directory => fs.mkdir(&cx(), parent, name(text), &node(kind)),
        FileKind::Symlink => fs.symlink(&cx(), parent, name(text), b"target", &node(kind)),
        _ => fs.mknod(&cx(), parent, name(text), &node(kind)),
    };
    let ino = made.unwrap().ino;
    fs.forget(ino, 1);
    ino
}

fn write(fs: &Uhs, ino: Ino, bytes: &[u8]) {
    let mut source = SliceSource::new(bytes);
    let file = File { ino, fh: Fh(0) };
    let taken = fs.write(&cx(), file, WriteArgs::default(), &mut WriteBuf::new(&mut source));
    assert_eq!(taken, Ok(bytes.len()));
}

#[test]
fn a_path_resolves_to_what_a_walk_finds() {
    let (fs, _) = open(make_fresh(), CommitRules::ALL);
    let upper = make(&fs, Ino::ROOT, "upper", FileKind::Directory);
    let lower = make(&fs, upper, "lower", FileKind::Directory);
    let file = make(&fs, lower, "file", FileKind::Regular);
    let link = make(&fs, upper, "link", FileKind::Symlink);
    let open = |ino: Ino, perm: u32| {
        let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
        fs.setattr(&cx(), ino, None, &set).unwrap();
    };
    open(upper, 0o755);
    open(lower, 0o755);
    let resolve = |path: &str| {
        fs.resolve(&cx(), Ino::ROOT, NormalPath::new(path.as_bytes()).unwrap()).unwrap()
    };
    let found = |ino: Ino, open_to_all: bool| {
        let attr = fs.getattr(&cx(), ino, None).unwrap();
        PathResolution::Inode { ino, attr, open_to_all }
    };
    assert_eq!(resolve("upper/lower/file"), found(file, true));
    assert_eq!(resolve("upper/link"), found(link, true));
    assert_eq!(resolve("upper"), found(upper, true));
    assert_eq!(resolve("upper/none"), PathResolution::Missing { open_to_all: true });
    assert_eq!(resolve("upper/link/file"), PathResolution::Walk);
    assert_eq!(resolve("upper/lower/file/more"), PathResolution::Walk);
    open(lower, 0o754);
    assert_eq!(resolve("upper/lower"), found(lower, true));
    assert_eq!(resolve("upper/lower/file"), found(file, false));
    assert_eq!(resolve("upper/lower/none"), PathResolution::Missing { open_to_all: false });
    fs.unlink(&cx(), lower, name("file")).unwrap();
    let path = NormalPath::new(b"file").unwrap();
    assert!(fs.resolve(&cx(), file, path).is_err());
}

#[test]
fn a_closed_file_is_read_again_and_keeps_its_data_when_only_its_attributes_change() {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let files: Vec<Ino> =
        (0..40).map(|at| make(&fs, Ino::ROOT, &at.to_string(), FileKind::Regular)).collect();
    let data = |at: usize| vec![at as u8; [100, 0, 5000][at % 3]];
    for (at, ino) in files.iter().enumerate() {
        write(&fs, *ino, &data(at));
    }
    let links: Vec<Ino> =
        (0..9).map(|at| make(&fs, Ino::ROOT, &format!("link{at}"), FileKind::Symlink)).collect();
    fs.syncfs(&cx()).unwrap();
    for ino in files.iter().chain(&links) {
        let set = SetAttr { uid: Some(7), ..SetAttr::default() };
        fs.setattr(&cx(), *ino, None, &set).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    let check_all = |fs: &Uhs| {
        for (at, ino) in files.iter().enumerate() {
            let attr = fs.getattr(&cx(), *ino, None).unwrap();
            assert_eq!((attr.uid, attr.size), (7, data(at).len() as u64));
            assert_eq!(contents(fs, *ino, attr.size), data(at), "file {at}");
        }
        links.iter().for_each(|ino| assert_eq!(fs.readlink(&cx(), *ino).unwrap(), b"target"));
    };
    check_all(&fs);
    drop(fs);
    check_all(&open(ram.clone(), CommitRules::ALL).0);
    let options = UhsOptions { read_only: true, ..OPTIONS };
    check_all(&Uhs::open(Arc::new(ram), options, random()).unwrap().0);
}

/// A group of everything that had piled up once needed more slots than there were.
#[test]
fn every_file_of_a_device_that_is_more_than_half_full_can_change_without_a_sync() {
    let ram = RamDevice::new(4096, 32 * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let files: Vec<Ino> =
        (0..9000).map(|at| make(&fs, Ino::ROOT, &at.to_string(), FileKind::Regular)).collect();
    for perm in [0o600, 0o640] {
        for ino in &files {
            let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
            fs.setattr(&cx(), *ino, None, &set).unwrap();
        }
    }
    assert_eq!(fs.syncfs(&cx()), Ok(()));
    drop(fs);
    let report = check(&(Arc::new(ram) as Arc<dyn BlockDevice>)).unwrap();
    assert_eq!((report.problems, report.inodes), (Vec::new(), 9001));
}

#[test]
fn after_a_power_failure_a_directory_is_not_older_than_its_newest_entry() {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let dir = make(&fs, Ino::ROOT, "dir", FileKind::Directory);
    fs.syncfs(&cx()).unwrap();
    let file = make(&fs, dir, "file", FileKind::Regular);
    let (before, made) = (fs.getattr(&cx(), dir, None).unwrap(), fs.getattr(&cx(), file, None));
    let born = made.unwrap().btime;
    assert!(before.mtime >= born.unwrap());
    let slots = |ram: &RamDevice| {
        let (fs, _) = open(ram.fork(), CommitRules::ALL);
        fs.getattr(&cx(), dir, None).unwrap()
    };
    // The slot of the file alone is written.
    fs.fsync(&cx(), File { ino: file, fh: Fh(0) }, false).unwrap();
    assert_eq!(Some(slots(&ram).mtime), born);
    assert_eq!(Some(slots(&ram).ctime), born);
    fs.syncfs(&cx()).unwrap();
    assert_eq!(slots(&ram).mtime, before.mtime);
}

#[test]
fn an_idle_mount_does_not_wake() {
    let options = UhsOptions { commit: Some(Duration::from_millis(20)), ..OPTIONS };
    let (fs, _) = Uhs::open(Arc::new(make_fresh()), options, random()).unwrap();
    fs.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    make(&fs, Ino::ROOT, "file", FileKind::Regular);
    let switches = || {
        let thread = |entry: std::fs::DirEntry| {
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
            let count = of("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok()?;
            (of("Name:")?.trim() == "uhs-commit").then_some(count)
        };
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks.filter_map(thread).sum::<u64>()
    };
    // The changes are committed, and then nothing happens: other tests have no such thread.
    let start = Instant::now();
    let mut before = switches();
    while start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(300));
        let now = switches();
        if now == before && now > 0 {
            return;
        }
        before = now;
    }
    panic!("the committing thread keeps waking");
}
