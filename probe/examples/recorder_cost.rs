//! Measures the cost of measuring, in nanoseconds: `cargo run --release -p defuse-probe --example
//! recorder_cost`.

use std::hint::black_box;
use std::time::Instant;

use defuse_fs::{
    Attr, Caller, Context, DirBuf, Entry, Errno, Fh, File, FileSystem, Ino, Name, Result,
};
use defuse_probe::{Op, ProbedFileSystem, Recorder, clock};

/// A file system that does nothing, so that only the layer takes time.
struct NullFileSystem;

impl FileSystem for NullFileSystem {
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Err(Errno::ENOENT)
    }
    fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
        Err(Errno::ENOENT)
    }
    fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
        Ok(())
    }
}

/// Prints the best of five runs, because other load on the machine only adds time.
fn cost(what: &str, mut run: impl FnMut(u64)) {
    const ROUNDS: u64 = 2_000_000;
    let best = (0..5).map(|_| {
        let start = Instant::now();
        (0..ROUNDS).for_each(&mut run);
        start.elapsed().as_nanos() as f64 / ROUNDS as f64
    });
    println!("{what:<40} {:>7.2} ns", best.fold(f64::INFINITY, f64::min));
}

fn main() {
    let recorder = Recorder::new();
    let cells = recorder.cells();
    cost("std::time::Instant, twice", |_| {
        black_box(Instant::now().elapsed());
    });
    cost("clock::now, twice", |_| {
        black_box(clock::now().elapsed_ns());
    });
    cost("Cells::record", |round| {
        cells.record(black_box(Op::READ), black_box(round & 0xffff), black_box(true));
    });
    cost("Recorder::with_cells + record", |round| {
        recorder.with_cells(|cells| cells.record(Op::READ, black_box(round & 0xffff), true));
    });
    let cx = Context::new(Caller::default());
    let plain: Box<dyn FileSystem> = Box::new(NullFileSystem);
    cost("a call through dyn", |_| {
        let _ = black_box(black_box(&plain).bmap(&cx, Ino::ROOT, 0, 0));
    });
    let probed: Box<dyn FileSystem> =
        Box::new(ProbedFileSystem::new(NullFileSystem, recorder.clone()));
    cost("the same through Probed", |_| {
        let _ = black_box(black_box(&probed).bmap(&cx, Ino::ROOT, 0, 0));
    });
    cost("a snapshot / 1000", {
        let mut left = 0;
        move |_| {
            left = if left == 0 { 999 } else { left - 1 };
            if left == 0 {
                black_box(recorder.snapshot());
            }
        }
    });
}
