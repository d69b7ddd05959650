//! Contents from the slots on the device.

use std::sync::{Arc, Mutex};

use defuse_fs::{Errno, Result};

use super::{EngineSlots, LOADS, UhsEngine};
use crate::content::FileContent;
use crate::format::BLOCK;
use crate::format::inode::{DecodedBody, DiskInode, InodeData};
use crate::format::slot::{self, FoundSlot, SlotIdentity};
use crate::io::GATHERED;
use crate::locks::lock;
use crate::names::ContentState;
use crate::store::{StoreError, device_error};

/// Reads of slots that are overwritten meanwhile.
const TRIES: usize = 100;

impl UhsEngine {
    /// The content of an inode of any kind.
    pub(crate) fn content(&self, ino: u64) -> Result<Arc<Mutex<FileContent>>> {
        if let ContentState::Here(content) = self.names.content(ino)? {
            return Ok(content);
        }
        let _turn = lock(&self.loads[ino as usize % LOADS]);
        self.names.load_content(ino, || {
            let read = self.read_slots(&[ino]);
            read.ok().and_then(|mut found| found.pop()).map(|inode| inode.data).ok_or(Errno::EIO)
        })
    }

    fn locate_slots(&self, inos: &[u64]) -> Vec<Option<SlotIdentity>> {
        match &self.store {
            EngineSlots::Store(store) => store.locate_slots(inos),
            EngineSlots::Frozen(frozen) => frozen.locate_slots(inos),
        }
    }

    /// The inodes in the slots of their current copies.
    pub(super) fn read_slots(&self, inos: &[u64]) -> Result<Vec<DiskInode>, StoreError> {
        if inos.is_empty() {
            return Ok(Vec::new());
        }
        for _ in 0..TRIES {
            let places = self.locate_slots(inos);
            let found = self.read_places(inos, &places)?;
            // A slot may have been overwritten meanwhile, if the inode has another slot since.
            if self.locate_slots(inos) == places {
                let whole: Option<Vec<DiskInode>> = found.into_iter().collect();
                return whole.ok_or(StoreError::Lost);
            }
        }
        Err(StoreError::Lost)
    }

    fn read_places(
        &self,
        inos: &[u64],
        places: &[Option<SlotIdentity>],
    ) -> Result<Vec<Option<DiskInode>>, StoreError> {
        let mut order: Vec<(usize, SlotIdentity)> = Vec::with_capacity(inos.len());
        order.extend(places.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?))));
        order.sort_unstable_by_key(|(_, place)| place.block);
        let mut found = vec![None; inos.len()];
        let mut line = lock(&self.line);
        let neighbours =
            |a: &(usize, SlotIdentity), b: &(usize, SlotIdentity)| a.1.block + 1 == b.1.block;
        for run in order.chunk_by(neighbours).flat_map(|run| run.chunks(GATHERED)) {
            let mut bytes = vec![0; run.len() * BLOCK];
            line.read(run[0].1.block, &mut bytes).map_err(device_error("read an inode"))?;
            for ((at, place), bytes) in run.iter().zip(bytes.chunks(BLOCK)) {
                found[*at] = decode(bytes, place, inos[*at]);
            }
        }
        Ok(found)
    }
}

fn decode(bytes: &[u8], place: &SlotIdentity, ino: u64) -> Option<DiskInode> {
    match slot::decode(bytes, place) {
        FoundSlot::Whole(identity, body) if identity.ino == ino => match DiskInode::decode(body)? {
            DecodedBody::Whole(inode)
                if matches!(inode.data, InodeData::Inline(_) | InodeData::Target(_)) =>
            {
                Some(inode)
            }
            // Such an inode is in memory, unless a forged snapshot hides it.
            DecodedBody::Whole(_) | DecodedBody::Outside { .. } => None,
        },
        _ => None,
    }
}
