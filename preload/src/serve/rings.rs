//! io_uring: rings only operate on descriptors.
//!
//! The kernel executes the operations of a ring, and a path there never leads into a mount. Every
//! ring is therefore created disabled, restricted to operations without a path, and then enabled
//! (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10). The restrictions last as long as the ring, in all
//! processes. Other operations fail with `EACCES`, and a probe reports them as unsupported. If the
//! kernel cannot restrict a ring, creating it fails with `ENOSYS`.
//!
//! A program that creates its ring disabled restricts and enables it itself. Forbidden operations
//! are removed from its restrictions. If it has none, ours are registered when it enables the ring.
//!
//! Source: io_uring_setup(2), io_uring_register(2), include/uapi/linux/io_uring.h,
//! io_uring/register.c.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use defuse_fs::Errno;

use crate::machine::descriptors::close;
use crate::machine::inside::InsideGuard;
use crate::machine::sys;
use crate::process::{state::RunProcess, table::DescriptorEntry};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::data;

const SETUP_R_DISABLED: u32 = 1 << 6;
const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
/// A feature of kernels since 5.13. Programs take it as a sign that a ring can open and stat files.
/// Without it they use system calls.
const FEAT_RSRC_TAGS: u32 = 1 << 10;

const REGISTER_PROBE: u32 = 8;
const REGISTER_RESTRICTIONS: u32 = 11;
const REGISTER_ENABLE_RINGS: u32 = 12;
const UNREGISTER_RING_FDS: u32 = 21;
/// The descriptor is the index of a ring that the thread has registered.
const REGISTER_USE_REGISTERED_RING: u32 = 1 << 31;
/// The last operation of io_uring_register(2) that is known to have no path: `MEM_REGION`.
const LAST_REGISTER: u32 = 34;

/// Operations with a path or an address that may be one: CONNECT, OPENAT, STATX, OPENAT2, RENAMEAT,
/// UNLINKAT, MKDIRAT, SYMLINKAT, LINKAT, SETXATTR, GETXATTR and BIND.
const WITH_PATH: [u8; 12] = [16, 18, 21, 28, 35, 36, 37, 38, 39, 42, 44, 56];
/// The last known operation: `URING_CMD128`. Later ones may have a path.
const LAST_OP: u8 = 64;

fn is_allowed(op: u8) -> bool {
    op <= LAST_OP && !WITH_PATH.contains(&op)
}

/// A `struct io_uring_restriction`: its kind in the first two bytes, its value in the next.
type RingRestriction = [u64; 2];

const RESTRICTION_REGISTER_OP: u64 = 0;
const RESTRICTION_SQE_OP: u64 = 1;
const RESTRICTION_SQE_FLAGS_ALLOWED: u64 = 2;

fn restriction(kind: u64, value: u8) -> RingRestriction {
    [kind | u64::from(value) << 16, 0]
}

/// The operation that a restriction allows, if any.
fn op_of(restriction: &RingRestriction) -> Option<u8> {
    let is_op = restriction[0] & 0xffff == RESTRICTION_SQE_OP;
    is_op.then_some((restriction[0] >> 16) as u8)
}

/// The places of flags and features in a `struct io_uring_params`, in words.
type RingParams = [u32; 30];
const FLAGS: usize = 2;
const FEATURES: usize = 5;

/// A ring, as io_uring_register(2) names it.
#[derive(Clone, Copy)]
struct RegisteredRing {
    fd: u64,
    is_index: bool,
}

impl RegisteredRing {
    fn register(self, op: u32, arg: u64, count: u64) -> Result<i64, Errno> {
        let how = if self.is_index { REGISTER_USE_REGISTERED_RING } else { 0 };
        let args = [self.fd, u64::from(op | how), arg, count, 0, 0];
        sys::check(sys::pass(libc::SYS_io_uring_register as u64, &args))
    }

