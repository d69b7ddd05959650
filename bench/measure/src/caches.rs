//! Making caches cold, and waiting until what that sets off is over.

use std::fs::{self, File};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::Advice;

use crate::cpu;

/// Drops dentries and inodes that nobody uses, of the whole system: there is no narrower way.
///
/// Twice, because the daemons hold inodes below for as long as the kernel knows them above: the first pass makes the
/// kernel send FORGET, and only after that can the backing file system let go.
pub fn drop_dentries(daemons: &[u32]) -> Result<()> {
    for _ in 0..2 {
        fs::write("/proc/sys/vm/drop_caches", "2")
            .context("caches could not be dropped; root is needed")?;
        settle(daemons);
    }
    Ok(())
}

/// Drops the pages of one file, which nobody writes.
pub fn drop_pages(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// Writes out a file system, so that one cell's writes are not measured in the next.
pub fn sync(path: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(path)?)?;
    Ok(())
}

/// Waits until the daemons have stopped working (FORGETs, late releases), at most half a second.
pub fn settle(daemons: &[u32]) {
    let busy =
        |pids: &[u32]| -> u64 { pids.iter().map(|&pid| cpu::Threads::of(pid).total_ns()).sum() };
    let mut before = busy(daemons);
    for _ in 0..100 {
        sleep(Duration::from_millis(5));
        let now = busy(daemons);
        if now == before {
            return;
        }
        before = now;
    }
}
