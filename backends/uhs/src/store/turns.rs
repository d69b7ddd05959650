//! The order of groups: a thread that closes a group takes a turn, and groups get their numbers by
//! turn.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The turns of one store.
#[derive(Debug, Default)]
pub(super) struct GroupTurns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TurnState {
    /// The next turn that is handed out.
    next: u64,
    /// The turn that is up.
    current: u64,
    /// Later turns that have been given up.
    over: std::collections::BTreeSet<u64>,
}

/// The right to close the next group after the groups of all earlier turns. Dropping it ends the
/// turn.
#[derive(Debug)]
pub(crate) struct GroupTurn {
    turns: Arc<GroupTurns>,
    number: u64,
}

impl GroupTurns {
    /// Takes the next turn.
    pub(super) fn take(self: &Arc<Self>) -> GroupTurn {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.next += 1;
        GroupTurn { turns: Arc::clone(self), number: state.next - 1 }
    }
}

impl GroupTurn {
    /// Waits until all earlier turns are over.
    pub(super) fn wait(&self) {
        let state = self.turns.state.lock().unwrap_or_else(PoisonError::into_inner);
        let early = |state: &mut TurnState| state.current < self.number;
        drop(self.turns.changed.wait_while(state, early).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for GroupTurn {
    fn drop(&mut self) {
        let mut state = self.turns.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over.insert(self.number);
        loop {
            let current = state.current;
            if !state.over.remove(&current) {
                break;
            }
            state.current += 1;
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_turn_comes_when_all_earlier_ones_are_over_or_given_up() {
        let turns = Arc::new(GroupTurns::default());
        let (first, second, third) = (turns.take(), turns.take(), turns.take());
        first.wait();
        drop(second);
        let (sender, receiver) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            third.wait();
            sender.send(()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
        drop(first);
        receiver.recv().unwrap();
        waiter.join().unwrap();
    }
}
