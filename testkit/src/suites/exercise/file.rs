//! Random operations on one file, compared with a copy in memory.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use rustix::fs::{
    Advice, FallocateFlags, Mode, OFlags, copy_file_range, fadvise, fallocate, fdatasync, fstat,
    fsync, ftruncate, ioctl_ficlone, open, unlink,
};
use rustix::io::{Errno, pread, pwrite};

use super::operations::{BLOCK, ExerciseOperation, MAX, OperationKind};
use crate::posix::TestMapping;

/// Number of last operations that a failure prints.
const HISTORY: usize = 25;

/// Number of operations between comparisons of the whole file.
const WHOLE: u32 = 25;

/// The file, and the copy that it must match.
struct ComparedFile {
    path: PathBuf,
    fd: OwnedFd,
    copy: Vec<u8>,
    /// A mapping that is kept.
    map: Option<TestMapping>,
    /// Number of operations of each kind that were performed and not refused.
    done: BTreeMap<OperationKind, u32>,
    history: VecDeque<String>,
}

/// Performs `count` operations on a file in `dir`. Returns the number of operations of each kind,
/// one per line.
pub(super) fn exercise(dir: &Path, seed: u64, count: u32) -> Result<String> {
    let path = dir.join(format!("exercise-{seed}"));
    let mut rng = Rng::with_seed(seed);
    let mut file = ComparedFile {
        fd: open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, Mode::RWXU)?,
        path,
        copy: Vec::new(),
        map: None,
        done: OperationKind::ALL.iter().map(|&kind| (kind, 0)).collect(),
        history: VecDeque::new(),
    };
    for number in 0..count {
        let operation = ExerciseOperation::random(&mut rng, file.copy.len());
        file.history.push_back(format!("{number}: {operation:?}"));
        if file.history.len() > HISTORY {
            file.history.pop_front();
        }
        let step = file
            .step(operation, &mut rng)
            .and_then(|()| if number % WHOLE == 0 { file.check() } else { file.check_size() });
        step.with_context(|| file.describe(seed))?;
    }
    file.reopen().and_then(|()| file.check()).with_context(|| file.describe(seed))?;
    unlink(&file.path)?;
    let line = |(kind, count): (&OperationKind, &u32)| format!("{}: {count}\n", kind.name());
    Ok(file.done.iter().map(line).collect())
}

impl ComparedFile {
    fn describe(&self, seed: u64) -> String {
        let mut text = format!("seed {seed}, the last operations:\n");
        for line in &self.history {
            let _ = writeln!(text, "  {line}");
        }
        text
    }

    fn step(&mut self, operation: ExerciseOperation, rng: &mut Rng) -> Result<()> {
        let ExerciseOperation { kind, offset, len, to } = operation;
        let done = match kind {
            OperationKind::Read => self.read(offset, len).map(|()| true),
            OperationKind::Write => self.write(offset, &bytes(rng, len)),
            OperationKind::MappedRead => self.use_mapping(offset, len, None),
            OperationKind::MappedWrite => self.use_mapping(offset, len, Some(bytes(rng, len))),
            OperationKind::Map => self.keep_mapped(),
            OperationKind::Truncate => self.truncate(to),
            OperationKind::CopyRange => self.copy_range(offset, len, to),
            OperationKind::Clone => self.clone_is_refused(),
            OperationKind::Sync if to % 2 == 0 => fsync(&self.fd).map(|()| true).context("fsync"),
            OperationKind::Sync => fdatasync(&self.fd).map(|()| true).context("fdatasync"),
            OperationKind::Forget => self.forget(),
            OperationKind::Reopen => self.reopen().map(|()| true),
            _ => self.allocate(kind, offset, len),
        };
        let done = done.with_context(|| format!("{operation:?}"))?;
        *self.done.entry(kind).or_default() += u32::from(done);
        Ok(())
    }

