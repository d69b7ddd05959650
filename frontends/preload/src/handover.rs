//! What one program hands to the next: open files, working directory, limits.
//!
//! The state is text (see [`crate::letter`]): a first line of the working directory and the limit, then
//! one line for every descriptor. Paths are written in hexadecimal, so that any byte may be in them.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_direct::{At, Description, How, Place, Stat};
use defuse_fs::{Errno, FileKind};
use defuse_preload_plan::{VARIABLE, layout};

use crate::process::Process;
use crate::serve::{Call, Fail};
use crate::sys;
use crate::table::Entry;

/// A memfd. `EMFILE`.
fn memory(name: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = u64::from(libc::MFD_CLOEXEC);
    let fd = sys::plain(libc::SYS_memfd_create, name.as_ptr() as u64, flags, 0)?;
    Ok(owned(fd as i32))
}

#[allow(unsafe_code)]
pub fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel gave the number just now, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A copy of a file in memory that can be executed or loaded.
pub fn copy_to_memory(call: &Call<'_>, file: &Description) -> Result<OwnedFd, Fail> {
    let fd = memory(c"defuse")?;
    let mut out = File::from(fd);
    let mut piece = vec![0; 256 << 10];
    let mut at = 0;
    loop {
        let len = call.client().pread(call.task(), file, &mut piece, at)?;
        if len == 0 {
            break;
        }
        out.write_all(&piece[..len]).map_err(Errno::from)?;
        at += len as u64;
    }
    Ok(out.into())
}

/// What is handed over at an execve(2) that is under way. Dropped where it failed.
pub struct Outgoing {
    state: OwnedFd,
    variable: CString,
    preload: Vec<u8>,
}

impl Outgoing {
    /// Writes down what the next program gets.
    pub fn new(call: &Call<'_>) -> Result<Self, Fail> {
        let process = call.process;
        let state = crate::letter::write(&text(call), process.floor)?;
        let (memory, floor) = (process.memory_fd, process.floor);
        let variable = format!("{VARIABLE}={memory}:{}:{floor}", state.as_raw_fd());
        let variable = CString::new(variable).unwrap_or_default();
        Ok(Outgoing { state, variable, preload: process.plan.library.clone() })
    }

