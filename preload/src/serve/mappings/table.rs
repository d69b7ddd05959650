//! The shared mappings of this process, and its private mappings of a server's memory, by address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::{Caller, Errno, Ino};

use crate::process::compose::RelayFileSystem;
use crate::process::state;
use crate::process::table::DescriptorEntry;
use crate::serve::mappings::lost::report_lost_store;

pub const PAGE: u64 = 4096;

/// A mapping.
#[derive(Clone)]
pub struct ProgramMapping {
    pub len: usize,
    pub offset: u64,
    // Dropped before the open file, by which the server knows the rights to map.
    pub kind: MappingKind,
    pub entry: Arc<DescriptorEntry>,
    /// The file, by device and number.
    pub file: (u64, u64),
    /// The memory belongs to the file, and is writable, or was so.
    pub stores: bool,
    /// It may become so.
    pub may_store: bool,
    /// The program knows that stores are not in the file: the last msync(2) has failed.
    pub is_reported: bool,
}

/// The memory of a mapping.
#[derive(Clone)]
pub enum MappingKind {
    /// Memory of this process and its forked children. It is written back.
    Copy,
    /// Memory that all processes share.
    Served(Arc<MappingUse>),
}

/// A mapping that is registered with the server of the mount until its last part is unmapped.
pub struct MappingUse {
    /// The server, until the end of the mapping was reported to it.
    relay: Option<Arc<RelayFileSystem>>,
    ino: Ino,
}

impl MappingUse {
    /// The use of a mapping that the server has made.
    pub fn new(relay: &Arc<RelayFileSystem>, ino: Ino) -> Arc<MappingUse> {
        Arc::new(MappingUse { relay: Some(Arc::clone(relay)), ino })
    }

    /// Ends it. Fails if the server cannot write to the file what was stored.
    pub fn end(&mut self) -> Result<(), Errno> {
        self.relay.take().map_or(Ok(()), |relay| relay.unmap(caller(), self.ino))
    }
}

impl Drop for MappingUse {
    fn drop(&mut self) {
        // A mapping that could not be made, or part of a change of one that goes on.
        let _ = self.end();
    }
}

impl ProgramMapping {
    /// The address of `len` bytes from `offset` of `file` in this mapping, which begins at `at`.
    pub fn find(&self, at: u64, file: (u64, u64), offset: u64, len: usize) -> Option<u64> {
        let from = offset.checked_sub(self.offset)?;
        let is_copy = matches!(self.kind, MappingKind::Copy);
        let fits = is_copy && self.file == file && from.checked_add(len as u64)? <= self.len as u64;
        fits.then_some(at + from)
    }

    fn overlaps(&self, at: u64, (from, end): (u64, u64)) -> bool {
        at < end && at + self.len as u64 > from
    }
}

/// The user of this thread, for the server.
pub fn caller() -> Caller {
    let caller = state::get().map(|process| {
        let who = process.task().credentials();
        Caller { uid: who.uid, gid: who.gid, pid: who.pid }
    });
    caller.unwrap_or_default()
}

static ALL: Mutex<BTreeMap<u64, ProgramMapping>> = Mutex::new(BTreeMap::new());

/// All mappings, by first address.
pub fn mappings() -> MutexGuard<'static, BTreeMap<u64, ProgramMapping>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a mapping.
pub fn note(at: u64, mapping: ProgramMapping) {
    mappings().insert(at, mapping);
}

/// Notes that the program makes memory from `from` to `end` writable.
pub fn note_writable(from: u64, end: u64) {
    for (&at, mapping) in mappings().iter_mut() {
        mapping.stores |= mapping.may_store && mapping.overlaps(at, (from, end));
    }
}

/// Notes if the program has learned of stores from `from` to `end` that are not in the file.
pub fn set_reported(from: u64, end: u64, is_reported: bool) {
    for (&at, mapping) in mappings().iter_mut() {
        if mapping.overlaps(at, (from, end)) {
            mapping.is_reported = is_reported;
        }
    }
}

/// Notes for all mappings of an open file that the program has learned of lost stores.
pub fn set_reported_of(entry: &DescriptorEntry) {
    for mapping in mappings().values_mut() {
        mapping.is_reported |= Arc::ptr_eq(mapping.entry.file(), entry.file());
    }
}

/// True if the program has learned of all lost stores from `from` to `end`.
pub fn is_reported(from: u64, end: u64) -> bool {
    let all = mappings();
    let mut stores =
        all.iter().filter(|(at, mapping)| mapping.stores && mapping.overlaps(**at, (from, end)));
    stores.all(|(_, mapping)| mapping.is_reported)
}

/// A mapping of a server's memory that the program may have stored to.
pub struct StoredMapping {
    pub at: u64,
    pub len: usize,
    pub entry: Arc<DescriptorEntry>,
}

/// The mappings with stores from `from` to `end`.
pub fn served_stores(from: u64, end: u64) -> Vec<StoredMapping> {
    let all = mappings();
    let hit = all.iter().filter(|(at, mapping)| {
        let is_served = matches!(mapping.kind, MappingKind::Served(_));
        is_served && mapping.stores && mapping.overlaps(**at, (from, end))
    });
    let stored = hit.map(|(&at, mapping)| {
        let (len, entry) = (mapping.len, Arc::clone(&mapping.entry));
        StoredMapping { at, len, entry }
    });
    stored.collect()
}

/// Removes `from..end` from the mappings. Lost stores are reported to the program.
pub fn forget(from: u64, end: u64) {
    // Servers are notified after the lock is released.
    let mut gone = Vec::new();
    let mut all = mappings();
    let hit =
        |(&at, mapping): (&u64, &ProgramMapping)| mapping.overlaps(at, (from, end)).then_some(at);
    let places: Vec<u64> = all.iter().filter_map(hit).collect();
    for at in places {
        let Some(mapping) = all.remove(&at) else { continue };
        let last = at + mapping.len as u64;
        if last > end {
            let (offset, len) = (mapping.offset + (end - at), (last - end) as usize);
            all.insert(end, ProgramMapping { len, offset, ..mapping.clone() });
        }
        if at < from {
            all.insert(at, ProgramMapping { len: (from - at) as usize, ..mapping });
        } else {
            gone.push((at, mapping));
        }
    }
    drop(all);
    for (at, mapping) in gone {
        let ProgramMapping { kind: MappingKind::Served(used), stores, is_reported, entry, .. } =
            mapping
        else {
            continue;
        };
        let ended = Arc::into_inner(used).map_or(Ok(()), |mut used| used.end());
        drop(entry);
        if let Err(errno) = ended
            && !is_reported
        {
            report_lost_store(errno, at, stores);
        }
    }
}
