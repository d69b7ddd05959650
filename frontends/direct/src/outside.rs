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
    table.prefix(&target).is_some()
        || resolve(&target).is_some_and(|path| table.prefix(&path).is_some())
}

/// As many links as the kernel follows (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// The absolute `path` without links, `.` and `..`; `None` where it does not exist. realpath(3) would
/// take memory from the C library, whose heap a caller in the middle of fork(2) may have locked.
fn resolve(path: &[u8]) -> Option<Vec<u8>> {
    let components = |path: &[u8]| {
        path.split(|&byte| byte == b'/').rev().map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let mut rest = components(path);
    let mut resolved = Vec::new();
    let mut links = 0;
    while let Some(component) = rest.pop() {
        match component.as_slice() {
            b"" | b"." => {}
            b".." => {
                resolved.truncate(resolved.iter().rposition(|&byte| byte == b'/').unwrap_or(0))
            }
            name => {
                let parent = resolved.len();
                resolved.push(b'/');
                resolved.extend_from_slice(name);
                match std::fs::read_link(Path::new(OsStr::from_bytes(&resolved))) {
                    Ok(text) => {
                        links += 1;
                        if links > MAX_LINKS {
                            return None;
                        }
                        let text = text.into_os_string().into_vec();
                        resolved.truncate(if text.starts_with(b"/") { 0 } else { parent });
                        rest.extend(components(&text));
                    }
                    // Not a link.
                    Err(error) if error.raw_os_error() == Some(22) => {}
                    Err(_) => return None,
                }
            }
        }
    }
    if resolved.is_empty() {
        resolved.push(b'/');
    }
    Some(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_as_by_realpath() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("a/b")).unwrap();
        std::os::unix::fs::symlink("../b/../b", at("a/b/l")).unwrap();
        std::os::unix::fs::symlink(at("a/b/l"), at("abs")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        for name in ["a", "a/b/l", "abs", "abs/l/..", "a//b/./l/", "none", "a/none", "loop", ".."] {
            let path = at(name);
            let expected = path.canonicalize().ok().map(|path| path.into_os_string().into_vec());
            assert_eq!(resolve(path.as_os_str().as_bytes()), expected, "{name}");
        }
        assert_eq!(resolve(b"/"), Some(b"/".to_vec()));
    }
}
