//! Operations on names through a mount of the kernel: uhs against `memory:`, which needs no device.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use defuse_measure::command;

use crate::files::{Files, Kernel};
use crate::results::{Better, Results};
use crate::targets::Stage;
use crate::{Options, timed};

/// Files at most.
const MOST_FILES: usize = 100_000;

/// One round.
pub(crate) fn measure(stage: &mut Stage, options: &Options, results: &mut Results) -> Result<()> {
    let Some(program) = &options.program else { return Ok(()) };
    let program = program.to_string_lossy();
    let node = stage.node()?.as_os_str().to_owned();
    let mut uhs = OsString::from("uhs:");
    uhs.push(&node);
    for (target, source) in [("uhs", uhs), ("memory", OsString::from("memory:"))] {
        if target == "uhs" {
            let make = ["mkfs".as_ref(), "uhs".as_ref(), node.as_os_str(), "--force".as_ref()];
            command::output(&program, &make)?;
        }
        let at = stage.mountpoint().as_os_str();
        command::output(&program, &["mount".as_ref(), source.as_os_str(), at])?;
        let done = phases(stage.mountpoint(), options.scale.files.min(MOST_FILES), target, results);
        command::output(&program, &["umount".as_ref(), at])?;
        done?;
    }
    Ok(())
}

fn phases(at: &Path, count: usize, target: &str, results: &mut Results) -> Result<()> {
    let files = Kernel::new(at)?;
    files.mkdir("/d")?;
    let mut phase = |name: &str, act: &dyn Fn(&str) -> Result<()>| -> Result<()> {
        let took = timed(|| (0..count).try_for_each(|file| act(&format!("/d/file{file:06}"))))?;
        let name = format!("kernel mount: {name}");
        let figure = count as f64 / took.seconds;
        results.add((&name, "1/s", Better::More, 0.9), target, figure);
        Ok(())
    };
    phase("create", &|path| files.create(path))?;
    phase("stat", &|path| files.stat(path))?;
    phase("unlink", &|path| files.unlink(path))
}
