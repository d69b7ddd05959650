//! The source is an overlay, whose files change their numbers when they are copied to the upper
//! layer.
//!
//! After link(2), the two names of such a file were two inodes, each with pages of its own. Hard
//! links of a lower layer have one number and are different files once one is changed: a write to
//! one name went to the file of the other.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::*;
use defuse_fs::*;
use defuse_passthrough::PassthroughOptions;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// An overlay, and the file systems of its layers.
struct OverlayMount {
    dir: tempfile::TempDir,
    mounted: Vec<PathBuf>,
}

impl OverlayMount {
    /// `lower` and `upper` are types of file systems; the layers are on one if `upper` is empty.
    /// `None` without the means.
    fn new(lower: &str, upper: &str, options: &str) -> Option<OverlayMount> {
        let dir = tempfile::tempdir().unwrap();
        let mut made = OverlayMount { dir, mounted: Vec::new() };
        let at = |name: &str| made.dir.path().join(name);
        let (one, other, merged) = (at("lower"), at("upper"), at("merged"));
        for path in [&one, &other, &merged] {
            fs::create_dir(path).unwrap();
        }
        let mut mounted = vec![(lower, one.clone())];
        let above = if upper.is_empty() { one.clone() } else { other.clone() };
        if !upper.is_empty() {
            mounted.push((upper, other));
        }
        for (kind, path) in mounted {
            if mount("none", &path, kind, MountFlags::empty(), None).is_err() {
                eprintln!("skipped: no permission to mount");
                return None;
            }
            made.mounted.push(path);
        }
        for dir in [one.join("files"), above.join("up"), above.join("work")] {
            fs::create_dir(dir).unwrap();
        }
        make_lower(&one.join("files"));
        let layers = [&one.join("files"), &above.join("up"), &above.join("work")];
        let [lower, upper, work] = layers.map(|path| path.display().to_string());
        let text = format!("lowerdir={lower},upperdir={upper},workdir={work}{options}");
        let text = std::ffi::CString::new(text).unwrap();
        if let Err(error) = mount("none", &merged, "overlay", MountFlags::empty(), &*text) {
            eprintln!("not here: an overlay of {lower} with {options}: {error}");
            return None;
        }
        made.mounted.push(merged);
        Some(made)
    }

    fn serve(&self) -> ServedDirectory {
        ServedDirectory::serve(&self.dir.path().join("merged"), PassthroughOptions::default())
    }
}

impl Drop for OverlayMount {
    fn drop(&mut self) {
        for path in self.mounted.iter().rev() {
            let _ = unmount(path, UnmountFlags::DETACH);
        }
    }
}

/// The files of the lower layer: `single`, the hard links `a` and `b`, and `dir/file`.
fn make_lower(at: &Path) {
    fs::write(at.join("single"), "single").unwrap();
    fs::write(at.join("a"), "hard link").unwrap();
    fs::hard_link(at.join("a"), at.join("b")).unwrap();
    fs::create_dir(at.join("dir")).unwrap();
    fs::write(at.join("dir/file"), "file").unwrap();
}

/// The overlays whose files behave differently. Files of ramfs have no handles, so that an upper
/// file does not know its origin.
const OVERLAYS: [(&str, &str, &str); 5] = [
    ("tmpfs", "tmpfs", ",index=off"),
    ("tmpfs", "tmpfs", ",index=on"),
    ("ramfs", "tmpfs", ",index=off"),
    ("ramfs", "", ",index=off"),
    ("tmpfs", "", ",index=off,metacopy=on"),
];

/// Changes an inode by its number.
type OverlayChange = fn(&ServedDirectory, Ino);

