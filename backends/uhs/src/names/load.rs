//! Names and attributes that were read from a device, and their possible faults.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::FileKind;
use hashbrown::HashTable;

use super::index::NameHash;
use super::order::RecordId;
use super::record::{DirectoryState, InodeRecord, LiveContent, RecordBody, RecordExtra, TimeKind};
use super::{LINK_MAX, NameStore, ROOT, settle};
use crate::content::{BlockPool, FileContent};
use crate::format::inode::{DiskExtent, DiskInode, DiskTime, InodeData, InodeLink};
use crate::format::{BLOCK, LAST};
use crate::locks::lock;
use crate::space::BlockRun;

/// An inode that was read.
pub(crate) struct LoadedInode {
    pub(crate) ino: u64,
    pub(crate) inode: DiskInode,
    /// Blocks with its records.
    pub(crate) records: Vec<BlockRun>,
}

/// An inconsistency in a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadProblem {
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
        /// The inode with the name.
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
    /// A directory with several names, or a file without a name or with too many.
    Names {
        /// The inode.
        ino: u64,
    },
    /// A position in a directory that leaves no room for further ones.
    Position {
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
    /// A slot cannot be read at all. It may hold the newest version of an unknown inode.
    Unreadable {
        /// The block of the slot.
        block: u64,
    },
    /// A list of removed inodes cannot be read: some of them may have reappeared.
    LostRemovals,
}

impl fmt::Display for LoadProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadProblem::NoRoot => f.write_str("there is no root directory"),
            LoadProblem::Kind { ino } => write!(f, "inode {ino}: its type and its data do not fit"),
            LoadProblem::Blocks { ino } => {
                write!(f, "inode {ino}: its blocks belong to another one, or do not exist")
            }
            LoadProblem::Stray { ino, parent } => {
                write!(f, "inode {ino}: a name in inode {parent}, which is no directory")
            }
            LoadProblem::Twice { ino, parent } => {
                write!(f, "inode {ino}: another one has its name in directory {parent}")
            }
            LoadProblem::Names { ino } => write!(f, "inode {ino}: a wrong number of names"),
            LoadProblem::Position { ino } => {
                write!(f, "inode {ino}: its place in listings leaves no room for new names")
            }
            LoadProblem::Loop { ino } => write!(f, "directory {ino}: not below the root"),
            LoadProblem::Damaged { ino } => write!(f, "inode {ino}: damaged"),
            LoadProblem::Unreadable { block } => write!(f, "block {block}: cannot be read"),
            LoadProblem::LostRemovals => f.write_str(
                "a list of removed inodes is damaged: files that were removed may be back",
            ),
        }
    }
}

/// Loads the inodes of a file system one after the other, by number.
pub(crate) struct InodeLoader {
    names: NameStore,
    pool: Arc<BlockPool>,
    problems: Vec<LoadProblem>,
    /// The names of all inodes so far.
    links: Vec<LoadedLink>,
    dirs: Vec<u64>,
}

/// A name that was read, with the facts about its inode that the directory needs.
struct LoadedLink {
    link: InodeLink,
    ino: u64,
    rid: RecordId,
    is_dir: bool,
    birth: DiskTime,
    /// The hash of the directory and the name.
    key: NameHash,
}

/// The names so far. A search in the index would compare each name with all names of its inode, and
/// a forged inode may have many.
struct LoadedNames<'a> {
    places: HashTable<usize>,
    links: &'a [LoadedLink],
}

impl LoadedNames<'_> {
    /// True if no name before the name at `at` is equal to it. Records the name as seen then.
    fn is_new(&mut self, at: usize) -> bool {
        let links = self.links;
        let name = |at: usize| (links[at].link.parent, &links[at].link.name);
        let hash = |at: &usize| links[*at].key.all_bits();
        let is_new = self.places.find(hash(&at), |other| name(*other) == name(at)).is_none();
        if is_new {
            self.places.insert_unique(hash(&at), at, hash);
        }
        is_new
    }
}

impl InodeLoader {
    /// Makes a loader without inodes. `pool` knows the units of inodes.
    pub(crate) fn begin(pool: Arc<BlockPool>, next_ino: u64) -> InodeLoader {
        let names = NameStore::new(Arc::clone(&pool));
        names.next_ino.fetch_max(next_ino, Ordering::Relaxed);
        let (problems, links, dirs) = (Vec::new(), Vec::new(), Vec::new());
        InodeLoader { names, pool, problems, links, dirs }
    }

