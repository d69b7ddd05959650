//! Controllers of this machine that vfio-pci drives (the kernel's
//! Documentation/driver-api/vfio.rst): registers are mapped, an IOMMU limits the device to memory
//! that was mapped for it, and interrupts count in eventfds. A user that owns the files in
//! /dev/vfio needs no other rights.
//!
//! Where the kernel has them, a device is opened by its own file, and memory by an iommufd;
//! otherwise by the group of the device, and a container with the IOMMU of type 1.

mod iommu;
mod lease;
mod registers;
mod space;
mod sys;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use defuse_block::{DeviceClock, Errno, FRAME, MemoryRegion, MonotonicClock, QueueWaker, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::host::{HostError, PciAddress, SysfsHost, VFIO};
use crate::{ControllerTransport, DmaMemory};
use lease::VfioLease;
use space::DeviceAddressSpace;

/// Interrupts that are used at most.
const VECTORS: u32 = 65;

/// A controller that vfio-pci drives. Closing it resets the controller.
///
/// When the kernel requests the device back, because it is being removed or given to another
/// driver, it is closed at once: a user that keeps it would make the kernel wait for ever. Its
/// registers then read all ones, as for a device that is gone.
pub struct VfioController {
    name: String,
    numa_node: Option<u32>,
    interrupts: Arc<Vec<OwnedFd>>,
    grip: Arc<VfioLease>,
    memory: Arc<DeviceAddressSpace>,
    /// Regions of callers. The device reaches them as long as the controller is open.
    kept: Mutex<Vec<DmaMemory>>,
    clock: MonotonicClock,
    _watch: Option<ReleaseWatcher>,
}

/// The thread that waits until the kernel requests the device back.
struct ReleaseWatcher {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl VfioController {
    /// Opens the controller at `address`.
    ///
    /// # Errors
    ///
    /// [`HostError::NotBound`] if the controller has another driver, [`HostError::System`] with the
    /// file that cannot be used.
    pub fn open(host: &SysfsHost, address: &PciAddress) -> Result<Self, HostError> {
        let found = host.controller(address)?;
        if found.driver.as_deref() != Some(VFIO) {
            let (address, driver) = (address.clone(), found.driver);
            return Err(HostError::NotBound { address, driver });
        }
        let opened = lease::open(host, address, found.iommu_group)?;
        let path = opened.path.clone();
        let failed = |errno: Errno| HostError::System { path, error: errno.into() };
        let vfio = VfioController::from_opened(address, opened).map_err(failed)?;
        Ok(VfioController { numa_node: found.numa_node, ..vfio })
    }

    fn from_opened(address: &PciAddress, opened: lease::OpenVfioDevice) -> Result<Self> {
        let name = format!("NVMe controller {address}");
        let device = opened.device.as_fd();
        let count = sys::interrupts(device, sys::MSIX)?.min(VECTORS);
        let interrupts: Result<Vec<OwnedFd>> = (0..count).map(|_| counter()).collect();
        let interrupts = Arc::new(interrupts?);
        let numbers: Vec<i32> = interrupts.iter().map(|fd| fd.as_raw_fd()).collect();
        if count > 0 {
            sys::set_interrupts(device, sys::MSIX, &numbers)?;
        }
        let wanted = match sys::interrupts(device, sys::WANTED_BACK) {
            Ok(1..) => {
                let wanted = counter()?;
                sys::set_interrupts(device, sys::WANTED_BACK, &[wanted.as_raw_fd()])?;
                Some(wanted)
            }
            _ => None,
        };
        let (grip, memory) = VfioLease::new(opened)?;
        let grip = Arc::new(grip);
        let watch = match wanted {
            Some(wanted) => Some(ReleaseWatcher::start(&name, wanted, &grip, &interrupts)?),
            None => None,
        };
        let (kept, clock) = (Mutex::default(), MonotonicClock::default());
        Ok(VfioController {
            name,
            numa_node: None,
            interrupts,
            grip,
            memory,
            kept,
            clock,
            _watch: watch,
        })
    }

    /// True where the device and its memory are reached by an iommufd, and not by a group.
    pub fn uses_iommufd(&self) -> bool {
        self.memory.uses_iommufd()
    }

    fn lock_kept_memory(&self) -> MutexGuard<'_, Vec<DmaMemory>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A new eventfd.
fn counter() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Increments the counter of an eventfd.
fn count(counter: &OwnedFd) {
    let _ = rustix::io::write(counter, &1_u64.to_ne_bytes());
}

impl ReleaseWatcher {
    /// Waits for `wanted`, and then releases the device. Sleepers wake up.
    fn start(
        name: &str,
        wanted: OwnedFd,
        grip: &Arc<VfioLease>,
        interrupts: &Arc<Vec<OwnedFd>>,
    ) -> Result<Self> {
        let stop = Arc::new(counter()?);
        let (name, grip, interrupts) = (name.to_owned(), Arc::clone(grip), Arc::clone(interrupts));
        let stopped = Arc::clone(&stop);
        let watch = move || {
            let mut both =
                [PollFd::new(&wanted, PollFlags::IN), PollFd::new(&*stopped, PollFlags::IN)];
            while poll(&mut both, None).is_err() {}
            if both[0].revents().contains(PollFlags::IN) {
                log::warn!("{name}: the system takes it back: it is closed");
                grip.release();
                interrupts.iter().for_each(count);
            }
        };
        let thread = std::thread::Builder::new().name("vfio".to_owned()).spawn(watch);
        let thread = thread.map_err(|_| Errno::AGAIN)?;
        Ok(ReleaseWatcher { stop, thread: Some(thread) })
    }
}

impl Drop for ReleaseWatcher {
    fn drop(&mut self) {
        count(&self.stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ControllerTransport for VfioController {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn read32(&self, at: u32) -> u32 {
        self.grip.registers().read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        self.grip.registers().read64(at)
    }

    fn write32(&self, at: u32, value: u32) {
        self.grip.registers().write32(at, value);
    }

    fn write64(&self, at: u32, value: u64) {
        self.grip.registers().write64(at, value);
    }

    fn registers_len(&self) -> u64 {
        self.grip.registers().len()
    }

    fn allocate(&self, bytes: usize) -> Result<DmaMemory> {
        let frames = u32::try_from(bytes.div_ceil(FRAME)).map_err(|_| Errno::NOMEM)?;
        self.memory.map(&MemoryRegion::new(frames)?)
    }

    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>> {
        let dma = self.memory.map(region)?;
        let bus = dma.bus();
        self.lock_kept_memory().push(dma);
        Ok(Some(bus))
    }

    fn shortage(&self) -> Option<String> {
        self.memory.shortage()
    }

    fn cut(&self) {
        self.grip.stop();
        self.memory.cut();
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

    fn waker(&self, vector: u16) -> QueueWaker {
        let interrupts = Arc::clone(&self.interrupts);
        QueueWaker::new(move || {
            if let Some(interrupt) = interrupts.get(usize::from(vector)) {
                count(interrupt);
            }
        })
    }

    fn interrupt_fd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.interrupts.get(usize::from(vector)).map(|fd| fd.as_fd())
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }
}

impl fmt::Debug for VfioController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vfio({})", self.name)
    }
}
