//! Names that clients with the same rights read from memory.
//!
//! A name is published with the versions of all items that it depends on, so that a client itself
//! sees if it still holds. The memory is for clients of one user with the same groups: a name that
//! was reported to one of them may be known to the others.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use defuse_connection::{LookupVersions, NameSource, PeerCredentials};
use defuse_fs::{Attr, Context, Errno, FileSystem, Ino, Name, Result, Xattr};
use defuse_ring::names::{
    ATTRIBUTES, AttributeStamp, FoundName, NAME_MAX, NameVersions, NameWriter, ResolvedName,
    SlotNumber,
};
use defuse_ring::versions::{VersionWriter, VersionedItem};
use defuse_wire::convert::encode_published_attr;
use defuse_wire::vendor::PublishedAttr;

/// The maximum number of name memories, of 16 MiB each; clients with other rights then have none.
const MOST: usize = 16;
/// The maximum number of name memories for one user, with several sets of groups.
const MOST_OF_USER: usize = 4;
/// The maximum number of names that lead to one inode: a change of its attributes is published in
/// all of them.
const MOST_OF_INODE: usize = 16;
/// Parts of the account of inodes.
const SHARDS: usize = 16;
/// The maximum number of directories between the root directory and an inode that a client names by
/// its number. A deeper inode needs a lookup.
const DEEPEST: usize = 256;

/// The name memories of one file system. Unused ones are kept until there are too many.
#[derive(Default)]
pub(crate) struct NameMemories(RwLock<Vec<Arc<NameMemory>>>);

/// The names for clients with the same rights.
pub(crate) struct NameMemory {
    uid: u32,
    groups: Vec<u32>,
    names: NameWriter,
    versions: Arc<VersionWriter>,
    /// The names that lead to each inode.
    inodes: [Mutex<HashMap<u64, InodePlaces>>; SHARDS],
}

/// The slots of the names of an inode; most inodes have one.
#[derive(Default)]
struct InodePlaces {
    first: Option<SlotNumber>,
    others: Vec<SlotNumber>,
}

impl InodePlaces {
    fn add(&mut self, place: SlotNumber) {
        assert!(self.first.is_some() || self.others.is_empty(), "the first slot is missing");
        match self.first {
            None => self.first = Some(place),
            Some(_) => self.others.push(place),
        }
    }

    /// Removes one of the names at `place`, and returns true if none is left.
    fn remove(&mut self, place: SlotNumber) -> bool {
        if self.first == Some(place) {
            self.first = self.others.pop();
        } else if let Some(at) = self.others.iter().position(|other| *other == place) {
            self.others.swap_remove(at);
        }
        assert!(self.first.is_some() || self.others.is_empty(), "the first slot is missing");
        self.first.is_none()
    }

    fn len(&self) -> usize {
        self.others.len() + usize::from(self.first.is_some())
    }

    fn slots(&self) -> impl Iterator<Item = SlotNumber> {
        self.first.into_iter().chain(self.others.iter().copied())
    }
}

impl NameMemories {
    /// The names for clients with these rights. `None` if there are too many, or no memory.
    pub(crate) fn memory_for(
        &self,
        who: &PeerCredentials,
        versions: &Arc<VersionWriter>,
    ) -> Option<Arc<NameMemory>> {
        let (uid, mut groups) = (who.uid, who.groups.clone());
        groups.sort_unstable();
        groups.dedup();
        let is_theirs =
            |name_memory: &&Arc<NameMemory>| name_memory.uid == uid && name_memory.groups == groups;
        if let Some(name_memory) = self.lock_memories().iter().find(is_theirs) {
            return Some(Arc::clone(name_memory));
        }
        let mut name_memories = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(name_memory) = name_memories.iter().find(is_theirs) {
            return Some(Arc::clone(name_memory));
        }
        let of_user = name_memories.iter().filter(|name_memory| name_memory.uid == uid).count();
        if of_user >= MOST_OF_USER || name_memories.len() >= MOST {
            let is_of_user =
                |name_memory: &NameMemory| of_user < MOST_OF_USER || name_memory.uid == uid;
            let unused = name_memories.iter().position(|name_memory| {
                Arc::strong_count(name_memory) == 1 && is_of_user(name_memory)
            })?;
            name_memories.remove(unused);
        }
        let names =
            NameWriter::new().map_err(|error| log::warn!("no names in memory: {error}")).ok()?;
        let inodes = std::array::from_fn(|_| Mutex::default());
        let name_memory = NameMemory { uid, groups, names, versions: Arc::clone(versions), inodes };
        name_memories.push(Arc::new(name_memory));
        assert!(name_memories.len() <= MOST, "there are {} name memories", name_memories.len());
        name_memories.last().cloned()
    }

    fn lock_memories(&self) -> RwLockReadGuard<'_, Vec<Arc<NameMemory>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a published name leads to the inode.
    pub(crate) fn has_name_of(&self, ino: Ino) -> bool {
        self.lock_memories()
            .iter()
            .any(|name_memory| name_memory.inodes(ino.0).contains_key(&ino.0))
    }

