//! Programs that no library can be loaded into: they are loaded by us.
//!
//! execve(2) of a static program becomes that of a *carrier*: the smallest program that the dynamic
//! loader takes, made in memory, into which this library is loaded as into any other. Once that has
//! begun, it maps the static program as the kernel would have, gives it the arguments, variables and
//! auxiliary vector that it would have got, and jumps to it: from there on its system calls are
//! dispatched ([`crate::catch::dispatch`]).
//!
//! Programs for another C library, whose loader would not take this one, are begun the same way, with
//! their loader.
//!
//! What the program can see of it: `/proc/PID/exe` as others read it, and mappings that are not its
//! own.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use defuse_fs::Errno;
use defuse_preload_plan::{EXECUTABLE, NAME};

use crate::catch::{symbols, tls_block};
use crate::machine::sys;

const EXEC: u16 = 2;
const DYN: u16 = 3;
const X86_64: u16 = 62;

const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const INTERP: u32 = 3;
const PHDR: u32 = 6;
const GNU_STACK: u32 = 0x6474_e551;

const PAGE: u64 = 4096;
/// Most program headers that are looked at; linkers make a dozen.
const MOST_HEADERS: usize = 64;
const HEADER: usize = 56;

/// A program header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    in_file: u64,
    in_memory: u64,
    align: u64,
}

/// What the head of an ELF file for this machine says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Image {
    kind: u16,
    entry: u64,
    headers_at: u64,
    segments: Vec<Segment>,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(word))
}

impl Image {
    /// `None` where it is no ELF file of 64 bits for x86-64. `head` is the beginning of the file, as far
    /// as its program headers at least.
    fn parse(head: &[u8]) -> Option<Self> {
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
            Some(Segment {
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
        Some(Image { kind, entry: number::<8>(head, 24)?, headers_at, segments })
    }

    /// The path of the loader that the file asks for.
    fn loader(&self, read: impl Fn(&mut [u8], u64) -> usize) -> Option<Vec<u8>> {
        let segment = self.all(INTERP).next()?;
        let mut path = vec![0; segment.in_file.min(PAGE) as usize];
        let len = read(&mut path, segment.offset);
        path.truncate(path[..len].iter().position(|byte| *byte == 0).unwrap_or(len));
        Some(path)
    }

    fn all(&self, kind: u32) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(move |segment| segment.kind == kind)
    }
}

/// How much of a file is looked at.
pub const HEAD: usize = 4096;

/// Whether a file, which begins with `head`, is a program into which no loader takes this library: it
/// is linked statically, or for another C library. `read` reads more of it.
pub fn is_static(head: &[u8], read: impl Fn(&mut [u8], u64) -> usize) -> bool {
    let Some(image) = Image::parse(head) else { return false };
    if let Some(loader) = image.loader(&read) {
        let name = loader.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        return !name.is_empty() && !name.starts_with(b"ld-linux");
    }
    match image.kind {
        EXEC => true,
        // The dynamic loader itself and libraries lack the flag.
        DYN => {
            let Some(dynamic) = image.all(DYNAMIC).next() else { return false };
            let mut bytes = vec![0; dynamic.in_file.min(64 << 10) as usize];
            let len = read(&mut bytes, dynamic.offset);
            is_pie(&bytes[..len])
        }
        _ => false,
    }
}

/// Whether `DT_FLAGS_1` among the entries says that it is a program.
fn is_pie(dynamic: &[u8]) -> bool {
    const FLAGS_1: u64 = 0x6fff_fffb;
    const PIE: u64 = 0x0800_0000;
    let pair = |entry: &[u8]| Some((number::<8>(entry, 0)?, number::<8>(entry, 8)?));
    let mut entries = dynamic.chunks_exact(16).filter_map(pair);
    entries.any(|(tag, value)| tag == FLAGS_1 && value & PIE != 0)
}

// ---- the carrier -----------------------------------------------------------------------------

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
    // ud2: nobody comes here.
    out.extend_from_slice(&[0x0f, 0x0b, 0, 0, 0, 0, 0, 0]);
    out
}

/// The carrier, to be executed.
pub fn make_carrier() -> Result<OwnedFd, Errno> {
    let mut file = File::from(crate::serve::handover::memory(c"defuse-static")?);
    file.write_all(&carrier()).map_err(Errno::from)?;
    Ok(file.into())
}

// ---- in the carrier ----------------------------------------------------------------------------

/// Where the kernel put the arguments of this process.
static ARGUMENTS: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// And the auxiliary vector, behind the variables.
static AUXILIARY: AtomicPtr<[u64; 2]> = AtomicPtr::new(std::ptr::null_mut());

