//! Syncs that share a group: one of them, the leader, closes and writes it, and the others sleep
//! until it is durable.
//!
//! A *round* is open to all callers until its leader closes it, which is before the group closes.
//! So every member has made its changes before. While the leader waits for its turn, others join;
//! and each of them is woken once.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};

use defuse_fs::{Errno, Result};

use crate::group::SyncedFiles;
use crate::locks::lock;

/// The number of rounds whose members sleep separately.
const APART: usize = 4;

/// The rounds of a file system.
#[derive(Default)]
pub(super) struct SyncRounds {
    state: Mutex<RoundState>,
    /// By the number of the round.
    over: [Condvar; APART],
}

#[derive(Default)]
struct RoundState {
    /// The round that is open.
    open: u64,
    has_leader: bool,
    /// The files whose data the members of the open round sync.
    wanted: SyncedFiles,
    /// Rounds that have waiting members.
    waiting: BTreeMap<u64, RoundMembers>,
}

#[derive(Default)]
struct RoundMembers {
    members: usize,
    /// The outcome, once it is known.
    durable: Option<bool>,
}

/// The duty to make everything durable that was done before [`close`](SyncRound::close). Dropped
/// without [`end`](SyncRound::end), it has failed for all members.
pub(super) struct SyncRound<'a> {
    rounds: &'a SyncRounds,
    number: u64,
    is_closed: bool,
    is_durable: bool,
}

impl SyncRounds {
    /// Returns the open round to its first member, the leader. The others wait; `None` if
    /// everything is durable then that they want: the data of the file `ino`, or of all files.
    ///
    /// # Errors
    ///
    /// `EIO` where the leader has failed.
    pub(super) fn join(&self, ino: Option<u64>) -> Result<Option<SyncRound<'_>>> {
        let mut state = lock(&self.state);
        let number = state.open;
        state.wanted.add(ino);
        if !state.has_leader {
            state.has_leader = true;
            return Ok(Some(SyncRound {
                rounds: self,
                number,
                is_closed: false,
                is_durable: false,
            }));
        }
        state.waiting.entry(number).or_default().members += 1;
        loop {
            let Some(waiting) = state.waiting.get_mut(&number) else { return Err(Errno::EIO) };
            if let Some(durable) = waiting.durable {
                waiting.members -= 1;
                if waiting.members == 0 {
                    state.waiting.remove(&number);
                }
                return if durable { Ok(None) } else { Err(Errno::EIO) };
            }
            let over = &self.over[number as usize % APART];
            state = over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl SyncRound<'_> {
    /// Closes the round: from now on, callers join the next one. Returns what its members want.
    pub(super) fn close(&mut self) -> SyncedFiles {
        if self.is_closed {
            return SyncedFiles::default();
        }
        self.is_closed = true;
        let mut state = lock(&self.rounds.state);
        state.open += 1;
        state.has_leader = false;
        std::mem::take(&mut state.wanted)
    }

    /// Ends the round: all changes of its members are durable.
    pub(super) fn end(mut self) {
        self.is_durable = true;
    }
}

impl Drop for SyncRound<'_> {
    fn drop(&mut self) {
        self.close();
        let mut state = lock(&self.rounds.state);
        let Some(waiting) = state.waiting.get_mut(&self.number) else { return };
        waiting.durable = Some(self.is_durable);
        drop(state);
        self.rounds.over[self.number as usize % APART].notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    fn join_in_thread(rounds: &Arc<SyncRounds>) -> thread::JoinHandle<Result<()>> {
        let (rounds, members) = (Arc::clone(rounds), rounds.members());
        let member = thread::spawn({
            let rounds = Arc::clone(&rounds);
            move || rounds.join(None).map(|round| assert!(round.is_none(), "there is a leader"))
        });
        while rounds.members() == members {
            thread::yield_now();
        }
        member
    }

    impl SyncRounds {
        fn members(&self) -> usize {
            lock(&self.state).waiting.values().map(|waiting| waiting.members).sum()
        }
    }

    #[test]
    fn members_wait_for_the_leader_of_their_round() {
        let rounds = Arc::new(SyncRounds::default());
        let mut first = rounds.join(None).unwrap().expect("the first one leads");
        let early = [join_in_thread(&rounds), join_in_thread(&rounds)];
        first.close();
        let second = rounds.join(None).unwrap().expect("another round has another leader");
        let late = join_in_thread(&rounds);
        // A later round may be over before.
        second.end();
        assert_eq!(late.join().unwrap(), Ok(()));
        assert!(early.iter().all(|member| !member.is_finished()));
        first.end();
        assert!(early.into_iter().all(|member| member.join().unwrap() == Ok(())));
        assert_eq!(rounds.members(), 0);
    }

    #[test]
    fn a_leader_that_fails_or_panics_fails_for_all_members() {
        let rounds = Arc::new(SyncRounds::default());
        let round = rounds.join(None).unwrap().expect("the first one leads");
        let member = join_in_thread(&rounds);
        drop(round);
        assert_eq!(member.join().unwrap(), Err(Errno::EIO));
        assert!(rounds.join(None).unwrap().is_some(), "the next round is open");
    }

    #[test]
    fn a_round_wants_what_its_members_want() {
        let rounds = SyncRounds::default();
        let mut round = rounds.join(Some(5)).unwrap().expect("the first one leads");
        let wanted = round.close();
        assert!(wanted.contains(5) && !wanted.contains(6));
        round.end();
        // The next round does not want it, and a member that wants all files wins.
        let rounds = Arc::new(rounds);
        let mut round = rounds.join(Some(7)).unwrap().expect("the first one leads");
        let member = join_in_thread(&rounds);
        assert_eq!(round.close(), SyncedFiles::All);
        round.end();
        assert_eq!(member.join().unwrap(), Ok(()));
        let mut round = rounds.join(Some(8)).unwrap().expect("the first one leads");
        assert_eq!(round.close(), SyncedFiles::These(smallvec::smallvec![8]));
    }

    #[test]
    fn whoever_returns_has_its_changes_durable() {
        let rounds = SyncRounds::default();
        let (made, durable) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let change = made.fetch_add(1, Ordering::SeqCst) + 1;
                        if let Some(mut round) = rounds.join(None).unwrap() {
                            round.close();
                            let now = made.load(Ordering::SeqCst);
                            durable.fetch_max(now, Ordering::SeqCst);
                            round.end();
                        }
                        assert!(durable.load(Ordering::SeqCst) >= change);
                    }
                });
            }
        });
    }
}
