//! The caller of an operation, and its interrupt.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Errno, Origin, Result};

/// The process on whose behalf an operation runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// File-system user id (`fsuid`) of the caller.
    pub uid: u32,
    /// File-system group id (`fsgid`) of the caller.
    pub gid: u32,
    /// Thread id of the caller, 0 if it has none in our pid namespace (kernel write-back).
    pub pid: u32,
}

/// Reports that the caller of an operation no longer waits.
pub trait InterruptCheck: Sync {
    /// True once the caller was interrupted; never returns to false for the same operation.
    fn is_interrupted(&self) -> bool;
}

/// A capability that takes the place of ownership, with its number of linux/capability.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerCapability {
    /// `CAP_CHOWN`.
    Chown = 0,
    /// `CAP_FOWNER`.
    Fowner = 3,
}

/// A source of supplementary groups, which few file systems need: for example a file system that
/// checks access by itself, on a server of its own.
pub trait SupplementaryGroups: Send + Sync {
    /// The supplementary groups of `caller`, credentials(7). `ESRCH` where the process is gone or
    /// not visible from here, `ENOSYS` where the frontend cannot know them.
    fn groups_of(&self, caller: Caller) -> Result<Vec<u32>>;

    /// True if the answer costs nothing, so that it need not be kept.
    fn are_known(&self) -> bool {
        false
    }

    /// True if `caller` has this capability over files with this owner and group, capabilities(7),
    /// as root of a user namespace has it over the files of the namespace. False where the process
    /// is gone, and where the frontend cannot know.
    fn has_capability(&self, caller: Caller, number: OwnerCapability, owner: (u32, u32)) -> bool {
        let _ = (caller, number, owner);
        false
    }
}

/// The circumstances of one operation.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The process that the operation serves.
    pub caller: Caller,
    /// Number of the request within its session, for logs and traces; 0 if there is none.
    pub unique: u64,
    /// The frontend or connection that calls; [`Origin::NONE`] if it is not attached.
    pub origin: Origin,
    interrupt: Option<&'a dyn InterruptCheck>,
    groups: Option<&'a dyn SupplementaryGroups>,
}

impl<'a> Context<'a> {
    /// A context that is never interrupted.
    pub fn new(caller: Caller) -> Self {
        Context { caller, unique: 0, origin: Origin::NONE, interrupt: None, groups: None }
    }

    /// A context of the request `unique`, which `interrupt` can interrupt.
    pub fn with_interrupt(caller: Caller, unique: u64, interrupt: &'a dyn InterruptCheck) -> Self {
        Context { caller, unique, origin: Origin::NONE, interrupt: Some(interrupt), groups: None }
    }

    /// Returns this context with `origin` as the origin of the operation.
    #[must_use]
    pub fn from_origin(self, origin: Origin) -> Self {
        Context { origin, ..self }
    }

    /// Returns this context with `groups` as the source of the caller's supplementary groups.
    #[must_use]
    pub fn with_groups(self, groups: &'a dyn SupplementaryGroups) -> Self {
        Context { groups: Some(groups), ..self }
    }

    /// The supplementary groups of the caller. The frontend finds them out at this call, for a
    /// kernel mount by reading /proc. `ESRCH` where the process is gone, `ENOSYS` where the
    /// frontend cannot know them.
    pub fn supplementary_groups(&self) -> Result<Vec<u32>> {
        self.groups.ok_or(Errno::ENOSYS)?.groups_of(self.caller)
    }

    /// True if the caller has this capability over files with this owner and group. The frontend
    /// finds it out at this call, as it does for the groups.
    pub fn has_capability(&self, number: OwnerCapability, owner: (u32, u32)) -> bool {
        self.groups.is_some_and(|groups| groups.has_capability(self.caller, number, owner))
    }

    /// True if the supplementary groups are known without a system call, and may be other ones for
    /// the next operation of the same process.
    pub fn groups_are_known(&self) -> bool {
        self.groups.is_some_and(SupplementaryGroups::are_known)
    }

    /// True if the caller no longer waits. A long operation checks it between steps and returns
    /// [`Errno::EINTR`](crate::Errno::EINTR). A blocking system call returns EINTR by itself,
    /// because frontends send a signal to the thread.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.is_some_and(|interrupt| interrupt.is_interrupted())
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("caller", &self.caller)
            .field("unique", &self.unique)
            .field("origin", &self.origin)
            .field("interrupted", &self.is_interrupted())
            .finish()
    }
}

type WakeCallback = Box<dyn FnOnce() + Send>;

/// The interrupt of an operation that outlives the call that submitted it (see [`crate::Io`]).
#[derive(Default)]
pub struct InterruptToken {
    tripped: AtomicBool,
    wakes: Mutex<Vec<WakeCallback>>,
}

impl InterruptToken {
    /// Marks the operation as interrupted, and runs each registered wake once.
    pub fn trip(&self) {
        self.tripped.store(true, Ordering::Release);
        let wakes = std::mem::take(&mut *self.lock());
        for wake in wakes {
            wake();
        }
    }

    /// Runs `wake` when the operation is interrupted. Runs it at once if that has happened already.
    pub fn on_interrupt(&self, wake: impl FnOnce() + Send + 'static) {
        let mut wakes = self.lock();
        // Checked under the lock: `trip` stores first and then takes the list, so that a wake is
        // either in the list or run here.
        if self.tripped.load(Ordering::Acquire) {
            drop(wakes);
            wake();
        } else {
            wakes.push(Box::new(wake));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<WakeCallback>> {
        self.wakes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl InterruptCheck for InterruptToken {
    fn is_interrupted(&self) -> bool {
        self.tripped.load(Ordering::Acquire)
    }
}

impl fmt::Debug for InterruptToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InterruptToken").field(&self.is_interrupted()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_wake_runs_once_whether_registered_before_or_after_the_interrupt() {
        let token = InterruptToken::default();
        let count = Arc::new(Mutex::new(0));
        let bump = |count: &Arc<Mutex<i32>>| {
            let count = Arc::clone(count);
            move || *count.lock().unwrap() += 1
        };
        token.on_interrupt(bump(&count));
        assert_eq!(*count.lock().unwrap(), 0);
        token.trip();
        token.trip();
        assert_eq!(*count.lock().unwrap(), 1);
        token.on_interrupt(bump(&count));
        assert_eq!(*count.lock().unwrap(), 2);
    }
}
