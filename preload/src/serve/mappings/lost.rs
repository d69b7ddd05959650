//! Stores of a program that are not in the file.

use defuse_fs::Errno;

use crate::machine::message::say;
use crate::machine::pending;

/// Tells the program that what it has stored at `at` is not in the file: natively the store itself would have been a
/// SIGBUS. It was not told by a call before. A mapping that this program could not store through tells by a message alone.
pub fn tell(errno: Errno, at: u64, stores: bool) {
    const NO_ACCESS: i32 = 2;
    let is_full = [Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG].contains(&errno);
    match errno {
        // Every call on the mount says so, and a message does.
        Errno::ENOTCONN => return,
        _ if is_full && stores => {}
        _ => say(&format!("stores to a mapped file are lost: {errno}")),
    }
    if stores {
        pending::raise(libc::SIGBUS, NO_ACCESS, at);
    }
}
