//! The possible states of a device after a power failure, by the rules of
//! [`BlockDevice`](crate::BlockDevice).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::SimEvent;
use super::queue::tear_block;
use crate::RamDevice;
use crate::ram::BlockStore;

/// The largest number of pieces for which [`PowerCut::combinations`] lists all combinations.
const FEW: usize = 10;

/// The moments at which the power can fail: before the first event, and after each event.
pub struct PowerCuts {
    events: Vec<SimEvent>,
    at: usize,
    begun: bool,
    /// The content that survives for certain.
    base: BlockStore,
    /// For blocks that were written: the beginning and the end of the write in `base`.
    written: HashMap<u64, WriteSpan>,
    /// Blocks that were discarded for certain, with their former content.
    garbage: BTreeMap<u64, Option<Arc<[u8]>>>,
    /// Writes to single blocks that are there, absent or torn.
    open: Vec<WrittenBlock>,
    /// For each write the event of its completion.
    done: HashMap<usize, usize>,
}

/// The events between which a write was in flight.
#[derive(Clone, Copy)]
struct WriteSpan {
    begin: usize,
    end: usize,
}

/// A block of a write.
#[derive(Clone)]
struct WrittenBlock {
    submitted: usize,
    block: u64,
    content: BlockContent,
    fua: bool,
}

#[derive(Clone)]
enum BlockContent {
    Bytes(Option<Arc<[u8]>>),
    Discarded,
}

impl PowerCuts {
    pub(super) fn new(base: BlockStore, events: Vec<SimEvent>) -> Self {
        PowerCuts {
            events,
            at: 0,
            begun: false,
            base,
            written: HashMap::new(),
            garbage: BTreeMap::new(),
            open: Vec::new(),
            done: HashMap::new(),
        }
    }

    /// The next moment; `None` after the last.
    // A cut borrows from here, which an iterator cannot say.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<PowerCut<'_>> {
        if self.begun {
            let event = self.events.get(self.at)?.clone();
            self.happen(event);
            self.at += 1;
        }
        self.begun = true;
        Some(PowerCut { cuts: self })
    }

    /// Advances to the moment after the last event.
    pub fn last(&mut self) -> PowerCut<'_> {
        while !self.begun || self.at < self.events.len() {
            self.next();
        }
        PowerCut { cuts: self }
    }

    fn happen(&mut self, event: SimEvent) {
        match event {
            SimEvent::Write { block, blocks, content, fua } => {
                for (at, block) in (block..block + blocks).enumerate() {
                    let content = match &content {
                        Some(content) => BlockContent::Bytes(content[at].clone()),
                        None => BlockContent::Discarded,
                    };
                    self.open.push(WrittenBlock { submitted: self.at, block, content, fua });
                }
            }
            SimEvent::Flush => {}
            SimEvent::Done { submitted, durable } => self.complete(submitted, durable),
        }
    }

    fn complete(&mut self, submitted: usize, durable: bool) {
        let is_flush = matches!(self.events[submitted], SimEvent::Flush);
        self.done.insert(submitted, self.at);
        if !durable {
            // A failed write stays open for good: its effect is unknown.
            return;
        }
        let now = self.at;
        let (certain, open) = std::mem::take(&mut self.open).into_iter().partition(|piece| {
            let Some(done) = self.done.get(&piece.submitted) else { return false };
            match is_flush {
                true => *done < submitted && self.is_successful(*done),
                false => piece.fua && *done == now,
            }
        });
        self.open = open;
        let certain: Vec<WrittenBlock> = certain;
        certain.into_iter().for_each(|piece| self.settle(piece));
    }

    fn is_successful(&self, done: usize) -> bool {
        matches!(self.events[done], SimEvent::Done { durable: true, .. })
    }

    /// Puts a write that survives for certain into the base. It replaces writes that were complete
    /// before it began; writes that were in flight at the same time may have won.
    fn settle(&mut self, piece: WrittenBlock) {
        let span = WriteSpan { begin: piece.submitted, end: self.done[&piece.submitted] };
        match self.written.get(&piece.block) {
            Some(base) if base.begin > span.end => return,
            Some(base) if base.end > span.begin => {
                self.open.push(piece);
                return;
            }
            _ => {}
        }
        let done = &self.done;
        self.open.retain(|other| {
            let over = done.get(&other.submitted).is_some_and(|end| *end < span.begin);
            other.block != piece.block || !over
        });
        self.written.insert(piece.block, span);
        match piece.content {
            BlockContent::Bytes(bytes) => {
                self.base.set(piece.block, bytes);
                self.garbage.remove(&piece.block);
            }
            BlockContent::Discarded => {
                let held = self.base.get(piece.block).cloned();
                self.garbage.insert(piece.block, held);
            }
        }
    }
}

