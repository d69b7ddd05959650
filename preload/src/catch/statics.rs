//! Programs that no library can be loaded into: they are loaded by us.
//!
//! execve(2) of a static program becomes execve(2) of a *carrier*: the smallest program that the
//! dynamic loader takes, made in memory, into which this library is loaded as into any other. Once
//! the carrier has begun, it maps the static program as the kernel would have, gives it the
//! arguments, variables and auxiliary vector that it would have got, and jumps to it: from there on
//! its system calls are dispatched ([`crate::catch::dispatch`]).
//!
//! Programs for another C library, whose loader would not take this one, are begun the same way,
//! with their loader.
//!
//! The program can notice it by `/proc/PID/exe` as other processes read it, and by mappings that
//! are not its own.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use defuse_fs::Errno;
use defuse_preload_plan::{EXECUTABLE, NAME, go};

use crate::catch::{environment, go_entry, next, patch, tls_block};
use crate::machine::descriptors::take_owned;
use crate::machine::sys;
use crate::process::state;
use crate::serve::elf::{EXEC, ElfHead, HEAD, LOAD, PAGE, PHDR, ProgramHeader};
use crate::serve::path;

/// Where the kernel put the arguments of this process.
static ARGUMENTS: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// And the auxiliary vector, behind the variables.
static AUXILIARY: AtomicPtr<[u64; 2]> = AtomicPtr::new(std::ptr::null_mut());

/// Notes the arguments of this process from the kernel, before any of them is changed.
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

/// Gives this program its name and its path, if its file is in a mount, so that the kernel has
/// executed it by a descriptor.
pub fn name_program() {
    let (Some(name), Some(path)) = (environment::take(NAME), environment::take(EXECUTABLE)) else {
        return;
    };
    path::set_executable(path.into_bytes());
    set_name(name.as_bytes());
    let mut entry = AUXILIARY.load(Ordering::Relaxed);
    // SAFETY: `note_arguments` found the vector, which ends with AT_NULL. The program keeps the
    // name for as long as it runs.
    unsafe {
        while (*entry)[0] != libc::AT_NULL {
            if (*entry)[0] == libc::AT_EXECFN {
                (*entry)[1] = name.into_raw() as u64;
                return;
            }
            entry = entry.add(1);
        }
    }
}

/// A program to be begun.
pub struct LoadedProgram {
    /// Where it begins.
    entry: u64,
    /// Its stack pointer.
    sp: u64,
}

