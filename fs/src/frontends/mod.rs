//! The frontends of one file system, and what each of them may cache.
//!
//! A single frontend may cache every answer for as long as the file system says: no other frontend
//! changes anything. With several, each may still cache names and attributes, if it drops them
//! before a change by another one is answered. A change of names therefore ends in
//! [`Frontends::notify_names`], any other in [`Frontends::notify_attributes`], with the [`Origin`]
//! that made it. The origin itself is not notified: a kernel and the in-process client know what
//! they have changed. The caller holds no lock that an operation takes, and the change has taken
//! effect.
//!
//! # Names
//!
//! The names of a frontend are dropped all at once, by [`Notify::increment_epoch`]. Dropping a
//! single name of a kernel mount ([`Notify::invalidate_entry`]) takes the lock of its directory,
//! which an operation holds until it is answered: two mounts that change one directory would wait
//! for each other. Incrementing the epoch takes no lock.
//!
//! An answer that is under way is covered, too. The kernel reads the epoch before it sends a LOOKUP
//! or a creation, and stamps the name with that number when the answer comes. If the epoch was
//! incremented meanwhile, the name is outdated when it arrives, and is looked up again at its first
//! use. READDIRPLUS is the exception: there the kernel reads the epoch after the answer. So
//! listings come without entries while there are several frontends ([`Frontends::lists_entries`]).
//!
//! The epoch need not be incremented for a frontend that was given no name since the last time. So
//! each has a mark, which [`Frontends::name_lifetime`] sets *before* names are read. A change of
//! names reads it *after* the change: either it finds the mark, or the lookup finds the new name.
//! The mark goes when the epoch has been incremented, not before: another change meanwhile must not
//! be answered earlier, so it increments the epoch itself.
//!
//! # Attributes
//!
//! The attributes of one inode are dropped by [`Notify::invalidate_inode`] without a range, for
//! which a kernel takes no lock but a spin lock. Only the answer to `getattr` may then be cached.
//! The kernel discards one that is under way if the inode was invalidated since the request. For an
//! inode that it does not know yet, it cannot do that, so the answer to a lookup or creation may be
//! old when it arrives. The answer to `setattr` is stored without that check.
//! [`AnswerLifetime::attributes`] and [`Frontends::reply_attribute_lifetime`] are therefore zero
//! with several frontends.
//!
//! Marks for attributes are kept by inode, for each frontend one bit: set before attributes are
//! read, found by a change after it took effect, cleared when the invalidation has returned. An
//! inode has no entry any more when a change has taken all its bits, or its last lookup was
//! forgotten ([`Frontends::record_forget`]).
//!
//! # The first frontend
//!
//! As long as a frontend is the only one, nothing is marked, which costs it one relaxed load for
//! each operation. When the second comes, the first drops its names, and data and attributes of all
//! inodes that it may know. An answer may be under way at this moment. So from then on it counts as
//! a frontend that may cache everything: it is notified of each change, as long as it is attached.
//!
//! # Data
//!
//! Pages are not dropped by a change: a kernel waits for a page that is being read or written, so
//! two mounts could wait for each other. With several frontends, files are opened without a cache
//! ([`Frontends::cache_mode`]). A file that was opened before keeps its cache until it is closed.

mod grants;
mod slot;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use crate::{CacheMode, Ino, Notify, Origin};
use grants::{CacheGrants, FrontendMask};
use slot::FrontendSlot;

/// Frontends that cache while there are others. Further ones cache nothing then.
const CACHING_MOST: u32 = u64::BITS;

/// The frontends that are attached to a file system. See the [module](self).
pub struct Frontends {
    valid_for: Duration,
    /// Several frontends are attached.
    shared: AtomicBool,
    /// Several were attached since there was none.
    was_shared: AtomicBool,
    slots: RwLock<FrontendSlots>,
    grants: CacheGrants,
}

/// One slot for each call of [`Frontends::attach`], oldest first. Replaced as a whole, so that a
/// change holds no lock while it notifies the frontends.
type FrontendSlots = Arc<[Arc<FrontendSlot>]>;

/// How long a frontend may cache an answer with a name, from [`Frontends::name_lifetime`]. Only
/// that makes one, so that an answer which needs it was marked before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AnswerLifetime {
    /// The name, or its absence.
    pub name: Duration,
    /// The attributes in the same answer.
    pub attributes: Duration,
}

