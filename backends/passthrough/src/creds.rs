//! The credentials of threads. A thread acts as the caller, so that the lower file system checks
//! ownership, groups, modes, ACLs, quotas and reserved blocks as it would for the caller itself.
//!
//! On Linux the file-system user and group, the supplementary groups and the capabilities belong to
//! a thread, and so does the umask after unshare(2). Every operation sets what it needs before it
//! calls the lower file system. [`act_as`] and [`become_owner`] set user, group and the
//! capabilities of [`NOT_OF_USERS`]. Umask, supplementary groups and `CAP_FSETID` are set where
//! they matter. No operation thus depends on state that an earlier one left. A thread remembers its
//! state, and makes no system call while that is right ([`CredentialsPolicy::Sticky`]).
//!
//! The frontend has checked permissions. The thread therefore keeps the capabilities that override
//! permission checks (`SECBIT_NO_SETUID_FIXUP`). The exceptions are those whose rules the frontend
//! checks with possibly outdated attributes, or cannot check at all.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use defuse_fs::{Caller, Errno, NewNode, Result};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use crate::lower::OrErrno;
use crate::options::CredentialsPolicy;
use crate::sys;

/// Not a user id: setfsuid(2) then returns the current one without changing it.
const ASK: u32 = u32::MAX;

/// The capabilities that a thread drops while it acts for a user other than 0. `CAP_SYS_RESOURCE`
/// grants the reserved blocks of ext4, and exceeds quotas on all file systems. Without
/// `CAP_FOWNER`, the lower file system itself applies the rules about file owners (sticky
/// directories, hard links, chmod(2)) to the file that an operation actually reaches.
const NOT_OF_USERS: CapabilitySet = CapabilitySet::SYS_RESOURCE.union(CapabilitySet::FOWNER);

/// The caller of a request that names none, because the kernel writes pages back: the overflow user
/// of the kernel, without any privilege.
pub(crate) const UNKNOWN: Caller = Caller { uid: 65534, gid: 65534, pid: 0 };

/// The credentials that a new file is created with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CreateCredentials {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) supplementary_gid: Option<u32>,
    pub(crate) umask: u32,
    /// The file will have set-group-id, which the kernel may clear.
    pub(crate) sgid: bool,
}

impl CreateCredentials {
    pub(crate) fn from_node(node: &NewNode<'_>) -> Self {
        CreateCredentials {
            uid: node.uid,
            gid: node.gid,
            supplementary_gid: node.supplementary_gid,
            umask: node.umask,
            sgid: node.perm & 0o2000 != 0,
        }
    }
}

/// The state that this thread was set to.
struct ThreadCredentials {
    uid: u32,
    gid: u32,
    /// `None` if the thread still has the umask of the process.
    umask: Option<u32>,
    /// `None` if the thread still has the groups of the process.
    groups: Option<Option<u32>>,
    /// The initial capabilities.
    all: CapabilitySets,
    /// The current capabilities.
    caps: CapabilitySets,
    /// The capabilities of `all` that are dropped now, apart from `CAP_FSETID`.
    hidden: CapabilitySet,
    fsetid: bool,
    /// The thread may change its user and group.
    changes: bool,
    /// The kernel drops capabilities when the user changes, and they must be restored.
    fixup: bool,
}

/// The capabilities that threads of the process may have; see [`remember`].
static WHOLE: OnceLock<CapabilitySet> = OnceLock::new();

/// Records the capabilities of this thread. Call it before any thread acts for a user.
pub(crate) fn remember() {
    if let Ok(caps) = rustix::thread::capabilities(None) {
        WHOLE.get_or_init(|| caps.effective);
    }
}

thread_local! {
    static THREAD: RefCell<Option<ThreadCredentials>> = const { RefCell::new(None) };
}

/// Restores the credentials of the thread when dropped, if they were changed temporarily.
#[derive(Default)]
#[must_use]
pub(crate) struct CredentialsGuard {
    uid: Option<u32>,
    gid: Option<u32>,
    caps: Option<CapabilitySets>,
}

