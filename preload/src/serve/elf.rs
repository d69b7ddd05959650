//! Programs as files: the kinds that execve(2) has to tell apart, and the *carrier* that is
//! executed in place of a static program.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use defuse_fs::Errno;

use crate::machine::descriptors::executable_memory;

pub const EXEC: u16 = 2;
const DYN: u16 = 3;
const X86_64: u16 = 62;

pub const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const INTERP: u32 = 3;
pub const PHDR: u32 = 6;
const GNU_STACK: u32 = 0x6474_e551;

pub const PAGE: u64 = 4096;
/// Most program headers that are looked at; linkers make a dozen.
const MOST_HEADERS: usize = 64;
const HEADER: usize = 56;

/// A program header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramHeader {
    pub kind: u32,
    pub flags: u32,
    pub offset: u64,
    pub address: u64,
    pub in_file: u64,
    pub in_memory: u64,
    pub align: u64,
}

/// The head of an ELF file for this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElfHead {
    pub kind: u16,
    pub entry: u64,
    pub headers_at: u64,
    pub segments: Vec<ProgramHeader>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(word))
}

impl ElfHead {
    /// `None` if it is no ELF file of 64 bits for x86-64. `head` is the beginning of the file, as
    /// far as its program headers at least.
    pub fn parse(head: &[u8]) -> Option<Self> {
        if head.get(..6)? != b"\x7fELF\x02\x01" || number::<2>(head, 18)? as u16 != X86_64 {
            return None;
        }
        let (headers_at, count) = (number::<8>(head, 32)?, number::<2>(head, 56)? as usize);
        let size = number::<2>(head, 54)? as usize;
        if size != HEADER || count > MOST_HEADERS {
            return None;
        }
        let from = usize::try_from(headers_at).ok()?;
        let segment = |at: usize| {
            let header = head.get(from.checked_add(at * HEADER)?..)?.get(..HEADER)?;
            Some(ProgramHeader {
                kind: number::<4>(header, 0)? as u32,
                flags: number::<4>(header, 4)? as u32,
                offset: number::<8>(header, 8)?,
                address: number::<8>(header, 16)?,
                in_file: number::<8>(header, 32)?,
                in_memory: number::<8>(header, 40)?,
                align: number::<8>(header, 48)?,
            })
        };
        let segments = (0..count).map(segment).collect::<Option<Vec<_>>>()?;
        let kind = number::<2>(head, 16)? as u16;
        Some(ElfHead { kind, entry: number::<8>(head, 24)?, headers_at, segments })
    }

    /// The path of the loader that the file names.
    pub fn loader(&self, read: impl Fn(&mut [u8], u64) -> usize) -> Option<Vec<u8>> {
        let segment = self.segments(INTERP).next()?;
        let mut path = vec![0; segment.in_file.min(PAGE) as usize];
        let len = read(&mut path, segment.offset);
        path.truncate(path[..len].iter().position(|byte| *byte == 0).unwrap_or(len));
        Some(path)
    }

    /// All segments of this kind (`p_type`).
    pub fn segments(&self, kind: u32) -> impl Iterator<Item = &ProgramHeader> {
        self.segments.iter().filter(move |segment| segment.kind == kind)
    }
}

/// How much of a file is looked at.
pub const HEAD: usize = 4096;

/// True if a file that begins with `head` is a program or library for this machine.
pub fn is_program(head: &[u8]) -> bool {
    ElfHead::parse(head).is_some()
}

/// True if a file that begins with `head` is a program of another kind: of 32 bits, or for another
/// machine.
pub fn is_foreign(head: &[u8]) -> bool {
    // Class, order of bytes and version: the kernel refuses others.
    let is_elf = matches!(head, [0x7f, b'E', b'L', b'F', 1 | 2, 1 | 2, 1, ..]);
    is_elf && !is_program(head)
}

/// The limit of interpreters of interpreters, the same as in the kernel.
pub const MAX_SCRIPTS: usize = 5;
/// The number of bytes of a script in which the kernel looks for `#!`.
const SCRIPT_HEAD: usize = 256;

