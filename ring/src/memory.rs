//! The memory itself: a sealed memfd that both processes have mapped.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use crate::layout::{
    AT_MAGIC, AT_TALLIES, AT_VERSION, BYTES, ClientCounter, MAGIC, MOST_BLOCKS, VERSION,
};

/// Memory that another process may change at any time. Positions are in bytes, and positions of
/// words are multiples of four. A position outside of the memory panics: callers check first.
pub trait PeerMemory {
    /// Loads the word at `at`, and makes visible everything that its writer wrote before it.
    fn load(&self, at: usize) -> u32;
    /// Writes the word at `at` after everything before it.
    fn store(&self, at: usize, value: u32);
    /// Adds to the word at `at`, modulo 2^32.
    fn add(&self, at: usize, value: u32);
    /// Makes the word at `at` at least `value`.
    fn raise(&self, at: usize, value: u32);
    /// Orders all writes before it with all reads after it.
    fn fence_write_read(&self);
    /// Copies bytes out of the memory.
    fn read(&self, at: usize, out: &mut [u8]);
    /// Copies bytes into the memory.
    fn write(&self, at: usize, bytes: &[u8]);
    /// The address of `len` bytes at `at`, for calls that cannot copy by this trait.
    fn address(&self, _at: usize, _len: usize) -> Option<NonNull<u8>> {
        None
    }
    /// Reads `len` bytes of the file `fd` from `offset` into the memory at `at`, as by pread(2).
    /// Returns the bytes read.
    ///
    /// # Errors
    ///
    /// The errors of pread(2).
    fn read_file(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let mut room = vec![0; len];
        let count = rustix::io::pread(fd, &mut room[..], offset)?;
        self.write(at, &room[..count]);
        Ok(count)
    }
    /// Writes `len` bytes of the memory at `at` into the file `fd` at `offset`, as by pwrite(2).
    /// Returns the bytes written.
    ///
    /// # Errors
    ///
    /// The errors of pwrite(2).
    fn write_file(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let mut room = vec![0; len];
        self.read(at, &mut room);
        rustix::io::pwrite(fd, &room, offset)
    }
    /// Sleeps while the word at `at` is `value`, at most for `patience`.
    fn wait(&self, at: usize, value: u32, patience: Duration);
    /// Wakes a thread that sleeps on the word at `at`.
    fn wake(&self, at: usize);
}

/// Mapped memfds of fixed lengths, one after the other. It holds no descriptor: a process has few
/// descriptors, and their numbers in a client belong to its program.
pub struct MappedMemory {
    start: *mut u8,
    /// Number of mapped bytes, which only grows.
    len: AtomicUsize,
    /// Bytes of addresses.
    room: usize,
    growing: Mutex<()>,
}

// SAFETY: the mapping lives as long as the value, and is reached by atomic operations and by copies
// through raw pointers only, which any thread may make at any time.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

