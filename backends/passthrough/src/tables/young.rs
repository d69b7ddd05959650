//! Inodes that a later one could be taken for, as the clock has not passed their birth times
//! (`identity.rs`).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

use crate::tables::inode::LowerInode;

/// The time of the last tick of the clock by which file systems date new inodes, in nanoseconds
/// since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockTick(u64);

impl ClockTick {
    pub(crate) fn now() -> Self {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let ns = (now.tv_sec as u64).wrapping_mul(1_000_000_000);
        ClockTick(ns.wrapping_add(now.tv_nsec as u64))
    }

    /// True if an inode that existed at this tick has a birth time that no later inode can have.
    pub(crate) fn is_after(self, birth: u64) -> bool {
        birth < self.0
    }
}

/// Inodes without handles that have a descriptor until the clock has passed their birth times, the
/// oldest first.
#[derive(Default)]
pub(crate) struct YoungInodes(Mutex<VecDeque<(u64, Arc<LowerInode>)>>);

impl YoungInodes {
    pub(crate) fn add(&self, inode: Arc<LowerInode>) {
        let mut young = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        young.push_back((inode.key.birth, inode));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Removes up to `most` inodes whose birth times the clock has passed.
    pub(crate) fn take_grown(&self, tick: ClockTick, most: usize) -> Vec<Arc<LowerInode>> {
        let mut young = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_grown = |(birth, _): &(u64, Arc<LowerInode>)| tick.is_after(*birth);
        let grown = young.iter().take(most).take_while(|entry| is_grown(entry)).count();
        young.drain(..grown).map(|(_, inode)| inode).collect()
    }
}
