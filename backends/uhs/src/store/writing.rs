//! A group on its way to the device.

use defuse_block::{Done, FRAME, OpKind};

use super::lanes::Lane;
use crate::commit::Group;
use crate::format::BLOCK;
use crate::format::slot::{self, Identity, SlotIdentity, body_of};

/// The writes of a group, some of them in flight.
#[must_use = "a group that is not finished blocks all later ones"]
pub(crate) struct Writing {
    group: u64,
    /// The writes survive a power failure once they are complete.
    pub(super) fua: bool,
    lane: Lane,
    runs: Vec<Run>,
    reaped: Vec<Done>,
}

/// Slots that are written together.
struct Run {
    first: u64,
    identities: Vec<Identity>,
}

/// A slot whose write failed: nobody knows what lies in its block.
pub(super) struct Failed {
    pub(super) block: u64,
    pub(super) identity: Identity,
    pub(super) body: Vec<u8>,
}

impl Writing {
    /// Begins the writes of `group`. Slots that lie side by side are written together.
    pub(super) fn begin(
        mut lane: Lane,
        mut group: Group,
        fua: bool,
        place: impl Fn(u64) -> SlotIdentity,
    ) -> Writing {
        group.writes.sort_unstable_by_key(|write| write.block);
        let gathered = lane.gathered();
        let (mut runs, mut reaped) = (Vec::new(), Vec::new());
        let neighbours = group.writes.chunk_by(|a, b| a.block + 1 == b.block);
        for run in neighbours.flat_map(|run| run.chunks(gathered)) {
            let mut frames = lane.frames(run.len() as u32, &mut reaped);
            for (write, out) in run.iter().zip(frames.chunks_mut(FRAME)) {
                slot::encode(write.identity, &write.body, &place(write.block), out);
            }
            let block = run[0].block;
            let kind = OpKind::Write { block, memory: frames.into(), fua };
            lane.push(runs.len() as u64, kind, &mut reaped);
            let identities = run.iter().map(|write| write.identity).collect();
            runs.push(Run { first: block, identities });
        }
        lane.kick();
        Writing { group: group.number, fua, lane, runs, reaped }
    }

    /// The number of the group.
    pub(crate) fn group(&self) -> u64 {
        self.group
    }

    /// Takes in what is complete already, without waiting.
    #[cfg(test)]
    pub(crate) fn poll(&mut self) {
        self.lane.poll(&mut self.reaped);
    }

    /// Waits for all writes. Returns the slots whose write failed, and the lane. `None` where a device has kept the memory of
    /// slots, which it does if it has failed as a whole.
    pub(super) fn wait(mut self) -> (Option<Vec<Failed>>, Lane) {
        while self.lane.in_flight() > 0 {
            self.lane.wait(&mut self.reaped);
        }
        let mut failed = Some(Vec::new());
        for Done { tag, result, memory } in self.reaped {
            let Err(errno) = result else { continue };
            let Run { first, identities } = &self.runs[tag as usize];
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
                failed.push(Failed { block, identity: *identity, body });
            }
        }
        (failed, self.lane)
    }
}
