//! What the options change.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{FileHandles, Options, SourceError};

#[test]
fn the_profile_of_the_paper_has_no_attributes_backing_files_or_handles() {
    let served = Served::new(&bases()[0], Options::paper());
    assert!(!served.fs.uses_file_handles());
    let caps = served.fs.caps();
    assert!(!caps.xattrs && !caps.posix_acl && !caps.backing_files && caps.kill_suidgid);
    let (entry, file) = served.create("a");
    assert_eq!(served.xattr(entry.ino, "user.one"), Err(Errno::ENOSYS));
    let opened = served.fs.open(&me(), entry.ino, flags(OpenFlags::RDWR)).unwrap();
    assert!(opened.backing.is_none());
    assert_eq!(served.write_at(file, 0, b"x"), Ok(1));
}

#[test]
fn handles_that_are_asked_for_and_do_not_work_are_an_error() {
    let options = Options { file_handles: FileHandles::On, ..Options::default() };
    let error = defuse_passthrough::Passthrough::new(Path::new("/proc/self"), options);
    assert!(matches!(error, Err(SourceError::NoFileHandles(..))), "{error:?}");
}

#[test]
fn an_exclusive_source_keeps_what_is_cached() {
    let served = Served::new(&bases()[0], Options { exclusive: true, ..Options::default() });
    let (entry, _) = served.create("a");
    let opened = served.fs.open(&me(), entry.ino, flags(0)).unwrap();
    assert_eq!(opened.cache, CacheMode::Keep);
    assert!(served.fs.opendir(&me(), Ino::ROOT, OpenFlags::default()).unwrap().cache_dir);
}

#[test]
fn direct_io_reaches_the_lower_file() {
    everywhere(&Options::default(), |served| {
        let (entry, file) = served.create("a");
        served.write_at(file, 0, &[5; 8192]).unwrap();
        let direct = OpenFlags(OpenFlags::RDWR | OpenFlags::DIRECT);
        let opened = match served.fs.open(&me(), entry.ino, flags(direct.0)) {
            Err(Errno::EINVAL) => return eprintln!("not here: no O_DIRECT here"),
            other => other.unwrap(),
        };
        let file = File { ino: entry.ino, fh: opened.fh };
        let backing = opened.backing.unwrap();
        let has_direct =
            || rustix::fs::fcntl_getfl(&backing).unwrap().contains(rustix::fs::OFlags::DIRECT);
        assert!(has_direct());
        let mut memory = vec![0_u8; 3 * 4096];
        let start = memory.as_ptr().align_offset(4096);
        let mut sink = SliceSink::new(&mut memory[start..start + 4096]);
        let mut out = ReadBuf::new(&mut sink, 4096);
        let args = ReadArgs { offset: 4096, flags: direct, lock_owner: None };
        assert_eq!(served.fs.read(&me(), file, args, &mut out), Ok(()));
        assert_eq!(out.filled(), 4096);
        assert_eq!(memory[start..start + 4096], [5; 4096]);
        // fcntl(2) turned it off.
        assert_eq!(served.read(file, 1, 3), Ok(vec![5; 3]));
        assert!(!has_direct());
    });
}

#[test]
fn attributes_of_a_symbolic_link_are_its_own() {
    if !is_root() {
        return;
    }
    everywhere(&Options::default(), |served| {
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
        let attr = served.fs.setattr(&me(), link.ino, None, &set).unwrap();
        assert_eq!((attr.uid, attr.mtime, attr.kind), (1000, when, FileKind::Symlink));
        assert_eq!(served.fs.getattr(&me(), target.ino, None).unwrap().uid, 0);
    });
}

const FEW: &str = "DEFUSE_TEST_FEW";

/// The work of the test after it.
#[test]
fn few_descriptors_child() {
    let Ok(base) = std::env::var(FEW) else { return };
    let options = Options { file_handles: FileHandles::Off, ..Options::default() };
    let served = Served::new(Path::new(&base), options);
    for index in 0..300 {
        fs::write(served.path(&format!("f{index}")), b"").unwrap();
    }
    let looked_up = |index| served.lookup(&format!("f{index}"));
    let known: Vec<Entry> = (0..300).map_while(|index| looked_up(index).ok()).collect();
    assert!(known.len() > 64 && known.len() < 128, "the soft limit was raised to the hard one");
    assert_eq!(looked_up(299).err(), Some(Errno::EMFILE));
    // What is known still works, and forgetting makes room.
    assert!(served.fs.getattr(&me(), known[0].ino, None).is_ok());
    served.fs.forget(known[0].ino, 1);
    assert!(looked_up(299).is_ok());
}

#[test]
fn running_out_of_descriptors_ends_nothing_but_the_lookup() {
    let script = "ulimit -Sn 64 && ulimit -Hn 128 && exec \"$0\" --exact few_descriptors_child";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .env(FEW, &bases()[0])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}
