//! Facts about files and block devices, from statx(2), ioctl(2) and sysfs.

use std::fs::read_to_string;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, SeekFrom, Stat, StatxFlags};

use crate::worker::node_of;
use crate::{DeviceProperties, Result};

/// Bytes of a block, also on devices with smaller sectors: no user needs smaller blocks.
const BLOCK: u32 = 4096;

/// Bytes that a device erases at a time, if it states no other number.
const ERASE: u32 = 2 << 20;

/// The facts, and the alignment that memory needs.
pub(super) fn read_properties(
    fd: &OwnedFd,
    path: &Path,
    stat: &Stat,
) -> Result<(DeviceProperties, usize)> {
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let bytes = rustix::fs::seek(fd, SeekFrom::End(0))?;
    let logical = if regular { 512 } else { rustix::fs::ioctl_blksszget(fd)? };
    let block_size = logical.max(BLOCK);
    let queue =
        if regular { SysfsLimits::for_file() } else { SysfsLimits::for_device(stat.st_rdev) };
    // A file is where the device of its file system is.
    let node = node_of(if regular { stat.st_dev } else { stat.st_rdev });
    let facts = DeviceProperties {
        name: path.display().to_string(),
        block_size,
        blocks: bytes / u64::from(block_size),
        // Sectors are the only thing that all devices below promise.
        atomic_write: logical,
        volatile_cache: queue.volatile,
        // RWF_DSYNC: where a device lacks it, the kernel flushes after the write, without a turn of
        // this process.
        fua: !regular || honours_dsync(rustix::fs::fstatfs(fd)?.f_type as u64),
        discard: queue.discard,
        max_transfer: 2 << 20,
        max_segments: 512,
        max_queues: 1024,
        max_depth: 4096,
        erase_unit: queue.erase_unit,
        numa_node: node,
    };
    Ok((facts, alignment(fd)))
}

/// True for the types of file systems whose direct writes are known to be durable with RWF_DSYNC.
/// FUSE passes the flag on to a server that may ignore it, and network file systems and unknown
/// file systems may ignore it, too: they need a write and an fdatasync(2).
fn honours_dsync(magic: u64) -> bool {
    const EXT4: u64 = 0xef53;
    const XFS: u64 = 0x5846_5342;
    const BTRFS: u64 = 0x9123_683e;
    const F2FS: u64 = 0xf2f5_2010;
    const TMPFS: u64 = 0x0102_1994;
    [EXT4, XFS, BTRFS, F2FS, TMPFS].contains(&magic)
}

/// The alignment of memory for direct I/O; a page if the kernel does not report it (before Linux
/// 6.1).
fn alignment(fd: &OwnedFd) -> usize {
    const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
    let stat = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, DIOALIGN);
    match stat {
        Ok(stat) if stat.stx_mask & DIOALIGN.bits() != 0 && stat.stx_dio_mem_align > 0 => {
            stat.stx_dio_mem_align as usize
        }
        _ => BLOCK as usize,
    }
}

/// The facts from sysfs, sysfs-block of the kernel's ABI documentation.
struct SysfsLimits {
    volatile: bool,
    discard: bool,
    erase_unit: u32,
}

impl SysfsLimits {
    fn for_file() -> Self {
        // A file system below always needs fdatasync(2).
        SysfsLimits { volatile: true, discard: true, erase_unit: ERASE }
    }

    fn for_device(rdev: u64) -> Self {
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let dir = format!("/sys/dev/block/{major}:{minor}");
        // A partition has the limits of its disk.
        let read = |name: &str| {
            let own = read_to_string(format!("{dir}/queue/{name}"));
            own.or_else(|_| read_to_string(format!("{dir}/../queue/{name}"))).ok()
        };
        let number = |name: &str| read(name).and_then(|text| text.trim().parse::<u64>().ok());
        let granularity = number("discard_granularity").unwrap_or(0);
        SysfsLimits {
            volatile: read("write_cache").is_none_or(|text| text.trim() != "write through"),
            discard: number("discard_max_bytes").unwrap_or(0) > 0,
            erase_unit: u32::try_from(granularity).unwrap_or(0).max(ERASE),
        }
    }
}

/// The process that holds an flock(2) lock on the file, proc_locks(5). `None` where it is in
/// another PID namespace, or gone meanwhile.
pub(super) fn holder(stat: &Stat) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let file = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let locks = read_to_string("/proc/locks").ok()?;
    let line = locks.lines().find(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.contains(&"FLOCK") && !words.contains(&"->") && words.contains(&file.as_str())
    })?;
    let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK");
    words.nth(3)?.parse().ok().filter(|pid| *pid > 0)
}

/// The name of a process that has nothing to serve any more, and makes its changes durable before
/// it ends. The first thread sets it as its own name (prctl(2), `PR_SET_NAME`): a process that
/// holds a file for which others wait may make them wait.
pub const ENDING: &str = "defuse-ending";

/// The name of a process, proc_pid_comm(5).
pub(super) fn name_of(pid: u32) -> Option<String> {
    read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// True while the process exists and has not ended.
pub(super) fn is_alive(pid: u32) -> bool {
    let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which may contain any characters: proc_pid_stat(5).
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_durable_at_once_only_where_the_file_system_is_known_to_say_so() {
        assert!(honours_dsync(0xef53) && honours_dsync(0x5846_5342));
        // FUSE, NFS, SMB, overlayfs, 9p.
        for other in [0x6573_5546, 0x6969, 0xff53_4d42, 0x794c_7630, 0x0102_1997] {
            assert!(!honours_dsync(other), "{other:#x}");
        }
    }
}
