//! Images of version 1 that never change: every later version must read them as they were written.
//!
//! An image is a list of the bytes that are no zeros: offset (8 bytes), length (4 bytes), bytes.
//! Its tree is a line for each path.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use defuse_block::{BlockDevice, BlockingQueue, RamDevice};
use defuse_fs::{
    Fallocate, Fh, File, FileKind, FileSystem, Ino, NewNode, SetAttr, SetTime, SetXattrFlags,
    SliceSource, Timestamp, WriteArgs, WriteBuf, XattrName,
};

use super::{BLOCKS, OPTIONS, cx, make_fresh, name, node, random, snapshot};
use crate::commit::CommitRules;
use crate::format::superblock::{CHUNKS, FEATURES, PADDED_RECORDS};
use crate::{Uhs, UhsOptions, check, store};

/// Zeros that are worth a new entry.
const GAP: usize = 16;

/// An image after a power failure, one after a clean end with a snapshot, and one after a clean end
/// with padded records; one after a clean end with a table of chunks.
const IMAGES: [&str; 4] = ["v1-cut", "v1-ended", "v1-padded", "v1-table"];

fn path(image: &str, extension: &str) -> PathBuf {
    let file = format!("images/{image}.{extension}");
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn sparse(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    while let Some(skipped) = bytes[at..].iter().position(|byte| *byte != 0) {
        let start = at + skipped;
        let mut end = start;
        let mut next = start;
        while next < bytes.len() && next - end <= GAP {
            if bytes[next] != 0 {
                end = next + 1;
            }
            next += 1;
        }
        out.extend((start as u64).to_le_bytes());
        out.extend(((end - start) as u32).to_le_bytes());
        out.extend(&bytes[start..end]);
        at = end;
    }
    out
}

fn expand(mut sparse: &[u8]) -> RamDevice {
    let mut bytes = vec![0; BLOCKS as usize * 4096];
    while let Some((head, rest)) = sparse.split_at_checked(12) {
        let at = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
        let len = u32::from_le_bytes(head[8..].try_into().unwrap()) as usize;
        bytes[at..at + len].copy_from_slice(&rest[..len]);
        sparse = &rest[len..];
    }
    let ram = RamDevice::new(4096, BLOCKS);
    BlockingQueue::new(&ram).unwrap().write(0, &bytes).unwrap();
    ram
}

/// All that an image has, a line for each path.
fn tree(fs: &Uhs) -> String {
    let found = snapshot(fs);
    let mut out = String::new();
    for (path, seen) in &found.names {
        let attr = fs.getattr(&cx(), Ino(seen.ino), None).unwrap();
        let data = found.data.get(&seen.ino).map_or(0, |data| crc32c::crc32c(data));
        let time = |time: Timestamp| format!("{}.{:09}", time.secs, time.nanos);
        let xattr = XattrName::new(b"user.key").unwrap();
        let value = match fs.getxattr(&cx(), Ino(seen.ino), xattr, 65_536) {
            Ok(defuse_fs::Xattr::Value(value)) => crc32c::crc32c(&value),
            _ => 0,
        };
        let owner = (attr.uid, attr.gid, attr.rdev, attr.blocks);
        // A scan takes the times of a directory from its newest entry.
        let is_dir = attr.kind == FileKind::Directory;
        let modified = if is_dir { "-".to_owned() } else { time(attr.mtime) };
        let target = seen.target.escape_ascii();
        let super::WalkedFile { ino, mode, nlink, size, .. } = seen;
        let line = format!(
            "{path} {ino} {mode:o} {nlink} {size} {owner:?} {modified} {data:08x} {value:08x} {target}"
        );
        writeln!(out, "{}", line.trim_end()).unwrap();
    }
    out
}

#[test]
fn images_of_version_1_are_read_as_they_were_written() {
    for image in IMAGES {
        let expected = std::fs::read_to_string(path(image, "tree")).unwrap();
        let ram = expand(&std::fs::read(path(image, "sparse")).unwrap());
        let device: Arc<dyn BlockDevice> = Arc::new(ram.clone());
        let report = check(&device).unwrap();
        assert_eq!(report.problems, [], "{image}");
        assert_eq!(report.unfinished > 0, image == "v1-cut", "{image}");
        let superblock = store::superblock(&ram).unwrap();
        let restored = crate::load::restore(&ram, &superblock, u64::MAX).unwrap().is_some();
        assert_eq!(restored, image != "v1-cut", "{image}");
        let features = match image {
            "v1-padded" => PADDED_RECORDS,
            "v1-table" => FEATURES,
            _ => 0,
        };
        assert_eq!(superblock.table_blocks().is_empty(), image != "v1-table", "{image}");
        assert_eq!(superblock.features, features, "{image}");
        // By a snapshot if there is one, after that by a scan, and after a mount that wrote.
        for (read_only, rules) in [
            (true, CommitRules::ALL),
            (false, CommitRules { snapshots: false, ..CommitRules::ALL }),
            (false, CommitRules::ALL),
            (true, CommitRules::ALL),
        ] {
            let options = UhsOptions { read_only, ..OPTIONS };
            let (fs, problems) =
                Uhs::open_by(Arc::clone(&device), options, rules, random()).unwrap();
            assert_eq!(problems, [], "{image}");
            assert_eq!(tree(&fs), expected, "{image}, read-only: {read_only}");
            if !read_only {
                let made = fs.mknod(&cx(), Ino::ROOT, name("new"), &node(FileKind::Regular));
                made.unwrap();
                fs.syncfs(&cx()).unwrap();
                fs.unlink(&cx(), Ino::ROOT, name("new")).unwrap();
            }
        }
        assert_eq!(check(&device).unwrap().problems, [], "{image}");
        // Many extents are written as the image has them.
        let (fs, _) =
            Uhs::open_by(Arc::clone(&device), OPTIONS, CommitRules::ALL, random()).unwrap();
        let dir = fs.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let pieces = fs.lookup(&cx(), dir, name("pieces")).unwrap().ino;
        write(&fs, pieces, 500 * 8192, &[9; 5000]);
        fs.syncfs(&cx()).unwrap();
        let expected = tree(&fs);
        fs.abandon();
        assert_eq!(check(&device).unwrap().problems, [], "{image}");
        assert_eq!(store::superblock(&ram).unwrap().features, features, "{image}");
        let (fs, _) =
            Uhs::open_by(Arc::clone(&device), OPTIONS, CommitRules::ALL, random()).unwrap();
        assert_eq!(tree(&fs), expected, "{image}");
        drop(fs);
        // An upgrade changes nothing but the features, and what is written afterwards uses them.
        assert_eq!(store::upgrade(&ram), Ok(FEATURES & !features), "{image}");
        assert_eq!(store::upgrade(&ram), Ok(0), "{image}");
        let (fs, _) =
            Uhs::open_by(Arc::clone(&device), OPTIONS, CommitRules::ALL, random()).unwrap();
        assert_eq!(tree(&fs), expected, "{image}");
        write(&fs, pieces, 510 * 8192, &[9; 5000]);
        fs.syncfs(&cx()).unwrap();
        drop(fs);
        assert_eq!(check(&device).unwrap().problems, [], "{image}");
    }
}

#[test]
fn a_sparse_image_is_the_image() {
    let ram = make_fresh();
    let mut bytes = vec![0; BLOCKS as usize * 4096];
    BlockingQueue::new(&ram).unwrap().read(0, &mut bytes).unwrap();
    let mut again = vec![1; bytes.len()];
    BlockingQueue::new(&expand(&sparse(&bytes))).unwrap().read(0, &mut again).unwrap();
    assert!(again == bytes);
}

fn write(fs: &Uhs, ino: Ino, offset: u64, bytes: &[u8]) {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, ..WriteArgs::default() };
    fs.write(&cx(), File { ino, fh: Fh(0) }, args, &mut WriteBuf::new(&mut source)).unwrap();
}

