//! The slots of a device, each read once, on all processors, with several reads in flight.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceQueue, Errno, FRAME,
    MemoryRegion,
};
use defuse_fs::source::{NoWatch, WorkWatch};

use super::copies::superblock;
use super::error::{StoreError, device_error};
use super::inode_bodies::{ScanBudget, ScannedBodies};
use super::places::SlotPlaces;
use super::slots;
use crate::commit::{CommitRules, RecoveredState, ScannedSlot, recover};
use crate::format::slot::{self, FoundSlot, SlotIdentity};
use crate::format::superblock::Superblock;
use crate::format::{BLOCK, LAST, UNIT_BLOCKS};
use crate::names::ROOT;

/// Blocks of one read: 1 MiB, and less where there is little to read.
const GATHERED: RangeInclusive<u64> = 32..=256;

/// The fewest reads into which the slots are divided, if there are enough slots.
const READS: u64 = 16;

/// Reads in flight of one thread.
const DEPTH: u32 = 2;

/// Slots that are worth a thread of their own: 16 MiB.
const SHARE: u64 = 4096;

/// The state of a file system according to its slots, found without writing.
pub(crate) struct SlotSurvey {
    pub(crate) superblock: Superblock,
    pub(crate) found: RecoveredState,
    places: SlotPlaces,
    /// Blocks of slots that cannot be read.
    pub(crate) unreadable: Vec<u64>,
    /// The bodies that each thread has kept.
    pub(super) bodies: Vec<ScannedBodies>,
}

/// The findings of one thread.
pub(super) struct ScanFindings {
    slots: Vec<(u64, ScannedSlot)>,
    pub(super) bodies: ScannedBodies,
    unreadable: Vec<u64>,
}

/// Neighbouring blocks of one chunk.
#[derive(Clone, Copy)]
pub(super) struct ScanRange {
    pub(super) block: u64,
    pub(super) blocks: u64,
    pub(super) key: u64,
}

/// The bodies that a scan keeps.
#[derive(Clone, Copy)]
pub(super) enum BodyRetention<'a> {
    /// Keeps as many bodies as there is room for, without inline data.
    Some(&'a ScanBudget),
    /// Keeps the bodies of the slots in these blocks, in ascending order; with inline data if true.
    These(&'a [u64], bool),
}

/// Reads the superblock and all slots of `device`, and computes the current state. Writes nothing.
///
/// # Errors
///
/// See [`StoreError`]. Slots that cannot be read or are damaged are not errors.
pub(crate) fn survey(
    device: &dyn BlockDevice,
    rules: CommitRules,
) -> Result<SlotSurvey, StoreError> {
    survey_with_slots(device, rules, |_| {}, &NoWatch)
}

/// Performs [`survey`], and passes all slots by block to the caller. `watch` sees the reading.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn survey_with_slots(
    device: &dyn BlockDevice,
    rules: CommitRules,
    see: impl FnOnce(&[(u64, ScannedSlot)]),
    watch: &dyn WorkWatch,
) -> Result<SlotSurvey, StoreError> {
    let superblock = superblock(device)?;
    let budget = ScanBudget(AtomicU64::new(rules.kept));
    let pieces = pieces(&superblock, gather_limit(device, &superblock));
    let parts = scan(device, &superblock, &pieces, BodyRetention::Some(&budget), watch)?;
    let mut slots = Vec::new();
    let mut unreadable = Vec::new();
    let mut bodies = Vec::new();
    for mut part in parts {
        slots.append(&mut part.slots);
        unreadable.append(&mut part.unreadable);
        bodies.push(part.bodies);
    }
    slots.sort_unstable_by_key(|(block, _)| *block);
    unreadable.sort_unstable();
    see(&slots);
    let mut found = recover(&slots, superblock.durable, rules);
    found.next_ino = superblock.next_ino.max(found.next_ino);
    check_numbers(&superblock, &[found.next_ino, found.next_stamp, found.durable])?;
    let places = SlotPlaces::from_superblock(&superblock);
    Ok(SlotSurvey { superblock, found, places, unreadable, bodies })
}

