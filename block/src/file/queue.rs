//! A queue on io_uring(7).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::bounce;
use super::buffers::RegisteredBuffers;
use super::state::FileDeviceState;
use crate::{
    BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, Errno, FrameRun, MemorySegments,
    QueueWaker, Result,
};

/// The file of the device among the registered files.
const DEVICE: types::Fixed = types::Fixed(0);

/// The number of the read of the eventfd; operations have the numbers of their slots.
const WAKE: u64 = u64::MAX;

pub(super) struct RingQueue {
    ring: IoUring,
    open: Arc<FileDeviceState>,
    /// Operations in flight. Their memory stays where it is until they are complete.
    slots: Vec<Option<KernelOperation>>,
    free: Vec<usize>,
    /// Operations that are complete without the kernel.
    done: Vec<BlockCompletion>,
    /// Dropped after the ring, which uses the addresses of the buffers.
    buffers: RegisteredBuffers,
    wake: Arc<OwnedFd>,
    /// The place for the count of the eventfd, which the kernel writes.
    woken: Box<u64>,
    /// The kernel reads the eventfd.
    watched: bool,
}

/// An operation that the kernel has.
struct KernelOperation {
    tag: u64,
    kind: BlockOpKind,
    /// Frames that stand in for memory that direct I/O cannot use.
    bounce: Option<FrameRun>,
    vectors: Vec<libc::iovec>,
    /// Bytes transferred so far.
    moved: usize,
    /// The kernel refused to zero the range without freeing it.
    punched: bool,
    /// All bytes of a write are transferred, and an fdatasync makes them durable.
    syncing: bool,
}

// SAFETY: the addresses in `vectors` lead to memory that the operation owns (`RawBuf::new`).
unsafe impl Send for KernelOperation {}

/// Makes a ring and ends it. Fails if [`RingQueue::new`] would fail for this file.
pub(super) fn probe(fd: &OwnedFd) -> Result<()> {
    let ring: IoUring = IoUring::builder().dontfork().setup_clamp().build(2).map_err(errno)?;
    ring.submitter().register_files(&[fd.as_raw_fd()]).map_err(errno)?;
    // Dropping a queue does this, too.
    ring.submitter().unregister_files().map_err(errno)
}

impl RingQueue {
    pub(super) fn new(open: &Arc<FileDeviceState>, depth: u32) -> Result<Self> {
        // One more for the eventfd.
        let ring = IoUring::builder().dontfork().setup_clamp().build(depth + 1).map_err(errno)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        ring.submitter().register_files(&[open.locked.fd.as_raw_fd()]).map_err(errno)?;
        let regions = open.regions.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let buffers = RegisteredBuffers::new(&ring, regions);
        let depth = depth as usize;
        Ok(RingQueue {
            ring,
            open: Arc::clone(open),
            slots: std::iter::repeat_with(|| None).take(depth).collect(),
            free: (0..depth).rev().collect(),
            done: Vec::new(),
            buffers,
            wake,
            woken: Box::new(0),
            watched: false,
        })
    }

