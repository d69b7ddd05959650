//! Operations on names through a mount of the kernel: uhs against `memory:`, which needs no device.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use defuse_measure::{command, mount};

use crate::files::{KernelFiles, PreparedPath, TimedFiles};
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::TargetStage;
use crate::{UhsBenchOptions, time_work};

/// Files at most.
const MOST_FILES: usize = 100_000;

/// One round.
pub(crate) fn measure(
    stage: &mut TargetStage,
    options: &UhsBenchOptions,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let Some(program) = &options.program else { return Ok(()) };
    let count = options.scale.files.min(MOST_FILES);
    for target in ["uhs", "memory"] {
        with_mount(stage, program, target, |at| phases(at, count, target, results))?;
    }
    Ok(())
}

/// Calls `work` with the mountpoint of a new file system: `uhs` on the device of the stage, or
/// `memory`.
pub(crate) fn with_mount(
    stage: &TargetStage,
    program: &Path,
    target: &str,
    work: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let mut source = OsString::from(format!("{target}:"));
    if target == "uhs" {
        let node = stage.node()?.as_os_str();
        let mkfs = ["mkfs".as_ref(), "uhs".as_ref(), node, "--force".as_ref()];
        command::output(&program.to_string_lossy(), &mkfs)?;
        source.push(node);
    }
    let at = stage.mountpoint();
    mount::with_mount(program, &source, at, || work(at))
}

fn phases(at: &Path, count: usize, target: &str, results: &mut UhsBenchResults) -> Result<()> {
    let files = KernelFiles::new(at)?;
    files.mkdir(&files.name("/d")?)?;
    let names = (0..count).map(|file| files.name(&format!("/d/file{file:06}")));
    let names = names.collect::<Result<Vec<PreparedPath>>>()?;
    let mut phase = |name: &str, act: &dyn Fn(&PreparedPath) -> Result<()>| -> Result<()> {
        let took = time_work(|| names.iter().try_for_each(act))?;
        let name = format!("kernel mount: {name}");
        let figure = count as f64 / took.seconds;
        results.add((&name, "1/s", FigureDirection::More, 0.9), target, figure);
        Ok(())
    };
    phase("create", &|name| files.create(name))?;
    phase("stat", &|name| files.stat(name))?;
    phase("unlink", &|name| files.unlink(name))
}
