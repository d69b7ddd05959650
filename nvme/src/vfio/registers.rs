//! Mapped registers.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use defuse_block::{Errno, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::sys::VfioRegionInfo;

/// Registers of a device in the address space of this process.
pub(super) struct MappedRegisters {
    start: *mut u8,
    len: usize,
}

// SAFETY: all access is by single volatile reads and writes, which the device orders.
unsafe impl Send for MappedRegisters {}
// SAFETY: all access is by single volatile reads and writes, which the device orders.
unsafe impl Sync for MappedRegisters {}

impl MappedRegisters {
    pub(super) fn new(device: BorrowedFd<'_>, info: &VfioRegionInfo) -> Result<Self> {
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
        Ok(MappedRegisters { start: start.cast(), len })
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// The place of a register of `bytes` bytes.
    fn register_address(&self, at: u32, bytes: usize) -> *mut u8 {
        let at = at as usize;
        assert!(at + bytes <= self.len && at.is_multiple_of(bytes), "a register at {at:#x}");
        self.start.wrapping_add(at)
    }

    pub(super) fn read32(&self, at: u32) -> u32 {
        // SAFETY: the register lies within the mapping and is aligned (`place`).
        u32::from_le(unsafe { self.register_address(at, 4).cast::<u32>().read_volatile() })
    }

    pub(super) fn read64(&self, at: u32) -> u64 {
        // SAFETY: the register lies within the mapping and is aligned (`place`).
        u64::from_le(unsafe { self.register_address(at, 8).cast::<u64>().read_volatile() })
    }

    pub(super) fn write32(&self, at: u32, value: u32) {
        // Memory to which the register refers is written before.
        fence(Ordering::SeqCst);
        // SAFETY: the register lies within the mapping and is aligned (`place`).
        unsafe { self.register_address(at, 4).cast::<u32>().write_volatile(value.to_le()) };
    }

    pub(super) fn write64(&self, at: u32, value: u64) {
        fence(Ordering::SeqCst);
        // SAFETY: the register lies within the mapping and is aligned (`place`).
        unsafe { self.register_address(at, 8).cast::<u64>().write_volatile(value.to_le()) };
    }
}

impl MappedRegisters {
    /// Replaces the registers by memory whose bits are all set, as for a device that is gone. This
    /// mapping then does not keep the device in use.
    pub(super) fn replace_by_ones(&self) -> Result<()> {
        let gone = MemfdFlags::CLOEXEC;
        let memory = File::from(rustix::fs::memfd_create(c"registers", gone)?);
        let ones = vec![0xff; self.len];
        memory.write_all_at(&ones, 0).map_err(|_| Errno::NOMEM)?;
        let (prot, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the range is the mapping that `new` has made, which is replaced in one step.
        // Accesses are volatile, and all values are valid.
        unsafe { rustix::mm::mmap(self.start.cast(), self.len, prot, flags, &memory, 0)? };
        Ok(())
    }
}

impl Drop for MappedRegisters {
    fn drop(&mut self) {
        // SAFETY: `new` has made the mapping, and no reference leads to it.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn registers_of_a_device_that_was_left_read_all_ones() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let registers = MappedRegisters::new(file.as_fd(), &VfioRegionInfo::new(0, 8192)).unwrap();
        registers.write32(4096, 7);
        assert_eq!((registers.read32(4096), registers.read64(0)), (7, 0));
        registers.replace_by_ones().unwrap();
        assert_eq!((registers.read32(4096), registers.read64(0)), (u32::MAX, u64::MAX));
        registers.write32(4096, 9);
        let mut word = [0; 4];
        file.read_exact_at(&mut word, 4096).unwrap();
        assert_eq!(word, 7_u32.to_le_bytes(), "nothing reaches the device any more");
    }
}