pub(crate) const WRITABLE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl MappedMemory {
    /// New memory of one block, all zero but for the magic number and the version, with the
    /// descriptor for the other process. The length of a block can never change.
    ///
    /// # Errors
    ///
    /// The errors of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new() -> Result<(MappedMemory, OwnedFd)> {
        let memory = MappedMemory::reserve(MOST_BLOCKS * BYTES)?;
        let fd = memory.add_new()?;
        Ok((memory, fd))
    }

    /// Adds a new block, and returns the descriptor for the other process.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](MappedMemory::new); `ENOSPC` after the last block.
    pub fn add_new(&self) -> Result<OwnedFd> {
        let fd = MappedMemory::create_sealed_file(BYTES)?;
        let at = self.add(&fd, BYTES)?;
        self.write(at + AT_VERSION, &VERSION.to_ne_bytes());
        self.write(at + AT_MAGIC, &MAGIC.to_ne_bytes());
        Ok(fd)
    }

    /// New memory of `len` bytes, all zero.
    pub(crate) fn create_sealed(len: usize) -> Result<(MappedMemory, OwnedFd)> {
        let fd = MappedMemory::create_sealed_file(len)?;
        Ok((MappedMemory::map(&fd, len, WRITABLE)?, fd))
    }

    fn create_sealed_file(len: usize) -> Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let fd = rustix::fs::memfd_create(c"defuse-ring", flags).or_else(|error| match error {
            // Before Linux 6.3.
            Errno::INVAL => {
                rustix::fs::memfd_create(c"defuse-ring", flags - MemfdFlags::NOEXEC_SEAL)
            }
            error => Err(error),
        })?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok(fd)
    }

    /// The memory of another process, of which this is the first block.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it has another length, could be made shorter, or has another format.
    pub fn from_fd(fd: OwnedFd) -> Result<MappedMemory> {
        let memory = MappedMemory::reserve(MOST_BLOCKS * BYTES)?;
        memory.add_block(fd)?;
        Ok(memory)
    }

    /// Adds a further block of the other process.
    ///
    /// # Errors
    ///
    /// The errors of [`from_fd`](MappedMemory::from_fd); `ENOSPC` after the last block.
    pub fn add_block(&self, fd: OwnedFd) -> Result<()> {
        if MappedMemory::read_fixed_length(&fd)? != BYTES {
            return Err(Errno::INVAL);
        }
        let mut head = [0; 12];
        let read = rustix::io::pread(&fd, &mut head, AT_MAGIC as u64)?;
        let expected = [&MAGIC.to_ne_bytes()[..], &VERSION.to_ne_bytes()].concat();
        if read < head.len() || head[..] != expected[..] {
            return Err(Errno::INVAL);
        }
        self.add(&fd, BYTES).map(drop)
    }

    /// Returns a counter of the client. The client adds to it, and the server reads it.
    pub fn tally(&self, which: ClientCounter) -> &AtomicU64 {
        assert!(self.blocks() > 0, "the counters are in the first block");
        self.word64(AT_TALLIES + 8 * which as usize)
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.len() / BYTES
    }

    /// The memory of another process, of `most` bytes at most, to read: writing to it kills this
    /// process.
    pub(crate) fn map_to_read(fd: OwnedFd, most: usize) -> Result<MappedMemory> {
        match MappedMemory::read_fixed_length(&fd)? {
            len if (1..=most).contains(&len) => MappedMemory::map(&fd, len, ProtFlags::READ),
            _ => Err(Errno::INVAL),
        }
    }

    /// The length, which must be sealed: an access beyond the end of a file kills the process.
    fn read_fixed_length(fd: &OwnedFd) -> Result<usize> {
        let is_fixed = rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK);
        let len = usize::try_from(rustix::fs::fstat(fd)?.st_size).map_err(|_| Errno::INVAL)?;
        if is_fixed { Ok(len) } else { Err(Errno::INVAL) }
    }

    /// Bytes of the memory.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn word64(&self, at: usize) -> &AtomicU64 {
        let len = self.len();
        assert!(at.is_multiple_of(8) && at < len && len - at >= 8, "a number at {at}");
        // SAFETY: as for `word`, with eight aligned bytes.
        unsafe { AtomicU64::from_ptr(self.start.add(at).cast()) }
    }

    pub(crate) fn map(fd: &OwnedFd, len: usize, prot: ProtFlags) -> Result<MappedMemory> {
        // SAFETY: the kernel chooses a free range of addresses.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        Ok(MappedMemory {
            start: start.cast(),
            len: len.into(),
            room: len,
            growing: Mutex::new(()),
        })
    }

    /// Addresses without memory.
    fn reserve(room: usize) -> Result<MappedMemory> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses a free range of addresses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), flags)?
        };
        Ok(MappedMemory { start: start.cast(), len: 0.into(), room, growing: Mutex::new(()) })
    }

    /// Maps the first `len` bytes of a file behind the mapped part. Returns the position.
    fn add(&self, fd: &OwnedFd, len: usize) -> Result<usize> {
        let _alone = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.len();
        assert!(at <= self.room && len.is_multiple_of(4096), "{len} bytes behind {at}");
        if self.room - at < len {
            return Err(Errno::NOSPC);
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the addresses are a part of the range that `reserve` got, and are not in use yet:
        // all accesses are to mapped bytes, and the lock excludes other callers that add.
        unsafe { rustix::mm::mmap(self.start.add(at).cast(), len, WRITABLE, flags, fd, 0)? };
        self.len.store(at + len, Ordering::Release);
        Ok(at)
    }

    #[inline]
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        let len = self.len();
        assert!(at.is_multiple_of(4) && at < len && len - at >= 4, "a word at {at}");
        // SAFETY: four aligned bytes within the mapping, which lives as long as `self`. This
        // process reaches words by atomic operations only, and any bytes are a number.
        unsafe { AtomicU32::from_ptr(self.start.add(at).cast()) }
    }

    #[inline]
    fn range(&self, at: usize, len: usize) -> *mut u8 {
        let all = self.len();
        assert!(at <= all && all - at >= len, "{len} bytes at {at}");
        self.start.wrapping_add(at)
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` or `reserve` got these addresses, and no reference into them is left.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.room) };
    }
}

impl PeerMemory for MappedMemory {
    fn load(&self, at: usize) -> u32 {
        self.word(at).load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }

    fn add(&self, at: usize, value: u32) {
        self.word(at).fetch_add(value, Ordering::SeqCst);
    }

    fn raise(&self, at: usize, value: u32) {
        self.word(at).fetch_max(value, Ordering::SeqCst);
    }

    fn fence_write_read(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn read(&self, at: usize, out: &mut [u8]) {
        let from = self.range(at, out.len());
        // SAFETY: the range lies within the mapping, and `out` elsewhere: no reference into the
        // mapping to bytes is ever made. The other process may write meanwhile; then any bytes are
        // copied, and callers expect any.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let to = self.range(at, bytes.len());
        // SAFETY: as for `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn address(&self, at: usize, len: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.range(at, len))
    }

    fn read_file(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let (to, offset) = (self.range(at, len), offset_of_file(offset)?);
        // SAFETY: the kernel writes to the range, which lies within the mapping, as the other
        // process may.
        check_count(unsafe { libc::pread(fd.as_raw_fd(), to.cast(), len, offset) })
    }

    fn write_file(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let (from, offset) = (self.range(at, len), offset_of_file(offset)?);
        // SAFETY: the kernel reads from the range, which lies within the mapping.
        check_count(unsafe { libc::pwrite(fd.as_raw_fd(), from.cast(), len, offset) })
    }

    fn wait(&self, at: usize, value: u32, patience: Duration) {
        let patience = rustix::time::Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        // Another value, a signal and the end of the time all mean: check again.
        let _ = futex::wait(self.word(at), futex::Flags::empty(), value, Some(&patience));
    }

    fn wake(&self, at: usize) {
        let _ = futex::wake(self.word(at), futex::Flags::empty(), 1);
    }
}

