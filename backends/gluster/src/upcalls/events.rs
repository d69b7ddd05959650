//! The callback by which libgfapi delivers messages of servers.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::ffi::{GlfsObject, GlfsUpcall, Library, library};
use crate::upcalls::inbox::Inbox;
use crate::volume::extract;

/// `GLFS_UPCALL_INODE_INVALIDATE`.
const INVALIDATE: i32 = 1;

/// Bits of the flags in a message. The name of a file has changed, it has more or fewer of them, or the servers
/// have forgotten it.
pub const NAME_CHANGED: u64 = 0x1 | 0x80 | 0x100 | 0x200;

/// Takes a message.
// SAFETY: libgfapi calls it with a message that is ours, and the inbox that was registered, which outlives the
// connection.
pub(crate) unsafe extern "C" fn told(message: *mut GlfsUpcall, inbox: *mut c_void) {
    let Ok(library) = library() else { return };
    // A panic must not enter C.
    let put = AssertUnwindSafe(|| {
        // SAFETY: see above.
        unsafe { put(library, message, &*inbox.cast::<Inbox>()) }
    });
    let _ = catch_unwind(put);
    // SAFETY: the message is not used any more.
    unsafe { (library.glfs_free)(message.cast()) };
}

/// Puts the inodes of a message into the inbox.
// SAFETY: the message is valid.
unsafe fn put(library: &Library, message: *mut GlfsUpcall, inbox: &Inbox) {
    // SAFETY: the message is valid, and an invalidation of an inode, whose objects live as long as it does.
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
