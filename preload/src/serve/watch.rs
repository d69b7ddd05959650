//! inotify_add_watch(2): the kernel watches what a passthrough serves where that really is.

use std::ffi::CString;

use defuse_fs::{Errno, FileKind};

use crate::process::state::{Process, RunMount};
use crate::serve::call::{ByKernel, Call, Fail, Served};
use crate::serve::open;

/// `IN_DONT_FOLLOW`.
const DONT_FOLLOW: u64 = 0x0200_0000;

/// Everything that happens to a file of a passthrough happens to the file below, whoever does it, so
/// that is what the kernel watches. Other file systems have nothing that it could: `ENOSPC`, which
/// programs take for a reason to look for themselves from time to time.
pub fn add(call: &Call<'_>) -> Served {
    let target = call.target(None, 1, false)?;
    let follow = call.args[2] & DONT_FOLLOW == 0;
    let stat = call.client().stat(call.task(), target.at(), target.path, follow)?;
    let full = open::full_path(call, &target);
    let is_link = stat.attr.kind == FileKind::Symlink;
    let path = real_path(call, &full, is_link)?;
    let below = below(call.process, &path).ok_or(Errno::ENOSPC)?;
    let below = CString::new(below).map_err(|_| Errno::ENOENT)?;
    let (number, args) = (call.number as i64, *call.args);
    Err(ByKernel { number, args, path: below, held: None, entry: None }.into())
}

/// The path of `full` without links, but for the last component where that is a link itself.
fn real_path(call: &Call<'_>, full: &[u8], is_link: bool) -> Result<Vec<u8>, Fail> {
    let whole = |path: &[u8]| Ok(call.client().real_path(call.task(), path)?);
    if !is_link {
        return whole(full);
    }
    let cut = full.iter().rposition(|&byte| byte == b'/').ok_or(Errno::ENOENT)?;
    let mut path = whole(&full[..=cut])?;
    path.push(b'/');
    path.extend_from_slice(&full[cut + 1..]);
    Ok(path)
}

/// Where the kernel has `path`, which is that of a mount and has no links in it.
fn below(process: &Process, path: &[u8]) -> Option<Vec<u8>> {
    let rest = |mounted: &RunMount| {
        let target = mounted.mount.target();
        let rest = path.strip_prefix(&*target)?;
        matches!(rest.first(), None | Some(b'/')).then(|| (target.len(), rest.to_vec()))
    };
    let mounts = process.mounts.iter().zip(&process.plan.mounts);
    let found = mounts.filter_map(|(mounted, plan)| Some((rest(mounted)?, plan)));
    let ((_, rest), plan) = found.max_by_key(|((len, _), _)| *len)?;
    let directory = crate::process::compose::directory(plan)?;
    Some([directory, rest].concat())
}
