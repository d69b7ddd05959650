//! The identity under which a thread makes things, so that the lower file system gives them the
//! owner, group, mode and ACL that they would have natively.
//!
//! On Linux the file-system user and group, the supplementary groups and the capabilities belong
//! to a thread, and so does the umask after unshare(2). They are changed lazily: a thread remembers
//! what it set last and makes no system call while that fits ([`Credentials::Sticky`]). All other
//! capabilities stay (`SECBIT_NO_SETUID_FIXUP`), so that a foreign identity that is left over
//! never takes a permission away from a later operation: the frontend has decided permissions.

use std::cell::RefCell;

use defuse_fs::{Errno, NewNode, Result};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use crate::lower::OrErrno;
use crate::options::Credentials;
use crate::sys;

/// Not a user: asks setfsuid(2) for the present one.
const ASK: u32 = u32::MAX;

/// Who makes something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) supplementary_gid: Option<u32>,
    pub(crate) umask: u32,
    /// It will have set-group-id, which the kernel takes away from some.
    pub(crate) sgid: bool,
}

impl Owner {
    pub(crate) fn of(node: &NewNode<'_>) -> Self {
        Owner {
            uid: node.uid,
            gid: node.gid,
            supplementary_gid: node.supplementary_gid,
            umask: node.umask,
            sgid: node.perm & 0o2000 != 0,
        }
    }
}

/// What this thread was set to.
struct Thread {
    uid: u32,
    gid: u32,
    /// `None` while the umask is that of the process.
    umask: Option<u32>,
    /// `None` while the groups are those of the process.
    groups: Option<Option<u32>>,
    caps: CapabilitySets,
    /// A change of user takes capabilities away, which must be put back.
    fixup: bool,
}

thread_local! {
    static THREAD: RefCell<Option<Thread>> = const { RefCell::new(None) };
}

/// Puts the identity of the thread back when dropped, if that was asked for.
#[derive(Default)]
#[must_use]
pub(crate) struct Guard {
    uid: Option<u32>,
    gid: Option<u32>,
    caps: Option<CapabilitySets>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The user first: the group may be changed by any user that holds the capability.
        if let Some(uid) = self.uid {
            sys::setfsuid(uid);
        }
        if let Some(gid) = self.gid {
            sys::setfsgid(gid);
        }
        if let Some(caps) = self.caps {
            let _ = rustix::thread::set_capabilities(None, caps);
        }
    }
}

/// Takes on the identity of `owner`. `EPERM` where this process may not.
///
/// For what has set-group-id, `CAP_FSETID` is kept for user 0 alone: without it the kernel takes the
/// bit away where the group of the new file is none of the owner's, as it does natively. For the
/// rest it does not matter, and is left as it is.
pub(crate) fn become_owner(owner: Owner, how: Credentials) -> Result<Guard> {
    match how {
        Credentials::Sticky => with_thread(|thread| {
            thread.set_owner(owner)?;
            if owner.sgid {
                thread.set_fsetid(owner.uid == 0);
            }
            Ok(Guard::default())
        }),
        Credentials::Restore => restore_owner(owner),
    }
}

/// Permits or forbids the lower file system to keep set-user-id, set-group-id and
/// `security.capability` where the data of a file changes. It clears them by itself, and under the
/// locks that this needs, for a thread without `CAP_FSETID`; that is why this capability is
/// dropped, rather than the bits read and changed from outside.
pub(crate) fn keep_suidgid(keep: bool, how: Credentials) -> Guard {
    match how {
        Credentials::Sticky => {
            let _ = with_thread(|thread| {
                thread.set_fsetid(keep);
                Ok(())
            });
            Guard::default()
        }
        Credentials::Restore if keep => Guard::default(),
        Credentials::Restore => Guard { caps: drop_fsetid(), ..Guard::default() },
    }
}

/// The mode to create with: the umask of the thread is right with [`Credentials::Sticky`].
pub(crate) fn creation_mode(node: &NewNode<'_>, how: Credentials) -> rustix::fs::Mode {
    let perm = match how {
        Credentials::Sticky => node.perm,
        Credentials::Restore => node.perm & !node.umask,
    };
    rustix::fs::Mode::from_raw_mode(perm & 0o7777)
}

