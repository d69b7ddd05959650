//! System calls of VFIO (linux/vfio.h) on groups and devices.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use defuse_block::{Errno, Result};

/// The request number `nr` of VFIO: `_IO(';', 100 + nr)`.
pub(super) const fn request(nr: u64) -> u64 {
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
pub(super) const MSIX: u32 = 2;

/// The interrupt by which the kernel requests the device back (VFIO_PCI_REQ_IRQ_INDEX).
pub(super) const WANTED_BACK: u32 = 4;

/// VFIO_GROUP_FLAGS_VIABLE: all devices of the group belong to user space.
const VIABLE: u32 = 1;

#[repr(C)]
#[derive(Default)]
struct VfioGroupStatus {
    argsz: u32,
    flags: u32,
}

/// A part of a device: `struct vfio_region_info`.
#[repr(C)]
#[derive(Default)]
pub(super) struct VfioRegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    pub(super) size: u64,
    pub(super) offset: u64,
}

impl VfioRegionInfo {
    /// A region of `size` bytes at `offset`.
    #[cfg(test)]
    pub(super) fn new(offset: u64, size: u64) -> Self {
        VfioRegionInfo { offset, size, ..VfioRegionInfo::default() }
    }
}

#[repr(C)]
#[derive(Default)]
struct VfioIrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

/// `struct vfio_device_bind_iommufd`.
#[repr(C)]
#[derive(Default)]
struct VfioBindIommufd {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    out_devid: u32,
}

/// `struct vfio_device_attach_iommufd_pt`.
#[repr(C)]
#[derive(Default)]
struct VfioAttachIommufd {
    argsz: u32,
    flags: u32,
    pt_id: u32,
}

/// The bytes of a structure, for its field `argsz`.
pub(super) const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Calls ioctl(2) with a number.
pub(super) fn ioctl_by_value(fd: BorrowedFd<'_>, nr: u64, value: u64) -> Result<i32> {
    // SAFETY: these requests take a number, and touch no memory of this process.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request(nr) as _, value) })
}

/// Calls ioctl(2) with a structure.
///
/// # Safety
///
/// `T` is the structure of the request, or longer, and states its length in `argsz`.
pub(super) unsafe fn ioctl_by_reference<T>(
    fd: BorrowedFd<'_>,
    nr: u64,
    value: &mut T,
) -> Result<i32> {
    // SAFETY: the kernel reads and writes at most the structure, as the caller guarantees. The
    // structure is borrowed here.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request(nr) as _, std::ptr::from_mut(value)) })
}

fn check(result: i32) -> Result<i32> {
    match result {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        result => Ok(result),
    }
}

/// Checks the version of the interface of a container, and that it has the required IOMMU.
pub(super) fn check_container(container: BorrowedFd<'_>) -> Result<()> {
    let version = ioctl_by_value(container, 0, 0)?;
    let has_type1 = ioctl_by_value(container, 1, TYPE1V2)?;
    if version == API && has_type1 == 1 { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// True if all devices of a group belong to user space.
pub(super) fn is_viable(group: BorrowedFd<'_>) -> Result<bool> {
    let mut status =
        VfioGroupStatus { argsz: size::<VfioGroupStatus>(), ..VfioGroupStatus::default() };
    // SAFETY: VFIO_GROUP_GET_STATUS fills this structure.
    unsafe { ioctl_by_reference(group, 3, &mut status)? };
    Ok(status.flags & VIABLE != 0)
}

/// Puts a group into a container, and sets the IOMMU of the container.
pub(super) fn join(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<()> {
    let mut number: i32 = container.as_raw_fd();
    // SAFETY: VFIO_GROUP_SET_CONTAINER reads a descriptor.
    unsafe { ioctl_by_reference(group, 4, &mut number)? };
    ioctl_by_value(container, 2, TYPE1V2).map(drop)
}

/// The descriptor of the device `name` of a group.
pub(super) fn device(group: BorrowedFd<'_>, name: &str) -> Result<OwnedFd> {
    let name = std::ffi::CString::new(name).map_err(|_| Errno::INVAL)?;
    // SAFETY: VFIO_GROUP_GET_DEVICE_FD reads a string that ends with 0.
    let fd = check(unsafe { libc::ioctl(group.as_raw_fd(), request(6) as _, name.as_ptr()) })?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Attaches a device, opened by its own file, to the address space `space` of an iommufd.
pub(super) fn attach(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>, space: u32) -> Result<()> {
    let iommufd = iommufd.as_raw_fd();
    let mut bind =
        VfioBindIommufd { argsz: size::<VfioBindIommufd>(), iommufd, ..VfioBindIommufd::default() };
    // SAFETY: VFIO_DEVICE_BIND_IOMMUFD reads and fills this structure.
    unsafe { ioctl_by_reference(device, 18, &mut bind)? };
    let mut attach =
        VfioAttachIommufd { argsz: size::<VfioAttachIommufd>(), flags: 0, pt_id: space };
    // SAFETY: VFIO_DEVICE_ATTACH_IOMMUFD_PT reads and fills this structure.
    unsafe { ioctl_by_reference(device, 19, &mut attach).map(drop) }
}

/// The place and length of a region of a device.
pub(super) fn region(device: BorrowedFd<'_>, index: u32) -> Result<VfioRegionInfo> {
    let mut info =
        VfioRegionInfo { argsz: size::<VfioRegionInfo>(), index, ..VfioRegionInfo::default() };
    // SAFETY: VFIO_DEVICE_GET_REGION_INFO fills this structure.
    unsafe { ioctl_by_reference(device, 8, &mut info)? };
    Ok(info)
}

/// The number of interrupts of a kind.
pub(super) fn interrupts(device: BorrowedFd<'_>, index: u32) -> Result<u32> {
    let mut info = VfioIrqInfo { argsz: size::<VfioIrqInfo>(), index, ..VfioIrqInfo::default() };
    // SAFETY: VFIO_DEVICE_GET_IRQ_INFO fills this structure.
    unsafe { ioctl_by_reference(device, 9, &mut info)? };
    Ok(info.count)
}

/// Lets the interrupts of a kind, from the first one on, count in eventfds.
pub(super) fn set_interrupts(device: BorrowedFd<'_>, index: u32, eventfds: &[RawFd]) -> Result<()> {
    // The flags: descriptors, and a trigger. Then index, start, count, and the descriptors.
    let mut words = vec![0, 1 << 2 | 1 << 5, index, 0, eventfds.len() as u32];
    words.extend(eventfds.iter().map(|fd| *fd as u32));
    words[0] = (words.len() * 4) as u32;
    // SAFETY: VFIO_DEVICE_SET_IRQS reads the number of bytes in the first word, which is the length
    // of `words`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request(10) as _, words.as_mut_ptr()) };
    check(result).map(drop)
}

/// Resets a device, which then does nothing by itself any more.
pub(super) fn reset(device: BorrowedFd<'_>) -> Result<()> {
    ioctl_by_value(device, 11, 0).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_requests_are_those_of_the_header() {
        let sizes = [size::<VfioGroupStatus>(), size::<VfioRegionInfo>(), size::<VfioIrqInfo>()];
        assert_eq!(sizes, [8, 32, 16]);
        assert_eq!((size::<VfioBindIommufd>(), size::<VfioAttachIommufd>()), (16, 12));
        // VFIO_GET_API_VERSION, VFIO_DEVICE_BIND_IOMMUFD and VFIO_DEVICE_ATTACH_IOMMUFD_PT.
        assert_eq!((request(0), request(18), request(19)), (0x3b64, 0x3b76, 0x3b77));
    }
}
