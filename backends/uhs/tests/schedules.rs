//! The group lock under the schedules of the shuttle checker.

use group_lock::GroupLock;
use shuttle::sync::{Arc, Mutex};
use shuttle::thread;

/// The types of the checker, in place of the types of the standard library.
mod sync {
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

    pub(crate) fn number_of_thread() -> usize {
        shuttle::current::me().into()
    }
}

#[allow(dead_code, reason = "the engine uses all of it")]
#[path = "../src/group/group_lock.rs"]
mod group_lock;

/// An operation changes two things, with a handle. A thread that closes groups meanwhile sees both
/// changes or none, and the changes of exactly the operations that the groups list until then.
#[test]
fn a_closed_group_has_the_whole_of_the_operations_that_it_lists_and_nothing_of_others() {
    shuttle::check_random(
        || {
            let shared = Arc::new((GroupLock::new(2), Mutex::new(0), Mutex::new(0)));
            let operate = |thread: u64| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (gate, one, other) = &*shared;
                    for number in 0..2 {
                        let handle = gate.enter();
                        *one.lock().unwrap() += 1;
                        handle.add_changed(thread * 2 + number, 1);
                        *other.lock().unwrap() += 1;
                    }
                })
            };
            let threads: Vec<_> = (0..3).map(operate).collect();
            let mut listed = Vec::new();
            let (gate, one, other) = &*shared;
            let mut close = || {
                let closed = gate.close();
                listed.append(&mut closed.take().changed);
                let seen = (*one.lock().unwrap(), *other.lock().unwrap());
                assert_eq!(seen, (listed.len(), listed.len()));
            };
            close();
            close();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            close();
            listed.sort_unstable();
            assert_eq!(listed, (0..6).collect::<Vec<u64>>());
            assert!(!gate.has_changes());
        },
        1500,
    );
}