    /// The last operation that the kernel knows.
    fn last_op(self) -> Result<u8, Errno> {
        let mut probe = [0u64; 2];
        self.register(REGISTER_PROBE, std::ptr::from_mut(&mut probe) as u64, 0)?;
        Ok(probe[0] as u8)
    }

    /// Registers the allowed operations. Fails with `EBADFD` for an enabled ring, and with `EBUSY`
    /// for one that has restrictions.
    fn restrict(self) -> Result<(), Errno> {
        /// The last operation of io_uring_register(2) that this kernel knows, once found.
        static KNOWN: AtomicU32 = AtomicU32::new(LAST_REGISTER);
        let ops = (0..=self.last_op()?).filter(|op| is_allowed(*op));
        let mut all: Vec<_> = ops.map(|op| restriction(RESTRICTION_SQE_OP, op)).collect();
        all.push(restriction(RESTRICTION_SQE_FLAGS_ALLOWED, u8::MAX));
        let count = all.len();
        let mut last = KNOWN.load(Ordering::Relaxed);
        loop {
            all.truncate(count);
            all.extend((0..=last as u8).map(|op| restriction(RESTRICTION_REGISTER_OP, op)));
            let done = self.register(REGISTER_RESTRICTIONS, all.as_ptr() as u64, all.len() as u64);
            match done {
                // An older kernel knows fewer operations.
                Err(Errno::EINVAL) if last > 0 => last -= 1,
                other => {
                    KNOWN.store(last, Ordering::Relaxed);
                    return other.map(drop);
                }
            }
        }
    }

    fn enable(self) -> Result<(), Errno> {
        self.register(REGISTER_ENABLE_RINGS, 0, 0).map(drop)
    }

    fn end(self) {
        if self.is_index {
            let which = [self.fd, 0];
            let _ = self.register(UNREGISTER_RING_FDS, which.as_ptr() as u64, 1);
        } else {
            close(self.fd as i32);
        }
    }
}

/// io_uring_setup(2).
pub fn setup(call: &ProgramCall<'_>) -> CallResult {
    if let Err(fail @ CallFailure::Errno(_)) = data::asynchronous(call) {
        return Err(fail);
    }
    let requested: RingParams = sys::load(call.args[1])?;
    let mut params = requested;
    params[FLAGS] |= SETUP_R_DISABLED;
    let fd = match make(call, &mut params) {
        Err(Errno::EINVAL) => return Err(choose_error(call, requested).into()),
        other => other?,
    };
    let ring = RegisteredRing { fd, is_index: requested[FLAGS] & SETUP_REGISTERED_FD_ONLY != 0 };
    let enables = requested[FLAGS] & SETUP_R_DISABLED == 0;
    if enables && ring.restrict().and_then(|()| ring.enable()).is_err() {
        ring.end();
        return Err(Errno::ENOSYS.into());
    }
    if enables {
        params[FLAGS] &= !SETUP_R_DISABLED;
    }
    params[FEATURES] &= !FEAT_RSRC_TAGS;
    sys::store(call.args[1], params)?;
    IN_USE.store(true, Ordering::Relaxed);
    Ok(fd as i64)
}

fn make(call: &ProgramCall<'_>, params: &mut RingParams) -> Result<u64, Errno> {
    let at = std::ptr::from_mut(params) as u64;
    Ok(sys::check(sys::pass(call.number, &[call.args[0], at, 0, 0, 0, 0]))? as u64)
}

/// The error after the kernel has refused a disabled ring: `ENOSYS` if it creates an enabled one,
/// and otherwise the kernel's error.
fn choose_error(call: &ProgramCall<'_>, mut params: RingParams) -> Errno {
    let is_index = params[FLAGS] & SETUP_REGISTERED_FD_ONLY != 0;
    match make(call, &mut params) {
        Ok(fd) => {
            RegisteredRing { fd, is_index }.end();
            Errno::ENOSYS
        }
        Err(errno) => errno,
    }
}

