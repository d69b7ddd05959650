//! The whole file system on simulated devices.

mod compact;
mod crash;
mod damage;
mod device_operations;
mod direct;
mod faults;
mod figures;
mod forged;
mod full;
mod golden;
mod growth;
mod index;
mod memory;
mod mounts;
mod names;
mod paths;
mod queues;
mod random_operations;
mod sequences;
mod snapshots;
mod threads;
mod uncertain_groups;
mod write_errors;
mod xattrs;

use std::collections::BTreeMap;
use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice, SimDevice};
use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, Fh, File, FileKind, FileSystem, Ino, Name,
    NewNode, OpenFlags, ReadArgs, ReadBuf, SliceSink,
};

use crate::commit::CommitRules;
use crate::{LoadProblem, Uhs, UhsOptions};

const BLOCKS: u64 = 8 * 512;
const OPTIONS: UhsOptions = UhsOptions {
    read_only: false,
    commit: None,
    discard: false,
    cache_pages: 16,
    dirty_pages: 64,
    index: u64::MAX,
    separation: None,
    queues: None,
    worker: false,
    writeback: false,
    access_times: defuse_fs::posix::AccessTimeRule::Relative,
};

/// Rules with which data is written as early as possible before its group.
const EARLY: CommitRules = CommitRules { early_run: 1, ..CommitRules::ALL };

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(77)
}

fn make_fresh() -> RamDevice {
    let ram = RamDevice::new(4096, BLOCKS);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    ram
}

/// A simulated device with the content of `ram`. One of three takes few blocks at once.
pub(crate) fn device(ram: &RamDevice, seed: u64) -> SimDevice {
    let sim = SimDevice::from_ram(ram, seed);
    match seed / 5 % 3 {
        0 => sim,
        1 => sim.with_blocks_at_once(3),
        _ => sim.with_blocks_at_once(64),
    }
}

fn open(device: impl BlockDevice + 'static, rules: CommitRules) -> (Uhs, Vec<LoadProblem>) {
    open_with(device, OPTIONS, rules)
}

fn open_with(
    device: impl BlockDevice + 'static,
    options: UhsOptions,
    rules: CommitRules,
) -> (Uhs, Vec<LoadProblem>) {
    Uhs::open_by(Arc::new(device), options, rules, random()).unwrap()
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode::new(kind, 0o644, cx().caller)
}

/// A file as a walk finds it. Times are left out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WalkedFile {
    ino: u64,
    mode: u32,
    nlink: u32,
    size: u64,
    target: Vec<u8>,
}

/// All paths, and the data of all files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct TreeSnapshot {
    names: BTreeMap<String, WalkedFile>,
    data: BTreeMap<u64, Vec<u8>>,
}

impl TreeSnapshot {
    /// All paths, without the sizes of files.
    fn drop_sizes(&self) -> BTreeMap<String, WalkedFile> {
        let mut names = self.names.clone();
        for seen in names.values_mut().filter(|seen| self.data.contains_key(&seen.ino)) {
            seen.size = 0;
        }
        names
    }
}

#[derive(Default)]
struct NameCollector(Vec<Vec<u8>>);

impl DirSink for NameCollector {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push(item.name.to_vec());
    }
}

fn list(fs: &Uhs, dir: Ino) -> Vec<String> {
    let text = |name: Vec<u8>| String::from_utf8_lossy(&name).into_owned();
    list_bytes(fs, dir).into_iter().map(text).collect()
}

fn list_bytes(fs: &Uhs, dir: Ino) -> Vec<Vec<u8>> {
    let mut names = NameCollector::default();
    // There may be no root.
    let Ok(opened) = fs.opendir(&cx(), dir, OpenFlags(0)) else { return Vec::new() };
    let file = File { ino: dir, fh: opened.fh };
    fs.readdir(&cx(), file, 0, &mut DirBuf::new(&mut names)).unwrap();
    fs.releasedir(&cx(), file).unwrap();
    names.0.retain(|name| name != b"." && name != b"..");
    names.0
}

fn contents(fs: &Uhs, ino: Ino, size: u64) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, size as usize);
    fs.read(&cx(), File { ino, fh: Fh(0) }, ReadArgs::default(), &mut out).unwrap();
    assert_eq!(out.filled_len() as u64, size);
    bytes
}

fn snapshot(fs: &Uhs) -> TreeSnapshot {
    let mut found = TreeSnapshot::default();
    walk(fs, Ino::ROOT, String::new(), &mut found);
    found
}

fn walk(fs: &Uhs, dir: Ino, path: String, found: &mut TreeSnapshot) {
    for child in list(fs, dir) {
        let entry = fs.lookup(&cx(), dir, name(&child)).unwrap();
        let path = format!("{path}/{child}");
        let attr = entry.attr;
        let target = match attr.kind {
            FileKind::Symlink => fs.readlink(&cx(), entry.ino).unwrap(),
            _ => Vec::new(),
        };
        let (ino, mode, nlink, size) = (entry.ino.0, attr.mode(), attr.nlink, attr.size);
        found.names.insert(path.clone(), WalkedFile { ino, mode, nlink, size, target });
        match attr.kind {
            FileKind::Directory => walk(fs, entry.ino, path, found),
            FileKind::Regular => {
                found.data.insert(ino, contents(fs, entry.ino, size));
            }
            _ => {}
        }
        fs.forget(entry.ino, 1);
    }
}
