//! `fuse_lowlevel_notify_*`: messages to the kernel that answer no request. All return 0 or a
//! negated error number.

use std::ffi::{c_char, c_int, c_void};
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::{Errno, Ino, Name, Notify, PollHandle, Result};
use defuse_wire::reply::Notification;
use libc::off_t;

use super::data::with_data;
use super::init::EXPIRE_ONLY;
use super::session::{LowSession, RetrievalCookie, of};
use crate::abi::DataParts;
use crate::handle::lock;

/// Most requests for pages that the kernel has not answered.
const RETRIEVALS_MOST: usize = 1 << 16;

impl LowSession {
    fn notify(&self, notification: &Notification<'_>, data: &[u8]) -> c_int {
        let Some(port) = self.port() else { return -libc::ENOTCONN };
        let message = notification.encode();
        let parts = [IoSlice::new(&message), IoSlice::new(data)];
        let parts = if data.is_empty() { &parts[..1] } else { &parts };
        port.send(parts).map_or_else(|errno| -errno, |()| 0)
    }
}

/// Notifies the kernel in the name of a session.
///
/// # Safety
///
/// The condition of [`of`].
unsafe fn notify(session: *mut c_void, notification: &Notification<'_>) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { of(session) }.map_or(-libc::EINVAL, |session| session.notify(notification, &[]))
}

/// Drops attributes that the kernel caches of an inode, and data from `off` on, unless that is
/// negative.
///
/// # Safety
///
/// `session` is null or a session.
pub unsafe extern "C" fn notify_inval_inode(
    session: *mut c_void,
    ino: u64,
    off: off_t,
    len: off_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { notify(session, &Notification::InvalInode { ino, off, len }) }
}

/// The name of so many bytes.
///
/// # Safety
///
/// `name` has `len` bytes.
unsafe fn name_at<'a>(name: *const c_char, len: usize) -> &'a [u8] {
    if name.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(name.cast::<u8>(), len) }
}

/// Drops a name that the kernel caches.
///
/// # Safety
///
/// `session` is null or a session, and `name` has `len` bytes.
pub unsafe extern "C" fn notify_inval_entry(
    session: *mut c_void,
    parent: u64,
    name: *const c_char,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let name = name_at(name, len);
        notify(session, &Notification::InvalEntry { parent, name, expire_only: false })
    }
}

/// Lets a name that the kernel caches be looked up again. Fails with `-ENOSYS` where the kernel
/// cannot.
///
/// # Safety
///
/// `session` is null or a session, and `name` has `len` bytes.
pub unsafe extern "C" fn notify_expire_entry(
    session: *mut c_void,
    parent: u64,
    name: *const c_char,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(own) = of(session) else { return -libc::EINVAL };
        if lock(&own.conn).capable & EXPIRE_ONLY == 0 {
            return -libc::ENOSYS;
        }
        let name = name_at(name, len);
        notify(session, &Notification::InvalEntry { parent, name, expire_only: true })
    }
}

/// Reports that a name was removed.
///
/// # Safety
///
/// `session` is null or a session, and `name` has `len` bytes.
pub unsafe extern "C" fn notify_delete(
    session: *mut c_void,
    parent: u64,
    child: u64,
    name: *const c_char,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let name = name_at(name, len);
        notify(session, &Notification::Delete { parent, child, name })
    }
}

/// Stores data in the page cache of an inode.
///
/// # Safety
///
/// `session` is null or a session. `parts` is a `struct fuse_bufvec` with its number of parts, in
/// which each part that is no file has as many bytes as it says.
pub unsafe extern "C" fn notify_store(
    session: *mut c_void,
    nodeid: u64,
    offset: off_t,
    parts: *mut DataParts,
    _flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(session) = of(session) else { return -libc::EINVAL };
        let stored = with_data(parts, |data| {
            let Ok(size) = u32::try_from(data.len()) else { return -libc::EINVAL };
            let offset = offset as u64;
            session.notify(&Notification::Store { nodeid, offset, size }, data)
        });
        stored.unwrap_or_else(|errno| -errno)
    }
}

/// Requests data of the page cache of an inode, which `retrieve_reply` of the program gets with the
/// cookie.
///
/// # Safety
///
/// `session` is null or a session.
pub unsafe extern "C" fn notify_retrieve(
    session: *mut c_void,
    nodeid: u64,
    size: usize,
    offset: off_t,
    cookie: *mut c_void,
) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { of(session) }) else { return -libc::EINVAL };
    let notify_unique = NEXT.fetch_add(1, Ordering::Relaxed);
    {
        let mut retrievals = lock(&session.retrievals);
        if retrievals.len() >= RETRIEVALS_MOST {
            return -libc::ENOMEM;
        }
        retrievals.insert(notify_unique, RetrievalCookie(cookie));
    }
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    let offset = offset as u64;
    let code = session.notify(&Notification::Retrieve { notify_unique, nodeid, offset, size }, &[]);
    if code != 0 {
        lock(&session.retrievals).remove(&notify_unique);
    }
    code
}

/// The way to wake the processes that poll a file of a session.
pub(crate) struct LowNotifier(Arc<LowSession>);

impl LowNotifier {
    pub(crate) fn new_shared(session: &Arc<LowSession>) -> Arc<dyn Notify> {
        Arc::new(LowNotifier(Arc::clone(session)))
    }

    fn send(&self, notification: &Notification<'_>, data: &[u8]) -> Result<()> {
        match self.0.notify(notification, data) {
            0 => Ok(()),
            code => Err(Errno::from_raw(-code)),
        }
    }
}

/// Programs of this interface only wake pollers by a notifier, and have functions of their own for
/// the others.
impl Notify for LowNotifier {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        let (off, len) = range.map_or((-1, 0), |(off, len)| (off as i64, len as i64));
        self.send(&Notification::InvalInode { ino: ino.0, off, len }, &[])
    }

    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()> {
        let (parent, name) = (parent.0, name.as_bytes());
        self.send(&Notification::InvalEntry { parent, name, expire_only }, &[])
    }

    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        let (parent, child, name) = (parent.0, child.0, name.as_bytes());
        self.send(&Notification::Delete { parent, child, name }, &[])
    }

    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        let size = u32::try_from(data.len()).map_err(|_| Errno::EINVAL)?;
        self.send(&Notification::Store { nodeid: ino.0, offset, size }, data)
    }

    fn retrieve(
        &self,
        _: Ino,
        _: u64,
        _: u32,
        _: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        self.send(&Notification::Poll { kh: handle.0 }, &[])
    }

    fn increment_epoch(&self) -> Result<()> {
        self.send(&Notification::IncEpoch, &[])
    }

    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        let nodeids: Vec<u64> = inodes.iter().map(|ino| ino.0).collect();
        self.send(&Notification::Prune { nodeids: &nodeids }, &[])
    }
}
