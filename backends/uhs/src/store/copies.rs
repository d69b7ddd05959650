//! The copies of the superblock on a device.

use defuse_block::{BlockDevice, BlockingQueue};

use super::chunks;
use super::error::{StoreError, device_error};
use crate::format::superblock::{
    COPIES, FEATURES, FEWEST_UNITS, SlotChunk, Superblock, SuperblockError,
};
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Makes an empty file system that occupies the whole device.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn make(
    device: &dyn BlockDevice,
    uuid: [u8; 16],
    random: &mut fastrand::Rng,
) -> Result<(), StoreError> {
    let facts = device.properties();
    if facts.block_size as usize != BLOCK {
        return Err(StoreError::BlockSize(facts.block_size));
    }
    if facts.blocks / UNIT_BLOCKS < FEWEST_UNITS {
        return Err(StoreError::TooSmall { bytes: facts.bytes() });
    }
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    // The former contents of the copies must not count beside the new ones.
    for block in COPIES {
        line.write(block, &[0; BLOCK]).map_err(device_error("write the superblock"))?;
    }
    line.flush().map_err(device_error("flush"))?;
    let chunk = SlotChunk { first_unit: 1, units: 1, key: random.u64(..) };
    let blocks = facts.blocks;
    let (epoch, durable, next_ino, chunks) = (1, 0, 1, vec![chunk]);
    let (snapshot, table, features) = (None, None, FEATURES);
    let superblock =
        Superblock { uuid, epoch, blocks, durable, next_ino, snapshot, chunks, table, features };
    write_superblock(&mut line, &superblock)?;
    line.flush().map_err(device_error("flush"))
}

/// Writes one copy and makes it durable, then the others: at every moment one copy is whole, and in
/// the end all copies are equal. A copy that cannot be written is skipped, as long as another one
/// still holds the version before.
pub(super) fn write_superblock(
    line: &mut BlockingQueue,
    superblock: &Superblock,
) -> Result<(), StoreError> {
    let bytes = superblock.encode();
    let first = superblock.epoch as usize % COPIES.len();
    let mut order = (first..first + COPIES.len()).map(|at| COPIES[at % COPIES.len()]);
    let write = |line: &mut BlockingQueue, block| {
        line.write(block, &bytes).map_err(device_error("write the superblock"))
    };
    if let Some(block) = order.next()
        && let Err(error) = write(line, block)
    {
        log::warn!("the copy at block {block}: {error}");
        order.next().map_or(Err(error), |block| write(line, block))?;
    }
    line.flush().map_err(device_error("flush"))?;
    // The other copies become durable by any later flush. The next version begins with another
    // copy.
    for block in order {
        if let Err(error) = write(line, block) {
            log::warn!("the copy at block {block}: {error}");
        }
    }
    Ok(())
}

/// Enlarges an unused file system to more blocks of its device. At every moment it has either the
/// old or the new size.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn grow(device: &dyn BlockDevice, blocks: u64) -> Result<(), StoreError> {
    let mut superblock = superblock(device)?;
    debug_assert!(superblock.blocks <= blocks, "a file system does not shrink");
    superblock.epoch += 1;
    superblock.blocks = blocks;
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    write_superblock(&mut line, &superblock)?;
    line.flush().map_err(device_error("flush"))
}

/// Gives an unused file system the features of new ones. At every moment it has either the old or
/// the new ones. Returns those that it lacked.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn upgrade(device: &dyn BlockDevice) -> Result<u64, StoreError> {
    let mut superblock = superblock(device)?;
    let lacking = FEATURES & !superblock.features;
    if lacking != 0 {
        superblock.epoch += 1;
        superblock.features |= FEATURES;
        let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
        write_superblock(&mut line, &superblock)?;
        line.flush().map_err(device_error("flush"))?;
    }
    Ok(lacking)
}

/// Gives an unused file system these features and no others.
#[cfg(test)]
pub(crate) fn downgrade(device: &dyn BlockDevice, features: u64) {
    let mut superblock = superblock(device).unwrap();
    superblock.epoch += 1;
    superblock.features = features;
    let mut line = BlockingQueue::new(device).unwrap();
    write_superblock(&mut line, &superblock).unwrap();
}

/// The superblock of `device`.
///
/// # Errors
///
/// See [`StoreError`].
pub(crate) fn superblock(device: &dyn BlockDevice) -> Result<Superblock, StoreError> {
    if device.properties().block_size as usize != BLOCK {
        return Err(StoreError::BlockSize(device.properties().block_size));
    }
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    read_superblock(&mut line, device.properties().blocks)
}

/// The blocks of copies with unexpected content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BadCopies {
    /// Copies that cannot be read, or hold something else than a recent superblock of this file
    /// system.
    pub(crate) lost: Vec<u64>,
    /// A power failure may have interrupted their writing.
    pub(crate) torn: Vec<u64>,
    /// Copies of blocks of the table of chunks that are damaged.
    pub(crate) tables: Vec<u64>,
}

/// The copies that a mount or a repair would write anew.
///
/// # Errors
///
/// See [`superblock`].
pub(crate) fn find_bad(device: &dyn BlockDevice) -> Result<BadCopies, StoreError> {
    let best = superblock(device)?;
    let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
    let tables = chunks::find_damaged(&mut line, &best)?;
    let mut bad = BadCopies { tables, ..BadCopies::default() };
    let newest = best.encode();
    for block in COPIES {
        let mut bytes = vec![0; BLOCK];
        let read = line.read(block, &mut bytes).ok();
        match read.map(|()| Superblock::decode(&bytes)) {
            Some(Ok(copy)) if bytes == newest || is_before(&copy, &best) => {}
            Some(Err(SuperblockError::Damaged)) if best.may_be_torn(&bytes) => bad.torn.push(block),
            _ => bad.lost.push(block),
        }
    }
    Ok(bad)
}

/// True for a version that a power failure may have left beside `best`: each version begins with
/// another copy, so that none lags behind by more than the number of copies.
fn is_before(copy: &Superblock, best: &Superblock) -> bool {
    copy.uuid == best.uuid
        && copy.epoch < best.epoch
        && best.epoch - copy.epoch < COPIES.len() as u64
}

/// Reads the newest copy of the superblock.
pub(crate) fn read_superblock(
    line: &mut BlockingQueue,
    blocks: u64,
) -> Result<Superblock, StoreError> {
    let mut best: Option<Superblock> = None;
    let mut reason = SuperblockError::Other;
    for block in COPIES.into_iter().filter(|block| *block < blocks) {
        let mut bytes = vec![0; BLOCK];
        if let Err(errno) = line.read(block, &mut bytes) {
            log::warn!("the superblock at block {block} cannot be read: {errno}");
            continue;
        }
        match Superblock::decode(&bytes) {
            Ok(found) if best.as_ref().is_none_or(|best| found.epoch > best.epoch) => {
                best = Some(found);
            }
            Ok(_) | Err(SuperblockError::Other) => {}
            Err(other) => reason = other,
        }
    }
    match (best, reason) {
        // A newer program has written the newest copy.
        (_, newer @ SuperblockError::Newer { .. }) => Err(StoreError::Unusable(newer)),
        (Some(best), _) if best.blocks > blocks => {
            Err(StoreError::Short { blocks, wanted: best.blocks })
        }
        (Some(mut best), _) => {
            chunks::read_table(line, &mut best)?;
            Ok(best)
        }
        (None, reason) => Err(StoreError::Unusable(reason)),
    }
}
