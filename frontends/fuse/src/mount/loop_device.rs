//! A loop device as the source of a mount of the type `fuseblk`.
//!
//! Linux notifies a FUSE server of sync(2) and syncfs(2), and lets umount(2) wait for it, only if
//! the mount has that type (`fuse_sync_fs()` and `fuse_conn_destroy()` of fs/fuse/inode.c), and
//! such a mount needs a block device. The device has a few KiB of memory, which are not used. It is
//! removed with the mount.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, open};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, ioctl};

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` of linux/loop.h.
const GET_FREE: Opcode = 0x4c82;
const CONFIGURE: Opcode = 0x4c0a;
/// `LO_FLAGS_AUTOCLEAR`: the device is freed with its last user.
const AUTOCLEAR: u32 = 4;
/// Block size of the device, and of the mount.
pub(super) const BLOCK: u32 = 4096;

/// A loop device. It is freed when this is dropped, unless it is mounted.
pub(super) struct AttachedLoopDevice {
    pub(super) path: PathBuf,
    /// Keeps the device configured.
    _fd: OwnedFd,
}

impl AttachedLoopDevice {
    /// Configures a free device. losetup(8) shows `name`.
    ///
    /// # Errors
    ///
    /// Without loop devices (`ENOENT`), or without the permission to use them.
    pub(super) fn new(name: &str) -> Result<Self, Errno> {
        /// Others may take the free device first.
        const TRIES: usize = 16;
        let control = open("/dev/loop-control", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let memory = memory(name)?;
        for _ in 0..TRIES {
            // SAFETY: `GetFree` passes no memory to the kernel.
            let number = unsafe { ioctl(&control, GetFree) }?;
            let path = Path::new("/dev").join(format!("loop{number}"));
            let fd = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            // SAFETY: the opcode takes the address of a `struct loop_config`, which `LoopConfig`
            // is, and only reads it.
            match unsafe { ioctl(&fd, Setter::<CONFIGURE, _>::new(LoopConfig::new(&memory, name))) }
            {
                Err(Errno::BUSY) => {}
                configured => return configured.map(|()| AttachedLoopDevice { path, _fd: fd }),
            }
        }
        Err(Errno::BUSY)
    }
}

/// The memory of the device.
fn memory(name: &str) -> Result<OwnedFd, Errno> {
    // At most 249 bytes, memfd_create(2).
    let name: String = name.chars().filter(char::is_ascii_graphic).take(200).collect();
    let flags = MemfdFlags::CLOEXEC;
    let fd = match memfd_create(&*name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3.
        Err(Errno::INVAL) => memfd_create(&*name, flags),
        other => other,
    }?;
    ftruncate(&fd, BLOCK.into())?;
    Ok(fd)
}

struct GetFree;

// SAFETY: `LOOP_CTL_GET_FREE` has no argument and returns a number.
unsafe impl Ioctl for GetFree {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GET_FREE
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::null_mut()
    }

    // SAFETY: the pointer, which is null, is not used.
    unsafe fn output_from_ptr(
        out: IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<IoctlOutput> {
        Ok(out)
    }
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// `struct loop_info64`.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

impl LoopConfig {
    fn new(memory: &OwnedFd, name: &str) -> Self {
        // SAFETY: both structures consist of integers, and zeros are the defaults of all fields.
        let mut config: LoopConfig = unsafe { MaybeUninit::zeroed().assume_init() };
        config.fd = memory.as_raw_fd().unsigned_abs();
        config.block_size = BLOCK;
        config.info.flags = AUTOCLEAR;
        // The last byte stays NUL.
        let room = config.info.file_name.len() - 1;
        for (to, from) in config.info.file_name[..room].iter_mut().zip(name.bytes()) {
            *to = from;
        }
        config
    }
}
