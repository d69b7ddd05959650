//! The files of a trace: every extent has a place in one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use defuse_cache::ExtentKey;
use fastrand::Rng;

use crate::traces::{EXTENT, ExtentTrace, TraceStep};

/// The most extents of a file.
const MOST: u64 = 64;

/// The place of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ExtentPlace {
    pub(super) file: u32,
    pub(super) slot: u32,
}

/// A use that a process makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceUse {
    pub(super) user: u32,
    pub(super) place: ExtentPlace,
    /// The process needs the file no more.
    pub(super) is_last: bool,
}

/// The files of a trace, and its uses in their order.
#[derive(Debug)]
pub(super) struct TraceLayout {
    /// The number of extents of each file.
    pub(super) files: Vec<u32>,
    pub(super) uses: Vec<TraceUse>,
}

/// True if the server can keep the extents of a trace as they are: its unit is a group of one
/// extent.
pub(super) fn fits(trace: &ExtentTrace) -> bool {
    trace.steps.iter().all(|step| matches!(step, TraceStep::Use(extent) if extent.size == EXTENT))
}

impl TraceLayout {
    /// Files of at most so many bytes. Extents are in no order, so that no file has the popular
    /// ones.
    pub(super) fn new(trace: &ExtentTrace, most_bytes: u64, seed: u64) -> TraceLayout {
        let most = (most_bytes / EXTENT).clamp(1, MOST);
        // The frames of a file are a power of two, and count whether they hold pages or not.
        let most = 1 << most.ilog2();
        let used = || {
            trace.steps.iter().filter_map(|step| match step {
                TraceStep::Use(extent) => Some(extent),
                TraceStep::Gone(_) => None,
            })
        };
        let mut extents: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for extent in used() {
            extents.entry(extent.key.file).or_default().insert(extent.key.index);
        }
        let (mut places, mut files) = (HashMap::new(), Vec::new());
        let mut rng = Rng::with_seed(seed);
        for (of, indices) in extents {
            let mut indices: Vec<u64> = indices.into_iter().collect();
            rng.shuffle(&mut indices);
            for part in indices.chunks(most) {
                let file = files.len() as u32;
                files.push(part.len() as u32);
                let place = |(slot, index): (u32, &u64)| {
                    (ExtentKey::new(of, *index), ExtentPlace { file, slot })
                };
                places.extend((0..).zip(part).map(place));
            }
        }
        let mut uses: Vec<TraceUse> = used()
            .map(|extent| TraceUse {
                user: extent.user,
                place: places[&extent.key],
                is_last: false,
            })
            .collect();
        let mut seen = BTreeSet::new();
        for one in uses.iter_mut().rev() {
            one.is_last = seen.insert((one.user, one.place.file));
        }
        TraceLayout { files, uses }
    }

    /// The number of extents.
    pub(super) fn extents(&self) -> u64 {
        self.files.iter().copied().map(u64::from).sum()
    }

    /// The number of processes.
    pub(super) fn users(&self) -> u32 {
        self.uses.iter().map(|one| one.user + 1).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::traces::make_all;

    #[test]
    fn every_extent_has_a_place_of_its_own_and_every_use_is_there_in_its_order() {
        let traces: Vec<ExtentTrace> = make_all(3000, 5).into_iter().filter(fits).collect();
        assert_eq!(traces.len(), make_all(64, 5).len() - 2, "two have extents of other sizes");
        for trace in traces {
            let layout = TraceLayout::new(&trace, 8 * EXTENT, 5);
            assert_eq!(layout.uses.len(), trace.steps.len());
            let mut places: HashMap<ExtentKey, ExtentPlace> = HashMap::new();
            for (step, one) in trace.steps.iter().zip(&layout.uses) {
                let TraceStep::Use(extent) = step else { continue };
                assert_eq!(*places.entry(extent.key).or_insert(one.place), one.place);
                assert_eq!(extent.user, one.user);
                assert!(one.place.slot < layout.files[one.place.file as usize]);
            }
            let different: HashSet<ExtentPlace> = places.values().copied().collect();
            assert_eq!(different.len(), places.len());
            assert_eq!(layout.extents(), places.len() as u64);
            assert!(layout.files.iter().all(|extents| (1..=8).contains(extents)));
            let pairs: HashSet<(u32, u32)> =
                layout.uses.iter().map(|one| (one.user, one.place.file)).collect();
            let last = layout.uses.iter().filter(|one| one.is_last).count();
            assert_eq!(last, pairs.len(), "each process closes each of its files once");
        }
    }
}