    /// The environment with what leads to us.
    pub fn environment(&self, strings: Vec<&[u8]>) -> Vec<CString> {
        let own = format!("{VARIABLE}=");
        let mut preload = b"LD_PRELOAD=".to_vec();
        preload.extend_from_slice(&self.preload);
        let mut all = Vec::with_capacity(strings.len() + 2);
        for text in strings {
            if let Some(others) = text.strip_prefix(b"LD_PRELOAD=") {
                for other in others.split(|byte| b": ".contains(byte)) {
                    if !other.is_empty() && *other != *self.preload {
                        preload.push(b':');
                        preload.extend_from_slice(other);
                    }
                }
            } else if !text.starts_with(own.as_bytes()) {
                all.push(CString::new(text).unwrap_or_default());
            }
        }
        all.push(CString::new(preload).unwrap_or_default());
        all.push(self.variable.clone());
        let _ = &self.state;
        all
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn text(call: &Call<'_>) -> String {
    let process = call.process;
    let view = process.view();
    let cwd = match &*call.task().cwd() {
        Place::Inside(_) => process.client.getcwd(call.task()).unwrap_or_default(),
        Place::Outside(_) => Vec::new(),
    };
    let limit = process.limit.load(Ordering::Relaxed);
    let mut text = format!("{limit} {}\n", hex(&cwd));
    for (fd, entry) in view.table.all() {
        let flags = sys::plain(libc::SYS_fcntl, fd as u64, libc::F_GETFD as u64, 0);
        if flags.is_ok_and(|flags| flags & i64::from(libc::FD_CLOEXEC) != 0) {
            continue;
        }
        let ino =
            process.client.fstat(call.task(), entry.file()).map_or(0, |stat| stat.attr.st_ino);
        let mut open = entry.file().flags().0;
        if entry.file().kind() == FileKind::Directory {
            open |= libc::O_DIRECTORY as u32;
        }
        let cells = entry.cells.map_or(-1, i64::from);
        // What the next program has open is one reference more; it is taken over as it is.
        if let Some(cells) = entry.cells {
            process.shared.share(cells);
        }
        let backed = u8::from(entry.backed);
        text += &format!("{fd} {backed} {open} {cells} {ino} {}\n", hex(&entry.path));
    }
    text
}

/// Takes over what the program before handed over in `fd`; returns the limit of descriptors that it
/// believed in.
pub fn read(fd: i32) -> Option<Incoming> {
    let text = crate::letter::read(fd)?;
    let (first, rest) = text.split_once('\n')?;
    let (limit, cwd) = first.split_once(' ')?;
    Some(Incoming { limit: limit.parse().ok()?, cwd: unhex(cwd)?, rest: rest.to_owned() })
}

/// What was handed over.
pub struct Incoming {
    /// The limit of descriptors that the program sees.
    pub limit: u32,
    cwd: Vec<u8>,
    rest: String,
}

impl Incoming {
    /// Makes it this process's state.
    pub fn apply(&self, process: &'static Process) {
        let view = process.view();
        if !self.cwd.is_empty() {
            let _ = process.client.chdir(process.task(), &self.cwd);
        }
        // Duplicates of one open file share it: they have the same cells.
        let mut known: Vec<(u32, Arc<Entry>)> = Vec::new();
        for line in self.rest.lines() {
            let Some(record) = Record::parse(line) else { continue };
            let shared = known.iter().find(|(cells, _)| Some(*cells) == record.cells);
            let entry = match shared {
                Some((_, entry)) => Some(Arc::clone(entry)),
                None => record.open(process),
            };
            if let Some(cells) = record.cells.filter(|_| entry.is_none() || shared.is_some()) {
                process.shared.unshare(cells);
            }
            let Some(entry) = entry else { continue };
            known.extend(record.cells.map(|cells| (cells, Arc::clone(&entry))));
            let _ = view.table.set(record.fd, entry);
        }
    }
}

struct Record {
    fd: i32,
    backed: bool,
    flags: u32,
    cells: Option<u32>,
    ino: u64,
    path: Vec<u8>,
}

impl Record {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        Some(Record {
            fd: words.next()?.parse().ok()?,
            backed: words.next()? == "1",
            flags: words.next()?.parse().ok()?,
            cells: u32::try_from(words.next()?.parse::<i64>().ok()?).ok(),
            ino: words.next()?.parse().ok()?,
            path: unhex(words.next()?)?,
        })
    }

    /// The open file in this process: opened anew by its path, where that still leads to the same
    /// file. A descriptor that has the bytes needs no more than the inode, and works without it.
    fn open(&self, process: &'static Process) -> Option<Arc<Entry>> {
        let flags = if self.backed { libc::O_PATH as u32 } else { self.flags };
        let how = How { flags, ..How::default() };
        if let Some(cells) = self.cells {
            process.shared.take_over(cells);
        }
        let file = process.client.open(process.task(), At::Cwd, &self.path, how);
        process.shared.end_take_over();
        let file = file.ok()?;
        let stat = process.client.fstat(process.task(), &file).ok()?;
        if stat.attr.st_ino != self.ino {
            return None;
        }
        let cells = file.arena_cells().map(|cells| process.shared.index(cells));
        Some(Arc::new(Entry::new(file, self.backed, self.path.clone(), cells)))
    }
}

/// Runs `note` with the cells of all that is open, each once: a fork gives them to one process more.
pub fn all_cells(process: &'static Process, note: impl FnMut(u32)) {
    let mut seen = std::collections::BTreeSet::new();
    let all = process.view().table.all();
    let cells = all.iter().filter_map(|(_, entry)| entry.cells);
    cells.filter(|&cells| seen.insert(cells)).for_each(note);
}

/// The end of this process: its mappings are written back, and its open files given back.
pub fn leave(call: &Call<'_>) {
    crate::mappings::write_back_all(call);
    let view = call.process.view();
    for (fd, _) in view.table.all() {
        if let Some(entry) = view.table.remove(fd)
            && !entry.backed
        {
            let _ = entry.file().close(call.task());
        }
    }
}

/// Where the kernel has what a fifo, device or socket of a mount stands for: all processes of the run
/// find it under the same name.
pub fn node_path(process: &Process, stat: &Stat) -> Option<CString> {
    let uid = sys::plain(libc::SYS_getuid, 0, 0, 0).ok()? as u32;
    let directory = layout::node_directory(uid, process.shared.id());
    let path = format!("{directory}/{:x}-{:x}-{:x}", stat.dev, stat.attr.st_ino, stat.attr.rdev);
    let directory = CString::new(directory).ok()?;
    let _ = sys::plain(libc::SYS_mkdir, directory.as_ptr() as u64, 0o700, 0);
    CString::new(path).ok()
}

/// A node of the kernel for a fifo or device of a mount, made at the first open.
pub fn node(process: &Process, stat: &Stat) -> Option<CString> {
    let path = node_path(process, stat)?;
    let mode = stat.attr.kind.mode_bits() | 0o600;
    let (path_at, rdev) = (path.as_ptr() as u64, stat.attr.rdev);
    match sys::plain(libc::SYS_mknod, path_at, u64::from(mode), rdev) {
        Ok(_) | Err(Errno::EEXIST) => Some(path),
        Err(_) => None,
    }
}