/// Notes what the kernel gave to this process, before anything of it is changed.
///
/// # Safety
///
/// These are the arguments that the loader gives to functions of initialization.
pub unsafe fn note_arguments(count: usize, arguments: *mut u64, mut variables: *mut u64) {
    COUNT.store(count, Ordering::Relaxed);
    ARGUMENTS.store(arguments, Ordering::Relaxed);
    // SAFETY: the list of variables ends with NULL, and the vector follows it.
    unsafe {
        while variables.read() != 0 {
            variables = variables.add(1);
        }
        AUXILIARY.store(variables.add(1).cast(), Ordering::Relaxed);
    }
}

/// The path of the program, where it is a static one.
static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();

/// What `/proc/self/exe` leads to, where that is not what the kernel believes.
pub fn executable() -> Option<&'static [u8]> {
    PROGRAM.get().map(Vec::as_slice)
}

/// A program to be begun.
pub struct Program {
    /// Where it begins.
    entry: u64,
    /// Its stack pointer.
    sp: u64,
}

/// Loads the static program in `fd`. The error is for people.
pub fn load(fd: OwnedFd) -> Result<Program, String> {
    let name = symbols::take_variable(NAME).unwrap_or_default();
    let shown = name.to_string_lossy().into_owned();
    let executable = symbols::take_variable(EXECUTABLE).unwrap_or_default();
    let _ = PROGRAM.set(executable.into_bytes());
    if !tls_block::is_possible() {
        return Err(format!(
            "{shown}: the processor or the kernel does not let programs exchange FS (FSGSBASE, Linux \
             5.9), which static programs need: run without --dispatch"
        ));
    }
    let (image, base, file) = map_file(File::from(fd)).map_err(|why| format!("{shown}: {why}"))?;
    let read = |bytes: &mut [u8], at| file.read_at(bytes, at).unwrap_or(0);
    let loader = match image.loader(read) {
        None => None,
        Some(path) => {
            let failed = |why| format!("{}: {why}", String::from_utf8_lossy(&path));
            let file = open(&path).map_err(|errno| failed(errno.to_string()))?;
            let (image, base, _) = map_file(file).map_err(failed)?;
            Some((base, base + image.entry))
        }
    };
    let begin = loader.map_or(base + image.entry, |(_, entry)| entry);
    set_name(name.as_bytes());
    let headers = image.all(PHDR).next().map(|segment| segment.address).or_else(|| {
        let holds = |s: &&Segment| (s.offset..s.offset + s.in_file).contains(&image.headers_at);
        let segment = image.all(LOAD).find(holds)?;
        Some(image.headers_at - segment.offset + segment.address)
    });
    let changes = [
        (libc::AT_PHDR, base + headers.unwrap_or(0)),
        (libc::AT_PHNUM, image.segments.len() as u64),
        (libc::AT_BASE, loader.map_or(0, |(base, _)| base)),
        (libc::AT_ENTRY, base + image.entry),
        // The program keeps it for as long as it runs.
        (libc::AT_EXECFN, name.into_raw() as u64),
    ];
    Ok(Program { entry: begin, sp: stack(&changes) })
}

fn open(path: &[u8]) -> Result<File, Errno> {
    let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
    let how = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let fd = sys::plain(libc::SYS_open, path.as_ptr() as u64, how, 0)?;
    Ok(File::from(crate::serve::handover::owned(fd as i32)))
}

/// Maps an ELF file; returns also how far from its addresses it is.
fn map_file(file: File) -> Result<(Image, u64, File), String> {
    let mut head = vec![0; HEAD];
    let len = file.read_at(&mut head, 0).map_err(|error| error.to_string())?;
    let image = Image::parse(&head[..len]).ok_or("not an ELF file for this machine")?;
    let base = map(&image, &file).map_err(|errno| {
        format!("cannot be mapped where it is linked to: {errno}: run without --dispatch")
    })?;
    Ok((image, base, file))
}

impl Program {
    /// Begins it.
    pub fn run(self) -> ! {
        // SAFETY: stack and entry are those of the program that was mapped; the frames below are ours
        // and end here.
        unsafe { tls_block::jump(self.sp, self.entry) }
    }
}

/// Puts arguments, variables and the auxiliary vector with its `changes` where the kernel had put
/// those of the carrier, and returns where: the list of variables is shorter now.
fn stack(changes: &[(u64, u64)]) -> u64 {
    let mut block = vec![COUNT.load(Ordering::Relaxed) as u64];
    let mut end = AUXILIARY.load(Ordering::Relaxed);
    // SAFETY: `note_arguments` found these; lists end with NULL, the vector with AT_NULL. Below the
    // end of the vector is what was just read, no less than what is written there.
    unsafe {
        let arguments = ARGUMENTS.load(Ordering::Relaxed);
        block.extend((0..=block[0] as usize).map(|at| arguments.add(at).read()));
        let mut variable = arguments.add(block[0] as usize + 1);
        while variable.read() != 0 {
            block.push(variable.read());
            variable = variable.add(1);
        }
        block.push(0);
        loop {
            let [kind, value] = end.read();
            let change = changes.iter().find(|(changed, _)| *changed == kind);
            block.extend([kind, change.map_or(value, |(_, value)| *value)]);
            end = end.add(1);
            if kind == libc::AT_NULL {
                break;
            }
        }
        let sp = (end as u64 - size_of_val(&block[..]) as u64) & !15;
        std::ptr::copy_nonoverlapping(block.as_ptr(), sp as *mut u64, block.len());
        sp
    }
}

