//! Direct reads and writes (open(2), `O_DIRECT`) of callers that wait. `content/direct.rs` has the
//! rules.

use std::cell::Cell;

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, OpenFlags, ReadBuf, Result};

use super::UhsEngine;
use crate::content::{DirectSource, DirectTarget, FileContent, PageFrame, SharedContent};
use crate::locks::lock;
use crate::space::BlockRun;

/// Reads of blocks that move meanwhile. Then the cache has them.
const TRIES: usize = 4;

/// The way of bytes between a caller and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoPath {
    /// By pages of the cache.
    Cached,
    /// Past the cache, where the range is one of whole pages that the cache has no part in.
    Direct,
}

impl From<OpenFlags> for IoPath {
    fn from(flags: OpenFlags) -> Self {
        if flags.has(OpenFlags::DIRECT) { IoPath::Direct } else { IoPath::Cached }
    }
}

thread_local! {
    /// This thread ends direct operations: it must not wait for one.
    static IS_LINE: Cell<bool> = const { Cell::new(false) };
}

/// True on the thread that ends direct operations, which may run code of the callers that began
/// them.
pub(super) fn is_line() -> bool {
    IS_LINE.get()
}

/// This thread ends direct operations.
pub(super) fn become_line() {
    IS_LINE.set(true);
}

impl UhsEngine {
    /// Reads up to `len` bytes. False, with nothing read, where the cache has a part in it.
    pub(super) fn read_directly(
        &self,
        content: &SharedContent,
        offset: u64,
        len: usize,
        out: &mut ReadBuf<'_>,
    ) -> Result<bool> {
        for _ in 0..TRIES {
            let source = lock(content).direct_source(&self.pool, offset, len as u64);
            let Some(DirectSource { run, bytes, version }) = source else { return Ok(false) };
            let read = self.io.read(QueuePurpose::Caller, self.frames_of(run)?);
            let read = read.map_err(|errno| unreadable(run, errno))?;
            if lock(content).version() != version {
                continue;
            }
            self.has_read_directly(run);
            let mut left = bytes;
            for frames in read {
                left -= out.put(&frames[..frames.len().min(left)])?;
            }
            return Ok(true);
        }
        Ok(false)
    }

    pub(super) fn has_read_directly(&self, run: BlockRun) {
        self.reads.misses.add(1);
        self.reads.fetched.add(run.count.into());
    }

    /// Writes all of `data`. False, with nothing written, where the cache has a part in it.
    pub(super) fn write_directly(
        &self,
        (ino, content): (u64, &SharedContent),
        offset: u64,
        data: &[u8],
        kill_suidgid: bool,
    ) -> Result<bool> {
        let begin = || self.begin_direct(&mut lock(content), offset, data.len());
        let Some(target) = self.with_space(begin)? else { return Ok(false) };
        let written = self.write_runs(&target.runs, data);
        let ended = self.end_direct((ino, content), target, written, kill_suidgid);
        written?;
        match ended {
            Err(Errno::EBUSY) => Ok(false),
            ended => ended.map(|()| true),
        }
    }

    fn write_runs(&self, runs: &[BlockRun], mut data: &[u8]) -> Result<()> {
        let mut pages: Vec<(u64, PageFrame)> = Vec::new();
        for run in runs {
            for (block, mut frames) in self.frames_of(*run)? {
                let (bytes, rest) = data.split_at(frames.len());
                frames.copy_from_slice(bytes);
                pages.extend((block..).zip(PageFrame::split_run(frames)));
                data = rest;
            }
        }
        debug_assert!(data.is_empty(), "the runs have all of it");
        match self.io.write(QueuePurpose::Caller, &mut pages, false) {
            Ok(failed) => failed.first().map_or(Ok(()), |one| Err(unwritable(runs, one.errno))),
            Err(errno) => Err(unwritable(runs, errno)),
        }
    }

    /// Begins a direct write, as [`FileContent::begin_direct`] does.
    pub(super) fn begin_direct(
        &self,
        content: &mut FileContent,
        offset: u64,
        len: usize,
    ) -> Result<Option<DirectTarget>> {
        match self.is_read_only() {
            true => Err(Errno::EROFS),
            false => content.begin_direct(&self.pool, offset, len as u64),
        }
    }

    /// Ends a direct write, as [`FileContent::end_direct`] does. `EBUSY` where it must be done
    /// again by the cache.
    pub(super) fn end_direct(
        &self,
        (ino, content): (u64, &SharedContent),
        target: DirectTarget,
        written: Result<()>,
        kill_suidgid: bool,
    ) -> Result<()> {
        let handle = self.gate.enter();
        let mut held = lock(content);
        let mut ended = held.end_direct(&self.pool, target, written);
        if written.is_ok() && ended.is_ok() {
            ended = self.names.record_write(&handle, ino, held.summarize(), kill_suidgid);
        }
        drop(held);
        self.end_change(handle);
        ended
    }
}

/// The error of a read that the device refused.
pub(super) fn unreadable(run: BlockRun, errno: defuse_block::Errno) -> Errno {
    log::error!("uhs: blocks from {} on cannot be read: {errno}", run.block);
    Errno::EIO
}

/// The error of a write that the device refused.
pub(super) fn unwritable(runs: &[BlockRun], errno: defuse_block::Errno) -> Errno {
    let first = runs.first().map_or(0, |run| run.block);
    log::error!("uhs: blocks from {first} on cannot be written: {errno}");
    Errno::EIO
}
