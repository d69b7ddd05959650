//! Loop devices and their backing files, loop(4): two ways to the same bytes. The kernel does not
//! lock one against the other.
//!
//! Each is searched for after the file is open and locked, by device and inode. A loop device that
//! is attached to a file afterwards goes unnoticed: the kernel has no lock for that.

use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};

use super::access::DeviceAccess;

/// The most loop devices that are examined.
const MOST: usize = 4096;

/// The loop device over this file, if it conflicts with `access`.
pub(super) fn device_of(stat: &Stat, access: DeviceAccess) -> Option<PathBuf> {
    let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let disks = read_dir("/sys/block").ok().filter(|_| is_regular)?;
    let names = disks.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut loops = names.filter(|name| name.starts_with("loop")).take(MOST);
    let is_it = |name: &String| {
        let disk = Path::new("/sys/block").join(name);
        let writes = read_to_string(disk.join("ro")).is_ok_and(|text| text.trim() == "0");
        (writes || access == DeviceAccess::ReadWrite)
            && backing_file(&disk)
                .is_some_and(|its| (its.st_dev, its.st_ino) == (stat.st_dev, stat.st_ino))
    };
    loops.find(is_it).map(|name| Path::new("/dev").join(name))
}

/// The backing file of an open loop device. `None` for any other file, and where the file is out of
/// reach.
pub(super) fn file_of(stat: &Stat) -> Option<Stat> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return None;
    }
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let disk = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    backing_file(&disk)
}

/// The backing file of the loop device with this directory in sysfs. Its path there follows
/// renames.
fn backing_file(disk: &Path) -> Option<Stat> {
    let path = read_to_string(disk.join("loop/backing_file")).ok()?;
    rustix::fs::stat(path.strip_suffix('\n')?).ok()
}
