//! ioctl, bmap, statfs and sync: operations that go directly to the lower file system.

use std::os::fd::AsFd;

use defuse_fs::{Context, Errno, File, Ino, IoctlArgs, IoctlReply, Result, StatFs};
use rustix::fs::OFlags;

use crate::lower::{OrErrno, StatxResult};
use crate::passthrough::Passthrough;
use crate::sys::{self, IOCTL_BYTES};

/// From linux/fs.h. The flags have 4 bytes, whatever size the request number states.
const FS_IOC_GETFLAGS: u32 = libc::FS_IOC_GETFLAGS as u32;
const FS_IOC_SETFLAGS: u32 = libc::FS_IOC_SETFLAGS as u32;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
const FIBMAP: u32 = 1;
const FIGETBSZ: u32 = 2;

/// `FS_IMMUTABLE_FL` and `FS_APPEND_FL`. Changing them requires `CAP_LINUX_IMMUTABLE`.
const GUARDED_FLAGS: u32 = 0x30;
/// `FS_XFLAG_IMMUTABLE` and `FS_XFLAG_APPEND`, the same flags in `struct fsxattr`.
const GUARDED_XFLAGS: u32 = 0x18;

const FLAGS_BYTES: usize = 4;
const FSXATTR_BYTES: usize = 28;

impl Passthrough {
    pub(crate) fn ioctl(
        &self,
        cx: &Context<'_>,
        file: File,
        args: &IoctlArgs<'_>,
    ) -> Result<IoctlReply> {
        match args.cmd {
            FS_IOC_GETFLAGS => self.get_flags(file, args, FLAGS_BYTES),
            FS_IOC_FSGETXATTR => self.get_flags(file, args, FSXATTR_BYTES),
            FS_IOC_SETFLAGS => {
                self.set_flags(cx, file, args, (FS_IOC_GETFLAGS, FLAGS_BYTES, GUARDED_FLAGS))
            }
            FS_IOC_FSSETXATTR => {
                self.set_flags(cx, file, args, (FS_IOC_FSGETXATTR, FSXATTR_BYTES, GUARDED_XFLAGS))
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    fn get_flags(&self, file: File, args: &IoctlArgs<'_>, len: usize) -> Result<IoctlReply> {
        if args.output_len < len {
            return Err(Errno::EINVAL);
        }
        let open = self.files.get(file.fh)?;
        let mut data = [0; IOCTL_BYTES];
        let result = sys::ioctl(open.fd.as_fd(), args.cmd, &mut data)?;
        Ok(IoctlReply { result, output: data[..len].to_vec() })
    }

    /// Sets inode flags for the owner or user 0. Flags that require a capability are reserved to
    /// user 0: the daemon has the capability, its other callers do not. `read` names the request
    /// that returns the current flags, their size in bytes, and the guarded flags.
    fn set_flags(
        &self,
        cx: &Context<'_>,
        file: File,
        args: &IoctlArgs<'_>,
        read: (u32, usize, u32),
    ) -> Result<IoctlReply> {
        let (get, len, guarded) = read;
        let input = args.input.get(..len).ok_or(Errno::EINVAL)?;
        let open = self.files.get(file.fh)?;
        let fd = open.fd.as_fd();
        if cx.caller.uid != 0 {
            let mut now = [0; IOCTL_BYTES];
            sys::ioctl(fd, get, &mut now)?;
            let changed = word(&now) ^ word(input);
            if StatxResult::read(fd)?.uid() != cx.caller.uid || changed & guarded != 0 {
                return Err(Errno::EPERM);
            }
        }
        let mut data = [0; IOCTL_BYTES];
        data[..len].copy_from_slice(input);
        let result = sys::ioctl(fd, args.cmd, &mut data)?;
        Ok(IoctlReply { result, output: Vec::new() })
    }

    /// FIBMAP counts in blocks of the lower file system, the request in blocks of `block_size`.
    pub(crate) fn bmap(&self, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        let inode = self.inodes.get(ino)?;
        if inode.kind != defuse_fs::FileKind::Regular || block_size == 0 {
            return Err(Errno::EINVAL);
        }
        let fd = self.open_inode(&inode, OFlags::RDONLY)?;
        let mut data = [0; IOCTL_BYTES];
        sys::ioctl(fd.as_fd(), FIGETBSZ, &mut data)?;
        let unit = u64::from(word(&data)).max(1);
        let byte = index.checked_mul(block_size.into()).ok_or(Errno::EFBIG)?;
        let block = u32::try_from(byte / unit).map_err(|_| Errno::EFBIG)?;
        data[..4].copy_from_slice(&block.to_ne_bytes());
        sys::ioctl(fd.as_fd(), FIBMAP, &mut data)?;
        match u64::from(word(&data)) {
            0 => Ok(0),
            found => Ok((found * unit + byte % unit) / u64::from(block_size)),
        }
    }

    pub(crate) fn statfs(&self, ino: Ino) -> Result<StatFs> {
        let inode = self.inodes.get(ino)?;
        let stat = rustix::fs::fstatfs(self.fd(&inode)?.as_fd()).or_errno()?;
        Ok(StatFs {
            blocks: stat.f_blocks,
            blocks_free: stat.f_bfree,
            blocks_available: stat.f_bavail,
            files: stat.f_files,
            files_free: stat.f_ffree,
            bsize: stat.f_bsize as u32,
            frsize: if stat.f_frsize == 0 { stat.f_bsize as u32 } else { stat.f_frsize as u32 },
            name_max: stat.f_namelen as u32,
        })
    }

    /// Syncs every file system seen below the source. Tries all of them, and returns the first
    /// error.
    pub(crate) fn syncfs(&self) -> Result<()> {
        let mut result = Ok(());
        for index in self.mounts.indexes() {
            // A foreign mount that is gone was synced by umount(2).
            if let Ok(root) = self.root_fd(index) {
                result = result.and(rustix::fs::syncfs(root).or_errno());
            }
        }
        result
    }
}

/// The first 4 bytes as a number.
fn word(data: &[u8]) -> u32 {
    data.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
