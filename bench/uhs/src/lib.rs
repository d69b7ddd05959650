//! uhs beside ext4 and xfs: the same operations on the same names, on loop devices with blocks of 4
//! KiB in memory.
//!
//! uhs runs inside of this process, the others in the kernel. All targets take turns in rounds,
//! each on a new file system, so that ratios are valid on a busy machine. CPU time is the time of
//! the whole machine, with the threads of the kernel and of the loop devices. Every phase ends with
//! a sync, which counts.
//!
//! The elastic separation of queues is measured on a model of an SSD ([`queues`]), since no order
//! of operations matters to memory, and through the NVMe driver on the model of a controller with
//! such an SSD; on a loop device it costs CPU, and that is measured, too. QEMU's NVMe controller
//! with a throttled drive is a further device for it.

#![forbid(unsafe_code)]

mod calls;
mod clients;
mod data;
mod files;
mod mounted;
mod mounts;
mod names;
mod personalities;
pub mod queues;
pub mod results;
mod space;
mod sync;
mod targets;

use std::path::PathBuf;

use anyhow::{Context, Result};
use defuse_measure::cpu;
use std::time::Instant;

use results::{FigureRow, UhsBenchResults};
use targets::TargetStage;

/// The amount of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UhsBenchScale {
    /// Files of the phases on names.
    pub files: usize,
    /// Directories that they are in, where it is not one.
    pub directories: usize,
    /// Files that are written and synced, each.
    pub synced: usize,
    /// Bytes of the file of the phases on data.
    pub data_bytes: u64,
    /// Operations on queues of each stream, at 4 KiB.
    pub queued: u64,
    /// Personalities of Filebench.
    pub personalities: &'static [&'static str],
    /// Seconds of each personality.
    pub seconds: u32,
    /// Threads of each personality; `None` for those that it has.
    pub threads: Option<u32>,
}

impl UhsBenchScale {
    /// A million files.
    pub fn full() -> UhsBenchScale {
        UhsBenchScale {
            files: 1_000_000,
            directories: 1000,
            synced: 4000,
            data_bytes: 512 << 20,
            queued: 100_000,
            personalities: &personalities::ALL,
            seconds: 30,
            threads: None,
        }
    }

    /// A hundred thousand files: a minute.
    pub fn quick() -> UhsBenchScale {
        UhsBenchScale {
            files: 100_000,
            directories: 100,
            synced: 1000,
            data_bytes: 128 << 20,
            queued: 20_000,
            personalities: &personalities::ALL,
            seconds: 5,
            threads: None,
        }
    }

    /// Everything once and small, as a test.
    pub fn tiny() -> UhsBenchScale {
        UhsBenchScale {
            files: 300,
            directories: 10,
            synced: 20,
            data_bytes: 1 << 20,
            queued: 200,
            personalities: &["varmail"],
            seconds: 1,
            threads: Some(2),
        }
    }

