//! The part of a walk in the kernel's name space: finds links that lead into a mount.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use crate::mounts::ClientMountTable;
use crate::node::{expiry, now_ns};

/// Directories of the kernel's name space that are known to be no links.
#[derive(Default)]
pub(crate) struct KnownDirs(RwLock<KnownPaths>);

#[derive(Default)]
struct KnownPaths {
    paths: HashSet<Box<[u8]>>,
    /// The number of changes before the first path was looked up.
    changes: u32,
    /// The time after which the paths are no longer known.
    until: u64,
}

/// The time for which a directory is known: others may replace it by a link, without being counted.
const HOLDS: Duration = Duration::from_secs(1);
/// The maximum number of known directories. Beyond it, all are forgotten.
const MOST: usize = 256;

impl KnownDirs {
    /// True if `path` was no link when `changes` had its present value, a short time ago.
    fn has(&self, path: &[u8], changes: &AtomicU32) -> bool {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.changes == changes.load(Ordering::Acquire)
            && known.paths.contains(path)
            && now_ns() < known.until
    }

    /// Records that `path` is no link. `changes` is the number of changes before the lookup.
    fn keep(&self, path: &[u8], changes: u32) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if known.changes != changes || known.paths.len() >= MOST || now_ns() >= known.until {
            *known = KnownPaths { paths: HashSet::new(), changes, until: expiry(HOLDS) };
        }
        known.paths.insert(path.into());
    }
}

/// The file at a path of the kernel's name space.
pub(crate) enum OutsideStep {
    /// The walk continues.
    GoOn,
    /// The kernel can continue from here, since the rest of the walk cannot reach a mount.
    HandOver,
    /// A symbolic link with this text.
    Link(Vec<u8>),
}

/// True if a walk at `path` could still reach a mount.
pub(crate) fn may_lead_in(table: &ClientMountTable, path: &[u8], links: bool) -> bool {
    table.has_paths() && (links || table.has_mount_below(path) || path.is_empty())
}

/// Looks up `path`. Links of /proc are not followed, because they do not refer to a path. `known`
/// has directories that need no lookup, with the counter of changes
/// ([`ClientOptions::path_changes`](crate::ClientOptions::path_changes)).
pub(crate) fn follow(
    table: &ClientMountTable,
    path: &[u8],
    links: bool,
    known: Option<(&KnownDirs, &AtomicU32)>,
) -> OutsideStep {
    let below = table.has_mount_below(path);
    if path == b"/proc" || path == b"/dev/fd" {
        return if below { OutsideStep::GoOn } else { OutsideStep::HandOver };
    }
    if !links {
        return OutsideStep::GoOn;
    }
    if known.is_some_and(|(known, changes)| known.has(path, changes)) {
        return OutsideStep::GoOn;
    }
    let before = known.map(|(known, changes)| (known, changes.load(Ordering::Acquire)));
    match std::fs::read_link(Path::new(OsStr::from_bytes(path))) {
        Ok(text) => OutsideStep::Link(text.into_os_string().into_vec()),
        Err(error) => match error.raw_os_error() {
            // EINVAL: not a link.
            Some(22) => {
                if let Some((known, changes)) = before {
                    known.keep(path, changes);
                }
                OutsideStep::GoOn
            }
            // A mount may be at a path that the kernel does not have.
            _ if below => OutsideStep::GoOn,
            _ => OutsideStep::HandOver,
        },
    }
}

/// True if a link at `path` with `text` leads into a mount, directly or through other links.
pub(crate) fn leads_into_mount(table: &ClientMountTable, path: &[u8], text: &[u8]) -> bool {
    let mut target = Vec::new();
    if !text.starts_with(b"/") {
        let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        target.extend_from_slice(&path[..end]);
        target.push(b'/');
    }
    target.extend_from_slice(text);
    // Resolve the rest of the path to follow a chain of links.
    table.prefix(&target).is_some()
        || resolve(&target).is_some_and(|path| table.prefix(&path).is_some())
}

/// Limit on links in one path, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// Resolves links, `.` and `..` of an absolute `path`. Returns `None` if it does not exist.
/// realpath(3) is not used because it allocates from the C library, whose heap may be locked in the
/// middle of fork(2).
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
                    // EINVAL: not a link.
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
