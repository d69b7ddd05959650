//! Random operations of several processes on one tree.

use std::fs::create_dir;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, Uid, XattrFlags, chmod,
    chownat, copy_file_range, fallocate, fstat, fsync, ftruncate, link, lremovexattr, lsetxattr,
    lstat, mkdir, mknodat, open, readlink, rename, renameat_with, rmdir, symlink, unlink,
};
use rustix::io::{Errno, pread, pwrite};

use super::listing::{ATTRIBUTE, TreeListing};
use crate::posix::{ForkedChild, TestMapping};

/// Number of processes.
const PROCESSES: u64 = 4;

/// Maximum size of a file, in bytes.
const MAX: u64 = 64 * 1024;

/// The expected errors of an operation on a name that another process changes meanwhile, or that
/// has another type. Any other error is a failure: EIO, ESTALE, EMFILE, ENOTCONN ...
const EXPECTED: &[Errno] = &[
    Errno::NOENT,
    Errno::EXIST,
    Errno::NOTDIR,
    Errno::ISDIR,
    Errno::NOTEMPTY,
    Errno::INVAL,
    Errno::LOOP,
    Errno::NODATA,
    Errno::OPNOTSUPP,
    Errno::PERM,
    Errno::NXIO,
];

/// Several processes perform `count` operations each on a tree in `dir`. Afterwards everything is
/// checked twice. Returns the listing.
pub(super) fn exercise(dir: &Path, seed: u64, count: u32) -> Result<String> {
    let base = dir.join(format!("tree-{seed}"));
    create_dir(&base)?;
    let start = |number| {
        ForkedChild::start(|| match worker(&base, seed, number, count) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("seed {seed}, process {number}: {error:#}");
                1
            }
        })
    };
    let children: Vec<_> = (0..PROCESSES).map(start).collect::<Result<_, _>>()?;
    let mut ends = Vec::new();
    for child in children {
        ends.push(child.wait());
    }
    let well = ends.iter().all(|end| matches!(end, Ok(0)));
    ensure!(well, "the processes of seed {seed} ended with {ends:?}");
    let first = TreeListing::list(dir).with_context(|| format!("seed {seed}"))?;
    let second = TreeListing::list(dir).with_context(|| format!("seed {seed}"))?;
    ensure!(first == second, "seed {seed}: a second look sees something else");
    std::fs::write(base.join("still-there"), "yes").context("the mount takes no more files")?;
    std::fs::remove_file(base.join("still-there"))?;
    Ok(first.to_string())
}

fn worker(base: &Path, seed: u64, number: u64, count: u32) -> Result<()> {
    let rng = Rng::with_seed(seed << 8 | number);
    let mut worker =
        TreeWorker { base: base.to_path_buf(), rng, own: base.join(format!("own-{number}")) };
    let mut done = 0;
    for at in 0..count {
        let (name, operation) = OPERATIONS[worker.rng.usize(..OPERATIONS.len())];
        match operation(&mut worker) {
            Err(error) if !EXPECTED.contains(&error) => {
                return Err(error).with_context(|| format!("operation {at}, {name}"));
            }
            Err(_) => {}
            Ok(()) => done += 1,
        }
    }
    // A tree in which every operation fails proves nothing.
    ensure!(done > count / 10, "only {done} of {count} operations were done");
    Ok(())
}

/// One of the processes.
struct TreeWorker {
    base: PathBuf,
    rng: Rng,
    /// A name that no other process uses.
    own: PathBuf,
}

type TreeResult = Result<(), Errno>;

type TreeOperation = fn(&mut TreeWorker) -> TreeResult;

#[rustfmt::skip]
const OPERATIONS: &[(&str, TreeOperation)] = &[
    ("create", TreeWorker::create), ("create", TreeWorker::create), ("create", TreeWorker::create),
    ("mkdir", TreeWorker::mkdir), ("mkdir", TreeWorker::mkdir),
    ("rename", TreeWorker::rename), ("rename", TreeWorker::rename),
    ("renameat2", TreeWorker::rename_with), ("renameat2", TreeWorker::rename_with),
    ("link", TreeWorker::link), ("link", TreeWorker::link),
    ("unlink", TreeWorker::unlink), ("rmdir", TreeWorker::rmdir),
    ("symlink", TreeWorker::symlink), ("mknod", TreeWorker::mknod),
    ("write", TreeWorker::write), ("write", TreeWorker::write), ("read", TreeWorker::read),
    ("truncate", TreeWorker::truncate), ("fallocate", TreeWorker::fallocate),
    ("copy_file_range", TreeWorker::copy), ("mmap", TreeWorker::map),
    ("setxattr", TreeWorker::set_attribute), ("removexattr", TreeWorker::remove_attribute),
    ("chmod", TreeWorker::chmod), ("chown", TreeWorker::chown), ("fsync", TreeWorker::fsync),
    ("stat", TreeWorker::stat), ("readlink", TreeWorker::readlink), ("readdir", TreeWorker::list),
];

impl TreeWorker {
    /// A name at most three levels deep, from a small set, so that processes interfere.
    fn name(&mut self) -> PathBuf {
        let mut path = self.base.clone();
        for _ in 0..self.rng.usize(..3) {
            path.push(format!("d{}", self.rng.u8(..3)));
        }
        let kind = if self.rng.u8(..4) == 0 { 'd' } else { 'n' };
        path.push(format!("{kind}{}", self.rng.u8(..6)));
        path
    }

    fn mode(&mut self) -> Mode {
        // The owner always has all permissions; otherwise the exercise ends early if not run as
        // root.
        Mode::from_raw_mode(0o700 | self.rng.u32(..0o100))
    }