/// A moment at which the power can fail.
pub struct PowerCut<'a> {
    cuts: &'a PowerCuts,
}

impl PowerCut<'_> {
    /// The number of events before this moment.
    pub fn event_index(&self) -> usize {
        self.cuts.at
    }

    /// Writes to single blocks that are there, absent or torn.
    pub fn open(&self) -> usize {
        self.cuts.open.len()
    }

    /// True where all combinations of whole and absent writes are few enough to list them.
    pub fn is_small(&self) -> bool {
        self.open() <= FEW
    }

    /// Every combination of whole and absent writes, if [`is_small`](PowerCut::is_small); otherwise
    /// only none and all of them.
    pub fn combinations(&self) -> impl Iterator<Item = RamDevice> + '_ {
        let open = self.open();
        let masks: Vec<u64> = match self.is_small() {
            true => (0..1 << open).collect(),
            false => vec![0, u64::MAX],
        };
        masks.into_iter().map(move |mask| {
            let mut random = fastrand::Rng::with_seed(mask ^ self.cuts.at as u64);
            let whole = |at: usize| mask == u64::MAX || at < 64 && mask & (1 << at) != 0;
            let fates =
                (0..open).map(|at| if whole(at) { WriteFate::Whole } else { WriteFate::Absent });
            self.state(fates.collect(), &mut random)
        })
    }

    /// A state by chance: each write is whole, absent, or torn between sectors of 512 bytes.
    pub fn sample(&self, random: &mut fastrand::Rng) -> RamDevice {
        // Extreme odds are frequent: states in which nearly all or nearly no writes are there
        // matter most.
        let odds = [0.05, 0.3, 0.7, 0.95][random.usize(..4)];
        let tears = [0.0, 0.1, 0.5][random.usize(..3)];
        let fates = (0..self.open()).map(|_| match random.f64() {
            chance if chance < tears => WriteFate::Torn,
            _ if random.f64() < odds => WriteFate::Whole,
            _ => WriteFate::Absent,
        });
        let fates = fates.collect();
        self.state(fates, random)
    }

    fn state(&self, fates: Vec<WriteFate>, random: &mut fastrand::Rng) -> RamDevice {
        let mut store = self.cuts.base.clone();
        for (block, held) in &self.cuts.garbage {
            let content = garbage(held.clone(), store.block_size(), random);
            store.set(*block, content);
        }
        for (piece, fate) in self.cuts.open.iter().zip(fates) {
            let new = match (&piece.content, fate) {
                (_, WriteFate::Absent) => continue,
                (BlockContent::Bytes(bytes), WriteFate::Whole) => bytes.clone(),
                (BlockContent::Bytes(bytes), WriteFate::Torn) => {
                    let size = store.block_size() as usize;
                    Some(tear_block(store.get(piece.block), bytes.as_ref(), size, random))
                }
                (BlockContent::Discarded, _) => {
                    garbage(store.get(piece.block).cloned(), store.block_size(), random)
                }
            };
            store.set(piece.block, new);
        }
        RamDevice::from_store(store)
    }
}

/// The outcome of a write.
enum WriteFate {
    Whole,
    Absent,
    Torn,
}

/// The content of a discarded block: the old bytes, zeros, or anything.
fn garbage(
    held: Option<Arc<[u8]>>,
    block_size: u32,
    random: &mut fastrand::Rng,
) -> Option<Arc<[u8]>> {
    match random.u8(..3) {
        0 => held,
        1 => None,
        _ => {
            let mut bytes = vec![0; block_size as usize];
            random.fill(&mut bytes);
            Some(Arc::from(bytes))
        }
    }
}
