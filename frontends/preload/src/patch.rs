//! Replacing `syscall` instructions of loaded libraries by jumps.
//!
//! The places come from the plan, which was made from the files: here they are only checked (build
//! id, and every byte) and written. Each jump goes to a trampoline of its own, in a page within
//! 2 GiB of the library: the instructions before the `syscall`, a step over the red zone, the call of
//! `defuse_entry`, the `syscall` itself where the call is not ours, the instructions after it, and
//! the jump back.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use defuse_preload_plan::{ObjectSites, Site};

use crate::{entry, sys};

/// How many sites were patched, and how many had to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Patched {
    /// Sites that jump to us now.
    pub done: usize,
    /// Sites of libraries that are loaded.
    pub wanted: usize,
    /// Whether the clone(2) in the C library's fork(3) is among them.
    pub forks: bool,
}

/// A loaded library.
struct Loaded {
    base: u64,
    build_id: Vec<u8>,
    /// Executable parts, first and last (exclusive) address.
    code: Vec<(u64, u64)>,
}

/// Patches all libraries that are loaded and in the plan. The process has one thread yet, or the
/// others are not in these libraries.
pub fn all(objects: &[ObjectSites]) -> Patched {
    let mut patched = Patched::default();
    let mut trampolines = Vec::new();
    for library in loaded() {
        let same = |object: &&ObjectSites| {
            !object.build_id.is_empty() && object.build_id == library.build_id
        };
        let Some(at) = objects.iter().position(|object| same(&object)) else { continue };
        let sites = &objects[at].sites;
        patched.wanted += sites.len();
        let Some((page, done)) = patch(&library, sites) else { continue };
        patched.done += done.len();
        patched.forks |= done.iter().any(|&at| sites[at].number == Some(libc::SYS_clone as u16));
        let first: usize = objects[..at].iter().map(|object| object.sites.len()).sum();
        let places = done.iter().map(|at| first + at).collect();
        trampolines.push(Trampolines { page, places });
    }
    let _ = TRAMPOLINES.set(trampolines);
    patched
}

/// The trampolines of a library.
struct Trampolines {
    page: u64,
    /// Which site of the plan each is for.
    places: Vec<usize>,
}

static TRAMPOLINES: OnceLock<Vec<Trampolines>> = OnceLock::new();

/// The site, by its place among those of all objects of the plan, whose trampoline has `address`.
pub fn site_of(address: u64) -> Option<usize> {
    TRAMPOLINES.get()?.iter().find_map(|library| {
        let at = usize::try_from(address.checked_sub(library.page)?).ok()?.checked_sub(HEAD)?;
        library.places.get(at / TRAMPOLINE).copied()
    })
}

/// The part of a library's code that `address` lies in: first and last (exclusive) address.
pub fn own_code(address: u64) -> Option<(u64, u64)> {
    let parts = loaded().into_iter().flat_map(|library| library.code);
    let (from, end) = parts.into_iter().find(|(from, end)| (*from..*end).contains(&address))?;
    Some((from & !0xfff, end.next_multiple_of(4096)))
}

fn loaded() -> Vec<Loaded> {
    // SAFETY: called by dl_iterate_phdr alone, with what it promises.
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, all: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid record, and the pointer that `loaded` gave it.
        let (info, all) = unsafe { (&*info, &mut *all.cast::<Vec<Loaded>>()) };
        let mut library = Loaded { base: info.dlpi_addr, build_id: Vec::new(), code: Vec::new() };
        // SAFETY: the record says how many program headers there are.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        for header in headers {
            let from = info.dlpi_addr + header.p_vaddr;
            if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0 {
                library.code.push((from, from + header.p_memsz));
            }
            if header.p_type == libc::PT_NOTE {
                // SAFETY: a note segment is mapped and readable for its size.
                let notes = unsafe {
                    std::slice::from_raw_parts(from as *const u8, header.p_memsz as usize)
                };
                library.build_id = build_id(notes).unwrap_or(library.build_id);
            }
        }
        all.push(library);
        0
    }
    let mut all = Vec::new();
    // SAFETY: the callback gets the vector that outlives the call, and keeps no pointer.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut all).cast()) };
    all
}

/// The build id among notes: `NT_GNU_BUILD_ID` (3) of `GNU`.
fn build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let number = |at: usize| {
            let bytes = notes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes) as usize)
        };
        let (name, desc, kind) = (number(0)?, number(4)?, number(8)?);
        let start = 12 + name.next_multiple_of(4);
        if kind == 3 && notes.get(12..16)? == b"GNU\0" {
            return notes.get(start..start + desc).map(<[u8]>::to_vec);
        }
        notes = notes.get(start + desc.next_multiple_of(4)..)?;
    }
}

/// Room for one trampoline: two parts of a site, and 37 bytes of our own.
const TRAMPOLINE: usize = 64;

/// How far behind the call of the entry the `syscall` of a trampoline ends.
pub const TO_SYSCALL_END: u64 = 8 + 2 + 2;

/// What is before the first one: the address of the entry.
const HEAD: usize = 16;

