//! Creates and removes the files of a set.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::Rng;
use rand::seq::SliceRandom;

use super::pool::EntryState;
use super::tree::RunFileset;
use crate::driver::{OpenAccess, WorkloadDriver};
use crate::engine::RunFailure;
use crate::plan::FlowopOpenFlags;
use crate::random::generator;

/// Bytes per write.
const BLOCK: usize = 1 << 20;

/// Number of threads that create the files of a set with `paralloc`.
const MAKERS: usize = 32;

const READ_WRITE: OpenAccess = OpenAccess { read: true, write: true, create: false };

/// Creates directories and files as the plan requires, and records existing ones in the pools.
/// `progress` receives the number of units done and their total. With `adopt`, an earlier run of
/// the same plan has created them, and the driver is not called.
pub(crate) fn create<D: WorkloadDriver>(
    driver: &D,
    set: &RunFileset,
    seed: u64,
    adopt: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), RunFailure> {
    let plan = &set.plan;
    let there = adopt || plan.trusttree || driver.stat(&set.root).is_ok();
    let reusing = adopt || there && (plan.reuse || plan.trusttree);
    if !reusing {
        remove(driver, set)?;
    }
    for entry in 0..set.files() {
        set.pool.set_state(entry, EntryState::Absent);
    }
    let Some(percent) = plan.prealloc else { return Ok(()) };
    if !reusing {
        make_directories(driver, set)?;
    }
    // In random order, so that neighbours in the tree are not neighbours on the device.
    let mut random = generator(seed, (2 << 32) + u64::from(set.files()));
    let chosen =
        |random: &mut crate::random::RandomGenerator| random.random_range(0..100) < percent;
    let mut files: Vec<u32> = (0..set.files()).filter(|_| chosen(&mut random)).collect();
    files.shuffle(&mut random);
    if adopt {
        files.iter().for_each(|&file| set.pool.set_state(file, EntryState::Exists));
    } else {
        make_files(driver, set, &files, reusing, progress)?;
    }
    for leafdir in (0..set.leafdirs()).filter(|_| chosen(&mut random)) {
        let path = set.leafdir_path(leafdir);
        if !(adopt || reusing && driver.stat(&path).is_ok()) {
            driver.mkdir(&path).map_err(|error| RunFailure::create(&path, &error))?;
        }
        set.leaf_pool.set_state(leafdir, EntryState::Exists);
    }
    Ok(())
}

/// Refuses sets that cannot fit, before creating any of them. Existing sets are reused or replaced,
/// so for them only the size of the whole file system matters.
pub(crate) fn check_room<D: WorkloadDriver>(
    driver: &D,
    sets: &[&RunFileset],
) -> Result<(), RunFailure> {
    let mut needed: BTreeMap<&Path, (u64, bool)> = BTreeMap::new();
    for set in sets.iter().filter(|set| !set.plan.trusttree) {
        let all = (0..set.files()).map(|file| set.size(file)).fold(0, u64::saturating_add);
        let made = u128::from(all) * u128::from(set.plan.prealloc.unwrap_or(0)) / 100;
        let (bytes, there) = needed.entry(&set.plan.path).or_default();
        *bytes = bytes.saturating_add(made as u64);
        *there |= driver.stat(&set.root).is_ok();
    }
    for (path, (bytes, there)) in needed {
        // A directory that does not exist is created later; its nearest existing ancestor has the
        // same space.
        let above = path.ancestors().find(|path| driver.stat(path).is_ok());
        let room = above.and_then(|path| driver.free_space(path).ok().flatten());
        let Some(room) = room else { continue };
        let limit = if there { room.total } else { room.available };
        if bytes > limit {
            return Err(RunFailure::no_room(path, bytes, limit));
        }
    }
    Ok(())
}

fn make_directories<D: WorkloadDriver>(driver: &D, set: &RunFileset) -> Result<(), RunFailure> {
    make_path(driver, &set.root).map_err(|error| RunFailure::create(&set.root, &error))?;
    // Parents have smaller numbers than their children. The root, 0, exists.
    for directory in 1..set.directories() {
        let path = set.directory_path(directory);
        driver.mkdir(&path).map_err(|error| RunFailure::create(&path, &error))?;
    }
    Ok(())
}

