//! The slots of a device, each read once: by all cores, with several reads in flight.

use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicUsize, Ordering};

use defuse_block::{Blocking, Device, Done, Errno, FRAME, Op, OpKind, Queue, Region};
use defuse_fs::source::{Unwatched, Watch};

use super::copies::superblock;
use super::error::{StoreError, failed};
use super::slots;
use crate::commit::{Recovered, Rules, Scanned, recover};
use crate::format::slot::{self, Found, SlotIdentity};
use crate::format::superblock::{Chunk, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Blocks of one read: 1 MiB, and less where there is little to read.
const GATHERED: RangeInclusive<u64> = 32..=256;

/// Reads into which the slots are divided at least, where they are large enough.
const READS: u64 = 16;

/// Reads in flight of one thread.
const DEPTH: u32 = 2;

/// Slots that are worth a thread of their own: 16 MiB.
const SHARE: u64 = 4096;

/// The state of a file system, as its slots tell. Nothing was written to find it.
pub(crate) struct Survey {
    pub(crate) superblock: Superblock,
    pub(crate) found: Recovered,
    /// Blocks of slots that cannot be read.
    pub(crate) unreadable: Vec<u64>,
    parts: Vec<Part>,
}

/// The findings of one thread.
#[derive(Default)]
struct Part {
    slots: Vec<(u64, Scanned)>,
    /// Inodes: number, block, and the body within `bytes`.
    bodies: Vec<(u64, u64, Range<usize>)>,
    bytes: Vec<u8>,
    unreadable: Vec<u64>,
}

/// Neighbouring blocks of one chunk.
#[derive(Clone, Copy)]
struct Piece {
    block: u64,
    blocks: u64,
    key: u64,
}

/// Reads the superblock and all slots of `device`, and works out what counts. Writes nothing.
///
/// # Errors
///
/// See [`StoreError`]. Slots that cannot be read or are damaged are none.
pub(crate) fn survey(device: &dyn Device, rules: Rules) -> Result<Survey, StoreError> {
    survey_and_see(device, rules, |_| {}, &Unwatched)
}

/// As [`survey`], and shows all slots by block. `watch` sees the reading.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn survey_and_see(
    device: &dyn Device,
    rules: Rules,
    see: impl FnOnce(&[(u64, Scanned)]),
    watch: &dyn Watch,
) -> Result<Survey, StoreError> {
    let superblock = superblock(device)?;
    let parts = scan(device, &superblock, watch);
    let mut parts = parts.map_err(|errno| match errno {
        Errno::INTR => StoreError::Interrupted,
        errno => failed("read the inodes")(errno),
    })?;
    let mut slots = Vec::new();
    let mut unreadable = Vec::new();
    for part in &mut parts {
        slots.append(&mut part.slots);
        unreadable.append(&mut part.unreadable);
    }
    slots.sort_unstable_by_key(|(block, _)| *block);
    unreadable.sort_unstable();
    see(&slots);
    let mut found = recover(&slots, superblock.durable, rules);
    found.next_ino = superblock.next_ino.max(found.next_ino);
    Ok(Survey { superblock, found, unreadable, parts })
}

impl Survey {
    /// The state that a snapshot has told.
    pub(crate) fn restored(superblock: Superblock, found: Recovered) -> Survey {
        Survey { superblock, found, unreadable: Vec::new(), parts: Vec::new() }
    }

    /// The state of the same slots, `scan`, if the groups up to `group` count, whatever is missing of them.
    pub(crate) fn count_up_to(self, scan: &[(u64, Scanned)], group: u64) -> Survey {
        let mut found = recover(scan, self.superblock.durable.max(group), Rules::ALL);
        found.next_ino = self.superblock.next_ino.max(found.next_ino);
        Survey { found, ..self }
    }

    /// The body of the inode in a slot that is whole.
    pub(crate) fn body(&self, block: u64) -> Option<&[u8]> {
        let of = |part: &'_ Part| part.bodies.iter().find(|(_, at, _)| *at == block).cloned();
        self.parts.iter().find_map(|part| of(part).map(|(.., range)| &part.bytes[range]))
    }

    /// The place of the slot at `block`; `None` where no chunk has it.
    pub(crate) fn place(&self, block: u64) -> Option<SlotIdentity> {
        let unit = block / UNIT_BLOCKS;
        let holds = |chunk: &&Chunk| {
            let first = u64::from(chunk.first_unit);
            (first..first + u64::from(chunk.units)).contains(&unit)
        };
        let chunk = self.superblock.chunks.iter().find(holds)?;
        Some(SlotIdentity { uuid: self.superblock.uuid, key: chunk.key, block })
    }

    /// The bodies of the inodes that count, by number.
    pub(crate) fn inodes(&self) -> Vec<(u64, &[u8])> {
        let counts =
            |ino, block| self.found.live.get(&ino).is_some_and(|version| version.block == block);
        let bodies = self.parts.iter().flat_map(|part| {
            let counting = part.bodies.iter().filter(|(ino, block, _)| counts(*ino, *block));
            counting.map(|(ino, _, range)| (*ino, &part.bytes[range.clone()]))
        });
        let mut bodies: Vec<(u64, &[u8])> = bodies.collect();
        bodies.sort_unstable_by_key(|(ino, _)| *ino);
        bodies
    }
}

