//! Memory that a server alone writes, and that clients read at any time: for pages, versions and
//! names.
//!
//! The protocols over it reach it by two traits, so that a checker can put memory of its own in its
//! place (`tests/orders.rs`).

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Result;

use crate::{MappedMemory, PeerMemory};

/// Memory to read. Positions are in bytes, positions of numbers are multiples of their length, and
/// a position outside of the memory panics.
pub trait ReadableMemory {
    /// The order of a load: it makes visible everything that the writer of the number wrote before
    /// it.
    const LOADS: Ordering = Ordering::Acquire;

    /// The number of 64 bits at `at`.
    fn load64(&self, at: usize) -> u64;
    /// The number of 32 bits at `at`.
    fn load32(&self, at: usize) -> u32;
    /// Copies bytes out of the memory. They may change meanwhile, and are then any bytes.
    fn copy(&self, at: usize, out: &mut [u8]);
    /// Orders the accesses of this thread to the memory before and after it.
    fn fence(&self, order: Ordering);
}

/// Memory of the server that writes it.
pub trait WritableMemory: ReadableMemory {
    /// The order of a store: it comes after everything before it.
    const STORES: Ordering = Ordering::Release;
    /// The order of an addition.
    const ADDS: Ordering = Ordering::SeqCst;

    /// Writes the number of 64 bits at `at`.
    fn store64(&self, at: usize, value: u64);
    /// Writes the number of 32 bits at `at`.
    fn store32(&self, at: usize, value: u32);
    /// Adds to the number of 64 bits at `at`, modulo 2^64.
    fn add64(&self, at: usize, value: u64);
    /// Copies bytes into the memory, in no order.
    fn put(&self, at: usize, bytes: &[u8]);
    /// Returns the memory of these bytes to the kernel: they read as zeros.
    fn give_back(&self, at: usize, len: usize);
}

impl ReadableMemory for MappedMemory {
    #[inline]
    fn load64(&self, at: usize) -> u64 {
        self.word64(at).load(Self::LOADS)
    }

    #[inline]
    fn load32(&self, at: usize) -> u32 {
        self.word(at).load(Self::LOADS)
    }

    #[inline]
    fn copy(&self, at: usize, out: &mut [u8]) {
        self.read(at, out);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// Memory of a fixed length, all zero at first, with its descriptor.
pub struct PublishedMemory {
    memory: MappedMemory,
    fd: OwnedFd,
}

impl PublishedMemory {
    /// Memory of `len` bytes, whose first word is `magic`.
    pub(crate) fn new(len: usize, magic: u64) -> Result<PublishedMemory> {
        let (memory, fd) = MappedMemory::create_sealed(len)?;
        // No other user can open it again for writing, through /proc.
        rustix::fs::fchmod(&fd, Mode::RUSR)?;
        memory.write(0, &magic.to_ne_bytes());
        Ok(PublishedMemory { memory, fd })
    }

    /// A descriptor to read the memory. A mapping through it cannot be made writable.
    pub(crate) fn reader(&self) -> Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Bytes of memory that are in use now, by the kernel's count.
    pub(crate) fn bytes_in_use(&self) -> Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * 512)
    }
}

impl ReadableMemory for PublishedMemory {
    #[inline]
    fn load64(&self, at: usize) -> u64 {
        self.memory.load64(at)
    }

    #[inline]
    fn load32(&self, at: usize) -> u32 {
        self.memory.load32(at)
    }

    #[inline]
    fn copy(&self, at: usize, out: &mut [u8]) {
        self.memory.copy(at, out);
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

impl WritableMemory for PublishedMemory {
    #[inline]
    fn store64(&self, at: usize, value: u64) {
        self.memory.word64(at).store(value, Self::STORES);
    }

    #[inline]
    fn store32(&self, at: usize, value: u32) {
        self.memory.word(at).store(value, Self::STORES);
    }

    #[inline]
    fn add64(&self, at: usize, value: u64) {
        self.memory.word64(at).fetch_add(value, Self::ADDS);
    }

    #[inline]
    fn put(&self, at: usize, bytes: &[u8]) {
        self.memory.write(at, bytes);
    }

    fn give_back(&self, at: usize, len: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.fd, flags, at as u64, len as u64) {
            log::warn!("shared memory is not given back: {error}");
        }
    }
}