impl Frontends {
    /// No frontends. `valid_for` is how long a frontend may cache an answer, unless it is notified
    /// of a change.
    pub fn new(valid_for: Duration) -> Self {
        Frontends {
            valid_for,
            shared: AtomicBool::new(false),
            was_shared: AtomicBool::new(false),
            slots: RwLock::new(Arc::new([])),
            grants: CacheGrants::new(),
        }
    }

    /// Adds a frontend. `known` returns the inodes that the first one may know, and is called if
    /// this is the second. Call it without locks that an operation takes: it returns when the first
    /// one has dropped what it cached.
    ///
    /// A frontend that is attached twice has the file system at two places. It would need
    /// notifications of its own changes, so it caches nothing as long as there are several
    /// attachments.
    pub fn attach(
        &self,
        origin: Origin,
        notify: Arc<dyn Notify>,
        known: impl FnOnce() -> Vec<Ino>,
    ) {
        let first = {
            let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
            let again = slots.iter().find(|slot| slot.origin == origin);
            let may_cache = again.is_none() && origin != Origin::NONE && notify.drops_at_once();
            let bit = may_cache.then(|| free_bit(&slots)).flatten();
            if let Some(again) = again {
                again.stop_caching();
            }
            let new = Arc::new(FrontendSlot::new(origin, bit, notify));
            let first = slots.first().filter(|_| slots.len() == 1).cloned();
            *slots = slots.iter().cloned().chain([new]).collect();
            if let Some(first) = &first {
                first.mark_everything();
                self.was_shared.store(true, Ordering::SeqCst);
                self.shared.store(true, Ordering::SeqCst);
            }
            first
        };
        if let Some(first) = first {
            first.drop_all(known);
        }
    }