/// Fails if numbers of a file system are so large that a mount could not continue from them.
///
/// # Errors
///
/// [`StoreError::Numbers`].
pub(crate) fn check_numbers(superblock: &Superblock, numbers: &[u64]) -> Result<(), StoreError> {
    let of_superblock = [superblock.epoch, superblock.durable, superblock.next_ino];
    match numbers.iter().chain(&of_superblock).all(|number| *number < LAST) {
        true => Ok(()),
        false => Err(StoreError::Numbers),
    }
}

impl SlotSurvey {
    /// The survey of a state that a snapshot contains.
    pub(crate) fn from_snapshot(superblock: Superblock, found: RecoveredState) -> SlotSurvey {
        let places = SlotPlaces::from_superblock(&superblock);
        SlotSurvey { superblock, found, places, unreadable: Vec::new(), bodies: Vec::new() }
    }

    /// The state of the same slots, `scan`, if the groups up to `group` count, even if parts of
    /// them are missing.
    pub(crate) fn count_up_to(self, scan: &[(u64, ScannedSlot)], group: u64) -> SlotSurvey {
        let mut found = recover(scan, self.superblock.durable.max(group), CommitRules::ALL);
        found.next_ino = self.superblock.next_ino.max(found.next_ino);
        SlotSurvey { found, ..self }
    }

    /// The place of the slot at `block`; `None` if no chunk contains the block.
    pub(crate) fn identity_at(&self, block: u64) -> Option<SlotIdentity> {
        self.places.get(block)
    }
}

/// Blocks of a read. A region gives runs out of blocks of a power of two.
pub(super) fn gather_limit(device: &dyn BlockDevice, superblock: &Superblock) -> u64 {
    let gathered = (slots(superblock) / READS).clamp(*GATHERED.start(), *GATHERED.end());
    let largest = (u64::from(device.properties().max_transfer) / BLOCK as u64).max(1);
    gathered.next_power_of_two().min(1 << largest.ilog2())
}

/// All slots, in pieces of `gathered` blocks.
fn pieces(superblock: &Superblock, gathered: u64) -> Vec<ScanRange> {
    let chunks = superblock.chunks.iter();
    let pieces = chunks.flat_map(|chunk| {
        let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
        let end = first + u64::from(chunk.units) * UNIT_BLOCKS;
        (first..end).step_by(gathered as usize).map(move |block| ScanRange {
            block,
            blocks: gathered.min(end - block),
            key: chunk.key,
        })
    });
    pieces.collect()
}

/// Reads slots in `pieces`.
///
/// # Errors
///
/// A failure of the device as a whole, and [`StoreError::Interrupted`] if `watch` ends the reading.
pub(super) fn scan(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    pieces: &[ScanRange],
    keeps: BodyRetention<'_>,
    watch: &dyn WorkWatch,
) -> Result<Vec<ScanFindings>, StoreError> {
    let parts = scan_by_threads(device, superblock, pieces, keeps, watch);
    parts.map_err(|errno| match errno {
        Errno::INTR => StoreError::Interrupted,
        errno => device_error("read the inodes")(errno),
    })
}

/// `EINTR` if `watch` ends the reading.
fn scan_by_threads(
    device: &dyn BlockDevice,
    superblock: &Superblock,
    pieces: &[ScanRange],
    keeps: BodyRetention<'_>,
    watch: &dyn WorkWatch,
) -> Result<Vec<ScanFindings>, Errno> {
    // The number of cores costs a dozen system calls.
    let threads = match pieces.iter().map(|piece| piece.blocks).sum::<u64>() / SHARE {
        0 | 1 => 1,
        wanted => {
            wanted.min(std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64))
        }
    };
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let goes_on = || {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        !watch.report_progress("reading inodes", done as u64, pieces.len() as u64)
    };
    let largest = pieces.iter().map(|piece| piece.blocks).max().unwrap_or(1).next_power_of_two();
    let work =
        || SlotScanner::new(device, superblock, largest, keeps)?.run(pieces, &next, &goes_on);
    if threads == 1 {
        return Ok(vec![work()?]);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        // A thread does not panic: all bytes are decoded or refused.
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err(Errno::IO))).collect()
    })
}

