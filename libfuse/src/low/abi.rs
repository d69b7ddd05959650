//! The structures of the interface of inodes, with the layouts of libfuse 2.9 and 3.14 on 64-bit
//! Linux.

use std::ffi::{c_char, c_double, c_int, c_uint, c_void};

use libc::{dev_t, flock, gid_t, iovec, mode_t, off_t, pid_t, size_t, ssize_t, stat, uid_t};

use crate::abi::{DataParts, InfoPtr, PathPtr, operations};

/// A `fuse_req_t`: the number of a request, see [`requests`](super::requests).
pub type RequestPtr = *mut c_void;

/// `struct fuse_entry_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EntryParam {
    /// The inode; 0 for a name that does not exist.
    pub ino: u64,
    /// Generation of the inode number.
    pub generation: u64,
    /// Attributes.
    pub attr: stat,
    /// Seconds for which the attributes are valid.
    pub attr_timeout: c_double,
    /// Seconds for which the name is valid.
    pub entry_timeout: c_double,
}

/// `struct fuse_ctx`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CallerIds {
    /// User of the caller.
    pub uid: uid_t,
    /// Group of the caller.
    pub gid: gid_t,
    /// Thread of the caller.
    pub pid: pid_t,
    /// The umask of the caller; not in libfuse 2.4 to 2.7.
    pub umask: mode_t,
}

/// `struct fuse_forget_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ForgetItem {
    /// The inode.
    pub ino: u64,
    /// Lookups to forget.
    pub nlookup: u64,
}

/// `struct fuse_custom_io` of libfuse 3.14: the functions that replace system calls on a descriptor
/// of the program.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CustomIo {
    /// Sends a message.
    // SAFETY: types of functions; `port.rs` says why each call is right.
    pub writev: Option<unsafe extern "C" fn(c_int, *const iovec, c_int, *mut c_void) -> ssize_t>,
    /// Receives a message.
    // SAFETY: as above.
    pub read: Option<unsafe extern "C" fn(c_int, *mut c_void, size_t, *mut c_void) -> ssize_t>,
    /// Never called: messages are copied.
    pub splice_receive: *const c_void,
    /// Never called.
    pub splice_send: *const c_void,
}

/// `struct fuse_chan_ops` of libfuse 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ChannelFunctions {
    /// Receives a message; may change the channel.
    // SAFETY: types of functions; `port.rs` says why each call is right.
    pub receive: Option<unsafe extern "C" fn(*mut *mut c_void, *mut c_char, size_t) -> c_int>,
    /// Sends a message.
    // SAFETY: as above.
    pub send: Option<unsafe extern "C" fn(*mut c_void, *const iovec, size_t) -> c_int>,
    /// Ends a channel.
    // SAFETY: as above.
    pub destroy: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// `struct fuse_session_ops` of libfuse 2: a session whose messages the program decodes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionFunctions {
    /// Handles a message.
    // SAFETY: types of functions; `session.rs` says why each call is right.
    pub process: Option<unsafe extern "C" fn(*mut c_void, *const c_char, size_t, *mut c_void)>,
    /// Sets if the loop ends.
    // SAFETY: as above.
    pub exit: Option<unsafe extern "C" fn(*mut c_void, c_int)>,
    /// True if the loop ends.
    // SAFETY: as above.
    pub exited: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    /// Ends the session.
    // SAFETY: as above.
    pub destroy: Option<unsafe extern "C" fn(*mut c_void)>,
}