/// The operations after which a file is in the upper layer.
const CHANGES: [(&str, OverlayChange); 8] = [
    ("open for writing", |served, ino| {
        let file = served.open(ino, OpenFlags::RDWR).unwrap();
        served.release(file);
    }),
    ("open to truncate", |served, ino| {
        let file = served.open(ino, OpenFlags::WRONLY | OpenFlags::TRUNC).unwrap();
        served.release(file);
    }),
    ("chmod", |served, ino| set(served, ino, SetAttr { perm: Some(0o600), ..SetAttr::default() })),
    ("chown", |served, ino| set(served, ino, SetAttr { uid: Some(7), ..SetAttr::default() })),
    ("truncate", |served, ino| set(served, ino, SetAttr { size: Some(3), ..SetAttr::default() })),
    ("utimens", |served, ino| {
        set(served, ino, SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() });
    }),
    ("setxattr", |served, ino| {
        // ramfs has none, and the file is opened for writing next.
        let set = served.set_xattr(ino, "trusted.x", b"value");
        assert!(matches!(set, Ok(()) | Err(Errno::EOPNOTSUPP)), "{set:?}");
    }),
    ("link", |served, ino| {
        let entry = served.fs.link(&own_context(), ino, Ino::ROOT, name("linked")).unwrap();
        assert_eq!(entry.ino, ino, "the new name leads to the same inode");
        served.fs.forget(entry.ino, 1);
    }),
];

fn set(served: &ServedDirectory, ino: Ino, change: SetAttr) {
    served.fs.setattr(&own_context(), ino, None, &change).unwrap();
}

fn ino_of(served: &ServedDirectory, text: &str) -> Ino {
    let entry = served.lookup(text).unwrap();
    served.fs.forget(entry.ino, 1);
    entry.ino
}

fn ino_in(served: &ServedDirectory, dir: Ino, text: &str) -> Ino {
    let entry = served.fs.lookup(&own_context(), dir, name(text)).unwrap();
    served.fs.forget(entry.ino, 1);
    entry.ino
}

/// The numbers of the source as programs see them there, and as the frontend shows them: equal
/// numbers for equal files.
fn assert_same_files(served: &ServedDirectory, what: &str, names: &[&str]) {
    let entries: Vec<_> = names.iter().map(|text| served.lookup(text).unwrap()).collect();
    let native: Vec<_> =
        names.iter().map(|text| fs::metadata(served.path(text)).unwrap()).collect();
    for (entry, stat) in entries.iter().zip(&native) {
        let attr = served.fs.getattr(&own_context(), entry.ino, None).unwrap();
        assert_eq!(attr.st_ino, entry.attr.st_ino, "{what}: st_ino of getattr and lookup");
        assert_eq!((attr.size, attr.nlink.into()), (stat.size(), stat.nlink()), "{what}");
    }
    for one in 0..names.len() {
        for other in 0..one {
            let key = |at: usize| (native[at].dev(), native[at].ino());
            let shown = entries[one].attr.st_ino == entries[other].attr.st_ino;
            let is_equal = key(one) == key(other);
            // A link made in the source may have numbers of its own there.
            let exact = names[one] != "native" && names[other] != "native";
            let holds = shown == is_equal || !exact && shown;
            assert!(holds, "{what}: {} {}", names[one], names[other]);
        }
    }
    entries.iter().for_each(|entry| served.fs.forget(entry.ino, 1));
}

