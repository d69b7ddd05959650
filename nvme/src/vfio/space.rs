//! Addresses for a device, and the regions behind them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_block::{Errno, MemoryRegion, Result};
use rustix::process::{Resource, getrlimit};

use super::iommu::{IommuContext, IommuMapping};
use crate::DmaMemory;

/// The first address of memory for the device. Machines have fixed addresses only below it.
const FIRST: u64 = 1 << 32;

/// The end of the addresses that every IOMMU supports.
const END: u64 = 1 << 39;

/// Bytes that suffice for the commands that read or make a file system.
const ROOM: u64 = 16 << 20;

/// The address space of a device.
pub(super) struct DeviceAddressSpace {
    iommu: Arc<IommuContext>,
    addresses: Mutex<AddressAllocator>,
}

/// A limit of locked memory: the kernel pins the memory that the device reaches, and counts it as
/// locked memory of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LockedMemoryShortage {
    /// Bytes that the device reaches, and the additional bytes of the request.
    needed: u64,
    /// Bytes that the process may lock.
    limit: u64,
}

/// Addresses for the device.
#[derive(Default)]
struct AddressAllocator {
    used: u64,
    /// Bytes that the device reaches.
    reached: u64,
    shortage: Option<LockedMemoryShortage>,
    /// Ranges that were given back: length and start.
    free: Vec<(usize, u64)>,
}

/// A region that the device reaches, and its address.
struct MappedRegion {
    mapping: Option<IommuMapping>,
    space: Arc<DeviceAddressSpace>,
    bus: u64,
    bytes: usize,
}

impl DeviceAddressSpace {
    pub(super) fn new(iommu: IommuContext) -> Self {
        DeviceAddressSpace { iommu: Arc::new(iommu), addresses: Mutex::default() }
    }

    pub(super) fn uses_iommufd(&self) -> bool {
        self.iommu.space.is_some()
    }

    /// Lets the device reach all of `region`.
    pub(super) fn map(self: &Arc<Self>, region: &Arc<MemoryRegion>) -> Result<DmaMemory> {
        let bytes = region.bytes();
        let bus = self.addresses().take(bytes).ok_or(Errno::NOMEM)?;
        let mapping = IommuMapping::new(&self.iommu, region, bus);
        self.addresses().note(bytes, bus, mapping.as_ref().err().copied());
        let mapping = Some(mapping?);
        let reached = MappedRegion { mapping, space: Arc::clone(self), bus, bytes };
        Ok(DmaMemory::region(region, bus, Box::new(reached)))
    }

    /// The limit that made the last mapping fail, if it did.
    pub(super) fn shortage(&self) -> Option<String> {
        self.addresses().shortage.map(|shortage| shortage.to_string())
    }

    /// Ends all access of the device.
    pub(super) fn cut(&self) {
        // Older kernels cannot unmap everything; but a device without access to the bus reaches
        // nothing either.
        let _ = self.iommu.unmap_all();
    }

    /// Records that the device has left this address space.
    pub(super) fn end(&self) {
        self.iommu.end();
    }

    fn addresses(&self) -> MutexGuard<'_, AddressAllocator> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AddressAllocator {
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

    /// Records that the device reaches `bytes` at `bus`, or the reason why it does not.
    fn note(&mut self, bytes: usize, bus: u64, error: Option<Errno>) {
        let needed = self.reached + bytes as u64;
        if error.is_some() {
            self.free.push((bytes, bus));
        } else {
            self.reached = needed;
        }
        let limit = getrlimit(Resource::Memlock).current;
        self.shortage = LockedMemoryShortage::detect(error, needed, limit);
    }
}

impl LockedMemoryShortage {
    /// The limit that may have caused `error`, if one may.
    fn detect(error: Option<Errno>, needed: u64, limit: Option<u64>) -> Option<Self> {
        let limit = limit.filter(|limit| error == Some(Errno::NOMEM) && needed > *limit)?;
        Some(LockedMemoryShortage { needed, limit })
    }

    /// A limit that leaves room for the queues and buffers that follow after the failed request.
    fn compute_limit(&self) -> u64 {
        (self.needed + self.needed / 4).next_multiple_of(ROOM)
    }
}

impl fmt::Display for LockedMemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (needed, limit) = (self.needed.div_ceil(1024), self.limit / 1024);
        let enough = self.compute_limit() / 1024;
        write!(
            f,
            "the controller is to reach {needed} KiB of memory so far, and RLIMIT_MEMLOCK lets this process lock {limit} KiB: \
             allow {enough} KiB (`ulimit -l {enough}` as root, limits.conf(5), LimitMEMLOCK= in systemd.exec(5))"
        )
    }
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        // The address is free when nothing is mapped there any more.
        drop(self.mapping.take());
        let mut addresses = self.space.addresses();
        addresses.reached -= self.bytes as u64;
        addresses.free.push((self.bytes, self.bus));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_only_where_it_is_the_reason() {
        let of = |error, needed| LockedMemoryShortage::detect(error, needed, Some(8 << 20));
        let shortage = of(Some(Errno::NOMEM), (8 << 20) + 1).unwrap().to_string();
        assert!(shortage.contains("8193 KiB"), "{shortage}");
        assert!(
            shortage.contains("lock 8192 KiB: allow 16384 KiB (`ulimit -l 16384`"),
            "{shortage}"
        );
        assert_eq!(of(Some(Errno::NOMEM), 8 << 20), None);
        assert_eq!(of(Some(Errno::IO), 9 << 20), None);
        assert_eq!(of(None, 9 << 20), None);
        assert_eq!(
            LockedMemoryShortage::detect(Some(Errno::NOMEM), 9 << 20, None),
            None,
            "no limit"
        );
    }

    #[test]
    fn an_address_that_was_not_mapped_is_free_again_and_counts_for_nothing() {
        let mut addresses = AddressAllocator::default();
        let first = addresses.take(4096).unwrap();
        addresses.note(4096, first, Some(Errno::NOMEM));
        assert_eq!((addresses.take(4096), addresses.reached), (Some(first), 0));
        addresses.note(4096, first, None);
        assert_eq!((addresses.free.len(), addresses.reached), (0, 4096));
    }
}
