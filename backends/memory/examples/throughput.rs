//! Measures the backend without a frontend: throughput of writes and reads in bytes per second, and
//! lookups per second, for one thread and for two threads on different files.
//!
//! `cargo run --release -p defuse-memory --example throughput`

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use defuse_fs::*;
use defuse_memory::{MemoryFileSystem, MemoryOptions};

const FILE_BYTES: u64 = 32 << 20;
const IO_BYTES: usize = 128 << 10;

fn main() {
    let fs = MemoryFileSystem::new(MemoryOptions { size: None, ..MemoryOptions::default() });
    let cx = Context::new(Caller::default());
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let files: Vec<File> = ["a", "b"]
        .iter()
        .map(|text| {
            let entry = fs.mknod(&cx, Ino::ROOT, name(text), &node).expect("a new file");
            File { ino: entry.ino, fh: Fh(0) }
        })
        .collect();
    let mut buffers = [vec![1; IO_BYTES], vec![1; IO_BYTES]];
    bytes("write fresh pages", || write(&fs, files[0], &buffers[0]));
    bytes("rewrite in place", || write(&fs, files[0], &buffers[0]));
    bytes("truncate, then write (pooled pages)", || {
        let empty = SetAttr { size: Some(0), ..SetAttr::default() };
        fs.setattr(&cx, files[0].ino, None, &empty).expect("truncate");
        write(&fs, files[0], &buffers[0]);
    });
    write(&fs, files[1], &buffers[1]);
    let [first, second] = &mut buffers;
    bytes("read 128 KiB", || read(&fs, files[0], first, IO_BYTES));
    bytes("read 4 KiB", || read(&fs, files[0], first, 4096));
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| read(&fs, files[0], first, IO_BYTES));
        scope.spawn(|| read(&fs, files[1], second, IO_BYTES));
    });
    let rate = 2.0 * FILE_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9;
    println!("{:40} {rate:8.2} GB/s", "read 128 KiB, two threads");
    lookups(&fs, &cx);
}

fn lookups(fs: &MemoryFileSystem, cx: &Context<'_>) {
    const COUNT: u32 = 1_000_000;
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let start = Instant::now();
    for i in 0..COUNT {
        fs.mknod(cx, Ino::ROOT, name(&format!("f{i}")), &node).expect("a new file");
    }
    println!("{:40} {:8.0} ns", "create, a million in one directory", ns(start, COUNT));
    let start = Instant::now();
    for i in 0..COUNT {
        let text = format!("f{}", i.wrapping_mul(7919) % COUNT);
        black_box(fs.lookup(cx, Ino::ROOT, name(&text)).expect("it is there"));
    }
    println!("{:40} {:8.0} ns", "lookup at random among a million", ns(start, COUNT));
    let start = Instant::now();
    for _ in 0..COUNT {
        black_box(fs.getattr(cx, Ino::ROOT, None).expect("the root"));
    }
    println!("{:40} {:8.0} ns", "getattr", ns(start, COUNT));
}

fn ns(start: Instant, count: u32) -> f64 {
    start.elapsed().as_nanos() as f64 / f64::from(count)
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a valid name")
}

/// Prints the best of five runs. A run on fresh memory is measured once, because a repetition would
/// reuse the pages.
fn bytes(what: &str, mut run: impl FnMut()) {
    let rounds = if what.contains("fresh") { 1 } else { 5 };
    let rate = |_| {
        let start = Instant::now();
        run();
        FILE_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let best = (0..rounds).map(rate).fold(0.0, f64::max);
    println!("{what:40} {best:8.2} GB/s");
}

fn write(fs: &MemoryFileSystem, file: File, buffer: &[u8]) {
    let cx = Context::new(Caller::default());
    for offset in (0..FILE_BYTES).step_by(buffer.len()) {
        let args = WriteArgs { offset, ..WriteArgs::default() };
        let mut source = SliceSource::new(buffer);
        fs.write(&cx, file, args, &mut WriteBuf::new(&mut source)).expect("a write");
    }
}

fn read(fs: &MemoryFileSystem, file: File, buffer: &mut [u8], len: usize) {
    let cx = Context::new(Caller::default());
    for offset in (0..FILE_BYTES).step_by(len) {
        let mut sink = SliceSink::new(buffer);
        let args = ReadArgs { offset, ..ReadArgs::default() };
        fs.read(&cx, file, args, &mut ReadBuf::new(&mut sink, len)).expect("a read");
    }
    black_box(buffer);
}
