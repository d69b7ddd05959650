//! From memory to a group of changes, and back from what was read.

use std::collections::BTreeSet;
use std::fmt;

use defuse_fs::{Errno, FileKind, Result};

use super::{Dir, Node, ROOT, Tree, pages};
use crate::commit::Change;
use crate::format::BLOCK;
use crate::format::inode::{
    Data, Extent, Inode, POINTERS, POINTERS_OF_BLOCK, Pointer, pointer_block,
};
use crate::space::{Run, Space};

/// Everything that a group writes.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) changes: Vec<Change>,
    /// Blocks that must be durable before the changes are written.
    pub(crate) data: Vec<(u64, Box<[u8]>)>,
    /// Blocks that are free once the changes are durable.
    pub(crate) freed: Vec<Run>,
}

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
            Problem::LostRemovals => f.write_str(
                "a list of removed inodes is damaged: files that were removed may be back",
            ),
        }
    }
}

impl Tree {
    /// True where the next group has something to write.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.changed.is_empty() || !self.gone.is_empty() || !self.written.is_empty()
    }

    /// Everything that changed since the last call. The blocks that were promised are taken now.
    pub(crate) fn batch(&mut self) -> Result<Batch> {
        let mut batch = Batch::default();
        for ino in std::mem::take(&mut self.written) {
            self.place_pages(ino, &mut batch)?;
        }
        for ino in std::mem::take(&mut self.changed) {
            let body = self.encode(ino, &mut batch)?;
            batch.changes.push(Change::Write { ino, body });
        }
        let gone = std::mem::take(&mut self.gone);
        batch.changes.extend(gone.into_iter().map(|ino| Change::Remove { ino }));
        batch.freed.append(&mut self.freed);
        Ok(batch)
    }

    /// Gives blocks to the pages of a file that need some, and copies those that changed.
    fn place_pages(&mut self, ino: u64, batch: &mut Batch) -> Result<()> {
        let Some(node) = self.nodes.get_mut(&ino) else { return Ok(()) };
        let Data::Extents(extents) = &mut node.inode.data else { return Ok(()) };
        let wanting: Vec<u64> =
            node.pages.iter().filter(|(_, page)| page.promised).map(|(at, _)| *at).collect();
        for run in wanting.chunk_by(|a, b| a + 1 == *b) {
            let (mut page, end) = (run[0], run[0] + run.len() as u64);
            batch.freed.extend(pages::cut(extents, page, end));
            while page < end {
                let near = page.checked_sub(1).and_then(|before| pages::block_of(extents, before));
                let count = (end - page).min(u64::from(u32::MAX)) as u32;
                let taken = self.space.take(count, near, 0).ok_or(Errno::EIO)?;
                let Run { block, count } = taken;
                pages::add(extents, Extent { page, block, count });
                page += u64::from(count);
            }
        }
        for (at, page) in node.pages.iter_mut().filter(|(_, page)| page.dirty) {
            let block = pages::block_of(extents, *at).ok_or(Errno::EIO)?;
            batch.data.push((block, page.bytes.clone()));
            self.promised -= u64::from(page.promised);
            self.dirty -= 1;
            (page.dirty, page.promised) = (false, false);
        }
        if !wanting.is_empty() {
            self.touch(ino);
        }
        Ok(())
    }

    /// The body of an inode. Records that do not fit go to new blocks.
    fn encode(&mut self, ino: u64, batch: &mut Batch) -> Result<Vec<u8>> {
        let node = self.nodes.get_mut(&ino).ok_or(Errno::EIO)?;
        batch.freed.append(&mut node.records);
        let records = node.inode.records();
        if let Some(body) = node.inode.body(&records) {
            return Ok(body);
        }
        let mut blocks = Vec::new();
        let mut write = |space: &mut Space, content: &[u8]| -> Result<Pointer> {
            let near = blocks.last().map(|run: &Run| run.block);
            let run = space.take(1, near, 0).ok_or(Errno::EIO)?;
            blocks.push(run);
            let mut bytes = content.to_vec();
            bytes.resize(BLOCK, 0);
            let crc = crc32c::crc32c(&bytes);
            batch.data.push((run.block, bytes.into()));
            Ok(Pointer { block: run.block, crc })
        };
        let leaves = records.chunks(BLOCK).map(|leaf| write(&mut self.space, leaf));
        let mut pointers = leaves.collect::<Result<Vec<Pointer>>>()?;
        let mut levels = 1;
        if pointers.len() > POINTERS {
            levels = 2;
            let parts = pointers.chunks(POINTERS_OF_BLOCK);
            pointers = parts
                .map(|part| write(&mut self.space, &pointer_block(part)))
                .collect::<Result<Vec<Pointer>>>()?;
        }
        node.records = blocks;
        if pointers.len() > POINTERS {
            return Err(Errno::EIO);
        }
        Ok(node.inode.body_outside(levels, records.len() as u64, &pointers))
    }

    /// Gives blocks back whose inodes are durable without them.
    pub(crate) fn release(&mut self, freed: &[Run]) {
        self.releases += u64::from(!freed.is_empty());
        freed.iter().for_each(|run| self.space.free(*run));
    }

    /// Gives blocks back that durable inodes use: for tests of the rule that forbids it.
    pub(crate) fn release_at_once(&mut self) {
        let freed = std::mem::take(&mut self.freed);
        self.release(&freed);
    }

    /// How often blocks were given back.
    pub(crate) fn releases(&self) -> u64 {
        self.releases
    }

    /// The file system that these inodes are, and all that is wrong with it. `space` knows the units of
    /// inodes. What is wrong is left out.
    pub(crate) fn load(space: Space, next_ino: u64, loaded: Vec<Loaded>) -> (Tree, Vec<Problem>) {
        let mut tree = Tree::new(space);
        let mut problems = Vec::new();
        tree.next_ino = tree.next_ino.max(next_ino);
        let mut links = Vec::new();
        for Loaded { ino, inode, records } in loaded {
            let Some(kind) = FileKind::from_mode(inode.mode).filter(|kind| fits(*kind, &inode))
            else {
                problems.push(Problem::Kind { ino });
                continue;
            };
            let extents: &[Extent] = match &inode.data {
                Data::Extents(extents) => extents,
                _ => &[],
            };
            let blocks =
                extents.iter().map(|extent| Run::from(*extent)).chain(records.iter().copied());
            if blocks.filter(|run| !tree.space.claim(*run)).count() > 0 {
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
            tree.nodes.insert(ino, Node { inode, dir, records, lookups, ..Node::default() });
        }
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