/// One of everything that the format knows.
fn fill(fs: &Uhs) {
    let make = |dir: Ino, text: &str, kind: FileKind| {
        let node = NewNode { rdev: 0x105, ..node(kind) };
        fs.mknod(&cx(), dir, name(text), &node).unwrap().ino
    };
    let set = |ino: Ino, set: SetAttr| {
        fs.setattr(&cx(), ino, None, &set).unwrap();
    };
    let dir = fs.mkdir(&cx(), Ino::ROOT, name("dir"), &node(FileKind::Directory)).unwrap().ino;
    let below = fs.mkdir(&cx(), dir, name("below"), &node(FileKind::Directory)).unwrap().ino;
    let small = make(below, "small", FileKind::Regular);
    write(fs, small, 0, b"a few bytes");
    fs.link(&cx(), small, dir, name("another name of more than twenty-two bytes")).unwrap();
    let pieces = make(dir, "pieces", FileKind::Regular);
    for piece in 0..400 {
        write(fs, pieces, piece * 8192, &[piece as u8]);
        if piece % 100 == 99 {
            fs.syncfs(&cx()).unwrap();
        }
    }
    let allocated = make(dir, "allocated", FileKind::Regular);
    write(fs, allocated, 5000, b"data");
    let range = Fallocate { mode: 0, offset: 20_000, length: 30_000 };
    fs.fallocate(&cx(), File { ino: allocated, fh: Fh(0) }, range).unwrap();
    for (text, target) in [("link", &b"small"[..]), ("long", &[b'x'; 3500])] {
        fs.symlink(&cx(), below, name(text), target, &node(FileKind::Symlink)).unwrap();
    }
    make(below, "device", FileKind::CharDevice);
    make(below, "fifo", FileKind::Fifo);
    make(below, "socket", FileKind::Socket);
    let key = XattrName::new(b"user.key").unwrap();
    for (ino, len) in [(small, 10), (allocated, 20_000), (below, 5000)] {
        let mut value = vec![0; len];
        value[len - 1] = 7;
        fs.setxattr(&cx(), ino, key, &value, SetXattrFlags::default()).unwrap();
    }
    let old = SetTime::At(Timestamp { secs: -1 << 40, nanos: 5 });
    set(small, SetAttr { mtime: Some(old), uid: Some(1000), gid: Some(100), ..SetAttr::default() });
    set(dir, SetAttr { perm: Some(0o1777), ..SetAttr::default() });
    for text in ["x", "y", "z"] {
        make(dir, text, FileKind::Regular);
    }
    fs.syncfs(&cx()).unwrap();
    fs.unlink(&cx(), dir, name("y")).unwrap();
    fs.syncfs(&cx()).unwrap();
}

