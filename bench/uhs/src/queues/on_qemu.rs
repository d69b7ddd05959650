//! Runs the workloads of the queues on the controller that QEMU emulates, over a drive that is
//! throttled.
//!
//! A register of that controller takes about 30 us, which several commands share. The drive
//! takes [`DRIVE`]: 250 us for a command or more, so that it is the bottleneck. The target
//! `unthrottled` shows how much faster the rest is.

use std::fs::File;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use defuse_block::{BlockDevice, MemoryRegion};
use defuse_nvme::qemu::{QemuController, QemuOptions};
use defuse_nvme::{NvmeDevice, NvmeOptions};
use rustix::fs::MemfdFlags;

use super::{QUEUES, policies, run, run_separated, workloads};
use crate::UhsBenchScale;
use crate::results::UhsBenchResults;

/// The limits of the drive: 4000 commands and 64 MB a second.
const DRIVE: [&str; 2] = ["throttling.iops-total=4000", "throttling.bps-total=64000000"];

/// Bytes of the drive, which is in memory.
const BYTES: u64 = 1 << 30;

/// Bytes of memory of the machine: the data of all operations in flight, and queues.
const MEMORY: u32 = 192 << 20;

/// Depths of each queue.
const DEPTHS: [u32; 2] = [16, 256];

/// A drive that was idle for a tenth of a second takes as much work at once as it could have done
/// meanwhile. So each run begins after a longer pause.
const PAUSE: Duration = Duration::from_millis(250);

/// Operations for one of those on a device: the drive is slow.
const LESS: u64 = 5;

/// The longest time of a command.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Measures all workloads: in each round, all targets one after the other at each depth.
pub(crate) fn measure(
    scale: &UhsBenchScale,
    rounds: u32,
    results: &mut UhsBenchResults,
    say: &mut dyn FnMut(String),
) -> Result<()> {
    let (throttled, memory) = open(&QemuOptions::default().program, &DRIVE)?;
    let (unthrottled, its_memory) = open(&QemuOptions::default().program, &[])?;
    for round in 1..=rounds {
        say(format!("queues-on-qemu: round {round} of {rounds}"));
        for workload in workloads(scale.queued / LESS) {
            for depth in DEPTHS {
                let name = format!("QEMU, {}, depth {depth}", workload.name);
                let one = [
                    ("one queue", &throttled, &memory),
                    ("unthrottled", &unthrottled, &its_memory),
                ];
                for (target, disk, memory) in one {
                    std::thread::sleep(PAUSE);
                    let queue = disk.queue(depth * QUEUES as u32)?;
                    let ran = run(&**disk, &disk.clock(), queue, Some(memory), &workload.streams)?;
                    ran.add(&name, target, results);
                }
                for (target, separation) in policies(&workload.divided, depth) {
                    std::thread::sleep(PAUSE);
                    let disk = Arc::clone(&throttled) as Arc<dyn BlockDevice>;
                    let ran = run_separated(disk, &separation, Some(&memory), &workload.streams)?;
                    ran.add(&name, target, results);
                }
            }
        }
    }
    Ok(())
}

/// A controller in QEMU with a drive of these properties, and the memory of its machine, from which
/// no data is copied.
fn open(program: &str, drive: &[&str]) -> Result<(Arc<NvmeDevice>, Arc<MemoryRegion>)> {
    let image = File::from(rustix::fs::memfd_create(c"defuse-bench-drive", MemfdFlags::CLOEXEC)?);
    image.set_len(BYTES)?;
    let drive = drive.iter().map(|property| (*property).to_owned()).collect();
    let (program, memory) = (program.to_owned(), MEMORY);
    let options = QemuOptions { program, memory, drive, ..QemuOptions::default() };
    let qemu = QemuController::start(&image, &options).map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!(
            "there is no {}: install it (the package qemu-system-x86 of Debian)",
            options.program
        ),
        _ => error.into(),
    })?;
    let memory = Arc::clone(qemu.memory());
    let options = NvmeOptions { timeout: TIMEOUT, ..NvmeOptions::default() };
    let disk =
        NvmeDevice::open(qemu, &options).context("the controller of QEMU cannot be opened")?;
    disk.register(&memory)?;
    Ok((Arc::new(disk), memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_qemu_the_package_is_named() {
        let error = open("/no/such/qemu", &DRIVE).unwrap_err().to_string();
        assert!(
            error.contains("/no/such/qemu: install it (the package qemu-system-x86"),
            "{error}"
        );
    }
}
