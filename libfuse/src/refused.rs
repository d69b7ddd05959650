//! The functions that this library does not serve. They answer as libfuse does where the feature is
//! missing, and print the reason once.

use std::ffi::{c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::Once;

use crate::logging::error;

static CHANNELS: Once = Once::new();
static CUSE: Once = Once::new();
static MODULES: Once = Once::new();

/// No channel of libfuse 2.4 can be created, whose functions have other arguments: a null pointer.
pub extern "C" fn no_channel() -> *mut c_void {
    CHANNELS.call_once(|| {
        error("fuse: channels of libfuse 2.4 are not served by this library: use the original libfuse");
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

/// Nothing is to be done for an object that nothing here creates.
pub extern "C" fn nothing() -> c_long {
    0
}