/// Loads the static program in `fd`. The error is a message for users.
pub fn load(fd: OwnedFd) -> Result<LoadedProgram, String> {
    let name = environment::take(NAME).unwrap_or_default();
    let shown = name.to_string_lossy().into_owned();
    let executable = environment::take(EXECUTABLE).unwrap_or_default();
    path::set_executable(executable.into_bytes());
    if !tls_block::is_possible() {
        return Err(format!(
            "{shown}: the processor or the kernel does not let programs exchange FS (FSGSBASE, Linux \
             5.9), which static programs need: run without --dispatch"
        ));
    }
    let (image, base, file) = map_file(File::from(fd)).map_err(|why| format!("{shown}: {why}"))?;
    replace_calls(&image, base, &file);
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
    let headers = image.segments(PHDR).next().map(|segment| segment.address).or_else(|| {
        let holds =
            |s: &&ProgramHeader| (s.offset..s.offset + s.in_file).contains(&image.headers_at);
        let segment = image.segments(LOAD).find(holds)?;
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
    Ok(LoadedProgram { entry: begin, sp: stack(&changes) })
}

/// Replaces the instructions of a Go program that make its system calls, so that most need no
/// signal. Others need signals for all.
fn replace_calls(image: &ElfHead, base: u64, file: &File) {
    // A report counts calls where they are dispatched.
    if state::get().is_some_and(|process| process.plan.report) {
        return;
    }
    let Ok(len) = file.metadata().map(|meta| meta.len()) else { return };
    let Ok(mapped) = sys::MappedFile::new(file.as_raw_fd(), len) else { return };
    let sites = go::sites(mapped.bytes());
    let executable = image.segments(LOAD).filter(|segment| segment.flags & 1 != 0);
    let code = executable.map(|s| (base + s.address, base + s.address + s.in_file)).collect();
    if !sites.is_empty() {
        patch::program(base, code, &sites, go_entry::address());
    }
}

/// Gives a static program, which has a C library of its own or none, the resources that the C
/// library in this process has from the kernel: the area for restartable sequences, of which a
/// thread has one, and the end of its memory, brk(2), from which malloc(3) takes.
pub fn hand_to_program() {
    const UNREGISTER: u64 = 1;
    const SIGNATURE: u64 = 0x5305_3053;
    let (offset, size) = (next::find(c"__rseq_offset"), next::find(c"__rseq_size"));
    if offset != 0 && size != 0 {
        // SAFETY: the variables of these names are numbers of the C library.
        let (offset, size) =
            unsafe { ((offset as *const i64).read(), (size as *const u32).read()) };
        let area = tls_block::fs().wrapping_add_signed(offset);
        // The kernel's first record had 32 bytes, and libraries pass the size that they use.
        let args = [area, u64::from(size.max(32)), UNREGISTER, SIGNATURE, 0, 0];
        sys::pass(libc::SYS_rseq as u64, &args);
    }
    // SAFETY: an option of the heap.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 0) };
}

fn open(path: &[u8]) -> Result<File, Errno> {
    let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
    let how = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let fd = sys::plain(libc::SYS_open, path.as_ptr() as u64, how, 0)?;
    Ok(File::from(take_owned(fd as i32)))
}

/// Maps an ELF file; returns also how far from its addresses it is.
fn map_file(file: File) -> Result<(ElfHead, u64, File), String> {
    let mut head = vec![0; HEAD];
    let len = file.read_at(&mut head, 0).map_err(|error| error.to_string())?;
    let image = ElfHead::parse(&head[..len]).ok_or("not an ELF file for this machine")?;
    let base = map(&image, &file).map_err(|errno| {
        format!("cannot be mapped where it is linked to: {errno}: run without --dispatch")
    })?;
    Ok((image, base, file))
}

impl LoadedProgram {
    /// Begins it.
    pub fn run(self) -> ! {
        // SAFETY: stack and entry belong to the program that was mapped; the frames below are ours
        // and end here.
        unsafe { tls_block::jump(self.sp, self.entry) }
    }
}

/// Puts arguments, variables and the auxiliary vector with its `changes` where the kernel had put
/// the carrier's, and returns the address: the list of variables is shorter now.
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
        environment::leave_to_program();
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

fn align_up(address: u64) -> u64 {
    address.next_multiple_of(PAGE)
}

fn protection(segment: &ProgramHeader) -> i32 {
    let one = |flag: u32, protection| if segment.flags & flag != 0 { protection } else { 0 };
    one(4, libc::PROT_READ) | one(2, libc::PROT_WRITE) | one(1, libc::PROT_EXEC)
}

fn map_at(at: u64, len: u64, protection: i32, flags: i32, from: (i32, u64)) -> Result<u64, Errno> {
    let args = [at, len, protection as u64, flags as u64, from.0 as u64, from.1];
    // SAFETY: the place is free, or was reserved for the program.
    sys::check(unsafe { sys::syscall(libc::SYS_mmap as u64, &args) }).map(|at| at as u64)
}

/// Maps the program; returns how far from its addresses it is.
fn map(image: &ElfHead, file: &File) -> Result<u64, Errno> {
    const NONE: (i32, u64) = (-1, 0);
    let memory = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let invalid = Errno::from_raw(libc::ENOEXEC);
    let end = |s: &ProgramHeader| s.address.checked_add(s.in_memory).filter(|end| *end < 1 << 47);
    let ends = image.segments(LOAD).map(end).collect::<Option<Vec<_>>>().ok_or(invalid)?;
    let first = image.segments(LOAD).map(|s| s.address & !(PAGE - 1)).min().ok_or(invalid)?;
    let len = align_up(ends.into_iter().max().unwrap_or(0)) - first;
    let base = if image.kind == EXEC {
        let flags = memory | libc::MAP_FIXED_NOREPLACE;
        if map_at(first, len, libc::PROT_NONE, flags, NONE)? != first {
            return Err(Errno::EEXIST);
        }
        0
    } else {
        let align =
            image.segments(LOAD).map(|s| s.align).max().unwrap_or(PAGE).clamp(PAGE, 1 << 30);
        let at = map_at(0, len + align, libc::PROT_NONE, memory, NONE)?;
        at.next_multiple_of(align) - first
    };
    for segment in image.segments(LOAD) {
        let start = base + segment.address;
        let (page, file_end) = (start & !(PAGE - 1), start + segment.in_file);
        let (offset, protection) = (segment.offset - (start - page), protection(segment));
        if segment.in_file > 0 {
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            map_at(page, file_end - page, protection, flags, (file.as_raw_fd(), offset))?;
        }
        let end = start + segment.in_memory;
        let mapped = if segment.in_file > 0 { align_up(file_end) } else { page };
        if segment.in_memory > segment.in_file && segment.in_file > 0 && segment.flags & 2 != 0 {
            // SAFETY: the last page of the file's part was mapped just now, to be written.
            unsafe { std::ptr::write_bytes(file_end as *mut u8, 0, (mapped - file_end) as usize) };
        }
        if align_up(end) > mapped {
            map_at(mapped, align_up(end) - mapped, protection, memory | libc::MAP_FIXED, NONE)?;
        }
    }
    Ok(base)
}
