//! A passthrough of each kind of file system: every operation has the result that it has in the
//! source itself.
//!
//! Everything was `ESTALE` on squashfs and on images that a builder had made, whose inodes have
//! neither generations nor birth times. Other kinds differ as much: in handles, birth times,
//! numbers, and in what they can do at all.

mod common;

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{TestPlace, eventually_or};
use rustix::fs::{AtFlags, CWD, RenameFlags, XattrFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A kind of file system.
struct LowerSource {
    name: &'static str,
    /// Its name in /proc/filesystems.
    driver: &'static str,
    /// A shell command that makes the image "$0" with the files of "$1"; empty without an image.
    make: &'static str,
    is_writable: bool,
}

const fn kind(
    name: &'static str,
    driver: &'static str,
    make: &'static str,
    is_writable: bool,
) -> LowerSource {
    LowerSource { name, driver, make, is_writable }
}

const KINDS: [LowerSource; 15] = [
    kind("squashfs", "squashfs", "mksquashfs \"$1\" \"$0\" -quiet -noappend", false),
    kind("erofs", "erofs", "rm \"$0\"; mkfs.erofs --quiet \"$0\" \"$1\"", false),
    kind("iso9660", "iso9660", "genisoimage -quiet -R -o \"$0\" \"$1\"", false),
    kind("ext2 of a builder", "ext2", "mke2fs -q -t ext2 -I 128 -d \"$1\" \"$0\"", true),
    kind("ext4 of a builder", "ext4", "mke2fs -q -t ext4 -d \"$1\" \"$0\"", true),
    kind("ext3 with short inodes", "ext3", "mke2fs -q -t ext3 -I 128 \"$0\"", true),
    kind("ext4", "ext4", "mke2fs -q -t ext4 \"$0\"", true),
    kind("btrfs", "btrfs", "truncate -s 128M \"$0\"; mkfs.btrfs -q \"$0\"", true),
    kind("xfs", "xfs", "truncate -s 320M \"$0\"; mkfs.xfs -q \"$0\"", true),
    kind("f2fs", "f2fs", "truncate -s 64M \"$0\"; mkfs.f2fs -q \"$0\"", true),
    kind("vfat", "vfat", "mkfs.vfat \"$0\"", true),
    kind("tmpfs", "tmpfs", "", true),
    kind("ramfs", "ramfs", "", true),
    kind("overlay", "overlay", "", true),
    kind("fuse", "fuse", "", true),
];

/// The options of the served mount. Each leads to inodes and data in another way.
const OPTIONS: [&str; 3] = ["rw", "handles=off,no_passthrough", "writeback,exclusive"];

/// The mounted source, which is unmounted when dropped.
struct SourceMount<'a> {
    place: &'a TestPlace,
    kind: &'a LowerSource,
    mounted: Vec<PathBuf>,
}

impl<'a> SourceMount<'a> {
    /// Makes a file system of this kind and mounts it on `src`. `None` without the means.
    fn new(place: &'a TestPlace, kind: &'a LowerSource) -> Option<Self> {
        let tree = place.path("tree");
        if !tree.exists() {
            make_tree(&tree);
        }
        if !kind.make.is_empty() {
            let image = place.path("image");
            fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
            let make = format!("set -e; {}", kind.make);
            let made = Command::new("sh").args(["-c", &make]).args([&image, &tree]).output();
            let made = made.unwrap();
            if !made.status.success() {
                let said = String::from_utf8_lossy(&made.stderr);
                println!("skipped: no image of {}: {}", kind.name, said.trim());
                return None;
            }
        }
        let mut source = SourceMount { place, kind, mounted: Vec::new() };
        source.mount()?;
        if kind.is_writable && !place.path("src/tree").exists() {
            make_tree(&place.path("src/tree"));
        }
        Some(source)
    }

    fn mount(&mut self) -> Option<()> {
        let at = self.place.path("src");
        let none = MountFlags::empty();
        match self.kind.driver {
            "overlay" => {
                let layers = self.place.path("layers");
                let _ = fs::create_dir(&layers);
                if self.mounted.is_empty() {
                    mount("layers", &layers, "tmpfs", none, None).unwrap();
                    ["lower", "upper", "work"]
                        .iter()
                        .for_each(|name| fs::create_dir(layers.join(name)).unwrap());
                    make_tree(&layers.join("lower/tree"));
                    self.mounted.push(layers.clone());
                }
                let text = layers.display();
                let text =
                    format!("lowerdir={text}/lower,upperdir={text}/upper,workdir={text}/work");
                mount("o", &at, "overlay", none, Some(&*std::ffi::CString::new(text).unwrap()))
                    .unwrap();
            }
            "fuse" => {
                drop(self.place.expect_success(&["mount", "memory:", "src", "-o", "nonempty"]))
            }
            driver if self.kind.make.is_empty() => mount(driver, &at, driver, none, None).unwrap(),
            driver => {
                let options = if self.kind.is_writable { "loop" } else { "loop,ro" };
                let mut mount = Command::new("mount");
                mount.args(["-t", driver, "-o", options]).arg(self.place.path("image")).arg(&at);
                let said = mount.output().unwrap();
                let drivers = fs::read_to_string("/proc/filesystems").unwrap();
                if !drivers.split_whitespace().any(|known| known == driver) {
                    println!("not here: this kernel has no {driver}");
                    return None;
                }
                assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
            }
        }
        self.mounted.push(at);
        Some(())
    }