/// Creates a directory and its missing ancestors.
pub(crate) fn make_path<D: WorkloadDriver>(driver: &D, path: &Path) -> io::Result<()> {
    let mut missing: Vec<&Path> = Vec::new();
    for directory in path.ancestors().filter(|path| !path.as_os_str().is_empty()) {
        if driver.stat(directory).is_ok() {
            break;
        }
        missing.push(directory);
    }
    for directory in missing.into_iter().rev() {
        match driver.mkdir(directory) {
            // Another thread was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
    }
    Ok(())
}

fn make_files<D: WorkloadDriver>(
    driver: &D,
    set: &RunFileset,
    files: &[u32],
    reusing: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), RunFailure> {
    // Work is counted in files and megabytes, so that progress is steady for many small and for few
    // large files.
    let work = |file: u32| 1 + set.size(file) / BLOCK as u64;
    let total: u64 = files.iter().map(|file| work(*file)).sum();
    let (done, next, failed) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(None));
    let make = || {
        let block = noise();
        while let Some(&file) = files.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let step = || {
                progress(done.fetch_add(1, Ordering::Relaxed) + 1, total);
            };
            if let Err(failure) = make_file(driver, set, file, reusing, &block, &step) {
                next.store(files.len() as u64, Ordering::Relaxed);
                *failed.lock().unwrap_or_else(|error| error.into_inner()) = Some(failure);
                return;
            }
            step();
            set.pool.set_state(file, EntryState::Exists);
        }
    };
    if set.plan.paralloc {
        std::thread::scope(|scope| {
            for _ in 0..MAKERS.min(files.len()) {
                scope.spawn(make);
            }
        });
    } else {
        make();
    }
    let failed = failed.into_inner().unwrap_or_else(|error| error.into_inner());
    failed.map_or(Ok(()), Err)
}

/// Data that file systems cannot compress.
fn noise() -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    generator(0, 0).fill(&mut block[..]);
    block
}

fn make_file<D: WorkloadDriver>(
    driver: &D,
    set: &RunFileset,
    file: u32,
    reusing: bool,
    block: &[u8],
    step: &dyn Fn(),
) -> Result<(), RunFailure> {
    let (path, size) = (set.file_path(file), set.size(file));
    let fail = |error: io::Error| RunFailure::create(&path, &error);
    let reused = reusing && (set.plan.trusttree || driver.stat(&path).is_ok());
    let access = OpenAccess { create: !reused, ..READ_WRITE };
    let mut open = driver.open(&path, access, FlowopOpenFlags::default()).map_err(fail)?;
    let mut from = 0;
    if reused {
        from = if set.plan.trusttree { size } else { driver.size_of(&mut open).map_err(fail)? };
        if from > size {
            driver.truncate(&mut open, size).map_err(fail)?;
        }
    }
    while from < size {
        let length = (size - from).min(BLOCK as u64) as usize;
        let written = driver.write_at(&mut open, &block[..length], from).map_err(fail)?;
        if written == 0 {
            return Err(fail(io::ErrorKind::WriteZero.into()));
        }
        from += written as u64;
        if from < size {
            step();
        }
    }
    if !set.plan.cached {
        driver.forget_pages(&mut open);
    }
    Ok(())
}

/// Removes the tree of a file set, if it exists.
///
/// Anything that does not look like the tree of a file set is kept: all names in a file set have
/// eight digits.
pub(crate) fn remove<D: WorkloadDriver>(driver: &D, set: &RunFileset) -> Result<(), RunFailure> {
    match driver.stat(&set.root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(RunFailure::create(&set.root, &error)),
        Ok(_) => {}
    }
    let (mut directories, mut files) = (vec![set.root.clone()], Vec::new());
    let mut at = 0;
    while let Some(directory) = directories.get(at).cloned() {
        at += 1;
        let (below, strange) = scan_directory(driver, &directory, &mut files)?;
        if let Some(name) = strange {
            return Err(RunFailure::outside_root(&set.root, &directory.join(name)));
        }
        directories.extend(below);
    }
    for path in files {
        driver.unlink(&path).map_err(|error| RunFailure::create(&path, &error))?;
    }
    for path in directories.into_iter().rev() {
        driver.rmdir(&path).map_err(|error| RunFailure::create(&path, &error))?;
    }
    for entry in 0..set.files() {
        set.pool.set_state(entry, EntryState::Absent);
    }
    for entry in 0..set.leafdirs() {
        set.leaf_pool.set_state(entry, EntryState::Absent);
    }
    Ok(())
}

/// The subdirectories of `directory`, and a name that cannot belong to a file set, if there is one.
fn scan_directory<D: WorkloadDriver>(
    driver: &D,
    directory: &Path,
    files: &mut Vec<PathBuf>,
) -> Result<(BTreeSet<PathBuf>, Option<String>), RunFailure> {
    let (mut below, mut strange) = (BTreeSet::new(), None);
    let mut each = |name: &[u8], is_directory: bool| {
        let text = String::from_utf8_lossy(name).into_owned();
        if name.len() < 8 || !name.iter().all(u8::is_ascii_digit) {
            strange = Some(text);
        } else if is_directory {
            below.insert(directory.join(text));
        } else {
            files.push(directory.join(text));
        }
    };
    driver.list(directory, &mut each).map_err(|error| RunFailure::create(directory, &error))?;
    Ok((below, strange))
}
