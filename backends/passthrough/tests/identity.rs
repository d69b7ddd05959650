//! An inode that a frontend knows never leads to a successor with its number, whatever user made
//! it.
//!
//! A user who could create files in the source of root's mount let the mount look a file up,
//! removed it, and opened by its name the private file that root made in the same tick of the
//! clock: number and birth time were equal, and the handle had no generation. ext3 gives a number
//! again at once.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{CredentialsPolicy, FileHandles, Passthrough, PassthroughOptions};

const SECRET: &[u8] = b"the secret of another user";

/// An image of a file system, mounted by a loop device.
struct MountedImage {
    dir: tempfile::TempDir,
}

impl MountedImage {
    /// Runs `make`, a command for the shell, with the path of an image of 32 MiB as $0, and mounts
    /// it. `None` without the means.
    fn new(make: &str, options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("at"));
        fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let run = |program: &str, args: &[&str], paths: &[&Path]| {
            let output = Command::new(program).args(args).args(paths).output();
            output.is_ok_and(|output| output.status.success())
        };
        if !run("sh", &["-c", make], &[&image]) {
            eprintln!("skipped: `{make}` fails");
            return None;
        }
        if !run("mount", &["-o", &format!("loop{options}")], &[&image, &at]) {
            eprintln!("skipped: an image cannot be mounted");
            return None;
        }
        Some(MountedImage { dir })
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("at")
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

const EXT3: &str = "mke2fs -q -t ext3 -I 256 \"$0\"";

/// Uses an inode by its number, and returns what it has shown.
type InodeUse = fn(&ServedDirectory, Ino) -> Result<Vec<u8>>;

/// The ways to open and change an inode.
const WAYS: [(&str, InodeUse); 5] = [
    ("open", |served, ino| {
        let file = served.open(ino, OpenFlags::RDWR)?;
        let bytes = served.read(file, 0, 100);
        served.release(file);
        bytes
    }),
    ("open to truncate", |served, ino| {
        let file = served.open(ino, OpenFlags::WRONLY | OpenFlags::TRUNC)?;
        served.release(file);
        Ok(Vec::new())
    }),
    ("setattr", |served, ino| {
        let change = SetAttr { size: Some(0), ..SetAttr::default() };
        served.fs.setattr(&own_context(), ino, None, &change).map(|_| Vec::new())
    }),
    ("getxattr", |served, ino| served.xattr(ino, "user.secret")),
    ("link", |served, ino| {
        let linked = served.fs.link(&own_context(), ino, Ino::ROOT, name("planted"));
        let found = fs::read(served.path("planted")).unwrap_or_default();
        let _ = fs::remove_file(served.path("planted"));
        linked.map(|_| found)
    }),
];

/// Makes the private file.
type FileStep = fn(&ServedDirectory);

/// The steps between the lookup of `old` and its use, after which root's private file may have its
/// number and birth time.
const STEPS: [(&str, FileStep); 4] = [
    ("elsewhere", |served| {
        fs::remove_file(served.path("old")).unwrap();
        make_secret(&served.path("private"));
    }),
    ("renamed to the old name", |served| {
        fs::remove_file(served.path("old")).unwrap();
        make_secret(&served.path("private"));
        fs::rename(served.path("private"), served.path("old")).unwrap();
    }),
    ("removed by the frontend", |served| {
        fs::remove_file(served.path("old")).unwrap();
        make_secret(&served.path("private"));
        fs::hard_link(served.path("private"), served.path("kept")).unwrap();
        served.fs.unlink(&own_context(), Ino::ROOT, name("private")).unwrap();
    }),
    ("replaced by the frontend", |served| {
        fs::remove_file(served.path("old")).unwrap();
        make_secret(&served.path("private"));
        fs::hard_link(served.path("private"), served.path("kept")).unwrap();
        fs::write(served.path("new"), b"").unwrap();
        let (from, to) = ((Ino::ROOT, name("new")), (Ino::ROOT, name("private")));
        served.fs.rename(&own_context(), from, to, RenameFlags::default()).unwrap();
    }),
];

fn make_secret(path: &Path) {
    fs::write(path, SECRET).unwrap();
    let value = rustix::fs::XattrFlags::empty();
    let _ = rustix::fs::setxattr(path, c"user.secret", SECRET, value);
}

/// The secret file, where the steps have left it.
fn secret(served: &ServedDirectory) -> Option<fs::Metadata> {
    let at = ["private", "old", "kept"].map(|text| served.path(text));
    at.iter().filter_map(|path| fs::metadata(path).ok()).find(|found| found.len() > 0)
}

fn identity(metadata: &fs::Metadata) -> (u64, Option<std::time::SystemTime>) {
    (metadata.ino(), metadata.created().ok())
}

#[test]
fn a_removed_inode_never_leads_to_its_successor() {
    if !is_root() {
        return;
    }
    let Some(image) = MountedImage::new(EXT3, "") else { return };
    let mut equal = 0;
    for file_handles in [FileHandles::Auto, FileHandles::Off] {
        for credentials in [CredentialsPolicy::Sticky, CredentialsPolicy::Restore] {
            let options = PassthroughOptions {
                file_handles,
                credentials,
                fd_cache: 1,
                ..PassthroughOptions::default()
            };
            let served = ServedDirectory::new(&image.path(), options);
            let other = served.mkdir(Ino::ROOT, "other");
            for (way, use_inode) in WAYS {
                for (step, replace) in STEPS {
                    for _ in 0..8 {
                        fs::write(served.path("old"), b"").unwrap();
                        let old = served.lookup("old").unwrap();
                        let before = fs::metadata(served.path("old")).unwrap();
                        // The cache has one descriptor.
                        served.fs.getattr(&own_context(), other.ino, None).unwrap();
                        replace(&served);
                        let successor = secret(&served).expect("a secret file");
                        equal += usize::from(identity(&before) == identity(&successor));
                        let shown = use_inode(&served, old.ino);
                        assert!(
                            shown.as_ref().is_ok_and(Vec::is_empty) || shown.is_err(),
                            "{way}, {step}, {file_handles:?}: {shown:?}"
                        );
                        let after = secret(&served);
                        assert!(
                            after.is_some_and(|after| after.nlink() <= successor.nlink()),
                            "{way}, {step}, {file_handles:?}: the secret is gone"
                        );
                        served.fs.forget(old.ino, 1);
                        for text in ["old", "private", "kept", "new"] {
                            let _ = fs::remove_file(served.path(text));
                        }
                    }
                }
            }
        }
    }
    eprintln!("{equal} of 640 successors have the number and birth time of the removed inode");
    assert!(equal > 0, "no number was given again within a tick");
}

#[test]
fn a_removed_directory_never_leads_to_its_successor() {
    if !is_root() {
        return;
    }
    let Some(image) = MountedImage::new(EXT3, "") else { return };
    for file_handles in [FileHandles::Auto, FileHandles::Off] {
        let options =
            PassthroughOptions { file_handles, fd_cache: 1, ..PassthroughOptions::default() };
        let served = ServedDirectory::new(&image.path(), options);
        let other = served.mkdir(Ino::ROOT, "other");
        for round in 0..100 {
            fs::create_dir(served.path("old")).unwrap();
            let old = served.lookup("old").unwrap();
            served.fs.getattr(&own_context(), other.ino, None).unwrap();
            fs::remove_dir(served.path("old")).unwrap();
            let private = served.path("private");
            fs::create_dir(&private).unwrap();
            fs::write(private.join("secret"), SECRET).unwrap();
            if round % 2 == 1 {
                fs::rename(&private, served.path("old")).unwrap();
            }
            let found = served.fs.lookup(&own_context(), old.ino, name("secret"));
            assert!(found.is_err(), "{found:?}");
            let listed = served.list(old.ino, 10, false).unwrap_or_default();
            assert!(listed.iter().all(|item| item.name != "secret"));
            let node = regular(&own_context(), 0o600);
            let planted = served.fs.mknod(&own_context(), old.ino, name("planted"), &node);
            assert!(planted.is_err(), "{planted:?}");
            served.fs.forget(old.ino, 1);
            let _ = fs::remove_dir_all(&private);
            let _ = fs::remove_dir_all(served.path("old"));
        }
    }
}

/// Inodes that a builder of images has made have generation 0, which ext4 takes for any.
#[test]
fn an_inode_of_generation_0_never_leads_to_its_successor() {
    if !is_root() {
        return;
    }
    for size in [128, 256] {
        let tree = tempfile::tempdir().unwrap();
        (0..50).for_each(|number| fs::write(tree.path().join(number.to_string()), b"").unwrap());
        let make = format!("mke2fs -q -t ext4 -I {size} -d '{}' \"$0\"", tree.path().display());
        let Some(image) = MountedImage::new(&make, "") else { return };
        let fs = Passthrough::new(
            &image.path(),
            PassthroughOptions { fd_cache: 1, ..PassthroughOptions::default() },
        );
        let fs = fs.unwrap();
        for number in 0..50 {
            let text = number.to_string();
            let path = image.path().join(&text);
            let old = fs.lookup(&own_context(), Ino::ROOT, name(&text)).unwrap();
            let opened = fs.open(&own_context(), old.ino, flags(OpenFlags::RDWR));
            let file = File { ino: old.ino, fh: opened.unwrap().fh };
            fs.release(&own_context(), file, ReleaseArgs::default()).unwrap();
            let ino = fs::metadata(&path).unwrap().ino();
            fs::remove_file(&path).unwrap();
            fs::write(image.path().join("private"), SECRET).unwrap();
            let successor = fs::metadata(image.path().join("private")).unwrap();
            let opened = fs.open(&own_context(), old.ino, flags(OpenFlags::RDWR));
            assert_eq!(opened.err(), Some(Errno::ESTALE), "{ino} and {}", successor.ino());
            fs::remove_file(image.path().join("private")).unwrap();
        }
    }
}

/// A handle with generation 0 was taken for one made of the number alone, and everything was
/// `ESTALE`.
#[test]
fn file_systems_whose_inodes_have_no_generation_are_served() {
    if !is_root() {
        return;
    }
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir(tree.path().join("dir")).unwrap();
    fs::write(tree.path().join("dir/file"), b"content").unwrap();
    let tree = tree.path().display();
    let without_births = "for f in /dir /dir/file; do \
        debugfs -w -R \"set_inode_field $f crtime 0\" \"$0\"; \
        debugfs -w -R \"set_inode_field $f crtime_extra 0\" \"$0\"; done";
    for (make, options) in [
        (format!("mksquashfs '{tree}' \"$0\" -quiet -noappend"), ",ro"),
        (format!("mke2fs -q -t ext2 -d '{tree}' \"$0\""), ""),
        (format!("mke2fs -q -t ext3 -I 128 -d '{tree}' \"$0\""), ""),
        (format!("mke2fs -q -t ext4 -d '{tree}' \"$0\""), ""),
        (format!("mke2fs -q -t ext4 -d '{tree}' \"$0\"; {without_births}"), ""),
    ] {
        let Some(image) = MountedImage::new(&make, options) else { continue };
        for file_handles in [FileHandles::Auto, FileHandles::Off] {
            let options =
                PassthroughOptions { file_handles, fd_cache: 1, ..PassthroughOptions::default() };
            let fs = Passthrough::new(&image.path(), options).unwrap();
            let dir = fs.lookup(&own_context(), Ino::ROOT, name("dir")).unwrap();
            let file = fs.lookup(&own_context(), dir.ino, name("file")).unwrap();
            assert_eq!(
                fs.lookup(&own_context(), dir.ino, name("file")).map(|e| e.ino),
                Ok(file.ino)
            );
            let opened = fs.open(&own_context(), file.ino, OpenArgs::default());
            assert!(opened.is_ok(), "{make}, {file_handles:?}: {opened:?}");
            assert!(fs.opendir(&own_context(), dir.ino, OpenFlags::default()).is_ok(), "{make}");
        }
    }
}