    /// Removes a frontend, after its last operation. One that is not attached is ignored.
    pub fn detach(&self, origin: Origin) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = slots.iter().rposition(|slot| slot.origin == origin) else { return };
        let gone = Arc::clone(&slots[at]);
        let left = slots.iter().enumerate().filter(|(index, _)| *index != at);
        *slots = left.map(|(_, slot)| Arc::clone(slot)).collect();
        if slots.len() < 2 {
            self.shared.store(false, Ordering::SeqCst);
            self.grants.remove(FrontendMask::MAX);
        } else {
            self.grants.remove(gone.mask());
        }
        if slots.is_empty() {
            self.was_shared.store(false, Ordering::SeqCst);
        }
    }

    /// True where several frontends are attached.
    #[inline]
    pub fn is_shared(&self) -> bool {
        // A frontend attaches before its first operation. A thread that changes what that operation
        // has read finds this set, by the lock under which it was read.
        self.shared.load(Ordering::Relaxed)
    }

    /// How long `origin` may cache the name, and its attributes, in an answer to a lookup or
    /// creation. Call it before names are read or made.
    #[inline]
    pub fn name_lifetime(&self, origin: Origin) -> AnswerLifetime {
        if self.is_shared() {
            let name = self.caching(origin).map_or(Duration::ZERO, |slot| {
                slot.mark_names();
                self.valid_for
            });
            return AnswerLifetime { name, attributes: Duration::ZERO };
        }
        AnswerLifetime { name: self.valid_for, attributes: self.valid_for }
    }

    /// How long `origin` may cache that a name does not exist, after a lookup that called
    /// [`name_lifetime`](Frontends::name_lifetime).
    pub fn negative_lifetime(&self, origin: Origin) -> Duration {
        match self.is_shared() {
            true => self.caching(origin).map_or(Duration::ZERO, |_| self.valid_for),
            false => self.valid_for,
        }
    }

    /// How long `origin` may cache the answer to `getattr`, or the ACLs of the inode. Call it
    /// before they are read.
    #[inline]
    pub fn attribute_lifetime(&self, origin: Origin, ino: Ino) -> Duration {
        if !self.is_shared() {
            return self.valid_for;
        }
        let Some(slot) = self.caching(origin) else { return Duration::ZERO };
        if !slot.has_everything() {
            self.grants.give(ino, slot.mask());
        }
        self.valid_for
    }

    /// How long attributes may be cached that come with an answer to anything but `getattr`, a
    /// lookup and a creation.
    #[inline]
    pub fn reply_attribute_lifetime(&self) -> Duration {
        if self.is_shared() { Duration::ZERO } else { self.valid_for }
    }

    /// True if a listing may come with entries. Otherwise it has names only
    /// ([`DirBuf::push`](crate::DirBuf::push)).
    #[inline]
    pub fn lists_entries(&self) -> bool {
        !self.is_shared()
    }

    /// The caching of a file that is opened now.
    pub fn cache_mode(&self) -> CacheMode {
        match (self.is_shared(), self.was_shared.load(Ordering::Relaxed)) {
            (true, _) => CacheMode::Direct,
            // A file that was open all the time may have left old pages.
            (false, true) => CacheMode::Cached,
            (false, false) => CacheMode::Keep,
        }
    }

    /// True if a frontend may cache the listing of a directory that is opened now.
    pub fn caches_listings(&self) -> bool {
        self.cache_mode() == CacheMode::Keep
    }

    /// Notifies all frontends but `origin` that names were changed, and with them the attributes of
    /// `inodes`: the directories, and the inodes whose link count or change time is another one.
    /// Call it after the change, and before its answer. When it returns, no frontend has the old
    /// names any more.
    #[inline]
    pub fn notify_names(&self, origin: Origin, inodes: &[Ino]) {
        if self.is_shared() {
            self.tell(origin, true, inodes);
        }
    }

    /// Notifies all frontends but `origin` that the attributes or ACLs of `inodes` were changed.
    /// Call it after the change, and before its answer.
    #[inline]
    pub fn notify_attributes(&self, origin: Origin, inodes: &[Ino]) {
        if self.is_shared() {
            self.tell(origin, false, inodes);
        }
    }

    /// True if `origin` reads from pages of its own, without a request
    /// ([`Notify::reads_own_pages`]).
    pub fn reads_own_pages(&self, origin: Origin) -> bool {
        self.slots().iter().any(|slot| slot.origin == origin && slot.reads_own_pages())
    }

    /// Notifies all frontends, `origin` included, that the access time of `ino` was changed by an
    /// answer that holds no attributes.
    pub fn notify_access_time(&self, ino: Ino) {
        if self.is_shared() {
            self.tell(Origin::NONE, false, &[ino]);
        } else {
            self.slots().iter().for_each(|slot| slot.drop_attributes(ino));
        }
    }

    /// Notes that the last lookup of an inode was forgotten, or the inode is gone.
    #[inline]
    pub fn record_forget(&self, ino: Ino) {
        if self.is_shared() {
            // A frontend may use a number without a lookup (`resolve`), so that it may still have
            // attributes.
            let slots = self.slots();
            self.drop_attributes(slots.iter().filter(|slot| !slot.has_everything()), ino);
        }
    }

    #[inline(never)]
    fn tell(&self, origin: Origin, names: bool, inodes: &[Ino]) {
        let slots = self.slots();
        let others = || slots.iter().filter(|slot| slot.origin != origin && slot.is_caching());
        if names {
            others().for_each(|slot| slot.drop_names());
        }
        for ino in inodes {
            self.drop_attributes(others(), *ino);
        }
    }

    fn drop_attributes<'a>(
        &self,
        slots: impl Iterator<Item = &'a Arc<FrontendSlot>> + Clone,
        ino: Ino,
    ) {
        let mask = slots.clone().fold(0, |mask, slot| mask | slot.mask());
        let held = self.grants.begin(ino, mask);
        for slot in slots.filter(|slot| slot.has_everything() || slot.mask() & held != 0) {
            slot.drop_attributes(ino);
        }
        if held != 0 {
            self.grants.end(ino);
        }
    }

    fn slots(&self) -> FrontendSlots {
        Arc::clone(&self.slots.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The frontend `origin`, if it caches while there are others.
    fn caching(&self, origin: Origin) -> Option<Arc<FrontendSlot>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().find(|slot| slot.origin == origin).filter(|slot| slot.is_caching()).cloned()
    }
}

/// The number of a bit that no frontend has.
fn free_bit(slots: &[Arc<FrontendSlot>]) -> Option<u32> {
    let taken = slots.iter().fold(0, |mask, slot| mask | slot.mask());
    let free = (!taken).trailing_zeros();
    (free < CACHING_MOST).then_some(free)
}

impl std::fmt::Debug for Frontends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frontends").field("attached", &self.slots().len()).finish()
    }
}