    /// Adds an inode. `pool` already knows the blocks of its records. Faulty parts are left out.
    pub(crate) fn add(&mut self, LoadedInode { ino, mut inode, records }: LoadedInode) {
        let Some(kind) = FileKind::from_mode(inode.mode).filter(|kind| fits(*kind, &inode)) else {
            self.problems.push(LoadProblem::Kind { ino });
            return;
        };
        if let InodeData::Extents(extents) = &inode.data {
            let mut space = self.pool.space();
            let mut blocks = extents.iter().map(|extent| BlockRun::from(*extent));
            if !blocks.all(|run| space.claim_until_used(run)) {
                self.problems.push(LoadProblem::Blocks { ino });
                return;
            }
        }
        let count = inode.links.len();
        let is_dir = kind == FileKind::Directory;
        let has_few = count <= if is_dir { 1 } else { LINK_MAX };
        if (ino == ROOT) != (count == 0) || !has_few || ino == ROOT && !is_dir {
            self.problems.push(LoadProblem::Names { ino });
        }
        // Every directory has at most one name, and the root has none, so that no walk from the
        // root meets a directory twice.
        match (ino, is_dir) {
            (ROOT, _) => inode.links.clear(),
            (_, true) => inode.links.truncate(1),
            _ => inode.links.truncate(LINK_MAX),
        }
        self.dirs.extend(is_dir.then_some(ino));
        let (links, birth) = (inode.links.clone(), inode.btime);
        let rid = self.names.add_loaded(ino, inode, records);
        let index = &self.names.index;
        let named = |link: InodeLink| {
            let key = index.key(link.parent, &link.name);
            LoadedLink { link, ino, rid, is_dir, birth, key }
        };
        self.links.extend(links.into_iter().map(named));
    }

    /// Returns the file system of these inodes, and all its problems.
    pub(crate) fn end(self) -> (NameStore, Vec<LoadProblem>) {
        let InodeLoader { names, mut problems, mut links, dirs, .. } = self;
        links.sort_unstable_by_key(|named| (named.link.stamp, named.ino));
        let last = links.last().map_or(0, |named| named.link.stamp);
        names.next_stamp.fetch_max(last.saturating_add(1), Ordering::Relaxed);
        // A new entry does not write the slot of its directory.
        let mut newest: HashMap<u64, DiskTime> = HashMap::new();
        let mut seen = LoadedNames { places: HashTable::with_capacity(links.len()), links: &links };
        for (at, named) in links.iter().enumerate() {
            let LoadedLink { link: InodeLink { parent, stamp, .. }, ino, .. } = named;
            if *stamp >= LAST {
                problems.push(LoadProblem::Position { ino: *ino });
            }
            match names.add_loaded_link(named, seen.is_new(at)) {
                None => {
                    let birth = newest.entry(*parent).or_insert(named.birth);
                    *birth = named.birth.max(*birth);
                }
                Some(problem) => problems.push(problem),
            }
        }
        newest.into_iter().for_each(|(dir, birth)| names.is_as_new_as(dir, birth));
        match dirs.contains(&ROOT) {
            true => {
                problems.extend(
                    names.find_loops(&dirs).into_iter().map(|ino| LoadProblem::Loop { ino }),
                );
            }
            false => problems.push(LoadProblem::NoRoot),
        }
        (names, problems)
    }
}

impl NameStore {
    pub(super) fn add_loaded(
        &self,
        ino: u64,
        inode: DiskInode,
        records: Vec<BlockRun>,
    ) -> RecordId {
        let DiskInode { mode, uid, gid, rdev, size, links, xattrs, data, .. } = inode;
        let is_dir = FileKind::from_mode(mode) == Some(FileKind::Directory);
        let content = FileContent::new(data, size);
        let mut held = lock(&content);
        let extra = RecordExtra::from_loaded(&links, xattrs);
        held.load_records(&self.pool, records, extra.bytes());
        let short = if extra.may_be_large() || is_dir { None } else { held.retire(&self.pool) };
        let facts = held.summarize();
        let blocks = facts.blocks;
        drop(held);
        let body = match short {
            _ if is_dir => RecordBody::Directory(Arc::new(DirectoryState {
                content,
                ..DirectoryState::default()
            })),
            None => RecordBody::Live(Arc::new(LiveContent::new(content, blocks, rdev))),
            Some(data) => RecordBody::from_data(&data, rdev),
        };
        let mut record = InodeRecord::new(ino, mode, (uid, gid), body);
        record.size = size;
        let rid = self.records.insert(record);
        let times = [
            (TimeKind::Access, inode.atime),
            (TimeKind::Modification, inode.mtime),
            (TimeKind::Change, inode.ctime),
            (TimeKind::Birth, inode.btime),
        ];
        let _ = self.records.change(ino, |mut changing| {
            settle(&mut changing, facts);
            if let Some(link) = links.first() {
                changing.add_link(link.parent, link.stamp, &link.name);
            }
            if extra.may_be_large() {
                *changing.make_extra() = extra;
            }
            times.into_iter().for_each(|(time, moment)| changing.set_time(time, moment));
            Ok(())
        });
        rid
    }

