//! Contents: from the device, to callers and back.

use std::sync::{Arc, Mutex};

use defuse_fs::{Attr, Errno, ReadBuf, Result, SetAttr};

use super::commit::Extent;
use super::{Engine, LOADS, Slots, lock};
use crate::content::Content;
use crate::format::BLOCK;
use crate::format::inode::{Data, Decoded, Inode};
use crate::format::slot::{self, Found, Place};
use crate::group::Handle;
use crate::names::Kept;
use crate::store::{StoreError, failed};

/// Blocks of one read at most: 1 MiB.
const GATHERED: usize = 256;

/// Reads of slots that are overwritten meanwhile.
const TRIES: usize = 100;

impl Engine {
    /// The content of an inode of any kind.
    pub(crate) fn content(&self, ino: u64) -> Result<Arc<Mutex<Content>>> {
        if let Kept::Here(content) = self.names.content(ino)? {
            return Ok(content);
        }
        let _turn = lock(&self.loads[ino as usize % LOADS]);
        self.names.revive(ino, || {
            let read = self.read_slots(&[ino]);
            read.ok().and_then(|mut found| found.pop()).map(|inode| inode.data).ok_or(Errno::EIO)
        })
    }

    fn places(&self, inos: &[u64]) -> Vec<Option<Place>> {
        match &self.store {
            Slots::Store(store) => store.places(inos),
            Slots::Frozen(frozen) => frozen.places(inos),
        }
    }

    /// The inodes in the slots that count.
    pub(super) fn read_slots(&self, inos: &[u64]) -> Result<Vec<Inode>, StoreError> {
        if inos.is_empty() {
            return Ok(Vec::new());
        }
        for _ in 0..TRIES {
            let places = self.places(inos);
            let found = self.read_places(inos, &places)?;
            // A slot may have been overwritten meanwhile, if the inode has another one since.
            if self.places(inos) == places {
                let whole: Option<Vec<Inode>> = found.into_iter().collect();
                return whole.ok_or(StoreError::Lost);
            }
        }
        Err(StoreError::Lost)
    }

    fn read_places(
        &self,
        inos: &[u64],
        places: &[Option<Place>],
    ) -> Result<Vec<Option<Inode>>, StoreError> {
        let mut order: Vec<(usize, Place)> = Vec::with_capacity(inos.len());
        order.extend(places.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?))));
        order.sort_unstable_by_key(|(_, place)| place.block);
        let mut found = vec![None; inos.len()];
        let mut line = lock(&self.line);
        let neighbours = |a: &(usize, Place), b: &(usize, Place)| a.1.block + 1 == b.1.block;
        for run in order.chunk_by(neighbours).flat_map(|run| run.chunks(GATHERED)) {
            let mut bytes = vec![0; run.len() * BLOCK];
            line.read(run[0].1.block, &mut bytes).map_err(failed("read an inode"))?;
            for ((at, place), bytes) in run.iter().zip(bytes.chunks(BLOCK)) {
                found[*at] = decode(bytes, place, inos[*at]);
            }
        }
        Ok(found)
    }

    /// The content of a regular file. `EISDIR`, `EINVAL` for what has no data.
    fn data(&self, ino: u64) -> Result<Arc<Mutex<Content>>> {
        self.names.check_data(ino)?;
        self.content(ino)
    }

    pub(crate) fn read(&self, ino: u64, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let content = self.data(ino)?;
        loop {
            let held = lock(&content);
            let missing = held.missing(offset, out.remaining() as u64);
            if missing.is_empty() {
                held.read(offset, out)?;
                drop(held);
                self.names.accessed(ino);
                return Ok(());
            }
            drop(held);
            self.fetch(&content, &missing)?;
        }
    }

    pub(crate) fn readlink(&self, ino: u64) -> Result<Vec<u8>> {
        self.names.check_link(ino)?;
        let content = self.content(ino)?;
        let target = match lock(&content).data() {
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
        let missing = |held: &Content| {
            held.missing_edges(offset.unwrap_or_else(|| held.size()), data.len() as u64)
        };
        let taken = self.change_content(&content, missing, |held, handle| {
            let offset = offset.unwrap_or_else(|| held.size());
            let taken = held.write(&self.pool, offset, data);
            match &taken {
                Ok(0) | Err(_) => self.names.settle(handle, ino, held.facts())?,
                Ok(_) => self.names.wrote(handle, ino, held.facts(), kill_suidgid)?,
            }
            taken
        })?;
        // Whoever writes faster than the device waits for it.
        if self.pool.pages().1 > self.options.dirty_pages {
            self.commit(Extent::Changes)?;
        }
        Ok(taken)
    }

    pub(crate) fn setattr(&self, ino: u64, set: &SetAttr) -> Result<Attr> {
        let Some(size) = set.size else {
            return self.change(|names, handle| names.setattr(handle, ino, set, None));
        };
        let content = self.data(ino)?;
        let missing = |held: &Content| held.page_to_cut(size);
        let attr = self.change_content(&content, missing, |held, handle| {
            let result = held.set_size(&self.pool, size);
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

    /// Changes a content when nothing is `missing` for it.
    fn change_content<T>(
        &self,
        content: &Mutex<Content>,
        missing: impl Fn(&Content) -> Vec<(u64, u64)>,
        change: impl FnOnce(&mut Content, &Handle<'_>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let handle = self.enter()?;
            let mut held = lock(content);
            let missing = missing(&held);
            if missing.is_empty() {
                let result = change(&mut held, &handle);
                drop(held);
                self.leave(handle);
                return result;
            }
            drop(held);
            drop(handle);
            self.fetch(content, &missing)?;
        }
    }

    /// Reads pages into memory. The content drops those whose block is another one by then.
    fn fetch(&self, content: &Mutex<Content>, missing: &[(u64, u64)]) -> Result<()> {
        // Blocks that are freed and taken again meanwhile may hold anything.
        let releases = self.pool.releases();
        for run in missing.chunk_by(|a, b| a.1 + 1 == b.1).flat_map(|run| run.chunks(GATHERED)) {
            let mut bytes = vec![0; run.len() * BLOCK];
            lock(&self.line).read(run[0].1, &mut bytes).map_err(|_| Errno::EIO)?;
            let mut held = lock(content);
            for (at, page) in run.iter().zip(bytes.as_chunks::<BLOCK>().0) {
                if self.pool.releases() == releases {
                    held.fill(&self.pool, *at, Arc::new(*page));
                }
            }
        }
        Ok(())
    }
}

fn decode(bytes: &[u8], place: &Place, ino: u64) -> Option<Inode> {
    match slot::decode(bytes, place) {
        Found::Whole(identity, body) if identity.ino == ino => match Inode::decode(body)? {
            Decoded::Whole(inode) => Some(inode),
            Decoded::Outside { .. } => None,
        },
        _ => None,
    }
}
