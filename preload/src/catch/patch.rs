//! Replacing `syscall` instructions of loaded libraries by jumps.
//!
//! The places come from the plan, which was made from the files. Each jump goes to a trampoline of
//! its own, in a page within 2 GiB of the library (`defuse_preload_plan::trampoline`). Where the
//! run has an image of a library, whose build id is the same, that is mapped in place of its code
//! (`defuse_preload_plan::image`): nothing is copied then. Otherwise every byte is compared, and
//! the jumps are written here.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use defuse_preload_plan::image::{HEAD_PAGE, PatchedImage};
use defuse_preload_plan::trampoline::{self, TRAMPOLINE};
use defuse_preload_plan::{ObjectSites, PatchSite};

use crate::machine::sys;

/// How many sites were patched, and how many had to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatchOutcome {
    /// Sites that jump to us now.
    pub done: usize,
    /// Sites of libraries that are loaded.
    pub wanted: usize,
    /// True if the clone(2) in the C library's fork(3) is among them.
    pub forks: bool,
}

/// A loaded library, or the program.
pub struct LoadedObject {
    /// Its file; empty for the program.
    pub path: Vec<u8>,
    base: u64,
    build_id: Vec<u8>,
    /// Executable parts, first and last (exclusive) address.
    code: Vec<(u64, u64)>,
}

impl LoadedObject {
    /// True if `address` lies in a page of its code.
    pub fn has(&self, address: u64) -> bool {
        self.code.iter().any(|&(from, end)| (from & !0xfff..end).contains(&address))
    }
}

/// Where the images of a run are: a descriptor, and the first byte of them there.
#[derive(Clone, Copy)]
pub struct RunImages {
    /// The memory of the run.
    pub fd: i32,
    /// Where images begin in it.
    pub from: u64,
    /// The address that trampolines go to.
    pub entry: u64,
}

/// Patches all libraries that are loaded and in the plan. The process has one thread yet, or the
/// others are not in these libraries.
pub fn patch_all(objects: &[ObjectSites], images: RunImages) -> PatchOutcome {
    let mut patched = PatchOutcome::default();
    let mut trampolines = Vec::new();
    for library in list_loaded() {
        let same = |object: &&ObjectSites| {
            !object.build_id.is_empty() && object.build_id == library.build_id
        };
        let Some(at) = objects.iter().position(|object| same(&object)) else { continue };
        let sites = &objects[at].sites;
        patched.wanted += sites.len();
        let image = objects[at].image.and_then(|image| map_image(&library, &image, images));
        let image = image.map(|page| (page, (0..sites.len()).collect()));
        let Some((page, done)) = image.or_else(|| patch(&library, sites, images.entry)) else {
            continue;
        };
        patched.done += done.len();
        patched.forks |= done.iter().any(|&at| sites[at].number == Some(libc::SYS_clone as u16));
        let first: usize = objects[..at].iter().map(|object| object.sites.len()).sum();
        let places = done.iter().map(|at| first + at).collect();
        trampolines.push(TrampolinePage { page, places });
    }
    let _ = TRAMPOLINES.set(trampolines);
    patched
}

/// The trampolines of a library.
struct TrampolinePage {
    page: u64,
    /// The site of each, by its place in the plan.
    places: Vec<usize>,
}

static TRAMPOLINES: OnceLock<Vec<TrampolinePage>> = OnceLock::new();

/// The site whose trampoline has `address`, by its place among the sites of all objects of the
/// plan.
pub fn site_of(address: u64) -> Option<usize> {
    TRAMPOLINES.get()?.iter().find_map(|library| {
        let at = usize::try_from(address.checked_sub(library.page)?).ok()?.checked_sub(HEAD)?;
        library.places.get(at / TRAMPOLINE).copied()
    })
}

