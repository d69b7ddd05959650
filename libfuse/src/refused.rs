//! The functions that this library does not serve. They answer as libfuse does where the feature is missing, and print the reason
//! once.

use std::ffi::{c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::Once;

use crate::logging::error;

static LOWLEVEL: Once = Once::new();
static CUSE: Once = Once::new();
static MODULES: Once = Once::new();

/// No session of the interface of inodes can be created: a null pointer.
pub extern "C" fn no_session() -> *mut c_void {
    LOWLEVEL.call_once(|| {
        error(
            "fuse: programs of the low-level interface (inodes) are not served by this library yet: start the program \
             without `defuse fuse`, with the original libfuse",
        );
    });
    null_mut()
}

/// No character device can be created: a null pointer.
pub extern "C" fn no_device() -> *mut c_void {
    CUSE.call_once(|| {
        error("fuse: character devices (CUSE) are not served by this library: use the original libfuse");
    });
    null_mut()
}

/// No module can be used: a null pointer.
pub extern "C" fn no_module() -> *mut c_void {
    MODULES.call_once(|| {
        error("fuse: modules are not served by this library: use the original libfuse");
    });
    null_mut()
}

/// The `main` of a character device fails.
pub extern "C" fn no_device_main() -> c_int {
    no_device();
    1
}

/// The operation does not exist. Needs an object that nothing here creates.
pub extern "C" fn no_operation() -> c_long {
    -c_long::from(libc::ENOSYS)
}

/// A request that nothing here creates is not valid.
pub extern "C" fn no_request() -> c_long {
    -c_long::from(libc::EINVAL)
}

/// Nothing is to be done for an object that nothing here creates.
pub extern "C" fn nothing() -> c_long {
    0
}
