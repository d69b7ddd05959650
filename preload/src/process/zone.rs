//! The numbers of our own descriptors, and the limit of descriptors that the program sees.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::machine::sys;

/// The count of numbers that are ours.
pub const LEN: u64 = 4096;
/// The largest first number of our own. The kernel copies a table up to its largest number at every
/// fork, which takes 1.5 times as long at sixteen thousand.
const HIGHEST: u64 = 3072;

/// Where our own descriptors begin, and the limit that the program is to see.
///
/// The program's numbers have to be those that it would get without us, so ours lie above. The soft
/// limit is raised for them where the hard one lets us; otherwise the program gets fewer. All
/// programs of a process begin them at one number, the `floor` of the first, whatever limit they
/// set: what one leaves to the next lies there.
pub fn raise_limit(reported: Option<u32>, floor: Option<u64>) -> (u64, u64) {
    let mut limit: libc::rlimit = sys::zeroed();
    let args = [0, libc::RLIMIT_NOFILE as u64, 0, &raw mut limit as u64, 0, 0];
    // SAFETY: prlimit64 fills the record.
    let _ = unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) };
    let seen = reported.map_or(limit.rlim_cur, u64::from);
    let floor = floor.unwrap_or(seen.min(HIGHEST));
    if limit.rlim_max >= floor + LEN {
        let new = libc::rlimit { rlim_cur: limit.rlim_cur.max(floor + LEN), ..limit };
        let args = [0, libc::RLIMIT_NOFILE as u64, &raw const new as u64, 0, 0, 0];
        // SAFETY: prlimit64 reads the record.
        let _ = unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) };
        return (floor, seen);
    }
    let room = limit.rlim_max.saturating_sub(floor);
    let floor = if room >= 512 { floor } else { limit.rlim_max * 3 / 4 };
    (floor, seen.min(floor))
}

/// The numbers among ours at which the program has a file or directory of the kernel, one bit each.
static OF_PROGRAM: [AtomicU64; LEN as usize / 64] =
    [const { AtomicU64::new(0) }; LEN as usize / 64];

/// Word and bit of `fd`, if it is one of our numbers, which begin at `floor`.
fn word_and_bit(floor: i32, fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd.checked_sub(floor)?).ok()?;
    OF_PROGRAM.get(at / 64).map(|word| (word, 1 << (at % 64)))
}

/// Notes that the program has opened `fd`, or closes it.
pub fn set_of_program(floor: i32, fd: i32, is_open: bool) {
    match word_and_bit(floor, fd) {
        Some((word, bit)) if is_open => drop(word.fetch_or(bit, Ordering::Relaxed)),
        Some((word, bit)) => drop(word.fetch_and(!bit, Ordering::Relaxed)),
        None => {}
    }
}

/// True if the program is known to have opened `fd`.
pub fn is_of_program(floor: i32, fd: i32) -> bool {
    word_and_bit(floor, fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// All numbers that the program is known to have opened, among `first` to `last`.
pub fn list_program_numbers(floor: i32, first: u32, last: u32) -> impl Iterator<Item = i32> {
    let all = floor..floor + LEN as i32;
    all.filter(move |&fd| (first..=last).contains(&(fd as u32)) && is_of_program(floor, fd))
}

/// True for a descriptor of a kind that we use. A program with so many descriptors that some lie
/// among our numbers mostly has sockets, pipes, and descriptors that poll them: those are its own.
#[cold]
pub fn is_of_a_kind_with_ours(fd: i32) -> bool {
    let mut stat: libc::stat = sys::zeroed();
    let args = [fd as u64, &raw mut stat as u64, 0, 0, 0, 0];
    // SAFETY: the kernel fills the structure.
    if sys::check(unsafe { sys::syscall(libc::SYS_fstat as u64, &args) }).is_err() {
        return false;
    }
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFDIR => true,
        // To a process that has a file system for us.
        libc::S_IFSOCK => {
            let option = |name: i32| {
                let (mut value, mut len) = (0i32, 4u32);
                let (value_at, len_at) = (&raw mut value as u64, &raw mut len as u64);
                let args = [fd as u64, libc::SOL_SOCKET as u64, name as u64, value_at, len_at, 0];
                // SAFETY: the kernel writes four bytes, and how many these were.
                let got = unsafe { sys::syscall(libc::SYS_getsockopt as u64, &args) };
                (got == 0).then_some(value)
            };
            option(libc::SO_DOMAIN) == Some(libc::AF_UNIX)
                && option(libc::SO_TYPE) == Some(libc::SOCK_SEQPACKET)
        }
        _ => false,
    }
}