    /// Unmounts and mounts what lasts.
    fn mount_again(&mut self) {
        if ["tmpfs", "ramfs", "fuse"].contains(&self.kind.driver) {
            return;
        }
        let at = self.mounted.pop().unwrap();
        eventually_or(
            || format!("{}: unmounted", self.kind.name),
            || unmount(&at, UnmountFlags::empty()).is_ok(),
        );
        self.mount().unwrap();
    }
}

impl Drop for SourceMount<'_> {
    fn drop(&mut self) {
        for at in self.mounted.iter().rev() {
            let _ = unmount(at, UnmountFlags::DETACH);
        }
    }
}

/// The files that each file system has.
fn make_tree(at: &Path) {
    fs::create_dir_all(at.join("dir/deep")).unwrap();
    fs::write(at.join("file"), "one").unwrap();
    fs::write(at.join("dir/deep/large"), vec![b'x'; 300_000]).unwrap();
    for number in 0..100 {
        fs::write(at.join("dir").join(format!("name-{number}")), number.to_string()).unwrap();
    }
    let _ = symlink("file", at.join("link"));
    let _ = fs::hard_link(at.join("file"), at.join("hard"));
}

/// An operation in a directory, and what it shows.
type TreeStep = fn(&Path) -> io::Result<String>;

/// The operations that read.
const LOOKS: [(&str, TreeStep); 6] = [
    ("names", |at| names(&at.join("dir"))),
    ("attributes", |at| {
        let stat = fs::symlink_metadata(at.join("file"))?;
        Ok(format!("{:o} {} {} {}", stat.mode(), stat.nlink(), stat.size(), stat.mtime()))
    }),
    ("data", |at| fs::read_to_string(at.join("file"))),
    ("large", |at| Ok(format!("{:?}", crc32c::crc32c(&fs::read(at.join("dir/deep/large"))?)))),
    ("link", |at| Ok(fs::read_link(at.join("link"))?.display().to_string())),
    ("absent", |at| fs::read_to_string(at.join("dir/absent"))),
];

fn names(at: &Path) -> io::Result<String> {
    let names = fs::read_dir(at)?.map(|entry| Ok(entry?.file_name().into_string().unwrap()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names.join(" "))
}

/// The operations that change, in this order.
const CHANGES: [(&str, TreeStep); 17] = [
    ("create", |at| fs::write(at.join("new"), "new").map(|()| String::new())),
    ("append", |at| {
        OpenOptions::new().append(true).open(at.join("new"))?.write_all(b" and more")?;
        fs::read_to_string(at.join("new"))
    }),
    ("overwrite", |at| {
        OpenOptions::new().write(true).open(at.join("file"))?.write_at(b"ON", 0)?;
        fs::read_to_string(at.join("file"))
    }),
    ("truncate", |at| {
        OpenOptions::new().write(true).open(at.join("new"))?.set_len(5)?;
        fs::read_to_string(at.join("new"))
    }),
    ("mkdir", |at| {
        fs::create_dir(at.join("made"))?;
        fs::write(at.join("made/file"), "made")?;
        names(at)
    }),
    ("rename", |at| fs::rename(at.join("new"), at.join("made/renamed")).and_then(|()| names(at))),
    ("rename over", |at| {
        fs::rename(at.join("made/renamed"), at.join("made/file"))?;
        fs::read_to_string(at.join("made/file"))
    }),
    ("rename a directory", |at| {
        fs::rename(at.join("made"), at.join("dir/made"))?;
        fs::read_to_string(at.join("dir/made/file"))
    }),
    ("exchange", |at| {
        let [one, other] = ["file", "dir/made/file"].map(|name| at.join(name));
        rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?;
        fs::read_to_string(at.join("file"))
    }),
    ("rename over a full directory", |at| {
        fs::create_dir(at.join("empty"))?;
        fs::rename(at.join("empty"), at.join("dir")).and_then(|()| names(at))
    }),
    ("link", |at| {
        fs::hard_link(at.join("file"), at.join("linked"))?;
        OpenOptions::new().append(true).open(at.join("linked"))?.write_all(b" by the link")?;
        let text = fs::read_to_string(at.join("file"))?;
        Ok(format!("{text} {}", fs::metadata(at.join("file"))?.nlink()))
    }),
    ("link of a hard link", |at| {
        fs::hard_link(at.join("hard"), at.join("third"))?;
        OpenOptions::new().append(true).open(at.join("third"))?.write_all(b" by the third")?;
        fs::read_to_string(at.join("hard"))
    }),
    ("symlink", |at| {
        symlink("dir/made", at.join("to"))?;
        names(&at.join("to"))
    }),
    ("attributes", |at| {
        fs::set_permissions(at.join("file"), fs::Permissions::from_mode(0o640))?;
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 0);
        fs::File::open(at.join("file"))?.set_modified(time)?;
        let stat = fs::metadata(at.join("file"))?;
        Ok(format!("{:o} {} {}", stat.mode(), stat.mtime(), stat.mtime_nsec()))
    }),
    ("extended attributes", |at| {
        let path = at.join("file");
        rustix::fs::setxattr(&path, c"user.a", b"value", XattrFlags::CREATE)?;
        let mut value = [0; 100];
        let read = rustix::fs::getxattr(&path, c"user.a", &mut value)?;
        rustix::fs::removexattr(&path, c"user.a")?;
        let gone = rustix::fs::getxattr(&path, c"user.a", &mut [0; 100]).unwrap_err();
        Ok(format!("{:?} {gone:?}", &value[..read]))
    }),
    ("remove an open file", |at| {
        let path = at.join("dir/name-7");
        let mut open = OpenOptions::new().read(true).write(true).open(&path)?;
        fs::remove_file(&path)?;
        open.write_all(b"still")?;
        open.seek(SeekFrom::Start(0))?;
        let mut text = String::new();
        open.read_to_string(&mut text)?;
        Ok(format!("{text} {}", rustix::fs::statat(CWD, &path, AtFlags::empty()).is_err()))
    }),
    ("remove", |at| {
        fs::remove_dir_all(at.join("dir/made"))?;
        fs::remove_file(at.join("dir/name-8"))?;
        let full = fs::remove_dir(at.join("dir")).unwrap_err().raw_os_error();
        Ok(format!("{full:?} {}", names(&at.join("dir"))?))
    }),
];