/// The address of the trampoline of an object of the plan to which the instruction at `ip` belongs.
pub fn trampoline_of(ip: u64) -> Option<u64> {
    TRAMPOLINES.get()?.iter().find_map(|library| {
        let first = library.page + HEAD as u64;
        let place = ip.checked_sub(first)? / TRAMPOLINE as u64;
        let is_one = place < library.places.len() as u64;
        is_one.then(|| first + place * TRAMPOLINE as u64)
    })
}

/// The part of a library's code that `address` lies in: first and last (exclusive) address.
pub fn find_own_code(address: u64) -> Option<(u64, u64)> {
    let parts = list_loaded().into_iter().flat_map(|library| library.code);
    let (from, end) = parts.into_iter().find(|(from, end)| (*from..*end).contains(&address))?;
    Some((from & !0xfff, end.next_multiple_of(4096)))
}

/// The program and the libraries that are loaded and not among these. The loader and this library
/// are left out: nothing of theirs is to be served.
pub fn find_others(known: &[ObjectSites], entry: u64) -> Vec<LoadedObject> {
    let is_known = |library: &LoadedObject| {
        !library.build_id.is_empty()
            && known.iter().any(|object| object.build_id == library.build_id)
    };
    let is_own =
        |library: &LoadedObject| library.code.iter().any(|&(a, b)| (a..b).contains(&entry));
    let is_file = |library: &LoadedObject| {
        let path = &library.path;
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        path.is_empty() || path.contains(&b'/') && !name.starts_with(b"ld-")
    };
    let mut all = list_loaded();
    all.retain(|library| is_file(library) && !is_own(library) && !is_known(library));
    all
}

/// Patches these sites of a static program, which was mapped at `base` and does not run yet. Its
/// code is the parts `code`, first and last (exclusive) address.
pub fn program(base: u64, code: Vec<(u64, u64)>, sites: &[PatchSite], entry: u64) {
    patch_one(&LoadedObject { path: Vec::new(), base, build_id: Vec::new(), code }, sites, entry);
}

/// Patches these sites of a library that has no image; returns how many of them. No thread runs
/// there.
pub fn patch_one(library: &LoadedObject, sites: &[PatchSite], entry: u64) -> usize {
    if sites.is_empty() {
        0
    } else {
        patch(library, sites, entry).map_or(0, |(_, done)| done.len())
    }
}

fn list_loaded() -> Vec<LoadedObject> {
    // SAFETY: called by dl_iterate_phdr alone, with what it promises.
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, all: *mut c_void) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid record, and the pointer that `loaded` gave it.
        let (info, all) = unsafe { (&*info, &mut *all.cast::<Vec<LoadedObject>>()) };
        // SAFETY: the name is a string of the loader, or null.
        let path = unsafe { info.dlpi_name.as_ref() }.map(|name| unsafe { CStr::from_ptr(name) });
        let path = path.unwrap_or_default().to_bytes().to_vec();
        let mut library =
            LoadedObject { path, base: info.dlpi_addr, build_id: Vec::new(), code: Vec::new() };
        // SAFETY: the record contains the number of program headers.
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

/// The length in bytes of the part before the first trampoline, which has the address of the entry.
const HEAD: usize = 16;