/// A slot that lists the root as removed is forged, and would hide each root that a repair makes.
fn keep_root(mut scanned: ScannedSlot) -> ScannedSlot {
    if let ScannedSlot::Whole(_, list) = &mut scanned {
        list.retain(|ino| *ino != ROOT);
    }
    scanned
}

/// One thread of a scan.
struct SlotScanner<'a> {
    device: &'a dyn BlockDevice,
    superblock: &'a Superblock,
    queue: Box<dyn DeviceQueue>,
    region: std::sync::Arc<MemoryRegion>,
    keeps: BodyRetention<'a>,
    part: ScanFindings,
}

impl<'a> SlotScanner<'a> {
    fn new(
        device: &'a dyn BlockDevice,
        superblock: &'a Superblock,
        gathered: u64,
        keeps: BodyRetention<'a>,
    ) -> Result<Self, Errno> {
        let region = MemoryRegion::new(DEPTH * gathered as u32)?;
        device.register(&region)?;
        let queue = device.queue(DEPTH)?;
        let (slots, unreadable) = (Vec::new(), Vec::new());
        let part = ScanFindings { slots, bodies: ScannedBodies::default(), unreadable };
        Ok(SlotScanner { device, superblock, queue, region, keeps, part })
    }

    /// Reads pieces while `goes_on` returns true, which is called after each. Each piece is taken
    /// by one thread, with `next`.
    fn run(
        mut self,
        pieces: &[ScanRange],
        next: &AtomicUsize,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<ScanFindings, Errno> {
        let mut done = Vec::new();
        loop {
            while self.queue.in_flight() < DEPTH as usize {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(at) else { break };
                let frames = self.region.take(piece.blocks as u32).ok_or(Errno::NOMEM)?;
                let kind = BlockOpKind::Read { block: piece.block, memory: frames.into() };
                self.queue.push(BlockOp { tag: at as u64, kind }).map_err(|_| Errno::BUSY)?;
            }
            if self.queue.in_flight() == 0 {
                return Ok(self.part);
            }
            self.queue.wait(None);
            self.queue.reap(&mut done);
            for BlockCompletion { tag, result, memory } in done.drain(..) {
                let piece = pieces[tag as usize];
                match (result, memory.into_frames()) {
                    (Ok(()), Some(frames)) => self.scan_piece(piece, &frames),
                    _ => self.read_singly(piece)?,
                }
                if !goes_on() {
                    return Err(Errno::INTR);
                }
            }
        }
    }

    /// Reads a piece block by block, because at least one block cannot be read.
    fn read_singly(&mut self, piece: ScanRange) -> Result<(), Errno> {
        let mut line = BlockingQueue::new(self.device)?;
        let mut bytes = [0; FRAME];
        for block in piece.block..piece.block + piece.blocks {
            match line.read(block, &mut bytes) {
                Ok(()) => self.scan_piece(ScanRange { block, blocks: 1, ..piece }, &bytes),
                Err(errno) => {
                    log::warn!("the slot at block {block} cannot be read: {errno}");
                    self.part.unreadable.push(block);
                }
            }
        }
        Ok(())
    }

    fn scan_piece(&mut self, piece: ScanRange, bytes: &[u8]) {
        let ScanRange { block, key, .. } = piece;
        let part = &mut self.part;
        for (block, bytes) in (block..).zip(bytes.chunks_exact(BLOCK)) {
            let place = SlotIdentity { uuid: self.superblock.uuid, key, block };
            let found = slot::decode(bytes, &place);
            if let FoundSlot::Whole(identity, body) = &found
                && identity.kind == slot::SlotKind::Inode
            {
                match self.keeps {
                    BodyRetention::Some(budget) => {
                        part.bodies.keep_some(budget, identity.ino, block, body)
                    }
                    BodyRetention::These(these, whole) if these.binary_search(&block).is_ok() => {
                        part.bodies.keep(identity.ino, block, body, whole);
                    }
                    BodyRetention::These(..) => {}
                }
            }
            if let BodyRetention::Some(_) = self.keeps {
                part.slots.extend(
                    ScannedSlot::from_found(&found).map(|scanned| (block, keep_root(scanned))),
                );
            }
        }
    }
}
