//! Programs and libraries with system calls of their own that the plan does not know: all objects
//! but those that the first program loads.
//!
//! Each is looked at when it is loaded with its program, and its instructions are replaced then. A
//! run notes the files that have none, so that a file is looked at once; of larger ones the user's
//! cache knows the rest.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use defuse_preload_plan::analysis::{self, ObjectFile};
use defuse_preload_plan::cache::{AnalysisCache, FileStamp};
use defuse_preload_plan::{ObjectSites, PatchSite};

use crate::catch::{entry, patch};
use crate::machine::descriptors::take_owned;
use crate::machine::lock::FutexLock;
use crate::machine::message::write_line;
use crate::machine::sys;
use crate::process::state::RunProcess;

/// Replaces the instructions of the program and of its libraries. No other thread runs.
pub fn replace(process: &'static RunProcess) {
    for object in patch::find_others(&process.plan.objects, entry::address()) {
        let path = path_of(&object);
        let path = path.as_slice();
        let Some(mark) = mark(path).filter(|mark| !process.shared.is_known_program(*mark)) else {
            continue;
        };
        let Some(own) = find(process, path) else {
            if process.shared.is_new_program(mark ^ REPORTED) {
                warn_of_unreadable(&object.path);
            }
            continue;
        };
        if own.is_clean() {
            process.shared.is_new_program(mark);
            continue;
        }
        REPLACED.lock().push(mark);
        let replaced = patch::patch_one(&object, &own.sites, entry::address());
        let is_missing = own.left + own.sites.len() > replaced;
        if is_missing && process.shared.is_new_program(mark ^ REPORTED) {
            warn_of_own_calls(process, &object.path);
        }
    }
}

/// The path of an object. The program may have been started by its loader (`ld.so PROGRAM`), and a
/// library have been loaded by a path that is relative to a directory of before.
fn path_of(object: &patch::LoadedObject) -> Vec<u8> {
    const EXECUTED: &[u8] = b"/proc/self/exe";
    if object.path.starts_with(b"/") {
        return object.path.clone();
    }
    let executed = std::fs::read_link(OsStr::from_bytes(EXECUTED)).unwrap_or_default();
    let name = executed.file_name().unwrap_or_default().as_bytes();
    if object.path.is_empty() && !name.starts_with(b"ld-") {
        return EXECUTED.to_vec();
    }
    find_mapped_path(object).unwrap_or_else(|| EXECUTED.to_vec())
}

/// The path from which the code of an object is mapped.
fn find_mapped_path(object: &patch::LoadedObject) -> Option<Vec<u8>> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let mut lines = maps.split(|byte| *byte == b'\n');
    lines.find_map(|line| {
        let (range, rest) = line.split_at(line.iter().position(|byte| *byte == b' ')?);
        let from = range.split(|byte| *byte == b'-').next()?;
        let from = u64::from_str_radix(std::str::from_utf8(from).ok()?, 16).ok()?;
        let path = rest.iter().position(|byte| *byte == b'/').map(|at| &rest[at..]);
        path.filter(|_| object.has(from)).map(<[u8]>::to_vec)
    })
}

/// Looks at a library that dlopen(3) is about to load by this path or name: its instructions cannot
/// be replaced before it begins, so that a warning is printed.
pub fn check_library(process: &'static RunProcess, name: &[u8]) {
    let found = match name.contains(&b'/') {
        true => Some(name.to_vec()),
        false => std::str::from_utf8(name).ok().and_then(|name| {
            let path = analysis::find_library(name, &[])?;
            Some(path.into_os_string().into_encoded_bytes())
        }),
    };
    let Some(path) = found else { return };
    let Some(mark) = mark(&path).filter(|mark| !process.shared.is_known_program(*mark)) else {
        return;
    };
    // A loaded library was replaced, and a file with a warning needs no second look.
    if REPLACED.lock().contains(&mark) || process.shared.is_known_program(mark ^ REPORTED) {
        return;
    }
    let Some(own) = find(process, &path) else { return };
    let is_planned = !own.build_id.is_empty()
        && process.plan.objects.iter().any(|object| object.build_id == own.build_id);
    if own.is_clean() || is_planned {
        process.shared.is_new_program(mark);
    } else if process.shared.is_new_program(mark ^ REPORTED) {
        warn_of_own_calls(process, &path);
    }
}

