//! The decision to request more of a directory than one name or file, by whether earlier requests
//! paid off.

/// The number of entries of a directory that are requested one by one.
const FEW: u32 = 3;
/// After so many successes in a row, several entries are requested at the first entry of the next
/// directory.
const ROW: u32 = 2;
/// A request for several entries pays off if one of so many is used.
const PAYS: u64 = 4;
/// After all entries of a directory were requested, the next such request needs so many times as
/// many single requests.
const RARER: u32 = 16;

/// Decides whether a request for several entries of a directory pays off, by the share of entries
/// received lately that were used. Several threads may work in several directories.
#[derive(Default)]
pub(super) struct PrefetchRate {
    /// Number of consecutive successes.
    row: u32,
    /// The count of hits at the last batch.
    counted: u64,
    /// Hits and received entries. An earlier batch counts half as much as the next one.
    hits: u64,
    received: u64,
}

impl PrefetchRate {
    /// Counts received entries of one batch, and all hits since the beginning.
    pub(super) fn count(&mut self, received: u64, counted: u64) {
        let hits = self.hits + counted.saturating_sub(self.counted);
        let row = if hits >= self.received / PAYS { self.row.saturating_add(1) } else { 0 };
        *self =
            PrefetchRate { row, counted, hits: hits / 2, received: self.received / 2 + received };
    }

    /// True if the previous batch had paid off when the last one arrived.
    pub(super) fn was_worthwhile(&self) -> bool {
        self.row > 0
    }

    /// Returns the number of entries of a new directory that are requested one by one.
    fn initial_threshold(&self) -> u32 {
        if self.row >= ROW { 0 } else { FEW }
    }
}

/// The entries of a directory that were requested one by one.
#[derive(Default)]
pub(super) struct SingleRequests {
    count: u32,
    /// The number of single requests after which several entries are requested at once.
    most: u32,
}

impl SingleRequests {
    /// Counts one entry. True if it is time to request several.
    pub(super) fn is_enough(&mut self, rate: &PrefetchRate) -> bool {
        self.count += 1;
        let most = self.most.max(rate.initial_threshold());
        let several = self.count > most;
        if several {
            *self = SingleRequests { count: 0, most: most.max(FEW).saturating_mul(RARER) };
        }
        several
    }

    /// Counts an entry that was requested together with something else.
    pub(super) fn note(&mut self) {
        self.count = self.count.saturating_add(1);
    }

    /// Makes the next request for several entries soon, because such requests pay off.
    pub(super) fn expect_prefetch(&mut self) {
        self.most = 0;
    }
}
