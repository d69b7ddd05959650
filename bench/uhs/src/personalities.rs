//! The four personalities of Filebench with which UHSFS is measured (its tables 7 and 8): uhs
//! inside of this process beside ext4 and xfs, and through a mount of the kernel beside `memory:`.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use defuse_measure::cpu;
use defuse_wml::{RunObserver, WorkloadPlan};

use crate::files::{KernelFiles, TimedFiles};
use crate::mounted::with_mount;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::{TargetStage, UhsBenchTarget};
use crate::{UhsBenchOptions, UhsBenchScale};

/// The names of the workloads.
pub(crate) const ALL: [&str; 4] = ["fileserver", "varmail", "webserver", "webproxy"];

/// One round of all targets.
pub(crate) fn measure(
    stage: &mut TargetStage,
    options: &UhsBenchOptions,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let scale = &options.scale;
    for &name in scale.personalities {
        for target in UhsBenchTarget::ALL {
            stage.with(target, |_, files| {
                run_one(files, name, (name, 1.2), target.name(), scale, results)
            })?;
        }
        let Some(program) = &options.program else { continue };
        let row = format!("kernel mount: {name}");
        for source in ["uhs", "memory"] {
            with_mount(stage, program, source, |at| {
                run_one(&KernelFiles::new(at)?, name, (&row, 0.0), source, scale, results)
            })?;
        }
    }
    Ok(())
}

fn run_one(
    files: &dyn TimedFiles,
    name: &str,
    (row, goal): (&str, f64),
    target: &str,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let plan = plan(files, name, scale)?;
    let begun = StartClocks::default();
    let reports = files.execute(&plan, &begun).with_context(|| format!("{name} on {target}"))?;
    let before = begun.0.into_inner().unwrap_or_else(PoisonError::into_inner);
    let used = before.context("a run begins")?.usage_until(&cpu::CpuSample::take(None));
    let total = &reports.last().context("a workload has a run")?.total;
    let cpu_us = used.system_ns as f64 / 1e3 / total.operations.max(1) as f64;
    results.add((row, "1/s", FigureDirection::More, goal), target, total.operations_per_second);
    results.add((row, "us of CPU", FigureDirection::Less, goal), target, cpu_us);
    Ok(())
}

/// The workload with the files and threads of table 7, or with the files and threads of the scale.
fn plan(files: &dyn TimedFiles, name: &str, scale: &UhsBenchScale) -> Result<WorkloadPlan> {
    let builtin = defuse_wml::builtin(name).with_context(|| format!("no workload {name}"))?;
    let root = files.root().to_str().context("the path of the mount is UTF-8")?;
    let mut variables = vec![format!("dir=\"{root}\""), format!("seconds={}", scale.seconds)];
    if let Some(threads) = scale.threads {
        // Enough files that threads find some to make and some to remove.
        variables.extend([format!("nthreads={threads}"), format!("nfiles={}", 100 * threads)]);
    }
    let options = defuse_wml::LoadOptions { variables, ..defuse_wml::LoadOptions::default() };
    Ok(defuse_wml::load(builtin.text, &format!("{name}.f"), &options)?)
}

/// The CPU clocks when the files exist and the run begins.
#[derive(Default)]
struct StartClocks(Mutex<Option<cpu::CpuSample>>);

impl RunObserver for StartClocks {
    fn begin(&self, _: Option<Duration>) {
        let mut begun = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *begun = Some(cpu::CpuSample::take(None));
    }
}
