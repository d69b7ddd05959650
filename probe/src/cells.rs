//! Counters of latencies: a block of cells for every measuring thread.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::{BUCKETS, LatencyHistogram, Op, OpStats, RequestStage, StatsSnapshot, clock};

/// Collects the measurements of all threads of a session. Clones refer to the same recorder.
#[derive(Clone, Debug)]
pub struct Recorder {
    shared: Arc<RecorderShared>,
}

#[derive(Debug)]
struct RecorderShared {
    /// If set, nothing is counted.
    is_off: bool,
    started: Instant,
    started_unix_ms: u64,
    blocks: Mutex<CellBlocks>,
}

#[derive(Debug, Default)]
struct CellBlocks {
    live: Vec<Arc<CellBlock>>,
    /// The counts of threads that have ended, by stage and operation.
    ended: Vec<OpStats>,
}

impl Default for Recorder {
    fn default() -> Self {
        Recorder::new()
    }
}

impl Recorder {
    /// Creates an empty recorder.
    pub fn new() -> Self {
        Recorder::new_counting(true)
    }

    /// Creates a recorder that counts nothing, for measuring the cost of counting.
    pub fn new_disabled() -> Self {
        Recorder::new_counting(false)
    }

    fn new_counting(counts: bool) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Recorder {
            shared: Arc::new(RecorderShared {
                is_off: !counts,
                started: Instant::now(),
                started_unix_ms: unix.as_millis() as u64,
                blocks: Mutex::default(),
            }),
        }
    }

    /// Creates cells for one thread, to keep as long as it measures. When they are dropped, the
    /// recorder keeps their counts.
    pub fn cells(&self) -> ThreadCells {
        let block = Arc::new(CellBlock::new());
        self.shared.lock().live.push(Arc::clone(&block));
        let (shared, is_off) = (Arc::downgrade(&self.shared), self.shared.is_off);
        ThreadCells { block, shared, is_off, one_thread: PhantomData }
    }

    /// Calls `measure` with the cells that this thread keeps for the recorder. For code that runs
    /// on unknown threads. Costs 1 to 2 ns more than cells that the caller holds.
    #[inline]
    pub fn with_cells<T>(&self, measure: impl FnOnce(&ThreadCells) -> T) -> T {
        let key = Arc::as_ptr(&self.shared);
        let mut measure = Some(measure);
        let done = LOCAL.try_with(|local| {
            let mut local = local.try_borrow_mut().ok()?;
            if local.first().is_none_or(|cells| cells.shared.as_ptr() != key) {
                self.bring_to_front(&mut local);
            }
            let measure = measure.take()?;
            Some(measure(local.first()?))
        });
        match (done, measure) {
            (Ok(Some(value)), _) => value,
            // The thread is ending, or this is a call inside `measure`: use cells for this call
            // only.
            (_, Some(measure)) => measure(&self.cells()),
            (_, None) => unreachable!("measure was taken, so its value is there"),
        }
    }

    /// Runs an operation and counts it. Only some are timed; see [`ThreadCells::count_sampled`].
    #[inline]
    pub fn sample<T, E>(&self, op: Op, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let start = self.with_cells(|cells| cells.count_sampled(op).then(clock::now));
        let result = run();
        match (start, result.is_ok()) {
            (Some(start), ok) => {
                self.with_cells(|cells| cells.record_sample(op, start.elapsed_ns(), ok));
            }
            (None, false) => self.with_cells(|cells| cells.add_error(op)),
            (None, true) => {}
        }
        result
    }

    /// Moves this recorder's cells to the front of the thread's list.
    #[cold]
    fn bring_to_front(&self, local: &mut Vec<ThreadCells>) {
        // Also removes cells whose recorder is gone, so that the list stays as short as the number
        // of recorders.
        local.retain(|cells| cells.shared.strong_count() > 0);
        let key = Arc::as_ptr(&self.shared);
        match local.iter().position(|cells| cells.shared.as_ptr() == key) {
            Some(place) => local.swap(0, place),
            None => {
                local.push(self.cells());
                let last = local.len() - 1;
                local.swap(0, last);
            }
        }
    }

    /// The counts so far. Threads continue to count meanwhile, so a latency recorded at this moment
    /// may be included in a count and not yet in its sum.
    pub fn snapshot(&self) -> StatsSnapshot {
        let blocks = self.shared.lock();
        let mut ops = blocks.ended.clone();
        for block in &blocks.live {
            block.add_to(&mut ops);
        }
        drop(blocks);
        ops.sort_by_key(|stats| (stats.stage, stats.op));
        StatsSnapshot {
            started_unix_ms: self.shared.started_unix_ms,
            span_ns: self.shared.started.elapsed().as_nanos() as u64,
            ops,
            gauges: Default::default(),
            figures: Vec::new(),
            notes: Vec::new(),
        }
    }
}

