//! Runs the workloads of the queues through the NVMe driver, on the model of a controller with an
//! SSD of the same parts behind it.
//!
//! Each queue of the separation is a pair of NVMe queues, and the controller takes commands from
//! them in turn. Where each queue can have a part of the commands at work only, there is hardly a
//! choice whose turn it is. So a second controller lets any queue have all; there, the target
//! `static+priorities` has weighted round robin, which takes more commands from queues that have
//! small small reads or small writes alone. Time is the SSD's time: the code of the driver takes
//! none.

use std::sync::Arc;

use anyhow::{Context, Result};
use defuse_block::model::SsdParameters;
use defuse_block::{BlockDevice, MemoryRegion, RamDevice};
use defuse_nvme::model::ModelProperties;
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

use super::{BLOCKS, QUEUES, QueueWorkload, policies, run_separated, workloads};
use crate::UhsBenchScale;
use crate::results::UhsBenchResults;

/// The depths of each queue. The caller has a queue of the depth of all, which is 512 at most in
/// the driver.
const DEPTHS: [u32; 3] = [16, 32, 128];

/// Frames of an operation at most.
const FRAMES: u32 = 16;

/// A kind of controller.
struct ControllerKind {
    name: &'static str,
    parts: SsdParameters,
    depths: &'static [u32],
    /// Also with priorities of queues.
    priorities: bool,
}

/// Measures all workloads, each on a new controller.
pub(crate) fn measure(
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
    say: &mut dyn FnMut(String),
) -> Result<()> {
    let deepest = DEPTHS[DEPTHS.len() - 1];
    let memory = MemoryRegion::new(deepest * QUEUES as u32 * FRAMES)?;
    let limited = SsdParameters::default();
    let open = SsdParameters { queue_commands: limited.commands, ..limited.clone() };
    let kinds = [
        ControllerKind { name: "driver", parts: limited, depths: &DEPTHS, priorities: false },
        ControllerKind { name: "driver, no limits", parts: open, depths: &[128], priorities: true },
    ];
    for workload in workloads(scale.queued) {
        say(format!("queues-on-driver: {}", workload.name));
        for kind in &kinds {
            measure_kind(kind, &workload, &memory, results)?;
        }
    }
    Ok(())
}

fn measure_kind(
    kind: &ControllerKind,
    workload: &QueueWorkload,
    memory: &Arc<MemoryRegion>,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for depth in kind.depths {
        let name = format!("{}, {}, depth {depth}", kind.name, workload.name);
        let mut add = |target: &str, separation: &_, priorities| -> Result<()> {
            let disk = open(&kind.parts, priorities, memory)?;
            let ran = run_separated(disk, separation, Some(memory), &workload.streams)?;
            ran.add(&name, target, results);
            Ok(())
        };
        let policies = policies(&workload.divided, *depth);
        for (target, separation) in &policies {
            add(target, separation, false)?;
        }
        if kind.priorities {
            let divided = policies.iter().find(|(target, _)| *target == "static");
            let (_, divided) = divided.context("there is a static separation")?;
            add("static+priorities", divided, true)?;
        }
    }
    Ok(())
}

/// A driver of a new controller that reaches `memory`.
fn open(
    parts: &SsdParameters,
    priorities: bool,
    memory: &Arc<MemoryRegion>,
) -> Result<Arc<dyn BlockDevice>> {
    let shape =
        ModelProperties { parts: Some(parts.clone()), priorities, ..ModelProperties::default() };
    let model = ControllerModel::with(&RamDevice::new(4096, BLOCKS), 1, shape)?;
    let disk = NvmeDevice::open(model, &NvmeOptions::default())?;
    disk.register(memory)?;
    Ok(Arc::new(disk))
}
