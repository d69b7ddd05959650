//! Reads and writes of one file, against the device itself.

use std::time::Instant;

use anyhow::Result;
use defuse_block::{DeviceAccess, FileDevice};

use crate::UhsBenchScale;
use crate::files::{FileOperation, TimedFiles, in_flight};
use crate::results::{FigureDirection, RAW, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget};

/// Bytes of a sequential operation.
const LARGE: usize = 64 << 10;

/// One round of all targets.
pub(crate) fn measure(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    raw(stage, scale, results)?;
    for target in UhsBenchTarget::ALL {
        stage.with(target, |_, files| phases(files, ("", target.name()), scale, results))?;
    }
    Ok(())
}

fn rate(bytes: u64, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e6)
}

/// The phases of one target. `prefix` comes before the names of the rows.
pub(crate) fn phases(
    files: &dyn TimedFiles,
    (prefix, target): (&str, &str),
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let mut file = files.open("/file")?;
    let bytes = scale.data_bytes;
    let mut add = |(name, goal): (&str, f64), figure| {
        results.add(
            (&format!("{prefix}{name}"), "MB/s", FigureDirection::More, goal),
            target,
            figure,
        );
    };
    // The second time memory for pages has been used before.
    for name in ["64K sequential write, synced", "64K sequential write again, synced"] {
        let written = rate(bytes, || {
            sequential(bytes, |at, part| file.write(at, part))?;
            file.sync()
        })?;
        add((name, 0.0), written);
    }
    add(
        ("64K sequential read", 0.0),
        rate(bytes, || sequential(bytes, |at, part| file.read(at, part).map(drop)))?,
    );
    let small = bytes / 16;
    add(
        ("4K random overwrite, synced", 0.0),
        rate(small, || {
            random(bytes, small, |at, part| file.write(at, part))?;
            file.sync()
        })?,
    );
    add(
        ("4K random read", 0.0),
        rate(small, || random(bytes, small, |at, part| file.read(at, part).map(drop)))?,
    );
    drop(file);
    for (name, moved, operations) in direct(bytes) {
        let carry_out = || files.carry_out("/direct", bytes / 4096, operations);
        add(name, rate(moved, carry_out)?);
    }
    Ok(())
}

fn sequential(bytes: u64, mut act: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut part = vec![1; LARGE];
    (0..bytes / LARGE as u64).try_for_each(|at| act(at * LARGE as u64, &mut part))
}

fn random(bytes: u64, all: u64, mut act: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let (mut part, mut random) = (vec![2; 4096], fastrand::Rng::with_seed(9));
    (0..all / 4096).try_for_each(|_| act(random.u64(..bytes / 4096) * 4096, &mut part))
}

/// Operations of a file past the cache, in order: the name of the row and its goal, the bytes, and
/// the operations.
fn direct(bytes: u64) -> Vec<((&'static str, f64), u64, Vec<FileOperation>)> {
    let (small, large) = (bytes / 16 / 4096, bytes / LARGE as u64);
    let mut random = fastrand::Rng::with_seed(9);
    let blocks = LARGE as u32 / 4096;
    let in_order = |writes| {
        (0..large)
            .map(|at| (writes, at * u64::from(blocks), blocks))
            .collect::<Vec<FileOperation>>()
    };
    let mut at_random =
        |writes| (0..small).map(|_| (writes, random.u64(..bytes / 4096), 1)).collect();
    vec![
        (("64K sequential write, direct", 0.95), bytes, in_order(true)),
        (("64K sequential write again, direct", 0.95), bytes, in_order(true)),
        (("64K sequential read, direct", 0.95), bytes, in_order(false)),
        (("4K random overwrite, direct", 0.9), bytes / 16, at_random(true)),
        (("4K random read, direct", 0.9), bytes / 16, at_random(false)),
    ]
}

/// The device without a file system.
fn raw(stage: &TargetStage, scale: &UhsBenchScale, results: &mut UhsBenchResults) -> Result<()> {
    let device = FileDevice::open(stage.node()?, DeviceAccess::ReadWrite)?;
    for ((name, goal), bytes, operations) in direct(scale.data_bytes) {
        let figure = rate(bytes, || {
            in_flight::run_on_device(&device, in_flight::DeviceMemory::Any, operations)
        })?;
        results.add((name, "MB/s", FigureDirection::More, goal), RAW, figure);
    }
    Ok(())
}
