//! Workloads on names: create, stat, open, unlink, readdir.

use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir};

use super::fileset::{SHARED, SMALL_BYTES, list_dir, small_dir, small_name};
use super::{BatchDirs, BatchJob, WorkDeadline};
use crate::caches;

/// The buffer size of glibc's readdir.
const DIRENT_BYTES: usize = 32 << 10;
/// Number of names that a thread uses repeatedly. They are few, so that their objects stay in the
/// processor's caches and the comparison measures the path through the kernel.
const WARM_NAMES: usize = 64;

/// Creates files in one directory for each thread.
pub fn create(place: &BatchDirs, bytes: usize) -> Result<Vec<BatchJob>> {
    let own = place.root.join(&place.own);
    fs::create_dir(&own).with_context(|| format!("create {}", own.display()))?;
    let job = |thread: usize| -> Result<BatchJob> {
        let dir = own.join(format!("thread-{thread}"));
        fs::create_dir(&dir)?;
        let files = names(&dir, place.fileset.batch_files / place.threads);
        let content = vec![0x5a_u8; bytes];
        Ok(Box::new(move |_| for_each(&files, |file| create_one(file, &content))))
    };
    (0..place.threads).map(job).collect()
}

/// Looks up small files by name: once each after dropping the caches if `cold`, otherwise
/// repeatedly.
pub fn stat(place: &BatchDirs, cold: bool) -> Result<Vec<BatchJob>> {
    let one = |file: &PathBuf| {
        rustix::fs::statat(CWD, file, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    };
    let jobs = small_files(place, cold)
        .into_iter()
        .map(|files| repeat(files, cold, one))
        .collect::<Result<_>>()?;
    drop_caches(place, cold)?;
    Ok(jobs)
}

/// Opens, reads and closes small files.
pub fn open_read_close(place: &BatchDirs, cold: bool) -> Result<Vec<BatchJob>> {
    let one = |file: &PathBuf| {
        let mut buffer = [0_u8; SMALL_BYTES];
        let fd = rustix::fs::open(file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let read = rustix::io::read(fd, &mut buffer)?;
        ensure!(read == SMALL_BYTES, "{} had only {read} bytes", file.display());
        Ok(())
    };
    let jobs = small_files(place, cold)
        .into_iter()
        .map(|files| repeat(files, cold, one))
        .collect::<Result<_>>()?;
    drop_caches(place, cold)?;
    Ok(jobs)
}

/// Unlinks files that were created on the lower file system, so that the target does not know them.
pub fn unlink(place: &BatchDirs) -> Result<Vec<BatchJob>> {
    fs::create_dir(place.below.join(&place.own))?;
    let job = |thread: usize| -> Result<BatchJob> {
        let dir = Path::new(&place.own).join(format!("thread-{thread}"));
        let below = place.below.join(&dir);
        fs::create_dir(&below)?;
        let count = place.fileset.batch_files / place.threads;
        for file in names(&below, count) {
            create_one(&file, &[0x5a; SMALL_BYTES])?;
        }
        let files = names(&place.root.join(&dir), count);
        let one = |file: &PathBuf| Ok(rustix::fs::unlink(file)?);
        Ok(Box::new(move |_| for_each(&files, one)))
    };
    (0..place.threads).map(job).collect()
}

/// Lists directories, and looks up every name if `stat` is set.
pub fn readdir(place: &BatchDirs, cold: bool, stat: bool) -> Result<Vec<BatchJob>> {
    let shared = place.root.join(SHARED);
    let entries = place.fileset.list_entries;
    let job = |thread: usize| {
        let mine = (thread..place.fileset.list_dirs).step_by(place.threads);
        let dirs: Vec<_> = mine.map(|number| shared.join(list_dir(number))).collect();
        repeat(dirs, cold, move |dir| {
            let listed = list(dir, stat)?;
            ensure!(listed == entries, "{} listed {listed} names", dir.display());
            Ok(())
        })
    };
    let jobs = (0..place.threads).map(job).collect::<Result<_>>()?;
    drop_caches(place, cold)?;
    Ok(jobs)
}

/// Lists one directory. Returns the number of names without `.` and `..`.
fn list(dir: &Path, stat: bool) -> Result<usize> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(dir, flags, Mode::empty())?;
    let mut buffer = [const { MaybeUninit::<u8>::uninit() }; DIRENT_BYTES];
    let mut listing = RawDir::new(&fd, &mut buffer);
    let mut listed = 0;
    while let Some(entry) = listing.next() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        listed += 1;
        if stat {
            rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
    Ok(listed)
}

fn create_one(file: &Path, content: &[u8]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let fd = rustix::fs::open(file, flags, Mode::RUSR | Mode::WUSR)?;
    if !content.is_empty() {
        let written = rustix::io::write(fd, content)?;
        ensure!(written == content.len(), "{} took only {written} bytes", file.display());
    }
    Ok(())
}

/// Divides the small files among the threads in contiguous ranges, so that threads share few
/// directories. With warm caches there are few files.
fn small_files(place: &BatchDirs, cold: bool) -> Vec<Vec<PathBuf>> {
    let shared = place.root.join(SHARED);
    let all: Vec<_> = (0..place.fileset.small_dirs)
        .flat_map(|dir| {
            let dir = shared.join(small_dir(dir));
            (0..place.fileset.small_per_dir).map(move |file| dir.join(small_name(file)))
        })
        .collect();
    let most = if cold { usize::MAX } else { WARM_NAMES };
    let mine = all.chunks(all.len().div_ceil(place.threads));
    mine.map(|files| files[..files.len().min(most)].to_vec()).collect()
}

fn names(dir: &Path, count: usize) -> Vec<PathBuf> {
    (0..count).map(|file| dir.join(small_name(file))).collect()
}

fn for_each(files: &[PathBuf], one: impl Fn(&PathBuf) -> Result<()>) -> Result<u64> {
    for file in files {
        one(file).with_context(|| file.display().to_string())?;
    }
    Ok(files.len() as u64)
}

/// Runs an operation on every item: once, or until the time is over. In the second case all items
/// are visited once beforehand, to warm the caches.
fn repeat(
    items: Vec<PathBuf>,
    once: bool,
    one: impl Fn(&PathBuf) -> Result<()> + Send + 'static,
) -> Result<BatchJob> {
    if once {
        return Ok(Box::new(move |_| for_each(&items, one)));
    }
    for_each(&items, &one)?;
    Ok(Box::new(move |until: &WorkDeadline| {
        let mut done = 0;
        while !until.is_over() {
            // The clock is read once for several operations, because some take no longer than
            // reading it.
            for _ in 0..16 {
                let item = &items[done as usize % items.len()];
                one(item).with_context(|| item.display().to_string())?;
                done += 1;
            }
        }
        Ok(done)
    }))
}

fn drop_caches(place: &BatchDirs, cold: bool) -> Result<()> {
    if cold { caches::drop_dentries(&place.daemons) } else { Ok(()) }
}