/// Patches the sites of one library; returns where their trampolines are, and which sites these are.
fn patch(library: &Loaded, sites: &[Site]) -> Option<(u64, Vec<usize>)> {
    let fits = |at: &usize| is_as_expected(library, &sites[*at]);
    let done: Vec<usize> = (0..sites.len()).filter(fits).collect();
    let code: Vec<&Site> = done.iter().map(|at| &sites[*at]).collect();
    let room = (HEAD + code.len() * TRAMPOLINE).next_multiple_of(4096);
    let (from, end) =
        library.code.iter().fold((u64::MAX, 0), |(a, b), &(from, end)| (a.min(from), b.max(end)));
    let page = near(from, end, room)?;
    let mut bytes = vec![0xcc; room];
    bytes[..8].copy_from_slice(&entry::address().to_le_bytes());
    for (place, site) in code.iter().enumerate() {
        let at = HEAD + place * TRAMPOLINE;
        let made = trampoline(site, library.base + site.address, page + at as u64, page);
        bytes[at..at + made.len()].copy_from_slice(&made);
    }
    // SAFETY: the pages were mapped just now, for this, and nobody else knows of them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page as *mut u8, room) };
    protect(page, page + room as u64, libc::PROT_READ | libc::PROT_EXEC)?;
    for &(from, end) in &library.code {
        protect(from, end, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    }
    for (place, site) in code.iter().enumerate() {
        let (at, to) = (library.base + site.address, page + (HEAD + place * TRAMPOLINE) as u64);
        let mut jump = vec![0x90; usize::from(site.len)];
        jump[0] = 0xe9;
        jump[1..5].copy_from_slice(&distance(at + 5, to));
        // SAFETY: the bytes were compared with those expected, and are writable now. No thread runs
        // there: the process is about to begin.
        unsafe { std::ptr::copy_nonoverlapping(jump.as_ptr(), at as *mut u8, jump.len()) };
    }
    for &(from, end) in &library.code {
        protect(from, end, libc::PROT_READ | libc::PROT_EXEC)?;
    }
    Some((page, done))
}

fn is_as_expected(library: &Loaded, site: &Site) -> bool {
    let (at, len) = (library.base + site.address, usize::from(site.len));
    let inside = library.code.iter().any(|&(from, end)| from <= at && at + len as u64 <= end);
    // SAFETY: executable parts of a loaded library are mapped and readable.
    inside && unsafe { std::slice::from_raw_parts(at as *const u8, len) } == &site.bytes[..len]
}

/// The displacement from `from` to `to`; both lie within 2 GiB, see [`near`].
fn distance(from: u64, to: u64) -> [u8; 4] {
    (to.wrapping_sub(from) as i64 as i32).to_le_bytes()
}

fn trampoline(site: &Site, original: u64, at: u64, page: u64) -> Vec<u8> {
    let (before, rest) = site.bytes[..usize::from(site.len)].split_at(usize::from(site.syscall_at));
    let after = &rest[2..];
    let mut code = before.to_vec();
    code.extend_from_slice(&[0x48, 0x8d, 0x64, 0x24, 0x80]); // lea rsp, [rsp - 128]
    code.extend_from_slice(&[0xff, 0x15]); // call [rip + page]
    let next = at + code.len() as u64 + 4;
    code.extend_from_slice(&distance(next, page));
    code.extend_from_slice(&[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]); // lea rsp, [rsp + 128]
    code.extend_from_slice(&[0x73, 2, 0x0f, 0x05]); // jnc +2; syscall
    code.extend_from_slice(after);
    code.push(0xe9);
    let next = at + code.len() as u64 + 4;
    code.extend_from_slice(&distance(next, original + u64::from(site.len)));
    code
}

/// Maps `room` bytes so that all of `from..end` can be reached by a jump.
fn near(from: u64, end: u64, room: usize) -> Option<u64> {
    const STEP: u64 = 1 << 20;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let below = (1..1500).filter_map(|step| from.checked_sub(step * STEP));
    let above = (1..1500).map(|step| end.next_multiple_of(4096) + step * STEP);
    below.zip(above).flat_map(|(below, above)| [below & !0xfff, above]).find_map(|at| {
        let args = [at, room as u64, protection, kind as u64, u64::MAX, 0];
        // SAFETY: a mapping that replaces none.
        let got = sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).ok()? as u64;
        if got == at {
            return Some(at);
        }
        // A kernel that does not know the flag took the address for a hint.
        let _ = sys::plain(libc::SYS_munmap, got, room as u64, 0);
        None
    })
}

fn protect(from: u64, end: u64, protection: c_int) -> Option<()> {
    let from = from & !0xfff;
    let len = end.next_multiple_of(4096) - from;
    sys::plain(libc::SYS_mprotect, from, len, protection as u64).ok().map(drop)
}

/// The address of a symbol in the libraries after ours; 0 where there is none.
pub fn next(name: &CStr) -> u64 {
    // SAFETY: dlsym takes any name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trampoline_keeps_what_stood_around_the_call() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&[0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff]);
        let site = Site { address: 0, len: 8, syscall_at: 0, number: Some(0), bytes };
        let code = trampoline(&site, 0x1000, 0x2010, 0x2000);
        assert!(code.len() <= TRAMPOLINE);
        assert_eq!(code[23..29], bytes[2..8]);
        let back = i32::from_le_bytes(code[30..34].try_into().unwrap());
        assert_eq!(0x2010 + 34 + i64::from(back), 0x1008);
    }

    #[test]
    fn a_build_id_is_found_behind_other_notes() {
        let mut notes = vec![4, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0];
        notes.extend_from_slice(b"GNU\0\x01\x02\x03\x04");
        notes.extend_from_slice(&[4, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]);
        notes.extend_from_slice(b"GNU\0\xaa\xbb\xcc\0");
        assert_eq!(build_id(&notes), Some(vec![0xaa, 0xbb, 0xcc]));
        assert_eq!(build_id(&notes[..30]), None);
    }
}
