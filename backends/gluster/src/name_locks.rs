//! Locks of changes of names by this client, as a kernel holds them for the file system of a mount.
//!
//! Without a kernel, several threads may change one name at once, and look it up meanwhile.
//! GlusterFS's client relies on its kernel for that. On a distributed volume, all bricks have each
//! directory: a lookup of a name that is being removed finds the directory on some of them, and
//! makes it again on the others. If a file of this name is then made, both exist, and from that
//! time on the name fails with `EIO` or `ESTALE`. A lookup of a replicated file that is being
//! removed may likewise find an inode that is gone before it is used.
//!
//! The kernel also checks kinds and numbers of links while they cannot change. Users of these locks
//! make the same checks while they hold them.
//!
//! The kernel locks whole directories. Here, names are locked, and then inodes: changes in one
//! directory run at the same time if they share neither names nor inodes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::volume::Gfid;

/// Number of locks of each kind. Names may share a lock. A change waits for servers while it holds
/// its locks.
const TURNS: usize = 1024;

/// A name in a directory.
type NameInDirectory<'a> = (Gfid, &'a [u8]);

/// The locks of a client.
#[derive(Debug)]
pub(crate) struct ChangeLocks {
    names: LockStripes,
    /// Locks of inodes, taken after the locks of names.
    inodes: LockStripes,
    /// The lock of moves of directories, taken last.
    moves: Mutex<()>,
}

/// The locks of one kind.
type LockStripes = Box<[RwLock<()>]>;

/// The lock of a lookup. Dropping it ends the lookup.
pub(crate) type LookupGuard<'a> = RwLockReadGuard<'a, ()>;

/// The lock of a move of a directory. Dropping it ends the move.
pub(crate) type RenameGuard<'a> = MutexGuard<'a, ()>;

/// The locks of a change. Dropping them ends the change.
#[derive(Debug, Default)]
pub(crate) struct ChangeGuard<'a> {
    _alone: Vec<RwLockWriteGuard<'a, ()>>,
    _shared: Vec<RwLockReadGuard<'a, ()>>,
}

impl Default for ChangeLocks {
    fn default() -> ChangeLocks {
        let kind = || (0..TURNS).map(|_| RwLock::default()).collect();
        ChangeLocks { names: kind(), inodes: kind(), moves: Mutex::default() }
    }
}

impl ChangeLocks {
    /// Waits until no thread changes this name. No change of the name begins until the result is
    /// dropped.
    pub fn look(&self, name: NameInDirectory<'_>) -> LookupGuard<'_> {
        self.names[place(&name)].read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no thread changes these names or looks them up.
    pub fn names(&self, names: &[NameInDirectory<'_>]) -> ChangeGuard<'_> {
        take(&self.names, names.iter().map(|name| (place(name), true)).collect())
    }

    /// Waits until no thread adds or removes names of the inodes `changed`, or removes or moves the
    /// directories `dirs`, in which names are changed. The caller holds the locks of these names.
    pub fn inodes(&self, dirs: &[Gfid], changed: &[Gfid]) -> ChangeGuard<'_> {
        let dirs = dirs.iter().map(|dir| (place(dir), false));
        take(&self.inodes, dirs.chain(changed.iter().map(|gfid| (place(gfid), true))).collect())
    }

    /// Waits until no other directory moves to another one. Two such moves could move the
    /// directories into each other, each on one brick first.
    pub fn move_directory(&self) -> RenameGuard<'_> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes locks, exclusively or shared.
fn take(turns: &LockStripes, mut wanted: Vec<(usize, bool)>) -> ChangeGuard<'_> {
    // All threads take locks in one order. If a lock is wanted both ways, it is taken exclusively.
    wanted.sort_unstable_by_key(|&(at, alone)| (at, !alone));
    wanted.dedup_by_key(|(at, _)| *at);
    let mut taken = ChangeGuard::default();
    for (at, alone) in wanted {
        match alone {
            true => taken._alone.push(turns[at].write().unwrap_or_else(PoisonError::into_inner)),
            false => taken._shared.push(turns[at].read().unwrap_or_else(PoisonError::into_inner)),
        }
    }
    taken
}

fn place(thing: &impl Hash) -> usize {
    let mut hasher = DefaultHasher::new();
    thing.hash(&mut hasher);
    hasher.finish() as usize % TURNS
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: Gfid = [1; 16];
    const F: Gfid = [2; 16];

    /// True if no thread has the lock.
    fn is_free(turns: &LockStripes, at: usize) -> bool {
        turns[at].try_write().is_ok()
    }

    /// True if a thread has the lock exclusively.
    fn is_alone(turns: &LockStripes, at: usize) -> bool {
        turns[at].try_read().is_err()
    }

    /// Lookups of a name that was being removed led to an inode that was gone (`ESTALE`), or made a
    /// directory again.
    #[test]
    fn a_look_at_a_name_and_a_change_of_it_wait_for_each_other() {
        let turns = ChangeLocks::default();
        let at = place(&(D, &b"f"[..]));
        let change = turns.names(&[(D, b"f"), (D, b"f"), (D, b"g")]);
        assert!(is_alone(&turns.names, at));
        drop(change);
        let looks = [turns.look((D, b"f")), turns.look((D, b"f"))];
        assert!(!is_alone(&turns.names, at) && !is_free(&turns.names, at));
        drop(looks);
        assert!(is_free(&turns.names, at));
    }

    #[test]
    fn changes_in_a_directory_go_on_at_once_and_wait_for_its_removal() {
        let turns = ChangeLocks::default();
        let one = turns.inodes(&[D, D], &[]);
        let other = turns.inodes(&[D], &[F]);
        assert!(!is_alone(&turns.inodes, place(&D)) && is_alone(&turns.inodes, place(&F)));
        drop((one, other));
        // A rename of a directory into itself, which the servers refuse, uses these locks.
        let removal = turns.inodes(&[D], &[D]);
        assert!(is_alone(&turns.inodes, place(&D)) && is_free(&turns.inodes, place(&F)));
        drop(removal);
        assert!(is_free(&turns.inodes, place(&D)));
    }

    #[test]
    fn changes_that_exchange_names_never_wait_for_ever() {
        let turns = ChangeLocks::default();
        std::thread::scope(|scope| {
            for names in [[b"f", b"g"], [b"g", b"f"]] {
                let turns = &turns;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        let _names = turns.names(&[(D, names[0]), (D, names[1])]);
                        let _inodes = turns.inodes(&[D, F], &[[names[0][0]; 16], D]);
                    }
                });
            }
        });
    }
}
