//! The decision to ask for more of a directory than one name or file, by whether it has paid before.

/// So many things of a directory are asked for one by one.
const FEW: u32 = 3;
/// After it has paid so many times in a row, more is asked for at the first thing of the next directory.
const ROW: u32 = 2;
/// It pays if one of so many things is used.
const PAYS: u64 = 4;
/// After everything of a directory was asked for, so many times as many things have to be asked for before the next time.
const RARER: u32 = 16;

/// Tells if it pays to ask for several things of a directory, by those that were used of the ones that were told lately. Several threads
/// may be in several directories.
#[derive(Default)]
pub(super) struct PrefetchRate {
    /// Times in a row at which it has paid.
    row: u32,
    /// The count of hits at the last time.
    counted: u64,
    /// Hits and things that were told. Those of each time count half as much as those of the next one.
    hits: u64,
    told: u64,
}

impl PrefetchRate {
    /// So many things were told, after so many hits since the beginning.
    pub(super) fn count(&mut self, told: u64, counted: u64) {
        let hits = self.hits + counted.saturating_sub(self.counted);
        let row = if hits >= self.told / PAYS { self.row.saturating_add(1) } else { 0 };
        *self = PrefetchRate { row, counted, hits: hits / 2, told: self.told / 2 + told };
    }

    /// True if it had paid when the last things were told.
    pub(super) fn have_paid(&self) -> bool {
        self.row > 0
    }

    /// So many things of a directory that is looked at first are asked for one by one.
    fn few(&self) -> u32 {
        if self.row >= ROW { 0 } else { FEW }
    }
}

/// The things of a directory that were asked for one by one.
#[derive(Default)]
pub(super) struct SingleRequests {
    count: u32,
    /// The number of them after which several are asked for.
    most: u32,
}

impl SingleRequests {
    /// Counts one. True if it is time to ask for several.
    pub(super) fn is_enough(&mut self, gains: &PrefetchRate) -> bool {
        self.count += 1;
        let most = self.most.max(gains.few());
        let several = self.count > most;
        if several {
            *self = SingleRequests { count: 0, most: most.max(FEW).saturating_mul(RARER) };
        }
        several
    }

    /// Counts one that was asked for with something else.
    pub(super) fn note(&mut self) {
        self.count = self.count.saturating_add(1);
    }

    /// It pays, so that it is soon time again.
    pub(super) fn go_on(&mut self) {
        self.most = 0;
    }
}
