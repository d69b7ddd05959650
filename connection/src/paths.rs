//! The paths by which a client found its open files, for messages.
//!
//! A message about a file names it. A search for the name would take as long as clients make it, by
//! the number of files and by directories below each other. So each connection keeps the path of a
//! file from its opening on. The file may have been renamed since.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::{Ino, Name};

/// The latest inodes, one of which may be opened next or may be the directory of the next inode.
const RECENT: usize = 32;
/// Bytes of a path. A longer one loses its beginning.
const LONGEST: usize = 96;
/// Replaces a beginning that is not known.
const BEFORE: &[u8] = "…".as_bytes();

type BoxedPath = Box<[u8]>;

/// The paths that one connection knows.
#[derive(Default)]
pub(crate) struct ConnectionPaths(Mutex<PathTable>);

#[derive(Clone, Default)]
struct PathTable {
    recent: VecDeque<(Ino, BoxedPath)>,
    open: HashMap<Ino, BoxedPath>,
}

impl ConnectionPaths {
    /// The client finds `ino` by `name` in `parent`.
    pub(crate) fn record_lookup(&self, parent: Ino, name: Name<'_>, ino: Ino) {
        let mut known = self.lock();
        let before = if parent == Ino::ROOT { &[] } else { known.get(parent).unwrap_or(BEFORE) };
        let path = shorten(&[before, b"/", name.as_bytes()].concat());
        known.recent.truncate(RECENT - 1);
        known.recent.push_front((ino, path));
    }

    /// The client opens `ino`.
    pub(crate) fn record_open(&self, ino: Ino) {
        let mut known = self.lock();
        if let Some(path) = known.recent(ino).map(BoxedPath::from) {
            known.open.insert(ino, path);
        }
    }

    /// The client has closed `ino` as often as it had opened it.
    pub(crate) fn record_close(&self, ino: Ino) {
        self.lock().open.remove(&ino);
    }

    /// The path of an open file, if it is known.
    pub(crate) fn path_of(&self, ino: Ino) -> Option<BoxedPath> {
        self.lock().open.get(&ino).cloned()
    }

    /// The next program of the process takes the open file `ino` over from `before`.
    pub(crate) fn take_over(&self, before: &ConnectionPaths, ino: Ino) {
        if let Some(path) = before.path_of(ino) {
            self.lock().open.insert(ino, path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PathTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for ConnectionPaths {
    fn clone(&self) -> Self {
        ConnectionPaths(Mutex::new(self.lock().clone()))
    }
}

impl PathTable {
    fn recent(&self, ino: Ino) -> Option<&[u8]> {
        self.recent.iter().find(|(one, _)| *one == ino).map(|(_, path)| &path[..])
    }

    fn get(&self, ino: Ino) -> Option<&[u8]> {
        self.recent(ino).or_else(|| self.open.get(&ino).map(|path| &path[..]))
    }
}

/// The end of `path`.
fn shorten(path: &[u8]) -> BoxedPath {
    match path.len().checked_sub(LONGEST) {
        None | Some(0) => path.into(),
        Some(excess) => [BEFORE, &path[excess + BEFORE.len()..]].concat().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(paths: &ConnectionPaths, ino: u64) -> Option<String> {
        paths.path_of(Ino(ino)).map(|path| String::from_utf8_lossy(&path).into_owned())
    }

    #[test]
    fn an_open_file_keeps_the_path_by_which_it_was_found() {
        let paths = ConnectionPaths::default();
        let find = |parent: u64, name: &str, ino: u64| {
            paths.record_lookup(Ino(parent), Name::new(name.as_bytes()).unwrap(), Ino(ino));
        };
        find(Ino::ROOT.0, "dir", 2);
        find(2, "file", 3);
        paths.record_open(Ino(3));
        assert_eq!((text(&paths, 3).as_deref(), text(&paths, 2)), (Some("/dir/file"), None));
        for other in 100..200 {
            find(Ino::ROOT.0, "other", other);
        }
        find(2, "late", 4);
        paths.record_open(Ino(4));
        let (successor, child) = (ConnectionPaths::default(), paths.clone());
        successor.take_over(&paths, Ino(3));
        paths.record_close(Ino(3));
        assert_eq!((text(&paths, 3), text(&paths, 4).as_deref()), (None, Some("…/late")));
        let shared = [&successor, &child].map(|one| text(one, 3));
        assert_eq!(shared, [Some("/dir/file".to_owned()), Some("/dir/file".to_owned())]);
        // This client did not find it.
        paths.record_open(Ino(5));
        assert_eq!(text(&paths, 5), None);
    }

    #[test]
    fn paths_take_a_limited_room() {
        let paths = ConnectionPaths::default();
        let name = Name::new(&[b'x'; 255]).unwrap();
        for ino in 2..1000 {
            paths.record_lookup(Ino(ino - 1), name, Ino(ino));
        }
        paths.record_open(Ino(999));
        let known = paths.lock();
        assert_eq!((known.recent.len(), known.open[&Ino(999)].len()), (RECENT, LONGEST));
    }
}