    /// Hands the operation in `slot` to the kernel, from where it stands.
    fn submit(&mut self, slot: usize) {
        let Some(flight) = &mut self.slots[slot] else { return };
        let block_size = u64::from(self.open.facts.block_size);
        let entry = match &flight.kind {
            BlockOpKind::Read { block, memory } => {
                let offset = block * block_size + flight.moved as u64;
                match remaining(memory, &flight.bounce, flight.moved, &mut flight.vectors) {
                    One { start, len, region } => {
                        match self.buffers.get(&self.ring, region, start, len) {
                            Some(buffer) => {
                                let read = opcode::ReadFixed::new(DEVICE, start, len, buffer);
                                read.offset(offset).build()
                            }
                            None => opcode::Read::new(DEVICE, start, len).offset(offset).build(),
                        }
                    }
                    Many => {
                        let (start, count) = (flight.vectors.as_ptr(), flight.vectors.len() as u32);
                        opcode::Readv::new(DEVICE, start, count).offset(offset).build()
                    }
                }
            }
            BlockOpKind::Write { .. } if flight.syncing => fdatasync(),
            BlockOpKind::Write { block, memory, fua } => {
                let offset = block * block_size + flight.moved as u64;
                let flags = if *fua && self.open.facts.fua { libc::RWF_DSYNC } else { 0 };
                match remaining(memory, &flight.bounce, flight.moved, &mut flight.vectors) {
                    One { start, len, region } => {
                        match self.buffers.get(&self.ring, region, start, len) {
                            Some(buffer) => {
                                let write = opcode::WriteFixed::new(DEVICE, start, len, buffer);
                                write.offset(offset).rw_flags(flags).build()
                            }
                            None => {
                                let write = opcode::Write::new(DEVICE, start, len);
                                write.offset(offset).rw_flags(flags).build()
                            }
                        }
                    }
                    Many => {
                        let (start, count) = (flight.vectors.as_ptr(), flight.vectors.len() as u32);
                        let write = opcode::Writev::new(DEVICE, start, count);
                        write.offset(offset).rw_flags(flags).build()
                    }
                }
            }
            BlockOpKind::Flush => fdatasync(),
            BlockOpKind::Discard { block, blocks } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                fallocate(mode, block * block_size, blocks * block_size)
            }
            BlockOpKind::Zero { block, blocks } => {
                let zero = match flight.punched {
                    false => libc::FALLOC_FL_ZERO_RANGE,
                    true => libc::FALLOC_FL_PUNCH_HOLE,
                };
                let mode = zero | libc::FALLOC_FL_KEEP_SIZE;
                fallocate(mode, block * block_size, blocks * block_size)
            }
        };
        self.push_entry(&entry.user_data(slot as u64));
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the memory and the vectors that the entry points to belong to a
            // `KernelOperation`, which stays in its slot until its completion is seen (dropping the
            // queue waits for that), or the entry points to `woken`, which lives as long.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            self.kick();
        }
    }

    /// Processes a completion from the kernel.
    fn complete(&mut self, slot: usize, result: i32, done: &mut Vec<BlockCompletion>) {
        let Some(flight) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        let result = match result {
            code if code < 0 => Err(Errno::from_raw_os_error(-code)),
            moved => Ok(moved as usize),
        };
        let again = match (&flight.kind, result) {
            // The thread that submitted it has ended; there is no other reason for a cancellation.
            (_, Err(Errno::CANCELED)) => true,
            (_, Err(Errno::INTR | Errno::AGAIN)) => true,
            (BlockOpKind::Zero { .. }, Err(Errno::OPNOTSUPP))
                if self.open.locked.is_regular() && !flight.punched =>
            {
                flight.punched = true;
                true
            }
            (BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. }, Ok(moved)) => {
                flight.moved += moved;
                let is_whole = flight.moved >= memory.bytes();
                let syncs = is_whole && !flight.syncing && self.open.syncs_after(&flight.kind);
                flight.syncing |= syncs;
                syncs || moved > 0 && !is_whole
            }
            _ => false,
        };
        if again {
            self.submit(slot);
            return;
        }
        let Some(mut flight) = self.slots[slot].take() else { return };
        self.free.push(slot);
        let result = result.and_then(|_| flight.finish());
        done.push(BlockCompletion { tag: flight.tag, result, memory: flight.kind.into_memory() });
    }
}

impl KernelOperation {
    /// The result of an operation that the kernel performed.
    fn finish(&mut self) -> Result<()> {
        let (BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. }) = &self.kind
        else {
            return Ok(());
        };
        // The device ended early.
        if self.moved < memory.bytes() {
            return Err(Errno::IO);
        }
        match (&mut self.kind, &self.bounce) {
            (BlockOpKind::Read { memory, .. }, Some(bounced)) => bounce::copy_out(bounced, memory),
            _ => Ok(()),
        }
    }
}

/// The memory that is still to be transferred.
enum RemainingMemory {
    /// One piece, of this region.
    One { start: *mut u8, len: u32, region: Option<u64> },
    /// Several pieces, in the vectors.
    Many,
}
use RemainingMemory::{Many, One};

fn remaining(
    memory: &MemorySegments,
    bounce: &Option<FrameRun>,
    moved: usize,
    vectors: &mut Vec<libc::iovec>,
) -> RemainingMemory {
    if let Some(bounce) = bounce {
        let len = (memory.bytes() - moved) as u32;
        return One { start: bounce.start().wrapping_add(moved), len, region: None };
    }
    if let [piece] = memory.pieces() {
        let len = (piece.len() - moved) as u32;
        return One { start: piece.start().wrapping_add(moved), len, region: piece.region() };
    }
    vectors.clear();
    let mut skip = moved;
    for piece in memory.pieces() {
        let gone = skip.min(piece.len());
        skip -= gone;
        if gone < piece.len() {
            let iov_base = piece.start().wrapping_add(gone).cast();
            vectors.push(libc::iovec { iov_base, iov_len: piece.len() - gone });
        }
    }
    Many
}

fn fdatasync() -> squeue::Entry {
    #[cfg(test)]
    count_sync();
    opcode::Fsync::new(DEVICE).flags(types::FsyncFlags::DATASYNC).build()
}

