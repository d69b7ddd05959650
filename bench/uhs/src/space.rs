//! Space on the device. `--example names` of `defuse-bench` measures the memory of closed files, in
//! a process of its own.

use anyhow::Result;

use crate::UhsBenchScale;
use crate::files::TimedFiles;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget};

/// One round of all targets.
pub(crate) fn measure(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for target in UhsBenchTarget::ALL {
        stage.with(target, |stage, files| small(stage, files, target, scale, results))?;
        stage.with(target, |_, files| large(files, target, scale, results))?;
    }
    Ok(())
}

/// Fresh files of 1 KiB.
fn small(
    stage: &TargetStage,
    files: &dyn TimedFiles,
    target: UhsBenchTarget,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let count = scale.files.min(250_000);
    let (used, written) = (files.used_blocks()?, stage.bytes_written()?);
    files.mkdir(&files.name("/d")?)?;
    for file in 0..count {
        files.open(&format!("/d/file{file:07}"))?.write(0, &[file as u8; 1024])?;
    }
    files.sync()?;
    let bytes = |blocks: u64| (blocks * 4096) as f64 / count as f64;
    let name = "fresh file of 1 KiB";
    let row = (name, "bytes used", FigureDirection::Less, 0.0);
    results.add(row, target.name(), bytes(files.used_blocks()?.saturating_sub(used)));
    let written = (stage.bytes_written()? - written) as f64 / count as f64;
    results.add((name, "bytes written", FigureDirection::Less, 0.0), target.name(), written);
    Ok(())
}

/// Files with a mean of 256 KiB.
fn large(
    files: &dyn TimedFiles,
    target: UhsBenchTarget,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let (used, mut total, mut number) = (files.used_blocks()?, 0, 0);
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
    let used = files.used_blocks()?.saturating_sub(used) * 4096;
    let row = ("files with a mean of 256 KiB", "used/bytes", FigureDirection::Less, 0.0);
    results.add(row, target.name(), used as f64 / total as f64);
    Ok(())
}