    /// Enters a name into its directory, if it is `new`.
    fn add_loaded_link(&self, named: &LoadedLink, new: bool) -> Option<LoadProblem> {
        let LoadedLink { link: InodeLink { parent, stamp, .. }, ino, rid, is_dir, key, .. } = named;
        let (parent, ino) = (*parent, *ino);
        let Ok(dir) = self.directory(parent) else {
            return Some(LoadProblem::Stray { ino, parent });
        };
        let mut entries = lock(&dir.entries);
        if !new || entries.has(*stamp) {
            return Some(LoadProblem::Twice { ino, parent });
        }
        self.index.write(*key).insert(*key, *rid);
        entries.push(*stamp, *rid);
        dir.count.fetch_add(1, Ordering::Relaxed);
        dir.subdirs.fetch_add((*is_dir).into(), Ordering::Relaxed);
        None
    }

    /// Records that the names of a directory changed at `birth`, unless it has a later change.
    fn is_as_new_as(&self, dir: u64, birth: DiskTime) {
        let _ = self.records.change(dir, |mut changing| {
            for time in [TimeKind::Modification, TimeKind::Change] {
                if changing.record.time(time, changing.extra()) < birth {
                    changing.set_time(time, birth);
                }
            }
            Ok(())
        });
    }

    /// Directories whose parents do not lead to the root.
    pub(super) fn find_loops(&self, dirs: &[u64]) -> Vec<u64> {
        let parent = |ino: u64| self.records.with_inode(ino, |record, _| Ok(record.parent)).ok();
        find_detached(dirs, parent)
    }
}

/// The directories in `dirs` from which `parent` does not lead to the root. `parent` is called once
/// for each directory.
fn find_detached(dirs: &[u64], parent: impl Fn(u64) -> Option<u64>) -> Vec<u64> {
    let mut known: HashMap<u64, bool> = HashMap::from([(ROOT, true)]);
    let (mut bad, mut path) = (Vec::new(), Vec::new());
    for start in dirs {
        let mut at = *start;
        let is_below = loop {
            if let Some(is_below) = known.get(&at) {
                break *is_below;
            }
            // A walk that reaches this inode again has met a loop.
            known.insert(at, false);
            path.push(at);
            match parent(at) {
                None | Some(0) => break false,
                Some(parent) => at = parent,
            }
        };
        if is_below {
            known.extend(path.iter().map(|ino| (*ino, true)));
        } else {
            bad.push(*start);
        }
        path.clear();
    }
    bad
}

/// True if data of this form is valid for an inode of this type.
pub(crate) fn fits(kind: FileKind, inode: &DiskInode) -> bool {
    match (kind, &inode.data) {
        (FileKind::Regular, InodeData::Inline(bytes)) => bytes.len() as u64 == inode.size,
        (FileKind::Regular, InodeData::Extents(extents)) => {
            inode.size <= i64::MAX as u64 && extents.last().is_none_or(is_within_a_file)
        }
        (FileKind::Symlink, InodeData::Target(target)) => target.len() as u64 == inode.size,
        (FileKind::Regular | FileKind::Symlink, _) => false,
        (_, data) => *data == InodeData::Nothing,
    }
}

