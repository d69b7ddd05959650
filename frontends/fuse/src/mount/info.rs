//! The mounts of the machine, and the state of their servers.

use super::check::resolve;
use rustix::io::Errno;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, io, thread};

/// The time for a file system to answer, after which it counts as silent.
const PATIENCE: Duration = Duration::from_secs(2);

/// One line of `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Id of the mount.
    pub mount_id: u32,
    /// Id of the parent mount.
    pub parent_id: u32,
    /// Major number of `st_dev`; 0 except for fuseblk.
    pub major: u32,
    /// Minor number of `st_dev`.
    pub minor: u32,
    /// The mount point.
    pub mount_point: PathBuf,
    /// Options of the mount.
    pub mount_options: String,
    /// True if mounts below this one appear in its copies, in other namespaces
    /// (mount_namespaces(7), shared subtrees).
    pub shared: bool,
    /// The type, such as `fuse.defuse`.
    pub fstype: String,
    /// The source, FUSE's `fsname`.
    pub source: OsString,
    /// Options of the file system.
    pub super_options: String,
}

impl MountEntry {
    /// True if a FUSE server is behind it (`fusectl` has none).
    pub fn is_fuse(&self) -> bool {
        let base = self.fstype.split('.').next().unwrap_or("");
        matches!(base, "fuse" | "fuseblk")
    }

    /// Returns the number of the mount's connection in `/sys/fs/fuse/connections`: the kernel's
    /// `dev_t`. For fuseblk it has a major part, too.
    pub fn connection(&self) -> u32 {
        self.major << 20 | self.minor
    }
}

/// The state of a mount point's FUSE server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerLiveness {
    /// It answers, or the caller has no access to it (another user's mount without `allow_other`,
    /// even for root).
    Alive,
    /// It has ended: ENOTCONN, or ECONNREFUSED if INIT failed.
    Dead,
    /// It has the device open, but did not answer in two seconds.
    Silent,
    /// The path is not the mount point of a FUSE file system.
    NotFuse,
}

/// All FUSE mounts that this process can see, in the order of mountinfo.
pub fn fuse_mounts() -> io::Result<Vec<MountEntry>> {
    let mut mounts = list_mounts()?;
    mounts.retain(MountEntry::is_fuse);
    Ok(mounts)
}

/// All mounts of any type that the calling thread can see, in the order of mountinfo.
pub fn list_mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse_mountinfo(&fs::read("/proc/thread-self/mountinfo")?))
}

/// The topmost mount on this path, of any type.
pub(super) fn mount_at(path: &Path) -> io::Result<Option<MountEntry>> {
    Ok(list_mounts()?.into_iter().rfind(|mount| mount.mount_point == path))
}

/// The number of the FUSE connection mounted there, as in `/sys/fs/fuse/connections`. Sends no
/// request to the file system.
pub fn connection_id(mountpoint: &Path) -> Option<u32> {
    let mount = mount_at(&resolve(mountpoint)).ok().flatten()?;
    mount.is_fuse().then_some(mount.connection())
}

/// True for a FUSE mount whose server has ended.
pub fn is_dead_mount(path: &Path) -> bool {
    liveness(path) == ServerLiveness::Dead
}

/// Requests the attributes of the root from the FUSE file system mounted there.
///
/// If the server hangs, the requesting thread is left behind. It ends when the server answers or
/// ends.
pub fn liveness(path: &Path) -> ServerLiveness {
    let path = resolve(path);
    match mount_at(&path) {
        Ok(Some(mount)) if mount.is_fuse() => {}
        _ => return ServerLiveness::NotFuse,
    }
    let (sender, receiver) = mpsc::channel();
    let ask = move || {
        // statfs always sends a request to the server. A cache may answer stat.
        let answer = rustix::fs::statfs(&path);
        // Fails if the receiver is gone.
        let _ = sender.send(answer.err());
    };
    if thread::Builder::new().name("defuse-liveness".to_owned()).spawn(ask).is_err() {
        return ServerLiveness::Silent;
    }
    match receiver.recv_timeout(PATIENCE) {
        Ok(Some(Errno::NOTCONN | Errno::CONNREFUSED | Errno::CONNABORTED)) => ServerLiveness::Dead,
        Ok(_) => ServerLiveness::Alive,
        Err(_) => ServerLiveness::Silent,
    }
}

/// Parses `/proc/PID/mountinfo`. Skips malformed lines.
pub fn parse_mountinfo(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut next = || fields.next();
    let (mount_id, parent_id) = (number(next()?)?, number(next()?)?);
    let device = text(next()?);
    let (major, minor) = device.split_once(':')?;
    let _root = next()?;
    let mount_point = PathBuf::from(unescape(next()?));
    let mount_options = text(next()?);
    // Optional fields are terminated by a hyphen.
    let mut shared = false;
    fields
        .by_ref()
        .inspect(|field| shared |= field.starts_with(b"shared:"))
        .find(|field| *field == b"-")?;
    let mut next = || fields.next();
    Some(MountEntry {
        mount_id,
        parent_id,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        mount_point,
        mount_options,
        shared,
        fstype: text(next()?),
        source: unescape(next()?),
        super_options: text(next()?),
    })
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    unescape(field).to_string_lossy().into_owned()
}

/// Decodes space, tab, newline and backslash, which are written as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        rest = match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                tail
            }
            _ => {
                bytes.push(first);
                tail
            }
        };
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"\
36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue
61 25 0:57 / /mnt/a\\040b\\134c\\377 rw,nosuid,nodev shared:31 - fuse.defuse my\\040disk rw,user_id=0
62 25 0:58 / /sys/fs/fuse/connections rw - fusectl fusectl rw
nonsense
63 25 0:59 / /mnt/p rw - fuse
64 25 8:1 / /mnt/blk ro - fuseblk /dev/sda1 rw\n";

    #[test]
    fn mountinfo_is_parsed_with_its_escapes() {
        let mounts = parse_mountinfo(TEXT);
        assert_eq!(mounts.len(), 4);
        assert_eq!((mounts[0].major, mounts[0].fstype.as_str()), (98, "ext3"));
        let fuse = &mounts[1];
        assert_eq!((fuse.mount_id, fuse.parent_id, fuse.major, fuse.minor), (61, 25, 0, 57));
        let path = OsString::from_vec(b"/mnt/a b\\c\xff".to_vec());
        assert_eq!(fuse.mount_point, PathBuf::from(path));
        assert_eq!(
            (fuse.source.to_str(), fuse.super_options.as_str()),
            (Some("my disk"), "rw,user_id=0")
        );
        let shared: Vec<_> = mounts.iter().map(|mount| mount.shared).collect();
        assert_eq!(shared, [false, true, false, false]);
        let is_fuse: Vec<_> = mounts.iter().map(MountEntry::is_fuse).collect();
        assert_eq!(is_fuse, [false, true, false, true]);
    }

    #[test]
    fn the_running_system_parses() {
        let text = fs::read("/proc/self/mountinfo").unwrap();
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).count();
        assert_eq!(parse_mountinfo(&text).len(), lines);
        assert_eq!(liveness(Path::new("/proc")), ServerLiveness::NotFuse);
        assert_eq!(connection_id(Path::new("/proc")), None);
    }
}
