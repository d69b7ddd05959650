//! System calls of VFIO (linux/vfio.h), and registers that are mapped.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use defuse_block::{Errno, Region, Result};
use rustix::mm::{MapFlags, ProtFlags};

/// The request number `nr` of VFIO: `_IO(';', 100 + nr)`.
const fn request(nr: u64) -> u64 {
    (b';' as u64) << 8 | (100 + nr)
}

/// VFIO_TYPE1v2_IOMMU.
const TYPE1V2: u64 = 3;

/// The version of the interface.
const API: i32 = 0;

/// The region of the registers (BAR 0).
pub(super) const REGISTERS: u32 = 0;

/// The region of the configuration space.
pub(super) const CONFIGURATION: u32 = 7;

/// The interrupts by MSI-X.
const MSIX: u32 = 2;

/// VFIO_GROUP_FLAGS_VIABLE: all devices of the group belong to user space.
const VIABLE: u32 = 1;

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

/// A part of a device: `struct vfio_region_info`.
#[repr(C)]
#[derive(Default)]
pub(super) struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    pub(super) size: u64,
    pub(super) offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
#[derive(Default)]
struct Map {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

#[repr(C)]
#[derive(Default)]
struct Unmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// The bytes of a structure, for its field `argsz`.
const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Calls ioctl(2) with a number.
fn by_value(fd: BorrowedFd<'_>, nr: u64, value: u64) -> Result<i32> {
    // SAFETY: these requests take a number, and touch no memory of this process.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request(nr) as _, value) })
}

/// Calls ioctl(2) with a structure.
///
/// # Safety
///
/// `T` is the structure of the request, or longer, and says its length in `argsz`.
unsafe fn by_reference<T>(fd: BorrowedFd<'_>, nr: u64, value: &mut T) -> Result<i32> {
    // SAFETY: the kernel reads and writes at most the structure (the caller), which is borrowed here.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request(nr) as _, std::ptr::from_mut(value)) })
}

fn check(result: i32) -> Result<i32> {
    match result {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        result => Ok(result),
    }
}

/// Checks the version of the interface of a container, and that it has the IOMMU that is used here.
pub(super) fn check_container(container: BorrowedFd<'_>) -> Result<()> {
    let version = by_value(container, 0, 0)?;
    let has_type1 = by_value(container, 1, TYPE1V2)?;
    if version == API && has_type1 == 1 { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// True if all devices of a group belong to user space.
pub(super) fn is_viable(group: BorrowedFd<'_>) -> Result<bool> {
    let mut status = GroupStatus { argsz: size::<GroupStatus>(), ..GroupStatus::default() };
    // SAFETY: VFIO_GROUP_GET_STATUS fills this structure.
    unsafe { by_reference(group, 3, &mut status)? };
    Ok(status.flags & VIABLE != 0)
}

/// Puts a group into a container, and gives that an IOMMU.
pub(super) fn join(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<()> {
    let mut number: i32 = container.as_raw_fd();
    // SAFETY: VFIO_GROUP_SET_CONTAINER reads a descriptor.
    unsafe { by_reference(group, 4, &mut number)? };
    by_value(container, 2, TYPE1V2).map(drop)
}

/// The descriptor of the device `name` of a group.
pub(super) fn device(group: BorrowedFd<'_>, name: &str) -> Result<OwnedFd> {
    let name = std::ffi::CString::new(name).map_err(|_| Errno::INVAL)?;
    // SAFETY: VFIO_GROUP_GET_DEVICE_FD reads a string that ends with 0.
    let fd = check(unsafe { libc::ioctl(group.as_raw_fd(), request(6) as _, name.as_ptr()) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The place and length of a region of a device.
pub(super) fn region(device: BorrowedFd<'_>, index: u32) -> Result<RegionInfo> {
    let mut info = RegionInfo { argsz: size::<RegionInfo>(), index, ..RegionInfo::default() };
    // SAFETY: VFIO_DEVICE_GET_REGION_INFO fills this structure.
    unsafe { by_reference(device, 8, &mut info)? };
    Ok(info)
}

/// The number of interrupts by MSI-X.
pub(super) fn interrupts(device: BorrowedFd<'_>) -> Result<u32> {
    let mut info = IrqInfo { argsz: size::<IrqInfo>(), index: MSIX, ..IrqInfo::default() };
    // SAFETY: VFIO_DEVICE_GET_IRQ_INFO fills this structure.
    unsafe { by_reference(device, 9, &mut info)? };
    Ok(info.count)
}

/// Lets the interrupts, from the first one on, count in eventfds.
pub(super) fn set_interrupts(device: BorrowedFd<'_>, eventfds: &[RawFd]) -> Result<()> {
    // The flags: descriptors, and a trigger. Then index, start, count, and the descriptors.
    let mut words = vec![0, 1 << 2 | 1 << 5, MSIX, 0, eventfds.len() as u32];
    words.extend(eventfds.iter().map(|fd| *fd as u32));
    words[0] = (words.len() * 4) as u32;
    // SAFETY: VFIO_DEVICE_SET_IRQS reads as many bytes as the first word says, which are those of `words`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request(10) as _, words.as_mut_ptr()) };
    check(result).map(drop)
}

/// Resets a device, which then does nothing any more by itself.
pub(super) fn reset(device: BorrowedFd<'_>) -> Result<()> {
    by_value(device, 11, 0).map(drop)
}

/// A region that devices of a container reach, as long as this is there.
pub(super) struct Mapping {
    container: Arc<OwnedFd>,
    region: Arc<Region>,
    iova: u64,
}

impl Mapping {
    /// Lets devices reach all of `region` from the address `iova` on.
    pub(super) fn new(container: &Arc<OwnedFd>, region: &Arc<Region>, iova: u64) -> Result<Self> {
        let mut map = Map {
            argsz: size::<Map>(),
            // Reading and writing.
            flags: 3,
            vaddr: region.start().addr() as u64,
            iova,
            size: region.bytes() as u64,
        };
        // SAFETY: VFIO_IOMMU_MAP_DMA reads this structure. The region stays mapped until the drop ends the access of
        // devices, and they are told to use only frames of operations in flight.
        unsafe { by_reference(container.as_fd(), 13, &mut map)? };
        let (container, region) = (Arc::clone(container), Arc::clone(region));
        Ok(Mapping { container, region, iova })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let size = self.region.bytes() as u64;
        let mut unmap = Unmap { argsz: self::size::<Unmap>(), flags: 0, iova: self.iova, size };
        // SAFETY: VFIO_IOMMU_UNMAP_DMA reads and writes this structure.
        let unmapped = unsafe { by_reference(self.container.as_fd(), 14, &mut unmap) };
        if unmapped.is_err() {
            // The memory may still be reached, so nobody else may have it.
            std::mem::forget(Arc::clone(&self.region));
        }
    }
}

/// Ends all access of devices of a container to memory.
pub(super) fn unmap_all(container: BorrowedFd<'_>) -> Result<()> {
    // The flag "all".
    let mut unmap = Unmap { argsz: size::<Unmap>(), flags: 2, iova: 0, size: 0 };
    // SAFETY: VFIO_IOMMU_UNMAP_DMA reads and writes this structure.
    unsafe { by_reference(container, 14, &mut unmap).map(drop) }
}

/// Registers of a device in the address space of this process.
pub(super) struct Registers {
    start: *mut u8,
    len: usize,
}

// SAFETY: all access is by single volatile reads and writes, which the device orders.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    pub(super) fn new(device: BorrowedFd<'_>, info: &RegionInfo) -> Result<Self> {
        let len = usize::try_from(info.size).map_err(|_| Errno::INVAL)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a free range of addresses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                device,
                info.offset,
            )?
        };
        Ok(Registers { start: start.cast(), len })
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// The place of a register of `bytes` bytes.
    fn place(&self, at: u32, bytes: usize) -> *mut u8 {
        let at = at as usize;
        assert!(at + bytes <= self.len && at.is_multiple_of(bytes), "a register at {at:#x}");
        self.start.wrapping_add(at)
    }

    pub(super) fn read32(&self, at: u32) -> u32 {
        // SAFETY: the register lies within the mapping and is aligned (`place`).
        u32::from_le(unsafe { self.place(at, 4).cast::<u32>().read_volatile() })
    }

    pub(super) fn read64(&self, at: u32) -> u64 {
        // SAFETY: as in `read32`.
        u64::from_le(unsafe { self.place(at, 8).cast::<u64>().read_volatile() })
    }

    pub(super) fn write32(&self, at: u32, value: u32) {
        // Memory that the register tells of is written before.
        fence(Ordering::SeqCst);
        // SAFETY: as in `read32`.
        unsafe { self.place(at, 4).cast::<u32>().write_volatile(value.to_le()) };
    }

    pub(super) fn write64(&self, at: u32, value: u64) {
        fence(Ordering::SeqCst);
        // SAFETY: as in `read32`.
        unsafe { self.place(at, 8).cast::<u64>().write_volatile(value.to_le()) };
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, to which no reference leads.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_requests_are_those_of_the_header() {
        let sizes = [
            size::<GroupStatus>(),
            size::<RegionInfo>(),
            size::<IrqInfo>(),
            size::<Map>(),
            size::<Unmap>(),
        ];
        assert_eq!(sizes, [8, 32, 16, 32, 24]);
        assert_eq!((request(0), request(13)), (0x3b64, 0x3b71));
    }
}
