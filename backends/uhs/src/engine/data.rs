//! The bytes of files: between callers, memory and the device.

use std::sync::Mutex;

use defuse_block::Frames;
use defuse_fs::{Attr, Errno, Fallocate, ReadBuf, Result, SetAttr, Whence};

use super::commit::Extent;
use super::{Engine, lock};
use crate::content::{Content, Frame, Need, Pool, Shared, Supply, Wanted};
use crate::format::BLOCK;
use crate::format::inode::Data;
use crate::group::{Batch, Handle};
use crate::io::GATHERED;
use crate::store::{Store, StoreError, failed};

/// Commits that somebody waits for at most, to get memory.
const PATIENCE: usize = 8;

/// Pages that were read for an operation. Until it is done they get into the cache again whenever a want of
/// memory drops them.
#[derive(Default)]
struct Fetched {
    /// The version of the content before.
    version: u64,
    pages: Vec<(u64, Vec<Frame>)>,
}

impl Fetched {
    fn fill(&mut self, content: &mut Content, pool: &Pool) {
        if self.version != content.version() {
            self.version = content.version();
            self.pages.clear();
        }
        for (page, frames) in &self.pages {
            content.fill(pool, *page, frames);
        }
    }
}

impl Engine {
    /// Reads from `offset` on.
    ///
    /// # Errors
    ///
    /// `EIO`, and those of `out`.
    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let content = self.data(ino)?;
        let before = out.filled();
        while out.remaining() > 0 {
            let at = offset.saturating_add((out.filled() - before) as u64);
            let from = out.filled();
            self.read_part(&content, at, (GATHERED * BLOCK).min(out.remaining()), out)?;
            if out.filled() == from {
                break;
            }
        }
        self.names.accessed(ino);
        Ok(())
    }

    fn read_part(
        &self,
        content: &Mutex<Content>,
        at: u64,
        len: usize,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let mut fetched = Fetched::default();
        loop {
            let mut held = lock(content);
            fetched.fill(&mut held, &self.pool);
            let missing = held.missing(at, len as u64);
            if missing.is_empty() {
                return out.with_limit(len, |out| held.read(at, out));
            }
            drop(held);
            self.fetch(&missing, &mut fetched)?;
        }
    }

    /// The content of a regular file. `EISDIR`, `EINVAL` for what has no data.
    fn data(&self, ino: u64) -> Result<Shared> {
        self.names.check_data(ino)?;
        self.content(ino)
    }

    pub(crate) fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        self.names.check_link(ino)?;
        let content = self.content(ino)?;
        let target = match &*lock(&content).data() {
            Data::Target(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        };
        drop(content);
        self.is_idle(ino);
        target
    }

    /// Writes at `offset`, or at the end. Returns how many bytes were taken.
    pub(crate) fn write(
        &self,
        ino: u64,
        offset: Option<u64>,
        data: &[u8],
        kill_suidgid: bool,
    ) -> Result<usize> {
        let content = self.data(ino)?;
        let need = |held: &Content| {
            held.need_write(offset.unwrap_or_else(|| held.size()), data.len() as u64)
        };
        let taken = self.change_content(&content, need, |held, handle, supply| {
            let offset = offset.unwrap_or_else(|| held.size());
            let taken = held.write(&self.pool, offset, data, supply);
            match &taken {
                Ok(0) | Err(_) => self.names.settle(handle, ino, held.facts())?,
                Ok(_) => self.names.wrote(handle, ino, held.facts(), kill_suidgid)?,
            }
            taken
        })?;
        // Whoever writes faster than the device waits for it.
        if self.pool.dirty() > self.options.dirty_pages {
            self.commit(Extent::Changes)?;
        }
        Ok(taken)
    }

    pub(crate) fn setattr(&self, ino: u64, set: &SetAttr) -> Result<Attr> {
        let Some(size) = set.size else {
            return self.change(|names, handle| names.setattr(handle, ino, set, None));
        };
        let content = self.data(ino)?;
        let need = |held: &Content| held.need_size(size);
        let attr = self.change_content(&content, need, |held, handle, supply| {
            let result = held.set_size(&self.pool, size, supply);
            if let Err(errno) = result {
                self.names.settle(handle, ino, held.facts())?;
                return Err(errno);
            }
            self.names.setattr(handle, ino, set, Some(held.facts()))
        });
        drop(content);
        self.is_idle(ino);
        attr
    }

    /// Allocates, punches, zeroes, collapses or inserts a range, fallocate(2).
    pub(crate) fn fallocate(&self, ino: u64, range: &Fallocate, kill_suidgid: bool) -> Result<()> {
        let content = self.data(ino)?;
        let need = |held: &Content| held.need_fallocate(range);
        self.change_content(&content, need, |held, handle, supply| {
            let result = held.fallocate(&self.pool, range, supply);
            match result {
                Ok(()) => self.names.wrote(handle, ino, held.facts(), kill_suidgid),
                Err(errno) => self.names.settle(handle, ino, held.facts()).and(Err(errno)),
            }
        })
    }

    /// The next data or hole, lseek(2).
    pub(crate) fn seek(&self, ino: u64, offset: u64, whence: Whence) -> Result<u64> {
        let content = self.data(ino)?;
        lock(&content).seek(offset, whence)
    }

    /// Changes a content when it has what it needs.
    fn change_content<T>(
        &self,
        content: &Mutex<Content>,
        need: impl Fn(&Content) -> Need,
        mut change: impl FnMut(&mut Content, &Handle<'_>, &mut Supply) -> Result<T>,
    ) -> Result<T> {
        match self.try_change_content(content, &need, &mut change) {
            Err(Errno::ENOSPC) if self.makes_space()? => {
                self.try_change_content(content, &need, &mut change)
            }
            result => result,
        }
    }

    fn try_change_content<T>(
        &self,
        content: &Mutex<Content>,
        need: &impl Fn(&Content) -> Need,
        change: &mut impl FnMut(&mut Content, &Handle<'_>, &mut Supply) -> Result<T>,
    ) -> Result<T> {
        let (mut supply, mut fetched) = (Supply::default(), Fetched::default());
        loop {
            let handle = self.enter()?;
            let mut held = lock(content);
            fetched.fill(&mut held, &self.pool);
            let Need { missing, wanted } = need(&held);
            if missing.is_empty() && supply.has(wanted) {
                let result = change(&mut held, &handle, &mut supply);
                drop(held);
                self.leave(handle);
                return result;
            }
            drop(held);
            drop(handle);
            self.supply(wanted, &mut supply)?;
            self.fetch(&missing, &mut fetched)?;
        }
    }

    fn supply(&self, wanted: Wanted, supply: &mut Supply) -> Result<()> {
        for _ in 0..PATIENCE {
            if self.pool.supply(wanted, supply) {
                return Ok(());
            }
            self.commit(Extent::Changes)?;
        }
        Err(Errno::ENOMEM)
    }

    /// Frames for up to `count` pages.
    fn frames(&self, count: usize) -> Result<Frames> {
        for _ in 0..PATIENCE {
            if let Some(frames) = self.pool.frames(count) {
                return Ok(frames);
            }
            self.commit(Extent::Changes)?;
        }
        Err(Errno::ENOMEM)
    }

    /// Reads pages, several runs of them at a time.
    fn fetch(&self, missing: &[(u64, u64)], fetched: &mut Fetched) -> Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        let follows = |a: &(u64, u64), b: &(u64, u64)| a.0 + 1 == b.0 && a.1 + 1 == b.1;
        let (mut pages, mut runs) = (Vec::new(), Vec::new());
        for run in missing.chunk_by(follows) {
            let mut rest = run;
            while let Some((page, block)) = rest.first() {
                let frames = self.frames(rest.len().min(self.io.gathered()))?;
                rest = &rest[frames.count() as usize..];
                pages.push(*page);
                runs.push((*block, frames));
            }
        }
        let read = self.io.read(runs).map_err(|errno| {
            log::error!("uhs: data cannot be read: {errno}");
            Errno::EIO
        })?;
        let frames = read.into_iter().map(|run| Frame::each(run).collect());
        fetched.pages.extend(pages.into_iter().zip(frames));
        Ok(())
    }

    /// Writes the data of a group, and makes it durable.
    pub(super) fn write_data(
        &self,
        store: &Store,
        batch: &mut Batch,
    ) -> std::result::Result<(), StoreError> {
        if batch.data.is_empty() {
            return Ok(());
        }
        let lost = self.io.write(&mut batch.data).map_err(failed("write data"))?;
        if let Some(first) = lost.first() {
            return Err(failed("write data")(first.errno));
        }
        self.pool.wrote(batch.number);
        match self.rules.data_is_first {
            true => store.flush(),
            false => Ok(()),
        }
    }
}
