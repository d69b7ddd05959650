//! The kernel's name space, as far as a walk has to look at it: links that lead into a mount.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use crate::mounts::Table;

/// What is at a path of the kernel.
pub(crate) enum Look {
    /// Nothing that stops the walk.
    GoOn,
    /// The kernel may as well go on from here: no mount can come.
    HandOver,
    /// A link with this text.
    Link(Vec<u8>),
}

/// Whether a walk that stands at `path` could come into a mount at all.
pub(crate) fn may_lead_in(table: &Table, path: &[u8], links: bool) -> bool {
    table.has_paths() && (links || table.below(path) || path.is_empty())
}

/// What is at `path`. Links of /proc are not followed: what they lead to is no path.
pub(crate) fn look(table: &Table, path: &[u8], links: bool) -> Look {
    let below = table.below(path);
    if path == b"/proc" || path == b"/dev/fd" {
        return if below { Look::GoOn } else { Look::HandOver };
    }
    if !links {
        return Look::GoOn;
    }
    match std::fs::read_link(Path::new(OsStr::from_bytes(path))) {
        Ok(text) => Look::Link(text.into_os_string().into_vec()),
        Err(error) => match error.raw_os_error() {
            // Not a link.
            Some(22) => Look::GoOn,
            // A mount may be where the kernel has nothing.
            _ if below => Look::GoOn,
            _ => Look::HandOver,
        },
    }
}

/// Whether a link at `path` with `text` leads into a mount right away or further on.
pub(crate) fn leads_in(table: &Table, path: &[u8], text: &[u8]) -> bool {
    let mut target = Vec::new();
    if !text.starts_with(b"/") {
        let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        target.extend_from_slice(&path[..end]);
        target.push(b'/');
    }
    target.extend_from_slice(text);
    // A chain of links is followed by asking where the whole leads.
    let resolved = std::fs::canonicalize(Path::new(OsStr::from_bytes(&target)));
    let resolved = resolved.map(|path| path.into_os_string().into_vec());
    table.prefix(&target).is_some() || resolved.is_ok_and(|path| table.prefix(&path).is_some())
}
