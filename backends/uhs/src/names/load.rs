//! Names and attributes as they were read from a device, and what can be wrong with them.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::FileKind;

use super::order::Rid;
use super::record::{Body, Directory, Extra, Live, Record, Time};
use super::{Names, ROOT, settle};
use crate::content::{Content, Pool};
use crate::engine::lock;
use crate::format::inode::{Data, Inode, Link, Moment};
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

/// A file system of which inodes are read one after the other, by number.
pub(crate) struct Loading {
    names: Names,
    pool: Arc<Pool>,
    problems: Vec<Problem>,
    /// The names of all inodes so far.
    links: Vec<Named>,
    dirs: Vec<u64>,
}

/// A name that was read, with what its directory has to know of the inode.
struct Named {
    link: Link,
    ino: u64,
    rid: Rid,
    is_dir: bool,
    birth: Moment,
}

impl Loading {
    /// One without inodes. `pool` knows the units of inodes.
    pub(crate) fn begin(pool: Arc<Pool>, next_ino: u64) -> Loading {
        let names = Names::new(Arc::clone(&pool));
        names.next_ino.fetch_max(next_ino, Ordering::Relaxed);
        let (problems, links, dirs) = (Vec::new(), Vec::new(), Vec::new());
        Loading { names, pool, problems, links, dirs }
    }

    /// Adds an inode, of which `pool` knows the blocks of records. What is wrong is left out.
    pub(crate) fn add(&mut self, Loaded { ino, mut inode, records }: Loaded) {
        let Some(kind) = FileKind::from_mode(inode.mode).filter(|kind| fits(*kind, &inode)) else {
            self.problems.push(Problem::Kind { ino });
            return;
        };
        if let Data::Extents(extents) = &inode.data {
            let mut space = self.pool.space();
            let blocks = extents.iter().map(|extent| Run::from(*extent));
            if blocks.filter(|run| !space.claim(*run)).count() > 0 {
                self.problems.push(Problem::Blocks { ino });
                return;
            }
        }
        let count = inode.links.len();
        let is_dir = kind == FileKind::Directory;
        if (ino == ROOT) != (count == 0) || is_dir && count > 1 || ino == ROOT && !is_dir {
            self.problems.push(Problem::Names { ino });
        }
        // With one name at most, and none of the root, no walk from the root meets a directory twice.
        match (ino, is_dir) {
            (ROOT, _) => inode.links.clear(),
            (_, true) => inode.links.truncate(1),
            _ => {}
        }
        self.dirs.extend(is_dir.then_some(ino));
        let (links, birth) = (inode.links.clone(), inode.btime);
        let rid = self.names.add_loaded(ino, inode, records);
        let named = |link| Named { link, ino, rid, is_dir, birth };
        self.links.extend(links.into_iter().map(named));
    }

    /// The file system that these inodes are, and all that is wrong with it.
    pub(crate) fn end(self) -> (Names, Vec<Problem>) {
        let Loading { names, mut problems, mut links, dirs, .. } = self;
        links.sort_unstable_by_key(|named| (named.link.stamp, named.ino));
        let last = links.last().map_or(0, |named| named.link.stamp);
        names.next_stamp.fetch_max(last.saturating_add(1), Ordering::Relaxed);
        // A new entry does not write the slot of its directory.
        let mut newest: HashMap<u64, Moment> = HashMap::new();
        for named in links {
            match names.add_loaded_link(&named) {
                None => {
                    let birth = newest.entry(named.link.parent).or_insert(named.birth);
                    *birth = named.birth.max(*birth);
                }
                Some(problem) => problems.push(problem),
            }
        }
        newest.into_iter().for_each(|(dir, birth)| names.is_as_new_as(dir, birth));
        match dirs.contains(&ROOT) {
            true => {
                problems.extend(names.loops(&dirs).into_iter().map(|ino| Problem::Loop { ino }));
            }
            false => problems.push(Problem::NoRoot),
        }
        (names, problems)
    }
}

