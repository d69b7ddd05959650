//! The bodies of inodes: bodies that a scan keeps, and bodies that are read a second time.
//!
//! A scan keeps the bodies that a mount needs, up to a bound
//! ([`CommitRules::kept`](crate::commit::CommitRules)): only its end shows which inodes count, and
//! if there is memory for their index. The other bodies are read again by number, some thousand
//! inodes at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use defuse_block::{BlockDevice, BlockingQueue, Errno, FRAME};
use defuse_fs::source::NoWatch;

use super::error::{StoreError, device_error};
use super::scan::{BodyRetention, ScanRange, SlotSurvey, gather_limit, scan};
use crate::format::inode::DiskInode;
use crate::format::slot::{self, FoundSlot};

/// Inodes that are read again at a time. Their bodies have 64 MiB at most.
const BATCH: usize = 16 * 1024;

/// The longest gap between two wanted blocks that is read rather than skipped.
const BRIDGED: u64 = 16;

/// Bytes that a thread takes from the budget at a time.
const GRANT: u64 = 64 * 1024;

/// Bytes that all threads of a scan may still keep.
pub(super) struct ScanBudget(pub(super) AtomicU64);

/// Bodies, one after the other.
#[derive(Default)]
pub(super) struct ScannedBodies {
    all: Vec<ScannedBody>,
    bytes: Vec<u8>,
    /// Bytes that were taken from the budget and not used.
    granted: u64,
    /// The budget is used up.
    is_full: bool,
}

/// A body within the bytes.
struct ScannedBody {
    ino: u64,
    block: u64,
    start: usize,
    len: u16,
    /// Bytes of inline data at the end that were not kept.
    left_out: u16,
}

/// An inode with its current copy.
struct CurrentInode<'a> {
    ino: u64,
    block: u64,
    /// Its body, if that was kept.
    kept: Option<(&'a ScannedBodies, &'a ScannedBody)>,
}

impl ScanBudget {
    /// Takes `bytes`, or the rest of the budget.
    fn take(&self, bytes: u64) -> u64 {
        let take = |left: u64| Some(left.saturating_sub(bytes));
        let left = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        left.map_or(0, |left| left.min(bytes))
    }
}

impl ScannedBodies {
    /// Keeps a body without its inline data while there is room.
    pub(super) fn keep_some(&mut self, budget: &ScanBudget, ino: u64, block: u64, body: &[u8]) {
        if self.is_full {
            return;
        }
        let bytes = (DiskInode::length_without_data(body) + size_of::<ScannedBody>()) as u64;
        if self.granted < bytes {
            self.granted += budget.take(GRANT.max(bytes));
        }
        if self.granted < bytes {
            self.is_full = true;
            return;
        }
        self.granted -= bytes;
        self.keep(ino, block, body, false);
    }

    /// Keeps a body, `whole` or without its inline data.
    pub(super) fn keep(&mut self, ino: u64, block: u64, body: &[u8], whole: bool) {
        let len = if whole { body.len() } else { DiskInode::length_without_data(body) };
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&body[..len]);
        // A slot has 4 KiB.
        let (len, left_out) = (len as u16, (body.len() - len) as u16);
        self.all.push(ScannedBody { ino, block, start, len, left_out });
    }

    fn bytes(&self, body: &ScannedBody) -> &[u8] {
        &self.bytes[body.start..][..usize::from(body.len)]
    }
}