impl RecorderShared {
    fn lock(&self) -> MutexGuard<'_, CellBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

thread_local! {
    /// The cells of this thread for each recorder, the most recently used first.
    static LOCAL: RefCell<Vec<ThreadCells>> = const { RefCell::new(Vec::new()) };
}

/// The cells of one thread. Only one thread at a time can use them, so counting needs no lock and
/// no locked instruction. They can be sent to another thread but not shared with it.
///
/// ```compile_fail
/// fn shared<T: Sync>(_: T) {}
/// shared(defuse_probe::Recorder::new().cells());
/// ```
#[derive(Debug)]
pub struct ThreadCells {
    block: Arc<CellBlock>,
    shared: Weak<RecorderShared>,
    is_off: bool,
    one_thread: PhantomData<Cell<()>>,
}

impl ThreadCells {
    /// Counts one operation that took `ns` nanoseconds in user space. `ok` is true if it succeeded.
    #[inline]
    pub fn record(&self, op: Op, ns: u64, ok: bool) {
        if !self.is_off {
            self.block.user.rows[op.index()].record(ns, ok);
        }
    }

    /// Counts one operation that took `ns` nanoseconds in `stage`.
    pub fn record_stage(&self, stage: RequestStage, op: Op, ns: u64, ok: bool) {
        if !self.is_off {
            self.block.stage(stage).rows[op.index()].record(ns, ok);
        }
    }

    /// Counts one operation without its time, and returns true if the caller should time it: the
    /// first one, and then one in [`sampling_interval`](ThreadCells::sampling_interval). For
    /// operations that take little longer than reading the clock. Report the time of timed
    /// operations to [`record_sample`](ThreadCells::record_sample), and errors of the others to
    /// [`add_error`](ThreadCells::add_error). A snapshot assumes that the others took as long as
    /// the timed ones.
    #[inline]
    pub fn count_sampled(&self, op: Op) -> bool {
        if self.is_off {
            return false;
        }
        let sampled = &self.block.user.rows[op.index()].sampled;
        let before = sampled.load(Relaxed);
        sampled.store(before + 1, Relaxed);
        before.is_multiple_of(Self::sampling_interval(op))
    }

    /// One in this number of sampled operations is timed: reads and writes are the shortest and the
    /// most.
    pub const fn sampling_interval(op: Op) -> u64 {
        if matches!(op, Op::READ | Op::WRITE) { 64 } else { 8 }
    }

    /// Records the time of an operation for which [`count_sampled`](ThreadCells::count_sampled)
    /// returned true.
    #[inline]
    pub fn record_sample(&self, op: Op, ns: u64, ok: bool) {
        self.record(op, ns, ok);
    }

    /// Counts the error of an operation that was counted but not timed.
    #[cold]
    pub fn add_error(&self, op: Op) {
        if !self.is_off {
            add(&self.block.user.rows[op.index()].errors, 1);
        }
    }

    /// Counts bytes that `op` transferred. The counter wraps, so that a correction can be
    /// subtracted, even by another thread.
    #[inline]
    pub fn add_bytes(&self, op: Op, bytes: u64) {
        if !self.is_off {
            add(&self.block.user.rows[op.index()].bytes, bytes);
        }
    }
}

impl Drop for ThreadCells {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            // The two changes are under one lock, so that every snapshot has these counts exactly
            // once.
            let mut blocks = shared.lock();
            self.block.add_to(&mut blocks.ended);
            blocks.live.retain(|block| !Arc::ptr_eq(block, &self.block));
        }
    }
}

/// The cells of one thread: the cells of [`RequestStage::User`], and cells of other stages on first
/// use.
#[derive(Debug)]
struct CellBlock {
    user: StageRows,
    others: [OnceLock<Box<StageRows>>; 5],
}

impl CellBlock {
    fn new() -> Self {
        CellBlock { user: StageRows::new(), others: [const { OnceLock::new() }; 5] }
    }

