//! The interface of inodes ("low-level"): a program gets each request of the kernel, and answers it
//! when it likes, from any thread.
//!
//! This interface is the protocol itself, so that neither `FileSystem` nor a session of `session/`
//! is between. A request is read through a [`LowPort`], decoded by `wire/`, and passed to a
//! function of [`LowOperations`]. A program may also read the messages by itself. The functions
//! `fuse_reply_*` encode one message each, and write it where the request came from.
//!
//! The pointer that a program has of a request is a number (`requests.rs`). A reply to a request
//! that was answered before, or whose session has ended, is an error, and reads no memory.

mod abi;
mod calls;
mod data;
mod dispatch;
mod entries;
mod init;
mod loops;
mod notify;
mod port;
mod reply;
mod requests;
mod session;
mod wake;

pub use abi::{
    CallerIds, ChannelFunctions, CustomIo, EntryParam, ForgetItem, LowOperations, SessionFunctions,
};
pub use calls::{
    fuse_session_custom_io, process_buffer, receive_buffer, session_three, session_two,
    session_with_functions,
};
pub use data::fuse_reply_data;
pub use entries::{fuse_add_dirent, fuse_add_direntry, fuse_add_direntry_plus, fuse_dirent_size};
pub use loops::ThreadLimits;
pub use notify::{
    notify_delete, notify_expire_entry, notify_inval_entry, notify_inval_inode, notify_retrieve,
    notify_store,
};
pub use port::LowPort;
pub use reply::*;
pub use requests::{
    fuse_req_ctx, fuse_req_getgroups, fuse_req_interrupt_func, fuse_req_interrupted,
    fuse_req_userdata,
};
pub use session::{LowSession, destroy, into_pointer, of};
