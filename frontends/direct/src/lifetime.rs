//! The lifetime of cached names and attributes: a time, or as long as their versions stay.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use defuse_fs::{ATTRIBUTES_HOLD, Attr, Ino, Versions};
use defuse_process::ProcessOwner;

use crate::node::{expiry, now_ns};

/// The versions of one file system, if it has any, and the changes of which it has notified the
/// client.
#[derive(Clone, Default)]
pub(crate) struct ChangeTracker(Arc<ChangeRecord>);

#[derive(Default)]
struct ChangeRecord {
    versions: OnceLock<Arc<dyn Versions>>,
    /// The process in which answers hold, if they do not in its children.
    owner: OnceLock<ProcessOwner>,
    /// Number of notifications of changes by others.
    changes: AtomicU64,
    /// Number of notifications that concern all inodes.
    epoch: AtomicU64,
}

/// The moment before a call, whose answer may be cached.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallMoment {
    /// The version of the whole file system.
    all: Option<u64>,
    /// The number of notifications.
    changes: u64,
}

impl CallMoment {
    /// Returns the moment for a reply that versions do not cover.
    pub(crate) fn drop_version(self) -> Self {
        CallMoment { all: None, ..self }
    }
}

/// The lifetime of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerValidity<T> {
    /// Until this time of [`now_ns`].
    Until(u64),
    /// As long as the versions stay.
    While(T),
}

/// The versions of attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InodeVersions {
    attributes: u64,
    rights: u64,
    /// The time after which the attributes do not hold any more.
    until: u64,
    /// The time of creation is among them.
    has_birth: bool,
}

impl ChangeTracker {
    pub(crate) fn set(&self, versions: Arc<dyn Versions>) {
        // The first ones stay: the versions of a second file system would belong to other inodes.
        let _ = self.0.versions.set(versions);
    }

    /// Limits answers to this process.
    pub(crate) fn belong_to(&self, owner: ProcessOwner) {
        let _ = self.0.owner.set(owner);
    }

    /// True if answers hold in this process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.0.owner.get().is_none_or(|owner| owner.is_here())
    }

    fn get(&self) -> Option<&dyn Versions> {
        self.0.versions.get().map(|versions| &**versions)
    }

    /// True if the file system reports changes by versions.
    #[inline]
    pub(crate) fn is_versioned(&self) -> bool {
        self.0.versions.get().is_some()
    }

    /// Returns the present moment. Called before the call whose answer is cached.
    pub(crate) fn current_moment(&self) -> CallMoment {
        let all = self.get().and_then(Versions::all);
        CallMoment { all, changes: self.0.changes.load(SeqCst) }
    }

    /// The moment after the call, where the call itself was the only change since `before`.
    pub(crate) fn skip_own_change(&self, before: CallMoment) -> CallMoment {
        let all = self.get().zip(before.all).map(|(versions, all)| versions.successor_of(all));
        CallMoment { all, ..before }
    }

    /// Counts a notification of a change, before its effect on cached data.
    pub(crate) fn record_notification(&self) {
        self.0.changes.fetch_add(1, SeqCst);
    }

    /// Invalidates the attributes of all inodes.
    pub(crate) fn increment_epoch(&self) {
        self.0.epoch.fetch_add(1, SeqCst);
    }

    /// The number of calls of [`increment_epoch`](ChangeTracker::increment_epoch).
    pub(crate) fn epoch(&self) -> u64 {
        self.0.epoch.load(SeqCst)
    }

    /// Returns the lifetime of a name that was answered after `moment`; otherwise `valid_for`.
    /// `None` if the name must not be cached.
    pub(crate) fn name(
        &self,
        moment: CallMoment,
        (dir, name): (Ino, &[u8]),
        valid_for: Duration,
    ) -> Option<AnswerValidity<u64>> {
        self.read_unchanged(moment, |versions| versions.name(dir, name))
            .or_else(|| compute_validity(valid_for))
    }

    /// True if the name still holds.
    pub(crate) fn has_name(&self, lasts: AnswerValidity<u64>, dir: Ino, name: &[u8]) -> bool {
        match lasts {
            AnswerValidity::Until(time) => now_ns() < time && self.is_here(),
            AnswerValidity::While(version) => {
                self.get().and_then(|versions| versions.name(dir, name)) == Some(version)
            }
        }
    }

    /// Returns the lifetime of attributes, like [`name`](ChangeTracker::name).
    pub(crate) fn inode(
        &self,
        moment: CallMoment,
        ino: Ino,
        attr: &Attr,
    ) -> Option<AnswerValidity<InodeVersions>> {
        let of_inode = |versions: &dyn Versions| {
            let (attributes, rights) = (versions.attributes(ino)?, versions.rights(ino)?);
            // The answer to a lookup may lack the time of creation.
            let (until, has_birth) = (expiry(ATTRIBUTES_HOLD), attr.btime.is_some());
            Some(InodeVersions { attributes, rights, until, has_birth })
        };
        self.read_unchanged(moment, of_inode).or_else(|| {
            // The reply to a lookup may be older than a change of which the file system notified
            // the client meanwhile.
            let current = self.0.changes.load(SeqCst) == moment.changes;
            if current { compute_validity(attr.valid_for) } else { None }
        })
    }

    /// True if the attributes still hold, with the time of creation if `birth` is set.
    pub(crate) fn has_attributes(
        &self,
        lasts: AnswerValidity<InodeVersions>,
        ino: Ino,
        birth: bool,
    ) -> bool {
        match lasts {
            AnswerValidity::Until(time) => now_ns() < time && self.is_here(),
            AnswerValidity::While(of) => {
                let now = self.get().and_then(|versions| versions.attributes(ino));
                now == Some(of.attributes) && now_ns() < of.until && (of.has_birth || !birth)
            }
        }
    }

    /// True if mode, owner and group still hold.
    pub(crate) fn has_rights(&self, lasts: AnswerValidity<InodeVersions>, ino: Ino) -> bool {
        match lasts {
            AnswerValidity::Until(time) => now_ns() < time && self.is_here(),
            AnswerValidity::While(of) => {
                self.get().and_then(|versions| versions.rights(ino)) == Some(of.rights)
            }
        }
    }

    fn read_unchanged<T>(
        &self,
        moment: CallMoment,
        get: impl FnOnce(&dyn Versions) -> Option<T>,
    ) -> Option<AnswerValidity<T>> {
        let (versions, since) = self.get().zip(moment.all)?;
        let got = get(versions)?;
        (versions.all() == Some(since)).then_some(AnswerValidity::While(got))
    }
}

fn compute_validity<T>(valid_for: Duration) -> Option<AnswerValidity<T>> {
    (!valid_for.is_zero()).then(|| AnswerValidity::Until(expiry(valid_for)))
}
