//! System calls without the C library, and the memory of the program that calls us.
//!
//! We cannot intercept a call that is made here.

use std::arch::asm;

use defuse_fs::Errno;

/// Makes a system call; what comes back is the kernel's, negative for an error.
///
/// # Safety
///
/// The arguments have to be right for the call, as its manual page describes.
#[inline]
pub unsafe fn syscall(number: u64, args: &[u64; 6]) -> i64 {
    let value: i64;
    // SAFETY: the instruction itself clobbers rcx and r11 alone; the rest is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as i64 => value,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    value
}

/// A call of the program's own that the kernel gets as it is: what its arguments point to is the
/// program's affair.
#[inline]
pub fn pass(number: u64, args: &[u64; 6]) -> i64 {
    // SAFETY: the program made this very call; it would have got to the kernel without us.
    unsafe { syscall(number, args) }
}

/// A call whose arguments are all numbers, and which changes no memory.
pub fn plain(number: i64, a: u64, b: u64, c: u64) -> Result<i64, Errno> {
    // SAFETY: no argument is taken for an address by the calls that are made this way: dup, fcntl,
    // close, getpid, lseek, ftruncate and their kin.
    check(unsafe { syscall(number as u64, &[a, b, c, 0, 0, 0]) })
}

/// New private memory of the kernel's choice of address, all zeros; `flags` are more of mmap(2).
pub fn map(len: usize, protection: i32, flags: i32) -> Result<u64, Errno> {
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags) as u64;
    let args = [0, len as u64, protection as u64, kind, u64::MAX, 0];
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    check(unsafe { syscall(libc::SYS_mmap as u64, &args) }).map(|at| at as u64)
}

/// The bytes of a file in memory.
pub struct MappedFile {
    at: u64,
    len: usize,
}

impl MappedFile {
    /// Maps the first `len` bytes of `fd`, which stays at least as long meanwhile: a program or
    /// library that is loaded.
    pub fn new(fd: i32, len: u64) -> Result<MappedFile, Errno> {
        let len = usize::try_from(len).map_err(|_| Errno::EOVERFLOW)?;
        let (read, private) = (libc::PROT_READ as u64, libc::MAP_PRIVATE as u64);
        let args = [0, len as u64, read, private, fd as u64, 0];
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = check(unsafe { syscall(libc::SYS_mmap as u64, &args) })? as u64;
        Ok(MappedFile { at, len })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has this length, and lasts as long as this value.
        unsafe { std::slice::from_raw_parts(self.at as *const u8, self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let _ = plain(libc::SYS_munmap, self.at, self.len as u64, 0);
    }
}

/// Makes a process that ends at once, without a word to its parent: no signal, and only wait4(2)
/// with `__WALL` knows it. It is there until then.
pub fn make_ended_process() -> Result<i32, Errno> {
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let value: i64;
    // SAFETY: the child has this memory and this stack, and uses neither: it ends with the next
    // instruction. Its parent sleeps until then.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor edi, edi",
            "mov eax, {exit}",
            "syscall",
            "2:",
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone => value,
            inlateout("rdi") flags => _,
            in("rsi") 0,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    check(value).map(|child| child as i32)
}

/// The result of a call as a number or an error.
pub fn check(value: i64) -> Result<i64, Errno> {
    if (-4095..0).contains(&value) { Err(Errno::from_raw(-value as i32)) } else { Ok(value) }
}

/// The kernel's answer for an error.
pub fn failure(errno: Errno) -> i64 {
    -i64::from(errno.raw())
}

/// The least address that a program can have anything at (`vm.mmap_min_addr` is more than a page),
/// and the first that is the kernel's.
const ADDRESSES: std::ops::Range<u64> = 4096..0x7fff_ffff_f000;

fn check_range(address: u64, len: usize) -> Result<(), Errno> {
    let end = address.checked_add(len as u64).ok_or(Errno::EFAULT)?;
    let fits = ADDRESSES.contains(&address) && end <= ADDRESSES.end;
    if fits { Ok(()) } else { Err(Errno::EFAULT) }
}

/// The bytes of a string of the program, without its NUL. `EFAULT` for what cannot be an address,
/// `ENAMETOOLONG` if no NUL comes within `PATH_MAX`.
pub fn string<'a>(address: u64) -> Result<&'a [u8], Errno> {
    check_range(address, 1)?;
    // SAFETY: the program passed the address as the address of a string; where it is none, the C
    // library would have failed the same way, but for the addresses that were checked.
    let len = unsafe { libc::strnlen(address as *const libc::c_char, 4096) };
    if len == 4096 {
        return Err(Errno::ENAMETOOLONG);
    }
    // SAFETY: strnlen read these bytes just now.
    Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) })
}

