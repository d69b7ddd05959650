//! The running group: who is changing something, and how a group closes.

mod gate;

use std::sync::{Arc, Mutex};

use defuse_fs::{Errno, Result};

use crate::commit::Change;
use crate::content::{Bytes, Content, Pool};
use crate::engine::lock;
use crate::format::BLOCK;
use crate::format::inode::{Inode, POINTERS, POINTERS_OF_BLOCK, Pointer, pointer_block};
use crate::space::Run;
use crate::tree::Tree;

pub(crate) use gate::{Closed, Gate, Handle};

/// Everything that a group writes.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) changes: Vec<Change>,
    /// Blocks that must be durable before the changes are written.
    pub(crate) data: Vec<(u64, Arc<Bytes>)>,
    /// Blocks that are free once the changes are durable.
    pub(crate) freed: Vec<Run>,
}

/// Everything that changed since the last group. The blocks that were promised are taken now. Nobody
/// changes anything meanwhile.
///
/// # Errors
///
/// `EIO`: there is no space for what was promised.
pub(crate) fn close(_: &Closed<'_>, tree: &Mutex<Tree>, pool: &Pool) -> Result<Batch> {
    let mut batch = Batch::default();
    let written = lock(tree).take_written();
    for ino in written {
        let Ok(content) = lock(tree).content(ino) else { continue };
        let mut content = lock(&content);
        let moved = content.place(pool, &mut batch.data)?;
        let mut tree = lock(tree);
        tree.settle(ino, content.facts())?;
        if moved {
            tree.touch(ino);
        }
    }
    let (changed, gone) = lock(tree).take_changed();
    for ino in changed {
        let content = lock(tree).content(ino).map_err(|_| Errno::EIO)?;
        let mut content = lock(&content);
        let tree = lock(tree);
        let body = encode(tree.inode(ino)?, &mut content, pool, &mut batch)?;
        batch.changes.push(Change::Write { ino, body });
    }
    batch.changes.extend(gone.into_iter().map(|ino| Change::Remove { ino }));
    batch.freed = pool.take_given_up();
    Ok(batch)
}

/// The body of an inode. Records that do not fit go to new blocks.
fn encode(inode: &Inode, content: &mut Content, pool: &Pool, batch: &mut Batch) -> Result<Vec<u8>> {
    let records = inode.records(content.data());
    if let Some(body) = inode.body(&records) {
        content.replace_records(pool, Vec::new());
        return Ok(body);
    }
    let mut blocks = Vec::new();
    let mut write = |content: &[u8]| -> Result<Pointer> {
        let near = blocks.last().map(|run: &Run| run.block);
        let run = pool.space().take(1, near, 0).ok_or(Errno::EIO)?;
        blocks.push(run);
        let mut bytes = [0; BLOCK];
        bytes[..content.len()].copy_from_slice(content);
        let crc = crc32c::crc32c(&bytes);
        batch.data.push((run.block, Arc::new(bytes)));
        Ok(Pointer { block: run.block, crc })
    };
    let leaves = records.chunks(BLOCK).map(&mut write);
    let mut pointers = leaves.collect::<Result<Vec<Pointer>>>()?;
    let mut levels = 1;
    if pointers.len() > POINTERS {
        levels = 2;
        let parts = pointers.chunks(POINTERS_OF_BLOCK);
        pointers =
            parts.map(|part| write(&pointer_block(part))).collect::<Result<Vec<Pointer>>>()?;
    }
    content.replace_records(pool, blocks);
    if pointers.len() > POINTERS {
        return Err(Errno::EIO);
    }
    Ok(inode.body_outside(levels, records.len() as u64, &pointers))
}
