//! The calls, made through the kernel.

use std::fmt::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use defuse_direct::TaskCredentials;
use rustix::fs::{
    Access, AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, SeekFrom,
    Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use super::ops::{DirectOp, PATHS, TARGETS, XATTRS, acl};

type Result<T> = std::result::Result<T, Errno>;

/// Runs `ops` in `root` on a new thread with the credentials `who`. Returns the results as text.
pub fn run(root: &Path, who: &TaskCredentials, ops: &[DirectOp]) -> Vec<String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let root = rustix::fs::open(root, flags, Mode::empty()).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            become_user(who);
            let mut side = KernelSide { root: root.as_fd(), files: Vec::new() };
            ops.iter().map(|op| side.step(op)).collect()
        });
        thread.join().unwrap()
    })
}

/// Changes the credentials of this thread only, which ends soon.
fn become_user(who: &TaskCredentials) {
    let groups: Vec<_> = who.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    let (uid, gid) = (Uid::from_raw(who.uid), Gid::from_raw(who.gid));
    rustix::thread::set_thread_groups(&groups).unwrap();
    rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
    rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
}

/// Every path below `root` with attributes and contents.
pub fn tree(root: &Path) -> String {
    let mut out = String::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        let mut names: Vec<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        for path in names {
            let stat = rustix::fs::lstat(&path).unwrap();
            let shown = path.strip_prefix(root).unwrap().display();
            write!(out, "{shown} {}", stat_text(stat)).unwrap();
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => dirs.push(path),
                FileType::RegularFile => {
                    let bytes = std::fs::read(&path).unwrap();
                    let sum =
                        bytes.iter().fold(7u64, |sum, &b| sum.wrapping_mul(31) + u64::from(b));
                    write!(out, " {sum:x}").unwrap();
                }
                _ => {}
            }
            out.push('\n');
        }
    }
    out
}

struct KernelSide<'a> {
    root: BorrowedFd<'a>,
    files: Vec<OwnedFd>,
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(errno) => format!("error {}", errno.raw_os_error()),
    }
}

fn stat_text(stat: rustix::fs::Stat) -> String {
    let dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let size = if dir { 0 } else { stat.st_size };
    format!(
        "{:o} {} {} {} {size} {}",
        stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid, stat.st_rdev
    )
}

fn at_flags(follow: bool) -> AtFlags {
    if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW }
}

