//! Inodes on a device: the commit rule, carried out.
//!
//! One thread at a time uses a store. [`Store::commit`] only begins the writes of a group, so that groups
//! overlap; [`Store::sync`] waits until all of them survive a power failure.

mod copies;
mod error;
mod scan;

use std::sync::Arc;

use defuse_block::{Blocking, Device, Done, Errno, FRAME, Frames, Kind, Op, Queue, Region};

use crate::commit::{Change, Group, Groups, NoSlots, Recovered, Rules};
use crate::content::Bytes;
use crate::format::slot::{self, Place};
use crate::format::superblock::{CHUNKS, Chunk, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};

use copies::write_superblock;
pub(crate) use copies::{make, read_superblock};
pub use error::StoreError;
pub(crate) use error::failed;
pub(crate) use scan::{scan, survey};

/// Frames for slots that are being written: 8 MiB.
const FRAMES: u32 = 2048;

/// Slots of one device write at most: 1 MiB.
const GATHERED: usize = 256;

/// Inode numbers that are taken at a time.
const INO_STEP: u64 = 1 << 20;

/// Operations in flight.
const DEPTH: u32 = 64;

/// The inodes of a device, each a body under a number.
pub(crate) struct Store {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    region: Arc<Region>,
    superblock: Superblock,
    groups: Groups,
    /// Writes in flight.
    writing: usize,
    random: fastrand::Rng,
    rules: Rules,
    failed: bool,
}

