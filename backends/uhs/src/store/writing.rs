//! A group that is being written to the device.

use defuse_block::{BlockCompletion, BlockOpKind, FRAME};

use smallvec::SmallVec;

use super::lanes::BorrowedQueue;
use crate::commit::ClosedGroup;
use crate::format::BLOCK;
use crate::format::slot::{self, SlotHeader, SlotIdentity, body_of};

/// The writes of a group, some of them in flight.
#[must_use = "a group that is not finished blocks all later ones"]
pub(crate) struct GroupWrite {
    group: u64,
    /// The writes survive a power failure once they are complete.
    pub(super) fua: bool,
    lane: BorrowedQueue,
    runs: SmallVec<[SlotRun; 1]>,
    reaped: Vec<BlockCompletion>,
}

/// Slots that are written together.
struct SlotRun {
    first: u64,
    identities: SmallVec<[SlotHeader; 1]>,
}

/// A slot whose write failed: the content of its block is unknown.
pub(super) struct FailedSlot {
    pub(super) block: u64,
    pub(super) identity: SlotHeader,
    pub(super) body: Vec<u8>,
}

impl GroupWrite {
    /// Begins the writes of `group`. Slots that lie side by side are written together.
    pub(super) fn begin(
        mut lane: BorrowedQueue,
        mut group: ClosedGroup,
        fua: bool,
        place: impl Fn(u64) -> SlotIdentity,
    ) -> GroupWrite {
        group.writes.sort_unstable_by_key(|write| write.block);
        let gathered = lane.gather_limit();
        let (mut runs, mut reaped) = (SmallVec::new(), lane.take_memory());
        let neighbours = group.writes.chunk_by(|a, b| a.block + 1 == b.block);
        for run in neighbours.flat_map(|run| run.chunks(gathered)) {
            let mut frames = lane.frames(run.len() as u32, &mut reaped);
            for (write, out) in run.iter().zip(frames.chunks_mut(FRAME)) {
                slot::encode(write.identity, &write.body, &place(write.block), out);
            }
            let block = run[0].block;
            let kind = BlockOpKind::Write { block, memory: frames.into(), fua };
            lane.push(runs.len() as u64, kind, &mut reaped);
            let identities = run.iter().map(|write| write.identity).collect();
            runs.push(SlotRun { first: block, identities });
        }
        lane.kick();
        GroupWrite { group: group.number, fua, lane, runs, reaped }
    }

    /// The number of the group.
    pub(crate) fn group(&self) -> u64 {
        self.group
    }

    /// Takes in completed writes, without waiting.
    #[cfg(test)]
    pub(crate) fn poll(&mut self) {
        self.lane.poll(&mut self.reaped);
    }

    /// Waits for all writes. Returns the slots whose write failed, and the queue. `None` if the
    /// device has kept the memory of slots, which happens if it has failed as a whole.
    pub(super) fn wait(mut self) -> (Option<Vec<FailedSlot>>, BorrowedQueue) {
        while self.lane.in_flight() > 0 {
            self.lane.wait(&mut self.reaped);
        }
        let mut failed = Some(Vec::new());
        for BlockCompletion { tag, result, memory } in self.reaped.drain(..) {
            let Err(errno) = result else { continue };
            let SlotRun { first, identities } = &self.runs[tag as usize];
            log::warn!("slots from block {first} on cannot be written: {errno}");
            let Some(frames) = memory.into_frames() else {
                failed = None;
                continue;
            };
            let Some(failed) = failed.as_mut() else { continue };
            for ((block, identity), bytes) in
                (*first..).zip(identities).zip(frames.chunks_exact(BLOCK))
            {
                let body = body_of(bytes).to_vec();
                failed.push(FailedSlot { block, identity: *identity, body });
            }
        }
        self.lane.keep_memory(self.reaped);
        (failed, self.lane)
    }
}
