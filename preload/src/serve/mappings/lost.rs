//! Stores of a program that are not in the file.

use defuse_fs::Errno;

use crate::machine::message::write_line;
use crate::machine::pending;

/// Reports to the program that its store at `at` is not in the file: natively the store itself
/// would have been a SIGBUS. No call has reported it before. For a mapping that this program could
/// not store through, only a message is printed.
pub fn report_lost_store(errno: Errno, at: u64, stores: bool) {
    const NO_ACCESS: i32 = 2;
    let is_full = [Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG].contains(&errno);
    match errno {
        // Every call on the mount fails with this error, and a message is printed.
        Errno::ENOTCONN => return,
        _ if is_full && stores => {}
        _ => write_line(&format!("stores to a mapped file are lost: {errno}")),
    }
    if stores {
        pending::raise(libc::SIGBUS, NO_ACCESS, at);
    }
}
