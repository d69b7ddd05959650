//! The directories above the file systems.

use crate::{Attr, Caller, Entry, FileKind, Ino, Name, NewNode, NormalPath};

use super::{Namespace, NamespaceError, outer};

/// All directories. The root is the first.
pub(super) struct NamespaceTree {
    dirs: Vec<NamespaceDir>,
}

/// A directory.
pub(super) struct NamespaceDir {
    pub(super) parent: usize,
    pub(super) names: Vec<(Box<[u8]>, NamespaceChild)>,
    attr: Attr,
}

/// The thing that a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NamespaceChild {
    /// A directory of the namespace.
    Dir(usize),
    /// The root of a file system.
    Member(usize),
}

impl NamespaceChild {
    /// Its number in the namespace.
    pub(super) fn ino(self) -> Ino {
        match self {
            NamespaceChild::Dir(dir) => NamespaceTree::ino(dir),
            NamespaceChild::Member(index) => outer(index, Ino::ROOT).unwrap_or(Ino::ROOT),
        }
    }
}

impl NamespaceTree {
    pub(super) fn new<'a>(
        paths: impl IntoIterator<Item = &'a str>,
        owner: Caller,
    ) -> Result<NamespaceTree, NamespaceError> {
        let mut tree = NamespaceTree { dirs: Vec::new() };
        tree.add_dir(0, owner);
        for (index, path) in paths.into_iter().enumerate() {
            if index >= Namespace::MOST {
                return Err(NamespaceError::TooMany);
            }
            let path = NormalPath::new(path.as_bytes()).ok_or(NamespaceError::Path(index))?;
            tree.add(index, path, owner)?;
        }
        Ok(tree)
    }

    fn add(
        &mut self,
        index: usize,
        path: NormalPath<'_>,
        owner: Caller,
    ) -> Result<(), NamespaceError> {
        let (above, last) = path.split_last();
        let mut dir = 0;
        for name in above.iter().flat_map(|path| path.names()) {
            dir = match self.child(dir, name) {
                Some(NamespaceChild::Dir(next)) => next,
                Some(NamespaceChild::Member(other)) => {
                    return Err(NamespaceError::Below(index, other));
                }
                None => {
                    let new = self.add_dir(dir, owner);
                    self.dirs[dir].add(name, NamespaceChild::Dir(new));
                    self.dirs[dir].attr.nlink += 1;
                    new
                }
            };
        }
        match self.child(dir, last) {
            None => {
                self.dirs[dir].add(last, NamespaceChild::Member(index));
                self.dirs[dir].attr.nlink += 1;
                Ok(())
            }
            Some(NamespaceChild::Member(other)) => Err(NamespaceError::Below(index, other)),
            Some(NamespaceChild::Dir(dir)) => {
                Err(NamespaceError::Below(self.find_member(dir), index))
            }
        }
    }

    fn add_dir(&mut self, parent: usize, owner: Caller) -> usize {
        let dir = self.dirs.len();
        let node = NewNode::new(FileKind::Directory, 0o755, owner);
        let attr = Attr { nlink: 2, ..Attr::for_new(NamespaceTree::ino(dir), &node) };
        self.dirs.push(NamespaceDir { parent, names: Vec::new(), attr });
        dir
    }

    /// A member below a directory. Every directory has one.
    fn find_member(&self, dir: usize) -> usize {
        match self.dirs[dir].names.first() {
            Some((_, NamespaceChild::Dir(next))) => self.find_member(*next),
            Some((_, NamespaceChild::Member(index))) => *index,
            None => 0,
        }
    }

    pub(super) fn ino(dir: usize) -> Ino {
        Ino(Ino::ROOT.0 + dir as u64)
    }

    /// The directory with this number.
    pub(super) fn find(&self, ino: Ino) -> Option<usize> {
        let dir = usize::try_from(ino.0.checked_sub(Ino::ROOT.0)?).ok()?;
        (dir < self.dirs.len()).then_some(dir)
    }

    pub(super) fn dir(&self, dir: usize) -> &NamespaceDir {
        &self.dirs[dir]
    }

    pub(super) fn child(&self, dir: usize, name: Name<'_>) -> Option<NamespaceChild> {
        let mut names = self.dirs[dir].names.iter();
        names.find(|(own, _)| **own == *name.as_bytes()).map(|(_, child)| *child)
    }

    /// The directory in which a member lies.
    pub(super) fn parent_of_member(&self, index: usize) -> usize {
        let has = |dir: &NamespaceDir| {
            dir.names.iter().any(|(_, child)| *child == NamespaceChild::Member(index))
        };
        self.dirs.iter().position(has).unwrap_or(0)
    }

    /// The attributes of a directory, which may be kept: they never change.
    pub(super) fn attr(&self, dir: usize) -> Attr {
        self.dirs[dir].attr
    }

    /// The entry of a directory, whose lookups are not counted.
    pub(super) fn entry(&self, dir: usize) -> Entry {
        let attr = self.attr(dir);
        Entry { ino: NamespaceTree::ino(dir), generation: 0, attr, valid_for: attr.valid_for }
    }
}

impl NamespaceDir {
    fn add(&mut self, name: Name<'_>, child: NamespaceChild) {
        self.names.push((name.as_bytes().into(), child));
    }
}
