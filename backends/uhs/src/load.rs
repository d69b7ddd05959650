//! From a device to the names of its files.

use std::sync::Arc;

use defuse_block::{Blocking, Device};

use crate::content::Pool;
use crate::format::inode::{Decoded, Inode, POINTERS_OF_BLOCK, Pointer, pointers_of};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::names::{Loaded, Names, Problem};
use crate::space::{Run, Space};
use crate::store::{StoreError, Survey, failed, slots};

/// Reads all inodes that count.
///
/// # Errors
///
/// A failure of the device. What the device holds is a [`Problem`].
pub(crate) fn load(
    device: &dyn Device,
    survey: &Survey,
) -> Result<(Names, Arc<Pool>, Vec<Problem>), StoreError> {
    let (superblock, found) = (&survey.superblock, &survey.found);
    let mut line = Blocking::new(device).map_err(failed("open a queue"))?;
    let mut problems: Vec<Problem> =
        found.damaged.iter().map(|ino| Problem::Damaged { ino: *ino }).collect();
    problems.extend(survey.unreadable.iter().map(|block| Problem::Unreadable { block: *block }));
    problems.extend(found.lost_removals.then_some(Problem::LostRemovals));
    let mut space = space(superblock);
    let bodies = survey.inodes();
    let mut loaded = Vec::with_capacity(bodies.len());
    for (ino, body) in bodies {
        let whole = match Inode::decode(body) {
            Some(Decoded::Whole(inode)) => Some((inode, Vec::new())),
            Some(Decoded::Outside { inode, levels, bytes, pointers }) => {
                records(&mut line, &mut space, (levels, bytes), pointers)
                    .and_then(|(bytes, blocks)| Some((inode.with_records(&bytes)?, blocks)))
            }
            None => None,
        };
        match whole {
            Some((inode, records)) => loaded.push(Loaded { ino, inode, records }),
            None => problems.push(Problem::Damaged { ino }),
        }
    }
    let pool = Arc::new(Pool::new(space));
    let (names, more) = Names::load(Arc::clone(&pool), found.next_ino, loaded);
    names.set_slots(slots(superblock));
    problems.extend(more);
    Ok((names, pool, problems))
}

/// The space of a file system without files.
pub(crate) fn space(superblock: &Superblock) -> Space {
    let mut space = Space::new((superblock.blocks / UNIT_BLOCKS) as u32);
    for block in COPIES {
        // The rest of the unit is for data.
        space.claim(Run { block, count: 1 });
    }
    for chunk in &superblock.chunks {
        space.reserve(chunk.first_unit, chunk.units);
    }
    space
}

/// The records below `pointers`, and the blocks in which they lie, which are claimed of `space`. `None` where
/// they cannot be read, have changed, or belong to another inode. So a forged image cannot make a mount
/// read more blocks than there are.
fn records(
    line: &mut Blocking,
    space: &mut Space,
    (levels, bytes): (u8, u64),
    mut pointers: Vec<Pointer>,
) -> Option<(Vec<u8>, Vec<Run>)> {
    let mut blocks = Vec::new();
    let mut read = |pointer: &Pointer| -> Option<Vec<u8>> {
        let mut content = vec![0; BLOCK];
        let run = Run { block: pointer.block, count: 1 };
        space.claim(run).then_some(())?;
        line.read(pointer.block, &mut content).ok()?;
        blocks.push(run);
        (crc32c::crc32c(&content) == pointer.crc).then_some(content)
    };
    let leaves = usize::try_from(bytes).ok()?.div_ceil(BLOCK);
    if levels == 2 {
        let mut below = Vec::new();
        for pointer in &pointers {
            let count = leaves.checked_sub(below.len())?.min(POINTERS_OF_BLOCK);
            below.extend(pointers_of(&read(pointer)?, count)?);
        }
        pointers = below;
    }
    if pointers.len() != leaves {
        return None;
    }
    let mut content = Vec::new();
    for pointer in &pointers {
        content.extend(read(pointer)?);
    }
    content.truncate(bytes as usize);
    Some((content, blocks))
}
