//! The path of an inode, for messages.

use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, File, FileKind, FileSystem, Ino, Name,
    OpenFlags, Result,
};

/// Entries that a search looks at.
const MOST: usize = 100_000;
/// Directories below each other.
const DEEPEST: usize = 64;

/// A path of `ino` from the root of the file system on. A search through many files ends without one, and gives the number.
pub(crate) fn path_of(fs: &dyn FileSystem, ino: Ino) -> String {
    let cx = Context::new(Caller::default());
    let number = || format!("inode {}", ino.0);
    let Ok(attr) = fs.getattr(&cx, ino, None) else { return number() };
    let mut search = Search { fs, cx: &cx, st_ino: attr.st_ino, left: MOST };
    let found = search.below(Ino::ROOT, DEEPEST);
    found.map_or_else(number, |path| String::from_utf8_lossy(&path).into_owned())
}

struct Search<'a> {
    fs: &'a dyn FileSystem,
    cx: &'a Context<'a>,
    st_ino: u64,
    left: usize,
}

impl Search<'_> {
    /// The path from `dir` on, with a slash at its beginning.
    fn below(&mut self, dir: Ino, depth: usize) -> Option<Vec<u8>> {
        let names = self.list(dir).ok()?;
        self.left = self.left.saturating_sub(names.0.len());
        if let Some((name, ..)) = names.0.iter().find(|(_, number, _)| *number == self.st_ino) {
            return Some([b"/", &name[..]].concat());
        }
        for (name, ..) in names.0.iter().filter(|(.., kind)| *kind == FileKind::Directory) {
            if self.left == 0 || depth == 0 {
                return None;
            }
            let Ok(entry) = Name::new(name).and_then(|name| self.fs.lookup(self.cx, dir, name))
            else {
                continue;
            };
            let found = self.below(entry.ino, depth - 1);
            self.fs.forget(entry.ino, 1);
            if let Some(rest) = found {
                return Some([b"/", &name[..], &rest[..]].concat());
            }
        }
        None
    }

    fn list(&self, ino: Ino) -> Result<Names> {
        let fh = self.fs.opendir(self.cx, ino, OpenFlags(0))?.fh;
        let dir = File { ino, fh };
        let mut names = Names(Vec::new(), self.left, 0);
        let listed = loop {
            let before = names.0.len();
            let (from, seen) = (names.2, names.2);
            let read = self.fs.readdir(self.cx, dir, from, &mut DirBuf::new(&mut names));
            if read.is_err() || names.2 == seen || names.0.len() >= self.left && before > 0 {
                break read;
            }
        };
        // The search changes nothing, and a failure to close has no effect on it.
        let _ = self.fs.releasedir(self.cx, dir);
        listed.map(|()| names)
    }
}

/// Names with their numbers and kinds; how many may come; and the position of the last.
struct Names(Vec<(Vec<u8>, u64, FileKind)>, usize, u64);

impl DirSink for Names {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        self.0.len() < self.1
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.2 = item.next;
        if item.name != b"." && item.name != b".." {
            self.0.push((item.name.to_vec(), item.ino, item.kind));
        }
    }
}