    fn stage(&self, stage: RequestStage) -> &StageRows {
        let place = match stage {
            RequestStage::User => return &self.user,
            RequestStage::Background => 0,
            RequestStage::Pending => 1,
            RequestStage::Processing => 2,
            RequestStage::Unsplit => 3,
            RequestStage::Total => 4,
        };
        self.others[place].get_or_init(|| Box::new(StageRows::new()))
    }

    /// Adds the counts to the statistics of the same stage and operation in `ops`.
    fn add_to(&self, ops: &mut Vec<OpStats>) {
        let others = [
            RequestStage::Background,
            RequestStage::Pending,
            RequestStage::Processing,
            RequestStage::Unsplit,
            RequestStage::Total,
        ];
        let others = others.into_iter().zip(&self.others);
        let others = others.filter_map(|(stage, rows)| Some((stage, &**rows.get()?)));
        for (stage, rows) in others.chain([(RequestStage::User, &self.user)]) {
            for &op in Op::ALL {
                rows.rows[op.index()].add_to(stage, op, ops);
            }
        }
    }
}

/// A row for each operation. The alignment is two cache lines, because processors fetch lines in
/// pairs: threads thus share no line.
#[derive(Debug)]
#[repr(align(128))]
struct StageRows {
    rows: [CounterRow; Op::COUNT],
}

impl StageRows {
    const fn new() -> Self {
        StageRows { rows: [const { CounterRow::new() }; Op::COUNT] }
    }
}

/// The counts of one operation. The total is the sum of the buckets. They are atomic for readers
/// only: the single writer loads, adds and stores.
#[derive(Debug)]
struct CounterRow {
    buckets: [AtomicU64; BUCKETS],
    errors: AtomicU64,
    sum_ns: AtomicU64,
    min_ns: AtomicU64,
    max_ns: AtomicU64,
    bytes: AtomicU64,
    /// Number of operations counted by [`ThreadCells::count_sampled`], timed or not.
    sampled: AtomicU64,
}

impl CounterRow {
    const fn new() -> Self {
        CounterRow {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            errors: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            min_ns: AtomicU64::new(u64::MAX),
            max_ns: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            sampled: AtomicU64::new(0),
        }
    }

    #[inline]
    fn record(&self, ns: u64, ok: bool) {
        add(&self.buckets[LatencyHistogram::bucket_of(ns)], 1);
        add(&self.sum_ns, ns);
        if ns < self.min_ns.load(Relaxed) {
            self.min_ns.store(ns, Relaxed);
        }
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
        if !ok {
            add(&self.errors, 1);
        }
    }

    fn add_to(&self, stage: RequestStage, op: Op, ops: &mut Vec<OpStats>) {
        let mut buckets = [0; BUCKETS];
        for (out, count) in buckets.iter_mut().zip(&self.buckets) {
            *out = count.load(Relaxed);
        }
        let timed: u64 = buckets.iter().sum();
        let bytes = self.bytes.load(Relaxed);
        let sampled = self.sampled.load(Relaxed);
        let untimed = sampled - sampled.div_ceil(ThreadCells::sampling_interval(op));
        let sum_ns = extrapolate(&mut buckets, self.sum_ns.load(Relaxed), timed, untimed);
        let count = buckets.iter().sum();
        if count == 0 && bytes == 0 {
            return;
        }
        let latency = LatencyHistogram {
            buckets,
            count,
            errors: self.errors.load(Relaxed),
            sum_ns,
            // A latency is counted before the minimum is updated, so the first one may be missing
            // here.
            min_ns: self.min_ns.load(Relaxed).min(self.max_ns.load(Relaxed)),
            max_ns: self.max_ns.load(Relaxed),
        };
        match ops.iter_mut().find(|stats| stats.stage == stage && stats.op == op) {
            Some(stats) => {
                stats.latency.merge(&latency);
                // Another thread's cells may hold the correction of a count; see
                // [`ThreadCells::add_bytes`].
                stats.bytes = stats.bytes.wrapping_add(bytes);
            }
            None => ops.push(OpStats { op, stage, bytes, latency }),
        }
    }
}

/// Distributes `untimed` operations over `buckets` in proportion to the `timed` ones. Returns the
/// sum of all latencies. The fullest bucket absorbs the rounding error, so that no operation is
/// lost.
fn extrapolate(buckets: &mut [u64; BUCKETS], sum_ns: u64, timed: u64, untimed: u64) -> u64 {
    if untimed == 0 || timed == 0 {
        return sum_ns;
    }
    let share = |part: u64| (u128::from(part) * u128::from(untimed) / u128::from(timed)) as u64;
    let fullest = (0..BUCKETS).max_by_key(|&bucket| buckets[bucket]).unwrap_or(0);
    let mut added = 0;
    for bucket in buckets.iter_mut() {
        let more = share(*bucket);
        *bucket += more;
        added += more;
    }
    buckets[fullest] += untimed - added;
    sum_ns.saturating_add(share(sum_ns))
}

