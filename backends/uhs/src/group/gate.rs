//! The handles of the running group: a lock that many hold at a time, each at a door of his own, so that
//! their processors share no cache line.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Doors. More threads share them.
const DOORS: usize = 16;

#[derive(Default)]
#[repr(align(128))]
struct Door(RwLock<()>);

/// The gate to the running group.
#[derive(Default)]
pub(crate) struct Gate {
    doors: [Door; DOORS],
}

/// A share in the running group: it does not close meanwhile. Whoever has one takes no second one, and
/// does not wait for a device.
pub(crate) struct Handle<'a> {
    _door: RwLockReadGuard<'a, ()>,
}

/// A proof that nobody has a handle.
pub(crate) struct Closed<'a> {
    _doors: [RwLockWriteGuard<'a, ()>; DOORS],
}

impl Gate {
    /// Waits while a group is being closed.
    pub(crate) fn enter(&self) -> Handle<'_> {
        let door = &self.doors[own_door()];
        Handle { _door: door.0.read().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Waits for all handles, and lets nobody get one.
    pub(crate) fn close(&self) -> Closed<'_> {
        let doors = self.doors.each_ref();
        Closed { _doors: doors.map(|door| door.0.write().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// The door of this thread.
fn own_door() -> usize {
    thread_local!(static DOOR: Cell<usize> = const { Cell::new(usize::MAX) });
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    DOOR.with(|door| {
        if door.get() == usize::MAX {
            door.set(NEXT.fetch_add(1, Ordering::Relaxed) % DOORS);
        }
        door.get()
    })
}
