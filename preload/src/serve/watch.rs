//! inotify_add_watch(2): the kernel watches what a passthrough serves where that really is.

use std::ffi::CString;

use defuse_fs::{Errno, FileKind};

use crate::serve::call::{CallResult, KernelCall, ProgramCall};
use crate::serve::{lower_files, open};

/// `IN_DONT_FOLLOW`.
const DONT_FOLLOW: u64 = 0x0200_0000;

/// Every event of a file of a passthrough happens to the file below, whatever process causes it, so
/// the kernel watches that file. Other file systems have nothing that it could watch: `ENOSPC`,
/// which programs take for a reason to look for themselves from time to time.
pub fn add(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 1, false)?;
    let follow = call.args[2] & DONT_FOLLOW == 0;
    let stat = call.client().stat(call.task(), target.as_walk_start(), target.path, follow)?;
    let full = open::full_path(call, &target);
    let is_link = stat.attr.kind == FileKind::Symlink;
    let below = lower_files::path(call, &full, is_link)?.ok_or(Errno::ENOSPC)?;
    let below = CString::new(below).map_err(|_| Errno::ENOENT)?;
    let (number, args) = (call.number as i64, *call.args);
    Err(KernelCall { number, args, path: below, held: None, entry: None }.into())
}