/// Memory of the program that a call reads. `EFAULT`.
pub fn bytes<'a>(address: u64, len: usize) -> Result<&'a [u8], Errno> {
    if len == 0 {
        return Ok(&[]);
    }
    check_range(address, len)?;
    // SAFETY: the program passed it as memory to be read by this call, and waits for its end.
    Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) })
}

/// Memory of the program that a call fills. `EFAULT`.
pub fn program_memory<'a>(address: u64, len: usize) -> Result<&'a mut [u8], Errno> {
    if len == 0 {
        return Ok(&mut []);
    }
    check_range(address, len)?;
    // SAFETY: the program passed it as memory to be filled by this call, and waits for its end.
    Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) })
}

/// Plain data: any bytes are a valid value.
///
/// # Safety
///
/// The type has no padding that matters, no references and no invalid values.
pub unsafe trait PlainValue: Copy {}

// SAFETY: structures of the kernel's interface, all of integers.
unsafe impl PlainValue for u8 {}
// SAFETY: see above.
unsafe impl PlainValue for i32 {}
// SAFETY: see above.
unsafe impl PlainValue for u32 {}
// SAFETY: see above.
unsafe impl PlainValue for u64 {}
// SAFETY: see above.
unsafe impl PlainValue for i64 {}
// SAFETY: see above.
unsafe impl PlainValue for libc::stat {}
// SAFETY: see above.
unsafe impl PlainValue for libc::statx {}
// SAFETY: see above.
unsafe impl PlainValue for libc::flock {}
// SAFETY: see above.
unsafe impl PlainValue for libc::timespec {}
// SAFETY: see above.
unsafe impl PlainValue for libc::timeval {}
// SAFETY: see above.
unsafe impl PlainValue for libc::utimbuf {}
// SAFETY: see above.
unsafe impl PlainValue for libc::pollfd {}
// SAFETY: see above.
unsafe impl PlainValue for libc::rlimit {}
// SAFETY: see above; its pointers are addresses of the program, checked before they are used.
unsafe impl PlainValue for libc::iovec {}
// SAFETY: see above.
unsafe impl<T: PlainValue, const N: usize> PlainValue for [T; N] {}

/// All bytes 0.
pub fn zeroed<T: PlainValue>() -> T {
    // SAFETY: any bytes are a valid value of plain data.
    unsafe { std::mem::zeroed() }
}

/// A value of the program. `EFAULT`.
pub fn load<T: PlainValue>(address: u64) -> Result<T, Errno> {
    check_range(address, size_of::<T>())?;
    // SAFETY: as for `bytes`; no alignment is required, and any bytes are a valid value.
    Ok(unsafe { (address as *const T).read_unaligned() })
}

/// Puts a value where the program wants it. `EFAULT`.
pub fn store<T: PlainValue>(address: u64, value: T) -> Result<(), Errno> {
    check_range(address, size_of::<T>())?;
    // SAFETY: as for `room`; no alignment is required.
    unsafe { (address as *mut T).write_unaligned(value) };
    Ok(())
}

/// A NULL-terminated list of strings, as argv and envp are. `EFAULT`; `E2BIG` beyond 1,048,576.
pub fn strings<'a>(address: u64) -> Result<Vec<&'a [u8]>, Errno> {
    let mut all = Vec::new();
    if address == 0 {
        return Ok(all);
    }
    for at in 0..1u64 << 20 {
        let string = load::<u64>(address + at * 8)?;
        if string == 0 {
            return Ok(all);
        }
        check_range(string, 1)?;
        // SAFETY: the program passed it as a string that ends with NUL.
        all.push(unsafe { std::ffi::CStr::from_ptr(string as *const libc::c_char) }.to_bytes());
    }
    Err(Errno::E2BIG)
}