/// Patches the sites of one library; returns where their trampolines are, and which sites these
/// are.
fn patch(library: &LoadedObject, sites: &[PatchSite], entry: u64) -> Option<(u64, Vec<usize>)> {
    let fits = |at: &usize| is_as_expected(library, &sites[*at]);
    let done: Vec<usize> = (0..sites.len()).filter(fits).collect();
    let code: Vec<&PatchSite> = done.iter().map(|at| &sites[*at]).collect();
    let room = (HEAD + code.len() * TRAMPOLINE).next_multiple_of(4096);
    let (from, end) =
        library.code.iter().fold((u64::MAX, 0), |(a, b), &(from, end)| (a.min(from), b.max(end)));
    let page = map_near(from, end, room)?;
    let mut bytes = vec![0xcc; room];
    bytes[..8].copy_from_slice(&entry.to_le_bytes());
    for (place, site) in code.iter().enumerate() {
        let at = HEAD + place * TRAMPOLINE;
        let made = trampoline::code(site, library.base + site.address, page + at as u64, page);
        bytes[at..at + made.len()].copy_from_slice(&made);
    }
    // SAFETY: the pages were mapped just now, for this copy, and no other thread knows of them.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page as *mut u8, room) };
    protect(page, page + room as u64, libc::PROT_READ | libc::PROT_EXEC)?;
    for &(from, end) in &library.code {
        protect(from, end, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    }
    for (place, site) in code.iter().enumerate() {
        let (at, to) = (library.base + site.address, page + (HEAD + place * TRAMPOLINE) as u64);
        let jump = trampoline::replacement(site, at, to);
        // SAFETY: the bytes were compared with those expected, and are writable now. No thread runs
        // there: the process is about to begin.
        unsafe { std::ptr::copy_nonoverlapping(jump.as_ptr(), at as *mut u8, jump.len()) };
    }
    for &(from, end) in &library.code {
        protect(from, end, libc::PROT_READ | libc::PROT_EXEC)?;
    }
    Some((page, done))
}

fn is_as_expected(library: &LoadedObject, site: &PatchSite) -> bool {
    let (at, len) = (library.base + site.address, usize::from(site.len));
    let inside = library.code.iter().any(|&(from, end)| from <= at && at + len as u64 <= end);
    // SAFETY: executable parts of a loaded library are mapped and readable.
    inside && unsafe { std::slice::from_raw_parts(at as *const u8, len) } == &site.bytes[..len]
}

/// Maps an image in place of the code of `library`; returns what [`site_of`] reckons from. `None`
/// where the place of the trampolines is taken, and then nothing has changed.
fn map_image(library: &LoadedObject, image: &PatchedImage, images: RunImages) -> Option<u64> {
    let code = library.base.checked_add(image.from)?;
    let inside = |&(from, end): &(u64, u64)| {
        from & !0xfff <= code && code + image.len <= end.next_multiple_of(4096)
    };
    let trampolines = library.base.wrapping_add(image.trampolines());
    let head = trampolines.checked_sub(HEAD_PAGE).filter(|&head| head < code && head > 0xffff)?;
    if !library.code.iter().any(inside) {
        return None;
    }
    let (data, text) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_READ | libc::PROT_EXEC);
    let map = |at: u64, len: u64, protection: c_int, how: c_int, file: Option<u64>| {
        let (kind, fd) = match file {
            Some(_) => (libc::MAP_PRIVATE | how, images.fd as u64),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | how, u64::MAX),
        };
        let offset = file.map_or(0, |place| images.from + place);
        let args = [at, len, protection as u64, kind as u64, fd, offset];
        // SAFETY: either the mapping replaces none, or it is the code of the library, byte by byte
        // the same but for whole instructions at its sites, where no thread is: the process is
        // about to begin.
        let got = sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).ok()? as u64;
        if got != at {
            // A kernel that does not know the flag took the address for a hint.
            let _ = sys::plain(libc::SYS_munmap, got, len, 0);
            return None;
        }
        Some(())
    };
    let new = libc::MAP_FIXED_NOREPLACE;
    map(head, HEAD_PAGE + image.trampolines_len, data, new, None)?;
    // SAFETY: the page was mapped just now, for this value, and no other thread knows of this page.
    unsafe { (head as *mut u64).write(images.entry) };
    let behind = Some(image.place + image.len);
    let made = map(trampolines, image.trampolines_len, text, libc::MAP_FIXED, behind)
        .and_then(|()| map(code, image.len, text, libc::MAP_FIXED, Some(image.place)));
    if made.is_none() {
        let _ = sys::plain(libc::SYS_munmap, head, HEAD_PAGE + image.trampolines_len, 0);
    }
    made.map(|()| trampolines - HEAD as u64)
}

/// Maps `room` bytes so that all of `from..end` can be reached by a jump.
fn map_near(from: u64, end: u64, room: usize) -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
