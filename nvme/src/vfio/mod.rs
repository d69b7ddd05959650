//! Controllers of this machine that vfio-pci has (the kernel's Documentation/driver-api/vfio.rst): registers are mapped, an IOMMU limits the
//! device to memory that was given to it, and interrupts count in eventfds. Whoever owns the group in /dev/vfio needs no
//! other rights.

mod sys;

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_block::{Clock, Errno, FRAME, Monotonic, Region, Result, Waker};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::host::{Address, Host, HostError, VFIO};
use crate::{Dma, Transport};
use sys::{Mapping, Registers};

/// The first address of memory for the device, above what machines have at fixed addresses.
const FIRST: u64 = 1 << 32;

/// The end of the addresses that every IOMMU has.
const END: u64 = 1 << 39;

/// Interrupts that are used at most.
const VECTORS: u32 = 65;

/// The command register of the configuration space, and its bits for memory and access to memory.
const COMMAND: (u64, u16) = (4, 1 << 1 | 1 << 2);

/// A controller that vfio-pci has. Closing it resets the controller.
pub struct Vfio {
    name: String,
    numa_node: Option<u32>,
    registers: Registers,
    interrupts: Vec<Arc<OwnedFd>>,
    configuration: u64,
    device: std::fs::File,
    memory: Arc<Container>,
    /// Regions of callers, which the device reaches as long as this is open.
    kept: Mutex<Vec<Dma>>,
    clock: Monotonic,
    _group: OwnedFd,
}

/// The address space of the device.
struct Container {
    fd: Arc<OwnedFd>,
    addresses: Mutex<Addresses>,
}

/// Addresses for the device.
#[derive(Default)]
struct Addresses {
    used: u64,
    /// Ranges that were given back: length and start.
    free: Vec<(usize, u64)>,
}

/// A region that the device reaches, and its address.
struct Reached {
    mapping: Option<Mapping>,
    container: Arc<Container>,
    bus: u64,
    bytes: usize,
}

impl Vfio {
    /// Opens the controller at `address`.
    ///
    /// # Errors
    ///
    /// [`HostError::NotBound`] where another driver has it, [`HostError::System`] with the file that cannot be used.
    pub fn open(host: &Host, address: &Address) -> Result<Self, HostError> {
        let found = host.controller(address)?;
        if found.driver.as_deref() != Some(VFIO) {
            let (address, driver) = (address.clone(), found.driver);
            return Err(HostError::NotBound { address, driver });
        }
        let group = found.iommu_group.ok_or_else(|| HostError::NoIommu(address.clone()))?;
        let paths = [host.path("dev/vfio/vfio"), host.path(&format!("dev/vfio/{group}"))];
        let open = |at: usize| {
            let file = OpenOptions::new().read(true).write(true).open(&paths[at]);
            file.map_err(|error| HostError::System { path: paths[at].clone(), error })
        };
        let (container, group) = (open(0)?, open(1)?);
        let failed = |at: usize| {
            let path = paths[at].clone();
            move |errno: Errno| HostError::System { path, error: io::Error::from(errno) }
        };
        sys::check_container(container.as_fd()).map_err(failed(0))?;
        if !sys::is_viable(group.as_fd()).map_err(failed(1))? {
            let error = io::Error::other("the kernel has other devices of the group");
            return Err(HostError::System { path: paths[1].clone(), error });
        }
        sys::join(group.as_fd(), container.as_fd()).map_err(failed(1))?;
        let device = sys::device(group.as_fd(), &address.to_string()).map_err(failed(1))?;
        let addresses = Mutex::default();
        let memory = Arc::new(Container { fd: Arc::new(container.into()), addresses });
        let opened = Vfio::of(address, device, memory, group.into()).map_err(failed(1))?;
        Ok(Vfio { numa_node: found.numa_node, ..opened })
    }