#[test]
fn a_file_stays_one_inode_when_an_overlay_copies_it() {
    if !is_root() {
        return;
    }
    for (lower, upper, options) in OVERLAYS {
        for (change, run) in CHANGES {
            for path in ["single", "a"] {
                let what = format!("{change} of {path}, {lower} below {upper}, {options}");
                let Some(overlay) = OverlayMount::new(lower, upper, options) else { break };
                let served = overlay.serve();
                let found = served.lookup(path).unwrap();
                run(&served, found.ino);
                assert_eq!(ino_of(&served, path), found.ino, "{what}");
                // A name that is made afterwards, and one that the source makes.
                let link = |text| {
                    served.fs.link(&own_context(), found.ino, Ino::ROOT, name(text)).unwrap()
                };
                let after = link("after");
                fs::hard_link(served.path(path), served.path("native")).unwrap();
                let native = served.lookup("native").unwrap();
                assert_eq!(after.ino, found.ino, "{what}");
                // Where files of the lower layer have no handles, the overlay itself has two inodes
                // of this file.
                let numbers = |text: &str| {
                    fs::metadata(served.path(text)).map(|stat| (stat.dev(), stat.ino())).unwrap()
                };
                if numbers("native") == numbers(path) {
                    assert_eq!(native.ino, found.ino, "{what}");
                }
                assert_same_files(&served, &what, &["native", "a", "b", "single"]);
                // What one name writes, the others read.
                let file = served.open(native.ino, OpenFlags::RDWR).unwrap();
                served.write_at(file, 0, b"WRITTEN").unwrap();
                served.release(file);
                for text in [path, "after", "native"] {
                    assert!(fs::read(served.path(text)).unwrap().starts_with(b"WRITTEN"), "{what}");
                }
                served.fs.forget(native.ino, 1);
                served.fs.forget(found.ino, 2);
                assert_nothing_stays(&served, &what);
            }
        }
    }
}

/// All descriptors and watches are gone with the last lookup.
fn assert_nothing_stays(served: &ServedDirectory, what: &str) {
    let stats = served.fs.stats();
    assert_eq!((stats.inodes, stats.watched_inodes, stats.pinned_fds), (1, 0, 1), "{what}");
}

/// The names of a lower file are one file until one of them changes, unless the overlay has an
/// index.
#[test]
fn a_hard_link_of_a_lower_layer_changes_alone_as_natively() {
    if !is_root() {
        return;
    }
    for (lower, upper, options) in OVERLAYS {
        for (change, run) in CHANGES {
            for changed in ["a", "b"] {
                let what = format!("{change} of {changed}, {lower} below {upper}, {options}");
                let Some(overlay) = OverlayMount::new(lower, upper, options) else { break };
                let served = overlay.serve();
                let [a, b] = ["a", "b"].map(|text| served.lookup(text).unwrap().ino);
                let ino = if changed == "a" { a } else { b };
                run(&served, ino);
                let file = served.open(ino, OpenFlags::RDWR).unwrap();
                served.write_at(file, 0, b"WRITTEN").unwrap();
                served.release(file);
                let texts = ["a", "b"].map(|text| fs::read_to_string(served.path(text)).unwrap());
                let shares = options.contains("index=on");
                let is_written = texts.map(|text| text.starts_with("WRITTEN"));
                assert_eq!(is_written, ["a", "b"].map(|text| shares || text == changed), "{what}");
                assert_eq!(a == b, shares, "{what}: one inode for one file");
                assert_eq!(["a", "b"].map(|text| ino_of(&served, text)), [a, b], "{what}");
                for (ino, text) in [(a, "a"), (b, "b")] {
                    let file = served.open(ino, 0).unwrap();
                    let read = served.read(file, 0, 100).unwrap();
                    assert_eq!(read, fs::read(served.path(text)).unwrap(), "{what}: {text}");
                    served.release(file);
                }
                assert_same_files(&served, &what, &["a", "b", "single"]);
                [a, b].iter().for_each(|ino| served.fs.forget(*ino, 1));
                assert_nothing_stays(&served, &what);
            }
        }
    }
}

