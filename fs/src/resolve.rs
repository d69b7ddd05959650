//! Resolution of a whole path in one call.

use std::fmt;

use crate::{Attr, Entry, Ino, Name, OpenReply};

/// A relative path in normal form: names with single slashes between them, none of them `.` or
/// `..`, and no slash at either end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NormalPath<'a>(&'a [u8]);

impl<'a> NormalPath<'a> {
    /// Checks `bytes`. Returns `None` for the empty path, and for every path with another form or
    /// with a component that is no [`Name`].
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let mut parts = bytes.split(|&byte| byte == b'/');
        parts.all(|part| Name::new(part).is_ok()).then_some(NormalPath(bytes))
    }

    /// The bytes of the path.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// The names from the first to the last; at least one.
    pub fn names(self) -> impl Iterator<Item = Name<'a>> {
        self.0.split(|&byte| byte == b'/').map(Name::from_checked)
    }

    /// Splits off the last name. The path before it is `None` if there is only one name.
    pub fn split_last(self) -> (Option<NormalPath<'a>>, Name<'a>) {
        match self.0.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => {
                (Some(NormalPath(&self.0[..slash])), Name::from_checked(&self.0[slash + 1..]))
            }
            None => (None, Name::from_checked(self.0)),
        }
    }
}

impl<'a> From<Name<'a>> for NormalPath<'a> {
    fn from(name: Name<'a>) -> Self {
        NormalPath(name.as_bytes())
    }
}

impl fmt::Debug for NormalPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&String::from_utf8_lossy(self.0), f)
    }
}

/// The answer of [`Shortcuts::resolve`](crate::Shortcuts::resolve).
///
/// No variant gives a lookup. `open_to_all` is true if every directory on the way, including the
/// first, grants search permission to everyone: its mode has all three `x` bits, and it has no
/// access ACL. Otherwise a frontend that checks permissions must walk, unless the caller may search
/// all directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathResolution {
    /// The frontend must walk: a name before the last leads to a symbolic link or to no directory,
    /// or the file system cannot resolve this path in one call.
    Walk,
    /// The path leads to this inode, which may be a symbolic link.
    Inode {
        /// The inode, without a lookup.
        ino: Ino,
        /// Its attributes.
        attr: Attr,
        /// All directories on the way may be searched by everyone.
        open_to_all: bool,
    },
    /// A name of the path does not exist in its directory.
    Missing {
        /// All directories up to that name may be searched by everyone.
        open_to_all: bool,
    },
}

/// The answer of [`Shortcuts::open_or_create`](crate::Shortcuts::open_or_create).
#[derive(Clone, Debug)]
pub enum OpenOutcome {
    /// The file was made and is open. Adds a lookup.
    Created(Entry, OpenReply),
    /// The file was there and is open. The kernel has decided that the caller may open it. Adds a
    /// lookup.
    Opened(Entry, OpenReply),
    /// The name is there, or was when the file was to be made. Nothing is open, and no lookup is
    /// added.
    Found(PathResolution),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_in_normal_form_are_accepted() {
        for path in ["a", "a/b", "..a/b..", "a b/\u{fc}"] {
            assert_eq!(
                NormalPath::new(path.as_bytes()).map(|p| p.as_bytes()),
                Some(path.as_bytes())
            );
        }
        let long = "a".repeat(256);
        for path in ["", "/", "/a", "a/", "a//b", ".", "a/.", "a/../b", "..", "a\0b", &long] {
            assert_eq!(NormalPath::new(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn a_path_is_split_into_its_names() {
        let path = NormalPath::new(b"a/bc/d").unwrap();
        let names: Vec<_> = path.names().map(Name::as_bytes).collect();
        assert_eq!(names, [&b"a"[..], b"bc", b"d"]);
        let (before, last) = path.split_last();
        assert_eq!((before.unwrap().as_bytes(), last.as_bytes()), (&b"a/bc"[..], &b"d"[..]));
        let (before, last) = NormalPath::from(last).split_last();
        assert_eq!((before, last.as_bytes()), (None, &b"d"[..]));
    }
}
