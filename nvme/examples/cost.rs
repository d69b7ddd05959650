//! The CPU time of random reads of 4 KiB: of the driver on a controller that answers at once, and
//! of io_uring with registered buffers on the files and block devices that are named, in turn.

use std::path::Path;
use std::time::Duration;

use defuse_block::{DeviceAccess, FileDevice, RamDevice};
use defuse_nvme::measure::{InstantController, RandomReadTest};
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

const READS: RandomReadTest = RandomReadTest { depth: 32, time: Duration::from_secs(1) };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    for _ in 0..3 {
        let controller =
            InstantController::new(ControllerModel::new(&RamDevice::new(4096, 1 << 16), 1)?);
        let cost = READS.run(&NvmeDevice::open(controller, &NvmeOptions::default())?)?;
        println!("{:8.0} ns  the driver ({} reads)", cost.cpu_ns(), cost.operations);
        for path in &files {
            let cost = READS.run(&FileDevice::open(Path::new(path), DeviceAccess::Read)?)?;
            println!("{:8.0} ns  {path} ({} reads)", cost.cpu_ns(), cost.operations);
        }
    }
    Ok(())
}