impl KernelSide<'_> {
    fn step(&mut self, op: &DirectOp) -> String {
        let file = |file: usize| self.files.get(file % self.files.len().max(1));
        macro_rules! file {
            ($number:expr) => {
                match file($number) {
                    Some(file) => file,
                    None => return String::new(),
                }
            };
        }
        match *op {
            DirectOp::Open { path, flags, mode } => {
                let (flags, mode) = (OFlags::from_bits_retain(flags), Mode::from_raw_mode(mode));
                match rustix::fs::openat(self.root, PATHS[path], flags, mode) {
                    Ok(file) => {
                        self.files.push(file);
                        "open".to_owned()
                    }
                    Err(errno) => text::<()>(Err(errno)),
                }
            }
            DirectOp::OpenIn { dir, path, flags, mode } => {
                let (flags, mode) = (OFlags::from_bits_retain(flags), Mode::from_raw_mode(mode));
                match rustix::fs::openat(file!(dir), PATHS[path], flags, mode) {
                    Ok(file) => {
                        self.files.push(file);
                        "open".to_owned()
                    }
                    Err(errno) => text::<()>(Err(errno)),
                }
            }
            DirectOp::Dup { file } => {
                let copy = rustix::io::fcntl_dupfd_cloexec(file!(file), 0).unwrap();
                self.files.push(copy);
                "open".to_owned()
            }
            DirectOp::Append { file, on } => {
                let flags = if on { OFlags::APPEND } else { OFlags::empty() };
                text(rustix::fs::fcntl_setfl(file!(file), flags))
            }
            DirectOp::RenameIn { dirs, from, to } => {
                let (old, new) = (file!(dirs.0), file!(dirs.1));
                text(rustix::fs::renameat(old, PATHS[from], new, PATHS[to]))
            }
            DirectOp::UnlinkIn { dir, path } => {
                text(rustix::fs::unlinkat(file!(dir), PATHS[path], AtFlags::empty()))
            }
            DirectOp::Close { file } => {
                if self.files.is_empty() {
                    return String::new();
                }
                drop(self.files.remove(file % self.files.len()));
                "()".to_owned()
            }
            DirectOp::Read { file, len } => {
                let mut room = vec![0; len];
                let result = rustix::io::read(file!(file), &mut room[..]);
                text(result.map(|count| room[..count].to_vec()))
            }
            DirectOp::Write { file, len, byte } => {
                text(rustix::io::write(file!(file), &vec![byte; len]))
            }
            DirectOp::Pread { file, len, offset } => {
                let mut room = vec![0; len];
                let result = rustix::io::pread(file!(file), &mut room[..], offset);
                text(result.map(|count| room[..count].to_vec()))
            }
            DirectOp::Pwrite { file, len, offset, byte } => {
                text(rustix::io::pwrite(file!(file), &vec![byte; len], offset))
            }
            DirectOp::Seek { file, offset, whence } => seek(file!(file), offset, whence),
            DirectOp::Ftruncate { file, length } => {
                text(rustix::fs::ftruncate(file!(file), length as u64))
            }
            DirectOp::Fallocate { file, mode, offset, length } => {
                let mode = FallocateFlags::from_bits_retain(mode);
                text(rustix::fs::fallocate(file!(file), mode, offset as u64, length as u64))
            }
            DirectOp::Copy { from, to, len } => {
                text(rustix::fs::copy_file_range(file!(from), None, file!(to), None, len))
            }
            DirectOp::List { file } => list(file!(file)),
            DirectOp::Fstat { file } => {
                let stat = rustix::fs::fstat(file!(file)).map(stat_text);
                text(stat)
            }
            DirectOp::Fchmod { file, mode } => {
                text(rustix::fs::fchmod(file!(file), Mode::from_raw_mode(mode)))
            }
            _ => self.step_path(op),
        }
    }

    fn step_path(&self, op: &DirectOp) -> String {
        let (p, root) = (|path: usize| PATHS[path], self.root);
        match *op {
            DirectOp::Stat { path, follow } => {
                text(rustix::fs::statat(root, p(path), at_flags(follow)).map(stat_text))
            }
            DirectOp::Access { path, mask } => {
                let access = Access::from_bits_retain(mask);
                text(rustix::fs::accessat(root, p(path), access, AtFlags::empty()))
            }
            DirectOp::Chmod { path, mode } => {
                let mode = Mode::from_raw_mode(mode);
                text(rustix::fs::chmodat(root, p(path), mode, AtFlags::empty()))
            }
            DirectOp::Chown { path, uid, gid, follow } => {
                let user = (uid != u32::MAX).then(|| Uid::from_raw(uid));
                let group = (gid != u32::MAX).then(|| Gid::from_raw(gid));
                text(rustix::fs::chownat(root, p(path), user, group, at_flags(follow)))
            }
            DirectOp::Utimens { path, now, follow } => {
                let nsec = |value| Timespec { tv_sec: 1, tv_nsec: value };
                let times = match now {
                    true => [nsec(rustix::fs::UTIME_NOW), nsec(rustix::fs::UTIME_NOW)],
                    false => [nsec(2), nsec(rustix::fs::UTIME_OMIT)],
                };
                let times = Timestamps { last_access: times[0], last_modification: times[1] };
                text(rustix::fs::utimensat(root, p(path), &times, at_flags(follow)))
            }
            DirectOp::Truncate { path, length } => self.truncate(p(path), length),
            DirectOp::Mkdir { path, mode } => {
                text(rustix::fs::mkdirat(root, p(path), Mode::from_raw_mode(mode)))
            }
            DirectOp::Mknod { path, mode } => {
                let (kind, perm) = (mode & 0o170000, Mode::from_raw_mode(mode));
                let kind =
                    if kind == 0 { FileType::RegularFile } else { FileType::from_raw_mode(kind) };
                text(rustix::fs::mknodat(root, p(path), kind, perm, 0xf005))
            }
            DirectOp::Rmdir { path } => {
                text(rustix::fs::unlinkat(root, p(path), AtFlags::REMOVEDIR))
            }
            DirectOp::Unlink { path } => {
                text(rustix::fs::unlinkat(root, p(path), AtFlags::empty()))
            }
            DirectOp::Symlink { target, path } => {
                text(rustix::fs::symlinkat(TARGETS[target], root, p(path)))
            }
            DirectOp::Readlink { path } => {
                let link = rustix::fs::readlinkat(root, p(path), Vec::new());
                // The kernel takes an empty path for the directory, which is no link.
                let link = if p(path).is_empty() { Err(Errno::NOENT) } else { link };
                text(link.map(|link| link.into_bytes()))
            }
            DirectOp::Link { from, to, follow } => {
                let flags = if follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                text(rustix::fs::linkat(root, p(from), root, p(to), flags))
            }
            DirectOp::Rename { from, to, flags } => {
                let flags = RenameFlags::from_bits_retain(flags);
                text(rustix::fs::renameat_with(root, p(from), root, p(to), flags))
            }
            _ => self.step_xattr(op),
        }
    }

    /// There is no truncateat(2), so this goes through the directory of descriptors.
    fn truncate(&self, path: &str, length: i64) -> String {
        if path.is_empty() {
            return format!("error {}", if length < 0 { 22 } else { 2 });
        }
        if length < 0 {
            return "error 22".to_owned();
        }
        let full = self.full(path);
        let c_path = std::ffi::CString::new(full).unwrap();
        let result = nix_truncate(&c_path, length);
        text(result)
    }

    fn full(&self, path: &str) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/thread-self/fd/{}/{path}", self.root.as_raw_fd())
    }

    fn step_xattr(&self, op: &DirectOp) -> String {
        let place = |path: usize| match PATHS[path] {
            "" => String::new(),
            path => self.full(path),
        };
        match *op {
            DirectOp::SetXattr { path, name, len, flags } => {
                let flags = XattrFlags::from_bits_retain(flags);
                let value = vec![b'v'; len];
                text(rustix::fs::setxattr(place(path), XATTRS[name], &value, flags))
            }
            DirectOp::GetXattr { path, name, room } => {
                let mut value = vec![0u8; room];
                match rustix::fs::getxattr(place(path), XATTRS[name], &mut value[..]) {
                    Ok(len) if room == 0 => format!("{len}"),
                    Ok(len) => format!("{:?}", &value[..len]),
                    Err(errno) => text::<()>(Err(errno)),
                }
            }
            DirectOp::ListXattr { path } => {
                let mut names = vec![0u8; 4096];
                text(rustix::fs::listxattr(place(path), &mut names[..]).map(|len| {
                    names.truncate(len);
                    names
                }))
            }
            DirectOp::RemoveXattr { path, name } => {
                text(rustix::fs::removexattr(place(path), XATTRS[name]))
            }
            DirectOp::SetAcl { path, perm } => {
                let name = "system.posix_acl_access";
                text(rustix::fs::setxattr(place(path), name, &acl(perm), XattrFlags::empty()))
            }
            _ => unreachable!("another call"),
        }
    }
}