/// The results of all steps, with the numbers of errors.
fn results(steps: &[(&str, TreeStep)], at: &Path) -> Vec<String> {
    let result = |(step, run): &(&str, TreeStep)| match run(at) {
        Ok(shown) => format!("{step}: {shown}"),
        Err(error) => format!("{step}: error {:?}", error.raw_os_error()),
    };
    steps.iter().map(result).collect()
}

fn assert_equal(what: &str, found: &[String], native: &[String]) {
    for (found, native) in found.iter().zip(native) {
        assert_eq!(found, native, "{what}: on the mount and in the source");
    }
}

/// A tree in the source, with times that do not depend on this moment.
fn new_tree(place: &TestPlace, name: &str) -> PathBuf {
    let at = place.path("src").join(name);
    make_tree(&at);
    let time = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 0);
    fs::File::open(at.join("file")).unwrap().set_modified(time).unwrap();
    at
}

#[test]
fn each_kind_of_file_system_is_served_as_it_is() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for kind in &KINDS {
        let Some(mut source) = SourceMount::new(&place, kind) else { continue };
        for options in OPTIONS {
            let what = format!("{}, {options}", kind.name);
            // Images of builders have the files at their root, too.
            let below = if kind.is_writable { "tree" } else { "" };
            let base = |name: &str| place.path(name).join(below);
            place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
            let looks = || results(&LOOKS, &base("mnt"));
            let native = results(&LOOKS, &base("src"));
            assert_equal(&what, &looks(), &native);
            // A directory that is open keeps its inode.
            let open = fs::File::open(base("mnt").join("dir/deep")).unwrap();
            fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
            assert_equal(&format!("{what}, after the caches"), &looks(), &native);
            assert!(open.metadata().unwrap().is_dir(), "{what}");
            drop(open);
            if kind.is_writable {
                let (inside, outside) = (new_tree(&place, "inside"), new_tree(&place, "outside"));
                let served = place.path("mnt/inside");
                let native = results(&CHANGES, &outside);
                assert_equal(&what, &results(&CHANGES, &served), &native);
                let looks = [&served, &inside, &outside].map(|at| results(&LOOKS, at));
                assert_equal(&what, &looks[0], &looks[2]);
                place.expect_success(&["umount", "mnt"]);
                assert_equal(&what, &results(&LOOKS, &inside), &looks[2]);
                [inside, outside].iter().for_each(|at| fs::remove_dir_all(at).unwrap());
            } else {
                let native = results(&CHANGES, &base("src"));
                assert_equal(&what, &results(&CHANGES, &base("mnt")), &native);
                place.expect_success(&["umount", "mnt"]);
            }
            source.mount_again();
        }
        drop(source);
        println!("{}: served", kind.name);
    }
}
