//! Code of a library with its sites replaced, made once for all programs of a run.
//!
//! A program that patches its C library by itself writes to some thirty of its pages, which become
//! private pages of the program: each is a fault and a copy at its start, and makes every fork copy
//! the tables of the whole library. So `defuse run` writes the jumps, into memory that all programs
//! map instead of the library's own code, page by page the same but for the sites. That works
//! because the trampolines lie at the same distance from the library in every program; what
//! differs, the address of our entry, is in a page before them ([`HEAD_PAGE`]). Where their place
//! is taken, or a library is none for this, a program patches as before.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::plan::PatchSite;
use crate::trampoline::{self, TRAMPOLINE};

/// How far below the first page of an image its trampolines begin: more than the libraries of
/// nearly all programs have, so that the place is free, and less than a jump reaches.
pub const BELOW: u64 = 256 << 20;
/// The length in bytes of the part before the trampolines, which each program has for itself. It
/// holds the address of the entry.
pub const HEAD_PAGE: u64 = 4096;
/// An image has no more bytes: so that all of its jumps reach.
const LONGEST: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// Where the image of an object file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchedImage {
    /// The virtual address of its first page, as in the object file.
    pub from: u64,
    /// Its length in bytes, whole pages.
    pub len: u64,
    /// Where its code is in the run's memory, from [`layout::images_at`](crate::layout::images_at)
    /// on; its trampolines come behind.
    pub place: u64,
    /// The length of the trampolines in bytes, whole pages.
    pub trampolines_len: u64,
}

impl PatchedImage {
    /// Where the trampolines begin, relative to the library's first byte.
    pub fn trampolines(&self) -> u64 {
        self.from.wrapping_sub(BELOW)
    }

    /// How much of the run's memory it takes, in bytes.
    pub fn memory_size(&self) -> u64 {
        self.len + self.trampolines_len
    }
}

/// Executable bytes of an object file: first address, length, and place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeSegment {
    /// The virtual address of the first byte.
    pub address: u64,
    /// How many bytes of the file it has.
    pub len: u64,
    /// Where they are in the file.
    pub offset: u64,
}

/// The image of the library in `file` with these sites, to be put at `place`: where it is, and its
/// code and trampolines. `None` if it cannot have one: its sites are in several segments, or differ
/// from the bytes of the file.
pub fn make(
    file: &File,
    segments: &[CodeSegment],
    sites: &[PatchSite],
    place: u64,
) -> Option<(PatchedImage, Vec<u8>)> {
    let (first, last) = (sites.first()?, sites.last()?);
    let from = first.address & !(PAGE - 1);
    let end = (last.address + u64::from(last.len)).next_multiple_of(PAGE);
    let segment = segments.iter().find(|segment| {
        segment.address <= from
            && end <= segment.address + segment.len
            && segment.address % PAGE == segment.offset % PAGE
    })?;
    let len = end - from;
    if len > LONGEST {
        return None;
    }
    let trampolines_len = (sites.len() * TRAMPOLINE).next_multiple_of(PAGE as usize) as u64;
    let image = PatchedImage { from, len, place, trampolines_len };
    let mut bytes = vec![0; image.memory_size() as usize];
    let (code, trampolines) = bytes.split_at_mut(len as usize);
    file.read_exact_at(code, segment.offset + (from - segment.address)).ok()?;
    trampolines.fill(0xcc);
    let head = image.trampolines().wrapping_sub(HEAD_PAGE);
    for (number, site) in sites.iter().enumerate() {
        let at = site.address.checked_sub(from)? as usize;
        let there = code.get_mut(at..at + usize::from(site.len))?;
        if there != &site.bytes[..usize::from(site.len)] {
            return None;
        }
        let to = image.trampolines().wrapping_add((number * TRAMPOLINE) as u64);
        there.copy_from_slice(&trampoline::replacement(site, site.address, to));
        let made = trampoline::code(site, site.address, to, head);
        let room = &mut trampolines[number * TRAMPOLINE..][..made.len()];
        room.copy_from_slice(&made);
    }
    Some((image, bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn site(address: u64) -> PatchSite {
        let mut bytes = [0x90; 16];
        bytes[..7].copy_from_slice(&[0xb8, 0, 0, 0, 0, 0x0f, 0x05]);
        PatchSite { address, len: 7, syscall_at: 5, number: Some(0), bytes }
    }

    fn file(sites: &[PatchSite]) -> File {
        let mut bytes = vec![0x90; 5 * 4096];
        for site in sites {
            let at = site.address as usize - 0x1000;
            bytes[at..at + 7].copy_from_slice(&site.bytes[..7]);
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        file
    }

    #[test]
    fn an_image_is_the_file_but_for_the_jumps_and_these_lead_to_the_trampolines() {
        let sites = [site(0x2010), site(0x3ffd)];
        let segment = CodeSegment { address: 0x1000, len: 5 * 4096, offset: 0 };
        let (image, bytes) = make(&file(&sites), &[segment], &sites, 4096).unwrap();
        assert_eq!((image.from, image.len, image.place), (0x2000, 3 * 4096, 4096));
        assert_eq!(bytes.len() as u64, image.memory_size());
        for (number, site) in sites.iter().enumerate() {
            let at = (site.address - image.from) as usize;
            assert_eq!((bytes[at], &bytes[at + 5..at + 7]), (0xe9, &[0x90; 2][..]));
            let by = i32::from_le_bytes(bytes[at + 1..at + 5].try_into().unwrap());
            let to = (site.address + 5).wrapping_add_signed(by.into());
            assert_eq!(to, image.trampolines().wrapping_add((number * TRAMPOLINE) as u64));
        }
        let touched = |at: usize| {
            sites
                .iter()
                .any(|site| (site.address..site.address + 7).contains(&(image.from + at as u64)))
        };
        assert!((0..image.len as usize).all(|at| touched(at) || bytes[at] == 0x90));
    }

    #[test]
    fn what_does_not_fit_the_file_has_no_image() {
        let sites = [site(0x2010)];
        let segment = CodeSegment { address: 0x1000, len: 5 * 4096, offset: 0 };
        let other = [PatchSite { bytes: [1; 16], ..sites[0] }];
        assert_eq!(make(&file(&sites), &[segment], &other, 0), None);
        assert_eq!(make(&file(&sites), &[], &sites, 0), None);
        let short = CodeSegment { len: 4096, ..segment };
        assert_eq!(make(&file(&sites), &[short], &sites, 0), None);
        assert_eq!(make(&file(&sites), &[segment], &[], 0), None);
    }
}