impl Store {
    /// Opens the file system on `device`. What a power failure left half done is undone. `random` makes
    /// the keys of new chunks, which nobody may guess.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub(crate) fn open(
        device: Arc<dyn Device>,
        random: fastrand::Rng,
    ) -> Result<(Store, Recovered), StoreError> {
        Store::open_by(device, Rules::ALL, random)
    }

    /// Opens the file system by some of the rules.
    pub(crate) fn open_by(
        device: Arc<dyn Device>,
        rules: Rules,
        random: fastrand::Rng,
    ) -> Result<(Store, Recovered), StoreError> {
        let blocks = device.facts().blocks;
        let mut line = Blocking::new(&*device).map_err(failed("open a queue"))?;
        let mut superblock = read_superblock(&mut line, blocks)?;
        let mut found = survey(&mut line, &superblock, rules)?;
        if rules.void_slots_are_zeroed && !found.void.is_empty() {
            for block in &found.void {
                line.write(*block, &[0; BLOCK]).map_err(failed("zero a slot"))?;
            }
            line.flush().map_err(failed("flush"))?;
        }
        superblock.epoch += 1;
        found.next_ino = superblock.next_ino.max(found.next_ino);
        superblock.next_ino = found.next_ino + INO_STEP;
        if rules.mount_is_recorded {
            superblock.durable = found.durable;
        }
        write_superblock(&mut line, &superblock)?;
        drop(line);

        let groups = Groups::new(&superblock.chunks, &found, rules);
        let region = Region::new(FRAMES).map_err(failed("reserve memory"))?;
        device.register(&region).map_err(failed("register memory"))?;
        let queue = device.queue(DEPTH).map_err(failed("open a queue"))?;
        let store = Store {
            device,
            queue,
            region,
            superblock,
            groups,
            writing: 0,
            random,
            rules,
            failed: false,
        };
        Ok((store, found))
    }

    /// Begins to write a group of `changes`, each of another inode. Returns its number; it is durable after
    /// the next [`sync`](Store::sync). Where slots run out, `units` takes up to so many neighbouring units
    /// that nothing uses, and returns the first and their number.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`], with nothing changed, or a failure of the device, after which only failures
    /// follow.
    pub(crate) fn commit(
        &mut self,
        changes: &[Change],
        units: &mut dyn FnMut(u32) -> Option<(u32, u32)>,
    ) -> Result<u64, StoreError> {
        self.check()?;
        self.raise_next_ino(changes)?;
        let group = loop {
            match self.groups.close(changes.to_vec()) {
                Ok(group) => break group,
                Err(NoSlots::UntilDurable) => self.sync()?,
                Err(NoSlots::UntilMentioned) => self.mention()?,
                Err(NoSlots::Full) if self.rules.usable < usize::MAX => {
                    return Err(StoreError::Full);
                }
                Err(NoSlots::Full) => self.add_chunk(units)?,
            }
        };
        let Some(group) = group else { return Ok(self.groups.newest()) };
        self.write(&group)?;
        Ok(group.number)
    }

    /// Makes all groups durable.
    ///
    /// # Errors
    ///
    /// A failure of the device: nobody knows then what is durable of the groups since the sync before.
    pub(crate) fn sync(&mut self) -> Result<(), StoreError> {
        self.check()?;
        self.finish_writes()?;
        let newest = self.groups.newest();
        if self.groups.newest_durable() == newest {
            return Ok(());
        }
        self.run(Kind::Flush, "flush")?;
        self.groups.durable(newest);
        Ok(())
    }

    /// Takes in writes that have completed, without waiting.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub(crate) fn poll(&mut self) -> Result<(), StoreError> {
        let mut done = Vec::new();
        self.queue.reap(&mut done);
        self.writing -= done.len();
        done.into_iter().try_for_each(|Done { result, .. }| self.note(result, "write"))
    }

    /// The newest group that survives a power failure.
    #[cfg(test)]
    pub(crate) fn durable(&self) -> u64 {
        self.groups.newest_durable()
    }

    fn place(&self, block: u64) -> Place {
        let unit = (block / UNIT_BLOCKS) as u32;
        let chunks = self.superblock.chunks.iter();
        let key = chunks
            .filter(|chunk| (chunk.first_unit..chunk.first_unit + chunk.units).contains(&unit))
            .map(|chunk| chunk.key)
            .next()
            .unwrap_or_else(|| panic!("block {block} is no slot"));
        Place { uuid: self.superblock.uuid, key, block }
    }

    /// True where the device has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.failed { Err(StoreError::Failed) } else { Ok(()) }
    }

    fn note(&mut self, result: Result<(), Errno>, action: &'static str) -> Result<(), StoreError> {
        self.failed |= result.is_err();
        result.map_err(failed(action))
    }

    /// Begins the writes of a group. Slots that lie side by side are written together.
    fn write(&mut self, group: &Group) -> Result<(), StoreError> {
        let mut order: Vec<usize> = (0..group.writes.len()).collect();
        order.sort_unstable_by_key(|at| group.writes[*at].block);
        let neighbours =
            |a: &usize, b: &usize| group.writes[*a].block + 1 == group.writes[*b].block;
        for run in order.chunk_by(neighbours).flat_map(|run| run.chunks(GATHERED)) {
            let mut frames = self.frames(run.len() as u32)?;
            for (at, out) in run.iter().zip(frames.chunks_mut(FRAME)) {
                let write = &group.writes[*at];
                slot::encode(write.identity, &write.body, &self.place(write.block), out);
            }
            self.begin_write(group.writes[run[0]].block, frames)?;
        }
        self.queue.kick();
        Ok(())
    }

    fn begin_write(&mut self, block: u64, frames: Frames) -> Result<(), StoreError> {
        let kind = Kind::Write { block, memory: frames.into(), fua: false };
        let mut op = Op { tag: 0, kind };
        while let Err(again) = self.queue.push(op) {
            op = again;
            self.queue.wait(None);
            self.poll()?;
        }
        self.writing += 1;
        Ok(())
    }

    fn frames(&mut self, count: u32) -> Result<Frames, StoreError> {
        loop {
            if let Some(frames) = self.region.take(count) {
                return Ok(frames);
            }
            // The frames come back with the writes.
            self.queue.wait(None);
            self.poll()?;
        }
    }

    /// Carries out an operation beside the writes, and waits for it.
    fn run(&mut self, kind: Kind, action: &'static str) -> Result<(), StoreError> {
        let device = Arc::clone(&self.device);
        let result = Blocking::new(&*device).and_then(|mut line| line.run(kind));
        self.note(result, action)
    }

    /// Says on the device how far groups are durable, so that more slots may be used again.
    fn mention(&mut self) -> Result<(), StoreError> {
        let durable = self.groups.newest_durable();
        self.update(|superblock| superblock.durable = durable)?;
        self.groups.mentioned(durable);
        Ok(())
    }

    /// Takes units for more slots: about an eighth of those that there are.
    fn add_chunk(
        &mut self,
        units: &mut dyn FnMut(u32) -> Option<(u32, u32)>,
    ) -> Result<(), StoreError> {
        let have: u32 = self.superblock.chunks.iter().map(|chunk| chunk.units).sum();
        if self.superblock.chunks.len() == CHUNKS {
            return Err(StoreError::Full);
        }
        let (first_unit, units) = units((have / 8).max(1)).ok_or(StoreError::Full)?;
        let chunk = Chunk { first_unit, units, key: self.random.u64(..) };
        // A chunk is in a durable superblock before a slot of it is written.
        self.update(|superblock| superblock.chunks.push(chunk))?;
        self.groups.add(&chunk);
        Ok(())
    }

    /// Says on the device that inode numbers up to those of `changes` are taken, in large steps: the slots
    /// of inodes that are gone do not say it for ever.
    fn raise_next_ino(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let written = changes.iter().map(|change| match change {
            Change::Write { ino, .. } | Change::Remove { ino } => *ino,
        });
        match written.max() {
            Some(newest) if newest >= self.superblock.next_ino => {
                self.update(|superblock| superblock.next_ino = newest + INO_STEP)
            }
            _ => Ok(()),
        }
    }

    /// Writes blocks of data and makes them durable.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub(crate) fn write_data(&mut self, data: &[(u64, Arc<Bytes>)]) -> Result<(), StoreError> {
        self.check()?;
        if data.is_empty() {
            return Ok(());
        }
        let mut order: Vec<&(u64, Arc<Bytes>)> = data.iter().collect();
        order.sort_unstable_by_key(|(block, _)| *block);
        for run in order.chunk_by(|a, b| a.0 + 1 == b.0).flat_map(|run| run.chunks(GATHERED)) {
            let mut frames = self.frames(run.len() as u32)?;
            for ((_, bytes), out) in run.iter().zip(frames.chunks_mut(FRAME)) {
                out.copy_from_slice(&bytes[..]);
            }
            self.begin_write(run[0].0, frames)?;
        }
        if !self.rules.data_is_first {
            return Ok(());
        }
        self.finish_writes()?;
        self.run(Kind::Flush, "flush")
    }

    fn finish_writes(&mut self) -> Result<(), StoreError> {
        while self.writing > 0 {
            self.queue.wait(None);
            self.poll()?;
        }
        Ok(())
    }

    /// Slots of all chunks.
    pub(crate) fn slots(&self) -> u64 {
        let units = self.superblock.chunks.iter().map(|chunk| u64::from(chunk.units));
        units.sum::<u64>() * UNIT_BLOCKS
    }

    /// The superblock.
    pub(crate) fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    fn update(&mut self, change: impl FnOnce(&mut Superblock)) -> Result<(), StoreError> {
        let mut superblock = self.superblock.clone();
        superblock.epoch += 1;
        change(&mut superblock);
        let mut line = Blocking::new(&*self.device).map_err(failed("open a queue"))?;
        let written = write_superblock(&mut line, &superblock);
        self.failed |= written.is_err();
        written?;
        self.superblock = superblock;
        Ok(())
    }
}
