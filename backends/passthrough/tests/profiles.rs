//! The effects of options.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{FileHandles, PassthroughOptions, SourceError};

#[test]
fn the_profile_of_stackfs_has_no_attributes_backing_files_or_handles() {
    let served = ServedDirectory::new(&bases()[0], PassthroughOptions::stackfs());
    assert!(!served.fs.uses_file_handles());
    let caps = served.fs.caps();
    assert!(!caps.xattrs && !caps.posix_acl && !caps.backing_files && caps.kill_suidgid);
    let (entry, file) = served.create("a");
    assert_eq!(served.xattr(entry.ino, "user.one"), Err(Errno::ENOSYS));
    let opened = served.fs.open(&own_context(), entry.ino, flags(OpenFlags::RDWR)).unwrap();
    assert!(opened.backing.is_none());
    assert_eq!(served.write_at(file, 0, b"x"), Ok(1));
}

#[test]
fn required_file_handles_that_do_not_work_are_an_error() {
    let options =
        PassthroughOptions { file_handles: FileHandles::On, ..PassthroughOptions::default() };
    let error = defuse_passthrough::Passthrough::new(Path::new("/proc/self"), options);
    assert!(matches!(error, Err(SourceError::NoFileHandles(..))), "{error:?}");
}

#[test]
fn an_exclusive_source_keeps_cached_pages() {
    let served = ServedDirectory::new(
        &bases()[0],
        PassthroughOptions { exclusive: true, ..PassthroughOptions::default() },
    );
    let (entry, _) = served.create("a");
    let opened = served.fs.open(&own_context(), entry.ino, flags(0)).unwrap();
    assert_eq!(opened.cache, CacheMode::Keep);
    assert!(served.fs.opendir(&own_context(), Ino::ROOT, OpenFlags::default()).unwrap().cache_dir);
}

#[test]
fn direct_io_reaches_the_lower_file() {
    run_everywhere(&PassthroughOptions::default(), |served| {
        let (entry, file) = served.create("a");
        served.write_at(file, 0, &[5; 8192]).unwrap();
        let direct = OpenFlags(OpenFlags::RDWR | OpenFlags::DIRECT);
        let opened = match served.fs.open(&own_context(), entry.ino, flags(direct.0)) {
            Err(Errno::EINVAL) => return eprintln!("not here: no O_DIRECT here"),
            other => other.unwrap(),
        };
        let file = File { ino: entry.ino, fh: opened.fh };
        let backing = opened.backing.unwrap().fd;
        let has_direct =
            || rustix::fs::fcntl_getfl(&backing).unwrap().contains(rustix::fs::OFlags::DIRECT);
        assert!(has_direct());
        let mut memory = vec![0_u8; 3 * 4096];
        let start = memory.as_ptr().align_offset(4096);
        let mut sink = SliceSink::new(&mut memory[start..start + 4096]);
        let mut out = ReadBuf::new(&mut sink, 4096);
        let args = ReadArgs { offset: 4096, flags: direct, lock_owner: None };
        assert_eq!(served.fs.read(&own_context(), file, args, &mut out), Ok(()));
        assert_eq!(out.filled_len(), 4096);
        assert_eq!(memory[start..start + 4096], [5; 4096]);
        // fcntl(2) has cleared it. Requests of others may still use the descriptor as it was.
        assert_eq!(served.read(file, 1, 3), Ok(vec![5; 3]));
        assert!(has_direct());
    });
}

#[test]
fn attributes_of_a_symbolic_link_are_its_own() {
    if !is_root() {
        return;
    }
    run_everywhere(&PassthroughOptions::default(), |served| {
        fs::write(served.path("target"), b"").unwrap();
        std::os::unix::fs::symlink("target", served.path("link")).unwrap();
        let link = served.lookup("link").unwrap();
        assert_eq!(served.set_xattr(link.ino, "trusted.t", b"link"), Ok(()));
        let target = served.lookup("target").unwrap();
        assert_eq!(served.xattr(target.ino, "trusted.t"), Err(Errno::ENODATA));
        assert_eq!(served.xattr(link.ino, "trusted.t"), Ok(b"link".to_vec()));
        assert_eq!(served.set_xattr(link.ino, "user.u", b"x"), Err(Errno::EPERM));
        let when = Timestamp { secs: 77, nanos: 0 };
        let set = SetAttr { uid: Some(1000), mtime: Some(SetTime::At(when)), ..SetAttr::default() };
        let attr = served.fs.setattr(&own_context(), link.ino, None, &set).unwrap();
        assert_eq!((attr.uid, attr.mtime, attr.kind), (1000, when, FileKind::Symlink));
        assert_eq!(served.fs.getattr(&own_context(), target.ino, None).unwrap().uid, 0);
    });
}

const FEW: &str = "DEFUSE_TEST_FEW";