impl SlotSurvey {
    /// Calls `see` with the bodies of all current inodes, by number. Unless `whole` is set, inline
    /// data of an inode with one name and nothing else is replaced by zeros.
    ///
    /// # Errors
    ///
    /// Fails with the errors of `see`, and with a failure of the device.
    pub(crate) fn for_each_body(
        &self,
        device: &dyn BlockDevice,
        whole: bool,
        mut see: impl FnMut(u64, &[u8]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut bytes = Vec::new();
        for batch in self.collect_current(whole).chunks(BATCH) {
            let missing = batch.iter().filter(|inode| inode.kept.is_none());
            let mut missing: Vec<u64> = missing.map(|inode| inode.block).collect();
            missing.sort_unstable();
            let again = self.read_again(device, &missing, whole)?;
            let mut places: Vec<(u64, u64, (&ScannedBodies, &ScannedBody))> = again
                .iter()
                .flat_map(|bodies| bodies.all.iter().map(move |body| (bodies, body)))
                .map(|(bodies, body)| (body.block, body.ino, (bodies, body)))
                .collect();
            places.sort_unstable_by_key(|(block, ino, _)| (*block, *ino));
            for CurrentInode { ino, block, kept } in batch {
                let key = (*block, *ino);
                let place = || places.binary_search_by_key(&key, |(block, ino, _)| (*block, *ino));
                let (bodies, body) = match kept {
                    Some(kept) => *kept,
                    // The slot was whole a moment before.
                    None => place().map(|at| places[at].2).map_err(|_| lost_body_error())?,
                };
                bytes.clear();
                bytes.extend_from_slice(bodies.bytes(body));
                bytes.resize(bytes.len() + usize::from(body.left_out), 0);
                see(*ino, &bytes)?;
            }
        }
        Ok(())
    }

    /// Drops the kept bodies, which are not needed any more.
    pub(crate) fn forget_bodies(&mut self) {
        self.bodies = Vec::new();
    }

    /// The current inodes, by number, with the bodies that were kept in the requested form.
    fn collect_current(&self, whole: bool) -> Vec<CurrentInode<'_>> {
        let live = self.found.live.iter();
        let mut counting: Vec<CurrentInode<'_>> = live
            .map(|(ino, version)| CurrentInode { ino: *ino, block: version.block, kept: None })
            .collect();
        counting.sort_unstable_by_key(|inode| inode.ino);
        let mut kept: Vec<(u64, (&ScannedBodies, &ScannedBody))> = Vec::new();
        for bodies in &self.bodies {
            let counts = |body: &&ScannedBody| {
                let live = self.found.live.get(&body.ino);
                live.is_some_and(|version| version.block == body.block)
            };
            let wanted = bodies.all.iter().filter(|body| !whole || body.left_out == 0);
            kept.extend(wanted.filter(counts).map(|body| (body.ino, (bodies, body))));
        }
        kept.sort_unstable_by_key(|(ino, _)| *ino);
        let mut kept = kept.into_iter().peekable();
        for inode in &mut counting {
            inode.kept = kept.next_if(|(ino, _)| *ino == inode.ino).map(|(_, body)| body);
        }
        counting
    }

    /// Reads the bodies of the slots in these blocks, in ascending order. Neighbours are read
    /// together.
    fn read_again(
        &self,
        device: &dyn BlockDevice,
        blocks: &[u64],
        whole: bool,
    ) -> Result<Vec<ScannedBodies>, StoreError> {
        if blocks.is_empty() {
            return Ok(Vec::new());
        }
        let most = gather_limit(device, &self.superblock);
        let mut pieces: Vec<ScanRange> = Vec::new();
        for block in blocks {
            let key = self.identity_at(*block).ok_or_else(lost_body_error)?.key;
            if let Some(last) = pieces.last_mut()
                && last.key == key
                && block - last.block < most
                && block - (last.block + last.blocks) < BRIDGED
            {
                last.blocks = block + 1 - last.block;
                continue;
            }
            pieces.push(ScanRange { block: *block, blocks: 1, key });
        }
        let keeps = BodyRetention::These(blocks, whole);
        // The scan is quick, and the watch of the caller already shows the number of loaded inodes.
        let parts = scan(device, &self.superblock, &pieces, keeps, &NoWatch)?;
        Ok(parts.into_iter().map(|part| part.bodies).collect())
    }

    /// The body of the inode in the slot at `block`; `None` if the slot is not whole.
    pub(crate) fn read(&self, line: &mut BlockingQueue, block: u64) -> Option<Vec<u8>> {
        let mut bytes = [0; FRAME];
        line.read(block, &mut bytes).ok()?;
        match slot::decode(&bytes, &self.identity_at(block)?) {
            FoundSlot::Whole(_, body) => Some(body.to_vec()),
            _ => None,
        }
    }

    /// The bodies of all current inodes, which the scan has kept whole.
    #[cfg(test)]
    pub(crate) fn inodes(&self) -> Vec<(u64, &[u8])> {
        let counting = self.collect_current(true).into_iter();
        let kept = counting.filter_map(|inode| Some((inode.ino, inode.kept?)));
        kept.map(|(ino, (bodies, body))| (ino, bodies.bytes(body))).collect()
    }

    /// Bytes of the bodies that the scan has kept.
    #[cfg(test)]
    pub(crate) fn bytes_kept(&self) -> usize {
        let of = |bodies: &ScannedBodies| {
            bodies.bytes.len() + bodies.all.len() * size_of::<ScannedBody>()
        };
        self.bodies.iter().map(of).sum()
    }
}

fn lost_body_error() -> StoreError {
    device_error("read the inodes again")(Errno::IO)
}
