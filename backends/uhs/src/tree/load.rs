//! The tree of what was read from a device, and what can be wrong with it.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

use defuse_fs::FileKind;

use super::{Dir, Node, ROOT, Tree};
use crate::content::{Content, Pool};
use crate::format::inode::{Data, Extent, Inode};
use crate::space::Run;

/// An inode that was read.
pub(crate) struct Loaded {
    pub(crate) ino: u64,
    pub(crate) inode: Inode,
    /// Blocks with its records.
    pub(crate) records: Vec<Run>,
}

/// Something in a file system that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// There is no root directory.
    NoRoot,
    /// A type that does not exist, or that does not fit the data.
    Kind {
        /// The inode.
        ino: u64,
    },
    /// Blocks of two owners, or outside of the device.
    Blocks {
        /// The inode that was read second.
        ino: u64,
    },
    /// A name in something that is no directory, or is not there.
    Stray {
        /// The inode that has the name.
        ino: u64,
        /// The inode that is no directory.
        parent: u64,
    },
    /// A name, or a position in a directory, that two inodes have.
    Twice {
        /// The inode that was read second.
        ino: u64,
        /// The directory.
        parent: u64,
    },
    /// A directory with several names, or a file without any.
    Names {
        /// The inode.
        ino: u64,
    },
    /// Directories that are not below the root.
    Loop {
        /// One of them.
        ino: u64,
    },
    /// The newest version of an inode cannot be read.
    Damaged {
        /// The inode.
        ino: u64,
    },
    /// A slot cannot be read at all: the inode of which it may hold the newest version is unknown.
    Unreadable {
        /// The block of the slot.
        block: u64,
    },
    /// A list of inodes that are gone cannot be read: some may be back.
    LostRemovals,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::NoRoot => f.write_str("there is no root directory"),
            Problem::Kind { ino } => write!(f, "inode {ino}: its type and its data do not fit"),
            Problem::Blocks { ino } => {
                write!(f, "inode {ino}: its blocks belong to another one, or do not exist")
            }
            Problem::Stray { ino, parent } => {
                write!(f, "inode {ino}: a name in inode {parent}, which is no directory")
            }
            Problem::Twice { ino, parent } => {
                write!(f, "inode {ino}: another one has its name in directory {parent}")
            }
            Problem::Names { ino } => write!(f, "inode {ino}: a wrong number of names"),
            Problem::Loop { ino } => write!(f, "directory {ino}: not below the root"),
            Problem::Damaged { ino } => write!(f, "inode {ino}: damaged"),
            Problem::Unreadable { block } => write!(f, "block {block}: cannot be read"),
            Problem::LostRemovals => f.write_str(
                "a list of removed inodes is damaged: files that were removed may be back",
            ),
        }
    }
}

impl Tree {
    /// The file system that these inodes are, and all that is wrong with it. `pool` knows the units of
    /// inodes and the blocks of records. What is wrong is left out.
    pub(crate) fn load(
        pool: Arc<Pool>,
        next_ino: u64,
        loaded: Vec<Loaded>,
    ) -> (Tree, Vec<Problem>) {
        let mut tree = Tree::new(Arc::clone(&pool));
        let mut problems = Vec::new();
        tree.next_ino = tree.next_ino.max(next_ino);
        let mut links = Vec::new();
        let mut space = pool.space();
        for Loaded { ino, mut inode, records } in loaded {
            let Some(kind) = FileKind::from_mode(inode.mode).filter(|kind| fits(*kind, &inode))
            else {
                problems.push(Problem::Kind { ino });
                continue;
            };
            let extents: &[Extent] = match &inode.data {
                Data::Extents(extents) => extents,
                _ => &[],
            };
            let blocks = extents.iter().map(|extent| Run::from(*extent));
            if blocks.filter(|run| !space.claim(*run)).count() > 0 {
                problems.push(Problem::Blocks { ino });
                continue;
            }
            let names = inode.links.len();
            let is_dir = kind == FileKind::Directory;
            if (ino == ROOT) != (names == 0) || is_dir && names > 1 || ino == ROOT && !is_dir {
                problems.push(Problem::Names { ino });
            }
            links.extend(inode.links.iter().map(|link| (link.stamp, ino, link.clone())));
            let lookups = u64::from(ino == ROOT);
            let dir = is_dir.then(Dir::default);
            let content = Content::new(std::mem::take(&mut inode.data), inode.size, records);
            let blocks = content.facts().blocks;
            let content = Arc::new(Mutex::new(content));
            tree.nodes
                .insert(ino, Node { inode, dir, blocks, content, lookups, ..Node::default() });
        }
        drop(space);
        links.sort_unstable_by_key(|(stamp, ino, _)| (*stamp, *ino));
        for (stamp, ino, link) in links {
            tree.next_stamp = tree.next_stamp.max(stamp.saturating_add(1));
            let is_dir = tree.nodes.get(&ino).is_some_and(|node| node.dir.is_some());
            let parent = link.parent;
            match tree.nodes.get_mut(&parent).and_then(|node| node.dir.as_mut()) {
                None => problems.push(Problem::Stray { ino, parent }),
                Some(dir)
                    if dir.by_name.contains_key(&link.name)
                        || dir.by_stamp.contains_key(&stamp) =>
                {
                    problems.push(Problem::Twice { ino, parent });
                }
                Some(dir) => {
                    dir.put(&link.name, stamp, ino);
                    dir.subdirs += u32::from(is_dir);
                }
            }
        }
        match tree.nodes.contains_key(&ROOT) {
            true => problems.extend(tree.loops().into_iter().map(|ino| Problem::Loop { ino })),
            false => problems.push(Problem::NoRoot),
        }
        (tree, problems)
    }

    /// Directories from which the parents do not lead to the root.
    fn loops(&self) -> Vec<u64> {
        let mut good: BTreeSet<u64> = BTreeSet::from([ROOT]);
        let mut bad = Vec::new();
        for (start, _) in self.nodes.iter().filter(|(_, node)| node.dir.is_some()) {
            let mut path = BTreeSet::new();
            let mut at = *start;
            while !good.contains(&at) && path.insert(at) {
                let links = self.nodes.get(&at).map(|node| &node.inode.links);
                match links.and_then(|links| links.first()) {
                    Some(link) => at = link.parent,
                    None => break,
                }
            }
            match good.contains(&at) {
                true => good.append(&mut path),
                false => bad.push(*start),
            }
        }
        bad.sort_unstable();
        bad
    }
}

fn fits(kind: FileKind, inode: &Inode) -> bool {
    match (kind, &inode.data) {
        (FileKind::Regular, Data::Inline(bytes)) => bytes.len() as u64 == inode.size,
        (FileKind::Regular, Data::Extents(_)) => inode.size <= i64::MAX as u64,
        (FileKind::Symlink, Data::Target(target)) => target.len() as u64 == inode.size,
        (FileKind::Regular | FileKind::Symlink, _) => false,
        (_, data) => *data == Data::Nothing,
    }
}
