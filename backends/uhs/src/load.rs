//! From a device to the tree of its files.

use std::collections::HashMap;
use std::sync::Arc;

use defuse_block::Blocking;

use crate::commit::Recovered;
use crate::content::Pool;
use crate::format::inode::{Decoded, Inode, POINTERS_OF_BLOCK, Pointer, pointers_of};
use crate::format::slot::Found;
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::space::{Run, Space};
use crate::store::{StoreError, scan};
use crate::tree::{Loaded, Problem, Tree};

/// Reads all inodes that count.
///
/// # Errors
///
/// A failure of the device. What the device holds is a [`Problem`].
pub(crate) fn load(
    line: &mut Blocking,
    superblock: &Superblock,
    found: &Recovered,
) -> Result<(Tree, Arc<Pool>, Vec<Problem>), StoreError> {
    let inos: HashMap<u64, u64> =
        found.live.iter().map(|(ino, version)| (version.block, *ino)).collect();
    let mut bodies = Vec::with_capacity(inos.len());
    scan(line, superblock, |block, slot| {
        if let (Some(ino), Found::Whole(_, body)) = (inos.get(&block), slot) {
            bodies.push((*ino, Inode::decode(body)));
        }
    })?;
    // In an order that does not depend on where the slots lie.
    bodies.sort_unstable_by_key(|(ino, _)| *ino);
    let mut problems: Vec<Problem> =
        found.damaged.iter().map(|ino| Problem::Damaged { ino: *ino }).collect();
    problems.extend(found.lost_removals.then_some(Problem::LostRemovals));
    let mut loaded = Vec::with_capacity(bodies.len());
    for (ino, body) in bodies {
        let whole = match body {
            Some(Decoded::Whole(inode)) => Some((inode, Vec::new())),
            Some(Decoded::Outside { inode, levels, bytes, pointers }) => {
                records(line, superblock, (levels, bytes), pointers)
                    .and_then(|(bytes, blocks)| Some((inode.with_records(&bytes)?, blocks)))
            }
            None => None,
        };
        match whole {
            Some((inode, records)) => loaded.push(Loaded { ino, inode, records }),
            None => problems.push(Problem::Damaged { ino }),
        }
    }
    let pool = Arc::new(Pool::new(space(superblock)));
    let (tree, more) = Tree::load(Arc::clone(&pool), found.next_ino, loaded);
    problems.extend(more);
    Ok((tree, pool, problems))
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

/// The records below `pointers`, and the blocks in which they lie. `None` where they cannot be read or have
/// changed.
fn records(
    line: &mut Blocking,
    superblock: &Superblock,
    (levels, bytes): (u8, u64),
    mut pointers: Vec<Pointer>,
) -> Option<(Vec<u8>, Vec<Run>)> {
    let mut blocks = Vec::new();
    let mut read = |pointer: &Pointer| -> Option<Vec<u8>> {
        let mut content = vec![0; BLOCK];
        (pointer.block < superblock.blocks).then_some(())?;
        line.read(pointer.block, &mut content).ok()?;
        blocks.push(Run { block: pointer.block, count: 1 });
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
