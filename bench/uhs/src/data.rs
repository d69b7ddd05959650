//! Reads and writes of one file, against the device itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use defuse_block::{Access, Device, File, Op, OpKind, Region, Segments};

use crate::Scale;
use crate::files::Files;
use crate::results::{Better, Results};
use crate::targets::{Stage, Target};

/// Operations in flight on the device itself.
const DEPTH: u32 = 32;

/// Bytes of a sequential operation.
const LARGE: usize = 64 << 10;

/// One round of all targets.
pub(crate) fn measure(stage: &mut Stage, scale: &Scale, results: &mut Results) -> Result<()> {
    raw(stage, scale, results)?;
    for target in Target::ALL {
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
    files: &dyn Files,
    (prefix, target): (&str, &str),
    scale: &Scale,
    results: &mut Results,
) -> Result<()> {
    let mut file = files.open("/file")?;
    let bytes = scale.data_bytes;
    let mut add = |name, figure| {
        results.add((&format!("{prefix}{name}"), "MB/s", Better::More, 0.0), target, figure)
    };
    // The second time memory for pages has been used before.
    for name in ["64K sequential write, synced", "64K sequential write again, synced"] {
        let written = rate(bytes, || {
            sequential(bytes, |at, part| file.write(at, part))?;
            file.sync()
        })?;
        add(name, written);
    }
    add(
        "64K sequential read",
        rate(bytes, || sequential(bytes, |at, part| file.read(at, part).map(drop)))?,
    );
    let small = bytes / 16;
    add(
        "4K random overwrite, synced",
        rate(small, || {
            random(bytes, small, |at, part| file.write(at, part))?;
            file.sync()
        })?,
    );
    add(
        "4K random read",
        rate(small, || random(bytes, small, |at, part| file.read(at, part).map(drop)))?,
    );
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

/// The device without a file system.
fn raw(stage: &Stage, scale: &Scale, results: &mut Results) -> Result<()> {
    let device = File::open(stage.node()?, Access::ReadWrite)?;
    let region = Region::new((DEPTH * 16).next_power_of_two())?;
    device.register(&region)?;
    let (bytes, mut random) = (scale.data_bytes, fastrand::Rng::with_seed(9));
    let mut at_random = || random.u64(..bytes / 4096);
    let small = bytes / 16 / 4096;
    let large = bytes / LARGE as u64;
    let mut add = |name, bytes: u64, kinds: &mut dyn Iterator<Item = (bool, u64, u32)>| {
        let figure = rate(bytes, || operations(&device, &region, kinds))?;
        results.add((name, "MB/s", Better::More, 0.0), "raw", figure);
        anyhow::Ok(())
    };
    add("64K sequential write, synced", bytes, &mut (0..large).map(|at| (true, at * 16, 16)))?;
    add(
        "64K sequential write again, synced",
        bytes,
        &mut (0..large).map(|at| (true, at * 16, 16)),
    )?;
    add("64K sequential read", bytes, &mut (0..large).map(|at| (false, at * 16, 16)))?;
    let mut places: Vec<u64> = (0..small).map(|_| at_random()).collect();
    add("4K random overwrite, synced", bytes / 16, &mut places.iter().map(|at| (true, *at, 1)))?;
    places.reverse();
    add("4K random read", bytes / 16, &mut places.iter().map(|at| (false, *at, 1)))
}

/// Makes operations (a write, at a block, of so many blocks), and flushes.
pub(crate) fn operations(
    device: &File,
    region: &Arc<Region>,
    kinds: &mut dyn Iterator<Item = (bool, u64, u32)>,
) -> Result<()> {
    let mut queue = device.queue(DEPTH)?;
    let (mut done, mut spare) = (Vec::new(), HashMap::<u32, Vec<Segments>>::new());
    let mut over = false;
    while !over || queue.in_flight() > 0 {
        while !over && queue.in_flight() < DEPTH as usize {
            let Some((writes, block, blocks)) = kinds.next() else {
                over = true;
                break;
            };
            let memory = match spare.get_mut(&blocks).and_then(Vec::pop) {
                Some(memory) => memory,
                None => region.take(blocks).context("no frame is free")?.into(),
            };
            let kind = match writes {
                true => OpKind::Write { block, memory, fua: false },
                false => OpKind::Read { block, memory },
            };
            anyhow::ensure!(queue.push(Op { tag: u64::from(blocks), kind }).is_ok(), "no room");
        }
        queue.kick();
        if queue.in_flight() > 0 {
            queue.wait(None);
        }
        queue.reap(&mut done);
        for one in done.drain(..) {
            one.result?;
            spare.entry(one.tag as u32).or_default().push(one.memory);
        }
    }
    defuse_block::Blocking::new(device)?.flush()?;
    Ok(())
}