    /// Publishes the attributes of an inode, with the names that lead to it.
    pub(crate) fn publish_attributes(
        &self,
        versions: &VersionWriter,
        ino: Ino,
        (fs, cx): (&dyn FileSystem, &Context<'_>),
    ) {
        let Some(version) = versions.version_of(VersionedItem::Attributes(ino.0)) else { return };
        let moment = AttributeStamp::now(version);
        // Attributes that change meanwhile are newer than the version, with which no client uses
        // them.
        let Ok(attr) = fs.getattr(cx, ino, None) else { return };
        let attributes = encode_attributes(&attr, (fs, cx), ino);
        for name_memory in self.lock_memories().iter() {
            let inodes = name_memory.inodes(ino.0);
            for place in inodes.get(&ino.0).iter().flat_map(|places| places.slots()) {
                name_memory.names.publish_attributes(place, ino.0, moment, &attributes);
            }
        }
    }
}

/// Attributes as they lie beside a name.
fn encode_attributes(
    attr: &Attr,
    (fs, cx): (&dyn FileSystem, &Context<'_>),
    ino: Ino,
) -> [u8; ATTRIBUTES] {
    let mut stamps = encode_published_attr(attr);
    if fs.listxattr(cx, ino, 0) == Ok(Xattr::Size(0)) {
        stamps.flags |= PublishedAttr::NO_XATTRS;
    }
    zerocopy::transmute!(stamps)
}

impl NameMemory {
    /// The directories in which a name leads to an inode that still holds, with the rights to the
    /// directory.
    fn find_valid(&self, ino: u64) -> Vec<u64> {
        let inodes = self.inodes(ino);
        let places = inodes.get(&ino).into_iter().flat_map(|places| places.slots());
        let named = places.filter_map(|place| self.names.get(place, ino));
        named.filter(|named| self.holds(named)).map(|named| named.dir).collect()
    }

    fn holds(&self, named: &ResolvedName) -> bool {
        let version = |thing| self.versions.version_of(thing);
        version(VersionedItem::Name(named.dir, named.name())) == Some(named.stamps.name)
            && version(VersionedItem::Rights(named.dir)) == Some(named.stamps.rights)
    }

    fn inodes(&self, ino: u64) -> MutexGuard<'_, HashMap<u64, InodePlaces>> {
        self.inodes[ino as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for NameMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NameMemory({})", self.uid)
    }
}

impl NameSource for NameMemory {
    fn memory(&self) -> Result<OwnedFd> {
        self.names.reader().map_err(|error| Errno::from_raw(error.raw_os_error()))
    }

    fn versions_before(&self, (dir, name): (Ino, Name<'_>)) -> Option<LookupVersions> {
        let all = self.versions.global_version();
        let name = self.versions.version_of(VersionedItem::Name(dir.0, name.as_bytes()))?;
        let rights = self.versions.version_of(VersionedItem::Rights(dir.0))?;
        Some(LookupVersions { all, name, rights })
    }

    fn publish(
        &self,
        before: LookupVersions,
        (dir, name): (Ino, Name<'_>),
        inode: Option<(Ino, &Attr)>,
        open_to_all: bool,
        (fs, cx): (&dyn FileSystem, &Context<'_>),
    ) {
        let bytes = name.as_bytes();
        if bytes.len() > NAME_MAX {
            return;
        }
        let LookupVersions { all, name, rights } = before;
        // A name that has changed since has another version now, with which no client uses it.
        let mut stamps = NameVersions { name, rights, attributes: AttributeStamp::default() };
        let mut known = None;
        if let Some((ino, found)) = inode {
            let Some(version) = self.versions.version_of(VersionedItem::Attributes(ino.0)) else {
                return;
            };
            stamps.attributes = AttributeStamp::now(version);
            // Attributes that are read now have this version, or are newer and no client uses them
            // either.
            let same = all.is_some() && self.versions.global_version() == all;
            let attr = if same { Ok(*found) } else { fs.getattr(cx, ino, None) };
            let Ok(attr) = attr else { return };
            known = Some((ino.0, encode_attributes(&attr, (fs, cx), ino)));
        }
        let found = FoundName { stamps, open_to_all, inode: known };
        // A client that reads the name may name the inode. The account is locked, so that the next
        // change of the slot finds this inode there.
        let mut inodes = inode.map(|(ino, _)| self.inodes(ino.0));
        if let (Some(inodes), Some((ino, _))) = (&inodes, inode)
            && inodes.get(&ino.0).is_some_and(|places| places.len() >= MOST_OF_INODE)
        {
            return;
        }
        let (place, former) = self.names.publish(dir.0, bytes, &found);
        if let (Some(inodes), Some((ino, _))) = (&mut inodes, inode) {
            inodes.entry(ino.0).or_default().add(place);
        }
        drop(inodes);
        if former != 0 {
            let mut inodes = self.inodes(former);
            let places = inodes.get_mut(&former).expect("an inode with a name is counted");
            if places.remove(place) {
                inodes.remove(&former);
            }
        }
    }

    fn rights(&self, dir: Ino) -> Option<u64> {
        self.versions.version_of(VersionedItem::Rights(dir.0))
    }

    fn lead_to(&self, ino: Ino, holds: &dyn Fn(Ino) -> bool) -> bool {
        self.find_valid(ino.0).into_iter().any(|mut dir| {
            for _ in 0..DEEPEST {
                if dir == Ino::ROOT.0 || holds(Ino(dir)) {
                    return true;
                }
                // A directory has one name.
                let Some(&above) = self.find_valid(dir).first() else { return false };
                dir = above;
            }
            false
        })
    }
}