/// Adds to a counter that no other thread writes, without a locked instruction.
#[inline]
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(value), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_ended_threads_are_kept_once() {
        let recorder = Recorder::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cells = recorder.cells();
                    for ns in 0..10_000 {
                        cells.record(Op::READ, ns, ns % 10 != 0);
                        cells.add_bytes(Op::READ, 4096);
                    }
                });
            }
            // Snapshots meanwhile never decrease, even if threads end between them.
            let mut seen = 0;
            for _ in 0..200 {
                let now = recorder.snapshot().get(Op::READ).map_or(0, |stats| stats.latency.count);
                assert!(now >= seen);
                seen = now;
            }
        });
        let snapshot = recorder.snapshot();
        let reads = snapshot.get(Op::READ).unwrap();
        assert_eq!((reads.latency.count, reads.latency.errors), (40_000, 4_000));
        assert_eq!((reads.latency.min_ns, reads.latency.max_ns), (0, 9_999));
        assert_eq!(reads.latency.sum_ns, 4 * (9_999 * 10_000 / 2));
        assert_eq!(reads.bytes, 40_000 * 4096);
        assert!(recorder.shared.lock().live.is_empty());
        assert!(snapshot.get(Op::WRITE).is_none());
    }

    #[test]
    fn sampled_operations_are_all_counted_and_spread_as_the_timed_ones() {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for call in 0..1000 {
            if cells.count_sampled(Op::READ) {
                cells.record_sample(Op::READ, if call < 500 { 100 } else { 1000 }, true);
            } else if call % 10 == 0 {
                cells.add_error(Op::READ);
            }
            cells.add_bytes(Op::READ, 1);
        }
        let snapshot = recorder.snapshot();
        let reads = snapshot.get(Op::READ).unwrap();
        assert_eq!((reads.latency.count, reads.bytes), (1000, 1000));
        let short = reads.latency.buckets[LatencyHistogram::bucket_of(100)];
        assert!((450..=550).contains(&short), "{short}");
        let mean = reads.latency.mean_ns();
        assert!((500..=600).contains(&mean), "{mean}");
        assert!(reads.latency.errors > 50);
    }

    #[test]
    fn a_recorder_that_is_off_counts_nothing() {
        let recorder = Recorder::new_disabled();
        let cells = recorder.cells();
        cells.record(Op::READ, 100, true);
        cells.record_stage(RequestStage::Total, Op::READ, 100, true);
        cells.add_bytes(Op::READ, 4096);
        drop(cells);
        assert!(recorder.snapshot().ops.is_empty());
    }

    #[test]
    fn stages_are_counted_separately() {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        cells.record(Op::READ, 100, true);
        cells.record_stage(RequestStage::Pending, Op::READ, 900, true);
        let snapshot = recorder.snapshot();
        assert_eq!(snapshot.get(Op::READ).unwrap().latency.sum_ns, 100);
        assert_eq!(
            snapshot.get_stage(RequestStage::Pending, Op::READ).unwrap().latency.sum_ns,
            900
        );
        assert!(snapshot.get_stage(RequestStage::Background, Op::READ).is_none());
    }

    #[test]
    fn a_thread_keeps_cells_for_several_recorders() {
        let (first, second) = (Recorder::new(), Recorder::new());
        for _ in 0..3 {
            first.with_cells(|cells| {
                cells.record(Op::OPEN, 1, true);
                // A call inside a call gets its own cells.
                second.with_cells(|cells| cells.record(Op::READ, 1, true));
            });
            second.with_cells(|cells| cells.record(Op::READ, 1, true));
        }
        assert_eq!(first.snapshot().get(Op::OPEN).unwrap().latency.count, 3);
        assert_eq!(second.snapshot().get(Op::READ).unwrap().latency.count, 6);
        assert_eq!(first.shared.lock().live.len(), 1);
        assert_eq!(second.shared.lock().live.len(), 1);
        drop(first);
        // A new recorder may get the address of an old one, but their counts do not mix.
        let third = Recorder::new();
        third.with_cells(|cells| cells.record(Op::FLUSH, 1, true));
        assert_eq!(third.snapshot().ops.len(), 1);
    }
}
