//! The bytes of files: between callers, memory and the device.

use std::sync::Mutex;
use std::time::Duration;

use defuse_block::{FrameRun, QueuePurpose};
use defuse_fs::{
    Attr, CopyRange, Errno, Fallocate, OpenFlags, ReadBuf, Result, SetAttr, SliceSink, Whence,
};

use super::UhsEngine;
use super::commit::SyncScope;
use super::direct::{IoPath, is_line};
use crate::content::{
    BlockPool, ChangeDemand, FileContent, FrameDemand, FrameSupply, PageFrame, SharedContent,
};
use crate::format::BLOCK;
use crate::format::inode::InodeData;
use crate::group::{CommitBatch, GroupReadGuard};
use crate::io::{FailedBlocks, GATHERED};
use crate::locks::lock;
use crate::space::BlockRun;
use crate::store::{InodeStore, StoreError, device_error};

/// The most commits that an operation waits for to get memory.
const PATIENCE: usize = 16;

/// Bytes of a copy at most, so that it ends soon.
const LONGEST_COPY: u64 = 64 << 20;

/// Pages that were read for an operation. Until it is done they get into the cache again whenever a
/// want of memory drops them.
#[derive(Default)]
struct FetchedPages {
    purpose: QueuePurpose,
    /// The version of the content before.
    version: u64,
    /// The number of direct writes that had ended before.
    before: u64,
    pages: Vec<(u64, BlockRun, Vec<PageFrame>)>,
}

impl FetchedPages {
    /// Puts the pages into the cache. Pages that may be older than the device are read again.
    /// `EDEADLK` for the thread that would wait for itself.
    fn fill(&mut self, content: &mut FileContent, pool: &BlockPool) -> Result<()> {
        if self.version != content.version() {
            self.version = content.version();
            self.pages.clear();
        }
        let read = self.pages.len();
        self.pages.retain(|(_, run, _)| !content.is_stale(*run, self.before));
        if self.pages.len() < read && is_line() {
            return Err(Errno::EDEADLK);
        }
        self.before = content.overwrite_count();
        for (page, _, frames) in &self.pages {
            content.fill(pool, *page, frames);
        }
        Ok(())
    }
}

impl UhsEngine {
    /// Reads from `offset` on. True if the read has changed the access time.
    ///
    /// # Errors
    ///
    /// Fails with `EIO`, and with the errors of `out`.
    pub(crate) fn read(
        &self,
        ino: u64,
        (offset, flags): (u64, OpenFlags),
        out: &mut ReadBuf<'_>,
    ) -> Result<bool> {
        let way = IoPath::from(flags);
        let content = self.data(ino)?;
        let before = out.filled_len();
        while out.remaining() > 0 {
            let at = offset.saturating_add((out.filled_len() - before) as u64);
            let from = out.filled_len();
            let len = (GATHERED * BLOCK).min(out.remaining());
            if way == IoPath::Cached || !self.read_directly(&content, at, len, out)? {
                self.read_part(&content, at, len, out)?;
            }
            if out.filled_len() == from {
                break;
            }
        }
        Ok(!flags.has(OpenFlags::NOATIME) && self.names.record_access(ino))
    }

    fn read_part(
        &self,
        content: &Mutex<FileContent>,
        at: u64,
        len: usize,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let mut fetched = FetchedPages::default();
        let (mut in_memory, mut ahead, mut fetcher) = (true, None, None);
        loop {
            let mut held = lock(content);
            fetched.fill(&mut held, &self.pool)?;
            drop(fetcher.take());
            let mut wanted = held.find_missing(at, len as u64);
            if wanted.is_empty() {
                held.has_read(at, len as u64);
                if in_memory { &self.reads.hits } else { &self.reads.misses }.add(1);
                return out.with_limit(len, |out| held.read(at, out));
            }
            in_memory = false;
            // The line must not wait for a thread that may wait for it.
            let theirs = if is_line() { None } else { held.take_fetched_by_others(&mut wanted) };
            if let (Some(fetch), true) = (&theirs, wanted.is_empty()) {
                drop(held);
                fetch.wait();
                continue;
            }
            let pages = self.options.cache_pages;
            let more =
                *ahead.get_or_insert_with(|| held.bytes_to_read_ahead(at, len as u64, pages));
            let mut missing = held.find_missing(at, len as u64 + more);
            if !is_line() {
                held.take_fetched_by_others(&mut missing);
            }
            fetcher = Some(held.begin_fetch(&missing));
            drop(held);
            self.reads.fetched.add(wanted.len() as u64);
            self.reads.ahead.add((missing.len() - wanted.len()) as u64);
            self.fetch(&missing, &mut fetched)?;
        }
    }

