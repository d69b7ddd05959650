//! Space on the device, and memory of closed files.

use anyhow::Result;
use defuse_direct::{Client, MountArgs};
use defuse_memory::Memory;
use std::sync::Arc;

use crate::Scale;
use crate::files::{Files, Inside, NAME};
use crate::results::{Better, Results};
use crate::targets::{Stage, Target};

/// One round of all targets.
pub(crate) fn measure(stage: &mut Stage, scale: &Scale, results: &mut Results) -> Result<()> {
    for target in Target::ALL {
        stage.with(target, |stage, files| small(stage, files, target, scale, results))?;
        stage.with(target, |_, files| large(files, target, scale, results))?;
    }
    let resident = |files: &dyn Files, count: usize| -> Result<f64> {
        let before = resident()?;
        files.mkdir("/d")?;
        (0..count).try_for_each(|file| files.create(&format!("/d/file{file:010}")))?;
        files.sync()?;
        Ok((self::resident()? as f64 - before as f64) / count as f64)
    };
    let row = ("memory of a closed file", "bytes", Better::Less, 3.0);
    let bytes = stage.with(Target::Uhs, |_, files| resident(files, scale.files))?;
    results.add(row, "uhs", bytes);
    let client = Client::new(Default::default());
    client.mount(NAME, Arc::new(Memory::new(Default::default())), &MountArgs::default())?;
    results.add(row, "memory", resident(&Inside::new(&client)?, scale.files)?);
    Ok(())
}

/// Fresh files of 1 KiB.
fn small(
    stage: &Stage,
    files: &dyn Files,
    target: Target,
    scale: &Scale,
    results: &mut Results,
) -> Result<()> {
    let count = scale.files.min(250_000);
    let (used, written) = (files.used()?, stage.written()?);
    files.mkdir("/d")?;
    for file in 0..count {
        files.open(&format!("/d/file{file:07}"))?.write(0, &[file as u8; 1024])?;
    }
    files.sync()?;
    let bytes = |blocks: u64| (blocks * 4096) as f64 / count as f64;
    let name = "fresh file of 1 KiB";
    let row = (name, "bytes used", Better::Less, 0.0);
    results.add(row, target.name(), bytes(files.used()?.saturating_sub(used)));
    let written = (stage.written()? - written) as f64 / count as f64;
    results.add((name, "bytes written", Better::Less, 0.0), target.name(), written);
    Ok(())
}

/// Files with a mean of 256 KiB.
fn large(files: &dyn Files, target: Target, scale: &Scale, results: &mut Results) -> Result<()> {
    let (used, mut total, mut number) = (files.used()?, 0, 0);
    let mut random = fastrand::Rng::with_seed(3);
    while total < scale.data_bytes {
        // Sizes whose logarithms are even: many small ones and a few large ones.
        let size = (4096.0 * 2.0_f64.powf(random.f64() * 9.05)) as u64;
        let mut open = files.open(&format!("/file{number:06}"))?;
        let bytes = vec![number as u8; size as usize];
        for (at, part) in bytes.chunks(64 << 10).enumerate() {
            open.write((at * (64 << 10)) as u64, part)?;
        }
        (total, number) = (total + size, number + 1);
    }
    files.sync()?;
    let used = files.used()?.saturating_sub(used) * 4096;
    let row = ("files with a mean of 256 KiB", "used/bytes", Better::Less, 0.0);
    results.add(row, target.name(), used as f64 / total as f64);
    Ok(())
}

/// Bytes of memory of this process, proc_pid_statm(5).
fn resident() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.unwrap_or(0) * 4096)
}