    /// The amount of work by name.
    ///
    /// # Errors
    ///
    /// A sentence with the names that exist.
    pub fn from_name(name: &str) -> std::result::Result<UhsBenchScale, String> {
        match name {
            "full" => Ok(UhsBenchScale::full()),
            "quick" => Ok(UhsBenchScale::quick()),
            "tiny" => Ok(UhsBenchScale::tiny()),
            _ => Err(format!("there is no scale {name:?}: write full, quick or tiny")),
        }
    }
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UhsBenchPart {
    /// Operations on names.
    Names,
    /// Files that are written and synced.
    Sync,
    /// Reads and writes of one file.
    Data,
    /// Space on the device and in memory.
    Space,
    /// Times of mounts.
    Mounts,
    /// Operations on names through a mount of the kernel.
    Mounted,
    /// The personalities of Filebench.
    Personalities,
    /// Several processes by shared memory, a socket and mounts.
    Clients,
    /// The separation of queues, on a model of an SSD.
    Queues,
    /// The separation of queues, through the NVMe driver on the model of a controller with an SSD.
    QueuesOnDriver,
    /// The separation of queues, on the loop device.
    QueuesOnDevice,
    /// The separation of queues, on the controller of QEMU with a drive that is throttled.
    QueuesOnQemu,
}

impl UhsBenchPart {
    /// All parts, with their names on the command line.
    pub const ALL: [(&'static str, UhsBenchPart); 12] = [
        ("names", UhsBenchPart::Names),
        ("sync", UhsBenchPart::Sync),
        ("data", UhsBenchPart::Data),
        ("space", UhsBenchPart::Space),
        ("mounts", UhsBenchPart::Mounts),
        ("mounted", UhsBenchPart::Mounted),
        ("personalities", UhsBenchPart::Personalities),
        ("clients", UhsBenchPart::Clients),
        ("queues", UhsBenchPart::Queues),
        ("queues-on-driver", UhsBenchPart::QueuesOnDriver),
        ("queues-on-device", UhsBenchPart::QueuesOnDevice),
        ("queues-on-qemu", UhsBenchPart::QueuesOnQemu),
    ];

    /// The parts that need no program but the tools of file systems.
    pub fn default_parts() -> Vec<UhsBenchPart> {
        let all = UhsBenchPart::ALL.into_iter().map(|(_, part)| part);
        all.filter(|part| *part != UhsBenchPart::QueuesOnQemu).collect()
    }

    /// The part of this name.
    ///
    /// # Errors
    ///
    /// A sentence with the names that exist.
    pub fn from_name(name: &str) -> std::result::Result<UhsBenchPart, String> {
        let found = UhsBenchPart::ALL.iter().find(|(known, _)| *known == name);
        let names = UhsBenchPart::ALL.map(|(name, _)| name).join(", ");
        found
            .map(|(_, part)| *part)
            .ok_or(format!("there is no part {name:?}: write one of {names}"))
    }
}

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct UhsBenchOptions {
    /// The amount of work.
    pub scale: UhsBenchScale,
    /// The parts to measure.
    pub parts: Vec<UhsBenchPart>,
    /// Rounds.
    pub rounds: u32,
    /// Directory for images and mounts.
    pub work: PathBuf,
    /// The program `defuse`, for mounts of the kernel; without it they are left out.
    pub program: Option<PathBuf>,
}

/// Measures. `say` receives a line for each step, and `finished` the rows of each part when it is
/// done.
///
/// # Errors
///
/// Where a device or a file system cannot be made (not root, no room, no program), or an operation
/// fails.
pub fn run(
    options: &UhsBenchOptions,
    say: &mut dyn FnMut(String),
    finished: &mut dyn FnMut(&[FigureRow]),
) -> Result<UhsBenchResults> {
    let mut results = UhsBenchResults::default();
    for part in &options.parts {
        let before = results.rows.len();
        match part {
            UhsBenchPart::Queues => queues::measure(&options.scale, &mut results, say)?,
            UhsBenchPart::QueuesOnDriver => {
                queues::measure_on_driver(&options.scale, &mut results, say)?;
            }
            UhsBenchPart::QueuesOnQemu => {
                queues::measure_on_qemu(&options.scale, options.rounds, &mut results, say)?;
            }
            part => {
                let mut stage = TargetStage::new(options).context("the devices cannot be made")?;
                for round in 1..=options.rounds {
                    let name = UhsBenchPart::ALL
                        .iter()
                        .find(|(_, known)| known == part)
                        .map_or("", |p| p.0);
                    say(format!("{name}: round {round} of {}", options.rounds));
                    match part {
                        UhsBenchPart::Names => {
                            names::measure(&mut stage, &options.scale, &mut results)?
                        }
                        UhsBenchPart::Sync => {
                            sync::measure(&mut stage, &options.scale, &mut results)?
                        }
                        UhsBenchPart::Data => {
                            data::measure(&mut stage, &options.scale, &mut results)?
                        }
                        UhsBenchPart::Mounts => {
                            mounts::measure(&mut stage, &options.scale, &mut results)?
                        }
                        UhsBenchPart::Mounted => {
                            mounted::measure(&mut stage, options, &mut results)?
                        }
                        UhsBenchPart::QueuesOnDevice => {
                            queues::measure_on_device(&mut stage, &options.scale, &mut results)?;
                        }
                        UhsBenchPart::Personalities => {
                            personalities::measure(&mut stage, options, &mut results)?;
                        }
                        UhsBenchPart::Clients => {
                            clients::measure(&mut stage, options, &mut results)?
                        }
                        _ => space::measure(&mut stage, &options.scale, &mut results)?,
                    }
                }
            }
        }
        finished(&results.rows[before..]);
    }
    Ok(results)
}

/// Time and CPU of some work.
struct WorkTime {
    seconds: f64,
    /// CPU seconds of the whole machine, in steps of 10 ms.
    cpu: f64,
}

fn time_work(work: impl FnOnce() -> Result<()>) -> Result<WorkTime> {
    let (before, begun) = (cpu::CpuSample::take(None), Instant::now());
    work()?;
    let seconds = begun.elapsed().as_secs_f64();
    let used = before.usage_until(&cpu::CpuSample::take(None));
    Ok(WorkTime { seconds, cpu: used.system_ns as f64 / 1e9 })
}