impl Drop for CredentialsGuard {
    fn drop(&mut self) {
        // The user comes first: the group can be changed by any user that has the capability.
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

/// Acts as `caller` until the end of the operation. This has no effect if the process may not
/// change its user. It has no effect on the threads of an application either
/// ([`CredentialsPolicy::Restore`], [`CredentialsPolicy::Callers`]), which has the privileges of
/// these threads anyway.
pub(crate) fn act_as(caller: Caller, how: CredentialsPolicy) {
    if how == CredentialsPolicy::Sticky {
        let _ = with_thread(|thread| {
            thread.act_as(caller);
            Ok(())
        });
    }
}

/// Runs `change`, and repeats it with `CAP_FOWNER` if it fails with `EPERM` and `may_raise` returns
/// true. The caller may have that capability over the file without being its owner (root of a user
/// namespace), or the change may not require ownership. The decision of the frontend is no reason:
/// it may know an owner that has changed since.
pub(crate) fn run_as_decided<T>(
    how: CredentialsPolicy,
    may_raise: impl FnOnce() -> bool,
    change: impl Fn() -> Result<T>,
) -> Result<T> {
    match change() {
        Err(Errno::EPERM) if how == CredentialsPolicy::Sticky && may_raise() => {
            let raised = with_thread(|thread| Ok(thread.raise(CapabilitySet::FOWNER)));
            if raised == Ok(true) { change() } else { Err(Errno::EPERM) }
        }
        other => other,
    }
}

/// Takes on the credentials of `owner`. Fails with `EPERM` if the process is not allowed to.
///
/// For a file with set-group-id, only user 0 keeps `CAP_FSETID`. Without the capability, the kernel
/// clears the bit if the group of the new file is not one of the owner's groups, as it does
/// natively. For other files it does not matter and is left unchanged.
pub(crate) fn become_owner(
    owner: CreateCredentials,
    how: CredentialsPolicy,
) -> Result<CredentialsGuard> {
    match how {
        CredentialsPolicy::Sticky => with_thread(|thread| {
            thread.set_owner(owner)?;
            if owner.sgid {
                thread.set_fsetid(owner.uid == 0);
            }
            Ok(CredentialsGuard::default())
        }),
        CredentialsPolicy::Restore => restore_owner(owner),
        CredentialsPolicy::Callers(_) => Ok(CredentialsGuard::default()),
    }
}

/// Sets whether the lower file system keeps set-user-id, set-group-id and `security.capability`
/// when file data changes. It clears them under its own locks for a thread without `CAP_FSETID`.
/// Dropping this capability avoids the race of reading and changing the bits from outside.
pub(crate) fn keep_suidgid(keep: bool, how: CredentialsPolicy) -> CredentialsGuard {
    match how {
        CredentialsPolicy::Sticky => {
            let _ = with_thread(|thread| {
                thread.set_fsetid(keep);
                Ok(())
            });
            CredentialsGuard::default()
        }
        CredentialsPolicy::Callers(_) => CredentialsGuard::default(),
        CredentialsPolicy::Restore if keep => CredentialsGuard::default(),
        CredentialsPolicy::Restore => {
            CredentialsGuard { caps: drop_fsetid(), ..CredentialsGuard::default() }
        }
    }
}

/// Creates a node in `dir` by `make(mode)`, with its owner and umask. The kernel applies the umask
/// of the thread if `dir` has no default ACL. `lists` is true if there may be one.
///
/// A thread of an application has the umask of its process, which cannot be changed temporarily
/// because other threads create files, too. Below a default ACL, the node is therefore created on a
/// separate thread.
pub(crate) fn as_owner<T>(
    node: &NewNode<'_>,
    (dir, lists): (BorrowedFd<'_>, bool),
    how: CredentialsPolicy,
    make: impl Fn(rustix::fs::Mode) -> Result<T>,
) -> Result<T> {
    let mode = |perm: u32| rustix::fs::Mode::from_raw_mode(perm & 0o7777);
    let _guard = become_owner(CreateCredentials::from_node(node), how)?;
    let masked = match how {
        // The kernel applies the umask of the thread.
        CredentialsPolicy::Sticky | CredentialsPolicy::Callers(_) => node.perm,
        CredentialsPolicy::Restore => node.perm & !node.umask,
    };
    if masked != node.perm && lists && sys::has_default_list(dir) {
        // If the kernel cannot create the thread, the umask applies: the node has fewer
        // permissions, never more.
        if let Some(made) = sys::with_umask_zero(|| make(mode(node.perm))) {
            return made;
        }
    }
    make(mode(masked))
}

fn with_thread<T>(run: impl FnOnce(&mut ThreadCredentials) -> Result<T>) -> Result<T> {
    THREAD.with_borrow_mut(|thread| match thread {
        Some(thread) => run(thread),
        None => run(thread.insert(ThreadCredentials::begin()?)),
    })
}

impl ThreadCredentials {
    fn begin() -> Result<Self> {
        let caps = rustix::thread::capabilities(None).or_errno()?;
        // A new thread inherits the capabilities of the thread that started it, which may be acting
        // for a user.
        let whole = WHOLE.get().map_or(caps.effective, |whole| *whole & caps.permitted);
        let all = CapabilitySets { effective: whole, ..caps };
        let bits = rustix::thread::capabilities_secure_bits().or_errno()?;
        let wanted = bits | CapabilitiesSecureBits::NO_SETUID_FIXUP;
        let fixup = rustix::thread::set_capabilities_secure_bits(wanted).is_err();
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
        Ok(ThreadCredentials {
            uid: sys::setfsuid(ASK),
            gid: sys::setfsgid(ASK),
            umask: None,
            groups: None,
            all,
            caps,
            hidden: all.effective - caps.effective - CapabilitySet::FSETID,
            fsetid: caps.effective.contains(CapabilitySet::FSETID),
            changes: all.effective.contains(needed),
            fixup,
        })
    }

    fn act_as(&mut self, caller: Caller) {
        // Write-back has no caller, so the kernel names no user.
        let Caller { uid, gid, .. } = if caller.uid == ASK { UNKNOWN } else { caller };
        if self.changes {
            let _ = self.set_user(uid, gid);
        }
    }

    /// Sets user and group. Returns true if the thread now has them.
    fn set_user(&mut self, uid: u32, gid: u32) -> bool {
        if gid != self.gid {
            sys::setfsgid(gid);
            self.gid = sys::setfsgid(ASK);
        }
        if uid != self.uid {
            sys::setfsuid(uid);
            self.uid = sys::setfsuid(ASK);
            if self.fixup {
                let _ = rustix::thread::set_capabilities(None, self.caps);
            }
            // Drop the groups of the daemon and of other users, since a group may have reserved
            // blocks, too.
            self.set_groups(self.uid, None);
        }
        let hidden = if self.uid == 0 { CapabilitySet::empty() } else { NOT_OF_USERS };
        if self.changes && self.hidden != hidden {
            self.hidden = hidden;
            self.apply();
        }
        // The kernel reports a refusal only by leaving the ids unchanged.
        (self.uid, self.gid) == (uid, gid)
    }

    /// Raises a dropped capability. Returns true if the thread lacked the capability and has raised
    /// it.
    fn raise(&mut self, capability: CapabilitySet) -> bool {
        let lacked = self.hidden.contains(capability);
        self.hidden.remove(capability);
        self.apply();
        lacked && self.caps.effective.contains(capability)
    }

    fn set_owner(&mut self, owner: CreateCredentials) -> Result<()> {
        self.set_umask(owner.umask & 0o777)?;
        if !self.set_user(owner.uid, owner.gid) {
            return Err(Errno::EPERM);
        }
        let extra = owner.supplementary_gid.filter(|gid| *gid != owner.gid);
        if self.set_groups(owner.uid, extra) { Ok(()) } else { Err(Errno::EPERM) }
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

    /// Replaces the supplementary groups of the daemon, which would decide whether set-group-id
    /// stays. Returns false if the kernel refuses.
    fn set_groups(&mut self, uid: u32, extra: Option<u32>) -> bool {
        let needless = uid == 0 || !self.caps.effective.contains(CapabilitySet::SETGID);
        if needless || self.groups == Some(extra) {
            return true;
        }
        let groups: &[rustix::fs::Gid] = match extra {
            Some(gid) => &[rustix::fs::Gid::from_raw(gid)],
            None => &[],
        };
        let set = rustix::thread::set_thread_groups(groups).is_ok();
        if set {
            self.groups = Some(extra);
        }
        set
    }

    fn set_fsetid(&mut self, keep: bool) {
        if self.fsetid != keep {
            self.fsetid = keep;
            self.apply();
        }
    }

    /// Sets the capabilities of the thread as its state requires.
    fn apply(&mut self) {
        let mut wanted = self.all;
        wanted.effective.remove(self.hidden);
        let may = wanted.permitted.contains(CapabilitySet::FSETID);
        wanted.effective.set(CapabilitySet::FSETID, self.fsetid && may);
        if wanted != self.caps && rustix::thread::set_capabilities(None, wanted).is_ok() {
            self.caps = wanted;
        }
    }
}

/// Takes on the credentials of `owner` on a thread of an application. It caches no state, because
/// the application may change its threads itself.
fn restore_owner(owner: CreateCredentials) -> Result<CredentialsGuard> {
    let mut guard = CredentialsGuard::default();
    let gid = sys::setfsgid(owner.gid);
    guard.gid = (gid != owner.gid).then_some(gid);
    let uid = sys::setfsuid(ASK);
    if uid != owner.uid {
        let caps = rustix::thread::capabilities(None).or_errno()?;
        sys::setfsuid(owner.uid);
        guard.uid = Some(uid);
        // Without SECBIT_NO_SETUID_FIXUP, which would stay with the application's thread, the
        // change of user dropped capabilities.
        guard.caps = Some(caps);
        let mut wanted = caps;
        wanted.effective.remove(CapabilitySet::FSETID | NOT_OF_USERS);
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
