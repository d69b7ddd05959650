//! The identity under which a thread acts, so that the lower file system decides about owners, groups,
//! modes, access lists, quotas and reserved blocks as it would for the caller itself.
//!
//! On Linux the file-system user and group, the supplementary groups and the capabilities belong
//! to a thread, and so does the umask after unshare(2). Every operation states what it needs before
//! it reaches the lower file system: user, group and the capabilities of [`NOT_OF_USERS`] by [`act_as`]
//! or [`become_owner`]; umask, supplementary groups and `CAP_FSETID` where they matter to it. So
//! nothing that an earlier operation left behind takes part in a later one. A thread remembers what it
//! has, and makes no system call while that fits ([`Credentials::Sticky`]).
//!
//! The frontend has decided permissions. So the thread keeps the capabilities that pass over them
//! (`SECBIT_NO_SETUID_FIXUP`), except those whose rules the frontend decides by attributes that may be
//! old, or cannot decide at all.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use defuse_fs::{Caller, Errno, NewNode, Result};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use crate::lower::OrErrno;
use crate::options::Credentials;
use crate::sys;

/// Not a user: asks setfsuid(2) for the present one.
const ASK: u32 = u32::MAX;

/// What a thread lacks while it acts for a user other than 0: `CAP_SYS_RESOURCE`, by which ext4 gives
/// away its reserved blocks and all file systems exceed quotas; and `CAP_FOWNER`, so that the lower file
/// system itself applies the rules that ask for the owner of a file (sticky directories, hard links,
/// chmod(2)) to the file that an operation really reaches.
const NOT_OF_USERS: CapabilitySet = CapabilitySet::SYS_RESOURCE.union(CapabilitySet::FOWNER);

/// The caller of a request that tells none, because the kernel writes pages back: a user without any
/// privilege, the overflow user of the kernel.
pub(crate) const UNKNOWN: Caller = Caller { uid: 65534, gid: 65534, pid: 0 };

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
    /// Those that it had at the beginning.
    all: CapabilitySets,
    /// Those that it has now.
    caps: CapabilitySets,
    /// Of `all`, those that it lacks now, `CAP_FSETID` aside.
    hidden: CapabilitySet,
    fsetid: bool,
    /// It may take on other users and groups.
    changes: bool,
    /// A change of user takes capabilities away, which must be put back.
    fixup: bool,
}

/// What the threads of the process may have: see [`remember`].
static WHOLE: OnceLock<CapabilitySet> = OnceLock::new();

/// Remembers the capabilities of this thread, before any thread acts for a user.
pub(crate) fn remember() {
    if let Ok(caps) = rustix::thread::capabilities(None) {
        WHOLE.get_or_init(|| caps.effective);
    }
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

/// Acts as `caller` from here to the end of the operation. Not where the process may not act as
/// others, and not on the threads of an application ([`Credentials::Restore`]), which has the
/// privileges of these threads anyway.
pub(crate) fn act_as(caller: Caller, how: Credentials) {
    if how == Credentials::Sticky {
        let _ = with_thread(|thread| {
            thread.act_as(caller);
            Ok(())
        });
    }
}

/// Runs `change`, and once more with `CAP_FOWNER` where it answers `EPERM`: the frontend has found
/// that the caller may, who is not the owner but may have that capability over the file (root of a
/// user namespace), or asks for nothing that takes the owner.
pub(crate) fn as_decided<T>(how: Credentials, change: impl Fn() -> Result<T>) -> Result<T> {
    match change() {
        Err(Errno::EPERM) if how == Credentials::Sticky => {
            let raised = with_thread(|thread| Ok(thread.raise(CapabilitySet::FOWNER)));
            if raised == Ok(true) { change() } else { Err(Errno::EPERM) }
        }
        other => other,
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

/// Makes a node in `dir` by `make(mode)`, as its owner and with its umask. The kernel applies the umask of
/// the thread where `dir` has no default list; with `lists` there may be one.
///
/// A thread of an application has the umask of its process, which cannot be taken away for a moment: the
/// other threads make files, too. So below a default list the node is made on a thread beside it.
pub(crate) fn as_owner<T>(
    node: &NewNode<'_>,
    (dir, lists): (BorrowedFd<'_>, bool),
    how: Credentials,
    make: impl Fn(rustix::fs::Mode) -> Result<T>,
) -> Result<T> {
    let mode = |perm: u32| rustix::fs::Mode::from_raw_mode(perm & 0o7777);
    let _guard = become_owner(Owner::of(node), how)?;
    let masked = match how {
        Credentials::Sticky => node.perm,
        Credentials::Restore => node.perm & !node.umask,
    };
    if masked != node.perm && lists && sys::has_default_list(dir) {
        // Where the kernel makes no thread, the node is as without a list: never more permitted.
        if let Some(made) = sys::with_umask_zero(|| make(mode(node.perm))) {
            return made;
        }
    }
    make(mode(masked))
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
        // A thread begins with what the one has that starts it, which may act for a user just now.
        let whole = WHOLE.get().map_or(caps.effective, |whole| *whole & caps.permitted);
        let all = CapabilitySets { effective: whole, ..caps };
        let bits = rustix::thread::capabilities_secure_bits().or_errno()?;
        let wanted = bits | CapabilitiesSecureBits::NO_SETUID_FIXUP;
        let fixup = rustix::thread::set_capabilities_secure_bits(wanted).is_err();
        let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
        Ok(Thread {
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
        // The kernel names no user where it has none to name.
        let Caller { uid, gid, .. } = if caller.uid == ASK { UNKNOWN } else { caller };
        if self.changes {
            let _ = self.set_user(uid, gid);
        }
    }

    /// True where the thread now has this user and group.
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
            // Neither those of the daemon nor of another user: a group may have reserved blocks, too.
            self.set_groups(self.uid, None);
        }
        let hidden = if self.uid == 0 { CapabilitySet::empty() } else { NOT_OF_USERS };
        if self.changes && self.hidden != hidden {
            self.hidden = hidden;
            self.apply();
        }
        // The kernel does not say that it refused, but for the values that it left.
        (self.uid, self.gid) == (uid, gid)
    }

    /// True where the thread lacked `capability` and has it now.
    fn raise(&mut self, capability: CapabilitySet) -> bool {
        let lacked = self.hidden.contains(capability);
        self.hidden.remove(capability);
        self.apply();
        lacked && self.caps.effective.contains(capability)
    }

    fn set_owner(&mut self, owner: Owner) -> Result<()> {
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

    /// The groups of the daemon are not those of the user, and decide who keeps set-group-id. False
    /// where the kernel refuses.
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

    /// Gives the thread the capabilities that it is to have.
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