/// truncate(2), which rustix lacks. A shell would be another process, so this opens a descriptor
/// with the checks of the call.
fn nix_truncate(path: &std::ffi::CStr, length: i64) -> Result<()> {
    let stat = rustix::fs::stat(path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => return Err(Errno::ISDIR),
        FileType::RegularFile => {}
        _ => return Err(Errno::INVAL),
    }
    let file = rustix::fs::open(path, OFlags::WRONLY, Mode::empty())?;
    rustix::fs::ftruncate(&file, length as u64)
}

fn seek(file: &OwnedFd, offset: i64, whence: u32) -> String {
    let stat = rustix::fs::fstat(file);
    if stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory) {
        return String::new();
    }
    // The safe wrapper cannot express a negative offset for these.
    let to = match whence {
        0 if offset < 0 => {
            return path_or(file, 22);
        }
        0 => SeekFrom::Start(offset as u64),
        1 => SeekFrom::Current(offset),
        2 => SeekFrom::End(offset),
        3 | 4 if offset < 0 => return path_or(file, 6),
        3 => SeekFrom::Data(offset as u64),
        4 => SeekFrom::Hole(offset as u64),
        _ => return path_or(file, 22),
    };
    text(rustix::fs::seek(file, to))
}

/// The error of a call, unless the file is open with `O_PATH`.
fn path_or(file: &OwnedFd, errno: i32) -> String {
    let path = rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::PATH));
    format!("error {}", if path { 9 } else { errno })
}

fn list(file: &OwnedFd) -> String {
    let flags = rustix::fs::fcntl_getfl(file).unwrap();
    let stat = rustix::fs::fstat(file).unwrap();
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return "error 20".to_owned();
    }
    if flags.contains(OFlags::PATH) {
        return "error 9".to_owned();
    }
    rustix::fs::seek(file, SeekFrom::Start(0)).unwrap();
    let mut room = [const { MaybeUninit::uninit() }; 4096];
    let mut entries = RawDir::new(file, &mut room);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        match entry {
            Ok(entry) => names.push(entry.file_name().to_bytes().to_vec()),
            Err(errno) => return text::<()>(Err(errno)),
        }
    }
    names.sort();
    text(Ok(names))
}
