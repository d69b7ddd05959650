//! The lease of a device: its files, its registers, and releasing it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_block::{Errno, Result};

use super::iommu::IommuContext;
use super::registers::MappedRegisters;
use super::space::DeviceAddressSpace;
use super::sys;
use crate::host::{HostError, PciAddress, SysfsHost};

/// The command register of the configuration space.
const COMMAND: u64 = 4;

/// Its bit for registers in memory.
const REGISTERS: u16 = 1 << 1;

/// Its bit for access to memory.
const MASTER: u16 = 1 << 2;

/// The files of a device that was opened.
pub(super) struct OpenVfioDevice {
    /// The file that names the device.
    pub(super) path: PathBuf,
    pub(super) device: OwnedFd,
    pub(super) iommu: IommuContext,
    /// The group, where the device was opened by it.
    pub(super) group: Option<OwnedFd>,
}

/// A device in use, until the system revokes it.
pub(super) struct VfioLease {
    registers: MappedRegisters,
    configuration: u64,
    held: Mutex<Option<LeasedDevice>>,
    memory: Arc<DeviceAddressSpace>,
}

struct LeasedDevice {
    device: File,
    _group: Option<OwnedFd>,
}

/// Opens the device at `address`: by its own file where the kernel has that and this user may,
/// otherwise by its group.
pub(super) fn open(
    host: &SysfsHost,
    address: &PciAddress,
    group: Option<u32>,
) -> Result<OpenVfioDevice, HostError> {
    if let Some(name) = host.vfio_name(address) {
        let path = host.path(&format!("dev/vfio/devices/{name}"));
        let open = |path: PathBuf| file(&path).map_err(|error| open_error(path, error));
        match (open(path.clone()), open(host.path("dev/iommu"))) {
            (Ok(device), Ok(iommufd)) => {
                let opened = open_by_iommufd(path.clone(), device.into(), iommufd.into());
                return opened.map_err(|errno| open_error(path, busy(errno)));
            }
            // There is no other way.
            (Err(error), _) | (_, Err(error)) if !host.path("dev/vfio/vfio").exists() => {
                return Err(error);
            }
            _ => {}
        }
    }
    open_by_group(host, address, group.ok_or_else(|| HostError::NoIommu(address.clone()))?)
}

fn open_by_iommufd(path: PathBuf, device: OwnedFd, iommufd: OwnedFd) -> Result<OpenVfioDevice> {
    let iommu = IommuContext::from_iommufd(iommufd)?;
    sys::attach(device.as_fd(), iommu.fd.as_fd(), iommu.space.unwrap_or_default())?;
    Ok(OpenVfioDevice { path, device, iommu, group: None })
}

/// Converts the error of a device in use. The kernel reports the device of another process as
/// invalid.
fn busy(errno: Errno) -> io::Error {
    if errno == Errno::INVAL { Errno::BUSY.into() } else { errno.into() }
}

fn open_by_group(
    host: &SysfsHost,
    address: &PciAddress,
    group: u32,
) -> Result<OpenVfioDevice, HostError> {
    let paths = [host.path("dev/vfio/vfio"), host.path(&format!("dev/vfio/{group}"))];
    let open = |at: usize| file(&paths[at]).map_err(|error| open_error(paths[at].clone(), error));
    let (container, group) = (open(0)?, open(1)?);
    let at = |at: usize| {
        let path = paths[at].clone();
        move |errno: Errno| open_error(path, io::Error::from(errno))
    };
    sys::check_container(container.as_fd()).map_err(at(0))?;
    if !sys::is_viable(group.as_fd()).map_err(at(1))? {
        let error = io::Error::other("the kernel has other devices of the group");
        return Err(open_error(paths[1].clone(), error));
    }
    sys::join(group.as_fd(), container.as_fd()).map_err(at(1))?;
    let device = sys::device(group.as_fd(), &address.to_string()).map_err(at(1))?;
    let iommu = IommuContext::from_container(container.into());
    Ok(OpenVfioDevice { path: paths[1].clone(), device, iommu, group: Some(group.into()) })
}

fn file(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn open_error(path: PathBuf, error: io::Error) -> HostError {
    HostError::System { path, error }
}

impl VfioLease {
    /// Maps the registers, and gives the device access to the bus.
    pub(super) fn new(opened: OpenVfioDevice) -> Result<(Self, Arc<DeviceAddressSpace>)> {
        let device = opened.device.as_fd();
        let configuration = sys::region(device, sys::CONFIGURATION)?.offset;
        let registers = MappedRegisters::new(device, &sys::region(device, sys::REGISTERS)?)?;
        let memory = Arc::new(DeviceAddressSpace::new(opened.iommu));
        let held = LeasedDevice { device: opened.device.into(), _group: opened.group };
        let held = Mutex::new(Some(held));
        let grip = VfioLease { registers, configuration, held, memory: Arc::clone(&memory) };
        grip.command(|command| command | REGISTERS | MASTER).map_err(|_| Errno::IO)?;
        Ok((grip, memory))
    }

    pub(super) fn registers(&self) -> &MappedRegisters {
        &self.registers
    }

    /// Takes the device off the bus, and resets it.
    pub(super) fn stop(&self) {
        let _ = self.command(|command| command & !MASTER | REGISTERS);
        if let Some(held) = &*self.lock_device() {
            let _ = sys::reset(held.device.as_fd());
        }
    }

    /// Closes the device. Its registers read all ones from now on, and it reaches no memory.
    pub(super) fn release(&self) {
        self.stop();
        if let Err(errno) = self.registers.replace_by_ones() {
            // The kernel continues to wait for the device, and logs that.
            log::error!("the registers of a device cannot be left: {errno}");
            return;
        }
        self.memory.cut();
        // A device is gone from its address space when its last file is closed.
        *self.lock_device() = None;
        self.memory.end();
    }

    /// Changes the command register of the configuration space.
    fn command(&self, change: impl FnOnce(u16) -> u16) -> io::Result<()> {
        let held = self.lock_device();
        let Some(LeasedDevice { device, .. }) = &*held else { return Err(Errno::NODEV.into()) };
        let at = self.configuration + COMMAND;
        let mut bytes = [0; 2];
        device.read_exact_at(&mut bytes, at)?;
        let value = change(u16::from_le_bytes(bytes));
        device.write_all_at(&value.to_le_bytes(), at)
    }

    fn lock_device(&self) -> MutexGuard<'_, Option<LeasedDevice>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
