//! The address space of a device: a container of VFIO with the IOMMU of type 1, or a space of an
//! iommufd (linux/iommufd.h).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_block::{Errno, MemoryRegion, Result};

use super::sys::{ioctl_by_reference, size};

/// The request number `nr` of iommufd, `_IO(';', nr)`, as a number of VFIO. VFIO's numbers begin
/// at 100.
const fn iommufd_request(nr: u64) -> u64 {
    nr - 100
}

/// An address space.
pub(super) struct IommuContext {
    pub(super) fd: OwnedFd,
    /// The number of a space of an iommufd; `None` for a container.
    pub(super) space: Option<u32>,
    /// No memory is mapped any more, and none can be.
    is_over: AtomicBool,
}

/// `struct vfio_iommu_type1_dma_map`.
#[repr(C)]
#[derive(Default)]
struct VfioDmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

/// `struct vfio_iommu_type1_dma_unmap`.
#[repr(C)]
#[derive(Default)]
struct VfioDmaUnmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// `struct iommu_ioas_alloc`.
#[repr(C)]
#[derive(Default)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    out_ioas_id: u32,
}

/// `struct iommu_ioas_map`.
#[repr(C)]
#[derive(Default)]
struct IoasMap {
    size: u32,
    flags: u32,
    ioas_id: u32,
    reserved: u32,
    user_va: u64,
    length: u64,
    iova: u64,
}

/// `struct iommu_ioas_unmap`.
#[repr(C)]
#[derive(Default)]
struct IoasUnmap {
    size: u32,
    ioas_id: u32,
    iova: u64,
    length: u64,
}

impl IommuContext {
    /// The address space of a container with an IOMMU.
    pub(super) fn from_container(fd: OwnedFd) -> Self {
        IommuContext { fd, space: None, is_over: AtomicBool::new(false) }
    }

    /// A new address space of an iommufd.
    pub(super) fn from_iommufd(fd: OwnedFd) -> Result<Self> {
        let mut alloc = IoasAlloc { size: size::<IoasAlloc>(), ..IoasAlloc::default() };
        // SAFETY: IOMMU_IOAS_ALLOC fills this structure.
        unsafe { ioctl_by_reference(fd.as_fd(), iommufd_request(0x81), &mut alloc)? };
        Ok(IommuContext { fd, space: Some(alloc.out_ioas_id), is_over: AtomicBool::new(false) })
    }

    /// Ends all access of the device to memory.
    pub(super) fn unmap_all(&self) -> Result<()> {
        let unmapped = match self.space {
            // The flag "all".
            None => self.unmap(2, 0, 0),
            Some(_) => self.unmap(0, 0, u64::MAX),
        };
        // An empty space of an iommufd has nothing to unmap.
        if unmapped.is_ok() || (self.space.is_some() && unmapped == Err(Errno::NOENT)) {
            self.end();
            return Ok(());
        }
        unmapped
    }

    /// Records that the device reaches no memory any more.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    fn map(&self, region: &MemoryRegion, iova: u64) -> Result<()> {
        if self.is_over.load(Ordering::Acquire) {
            return Err(Errno::IO);
        }
        let (start, bytes) = (region.start().addr() as u64, region.bytes() as u64);
        let Some(ioas_id) = self.space else {
            // The flags: the device reads and writes.
            let argsz = size::<VfioDmaMap>();
            let mut map = VfioDmaMap { argsz, flags: 1 | 2, vaddr: start, iova, size: bytes };
            // SAFETY: VFIO_IOMMU_MAP_DMA reads this structure. The region stays mapped until
            // `IommuMapping` ends the access of the device, whose commands use only frames of
            // operations in flight.
            return unsafe { ioctl_by_reference(self.fd.as_fd(), 13, &mut map).map(drop) };
        };
        let mut map = IoasMap {
            size: size::<IoasMap>(),
            // The flags: the address is fixed; the device writes and reads.
            flags: 1 | 2 | 4,
            ioas_id,
            reserved: 0,
            user_va: start,
            length: bytes,
            iova,
        };
        // SAFETY: IOMMU_IOAS_MAP reads and fills this structure. The region stays mapped until
        // `IommuMapping` ends the access of the device.
        unsafe { ioctl_by_reference(self.fd.as_fd(), iommufd_request(0x85), &mut map).map(drop) }
    }

    fn unmap(&self, flags: u32, iova: u64, bytes: u64) -> Result<()> {
        let Some(ioas_id) = self.space else {
            let mut unmap =
                VfioDmaUnmap { argsz: size::<VfioDmaUnmap>(), flags, iova, size: bytes };
            // SAFETY: VFIO_IOMMU_UNMAP_DMA reads and writes this structure.
            return unsafe { ioctl_by_reference(self.fd.as_fd(), 14, &mut unmap).map(drop) };
        };
        let mut unmap = IoasUnmap { size: size::<IoasUnmap>(), ioas_id, iova, length: bytes };
        // SAFETY: IOMMU_IOAS_UNMAP reads and fills this structure.
        unsafe { ioctl_by_reference(self.fd.as_fd(), iommufd_request(0x86), &mut unmap).map(drop) }
    }
}

/// A region that a device reaches, as long as this value exists.
pub(super) struct IommuMapping {
    iommu: Arc<IommuContext>,
    region: Arc<MemoryRegion>,
    iova: u64,
}

impl IommuMapping {
    /// Lets the device reach all of `region` from the address `iova` on.
    pub(super) fn new(
        iommu: &Arc<IommuContext>,
        region: &Arc<MemoryRegion>,
        iova: u64,
    ) -> Result<Self> {
        iommu.map(region, iova)?;
        Ok(IommuMapping { iommu: Arc::clone(iommu), region: Arc::clone(region), iova })
    }
}

impl Drop for IommuMapping {
    fn drop(&mut self) {
        let unmapped = self.iommu.unmap(0, self.iova, self.region.bytes() as u64);
        if unmapped.is_err() && !self.iommu.is_over.load(Ordering::Acquire) {
            // The device may still reach the memory, so that it must not be used for anything else.
            std::mem::forget(Arc::clone(&self.region));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys::request;
    use super::*;

    #[test]
    fn structures_and_requests_are_those_of_the_headers() {
        assert_eq!((size::<VfioDmaMap>(), size::<VfioDmaUnmap>(), request(13)), (32, 24, 0x3b71));
        let sizes = [size::<IoasAlloc>(), size::<IoasMap>(), size::<IoasUnmap>()];
        assert_eq!(sizes, [12, 40, 24]);
        // IOMMU_IOAS_ALLOC, IOMMU_IOAS_MAP and IOMMU_IOAS_UNMAP.
        let requests = [0x81, 0x85, 0x86].map(|nr| request(iommufd_request(nr)));
        assert_eq!(requests, [0x3b81, 0x3b85, 0x3b86]);
    }

    /// A file takes none of these requests: they fail, and map nothing.
    #[test]
    fn a_file_is_no_address_space() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(IommuContext::from_iommufd(file()).err(), Some(Errno::NOTTY));
        let region = MemoryRegion::new(1).unwrap();
        for space in [None, Some(1)] {
            let iommu = IommuContext { space, ..IommuContext::from_container(file()) };
            assert_eq!(iommu.unmap_all(), Err(Errno::NOTTY));
            let iommu = Arc::new(iommu);
            assert_eq!(IommuMapping::new(&iommu, &region, 1 << 32).err(), Some(Errno::NOTTY));
            iommu.end();
            assert_eq!(IommuMapping::new(&iommu, &region, 1 << 32).err(), Some(Errno::IO));
        }
    }
}