fn with_thread<T>(run: impl FnOnce(&mut Thread) -> Result<T>) -> Result<T> {
    THREAD.with_borrow_mut(|thread| match thread {
        Some(thread) => run(thread),
        None => run(thread.insert(Thread::begin()?)),
    })
}

impl Thread {
    fn begin() -> Result<Self> {
        let caps = rustix::thread::capabilities(None).or_errno()?;
        let bits = rustix::thread::capabilities_secure_bits().or_errno()?;
        let wanted = bits | CapabilitiesSecureBits::NO_SETUID_FIXUP;
        let fixup = rustix::thread::set_capabilities_secure_bits(wanted).is_err();
        Ok(Thread {
            uid: sys::setfsuid(ASK),
            gid: sys::setfsgid(ASK),
            umask: None,
            groups: None,
            caps,
            fixup,
        })
    }

    fn set_owner(&mut self, owner: Owner) -> Result<()> {
        self.set_umask(owner.umask & 0o777)?;
        if owner.gid != self.gid {
            sys::setfsgid(owner.gid);
            self.gid = sys::setfsgid(ASK);
        }
        if owner.uid != self.uid {
            sys::setfsuid(owner.uid);
            self.uid = sys::setfsuid(ASK);
            if self.fixup {
                let _ = rustix::thread::set_capabilities(None, self.caps);
            }
        }
        // The kernel does not say that it refused, but for the values that it left.
        if (self.uid, self.gid) != (owner.uid, owner.gid) {
            return Err(Errno::EPERM);
        }
        self.set_groups(owner)
    }

    fn set_umask(&mut self, umask: u32) -> Result<()> {
        if self.umask == Some(umask) {
            return Ok(());
        }
        if self.umask.is_none() {
            sys::unshare_fs()?;
        }
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(umask));
        self.umask = Some(umask);
        Ok(())
    }

    /// The groups of the daemon are not those of the owner, and decide who keeps set-group-id.
    fn set_groups(&mut self, owner: Owner) -> Result<()> {
        let extra = owner.supplementary_gid.filter(|gid| *gid != owner.gid);
        let needless = owner.uid == 0 || !self.caps.effective.contains(CapabilitySet::SETGID);
        if needless || self.groups == Some(extra) {
            return Ok(());
        }
        let groups: &[rustix::fs::Gid] = match extra {
            Some(gid) => &[rustix::fs::Gid::from_raw(gid)],
            None => &[],
        };
        rustix::thread::set_thread_groups(groups).or_errno()?;
        self.groups = Some(extra);
        Ok(())
    }

    fn set_fsetid(&mut self, keep: bool) {
        let mut caps = self.caps;
        caps.effective
            .set(CapabilitySet::FSETID, keep && caps.permitted.contains(CapabilitySet::FSETID));
        if caps != self.caps && rustix::thread::set_capabilities(None, caps).is_ok() {
            self.caps = caps;
        }
    }
}

/// Nothing is remembered here, because the application may change its threads itself.
fn restore_owner(owner: Owner) -> Result<Guard> {
    let mut guard = Guard::default();
    let gid = sys::setfsgid(owner.gid);
    guard.gid = (gid != owner.gid).then_some(gid);
    let caps = rustix::thread::capabilities(None).or_errno()?;
    let uid = sys::setfsuid(owner.uid);
    guard.uid = (uid != owner.uid).then_some(uid);
    if guard.uid.is_some() {
        // Without SECBIT_NO_SETUID_FIXUP, which would stay with the application's thread, the
        // change of user took capabilities away.
        guard.caps = Some(caps);
        let mut wanted = caps;
        wanted.effective.set(CapabilitySet::FSETID, false);
        let _ = rustix::thread::set_capabilities(None, wanted);
    }
    let refused = guard.uid.is_some() && sys::setfsuid(ASK) != owner.uid
        || guard.gid.is_some() && sys::setfsgid(ASK) != owner.gid;
    if refused { Err(Errno::EPERM) } else { Ok(guard) }
}

fn drop_fsetid() -> Option<CapabilitySets> {
    let caps = rustix::thread::capabilities(None).ok()?;
    if !caps.effective.contains(CapabilitySet::FSETID) {
        return None;
    }
    let mut without = caps;
    without.effective.remove(CapabilitySet::FSETID);
    rustix::thread::set_capabilities(None, without).ok()?;
    Some(caps)
}