fn offset_of_file(offset: u64) -> Result<i64> {
    i64::try_from(offset).map_err(|_| Errno::INVAL)
}

/// The result of a system call that moves bytes.
fn check_count(count: isize) -> Result<usize> {
    usize::try_from(count).map_err(|_| {
        Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_processes_see_one_memory_whose_length_is_fixed() {
        let (memory, fd) = MappedMemory::new().unwrap();
        let other = MappedMemory::from_fd(fd.try_clone().unwrap()).unwrap();
        memory.write(BYTES - 3, b"end");
        let mut seen = [0; 3];
        other.read(BYTES - 3, &mut seen);
        assert_eq!(&seen, b"end");
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 1 << 30), Err(Errno::PERM));
        assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    }

    /// A server's memory that it could make shorter would end its clients by a signal.
    #[test]
    fn memory_that_can_shrink_or_has_another_format_is_refused() {
        let make = |len: u64, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create(c"other", flags).unwrap();
            rustix::fs::ftruncate(&fd, len).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            MappedMemory::from_fd(fd).err()
        };
        assert_eq!(make(BYTES as u64, SealFlags::GROW), Some(Errno::INVAL));
        assert_eq!(make(4096, SEALS), Some(Errno::INVAL));
        assert_eq!(make(BYTES as u64, SEALS), Some(Errno::INVAL), "no magic number");
    }

    #[test]
    #[should_panic(expected = "8 bytes at")]
    fn an_access_outside_of_the_memory_panics() {
        MappedMemory::new().unwrap().0.write(BYTES - 6, &[0; 8]);
    }

    #[test]
    fn both_processes_see_the_blocks_that_are_added_until_there_is_no_room() {
        let (memory, fd) = MappedMemory::new().unwrap();
        let other = MappedMemory::from_fd(fd).unwrap();
        for block in 1..MOST_BLOCKS {
            other.add_block(memory.add_new().unwrap()).unwrap();
            memory.write(block * BYTES + 7000, &[block as u8]);
        }
        assert_eq!((memory.blocks(), other.blocks()), (MOST_BLOCKS, MOST_BLOCKS));
        for block in 1..MOST_BLOCKS {
            let mut seen = [0];
            other.read(block * BYTES + 7000, &mut seen);
            assert_eq!(seen, [block as u8]);
        }
        assert_eq!(memory.add_new().err(), Some(Errno::NOSPC));
        let (_, fd) = MappedMemory::new().unwrap();
        assert_eq!(other.add_block(fd).err(), Some(Errno::NOSPC));
    }
}
