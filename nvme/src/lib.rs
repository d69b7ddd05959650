//! An NVMe driver in user space: a block device on the queues of a controller, without the kernel.
//!
//! [`NvmeDevice`] is a [`BlockDevice`](defuse_block::BlockDevice) on a namespace. It reaches the
//! controller through a [`ControllerTransport`], such as [`vfio`]: a device of this
//! machine, [`qemu`]: the controller that QEMU emulates, and [`model`]: a controller in this
//! process that fails on demand.
//!
//! The controller is not trusted: completions of no command, registers with wrong values, and
//! missing answers are errors, and each operation is answered exactly once. A command without an
//! answer is aborted. Then the controller is reset, and commands that did not cause the reset are
//! sent again. Memory goes back to its owner when its command is complete, or when the controller
//! was stopped or cut off.
//!
//! The crate has no management of namespaces, no fused commands, and no metadata or protection
//! information.
//!
//! ```
//! use defuse_block::{BlockingQueue, RamDevice};
//! use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};
//!
//! let model = ControllerModel::new(&RamDevice::new(4096, 256), 1)?;
//! let disk = NvmeDevice::open(model, &NvmeOptions::default())?;
//! let mut line = BlockingQueue::new(&disk)?;
//! line.write(7, &[1; 4096])?;
//! line.flush()?;
//! let mut block = vec![0; 4096];
//! line.read(7, &mut block)?;
//! assert_eq!(block, [1; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod controller;
mod device;
mod dma;
mod driver;
mod fuzzed;
pub mod host;
pub mod measure;
pub mod model;
mod options;
pub mod qemu;
mod queue;
mod ring;
pub mod spec;
mod transport;
pub mod vfio;

pub use controller::{AdminFailure, ControllerEvent, NvmeController};
pub use device::NvmeDevice;
pub use dma::DmaMemory;
pub use driver::DRIVER;
pub use fuzzed::controller as fuzz_controller;
pub use model::ControllerModel;
pub use options::{NvmeError, NvmeOptions};
pub use qemu::QemuController;
pub use transport::ControllerTransport;
pub use vfio::VfioController;