/// Counts a call of fdatasync(2).
#[cfg(test)]
pub(super) fn count_sync() {
    SYNCS.set(SYNCS.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Calls of fdatasync(2) that this thread has submitted or made.
    static SYNCS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

fn fallocate(mode: i32, offset: u64, len: u64) -> squeue::Entry {
    opcode::Fallocate::new(DEVICE, len).offset(offset).mode(mode).build()
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

impl DeviceQueue for RingQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        let Some(slot) = self.free.pop() else { return Err(op) };
        let BlockOp { tag, kind } = op;
        let checked = kind.check(&self.open.facts).and_then(|()| self.open.refuse(&kind));
        match checked.and_then(|()| self.open.bounce(&kind)) {
            Ok(bounce) => {
                let vectors = Vec::new();
                let flight = KernelOperation {
                    tag,
                    kind,
                    bounce,
                    vectors,
                    moved: 0,
                    punched: false,
                    syncing: false,
                };
                self.slots[slot] = Some(flight);
                self.submit(slot);
            }
            Err(errno) => {
                self.free.push(slot);
                self.done.push(BlockCompletion {
                    tag,
                    result: Err(errno),
                    memory: kind.into_memory(),
                });
            }
        }
        Ok(())
    }

    fn kick(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        match self.ring.submit() {
            Ok(_) => {}
            // Entries that the kernel did not take stay in the ring for the next time.
            Err(error) => log::debug!("the ring took no operation: {error}"),
        }
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        done.append(&mut self.done);
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            match entry.user_data() {
                WAKE => self.watched = false,
                slot => self.complete(slot as usize, entry.result(), done),
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if !self.watched {
            let into: *mut u64 = &mut *self.woken;
            let fd = types::Fd(self.wake.as_raw_fd());
            let read = opcode::Read::new(fd, into.cast(), size_of::<u64>() as u32);
            self.push_entry(&read.build().user_data(WAKE));
            self.watched = true;
        }
        let ready = !self.done.is_empty() || !self.ring.completion().is_empty();
        if ready {
            return self.kick();
        }
        let waited = match timeout {
            None => self.ring.submit_and_wait(1).map(drop),
            Some(timeout) => {
                let timeout = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&timeout);
                self.ring.submitter().submit_with_args(1, &args).map(drop)
            }
        };
        match waited.map_err(errno) {
            Ok(()) | Err(Errno::INTR | Errno::TIME) => {}
            Err(errno) => log::debug!("the ring could not be waited for: {errno}"),
        }
    }

    fn waker(&self) -> QueueWaker {
        let wake = Arc::clone(&self.wake);
        QueueWaker::new(move || {
            // The counter of an eventfd is full only after 2^64 - 2 unread calls.
            let _ = rustix::io::write(&*wake, &1_u64.to_ne_bytes());
        })
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring keeps its descriptor open, and the queue keeps the ring.
        Some(unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) })
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.done.len()
    }

    fn depth(&self) -> usize {
        self.slots.len()
    }
}

impl Drop for RingQueue {
    /// Waits for the operations that the kernel has: their memory must stay until then.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.free.len() < self.slots.len() {
            self.wait(None);
            self.reap(&mut done);
        }
        if self.watched {
            // The read of the eventfd ends with the ring, but it writes to `woken`.
            let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
            while self.watched {
                let _ = self.ring.submit_and_wait(1);
                self.reap(&mut done);
            }
        }
        // The ring itself ends a moment later, and must not keep the device open.
        let _ = self.ring.submitter().unregister_files();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockDevice, BlockingQueue, DeviceAccess, OpenDeviceFile};

    // The flag of a write was trusted on every file system.
    #[test]
    fn a_write_through_is_followed_by_a_sync_where_the_flag_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        for (trusted, rings) in [(true, true), (true, false), (false, true), (false, false)] {
            let open = OpenDeviceFile::open(&path, DeviceAccess::ReadWrite).unwrap();
            let file = if rings { open.device() } else { open.device_of_threads() };
            let mut file = file.unwrap();
            Arc::get_mut(&mut file.open).unwrap().facts.fua = trusted;
            let mut line = BlockingQueue::new(&file).unwrap();
            for (fua, syncs) in [(true, u32::from(!trusted)), (false, 0)] {
                let before = SYNCS.get();
                let memory = crate::OwnedBuf::new(vec![5; 8192], 0..8192).into();
                line.run(BlockOpKind::Write { block: 3, memory, fua }).unwrap();
                let found = SYNCS.get() - before;
                assert_eq!(found, syncs, "trusted {trusted}, fua {fua}, rings {rings}");
            }
            let mut bytes = vec![0; 8192];
            line.read(3, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 5));
            assert_eq!((file.properties().fua, file.has_rings()), (trusted, rings));
        }
    }
}