    fn of(
        address: &Address,
        device: OwnedFd,
        memory: Arc<Container>,
        group: OwnedFd,
    ) -> Result<Self> {
        let configuration = sys::region(device.as_fd(), sys::CONFIGURATION)?.offset;
        let registers =
            Registers::new(device.as_fd(), &sys::region(device.as_fd(), sys::REGISTERS)?)?;
        let count = sys::interrupts(device.as_fd())?.min(VECTORS);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let interrupts: Result<Vec<Arc<OwnedFd>>> =
            (0..count).map(|_| Ok(Arc::new(eventfd(0, flags)?))).collect();
        let interrupts = interrupts?;
        let numbers: Vec<i32> = interrupts.iter().map(|fd| fd.as_raw_fd()).collect();
        if count > 0 {
            sys::set_interrupts(device.as_fd(), &numbers)?;
        }
        let vfio = Vfio {
            name: format!("NVMe controller {address}"),
            numa_node: None,
            registers,
            interrupts,
            configuration,
            device: device.into(),
            memory,
            kept: Mutex::default(),
            clock: Monotonic::default(),
            _group: group,
        };
        vfio.command(|command| command | COMMAND.1).map_err(|_| Errno::IO)?;
        Ok(vfio)
    }

    /// Changes the command register of the configuration space.
    fn command(&self, change: impl FnOnce(u16) -> u16) -> io::Result<()> {
        let at = self.configuration + COMMAND.0;
        let mut bytes = [0; 2];
        self.device.read_exact_at(&mut bytes, at)?;
        let value = change(u16::from_le_bytes(bytes));
        self.device.write_all_at(&value.to_le_bytes(), at)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Dma>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Container {
    /// Lets the device reach all of `region`.
    fn map(self: &Arc<Self>, region: &Arc<Region>) -> Result<Dma> {
        let bytes = region.bytes();
        let bus = self.addresses().take(bytes).ok_or(Errno::NOMEM)?;
        let mapping = Some(Mapping::new(&self.fd, region, bus)?);
        let reached = Reached { mapping, container: Arc::clone(self), bus, bytes };
        Ok(Dma::region(region, bus, Box::new(reached)))
    }

    fn addresses(&self) -> MutexGuard<'_, Addresses> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Addresses {
    fn take(&mut self, bytes: usize) -> Option<u64> {
        if let Some(at) = self.free.iter().position(|(len, _)| *len == bytes) {
            return Some(self.free.swap_remove(at).1);
        }
        let start = FIRST + self.used;
        if start + bytes as u64 > END {
            return None;
        }
        self.used += bytes as u64;
        Some(start)
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        // The address is free when nothing is mapped there any more.
        drop(self.mapping.take());
        self.container.addresses().free.push((self.bytes, self.bus));
    }
}

impl Transport for Vfio {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn read32(&self, at: u32) -> u32 {
        self.registers.read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        self.registers.read64(at)
    }

    fn write32(&self, at: u32, value: u32) {
        self.registers.write32(at, value);
    }

    fn write64(&self, at: u32, value: u64) {
        self.registers.write64(at, value);
    }

    fn registers_len(&self) -> u64 {
        self.registers.len()
    }

    fn allocate(&self, bytes: usize) -> Result<Dma> {
        let frames = u32::try_from(bytes.div_ceil(FRAME)).map_err(|_| Errno::NOMEM)?;
        self.memory.map(&Region::new(frames)?)
    }

    fn map(&self, region: &Arc<Region>) -> Result<Option<u64>> {
        let dma = self.memory.map(region)?;
        let bus = dma.bus();
        self.kept().push(dma);
        Ok(Some(bus))
    }

    fn cut(&self) {
        let _ = self.command(|command| command & !COMMAND.1 | 1 << 1);
        let _ = sys::reset(self.device.as_fd());
        // Older kernels have no such request; without access to the bus nothing is reached either.
        let _ = sys::unmap_all(self.memory.fd.as_fd());
    }

    fn vectors(&self) -> u16 {
        self.interrupts.len() as u16
    }

    fn sleep(&self, vector: u16, timeout: Option<Duration>) {
        let Some(interrupt) = self.interrupts.get(usize::from(vector)) else {
            std::thread::sleep(timeout.unwrap_or(Duration::from_millis(1)));
            return;
        };
        let limit = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let _ = poll(&mut [PollFd::new(interrupt, PollFlags::IN)], limit.as_ref());
        let _ = rustix::io::read(interrupt, &mut [0; 8]);
    }

    fn waker(&self, vector: u16) -> Waker {
        let interrupt = self.interrupts.get(usize::from(vector)).cloned();
        Waker::new(move || {
            if let Some(interrupt) = &interrupt {
                let _ = rustix::io::write(interrupt, &1_u64.to_ne_bytes());
            }
        })
    }

    fn ready(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.interrupts.get(usize::from(vector)).map(|fd| fd.as_fd())
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }
}

impl fmt::Debug for Vfio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vfio({})", self.name)
    }
}
