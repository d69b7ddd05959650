//! The messages of servers that have arrived in libgfapi.
//!
//! This process polls for them. With a callback in place of polling, libgfapi makes a task with a
//! stack of 2 MiB for each message, on the threads that receive the answers of servers. While
//! another client wrote to files that this one knows, these threads fell behind on a busy machine:
//! each answer of a server waited for minutes behind messages of the same server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_fs::Result;

use crate::ffi::{GfapiLibrary, GlfsObject, GlfsUpcall};
use crate::upcalls::inbox::UpcallInbox;
use crate::volume::{VolumeConnection, check, extract};

/// `GLFS_UPCALL_INODE_INVALIDATE`.
const INVALIDATE: i32 = 1;

/// Bits of the flags in a message: the name of a file has changed, its number of names has changed,
/// or the servers have forgotten the file.
pub const NAME_CHANGED: u64 = 0x1 | 0x80 | 0x100 | 0x200;

/// Time between two polls: while messages arrive, the longest while none arrive, and the longest
/// after neither messages nor requests have come for [`IDLE_AFTER`]. The last is half of the time
/// within which changes by other clients become visible.
const SOON: Duration = Duration::from_millis(5);
const LATEST: Duration = Duration::from_millis(40);
const IDLE: Duration = Duration::from_millis(500);

/// Time after which no user is waiting for the change of another client.
const IDLE_AFTER: Duration = Duration::from_secs(2);

/// Maximum number of messages that are taken before a pause. Another client may cause any number of
/// them.
const IN_A_ROW: usize = 1 << 14;

/// Puts messages of servers into `inbox` until it ends.
pub(crate) fn receive(volume: &Arc<VolumeConnection>, inbox: &UpcallInbox) {
    let (mut wait, mut used) = (SOON, Instant::now());
    while !inbox.ends_within(wait) {
        let has_some = take(volume, inbox).is_ok_and(|count| count > 0);
        // The kernel may have cached answers for minutes, so that its requests count, too.
        if inbox.is_used() || has_some {
            used = Instant::now();
        }
        wait = next(wait, has_some, used.elapsed());
    }
}

/// Takes the messages before a kept answer is used, unless another thread has done so just now.
pub(crate) fn take_if_due(volume: &VolumeConnection, inbox: &UpcallInbox) {
    if inbox.is_due(SOON)
        && let Err(errno) = take(volume, inbox)
    {
        log::debug!("messages of servers: {errno}");
    }
}

/// The time until the next poll, `wait` after the last one.
fn next(wait: Duration, has_some: bool, unused: Duration) -> Duration {
    match (has_some, unused < IDLE_AFTER) {
        (true, _) => SOON,
        (_, true) => (2 * wait).min(LATEST),
        (_, false) => (2 * wait).min(IDLE),
    }
}

/// Puts the messages that have arrived into `inbox`. Returns their number. libgfapi keeps messages
/// from the first call on. A server sends its messages before its later answers, so that messages
/// about a file are here if they were sent before the last answer.
///
/// # Errors
///
/// The errors of libgfapi.
pub(crate) fn take(volume: &VolumeConnection, inbox: &UpcallInbox) -> Result<usize> {
    let (library, _turn) = (volume.library(), inbox.lock_polling());
    for count in 0..IN_A_ROW {
        // The pointer stays unchanged if there is no message. libgfapi replaces it by null for a
        // message about an inode that this client does not know.
        let mut none = 0_u8;
        let none: *mut GlfsUpcall = (&raw mut none).cast();
        let mut message = none;
        // SAFETY: the connection lives as long as the volume.
        check(unsafe { (library.glfs_h_poll_upcall)(volume.raw(), &raw mut message) })?;
        if message == none {
            return Ok(count);
        }
        if !message.is_null() {
            // SAFETY: the message belongs to this call, and is not used after it was freed.
            unsafe {
                put(library, message, inbox);
                (library.glfs_free)(message.cast());
            }
        }
    }
    Ok(IN_A_ROW)
}

/// Puts the inodes of a message into the inbox.
// SAFETY: the message is valid.
unsafe fn put(library: &GfapiLibrary, message: *mut GlfsUpcall, inbox: &UpcallInbox) {
    // SAFETY: the message is valid, and an invalidation of an inode. The objects in it live as long
    // as the message.
    unsafe {
        if (library.glfs_upcall_get_reason)(message) != INVALIDATE {
            return;
        }
        let event = (library.glfs_upcall_get_event)(message);
        if event.is_null() {
            return;
        }
        let flags = (library.glfs_upcall_inode_get_flags)(event);
        let about = |object: *mut GlfsObject, flags| {
            if !object.is_null()
                && let Ok(gfid) = extract(library, object)
            {
                inbox.put(gfid, flags);
            }
        };
        about((library.glfs_upcall_inode_get_object)(event), flags);
        // The directories of a name that was removed, made or moved.
        about((library.glfs_upcall_inode_get_pobject)(event), 0);
        about((library.glfs_upcall_inode_get_oldpobject)(event), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_become_rare_while_nothing_happens_and_frequent_with_a_message() {
        let waits = |unused| {
            let mut wait = SOON;
            (0..9).for_each(|_| wait = next(wait, false, unused));
            wait
        };
        assert_eq!((waits(Duration::ZERO), waits(IDLE_AFTER)), (LATEST, IDLE));
        // A request of a frontend, and a message.
        assert_eq!(next(IDLE, false, Duration::ZERO), LATEST);
        assert_eq!(next(IDLE, true, Duration::ZERO), SOON);
    }
}