/// The name of the process, as the kernel makes it of a path.
fn set_name(path: &[u8]) {
    const SET_NAME: u64 = 15;
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let name = CString::new(name).unwrap_or_default();
    let _ = sys::plain(libc::SYS_prctl, SET_NAME, name.as_ptr() as u64, 0);
}

fn up(address: u64) -> u64 {
    address.next_multiple_of(PAGE)
}

fn protection(segment: &Segment) -> i32 {
    let one = |flag: u32, protection| if segment.flags & flag != 0 { protection } else { 0 };
    one(4, libc::PROT_READ) | one(2, libc::PROT_WRITE) | one(1, libc::PROT_EXEC)
}

fn map_at(at: u64, len: u64, protection: i32, flags: i32, from: (i32, u64)) -> Result<u64, Errno> {
    let args = [at, len, protection as u64, flags as u64, from.0 as u64, from.1];
    // SAFETY: the place is free, or was reserved for the program.
    sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).map(|at| at as u64)
}

/// Maps the program; returns how far from its addresses it is.
fn map(image: &Image, file: &File) -> Result<u64, Errno> {
    const NONE: (i32, u64) = (-1, 0);
    let memory = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let invalid = Errno::from_raw(libc::ENOEXEC);
    let end = |s: &Segment| s.address.checked_add(s.in_memory).filter(|end| *end < 1 << 47);
    let ends = image.all(LOAD).map(end).collect::<Option<Vec<_>>>().ok_or(invalid)?;
    let first = image.all(LOAD).map(|s| s.address & !(PAGE - 1)).min().ok_or(invalid)?;
    let len = up(ends.into_iter().max().unwrap_or(0)) - first;
    let base = if image.kind == EXEC {
        let flags = memory | libc::MAP_FIXED_NOREPLACE;
        if map_at(first, len, libc::PROT_NONE, flags, NONE)? != first {
            return Err(Errno::EEXIST);
        }
        0
    } else {
        let align = image.all(LOAD).map(|s| s.align).max().unwrap_or(PAGE).clamp(PAGE, 1 << 30);
        let at = map_at(0, len + align, libc::PROT_NONE, memory, NONE)?;
        at.next_multiple_of(align) - first
    };
    for segment in image.all(LOAD) {
        let start = base + segment.address;
        let (page, file_end) = (start & !(PAGE - 1), start + segment.in_file);
        let (offset, protection) = (segment.offset - (start - page), protection(segment));
        if segment.in_file > 0 {
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            map_at(page, file_end - page, protection, flags, (file.as_raw_fd(), offset))?;
        }
        let end = start + segment.in_memory;
        let mapped = if segment.in_file > 0 { up(file_end) } else { page };
        if segment.in_memory > segment.in_file && segment.in_file > 0 && segment.flags & 2 != 0 {
            // SAFETY: the last page of the file's part was mapped just now, to be written.
            unsafe { std::ptr::write_bytes(file_end as *mut u8, 0, (mapped - file_end) as usize) };
        }
        if up(end) > mapped {
            map_at(mapped, up(end) - mapped, protection, memory | libc::MAP_FIXED, NONE)?;
        }
    }
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_carrier_is_a_program_that_the_loader_is_named_in() {
        let bytes = carrier();
        let image = Image::parse(&bytes).unwrap();
        assert_eq!((image.kind, image.segments.len()), (DYN, 5));
        let loader = image.all(INTERP).next().unwrap();
        let from = loader.offset as usize;
        assert_eq!(&bytes[from..from + loader.in_file as usize], LOADER);
        let read = |room: &mut [u8], at: u64| {
            let rest = &bytes[at as usize..];
            let len = rest.len().min(room.len());
            room[..len].copy_from_slice(&rest[..len]);
            len
        };
        assert!(!is_static(&bytes, read));
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
    fn programs_are_told_apart() {
        let kind = |path: &str| {
            let file = File::open(path).unwrap();
            let mut head = vec![0; HEAD];
            let len = file.read_at(&mut head, 0).unwrap();
            is_static(&head[..len], |bytes, at| file.read_at(bytes, at).unwrap_or(0))
        };
        assert!(!kind("/bin/sh"));
        // The loader has no interpreter, and is none.
        assert!(!kind("/lib64/ld-linux-x86-64.so.2"));
        assert!(!kind("/etc/passwd"));
        assert!(!is_static(b"\x7fELF", |_, _| 0));
    }
}
