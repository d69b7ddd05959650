//! Many operations in flight.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use defuse_block::{BlockDevice, BlockOp, BlockOpKind, FileDevice, MemoryRegion, MemorySegments};
use defuse_direct::{AsyncCallback, ClientTask, DirectClient, FileDescription};
use defuse_fs::{Buffer, Errno};

use super::{DEPTH, FileOperation};

/// The memory of operations of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceMemory {
    /// The kernel knows it before (io_uring_register(2)).
    Registered,
    /// The memory belongs to a program, as in operations of files.
    Any,
}

/// Carries out operations of a device, or of a file as if it were one, and flushes.
pub(crate) fn run_on_device(
    device: &FileDevice,
    memory: DeviceMemory,
    operations: Vec<FileOperation>,
) -> Result<()> {
    let largest = operations.iter().map(|(.., blocks)| *blocks).max().unwrap_or(1);
    // Twice what the operations in flight have: one that is shorter takes frames of its own.
    let region = MemoryRegion::new((2 * DEPTH * largest).next_power_of_two())?;
    let mut operations = operations.into_iter();
    if memory == DeviceMemory::Registered {
        device.register(&region)?;
    }
    let mut queue = device.queue(DEPTH)?;
    let (mut done, mut spare) = (Vec::new(), HashMap::<u32, Vec<MemorySegments>>::new());
    let mut over = false;
    while !over || queue.in_flight() > 0 {
        while !over && queue.in_flight() < DEPTH as usize {
            let Some((writes, block, blocks)) = operations.next() else {
                over = true;
                break;
            };
            let memory = match spare.get_mut(&blocks).and_then(Vec::pop) {
                Some(memory) => memory,
                None => region.take(blocks).context("no frame is free")?.into(),
            };
            let kind = match writes {
                true => BlockOpKind::Write { block, memory, fua: false },
                false => BlockOpKind::Read { block, memory },
            };
            anyhow::ensure!(
                queue.push(BlockOp { tag: u64::from(blocks), kind }).is_ok(),
                "no room"
            );
        }
        queue.kick();
        if queue.in_flight() > 0 {
            queue.wait(None);
        }
        queue.reap(&mut done);
        for one in done.drain(..) {
            one.result?;
            spare.entry(one.tag as u32).or_default().push(one.memory);
        }
    }
    defuse_block::BlockingQueue::new(device)?.flush()?;
    Ok(())
}

/// Carries out operations of a file in this process. The end of each begins the next one.
pub(crate) fn run_on_client(
    client: &Arc<DirectClient>,
    file: &Arc<FileDescription>,
    operations: Vec<FileOperation>,
) -> Result<()> {
    let flights = Arc::new(ConcurrentOperations {
        client: Arc::clone(client),
        file: Arc::clone(file),
        task: ClientTask::for_this_process()?,
        state: Mutex::new(ConcurrentOperationsState {
            left: operations.into_iter(),
            in_flight: 0,
            failed: None,
        }),
        over: Condvar::new(),
    });
    for _ in 0..DEPTH {
        flights.begin(Buffer::default());
    }
    let mut state = flights.lock();
    while !state.is_over() {
        state = flights.over.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    let failed = state.failed.take();
    drop(state);
    // The thread that has set this state keeps the open file for a moment, and a thread that
    // unmounts next would find the file in use.
    while Arc::strong_count(&flights) > 1 {
        std::thread::yield_now();
    }
    failed.map_or(Ok(()), |errno| Err(anyhow::anyhow!("an operation failed: {errno}")))
}

struct ConcurrentOperations {
    client: Arc<DirectClient>,
    file: Arc<FileDescription>,
    task: ClientTask,
    state: Mutex<ConcurrentOperationsState>,
    over: Condvar,
}

struct ConcurrentOperationsState {
    left: std::vec::IntoIter<FileOperation>,
    in_flight: usize,
    failed: Option<Errno>,
}

impl ConcurrentOperationsState {
    fn is_over(&self) -> bool {
        self.in_flight == 0 && self.left.len() == 0
    }
}

impl ConcurrentOperations {
    fn lock(&self) -> MutexGuard<'_, ConcurrentOperationsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next operation, in `memory` if that has its size.
    fn begin(self: &Arc<Self>, memory: Buffer) {
        let (writes, block, blocks) = {
            let mut state = self.lock();
            let Some(next) = state.left.next() else { return };
            state.in_flight += 1;
            next
        };
        let (len, at) = (blocks as usize * 4096, block * 4096);
        let memory = if memory.len() == len { memory } else { Buffer::new_aligned(len) };
        let flights = Arc::clone(self);
        let then: AsyncCallback = Box::new(move |result, memory| {
            flights.record_end(result, len);
            flights.begin(memory);
        });
        let begun = match writes {
            true => self.client.start_write_then(&self.task, &self.file, (memory, at), Some(then)),
            false => self.client.start_read_into(&self.task, &self.file, (memory, at), Some(then)),
        };
        if begun.is_err() {
            self.record_end(Err(Errno::EIO), len);
        }
    }

    fn record_end(&self, result: Result<usize, Errno>, len: usize) {
        let mut state = self.lock();
        let short = result.is_ok_and(|done| done != len).then_some(Errno::EIO);
        state.failed = state.failed.or(result.err()).or(short);
        state.in_flight -= 1;
        if state.is_over() {
            self.over.notify_all();
        }
    }
}
