//! Addresses of data: PRP lists and SGLs.

use defuse_block::MemorySegments;

use crate::DmaMemory;
use crate::spec::{DataPointer, PAGE};

/// Entries of the list of a command. The list has one page.
pub(crate) const LIST: usize = PAGE / 8;

/// Descriptors of the list of a command.
const DESCRIPTORS: usize = PAGE / 16;

/// A range of memory by its address for the controller.
pub(super) type BusRange = (u64, usize);

/// Bus addresses of regions by their numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegionAddresses(pub(crate) Vec<(u64, u64)>);

impl RegionAddresses {
    /// The ranges of `memory` for the controller; `None` if a part is in no region that the
    /// controller reaches.
    fn ranges(&self, memory: &MemorySegments, out: &mut Vec<BusRange>) -> Option<()> {
        for piece in memory.pieces() {
            let (region, at) = piece.region_and_offset()?;
            let (_, bus) = self.0.iter().find(|(id, _)| *id == region.id())?;
            let start = bus + at as u64;
            // PRPs and SGLs are addresses of double words.
            if !start.is_multiple_of(4) {
                return None;
            }
            out.push((start, piece.len()));
        }
        Some(())
    }

    /// A pointer to `memory`, with a list in the page `list` where one is needed. `None` where the
    /// data must be copied.
    #[inline]
    pub(super) fn pointer(
        &self,
        memory: &MemorySegments,
        list: PointerListPage<'_>,
        sgl: bool,
        ranges: &mut Vec<BusRange>,
    ) -> Option<DataPointer> {
        ranges.clear();
        self.ranges(memory, ranges)?;
        if is_of_pages(ranges) {
            return Some(prp(ranges, list));
        }
        (sgl && ranges.len() <= DESCRIPTORS).then(|| scatter(ranges, list))
    }
}

/// The page of a command for its list.
#[derive(Clone, Copy)]
pub(super) struct PointerListPage<'a> {
    pub(super) memory: &'a DmaMemory,
    pub(super) at: usize,
}

impl PointerListPage<'_> {
    pub(super) fn bus(self) -> u64 {
        self.memory.bus() + self.at as u64
    }
}

/// True where the ranges leave no page before its end except the last one, and begin pages except
/// the first.
fn is_of_pages(ranges: &[BusRange]) -> bool {
    let page = PAGE as u64;
    let last = ranges.len().saturating_sub(1);
    ranges.iter().enumerate().all(|(at, (start, len))| {
        let begins = at == 0 || start % page == 0;
        begins && (at == last || (start + *len as u64).is_multiple_of(page))
    })
}

/// The pointer to ranges of whole pages.
#[inline]
pub(super) fn prp(ranges: &[BusRange], list: PointerListPage<'_>) -> DataPointer {
    let page = PAGE as u64;
    let (first, len) = ranges[0];
    if ranges.len() == 1 && first % page + len as u64 <= page {
        return DataPointer::Prp(first, 0);
    }
    let pages = ranges.iter().flat_map(|(start, len)| {
        let end = start + *len as u64;
        (start / page..end.div_ceil(page)).map(move |number| number * page)
    });
    let (mut count, mut second) = (0, 0);
    for address in pages.skip(1) {
        assert!(count < LIST, "a transfer has more pages than a list");
        list.memory.write64(list.at + count * 8, address);
        if count == 0 {
            second = address;
        }
        count += 1;
    }
    DataPointer::Prp(first, if count > 1 { list.bus() } else { second })
}

/// A scatter gather list.
fn scatter(ranges: &[BusRange], list: PointerListPage<'_>) -> DataPointer {
    let block = |(start, len): BusRange| [start, len as u64];
    if let [only] = ranges {
        return DataPointer::Sgl(block(*only));
    }
    for (at, range) in ranges.iter().enumerate() {
        let [start, len] = block(*range);
        list.memory.write64(list.at + at * 16, start);
        list.memory.write64(list.at + at * 16 + 8, len);
    }
    // Type 3: the last segment.
    DataPointer::Sgl([list.bus(), (ranges.len() * 16) as u64 | 0x30 << 56])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(ranges: &[BusRange]) -> (Option<DataPointer>, Vec<u64>) {
        let memory = DmaMemory::heap(PAGE, 0x9000).unwrap();
        let list = PointerListPage { memory: &memory, at: 0 };
        let pointer = is_of_pages(ranges).then(|| prp(ranges, list));
        (pointer, (0..4).map(|at| memory.read64(at * 8)).collect())
    }

    #[test]
    fn up_to_two_pages_take_no_list() {
        assert_eq!(pointer(&[(0x1000, 4096)]).0, Some(DataPointer::Prp(0x1000, 0)));
        assert_eq!(pointer(&[(0x1200, 512)]).0, Some(DataPointer::Prp(0x1200, 0)));
        assert_eq!(pointer(&[(0x1200, 4096)]).0, Some(DataPointer::Prp(0x1200, 0x2000)));
        let apart = [(0x5000, 4096), (0x1000, 100)];
        assert_eq!(pointer(&apart).0, Some(DataPointer::Prp(0x5000, 0x1000)));
        let three = pointer(&[(0x1200, 0xe00), (0x8000, 0x2000)]);
        assert_eq!(three, (Some(DataPointer::Prp(0x1200, 0x9000)), vec![0x8000, 0x9000, 0, 0]));
    }

    #[test]
    fn pieces_of_pages_take_a_scatter_gather_list() {
        let pieces = [(0x1000, 512), (0x3200, 1024)];
        assert_eq!(pointer(&pieces).0, None);
        let memory = DmaMemory::heap(PAGE, 0x9000).unwrap();
        let found = scatter(&pieces, PointerListPage { memory: &memory, at: 64 });
        assert_eq!(found, DataPointer::Sgl([0x9040, 32 | 0x30 << 56]));
        let words: Vec<u64> = (8..12).map(|at| memory.read64(at * 8)).collect();
        assert_eq!(words, [0x1000, 512, 0x3200, 1024]);
    }
}