/// Makes the missing images, which never change afterwards:
/// `cargo test -p defuse-uhs --lib -- --ignored writes_images`
#[test]
#[ignore = "writes files of the project"]
fn writes_images() {
    for image in IMAGES.into_iter().filter(|image| !path(image, "sparse").exists()) {
        let ram = make_fresh();
        let sim = defuse_block::SimDevice::from_ram(&ram, 1);
        let listed_chunks = if image == "v1-table" { 1 } else { CHUNKS };
        let (fs, _) = super::open(sim.clone(), CommitRules { listed_chunks, ..CommitRules::ALL });
        if image == "v1-table" {
            fs.engine().add_slots_anyway();
        }
        fill(&fs);
        let expected = tree(&fs);
        let left = match image {
            "v1-cut" => {
                sim.forget();
                for text in ["lost", "too"] {
                    fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Fifo)).unwrap();
                }
                fs.syncfs(&cx()).unwrap();
                fs.abandon();
                find_half_written(&sim)
            }
            _ => {
                drop(fs);
                sim.copy_present()
            }
        };
        let mut bytes = vec![0; BLOCKS as usize * 4096];
        BlockingQueue::new(&left).unwrap().read(0, &mut bytes).unwrap();
        std::fs::write(path(image, "sparse"), sparse(&bytes)).unwrap();
        std::fs::write(path(image, "tree"), expected).unwrap();
    }
}

/// Finds a state in which a group is not whole.
fn find_half_written(sim: &defuse_block::SimDevice) -> RamDevice {
    let (mut cuts, mut random) = (sim.power_cuts(), random());
    while let Some(cut) = cuts.next() {
        for _ in 0..20 {
            let ram = cut.sample(&mut random);
            if check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).unwrap().unfinished > 0 {
                return ram;
            }
        }
    }
    panic!("no group was cut");
}