/// Reads all slots. `EINTR` if `watch` ends that.
fn scan(
    device: &dyn Device,
    superblock: &Superblock,
    watch: &dyn Watch,
) -> Result<Vec<Part>, Errno> {
    // A region gives runs out of blocks of a power of two.
    let gathered = (slots(superblock) / READS).clamp(*GATHERED.start(), *GATHERED.end());
    let largest = (u64::from(device.facts().max_transfer) / BLOCK as u64).max(1);
    let gathered = gathered.next_power_of_two().min(1 << largest.ilog2());
    let pieces: Vec<Piece> = superblock
        .chunks
        .iter()
        .flat_map(|chunk| {
            let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
            let end = first + u64::from(chunk.units) * UNIT_BLOCKS;
            (first..end).step_by(gathered as usize).map(move |block| Piece {
                block,
                blocks: gathered.min(end - block),
                key: chunk.key,
            })
        })
        .collect();
    // The number of cores costs a dozen system calls.
    let threads = match slots(superblock) / SHARE {
        0 | 1 => 1,
        wanted => {
            wanted.min(std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64))
        }
    };
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let goes_on = || {
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        !watch.ends("reading inodes", done as u64, pieces.len() as u64)
    };
    let work = || Scanner::new(device, superblock, gathered)?.run(&pieces, &next, &goes_on);
    if threads == 1 {
        return Ok(vec![work()?]);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        // A thread does not panic: what it reads is decoded or refused.
        threads.into_iter().map(|thread| thread.join().unwrap_or(Err(Errno::IO))).collect()
    })
}

/// One thread of a scan.
struct Scanner<'a> {
    device: &'a dyn Device,
    superblock: &'a Superblock,
    queue: Box<dyn Queue>,
    region: std::sync::Arc<Region>,
    part: Part,
}

impl<'a> Scanner<'a> {
    fn new(
        device: &'a dyn Device,
        superblock: &'a Superblock,
        gathered: u64,
    ) -> Result<Self, Errno> {
        let region = Region::new(DEPTH * gathered as u32)?;
        device.register(&region)?;
        let queue = device.queue(DEPTH)?;
        Ok(Scanner { device, superblock, queue, region, part: Part::default() })
    }

    /// Reads pieces, each of which one thread takes by `next`, while `goes_on` says so after each.
    fn run(
        mut self,
        pieces: &[Piece],
        next: &AtomicUsize,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Part, Errno> {
        let mut done = Vec::new();
        loop {
            while self.queue.in_flight() < DEPTH as usize {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(piece) = pieces.get(at) else { break };
                let frames = self.region.take(piece.blocks as u32).ok_or(Errno::NOMEM)?;
                let kind = OpKind::Read { block: piece.block, memory: frames.into() };
                self.queue.push(Op { tag: at as u64, kind }).map_err(|_| Errno::BUSY)?;
            }
            if self.queue.in_flight() == 0 {
                return Ok(self.part);
            }
            self.queue.wait(None);
            self.queue.reap(&mut done);
            for Done { tag, result, memory } in done.drain(..) {
                let piece = pieces[tag as usize];
                match (result, memory.into_frames()) {
                    (Ok(()), Some(frames)) => self.see(piece, &frames),
                    _ => self.read_singly(piece)?,
                }
                if !goes_on() {
                    return Err(Errno::INTR);
                }
            }
        }
    }

    /// Reads a piece block by block, of which one at least cannot be read.
    fn read_singly(&mut self, piece: Piece) -> Result<(), Errno> {
        let mut line = Blocking::new(self.device)?;
        let mut bytes = [0; FRAME];
        for block in piece.block..piece.block + piece.blocks {
            match line.read(block, &mut bytes) {
                Ok(()) => self.see(Piece { block, blocks: 1, ..piece }, &bytes),
                Err(errno) => {
                    log::warn!("the slot at block {block} cannot be read: {errno}");
                    self.part.unreadable.push(block);
                }
            }
        }
        Ok(())
    }

    fn see(&mut self, piece: Piece, bytes: &[u8]) {
        let Piece { block, key, .. } = piece;
        let part = &mut self.part;
        for (block, bytes) in (block..).zip(bytes.chunks_exact(BLOCK)) {
            let place = SlotIdentity { uuid: self.superblock.uuid, key, block };
            let found = slot::decode(bytes, &place);
            if let Found::Whole(identity, body) = &found
                && identity.kind == slot::Kind::Inode
            {
                let start = part.bytes.len();
                part.bytes.extend_from_slice(body);
                part.bodies.push((identity.ino, block, start..part.bytes.len()));
            }
            part.slots.extend(Scanned::of(&found).map(|scanned| (block, scanned)));
        }
    }
}
