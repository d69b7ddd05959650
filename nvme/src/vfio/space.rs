//! Addresses for a device, and the regions behind them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_block::{Errno, Region, Result};

use super::iommu::{Iommu, Mapping};
use crate::Dma;

/// The first address of memory for the device, above what machines have at fixed addresses.
const FIRST: u64 = 1 << 32;

/// The end of the addresses that every IOMMU has.
const END: u64 = 1 << 39;

/// The address space of a device.
pub(super) struct Space {
    iommu: Arc<Iommu>,
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
    space: Arc<Space>,
    bus: u64,
    bytes: usize,
}

impl Space {
    pub(super) fn new(iommu: Iommu) -> Self {
        Space { iommu: Arc::new(iommu), addresses: Mutex::default() }
    }

    pub(super) fn by_iommufd(&self) -> bool {
        self.iommu.space.is_some()
    }

    /// Lets the device reach all of `region`.
    pub(super) fn map(self: &Arc<Self>, region: &Arc<Region>) -> Result<Dma> {
        let bytes = region.bytes();
        let bus = self.addresses().take(bytes).ok_or(Errno::NOMEM)?;
        let mapping = Some(Mapping::new(&self.iommu, region, bus)?);
        let reached = Reached { mapping, space: Arc::clone(self), bus, bytes };
        Ok(Dma::region(region, bus, Box::new(reached)))
    }

    /// Ends all access of the device.
    pub(super) fn cut(&self) {
        // Older kernels cannot do it for all; a device without access to the bus reaches nothing either.
        let _ = self.iommu.unmap_all();
    }

    /// Notes that the device has left this address space.
    pub(super) fn end(&self) {
        self.iommu.end();
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
        self.space.addresses().free.push((self.bytes, self.bus));
    }
}