impl Names {
    pub(super) fn add_loaded(&self, ino: u64, inode: Inode, records: Vec<Run>) -> Rid {
        let Inode { mode, uid, gid, rdev, size, links, xattrs, data, .. } = inode;
        let is_dir = FileKind::from_mode(mode) == Some(FileKind::Directory);
        let content = Content::new(data, size);
        let mut held = lock(&content);
        let extra = Extra::loaded(&links, xattrs);
        held.load_records(&self.pool, records, extra.bytes());
        let short = if extra.may_be_large() || is_dir { None } else { held.retire(&self.pool) };
        let facts = held.facts();
        let blocks = facts.blocks;
        drop(held);
        let body = match short {
            _ if is_dir => Body::Directory(Arc::new(Directory { content, ..Directory::default() })),
            None => Body::Live(Arc::new(Live::new(content, blocks, rdev))),
            Some(data) => Body::short(&data, rdev),
        };
        let mut record = Record::new(ino, mode, (uid, gid), body);
        record.size = size;
        let rid = self.records.insert(record);
        let times = [
            (Time::Access, inode.atime),
            (Time::Modification, inode.mtime),
            (Time::Change, inode.ctime),
            (Time::Birth, inode.btime),
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

    /// Enters a name into its directory.
    fn add_loaded_link(&self, named: &Named) -> Option<Problem> {
        let Named { link: Link { parent, stamp, name }, ino, rid, is_dir, .. } = named;
        let (parent, ino) = (*parent, *ino);
        let Ok(dir) = self.directory(parent) else { return Some(Problem::Stray { ino, parent }) };
        let key = self.index.key(parent, name);
        let mut entries = lock(&dir.entries);
        let mut part = self.index.write(key);
        if self.find(&part, key, parent, name).is_some() || entries.has(*stamp) {
            return Some(Problem::Twice { ino, parent });
        }
        part.insert(key, *rid);
        entries.push(*stamp, *rid);
        dir.count.fetch_add(1, Ordering::Relaxed);
        dir.subdirs.fetch_add((*is_dir).into(), Ordering::Relaxed);
        None
    }

    /// The names of a directory changed at `birth`, if it does not know a later change.
    fn is_as_new_as(&self, dir: u64, birth: Moment) {
        let _ = self.records.change(dir, |mut changing| {
            for time in [Time::Modification, Time::Change] {
                if changing.record.time(time, changing.extra()) < birth {
                    changing.set_time(time, birth);
                }
            }
            Ok(())
        });
    }

    /// Directories from which the parents do not lead to the root.
    pub(super) fn loops(&self, dirs: &[u64]) -> Vec<u64> {
        let mut good: BTreeSet<u64> = BTreeSet::from([ROOT]);
        let mut bad = Vec::new();
        for start in dirs {
            let mut path = BTreeSet::new();
            let mut at = *start;
            while !good.contains(&at) && path.insert(at) {
                match self.records.see(at, |record, _| Ok(record.parent)) {
                    Ok(0) | Err(_) => break,
                    Ok(parent) => at = parent,
                }
            }
            match good.contains(&at) {
                true => good.append(&mut path),
                false => bad.push(*start),
            }
        }
        bad
    }
}

/// True where the data is that of an inode of this type.
pub(crate) fn fits(kind: FileKind, inode: &Inode) -> bool {
    match (kind, &inode.data) {
        (FileKind::Regular, Data::Inline(bytes)) => bytes.len() as u64 == inode.size,
        (FileKind::Regular, Data::Extents(_)) => inode.size <= i64::MAX as u64,
        (FileKind::Symlink, Data::Target(target)) => target.len() as u64 == inode.size,
        (FileKind::Regular | FileKind::Symlink, _) => false,
        (_, data) => *data == Data::Nothing,
    }
}