/// Directories are copied by what happens in them, and files by a renaming.
#[test]
fn a_directory_stays_one_inode_when_an_overlay_copies_it() {
    if !is_root() {
        return;
    }
    let steps: [(&str, OverlayChange); 6] = [
        ("create", |served, dir| {
            let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
            let node = regular(&own_context(), 0o644);
            let (entry, opened) =
                served.fs.create(&own_context(), dir, name("new"), &node, args).unwrap();
            served.release(File { ino: entry.ino, fh: opened.fh });
            served.fs.forget(entry.ino, 1);
        }),
        ("mkdir", |served, dir| {
            let entry = served.mkdir(dir, "new");
            served.fs.forget(entry.ino, 1);
        }),
        ("symlink", |served, dir| {
            let node = NewNode::new(FileKind::Symlink, 0o777, own_context().caller);
            let entry = served.fs.symlink(&own_context(), dir, name("new"), b"to", &node).unwrap();
            served.fs.forget(entry.ino, 1);
        }),
        ("unlink", |served, dir| served.fs.unlink(&own_context(), dir, name("file")).unwrap()),
        ("rename", |served, dir| {
            let to = (Ino::ROOT, name("moved"));
            let flags = RenameFlags::default();
            let moved = served.fs.rename(&own_context(), (dir, name("file")), to, flags);
            // ramfs leaves no whiteout behind.
            if moved == Err(Errno::EINVAL) {
                served.fs.link(&own_context(), ino_in(served, dir, "file"), to.0, to.1).unwrap();
                served.fs.forget(ino_in(served, dir, "file"), 1);
            }
        }),
        ("chmod", |served, dir| {
            set(served, dir, SetAttr { perm: Some(0o700), ..SetAttr::default() });
        }),
    ];
    for (lower, upper, options) in OVERLAYS {
        for (step, run) in steps {
            let what = format!("{step}, {lower} below {upper}, {options}");
            let Some(overlay) = OverlayMount::new(lower, upper, options) else { break };
            let served = overlay.serve();
            let dir = served.lookup("dir").unwrap();
            let file = served.fs.lookup(&own_context(), dir.ino, name("file")).unwrap();
            run(&served, dir.ino);
            assert_eq!(ino_of(&served, "dir"), dir.ino, "{what}");
            if step == "rename" {
                assert_eq!(ino_of(&served, "moved"), file.ino, "{what}");
            }
            served.fs.forget(dir.ino, 1);
            served.fs.forget(file.ino, 1);
            assert_nothing_stays(&served, &what);
        }
    }
}

/// A lookup sees the new numbers before the operation that changes them is over.
#[test]
fn a_lookup_beside_a_copy_finds_the_same_inode() {
    if !is_root() {
        return;
    }
    let Some(overlay) = OverlayMount::new("ramfs", "tmpfs", ",index=off") else { return };
    let lower = overlay.dir.path().join("lower/files");
    const FILES: usize = 300;
    (0..FILES).for_each(|n| fs::write(lower.join(format!("f{n}")), "text").unwrap());
    let served = overlay.serve();
    for number in 0..FILES {
        let text = format!("f{number}");
        let found = served.lookup(&text).unwrap().ino;
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| (0..20).all(|_| ino_of(&served, &text) == found));
            set(&served, found, SetAttr { perm: Some(0o600), ..SetAttr::default() });
            assert!(looks.join().unwrap(), "{text}");
        });
        assert_eq!(ino_of(&served, &text), found);
        served.fs.forget(found, 1);
    }
    assert_nothing_stays(&served, "after all");
}

/// Watches are few, whatever frontends look at.
#[test]
fn inodes_with_a_watch_have_a_limit() {
    if !is_root() {
        return;
    }
    let Some(overlay) = OverlayMount::new("tmpfs", "tmpfs", ",index=off") else { return };
    let lower = overlay.dir.path().join("lower/files");
    const FILES: usize = 5000;
    (0..FILES).for_each(|n| fs::hard_link(lower.join("a"), lower.join(format!("f{n}"))).unwrap());
    let served = overlay.serve();
    let found: Vec<_> = (0..FILES).map(|n| served.lookup(&format!("f{n}")).unwrap().ino).collect();
    assert!(served.fs.stats().watched_inodes <= 4096);
    let last = served.open(found[FILES - 1], OpenFlags::RDWR).unwrap();
    served.write_at(last, 0, b"WRITTEN").unwrap();
    served.release(last);
    let written = |n: usize| fs::read(served.path(&format!("f{n}"))).unwrap().starts_with(b"WRI");
    assert!(written(FILES - 1) && !(0..FILES - 1).any(written));
    found.iter().for_each(|ino| served.fs.forget(*ino, 1));
    assert_nothing_stays(&served, "after all");
}
