//! The memory that the modelled controller reaches, and the data of commands in it.

use crate::DmaMemory;
use crate::dma::WeakDmaMemory;
use crate::spec::{DataPointer, PAGE, SubmissionEntry};

/// The first bus address: 0 and addresses near it are not used.
const FIRST: u64 = 1 << 32;

/// Ranges of one command at most.
const MAX_RANGES: usize = 4096;

#[derive(Default)]
pub(super) struct ModelMemory {
    pieces: Vec<(u64, u64, WeakDmaMemory)>,
    /// Memory of callers, as long as the model lives.
    kept: Vec<DmaMemory>,
    used: u64,
    is_cut: bool,
}

impl ModelMemory {
    /// The next address for `bytes` bytes, with a gap before it.
    pub(super) fn next(&mut self, bytes: usize) -> u64 {
        let bus = FIRST + self.used;
        self.used += bytes.next_multiple_of(PAGE) as u64 + PAGE as u64;
        bus
    }

    pub(super) fn add(&mut self, dma: &DmaMemory) {
        self.pieces.retain(|(_, _, piece)| piece.get().is_some());
        self.pieces.push((dma.bus(), dma.len() as u64, dma.weak()));
    }

    pub(super) fn keep(&mut self, dma: DmaMemory) {
        self.add(&dma);
        self.kept.push(dma);
    }

    /// Ends all access.
    pub(super) fn cut(&mut self) {
        self.is_cut = true;
    }

    /// The memory of `len` bytes at `bus`, and the place in it.
    fn find(&self, bus: u64, len: usize) -> Option<(DmaMemory, usize)> {
        if self.is_cut {
            return None;
        }
        let holds = |(start, size, _): &&(u64, u64, WeakDmaMemory)| {
            bus >= *start && bus - start <= *size && len as u64 <= size - (bus - start)
        };
        let (start, _, piece) = self.pieces.iter().find(holds)?;
        Some((piece.get()?, (bus - start) as usize))
    }

    /// The memory that begins at `bus`.
    pub(super) fn find_at(&self, bus: u64) -> Option<DmaMemory> {
        self.find(bus, 1).filter(|(_, at)| *at == 0).map(|(dma, _)| dma)
    }

    pub(super) fn read64(&self, bus: u64) -> Option<u64> {
        let (dma, at) = self.find(bus, 8).filter(|(_, at)| at % 8 == 0)?;
        Some(dma.read64(at))
    }

    pub(super) fn write32(&self, bus: u64, value: u32) -> Option<()> {
        let (dma, at) = self.find(bus, 4).filter(|(_, at)| at % 4 == 0)?;
        dma.write32(at, value);
        Some(())
    }

    /// Copies `data` to the data of `command`.
    pub(super) fn write_data(&self, command: &SubmissionEntry, data: &[u8]) -> Option<()> {
        let mut at = 0;
        for (bus, len) in self.ranges(command, data.len())? {
            let (dma, place) = self.find(bus, len)?;
            dma.copy_in(place, &data[at..at + len]);
            at += len;
        }
        Some(())
    }

    /// The `bytes` bytes of data of `command`.
    pub(super) fn take(&self, command: &SubmissionEntry, bytes: usize) -> Option<Vec<u8>> {
        let mut data = vec![0; bytes];
        let mut at = 0;
        for (bus, len) in self.ranges(command, bytes)? {
            let (dma, place) = self.find(bus, len)?;
            dma.copy_out(place, &mut data[at..at + len]);
            at += len;
        }
        Some(data)
    }

    fn ranges(&self, command: &SubmissionEntry, bytes: usize) -> Option<Vec<(u64, usize)>> {
        match command.pointer() {
            DataPointer::Prp(first, second) => self.pages(first, second, bytes),
            DataPointer::Sgl(descriptor) => self.descriptors(descriptor, bytes),
        }
    }

    /// The pages of a PRP list, which may continue in further lists.
    fn pages(&self, first: u64, second: u64, bytes: usize) -> Option<Vec<(u64, usize)>> {
        let offset = (first % PAGE as u64) as usize;
        let mut ranges = vec![(first, bytes.min(PAGE - offset))];
        let mut left = bytes - ranges[0].1;
        if left == 0 {
            return Some(ranges);
        }
        if left <= PAGE {
            ranges.push((second, left));
            return second.is_multiple_of(PAGE as u64).then_some(ranges);
        }
        let mut entry = second;
        while left > 0 && ranges.len() < MAX_RANGES {
            let address = self.read64(entry)?;
            let is_last = entry % PAGE as u64 == PAGE as u64 - 8;
            if is_last && left > PAGE {
                entry = address;
                continue;
            }
            if address % PAGE as u64 != 0 {
                return None;
            }
            ranges.push((address, left.min(PAGE)));
            left -= left.min(PAGE);
            entry += 8;
        }
        (left == 0).then_some(ranges)
    }

    fn descriptors(&self, [start, rest]: [u64; 2], bytes: usize) -> Option<Vec<(u64, usize)>> {
        let len = (rest & 0xffff_ffff) as usize;
        let ranges: Vec<(u64, usize)> = match rest >> 56 {
            0x00 => vec![(start, len)],
            0x30 => {
                let descriptor = |at: usize| {
                    let at = start + at as u64 * 16;
                    Some((self.read64(at)?, (self.read64(at + 8)? & 0xffff_ffff) as usize))
                };
                (0..(len / 16).min(MAX_RANGES)).map(descriptor).collect::<Option<_>>()?
            }
            _ => return None,
        };
        let total: usize = ranges.iter().map(|(_, len)| len).sum();
        (total == bytes).then_some(ranges)
    }
}
