//! A device in memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::waker::QueueParker;
use crate::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceProperties, DeviceQueue, Errno,
    MemoryRegion, QueueWaker, Result,
};

/// The content of a device: blocks that are shared until they are written, so that a copy is cheap.
#[derive(Clone, Debug)]
pub(crate) struct BlockStore {
    block_size: usize,
    /// `None` is a block of zeros.
    blocks: Vec<Option<Arc<[u8]>>>,
}

impl BlockStore {
    pub(crate) fn new(block_size: u32, blocks: u64) -> Self {
        BlockStore { block_size: block_size as usize, blocks: vec![None; blocks as usize] }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size as u32
    }

    /// The bytes of a block; `None` for zeros.
    pub(crate) fn get(&self, block: u64) -> Option<&Arc<[u8]>> {
        self.blocks[block as usize].as_ref()
    }

    pub(crate) fn set(&mut self, block: u64, content: Option<Arc<[u8]>>) {
        self.blocks[block as usize] = content;
    }

    pub(crate) fn read(&self, block: u64, out: &mut [u8]) {
        for (at, out) in (block..).zip(out.chunks_mut(self.block_size)) {
            match self.get(at) {
                Some(content) => out.copy_from_slice(content),
                None => out.fill(0),
            }
        }
    }

    fn write(&mut self, block: u64, data: &[u8]) {
        for (at, data) in (block..).zip(data.chunks(self.block_size)) {
            self.set(at, Some(Arc::from(data)));
        }
    }

    /// Performs an operation that was checked. Discarded blocks become zeros.
    pub(crate) fn apply(&mut self, kind: &mut BlockOpKind) -> Result<()> {
        let size = self.block_size;
        match kind {
            BlockOpKind::Read { block, memory } => {
                let mut at = *block;
                for piece in memory.pieces_mut() {
                    let bytes = piece.bytes_mut().ok_or(Errno::INVAL)?;
                    self.read(at, bytes);
                    at += (bytes.len() / size) as u64;
                }
            }
            BlockOpKind::Write { block, memory, .. } => {
                let mut at = *block;
                for piece in memory.pieces() {
                    self.write(at, piece.bytes());
                    at += (piece.len() / size) as u64;
                }
            }
            BlockOpKind::Discard { block, blocks } | BlockOpKind::Zero { block, blocks } => {
                (*block..*block + *blocks).for_each(|at| self.set(at, None));
            }
            BlockOpKind::Flush => {}
        }
        Ok(())
    }
}

/// A device in memory. Blocks that were never written read as zeros and take no memory. A clone
/// shares the content; [`fork`](RamDevice::fork) copies it, at little cost.
#[derive(Clone)]
pub struct RamDevice {
    facts: Arc<DeviceProperties>,
    store: Arc<Mutex<BlockStore>>,
}

impl RamDevice {
    /// A device of `blocks` blocks of `block_size` bytes, a power of two from 512 on.
    ///
    /// # Panics
    ///
    /// Panics for another block size.
    pub fn new(block_size: u32, blocks: u64) -> Self {
        RamDevice::from_store(BlockStore::new(block_size, blocks))
    }

    pub(crate) fn from_store(store: BlockStore) -> Self {
        let facts = Arc::new(memory_properties("memory", store.block_size(), store.blocks()));
        RamDevice { facts, store: Arc::new(Mutex::new(store)) }
    }

    /// A device with a copy of the content, which changes independently of this one.
    pub fn fork(&self) -> RamDevice {
        RamDevice::from_store(self.content())
    }

    pub(crate) fn content(&self) -> BlockStore {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BlockStore> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The facts about a device that is memory.
pub(crate) fn memory_properties(name: &str, block_size: u32, blocks: u64) -> DeviceProperties {
    assert!(block_size >= 512 && block_size.is_power_of_two(), "{block_size} is no block size");
    DeviceProperties {
        name: name.to_owned(),
        block_size,
        blocks,
        atomic_write: 512,
        volatile_cache: true,
        fua: true,
        discard: true,
        max_transfer: 2 << 20,
        max_segments: 512,
        max_queues: 64,
        max_depth: 1024,
        erase_unit: 2 << 20,
        numa_node: None,
    }
}

impl BlockDevice for RamDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.facts
    }

    fn register(&self, _: &Arc<MemoryRegion>) -> Result<()> {
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        Ok(Box::new(RamQueue {
            disk: self.clone(),
            depth,
            done: Vec::new(),
            parker: Arc::default(),
        }))
    }
}

/// Operations take effect when they are pushed.
struct RamQueue {
    disk: RamDevice,
    depth: usize,
    done: Vec<BlockCompletion>,
    parker: Arc<QueueParker>,
}

impl DeviceQueue for RamQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.done.len() == self.depth {
            return Err(op);
        }
        let BlockOp { tag, mut kind } = op;
        let checked = kind.check(&self.disk.facts);
        let result = checked.and_then(|()| self.disk.lock().apply(&mut kind));
        self.done.push(BlockCompletion { tag, result, memory: kind.into_memory() });
        Ok(())
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        done.append(&mut self.done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if self.done.is_empty() {
            self.parker.park(timeout);
        }
    }

    fn waker(&self) -> QueueWaker {
        let parker = Arc::clone(&self.parker);
        QueueWaker::new(move || parker.unpark())
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn depth(&self) -> usize {
        self.depth
    }
}