/// The work of the next test.
#[test]
fn few_descriptors_child() {
    let Ok(base) = std::env::var(FEW) else { return };
    let options =
        PassthroughOptions { file_handles: FileHandles::Off, ..PassthroughOptions::default() };
    let served = ServedDirectory::new(Path::new(&base), options);
    for index in 0..300 {
        fs::write(served.path(&format!("f{index}")), b"").unwrap();
    }
    let looked_up = |index| served.lookup(&format!("f{index}"));
    let known: Vec<Entry> = (0..300).map_while(|index| looked_up(index).ok()).collect();
    assert!(known.len() > 64 && known.len() < 128, "the soft limit was raised to the hard one");
    assert_eq!(looked_up(299).err(), Some(Errno::EMFILE));
    // Known inodes still work, and a forget makes room.
    assert!(served.fs.getattr(&own_context(), known[0].ino, None).is_ok());
    served.fs.forget(known[0].ino, 1);
    assert!(looked_up(299).is_ok());
}

struct TempDirMount(tempfile::TempDir);

impl Drop for TempDirMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// Runs the test `child` of this program with 64 descriptors, and 128 if it raises the limit.
fn with_few_descriptors(child: &str, base: &Path) {
    let script = "ulimit -Sn 64 && ulimit -Hn 128 && exec \"$0\" --exact \"$1\" --nocapture";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg(child)
        .env(FEW, base)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// ramfs has no birth times, so every inode holds a descriptor there.
#[test]
fn running_out_of_descriptors_fails_only_the_lookup() {
    let dir = TempDirMount(tempfile::tempdir().unwrap());
    let flags = rustix::mount::MountFlags::empty();
    if rustix::mount::mount("none", dir.0.path(), "ramfs", flags, None).is_err() {
        return println!("skipped: no permission to mount");
    }
    with_few_descriptors("few_descriptors_child", dir.0.path());
}

/// The work of the next test.
#[test]
fn many_names_child() {
    let Ok(base) = std::env::var(FEW) else { return };
    let options =
        PassthroughOptions { file_handles: FileHandles::Off, ..PassthroughOptions::default() };
    let served = ServedDirectory::new(Path::new(&base), options);
    let (mut dirs, mut files) = (Vec::new(), Vec::new());
    let mut above = Ino::ROOT;
    for depth in 0..100 {
        // A chain, so that the path of a file is long.
        above = served.mkdir(above, &format!("dir{depth}")).ino;
        dirs.push(above);
        for number in 0..30 {
            let text = format!("file{number}");
            let node = regular(&own_context(), 0o600);
            files.push(served.fs.mknod(&own_context(), above, name(&text), &node).unwrap().ino);
        }
    }
    let st_ino = |ino| served.fs.getattr(&own_context(), ino, None).map(|attr| attr.st_ino);
    let before: Vec<u64> = files.iter().map(|ino| st_ino(*ino).unwrap()).collect();
    // The top of the chain, and a file, are renamed.
    let moved = |from: (Ino, &str), to: (Ino, &str)| {
        let (from, to) = ((from.0, name(from.1)), (to.0, name(to.1)));
        served.fs.rename(&own_context(), from, to, RenameFlags(0)).unwrap();
    };
    moved((Ino::ROOT, "dir0"), (Ino::ROOT, "moved"));
    moved((dirs[0], "file0"), (dirs[50], "moved"));
    for (ino, before) in files.iter().zip(&before) {
        assert_eq!(st_ino(*ino), Ok(*before));
        let file = served.open(*ino, OpenFlags::RDWR).unwrap();
        assert_eq!(served.write_at(file, 0, b"x"), Ok(1));
        served.release(file);
    }
    // A file with two names loses one, and then the other. Only without names it keeps a
    // descriptor.
    let pinned = || served.fs.stats().pinned_fds;
    // Inodes that were made just now are pinned until the clock ticks.
    std::thread::sleep(std::time::Duration::from_millis(11));
    served.fs.lifecycle().unwrap().trim();
    let only_the_root = pinned();
    for number in 0..1000 {
        let text = format!("other{number}");
        served.fs.link(&own_context(), files[2000 + number], dirs[99], name(&text)).unwrap();
        let (dir, own) = (dirs[(2000 + number) / 30], format!("file{}", (2000 + number) % 30));
        served.fs.unlink(&own_context(), dir, name(&own)).unwrap();
    }
    assert_eq!(pinned(), only_the_root);
    assert_eq!(st_ino(files[2000]), Ok(before[2000]));
    served.fs.unlink(&own_context(), dirs[99], name("other0")).unwrap();
    assert_eq!(pinned(), only_the_root + 1);
    assert_eq!(st_ino(files[2000]), Ok(before[2000]));
    // A file replaced on the source is not mistaken for the original.
    let way: std::path::PathBuf = (1..10).map(|depth| format!("dir{depth}")).collect();
    let path = served.path("moved").join(way).join("file7");
    fs::rename(&path, path.with_extension("away")).unwrap();
    fs::write(&path, b"another").unwrap();
    files[1000..2000].iter().for_each(|ino| assert!(st_ino(*ino).is_ok()));
    assert_eq!(st_ino(files[9 * 30 + 7]), Err(Errno::ESTALE));
    for ino in files.iter().chain(&dirs) {
        served.fs.forget(*ino, 9);
    }
    let stats = served.fs.stats();
    assert_eq!((stats.inodes, stats.pinned_fds, stats.open_files), (1, only_the_root, 0));
}

/// Without file handles every inode held a descriptor, so a user's own mount ended at the limit.
#[test]
fn without_file_handles_known_inodes_need_no_descriptor_each_either() {
    for base in bases() {
        with_few_descriptors("many_names_child", &base);
    }
}
