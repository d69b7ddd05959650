//! Conversions between `stat` and the attributes of the fuser crate, and between their error
//! numbers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};
use rustix::fs::{Stat, Timespec, UTIME_NOW, UTIME_OMIT};

/// The crate's error for a failed system call.
pub fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_i32(error.raw_os_error())
}

/// The attributes for the kernel, with the node number by which it knows the file.
pub fn from_stat(node: u64, stat: &Stat) -> FileAttr {
    FileAttr {
        ino: INodeNo(node),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec as u32),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec as u32),
        crtime: UNIX_EPOCH,
        kind: kind(rustix::fs::FileType::from_raw_mode(stat.st_mode)),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: stat.st_blksize as u32,
        flags: 0,
    }
}

/// The file type. An unknown type becomes a regular file, as in the examples of the crate.
pub fn kind(file_type: rustix::fs::FileType) -> FileType {
    use rustix::fs::FileType as Raw;
    match file_type {
        Raw::Directory => FileType::Directory,
        Raw::Symlink => FileType::Symlink,
        Raw::Fifo => FileType::NamedPipe,
        Raw::Socket => FileType::Socket,
        Raw::CharacterDevice => FileType::CharDevice,
        Raw::BlockDevice => FileType::BlockDevice,
        Raw::RegularFile | Raw::Unknown => FileType::RegularFile,
    }
}

/// A time for `utimensat`; `None` leaves it unchanged.
pub fn timespec(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(at)) => {
            let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            Timespec { tv_sec: since.as_secs() as i64, tv_nsec: i64::from(since.subsec_nanos()) }
        }
    }
}

fn time(seconds: i64, nanoseconds: u32) -> SystemTime {
    if seconds >= 0 {
        UNIX_EPOCH + Duration::new(seconds as u64, nanoseconds)
    } else {
        UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs())
            + Duration::from_nanos(nanoseconds.into())
    }
}