operations! {
    /// `struct fuse_lowlevel_ops` of libfuse 2 and 3. The structures of libfuse 2 are the beginning
    /// of this one; their functions have fewer arguments at their ends, which are passed in
    /// registers and not read.
    LowOperations {
        init(*mut c_void, *mut c_void);
        destroy(*mut c_void);
        lookup(RequestPtr, u64, PathPtr);
        forget(RequestPtr, u64, u64);
        getattr(RequestPtr, u64, InfoPtr);
        setattr(RequestPtr, u64, *mut stat, c_int, InfoPtr);
        readlink(RequestPtr, u64);
        mknod(RequestPtr, u64, PathPtr, mode_t, dev_t);
        mkdir(RequestPtr, u64, PathPtr, mode_t);
        unlink(RequestPtr, u64, PathPtr);
        rmdir(RequestPtr, u64, PathPtr);
        symlink(RequestPtr, PathPtr, u64, PathPtr);
        rename(RequestPtr, u64, PathPtr, u64, PathPtr, c_uint);
        link(RequestPtr, u64, u64, PathPtr);
        open(RequestPtr, u64, InfoPtr);
        read(RequestPtr, u64, size_t, off_t, InfoPtr);
        write(RequestPtr, u64, *const c_char, size_t, off_t, InfoPtr);
        flush(RequestPtr, u64, InfoPtr);
        release(RequestPtr, u64, InfoPtr);
        fsync(RequestPtr, u64, c_int, InfoPtr);
        opendir(RequestPtr, u64, InfoPtr);
        readdir(RequestPtr, u64, size_t, off_t, InfoPtr);
        releasedir(RequestPtr, u64, InfoPtr);
        fsyncdir(RequestPtr, u64, c_int, InfoPtr);
        statfs(RequestPtr, u64);
        setxattr(RequestPtr, u64, PathPtr, *const c_char, size_t, c_int);
        getxattr(RequestPtr, u64, PathPtr, size_t);
        listxattr(RequestPtr, u64, size_t);
        removexattr(RequestPtr, u64, PathPtr);
        access(RequestPtr, u64, c_int);
        create(RequestPtr, u64, PathPtr, mode_t, InfoPtr);
        getlk(RequestPtr, u64, InfoPtr, *mut flock);
        setlk(RequestPtr, u64, InfoPtr, *mut flock, c_int);
        bmap(RequestPtr, u64, size_t, u64);
        ioctl(RequestPtr, u64, c_uint, *mut c_void, InfoPtr, c_uint, *const c_void, size_t, size_t);
        poll(RequestPtr, u64, InfoPtr, *mut c_void);
        write_buf(RequestPtr, u64, *mut DataParts, off_t, InfoPtr);
        retrieve_reply(RequestPtr, *mut c_void, u64, off_t, *mut DataParts);
        forget_multi(RequestPtr, size_t, *mut ForgetItem);
        flock(RequestPtr, u64, InfoPtr, c_int);
        fallocate(RequestPtr, u64, c_int, off_t, off_t, InfoPtr);
        readdirplus(RequestPtr, u64, size_t, off_t, InfoPtr);
        copy_file_range(RequestPtr, u64, off_t, InfoPtr, u64, off_t, InfoPtr, size_t, c_int);
        lseek(RequestPtr, u64, off_t, c_int, InfoPtr);
        tmpfile(RequestPtr, u64, mode_t, InfoPtr);
    }
}

/// Bytes of `struct fuse_lowlevel_ops` of libfuse 2.9.
pub(crate) const OPERATIONS_TWO: usize = std::mem::offset_of!(LowOperations, readdirplus);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The sizes and offsets that a C compiler gives the structures of the headers of 2.9.9 and
    /// 3.14.0 on x86-64.
    #[test]
    fn layouts_of_the_interface_of_inodes_are_those_of_the_headers() {
        assert_eq!((size_of::<EntryParam>(), offset_of!(EntryParam, attr_timeout)), (176, 160));
        assert_eq!((size_of::<CallerIds>(), size_of::<ForgetItem>()), (16, 16));
        assert_eq!((size_of::<CustomIo>(), size_of::<ChannelFunctions>()), (32, 24));
        assert_eq!(size_of::<SessionFunctions>(), 32);
        assert_eq!((OPERATIONS_TWO, offset_of!(LowOperations, tmpfile)), (328, 352));
        assert_eq!(
            (offset_of!(LowOperations, create), offset_of!(LowOperations, poll)),
            (240, 280)
        );
    }
}