/// io_uring_register(2).
pub fn register(call: &ProgramCall<'_>) -> CallResult {
    let op = call.args[1] as u32;
    let is_index = op & REGISTER_USE_REGISTERED_RING != 0;
    let ring = RegisteredRing { fd: call.args[0], is_index };
    match op & !REGISTER_USE_REGISTERED_RING {
        REGISTER_PROBE => {
            let value = call.kernel();
            if value >= 0 {
                hide(call.args[2])?;
            }
            Ok(value)
        }
        // Without a ring the restrictions belong to the thread, and apply in addition to the
        // ring's.
        REGISTER_RESTRICTIONS if call.int(0) >= 0 => restrict_as_requested(call, ring),
        REGISTER_ENABLE_RINGS => match ring.restrict() {
            // The kernel returns the error for other descriptors and for enabled rings.
            Ok(()) | Err(Errno::EBUSY | Errno::EBADF) => Err(CallFailure::Pass),
            Err(errno) if errno.raw() == libc::EBADFD => Err(CallFailure::Pass),
            Err(errno) => Err(errno.into()),
        },
        _ => Err(CallFailure::Pass),
    }
}

/// Removes the forbidden operations from a `struct io_uring_probe`.
fn hide(probe: u64) -> Result<(), Errno> {
    const SUPPORTED: u64 = 1 << 16;
    let head = sys::load::<u64>(probe)?;
    for place in 0..(head >> 8 & 0xff) {
        let at = probe + 16 + place * 8;
        let op = sys::load::<u64>(at)?;
        if !is_allowed(op as u8) {
            sys::store(at, op & !SUPPORTED)?;
        }
    }
    Ok(())
}

/// The program's restrictions, without the forbidden operations.
fn restrict_as_requested(call: &ProgramCall<'_>, ring: RegisteredRing) -> CallResult {
    // The kernel refuses more.
    const MOST: u64 = 1024;
    if call.args[3] > MOST || call.args[2] == 0 {
        return Err(CallFailure::Pass);
    }
    let mut all = Vec::new();
    for place in 0..call.args[3] {
        let one: RingRestriction = sys::load(call.args[2] + place * 16)?;
        if op_of(&one).is_none_or(is_allowed) {
            all.push(one);
        }
    }
    Ok(ring.register(REGISTER_RESTRICTIONS, all.as_ptr() as u64, all.len() as u64)?)
}

/// True if this process has had a ring.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// True if descriptors may be closed without a call.
#[inline]
pub fn are_in_use() -> bool {
    IN_USE.load(Ordering::Relaxed)
}

/// Checks a descriptor, which a ring may have closed: its number may be free, or belong to another
/// file.
#[cold]
pub fn forget_closed(process: &'static RunProcess, number: u64, args: &[u64; 6]) {
    let fd = if number as i64 == libc::SYS_mmap { args[4] } else { args[0] } as i32;
    let table = &process.view().table;
    let Some(Some(entry)) = table.get(fd).map(|found| (*found).clone()) else { return };
    let Some(_inside) = InsideGuard::enter() else { return };
    if !is_open_at(fd, &entry) {
        drop(table.remove(fd));
    }
}

/// True if `fd` is still the descriptor of `entry`.
fn is_open_at(fd: i32, entry: &DescriptorEntry) -> bool {
    if !entry.backed {
        let flags = sys::plain(libc::SYS_fcntl, fd as u64, libc::F_GETFL as u64, 0);
        return flags.is_ok_and(|flags| flags & i64::from(libc::O_PATH) != 0);
    }
    let Some(own) = entry.file().backing() else { return true };
    let file = |fd: i32| {
        let mut stat: libc::stat = sys::zeroed();
        let args = [fd as u64, std::ptr::from_mut(&mut stat) as u64, 0, 0, 0, 0];
        sys::check(sys::pass(libc::SYS_fstat as u64, &args)).map(|_| (stat.st_dev, stat.st_ino))
    };
    file(fd).is_ok_and(|found| Ok(found) == file(std::os::fd::AsRawFd::as_raw_fd(&**own)))
}
