//! Figures for the operator (docs/statistics.md).

use std::sync::atomic::{AtomicU64, Ordering};

use defuse_block::DeviceCounters;
use defuse_fs::Figure;

use super::{EngineSlots, UhsEngine, queues};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::group::number_of_thread;
use crate::locks::lock;
use crate::store::StoreProgress;

/// Lanes of a tally. More threads share them.
const LANES: usize = 16;

/// A count that many threads add to, so that their processors share no cache line.
#[derive(Default)]
pub(super) struct StripedCounter([CounterCell; LANES]);

#[derive(Default)]
#[repr(align(128))]
struct CounterCell(AtomicU64);

impl StripedCounter {
    pub(super) fn add(&self, count: u64) {
        self.0[number_of_thread() % LANES].0.fetch_add(count, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|lane| lane.0.load(Ordering::Relaxed)).sum()
    }
}

/// Counts of reads.
#[derive(Default)]
pub(super) struct ReadCounters {
    /// Parts of up to 1 MiB that were in memory.
    pub(super) hits: StripedCounter,
    /// Parts of up to 1 MiB for which something was read from the device.
    pub(super) misses: StripedCounter,
    /// Pages that were read because an operation needed them.
    pub(super) fetched: StripedCounter,
    /// Pages that were read ahead.
    pub(super) ahead: StripedCounter,
}

impl UhsEngine {
    /// Figures of this file system, each name once. Nothing waits for the device.
    pub(crate) fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::with_capacity(48);
        if let EngineSlots::Store(store) = &self.store {
            figures.extend(group_figures(&store.progress()));
        }
        figures.push(Figure::count("read_only", self.is_read_only().into()));
        figures.push(Figure::count("files_stuck", lock(&self.stuck).len() as u64));
        figures.extend(device_figures(&self.device.counters()));
        figures.extend(self.separated.as_deref().map(queues::figures).into_iter().flatten());
        figures.extend(self.memory_figures());
        figures.extend(self.space_figures());
        figures
    }

    /// The reasons why the device is slower than it could be.
    pub(crate) fn notes(&self) -> Vec<String> {
        use defuse_block::BlockDevice;
        self.device.note().into_iter().collect()
    }

    fn memory_figures(&self) -> Vec<Figure> {
        let bytes = |name, pages: usize| Figure::bytes(name, (pages * BLOCK) as u64);
        let count = |name, tally: &StripedCounter| Figure::count(name, tally.sum()).since_start();
        let read = |name, tally: &StripedCounter| {
            Figure::bytes(name, tally.sum() * BLOCK as u64).since_start()
        };
        let (used, limit) = self.pool.frames_in_use();
        let (index, index_limit) = self.pool.index_bytes();
        vec![
            bytes("dirty", self.pool.dirty()),
            bytes("dirty_limit", self.options.dirty_pages),
            Figure::bytes("index_used", index),
            Figure::bytes("index_limit", index_limit),
            bytes("cache_used", used),
            bytes("cache_limit", limit),
            count("cache_hits", &self.reads.hits),
            count("cache_misses", &self.reads.misses),
            read("cache_fetched", &self.reads.fetched),
            read("cache_read_ahead", &self.reads.ahead),
            Figure::count("contents_idle", lock(&self.idle).len() as u64),
        ]
    }

    fn space_figures(&self) -> Vec<Figure> {
        let blocks = |name, blocks: u64| Figure::bytes(name, blocks * BLOCK as u64);
        let units = self.pool.space().units();
        let (promised, waiting) = self.pool.set_aside();
        let (slots, chunks) = self.pool.slots();
        let space = self.pool.count_blocks().0;
        vec![
            Figure::count("inodes", self.pool.inodes().load(Ordering::Relaxed)),
            Figure::count("slots", slots),
            // With a table, there can be one for each unit.
            Figure::count("slot_chunks_left", chunks.min(space / UNIT_BLOCKS)),
            Figure::count("compactions", self.compaction.rounds.sum()).since_start(),
            Figure::count("compaction_units", self.compaction.units.sum()).since_start(),
            Figure::count("units_of_slots_given_back", self.compaction.slot_units.sum())
                .since_start(),
            Figure::count("slots_moved", self.compaction.slots_moved.sum()).since_start(),
            Figure::count("units_merged", self.scattered.merged.sum()).since_start(),
            blocks("compaction_moved", self.compaction.pages.sum()).since_start(),
            Figure::count("units_free", units.free),
            Figure::count("units_of_slots", units.slots),
            Figure::count("units_full", units.full),
            Figure::count("units_of_small_blocks", units.small),
            blocks("space", space),
            blocks("space_free", units.free_blocks),
            blocks("space_free_in_small_blocks", units.small_free_blocks),
            blocks("space_promised", promised),
            blocks("space_waiting_for_groups", waiting),
        ]
    }
}

fn group_figures(progress: &StoreProgress) -> Vec<Figure> {
    vec![
        Figure::count("groups", progress.groups).since_start(),
        Figure::count("groups_not_durable", progress.not_durable),
        Figure::count("slots_written", progress.slots_written).since_start(),
        Figure::count("slots_free", progress.slots_free),
        Figure::count("superblocks_written", progress.superblocks).since_start(),
    ]
}

fn device_figures(counters: &DeviceCounters) -> Vec<Figure> {
    let count = |name, value| Figure::count(name, value).since_start();
    let bytes = |name, value| Figure::bytes(name, value).since_start();
    vec![
        count("device_reads", counters.reads),
        bytes("device_read", counters.read_bytes),
        count("device_writes", counters.writes),
        bytes("device_written", counters.written_bytes),
        count("device_durable_writes", counters.fua_writes),
        count("device_flushes", counters.flushes),
        count("device_discards", counters.discards),
        bytes("device_discarded", counters.discarded_bytes),
        count("device_errors", counters.errors),
        Figure::count("device_in_flight", counters.in_flight),
    ]
}