/// The interpreter of the script that begins with `head`, and its one argument, execve(2).
pub fn script(head: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let rest = head[..head.len().min(SCRIPT_HEAD)].strip_prefix(b"#!")?;
    let end = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    let line = rest[..end].trim_ascii();
    let end = line.iter().position(|byte| b" \t\0".contains(byte)).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at(end);
    let argument = argument.trim_ascii();
    (!interpreter.is_empty()).then_some((interpreter, (!argument.is_empty()).then_some(argument)))
}

/// True if the file that begins with `head` is a program whose loader cannot load this library: it
/// is linked statically, or for another C library. `read` reads more of the file.
pub fn is_static(head: &[u8], read: impl Fn(&mut [u8], u64) -> usize) -> bool {
    let Some(image) = ElfHead::parse(head) else { return false };
    if let Some(loader) = image.loader(&read) {
        let name = loader.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        return !name.is_empty() && !name.starts_with(b"ld-linux");
    }
    match image.kind {
        EXEC => true,
        // The dynamic loader itself and libraries lack the flag.
        DYN => {
            let Some(dynamic) = image.segments(DYNAMIC).next() else { return false };
            let mut bytes = vec![0; dynamic.in_file.min(64 << 10) as usize];
            let len = read(&mut bytes, dynamic.offset);
            is_pie(&bytes[..len])
        }
        _ => false,
    }
}

/// True if the file that begins with `head` is a program that is loaded by this library where calls
/// are dispatched: a static one, or one that needs no library. Such a one, as Go makes it to be
/// loaded anywhere, sets FS for itself, and would take it away from the C library that this one
/// needs.
pub fn is_carried(head: &[u8], read: impl Fn(&mut [u8], u64) -> usize) -> bool {
    if is_static(head, &read) {
        return true;
    }
    let Some(image) = ElfHead::parse(head).filter(|image| image.loader(&read).is_some()) else {
        return false;
    };
    let needs_library = image.segments(DYNAMIC).next().is_some_and(|dynamic| {
        let mut bytes = vec![0; dynamic.in_file.min(64 << 10) as usize];
        let len = read(&mut bytes, dynamic.offset);
        bytes[..len].chunks_exact(16).any(|entry| number::<8>(entry, 0) == Some(NEEDED))
    });
    !needs_library
}

/// `DT_NEEDED`.
const NEEDED: u64 = 1;

/// True if `DT_FLAGS_1` among the entries marks the file as a program.
fn is_pie(dynamic: &[u8]) -> bool {
    const FLAGS_1: u64 = 0x6fff_fffb;
    const PIE: u64 = 0x0800_0000;
    let pair = |entry: &[u8]| Some((number::<8>(entry, 0)?, number::<8>(entry, 8)?));
    let mut entries = dynamic.chunks_exact(16).filter_map(pair);
    entries.any(|(tag, value)| tag == FLAGS_1 && value & PIE != 0)
}

/// The loader of dynamic programs, by the name that all of them have for it (System V ABI, x86-64).
const LOADER: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";

