//! The slots of a device, read.

use defuse_block::Blocking;

use super::error::{StoreError, failed};
use crate::commit::{Recovered, Rules, Scanned, recover};
use crate::format::slot::{self, Found, Place};
use crate::format::superblock::Superblock;
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Reads all slots, and hands each to `see` with its block.
pub(crate) fn scan(
    line: &mut Blocking,
    superblock: &Superblock,
    mut see: impl FnMut(u64, &Found<'_>),
) -> Result<(), StoreError> {
    let mut bytes = vec![0; UNIT_BLOCKS as usize * BLOCK];
    for chunk in &superblock.chunks {
        for unit in chunk.first_unit..chunk.first_unit + chunk.units {
            let first = u64::from(unit) * UNIT_BLOCKS;
            line.read(first, &mut bytes).map_err(failed("read the inodes"))?;
            for (block, bytes) in (first..).zip(bytes.chunks(BLOCK)) {
                let place = Place { uuid: superblock.uuid, key: chunk.key, block };
                see(block, &slot::decode(bytes, &place));
            }
        }
    }
    Ok(())
}

/// Reads all slots, and works out what counts.
pub(crate) fn survey(
    line: &mut Blocking,
    superblock: &Superblock,
    rules: Rules,
) -> Result<Recovered, StoreError> {
    let mut slots = Vec::new();
    scan(line, superblock, |block, found| {
        slots.extend(Scanned::of(found).map(|scanned| (block, scanned)));
    })?;
    Ok(recover(&slots, superblock.durable, rules))
}