/// True if a file can be so long that it has these pages.
pub(crate) fn is_within_a_file(extent: &DiskExtent) -> bool {
    extent.end() <= (i64::MAX as u64).div_ceil(BLOCK as u64)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::names::make::compared_names;
    use crate::space::BlockSpace;

    /// A chain of directories: in order, in reverse order, and one that leads nowhere. The time
    /// grew with the square of its length: an image of 114 MB kept a mount for half a minute.
    #[test]
    fn the_way_to_the_root_is_walked_once_from_each_directory() {
        let (mut steps, top) = (Vec::new(), 2);
        for length in [1000, 8000] {
            let up: Vec<u64> = (top..top + length).collect();
            let down: Vec<u64> = up.iter().rev().copied().collect();
            for (dirs, end) in [(&up, ROOT), (&down, ROOT), (&up, 0), (&down, 0), (&up, top + 9)] {
                let requested = Cell::new(0);
                let parent = |ino: u64| {
                    requested.set(requested.get() + 1);
                    Some(if ino == top { end } else { ino - 1 })
                };
                let bad = find_detached(dirs, parent);
                assert_eq!(bad.len() as u64, if end == ROOT { 0 } else { length });
                assert!(requested.get() <= length, "{} steps for {length}", requested.get());
                steps.push(requested.get());
            }
        }
        assert_eq!(steps.len(), 10);
    }

    fn inode(kind: FileKind, links: Vec<InodeLink>) -> DiskInode {
        let data = if kind == FileKind::Regular {
            InodeData::Inline(Vec::new())
        } else {
            InodeData::Nothing
        };
        DiskInode { mode: kind.mode_bits() | 0o644, links, data, ..DiskInode::default() }
    }

    fn make_link(stamp: u64, name: &str) -> InodeLink {
        InodeLink { parent: ROOT, stamp, name: name.into() }
    }

    fn load(inodes: Vec<DiskInode>) -> (NameStore, Vec<LoadProblem>) {
        let pool = Arc::new(BlockPool::new(BlockSpace::new(64)));
        let mut loading = InodeLoader::begin(pool, 1000);
        loading.add(LoadedInode {
            ino: ROOT,
            inode: inode(FileKind::Directory, Vec::new()),
            records: Vec::new(),
        });
        for (ino, inode) in (2..).zip(inodes) {
            loading.add(LoadedInode { ino, inode, records: Vec::new() });
        }
        loading.end()
    }

    /// Each name that several inodes have was compared with all names of its inode: an image of 50
    /// MB kept a mount for 24 minutes.
    #[test]
    fn names_that_many_inodes_have_are_not_compared_with_all_names_of_one() {
        let (many, others) = (2000, 500);
        let first: Vec<InodeLink> =
            (0..many).map(|at| make_link(3 + at, &at.to_string())).collect();
        let last = (many - 1).to_string();
        let mut inodes = vec![inode(FileKind::Regular, first)];
        let other = |at: u64| inode(FileKind::Regular, vec![make_link(3 + many + at, &last)]);
        inodes.extend((0..others).map(other));
        let before = compared_names();
        let (_, problems) = load(inodes);
        assert_eq!(problems.len() as u64, others);
        assert!(problems.iter().all(|problem| matches!(problem, LoadProblem::Twice { .. })));
        let compared = compared_names() - before;
        assert!(compared <= many + others, "{compared} names were compared");
    }

    #[test]
    fn an_inode_with_more_names_than_there_may_be_is_a_problem() {
        let links =
            |count: usize| (0..count as u64).map(|at| make_link(3 + at, &at.to_string())).collect();
        let most = inode(FileKind::Regular, links(LINK_MAX));
        assert_eq!(load(vec![most]).1, []);
        let (names, problems) = load(vec![inode(FileKind::Regular, links(LINK_MAX + 5))]);
        assert_eq!(problems, [LoadProblem::Names { ino: 2 }]);
        assert_eq!(names.attr(2, std::time::Duration::ZERO).unwrap().nlink as usize, LINK_MAX);
    }

    #[test]
    fn an_extent_behind_the_end_of_the_longest_file_is_a_problem() {
        let last = (i64::MAX as u64).div_ceil(BLOCK as u64);
        for (page, is_sound) in [(last - 1, true), (last, false), (1 << 60, false)] {
            let extent = DiskExtent { page, block: 5000, count: 1, unwritten: false };
            let file = inode(FileKind::Regular, vec![make_link(3, "file")]);
            let file = DiskInode { data: InodeData::Extents(vec![extent]), size: 1, ..file };
            let problems = load(vec![file]).1;
            assert_eq!(problems.is_empty(), is_sound, "page {page}: {problems:?}");
        }
    }
}
