//! The figures for the operator match the operations that happened.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use defuse_block::RamDevice;
use defuse_fs::{
    Fh, File, FileKind, FileSystem, Ino, ReadArgs, ReadBuf, SetAttr, SliceSink, SliceSource,
    WriteArgs, WriteBuf,
};

use super::{cx, name, node, random};
use crate::{Uhs, UhsOptions};

const MIB: usize = 1 << 20;

fn make_fresh() -> (RamDevice, Uhs) {
    let ram = RamDevice::new(4096, 16 * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let fs = open(&ram, false);
    (ram, fs)
}

fn open(ram: &RamDevice, read_only: bool) -> Uhs {
    let options = UhsOptions { read_only, commit: None, ..UhsOptions::default() };
    Uhs::open(Arc::new(ram.clone()), options, random()).unwrap().0
}

fn figures(fs: &Uhs) -> BTreeMap<&'static str, u64> {
    fs.figures().into_iter().map(|figure| (figure.name, figure.value)).collect()
}

fn write(fs: &Uhs, ino: Ino, bytes: &[u8]) {
    let mut source = SliceSource::new(bytes);
    let file = File { ino, fh: Fh(0) };
    let mut data = WriteBuf::new(&mut source);
    assert_eq!(fs.write(&cx(), file, WriteArgs::default(), &mut data), Ok(bytes.len()));
}

fn read(fs: &Uhs, ino: Ino, offset: u64, len: usize) {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let args = ReadArgs { offset, ..ReadArgs::default() };
    fs.read(&cx(), File { ino, fh: Fh(0) }, args, &mut ReadBuf::new(&mut sink, len)).unwrap();
}

#[test]
fn what_a_write_and_its_sync_do_is_counted() {
    let (_ram, fs) = make_fresh();
    let ino = fs.mknod(&cx(), Ino::ROOT, name("file"), &node(FileKind::Regular)).unwrap().ino;
    let before = figures(&fs);
    write(&fs, ino, &vec![7; MIB]);
    let dirty = figures(&fs);
    // Some more blocks are promised for the records of its extents.
    assert!(dirty["dirty"] == MIB as u64 && dirty["space_promised"] >= MIB as u64);
    assert_eq!(dirty["device_writes"], before["device_writes"]);
    fs.fsync(&cx(), File { ino, fh: Fh(0) }, false).unwrap();
    let after = figures(&fs);
    let grew = |name| after[name] - before[name];
    assert_eq!((after["dirty"], after["groups_not_durable"]), (0, 0));
    assert!(dirty["space_promised"] - after["space_promised"] >= MIB as u64);
    assert!(grew("groups") >= 1 && grew("slots_written") >= 1);
    assert!(grew("device_written") >= (MIB + 4096) as u64);
    // One write of all data, and one of the slots.
    assert_eq!((grew("device_durable_writes"), grew("device_flushes")), (2, 0));
    assert_eq!(before["space_free"] - after["space_free"], MIB as u64);
    assert_eq!((after["device_errors"], after["device_in_flight"], after["read_only"]), (0, 0, 0));
    assert_eq!(after["inodes"], 2);
    assert!(after["cache_used"] >= MIB as u64 && after["cache_used"] <= after["cache_limit"]);
    let units = ["units_free", "units_of_slots", "units_full", "units_of_small_blocks"];
    let all: u64 = units.iter().map(|name| after[name]).sum();
    assert_eq!((all, after["space"]), (16, 16 * 512 * 4096));
}

/// The inodes leave their slots one by one. Every slot had a write of its own.
#[test]
fn changes_of_many_inodes_in_any_order_need_few_writes_while_there_is_space() {
    const FILES: u64 = 8 * 512;
    let ram = RamDevice::new(4096, 64 * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let fs = open(&ram, false);
    let file = |nth: u64| {
        fs.mknod(&cx(), Ino::ROOT, name(&nth.to_string()), &node(FileKind::Regular)).unwrap().ino
    };
    let mut inos: Vec<Ino> = (0..FILES).map(file).collect();
    fs.syncfs(&cx()).unwrap();
    let mut order = random();
    for perm in [0o600, 0o640, 0o644, 0o660] {
        let before = figures(&fs);
        order.shuffle(&mut inos);
        for ino in &inos {
            let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
            fs.setattr(&cx(), *ino, None, &set).unwrap();
        }
        fs.syncfs(&cx()).unwrap();
        let after = figures(&fs);
        let grew = |name| after[name] - before[name];
        assert!(grew("slots_written") >= FILES);
        assert!(grew("device_writes") < FILES / 4, "{} writes", grew("device_writes"));
        assert!(after["units_of_slots"] < 20, "{} units", after["units_of_slots"]);
    }
}

#[test]
fn reads_are_hits_or_misses_and_what_is_read_ahead_is_told_apart() {
    let (ram, fs) = make_fresh();
    let ino = fs.mknod(&cx(), Ino::ROOT, name("file"), &node(FileKind::Regular)).unwrap().ino;
    write(&fs, ino, &vec![7; MIB]);
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    let fs = open(&ram, true);
    read(&fs, ino, 4096, 8192);
    let random = figures(&fs);
    assert_eq!((random["cache_hits"], random["cache_misses"]), (0, 1));
    assert_eq!((random["cache_fetched"], random["cache_read_ahead"]), (8192, 0));
    read(&fs, ino, 12288, 4096);
    read(&fs, ino, 16384, 4096);
    let ahead = figures(&fs);
    assert_eq!((ahead["cache_hits"], ahead["cache_misses"]), (1, 2));
    assert_eq!(ahead["cache_fetched"], 12288);
    assert!(ahead["cache_read_ahead"] >= 4096);
    let read = ahead["cache_fetched"] + ahead["cache_read_ahead"];
    assert!(ahead["device_read"] >= read && ahead["device_writes"] == 0);
    assert!(!ahead.contains_key("groups") && ahead["read_only"] == 1);
}

#[test]
fn each_name_is_there_once_and_fits_every_format() {
    let (_ram, fs) = make_fresh();
    let figures = fs.figures();
    let names: BTreeSet<&str> = figures.iter().map(|figure| figure.name).collect();
    assert_eq!(names.len(), figures.len());
    for name in names {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(fits));
        let documented =
            include_str!("../../../../docs/statistics.md").contains(&format!("`{name}`"));
        assert!(documented, "docs/statistics.md does not say what {name} is");
    }
}