/// The marks of files whose instructions this process has replaced.
static REPLACED: FutexLock<Vec<u64>> = FutexLock::new(Vec::new());

/// The difference between the mark of a file without calls of its own and the mark of a file with a
/// warning.
const REPORTED: u64 = 1 << 63;

/// A number for the file at this path.
fn mark(path: &[u8]) -> Option<u64> {
    let path = CString::new(path).ok()?;
    let mut stat: libc::stat = sys::zeroed();
    let at = libc::AT_FDCWD as u64;
    let args = [at, path.as_ptr() as u64, &raw mut stat as u64, 0, 0, 0];
    sys::check(sys::pass(libc::SYS_newfstatat as u64, &args)).ok()?;
    let words = [stat.st_dev, stat.st_ino, stat.st_ctime as u64, stat.st_ctime_nsec as u64];
    // FNV-1a, a word at a time. Users differ in nothing here, in contrast to the marks of
    // `exec_warnings`.
    let step = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    Some((words.iter().fold(0x6c62_272e_07bb_0142, step) & !REPORTED).max(1))
}

/// The system calls that a file makes itself.
struct OwnCalls {
    build_id: Vec<u8>,
    sites: Vec<PatchSite>,
    /// How many instructions cannot be replaced.
    left: usize,
}

impl OwnCalls {
    fn is_clean(&self) -> bool {
        self.sites.is_empty() && self.left == 0
    }
}

/// The calls of the file at `path`.
fn find(process: &'static RunProcess, path: &[u8]) -> Option<OwnCalls> {
    let text = CString::new(path).ok()?;
    let how = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let args = [libc::AT_FDCWD as u64, text.as_ptr() as u64, how, 0, 0, 0];
    let fd = sys::check(sys::pass(libc::SYS_openat as u64, &args)).ok()?;
    let file = File::from(take_owned(fd as i32));
    let meta = file.metadata().ok()?;
    let mapped = sys::MappedFile::new(file.as_raw_fd(), meta.len()).ok()?;
    // To write to it could be the end of a program with a limit of file sizes.
    let is_limited = process.task().file_size_limit().is_some();
    let cache = if is_limited { None } else { AnalysisCache::open_for_user() };
    let path = Path::new(OsStr::from_bytes(path));
    let binary = ObjectFile::read_bytes(
        path,
        mapped.bytes(),
        FileStamp::from_metadata(&meta),
        cache.as_ref(),
    )?;
    let ObjectSites { build_id, sites, .. } = binary.to_sites(false);
    Some(OwnCalls { build_id, sites, left: binary.left })
}

fn warn_of_own_calls(process: &'static RunProcess, path: &[u8]) {
    write_line(&format!(
        "{}: makes system calls without the C library that are not served: they see the files of the kernel \
         in place of {}. --dispatch serves them",
        display_name(path),
        process.targets()
    ));
}

/// Prints a warning about a file that this process loads and cannot read.
fn warn_of_unreadable(path: &[u8]) {
    write_line(&format!(
        "{}: cannot be read: if it makes system calls without the C library, these are not served. --dispatch \
         serves them",
        display_name(path)
    ));
}

/// The name of an object, which is empty for the program.
fn display_name(path: &[u8]) -> String {
    let name = match path {
        b"" => std::env::args_os().next().unwrap_or_default().into_encoded_bytes(),
        path => path.to_vec(),
    };
    String::from_utf8_lossy(&name).into_owned()
}