/// A program that needs nothing and does nothing.
fn carrier() -> Vec<u8> {
    const HEADERS: usize = 5;
    let (loader, dynamic) = (64 + HEADERS * HEADER, 64 + HEADERS * HEADER + 32);
    let entries: [[u64; 2]; 5] = [
        // Empty tables of strings and symbols, without which no loader takes it.
        [5, dynamic as u64 + 80],
        [6, dynamic as u64 + 80],
        [10, 1],
        [11, 24],
        [0, 0],
    ];
    let (entry, len) = (dynamic + 80 + 24, dynamic + 80 + 24 + 8);
    let mut out = Vec::with_capacity(len);
    out.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    out.extend_from_slice(&DYN.to_le_bytes());
    out.extend_from_slice(&X86_64.to_le_bytes());
    out.extend_from_slice(&1u32.to_le_bytes());
    [entry as u64, 64, 0].iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    out.extend_from_slice(&0u32.to_le_bytes());
    let sizes = [64u16, HEADER as u16, HEADERS as u16, 64, 0, 0];
    sizes.iter().for_each(|half| out.extend_from_slice(&half.to_le_bytes()));
    let headers: [(u32, u32, usize, usize, u64); HEADERS] = [
        (PHDR, 4, 64, HEADERS * HEADER, 8),
        (INTERP, 4, loader, LOADER.len(), 1),
        // The dynamic section is written to by the loader.
        (LOAD, 7, 0, len, PAGE),
        (DYNAMIC, 6, dynamic, size_of_val(&entries), 8),
        (GNU_STACK, 6, 0, 0, 16),
    ];
    for (kind, flags, at, len, align) in headers {
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&flags.to_le_bytes());
        let (at, len) = (at as u64, len as u64);
        let words = [at, at, at, len, len, align];
        words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    }
    out.extend_from_slice(LOADER);
    out.resize(dynamic, 0);
    entries.iter().flatten().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
    out.resize(entry, 0);
    // ud2: this is never executed.
    out.extend_from_slice(&[0x0f, 0x0b, 0, 0, 0, 0, 0, 0]);
    out
}

/// The carrier, to be executed.
pub fn make_carrier() -> Result<OwnedFd, Errno> {
    let mut file = File::from(executable_memory(c"defuse-static")?);
    file.write_all(&carrier()).map_err(Errno::from)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_carrier_is_a_program_that_the_loader_is_named_in() {
        let bytes = carrier();
        let image = ElfHead::parse(&bytes).unwrap();
        assert_eq!((image.kind, image.segments.len()), (DYN, 5));
        let loader = image.segments(INTERP).next().unwrap();
        let from = loader.offset as usize;
        assert_eq!(&bytes[from..from + loader.in_file as usize], LOADER);
        let read = |room: &mut [u8], at: u64| {
            let rest = &bytes[at as usize..];
            let len = rest.len().min(room.len());
            room[..len].copy_from_slice(&rest[..len]);
            len
        };
        assert!(!is_static(&bytes, read));
        // It needs no library.
        assert!(is_carried(&bytes, read));
        // With the loader of another C library.
        let mut other = bytes.clone();
        other[from + 8..from + 11].copy_from_slice(b"dl-");
        let read = |room: &mut [u8], at: u64| {
            room.copy_from_slice(&other[at as usize..][..room.len()]);
            room.len()
        };
        assert!(is_static(&other, read));
        assert_eq!(image.entry as usize + 8, bytes.len());
    }

    #[test]
    fn a_script_has_an_interpreter_and_at_most_one_argument() {
        let one = |head: &'static [u8]| script(head);
        assert_eq!(one(b"#!/bin/sh\nx"), Some((&b"/bin/sh"[..], None)));
        assert_eq!(
            one(b"#! /usr/bin/env  a b \n"),
            Some((&b"/usr/bin/env"[..], Some(&b"a b"[..])))
        );
        assert_eq!(one(b"#!\n"), None);
        assert_eq!(one(b"\x7fELF"), None);
    }

    #[test]
    fn programs_are_distinguished() {
        let kind = |path: &str| {
            let file = File::open(path).unwrap();
            let mut head = vec![0; HEAD];
            let len = file.read_at(&mut head, 0).unwrap();
            is_static(&head[..len], |bytes, at| file.read_at(bytes, at).unwrap_or(0))
        };
        assert!(!kind("/bin/sh"));
        let file = File::open("/bin/sh").unwrap();
        let mut head = vec![0; HEAD];
        let len = file.read_at(&mut head, 0).unwrap();
        assert!(!is_carried(&head[..len], |bytes, at| file.read_at(bytes, at).unwrap_or(0)));
        // The loader has no interpreter, and is none.
        assert!(!kind("/lib64/ld-linux-x86-64.so.2"));
        assert!(!kind("/etc/passwd"));
        assert!(!is_static(b"\x7fELF", |_, _| 0));
        let mut own = carrier();
        assert!(!is_foreign(&own) && !is_foreign(b"#!/bin/sh"));
        // 32 bits.
        own[4] = 1;
        assert!(is_foreign(&own));
    }
}