    /// The content of a regular file. Fails with `EISDIR`, and with `EINVAL` for other inodes
    /// without data.
    pub(super) fn data(&self, ino: u64) -> Result<SharedContent> {
        self.names.check_data(ino)?;
        self.content(ino)
    }

    pub(crate) fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        self.names.check_link(ino)?;
        let content = self.content(ino)?;
        let target = match &*lock(&content).data() {
            InodeData::Target(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        };
        drop(content);
        self.is_idle(ino);
        target
    }

    /// Writes at `offset`, or at the end. Returns the number of bytes written.
    pub(crate) fn write(
        &self,
        ino: u64,
        offset: Option<u64>,
        way: IoPath,
        data: &[u8],
        kill_suidgid: bool,
    ) -> Result<usize> {
        let content = self.data(ino)?;
        if let (IoPath::Direct, Some(offset)) = (way, offset)
            && self.write_directly((ino, &content), offset, data, kill_suidgid)?
        {
            return Ok(data.len());
        }
        let need = |held: &FileContent| {
            held.need_write(offset.unwrap_or_else(|| held.size()), data.len() as u64)
        };
        let (offset, taken) = self.change_content(&content, need, |held, handle, supply| {
            let offset = offset.unwrap_or_else(|| held.size());
            let taken = held.write(&self.pool, offset, data, supply);
            match &taken {
                Ok(0) | Err(_) => self.names.settle(handle, ino, held.summarize())?,
                Ok(_) => self.names.record_write(handle, ino, held.summarize(), kill_suidgid)?,
            }
            taken.map(|taken| (offset, taken))
        })?;
        self.write_behind(&content, offset, taken as u64);
        // Writers that are faster than the device wait for it. The committing thread begins
        // earlier.
        let dirty = self.pool.dirty();
        if dirty > self.options.dirty_pages {
            self.commit(SyncScope::Memory)?;
        } else if dirty > self.options.dirty_pages / 2 {
            self.commit_soon();
        }
        Ok(taken)
    }

    pub(crate) fn setattr(&self, ino: u64, set: &SetAttr, valid_for: Duration) -> Result<Attr> {
        let Some(size) = set.size else {
            return self.change(|names, handle| names.setattr(handle, ino, set, None, valid_for));
        };
        let content = self.data(ino)?;
        let need = |held: &FileContent| held.need_size(size);
        let attr = self.change_content(&content, need, |held, handle, supply| {
            let result = held.set_size(&self.pool, size, supply);
            if let Err(errno) = result {
                self.names.settle(handle, ino, held.summarize())?;
                return Err(errno);
            }
            self.names.setattr(handle, ino, set, Some(held.summarize()), valid_for)
        });
        drop(content);
        self.is_idle(ino);
        attr
    }

    /// Allocates, punches, zeroes, collapses or inserts a range, fallocate(2).
    pub(crate) fn fallocate(&self, ino: u64, range: &Fallocate, kill_suidgid: bool) -> Result<()> {
        let content = self.data(ino)?;
        let need = |held: &FileContent| held.need_fallocate(range);
        self.change_content(&content, need, |held, handle, supply| {
            let result = held.fallocate(&self.pool, range, supply);
            match result {
                Ok(()) => self.names.record_write(handle, ino, held.summarize(), kill_suidgid),
                Err(errno) => self.names.settle(handle, ino, held.summarize()).and(Err(errno)),
            }
        })
    }

