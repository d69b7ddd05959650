//! Workloads on data: sequential and random reads and writes, buffered and direct.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use super::fileset::{SHARED, data_file};
use super::{BatchDirs, BatchJob, IoStream, WorkDeadline};
use crate::caches;

/// The alignment that `O_DIRECT` requires on any device.
const ALIGNMENT: usize = 4096;

/// One job for each thread.
pub fn jobs(place: &BatchDirs, io: IoStream) -> Result<Vec<BatchJob>> {
    if io.write {
        fs::create_dir(place.root.join(&place.own))?;
    }
    (0..place.threads)
        .map(|thread| match (io.write, io.direct) {
            (false, false) => buffered_read(place, io, thread),
            (false, true) => direct_read(place, io, thread),
            (true, false) => buffered_write(place, io, thread),
            (true, true) => direct_write(place, io, thread),
        })
        .collect()
}

/// Reads a part of a file once, with a cold page cache in both file systems.
fn buffered_read(place: &BatchDirs, io: IoStream, thread: usize) -> Result<BatchJob> {
    let name = Path::new(SHARED).join(data_file(thread));
    caches::drop_pages(&place.root.join(&name))?;
    caches::drop_pages(&place.below.join(&name))?;
    let fd = open(&place.root.join(&name), OFlags::RDONLY)?;
    let operations = place.fileset.stream_bytes / place.threads / io.bytes;
    Ok(Box::new(move |_| {
        let mut buffer = AlignedBuffer::new(io.bytes);
        for _ in 0..operations {
            let read = rustix::io::read(&fd, buffer.bytes())?;
            ensure!(read == io.bytes, "a read was short: {read} of {}", io.bytes);
        }
        Ok(operations as u64)
    }))
}

fn direct_read(place: &BatchDirs, io: IoStream, thread: usize) -> Result<BatchJob> {
    let name = data_file(if io.shared { 0 } else { thread });
    let fd = open(&place.root.join(SHARED).join(name), OFlags::RDONLY | OFlags::DIRECT)?;
    let blocks = BlockSequence::new(place, io, thread);
    Ok(Box::new(move |until| {
        blocks.run_until(until, |at, bytes| Ok(rustix::io::pread(&fd, bytes, at)?))
    }))
}

/// Writes a new file and closes it, so that delayed writes are included.
fn buffered_write(place: &BatchDirs, io: IoStream, thread: usize) -> Result<BatchJob> {
    let path = place.root.join(&place.own).join(data_file(thread));
    let fd = open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
    let operations = place.fileset.stream_bytes / place.threads / io.bytes;
    Ok(Box::new(move |_| {
        let mut buffer = AlignedBuffer::new(io.bytes);
        for _ in 0..operations {
            let written = rustix::io::write(&fd, buffer.bytes())?;
            ensure!(written == io.bytes, "a write was short: {written} of {}", io.bytes);
        }
        drop(fd);
        Ok(operations as u64)
    }))
}

/// Overwrites a complete file. It was written through the lower file system, so that no cache above
/// has its pages.
fn direct_write(place: &BatchDirs, io: IoStream, thread: usize) -> Result<BatchJob> {
    let number = if io.shared { 0 } else { thread };
    let name = Path::new(&place.own).join(data_file(number));
    if number == thread {
        let below = place.below.join(&name);
        fs::write(&below, vec![0_u8; place.fileset.stream_bytes])?;
        caches::drop_pages(&below)?;
    }
    let fd = open(&place.root.join(&name), OFlags::WRONLY | OFlags::DIRECT)?;
    let blocks = BlockSequence::new(place, io, thread);
    Ok(Box::new(move |until| {
        blocks.run_until(until, |at, bytes| Ok(rustix::io::pwrite(&fd, bytes, at)?))
    }))
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
        .with_context(|| format!("open {}", path.display()))
}

/// The order in which a thread accesses the blocks of a file.
struct BlockSequence {
    count: u64,
    bytes: usize,
    random: bool,
    /// State of a simple generator: the same numbers for every target.
    seed: u64,
}

impl BlockSequence {
    fn new(place: &BatchDirs, io: IoStream, thread: usize) -> Self {
        let count = (place.fileset.stream_bytes / io.bytes) as u64;
        Self { count, bytes: io.bytes, random: io.random, seed: 0x9e37_79b9 + thread as u64 }
    }

    fn offset(&mut self, done: u64) -> u64 {
        let block = if self.random { self.random() } else { done } % self.count;
        block * self.bytes as u64
    }

    /// xorshift64*, which spreads accesses well enough without a crate.
    fn random(&mut self) -> u64 {
        self.seed ^= self.seed >> 12;
        self.seed ^= self.seed << 25;
        self.seed ^= self.seed >> 27;
        self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn run_until(
        mut self,
        until: &WorkDeadline,
        mut one: impl FnMut(u64, &mut [u8]) -> Result<usize>,
    ) -> Result<u64> {
        let mut buffer = AlignedBuffer::new(self.bytes);
        let mut done = 0;
        while !until.is_over() {
            let moved = one(self.offset(done), buffer.bytes())?;
            ensure!(moved == self.bytes, "a transfer was short: {moved} of {}", self.bytes);
            done += 1;
        }
        Ok(done)
    }
}

/// Memory on a page boundary.
struct AlignedBuffer {
    memory: Vec<u8>,
    skip: usize,
    bytes: usize,
}

impl AlignedBuffer {
    fn new(bytes: usize) -> Self {
        let memory = vec![0x5a; bytes + ALIGNMENT];
        let skip = memory.as_ptr().align_offset(ALIGNMENT);
        Self { memory, skip, bytes }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.skip..self.skip + self.bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned() {
        let mut buffer = AlignedBuffer::new(4096);
        assert_eq!(buffer.bytes().as_ptr() as usize % ALIGNMENT, 0);
        assert_eq!(buffer.bytes().len(), 4096);
    }

    #[test]
    fn offsets_stay_inside_the_file() {
        let mut blocks = BlockSequence { count: 10, bytes: 4096, random: true, seed: 1 };
        let offsets: Vec<_> = (0..1000).map(|done| blocks.offset(done)).collect();
        assert!(offsets.iter().all(|offset| offset % 4096 == 0 && *offset < 10 * 4096));
        blocks.random = false;
        assert_eq!(blocks.offset(11), 4096);
    }
}