    fn read(&self, offset: usize, len: usize) -> Result<()> {
        let mut room = vec![0; len];
        let mut got = 0;
        while got < len {
            match pread(&self.fd, &mut room[got..], (offset + got) as u64)? {
                0 => break,
                count => got += count,
            }
        }
        let end = self.copy.len().min(offset + len);
        let expected = self.copy.get(offset..end).unwrap_or_default();
        compare_bytes(&room[..got], expected, offset, "read")
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<bool> {
        let mut put = 0;
        while put < bytes.len() {
            put += pwrite(&self.fd, &bytes[put..], (offset + put) as u64)?;
        }
        self.store(offset, bytes);
        Ok(true)
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.copy.len() < end {
            self.copy.resize(end, 0);
        }
        self.copy[offset..end].copy_from_slice(bytes);
    }

    /// Reads or writes through a mapping: the kept one as far as it goes, or a new one.
    fn use_mapping(&mut self, offset: usize, len: usize, write: Option<Vec<u8>>) -> Result<bool> {
        let end = (offset + len).min(self.copy.len());
        if offset >= end {
            return Ok(false);
        }
        let kept = self.map.take().filter(|map| map.len() >= end);
        let map = match kept {
            Some(map) => map,
            None => TestMapping::new(&self.fd, end, true).context("mmap")?,
        };
        match write {
            Some(bytes) => {
                map.write(offset, &bytes[..end - offset]);
                self.store(offset, &bytes[..end - offset]);
            }
            None => {
                let seen = map.read(offset, end - offset);
                compare_bytes(&seen, &self.copy[offset..end], offset, "the mapping")?;
            }
        }
        self.map = Some(map);
        Ok(true)
    }

    /// Maps the whole file from now on.
    fn keep_mapped(&mut self) -> Result<bool> {
        self.map = None;
        if !self.copy.is_empty() {
            self.map = Some(TestMapping::new(&self.fd, self.copy.len(), true).context("mmap")?);
        }
        Ok(true)
    }

    fn truncate(&mut self, len: usize) -> Result<bool> {
        ftruncate(&self.fd, len as u64)?;
        self.copy.resize(len, 0);
        Ok(true)
    }

    /// fallocate(2). A file system that refuses must not have changed anything, which the next
    /// comparison checks.
    fn allocate(&mut self, kind: OperationKind, offset: usize, len: usize) -> Result<bool> {
        let end = offset + len;
        let size = self.copy.len();
        let flags = match kind {
            OperationKind::Allocate => FallocateFlags::empty(),
            OperationKind::AllocateKeepingSize => FallocateFlags::KEEP_SIZE,
            OperationKind::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            OperationKind::Zero => FallocateFlags::ZERO_RANGE,
            OperationKind::ZeroKeepingSize => {
                FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
            }
            OperationKind::Collapse => FallocateFlags::COLLAPSE_RANGE,
            _ => FallocateFlags::INSERT_RANGE,
        };
        match fallocate(&self.fd, flags, offset as u64, len as u64) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => return Ok(false),
            // A range that reaches the end cannot be collapsed, and nothing can be inserted there.
            Err(Errno::INVAL) if kind == OperationKind::Collapse && end >= size => {
                return Ok(false);
            }
            Err(Errno::INVAL) if kind == OperationKind::Insert && offset >= size => {
                return Ok(false);
            }
            Err(error) => return Err(error).context("fallocate"),
        }
        match kind {
            OperationKind::Allocate => self.copy.resize(size.max(end), 0),
            OperationKind::AllocateKeepingSize => {}
            OperationKind::Punch | OperationKind::ZeroKeepingSize => {
                self.copy[offset.min(size)..end.min(size)].fill(0);
            }
            OperationKind::Zero => {
                self.copy.resize(size.max(end), 0);
                self.copy[offset..end].fill(0);
            }
            OperationKind::Collapse => {
                ensure!(end < size, "a range that reaches the end was collapsed");
                self.copy.drain(offset..end);
            }
            _ => {
                ensure!(offset < size, "a range was inserted at the end");
                self.copy.splice(offset..offset, std::iter::repeat_n(0, len));
            }
        }
        Ok(true)
    }

    fn copy_range(&mut self, offset: usize, len: usize, to: usize) -> Result<bool> {
        let len = len.min(self.copy.len().saturating_sub(offset)).min(MAX - to.min(MAX));
        if len == 0 || offset.abs_diff(to) < len {
            return Ok(false);
        }
        let (mut from, mut into) = (offset as u64, to as u64);
        let mut left = len;
        while left > 0 {
            let copied =
                copy_file_range(&self.fd, Some(&mut from), &self.fd, Some(&mut into), left);
            match copied.context("copy_file_range")? {
                0 => bail!("copy_file_range ends {left} bytes early"),
                count => left -= count,
            }
        }
        let bytes = self.copy[offset..offset + len].to_vec();
        self.store(to, &bytes);
        Ok(true)
    }

    /// A file system without shared extents refuses a clone. The target must then be unchanged.
    fn clone_is_refused(&mut self) -> Result<bool> {
        let path = self.path.with_extension("clone");
        let fd = open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC, Mode::RWXU)?;
        let cloned = ioctl_ficlone(&fd, &self.fd);
        let size = fstat(&fd)?.st_size as usize;
        unlink(&path)?;
        match cloned {
            Ok(()) => ensure!(size == self.copy.len(), "a clone of {size} bytes"),
            Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::XDEV | Errno::NOSYS) => {
                ensure!(size == 0, "a clone that was refused has {size} bytes");
            }
            Err(error) => return Err(error).context("FICLONE"),
        }
        Ok(cloned.is_ok())
    }

    /// Requests that the kernel drop the cached pages of the file.
    fn forget(&mut self) -> Result<bool> {
        fsync(&self.fd)?;
        fadvise(&self.fd, 0, None, Advice::DontNeed)?;
        Ok(true)
    }

    fn reopen(&mut self) -> Result<()> {
        self.fd = open(&self.path, OFlags::RDWR, Mode::empty())?;
        self.map = None;
        Ok(())
    }

    fn check_size(&self) -> Result<()> {
        let size = fstat(&self.fd)?.st_size as usize;
        ensure!(size == self.copy.len(), "the file has {size} bytes, not {}", self.copy.len());
        Ok(())
    }

    /// Compares the whole file: by read, by a new mapping, and by the kept mapping.
    fn check(&self) -> Result<()> {
        self.check_size()?;
        let len = self.copy.len();
        self.read(0, len + BLOCK)?;
        if len == 0 {
            return Ok(());
        }
        let map = TestMapping::new(&self.fd, len, true).context("mmap")?;
        compare_bytes(&map.read(0, len), &self.copy, 0, "a new mapping")?;
        drop(map);
        if let Some(map) = &self.map {
            let len = map.len().min(len);
            compare_bytes(&map.read(0, len), &self.copy[..len], 0, "the mapping that stays")?;
        }
        Ok(())
    }
}

fn bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

fn compare_bytes(seen: &[u8], expected: &[u8], offset: usize, what: &str) -> Result<()> {
    if seen == expected {
        return Ok(());
    }
    let lens = (seen.len(), expected.len());
    let first = seen.iter().zip(expected).position(|(left, right)| left != right);
    let at = first.unwrap_or(lens.0.min(lens.1));
    let wrong = seen.iter().zip(expected).filter(|(left, right)| left != right).count();
    bail!(
        "{what}: {} bytes of {}; {wrong} differ, the first at {:#x}: {:?} is not {:?}",
        lens.0,
        lens.1,
        offset + at,
        seen.get(at),
        expected.get(at)
    )
}