    /// Copies bytes from one file to another, or to another place in the same file, in parts.
    /// Returns the number of bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` for ranges of one file that overlap, `EOVERFLOW`, and the errors of reads and
    /// writes if nothing was copied.
    pub(crate) fn copy(&self, copy: &CopyRange, kill_suidgid: bool) -> Result<u64> {
        let (from, to) = (copy.src.ino.0, copy.dst.ino.0);
        let ends =
            copy.src_offset.checked_add(copy.length).zip(copy.dst_offset.checked_add(copy.length));
        ends.ok_or(Errno::EOVERFLOW)?;
        self.names.check_data(to)?;
        let size = lock(&*self.data(from)?).size();
        let length = copy.length.min(size.saturating_sub(copy.src_offset)).min(LONGEST_COPY);
        if copy.flags != 0 || from == to && copy.src_offset.abs_diff(copy.dst_offset) < length {
            return Err(Errno::EINVAL);
        }
        let mut bytes = vec![0; length.min((GATHERED * BLOCK) as u64) as usize];
        let mut done = 0;
        while done < length {
            let room = bytes.len().min((length - done) as usize);
            let part = self.copy_part(copy, done, &mut bytes[..room], kill_suidgid);
            match part {
                Ok(0) => break,
                Ok(copied) => done += copied as u64,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn copy_part(
        &self,
        copy: &CopyRange,
        done: u64,
        bytes: &mut [u8],
        kill_suidgid: bool,
    ) -> Result<usize> {
        let len = bytes.len();
        let mut sink = SliceSink::new(bytes);
        let mut out = ReadBuf::new(&mut sink, len);
        let at = (copy.src_offset + done, OpenFlags::default());
        self.read(copy.src.ino.0, at, &mut out)?;
        let len = out.filled_len();
        match len {
            0 => Ok(0),
            _ => self.write(
                copy.dst.ino.0,
                Some(copy.dst_offset + done),
                IoPath::Cached,
                &bytes[..len],
                kill_suidgid,
            ),
        }
    }

    /// The next data or hole, lseek(2).
    pub(crate) fn seek(&self, ino: u64, offset: u64, whence: Whence) -> Result<u64> {
        let content = self.data(ino)?;
        lock(&content).seek(offset, whence)
    }

    /// Changes a content once the pages and frames that the change needs are in memory.
    fn change_content<T>(
        &self,
        content: &Mutex<FileContent>,
        need: impl Fn(&FileContent) -> ChangeDemand,
        mut change: impl FnMut(&mut FileContent, &GroupReadGuard<'_>, &mut FrameSupply) -> Result<T>,
    ) -> Result<T> {
        self.with_space(|| {
            self.try_change_content(QueuePurpose::Caller, content, &need, &mut change)
        })
    }

    pub(super) fn try_change_content<T>(
        &self,
        purpose: QueuePurpose,
        content: &Mutex<FileContent>,
        need: &impl Fn(&FileContent) -> ChangeDemand,
        change: &mut impl FnMut(&mut FileContent, &GroupReadGuard<'_>, &mut FrameSupply) -> Result<T>,
    ) -> Result<T> {
        let mut supply = FrameSupply::default();
        let mut fetched = FetchedPages { purpose, ..FetchedPages::default() };
        loop {
            let handle = self.enter()?;
            let mut held = lock(content);
            fetched.fill(&mut held, &self.pool)?;
            let ChangeDemand { missing, wanted } = need(&held);
            if missing.is_empty() && supply.has(wanted) {
                let result = change(&mut held, &handle, &mut supply);
                drop(held);
                self.end_change(handle);
                return result;
            }
            drop(held);
            drop(handle);
            self.supply(wanted, &mut supply)?;
            self.fetch(&missing, &mut fetched)?;
        }
    }

    fn supply(&self, wanted: FrameDemand, supply: &mut FrameSupply) -> Result<()> {
        for _ in 0..PATIENCE {
            if self.pool.supply(wanted, supply) {
                return Ok(());
            }
            self.commit(SyncScope::Memory)?;
        }
        Err(Errno::ENOMEM)
    }

    /// Frames for all blocks of a run, in parts that one operation of the device can have, each
    /// with its first block.
    pub(super) fn frames_of(&self, run: BlockRun) -> Result<Vec<(u64, FrameRun)>> {
        let (mut parts, mut at) = (Vec::new(), run.block);
        while at < run.end() {
            let frames = self.frames(((run.end() - at) as usize).min(self.io.gather_limit()))?;
            let count = u64::from(frames.count());
            parts.push((at, frames));
            at += count;
        }
        Ok(parts)
    }

    /// Frames for up to `count` pages.
    fn frames(&self, count: usize) -> Result<FrameRun> {
        for _ in 0..PATIENCE {
            if let Some(frames) = self.pool.frames(count) {
                return Ok(frames);
            }
            self.commit(SyncScope::Memory)?;
        }
        Err(Errno::ENOMEM)
    }

    /// Reads pages, several runs of them at a time.
    fn fetch(&self, missing: &[(u64, u64)], fetched: &mut FetchedPages) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        let follows = |a: &(u64, u64), b: &(u64, u64)| a.0 + 1 == b.0 && a.1 + 1 == b.1;
        let (mut pages, mut runs) = (Vec::new(), Vec::new());
        for run in missing.chunk_by(follows) {
            let (page, block) = run[0];
            for (at, frames) in self.frames_of(BlockRun { block, count: run.len() as u32 })? {
                pages.push((page + (at - block), BlockRun { block: at, count: frames.count() }));
                runs.push((at, frames));
            }
        }
        let read = self.io.read(fetched.purpose, runs).map_err(|errno| {
            log::error!("uhs: data cannot be read: {errno}");
            Errno::EIO
        })?;
        let frames = read.into_iter().map(|run| PageFrame::split_run(run).collect());
        fetched
            .pages
            .extend(pages.into_iter().zip(frames).map(|((page, run), frames)| (page, run, frames)));
        Ok(())
    }

    /// Writes the data of a group, and makes it durable. Returns the blocks that the device does
    /// not take, in order; then nothing is durable.
    pub(super) fn write_data(
        &self,
        store: &InodeStore,
        batch: &mut CommitBatch,
    ) -> std::result::Result<Vec<u64>, StoreError> {
        let has_early = batch.has_early || !batch.early.is_empty();
        if has_early && self.rules.groups_wait_for_early {
            let refused = self.finish_behind(&batch.early);
            batch.add_older_data(refused);
        } else if batch.data.is_empty() {
            self.pool.record_group_write(batch.numbers());
            return Ok(Vec::new());
        }
        let write = |data: &mut [(u64, PageFrame)], durable| {
            self.io.write(batch.purpose, data, durable).map_err(device_error("write data"))
        };
        // Pages that were written early need a flush.
        let first = self.rules.data_is_first;
        let through = first && batch.now && !has_early && self.io.writes_through(&batch.data);
        let failures = match batch.data.is_empty() {
            true => Vec::new(),
            false => write(&mut batch.data, through)?,
        };
        let is_durable = through && failures.is_empty();
        let mut lost = Vec::new();
        // A failure of many blocks may come from one of them, or be over.
        for FailedBlocks { from, count, errno } in failures {
            let (first, before) = (batch.data[from].0, lost.len());
            for one in &batch.data[from..from + count] {
                if !write(&mut [one.clone()], false)?.is_empty() {
                    lost.push(one.0);
                }
            }
            // One log line for all blocks: a log that is not read, such as a full pipe, would block
            // commits.
            let refused = lost.len() - before;
            if refused > 0 {
                log::warn!(
                    "uhs: {refused} of {count} blocks from {first} on cannot be written: {errno}"
                );
            }
        }
        lost.sort_unstable();
        if !lost.is_empty() {
            return Ok(lost);
        }
        self.pool.record_group_write(batch.numbers());
        if first && !is_durable {
            store.flush()?;
        }
        Ok(lost)
    }
}
