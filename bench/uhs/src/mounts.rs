//! Times of mounts: after a power failure, after a clean end, and of reading the slots alone.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use defuse_block::{BlockDevice, DeviceAccess, FileDevice};
use defuse_measure::command;
use defuse_measure::loop_device::ImageLoopDevice;
use defuse_uhs::Uhs;

use crate::UhsBenchScale;
use crate::files::in_flight;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{BLOCK, TargetStage, UhsBenchTarget, sectors};

/// Blocks of a read: 1 MiB.
const READ: u64 = 256;

/// Files at most: the image is there twice.
const MOST_FILES: usize = 500_000;

/// One round.
pub(crate) fn measure(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let files = scale.files.min(MOST_FILES);
    let copy = stage.with(UhsBenchTarget::Uhs, |stage, target| {
        (0..scale.directories)
            .try_for_each(|dir| target.mkdir(&target.name(&format!("/d{dir:04}"))?))?;
        for file in 0..files {
            let path = format!("/d{:04}/file{file:07}", file % scale.directories);
            target.create(&target.name(&path)?)?;
        }
        target.sync()?;
        // The image at this moment, as a power failure leaves it.
        let image = stage.device()?.image();
        let copy = image.with_extension("copy");
        let paths = [image.as_os_str(), copy.as_os_str()];
        command::output("cp", &[&["--sparse=always".as_ref()], &paths[..]].concat())?;
        Ok(copy)
    })?;
    let crashed = ImageLoopDevice::attach(&copy, BLOCK)?;
    let mut add = |name: &str, unit: &'static str, figure: f64| {
        results.add((name, unit, FigureDirection::Less, 0.0), "uhs", figure);
    };
    let slots = measure_reading(&crashed, files as u64)?;
    add("reading as many slots as there are files", "s", slots);
    for (name, device) in [("a power failure", &crashed), ("a clean end", stage.device()?)] {
        let before = sectors(device, 2)?;
        let seconds = mounting(device)?;
        let name = format!("mount after {name}");
        add(&name, "s", seconds);
        add(&name, "MB read", (sectors(device, 2)? - before) as f64 / 1e6);
    }
    Ok(())
}

fn mounting(device: &ImageLoopDevice) -> Result<f64> {
    let file = Arc::new(FileDevice::open(device.node(), DeviceAccess::ReadWrite)?);
    let begun = Instant::now();
    let (uhs, problems) = Uhs::open(file, Default::default(), fastrand::Rng::new())?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(problems.is_empty(), "the file system is damaged: {problems:?}");
    drop(uhs);
    Ok(seconds)
}

fn measure_reading(device: &ImageLoopDevice, blocks: u64) -> Result<f64> {
    let file = FileDevice::open(device.node(), DeviceAccess::Read)?;
    let blocks = blocks.min(file.properties().blocks);
    let begun = Instant::now();
    let reads = (0..blocks).step_by(READ as usize);
    let length = |block| READ.min(blocks - block) as u32;
    let reads = reads.map(|block| (false, block, length(block))).collect();
    in_flight::run_on_device(&file, in_flight::DeviceMemory::Registered, reads)?;
    Ok(begun.elapsed().as_secs_f64())
}
