//! Drops caches, and waits until the work that this causes is done.

use std::fs::{self, File};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::Advice;

use crate::cpu;

/// Drops unused dentries and inodes of the whole system, since the kernel offers no narrower way.
///
/// Done twice, because daemons hold inodes of the lower file system as long as the kernel knows
/// them above. The first pass makes the kernel send FORGET; only after that can the lower file
/// system release them.
pub fn drop_dentries(daemons: &[u32]) -> Result<()> {
    for _ in 0..2 {
        fs::write("/proc/sys/vm/drop_caches", "2")
            .context("caches could not be dropped; root is needed")?;
        settle(daemons);
    }
    Ok(())
}

/// Drops the cached pages of one file, which must have no dirty pages.
pub fn drop_pages(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// Writes back a file system, so that the writes of one cell are not measured in the next.
pub fn sync(path: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(path)?)?;
    Ok(())
}

/// Waits until the daemons are idle (FORGETs, late releases), for at most half a second.
pub fn settle(daemons: &[u32]) {
    let busy = |pids: &[u32]| -> u64 {
        pids.iter().map(|&pid| cpu::ProcessCpuTime::read(pid).total_ns()).sum()
    };
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