    /// Opens a file that is never a fifo.
    fn open(&mut self, flags: OFlags) -> Result<rustix::fd::OwnedFd, Errno> {
        let (path, mode) = (self.name(), self.mode());
        let fd = open(path, flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC, mode)?;
        match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
            FileType::RegularFile => Ok(fd),
            _ => Err(Errno::INVAL),
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.rng.usize(1..8192)];
        self.rng.fill(&mut bytes);
        bytes
    }

    fn create(&mut self) -> TreeResult {
        let more = [OFlags::empty(), OFlags::EXCL, OFlags::TRUNC][self.rng.usize(..3)];
        let fd = self.open(OFlags::RDWR | OFlags::CREATE | more)?;
        let bytes = self.bytes();
        pwrite(&fd, &bytes, self.rng.u64(..MAX)).map(drop)
    }

    fn mkdir(&mut self) -> TreeResult {
        // Directories mostly have names of directories, so that the tree grows.
        let mut path = self.name();
        if self.rng.u8(..4) != 0 {
            path.set_file_name(format!("d{}", self.rng.u8(..3)));
        }
        mkdir(path, self.mode())
    }

    fn rename(&mut self) -> TreeResult {
        rename(self.name(), self.name())
    }

    fn rename_with(&mut self) -> TreeResult {
        let flags = [RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][self.rng.usize(..2)];
        renameat_with(CWD, self.name(), CWD, self.name(), flags)
    }

    fn link(&mut self) -> TreeResult {
        link(self.name(), self.name())
    }

    fn unlink(&mut self) -> TreeResult {
        unlink(self.name())
    }

    fn rmdir(&mut self) -> TreeResult {
        rmdir(self.name())
    }

    fn symlink(&mut self) -> TreeResult {
        symlink(format!("../n{}", self.rng.u8(..6)), self.name())
    }

    fn mknod(&mut self) -> TreeResult {
        mknodat(CWD, self.name(), FileType::Fifo, self.mode(), 0)
    }

    fn write(&mut self) -> TreeResult {
        let fd = self.open(OFlags::WRONLY)?;
        let bytes = self.bytes();
        pwrite(&fd, &bytes, self.rng.u64(..MAX)).map(drop)
    }

    fn read(&mut self) -> TreeResult {
        let fd = self.open(OFlags::RDONLY)?;
        let mut room = [0; 8192];
        pread(&fd, &mut room, self.rng.u64(..MAX)).map(drop)
    }

    fn truncate(&mut self) -> TreeResult {
        let fd = self.open(OFlags::WRONLY)?;
        ftruncate(&fd, self.rng.u64(..MAX))
    }

    fn fallocate(&mut self) -> TreeResult {
        let flags = [
            FallocateFlags::empty(),
            FallocateFlags::KEEP_SIZE,
            FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
            FallocateFlags::ZERO_RANGE,
            FallocateFlags::COLLAPSE_RANGE,
            FallocateFlags::INSERT_RANGE,
        ][self.rng.usize(..6)];
        let fd = self.open(OFlags::RDWR)?;
        let pages = |rng: &mut Rng| rng.u64(1..4) * 4096;
        fallocate(&fd, flags, pages(&mut self.rng), pages(&mut self.rng))
    }

    fn copy(&mut self) -> TreeResult {
        let (from, into) = (self.open(OFlags::RDONLY)?, self.open(OFlags::WRONLY)?);
        let (mut at, mut to) = (self.rng.u64(..MAX / 4), self.rng.u64(..MAX / 4));
        copy_file_range(&from, Some(&mut at), &into, Some(&mut to), 8192).map(drop)
    }

    /// Stores through a mapping of a private file, because a truncation by another process would
    /// end this one with SIGBUS. Then it becomes public.
    fn map(&mut self) -> TreeResult {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let (own, name, mode) = (self.own.clone(), self.name(), self.mode());
        let fd = open(&own, flags, mode)?;
        let bytes = self.bytes();
        ftruncate(&fd, bytes.len() as u64)?;
        let errno = |error: std::io::Error| {
            error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
        };
        let map = TestMapping::new(&fd, bytes.len(), true).map_err(errno)?;
        map.write(0, &bytes);
        map.sync().map_err(errno)?;
        drop(map);
        rename(&own, name)
    }

    fn set_attribute(&mut self) -> TreeResult {
        let value = self.bytes();
        lsetxattr(self.name(), ATTRIBUTE, &value[..value.len().min(100)], XattrFlags::empty())
    }

    fn remove_attribute(&mut self) -> TreeResult {
        lremovexattr(self.name(), ATTRIBUTE)
    }

    fn chmod(&mut self) -> TreeResult {
        // chmod(2) follows a link, which leads to another directory of the tree, or nowhere.
        chmod(self.name(), self.mode())
    }

    fn chown(&mut self) -> TreeResult {
        let owner = Uid::from_raw(self.rng.u32(..3) * 1000);
        let group = Gid::from_raw(self.rng.u32(..3) * 1000);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        chownat(CWD, self.name(), Some(owner), Some(group), flags)
    }

    fn fsync(&mut self) -> TreeResult {
        let fd = self.open(OFlags::WRONLY)?;
        fsync(&fd)
    }

    fn stat(&mut self) -> TreeResult {
        lstat(self.name()).map(drop)
    }

    fn readlink(&mut self) -> TreeResult {
        readlink(self.name(), Vec::new()).map(drop)
    }

    fn list(&mut self) -> TreeResult {
        let mut path = self.name();
        path.pop();
        let entries = path.read_dir().and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let errno = |error: std::io::Error| {
            error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
        };
        entries.map(drop).map_err(errno)
    }
}
