//! Files that clients have mapped, `MAP_SHARED`.
//!
//! Each file has one memory (memfd), which all clients map. A part of the memory is filled when it
//! is mapped for the first time. As far as it is filled, the memory *is* the file's data, as the
//! page cache is for a file system of the kernel: clients read from it, and write to it and to the
//! file system. Changes through mappings reach the file system when a client requests it (fsync, as
//! of msync(2)), before operations that have to see them, and when a mapping ends. The memory ends
//! with the last mapping.
//!
//! Only data is copied. The memory has the same holes as the file, so that the mapping of a hole
//! takes no memory, whatever its length. It has the length of the file in whole pages, and grows
//! with it: an access beyond is a SIGBUS, as on a file system of the kernel, and no mapping takes
//! memory for what the file does not have, however long it is (`MAP_POPULATE`, mlock(2)). It is
//! sealed against becoming shorter: a client has its descriptor, and would kill every other client
//! that has mapped it.
//!
//! Stores into holes take no space of the file system before they are written to it, which may fail
//! then. The client gets the error at the end of its mapping. If the client was killed before, the
//! next fsync of the file fails.

mod parts;

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{
    Caller, Context, Errno, File, FileSystem, Ino, OpenArgs, OpenFlags, ReadArgs, ReadBuf,
    ReleaseArgs, Result, SliceSink, SliceSource, Whence, WriteArgs, WriteBuf,
};
use defuse_probe::WarningLimiter;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};

use parts::{PAGE, PIECE, add, common, first_part, pages, pieces, subtract};

/// The length of the memory of a file: no mapping reaches further.
const LENGTH: u64 = 1 << 62;

/// The mapped files of a served file system.
pub(crate) struct MappedFiles {
    /// The number of files, so that the lock is not taken while there are none.
    count: AtomicUsize,
    files: Mutex<HashMap<Ino, CountedMapping>>,
    /// The maximum memory of a file for each of its users, in bytes.
    most: u64,
    /// Errors of changes that ended with their last mapping, for the next fsync.
    lost: Mutex<HashMap<Ino, Errno>>,
}

/// The maximum number of files whose errors are kept.
const MOST_LOST: usize = 1024;

/// A file with its number of users.
type CountedMapping = (Arc<Mutex<MappedInode>>, u64);

/// One mapped file.
pub(crate) struct MappedInode {
    ino: Ino,
    /// The handle of this layer and the memory, from the first mapping on.
    open: Option<OpenMapping>,
    /// The parts that are in memory: in order, apart from each other, in whole pages.
    filled: Vec<Range<u64>>,
    /// The maximum size of the memory, in bytes.
    most: u64,
}

struct OpenMapping {
    file: File,
    writable: bool,
    memory: OwnedFd,
}

/// The answer to a client that maps a part of a file.
pub(crate) struct MappingAnswer {
    /// Open for writing where the client may write the file.
    pub(crate) fd: OwnedFd,
    /// The bytes that the memory of the whole file takes.
    pub(crate) taken: u64,
}

impl MappedFiles {
    /// No files. `most` is the number of bytes that the memory of a file may take for each of its
    /// users.
    pub(crate) fn new(most: u64) -> MappedFiles {
        let (count, files, lost) = (AtomicUsize::new(0), Mutex::default(), Mutex::default());
        MappedFiles { count, files, most, lost }
    }

    /// The memory of a file, filled in `range` at least, for one more user, which may write if it
    /// `writes`. `ENOMEM` where that needs a copy of more than `room` bytes, `EOVERFLOW` for a
    /// range beyond the longest file.
    pub(crate) fn map(
        &self,
        fs: &dyn FileSystem,
        ino: Ino,
        range: Range<u64>,
        (writes, room): (bool, u64),
    ) -> Result<MappingAnswer> {
        let (mapped, users) = {
            let mut files = lock(&self.files);
            let entry = files.entry(ino).or_insert_with(|| {
                self.count.fetch_add(1, Ordering::SeqCst);
                let mapped = MappedInode { ino, open: None, filled: Vec::new(), most: 0 };
                (Arc::new(Mutex::new(mapped)), 0)
            });
            entry.1 += 1;
            (Arc::clone(&entry.0), entry.1)
        };
        let made = {
            let mut mapped = lock(&mapped);
            mapped.most = mapped.most.max(self.most.saturating_mul(users));
            mapped.prepare(fs, range, writes, room)
        };
        if made.is_err() {
            // This call did not map the file, and bytes that other clients have stored are still
            // there.
            let _ = self.release(fs, ino, 1);
        }
        made
    }

    /// Adds users to a file that is mapped; false where it is not.
    pub(crate) fn add_users(&self, ino: Ino, users: u64) -> bool {
        let mut files = lock(&self.files);
        let held = files.get_mut(&ino).map(|entry| entry.1 += users);
        held.is_some()
    }

    /// Removes users. Their changes are in the file system afterwards, or the error is returned.
    pub(crate) fn release(&self, fs: &dyn FileSystem, ino: Ino, users: u64) -> Result<()> {
        let Some(mapped) = lock(&self.files).get(&ino).map(|entry| Arc::clone(&entry.0)) else {
            return Ok(());
        };
        let mut mapped = lock(&mapped);
        let written = mapped.write_back(fs, 0..u64::MAX);
        let mut files = lock(&self.files);
        let Some(entry) = files.get_mut(&ino) else { return written };
        entry.1 = entry.1.checked_sub(users).expect("a mapping has as many users as hold it");
        if entry.1 > 0 {
            return written;
        }
        files.remove(&ino);
        self.count.fetch_sub(1, Ordering::SeqCst);
        drop(files);
        if let Some(OpenMapping { file, .. }) = mapped.open.take() {
            let args = ReleaseArgs::from_flags(OpenFlags(OpenFlags::RDWR));
            let _ = fs.release(&own_context(), file, args);
        }
        if let Err(errno) = written {
            self.lose(ino, errno);
        }
        written
    }

    /// Records that changes of a file are lost.
    fn lose(&self, ino: Ino, errno: Errno) {
        static LOG: WarningLimiter = WarningLimiter::new();
        LOG.warn(|| format!("inode {}: stores through its mappings are lost: {errno}", ino.0));
        let mut lost = lock(&self.lost);
        if lost.len() < MOST_LOST {
            lost.insert(ino, errno);
        }
    }

    /// True if changes of the file are lost, and no call has reported the error.
    pub(crate) fn has_lost(&self, ino: Ino) -> bool {
        lock(&self.lost).contains_key(&ino)
    }

    /// Returns the error of lost changes of a file, once.
    pub(crate) fn take_loss(&self, ino: Ino) -> Result<()> {
        lock(&self.lost).remove(&ino).map_or(Ok(()), Err)
    }

    /// True where nothing is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.files).is_empty()
    }

    /// Writes all changes through mappings to the file system. Returns the first error.
    pub(crate) fn write_back_all(&self, fs: &dyn FileSystem) -> Result<()> {
        let all: Vec<_> = lock(&self.files).values().map(|(file, _)| Arc::clone(file)).collect();
        let mut written = Ok(());
        for mapped in all {
            // An error of one file does not prevent the others from being written.
            written = written.and(lock(&mapped).write_back(fs, 0..u64::MAX));
        }
        written
    }

    /// Runs `run` on the file, if it is mapped, with exclusive access.
    pub(crate) fn with<T>(&self, ino: Ino, run: impl FnOnce(&mut MappedInode) -> T) -> Option<T> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mapped = lock(&self.files).get(&ino).map(|entry| Arc::clone(&entry.0))?;
        let mut mapped = lock(&mapped);
        // Its last mapping may have ended in between.
        mapped.open.is_some().then(|| run(&mut mapped))
    }
}

/// The context of calls that this layer makes for itself.
fn own_context() -> Context<'static> {
    Context::new(Caller::default())
}

impl MappedInode {
    fn prepare(
        &mut self,
        fs: &dyn FileSystem,
        range: Range<u64>,
        writes: bool,
        room: u64,
    ) -> Result<MappingAnswer> {
        self.open(fs, writes)?;
        self.extend(fs)?;
        let end = range.end.checked_next_multiple_of(PAGE).ok_or(Errno::EOVERFLOW)?;
        self.fill(fs, range.start / PAGE * PAGE..end, room)?;
        let open = self.open.as_ref().ok_or(Errno::EIO)?;
        let taken = open.used_memory()?;
        if writes {
            return Ok(MappingAnswer { fd: open.memory.try_clone()?, taken });
        }
        // A client that may only read the file gets a descriptor for reading.
        let path = format!("/proc/self/fd/{}", open.memory.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(errno)?;
        Ok(MappingAnswer { fd, taken })
    }

    fn open(&mut self, fs: &dyn FileSystem, writes: bool) -> Result<()> {
        let cx = own_context();
        if self.open.as_ref().is_some_and(|open| open.writable || !writes) {
            return Ok(());
        }
        let flags = OpenFlags(if writes { OpenFlags::RDWR } else { 0 });
        let opened = fs.open(&cx, self.ino, OpenArgs { flags, kill_suidgid: false })?;
        let file = File { ino: self.ino, fh: opened.fh };
        if let Some(open) = &mut self.open {
            let before = std::mem::replace(&mut open.file, file);
            open.writable = writes;
            let _ = fs.release(&cx, before, ReleaseArgs::default());
            return Ok(());
        }
        match memory() {
            Ok(memory) => self.open = Some(OpenMapping { file, writable: writes, memory }),
            Err(errno) => {
                let _ = fs.release(&cx, file, ReleaseArgs::from_flags(flags));
                return Err(errno);
            }
        }
        Ok(())
    }

    /// Makes the memory as long as the file, in whole pages. Fails with `EOVERFLOW` beyond its
    /// maximum length.
    fn extend(&self, fs: &dyn FileSystem) -> Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        open.extend(fs.getattr(&own_context(), self.ino, Some(open.file.fh))?.size)
    }

    /// Reads the missing parts of `range` into memory. `ENOMEM` if they have more than `room` bytes
    /// of data; nothing is read then.
    fn fill(&mut self, fs: &dyn FileSystem, range: Range<u64>, mut room: u64) -> Result<()> {
        if range.end > LENGTH {
            return Err(Errno::EOVERFLOW);
        }
        let missing = subtract(&range, &self.filled);
        for (at, part) in missing.iter().enumerate() {
            if let Err(errno) = self.load(fs, part.clone(), &mut room) {
                missing[..=at].iter().try_for_each(|part| self.clear(part))?;
                return Err(errno);
            }
        }
        missing.into_iter().for_each(|part| add(&mut self.filled, part));
        Ok(())
    }

    /// Replaces `range` of the memory by the data of the file system: `ENOMEM` for more than `room`
    /// bytes.
    fn load(&self, fs: &dyn FileSystem, range: Range<u64>, room: &mut u64) -> Result<()> {
        self.clear(&range)?;
        let Some(open) = &self.open else { return Ok(()) };
        let size = fs.getattr(&own_context(), self.ino, Some(open.file.fh))?.size;
        if range.end.min(size) > open.len()? {
            return Err(Errno::ENOMEM);
        }
        let mut piece = vec![0; PIECE];
        let mut rest = range.start..range.end.min(size);
        while let Some(data) = data_in(fs, open.file, rest.clone()) {
            rest.start = data.end;
            for part in pieces(data) {
                let len = part.end - part.start;
                *room = room.checked_sub(len).ok_or(Errno::ENOMEM)?;
                let bytes = &mut piece[..len as usize];
                let count = read(fs, &own_context(), open.file, plain(part.start), bytes)?;
                write_memory(open, part.start, &bytes[..count])?;
            }
        }
        Ok(())
    }

    /// Updates the memory after a change of the file system. A part for which there is no room is
    /// no longer kept current, and reads as zeros.
    fn reload(&mut self, fs: &dyn FileSystem, range: Range<u64>) -> Result<()> {
        let parts: Vec<_> = self.filled.iter().filter_map(|part| common(part, &range)).collect();
        for part in parts {
            let mut room = self.remaining_memory()?;
            match self.load(fs, part.clone(), &mut room) {
                Err(Errno::ENOMEM) => {
                    self.clear(&part)?;
                    self.drop_part(part);
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// The number of bytes that the memory may still take.
    fn remaining_memory(&self) -> Result<u64> {
        let taken = self.open.as_ref().map_or(Ok(0), OpenMapping::used_memory)?;
        Ok(self.most.saturating_sub(taken))
    }

    /// Stops keeping `part` current, which is whole pages.
    fn drop_part(&mut self, part: Range<u64>) {
        static LOG: WarningLimiter = WarningLimiter::new();
        LOG.warn(|| format!("inode {}: more is mapped than there is memory for", self.ino.0));
        let kept =
            self.filled.iter().flat_map(|filled| subtract(filled, std::slice::from_ref(&part)));
        self.filled = kept.collect();
    }

    /// Punches a hole into the memory.
    fn clear(&self, range: &Range<u64>) -> Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        let end = range.end.min(LENGTH);
        if range.start >= end {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = end - range.start;
        rustix::fs::fallocate(&open.memory, flags, range.start, len).map_err(errno)
    }

    /// Writes changes through mappings in `range` to the file system.
    pub(crate) fn write_back(&mut self, fs: &dyn FileSystem, range: Range<u64>) -> Result<()> {
        let Some(open) = self.open.as_ref().filter(|open| open.writable) else { return Ok(()) };
        // Bytes beyond the end of the file do not belong to it.
        let size = fs.getattr(&own_context(), self.ino, Some(open.file.fh))?.size;
        let range = range.start..range.end.min(size).min(open.len()?);
        for mut rest in self.filled.iter().filter_map(|part| common(part, &range)) {
            // If both have a hole, nothing has changed.
            while let Some(part) =
                first_part(open.data_in(&rest)?, data_in(fs, open.file, rest.clone()))
            {
                rest.start = part.end;
                open.write_back(fs, part)?;
            }
        }
        Ok(())
    }

    /// Reads from the file system, and replaces the parts that are in memory.
    pub(crate) fn read(
        &mut self,
        fs: &dyn FileSystem,
        cx: &Context<'_>,
        (file, args, len): (File, ReadArgs, usize),
    ) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let count = read(fs, cx, file, args, &mut bytes)?;
        bytes.truncate(count);
        let Some(open) = &self.open else { return Ok(bytes) };
        let range = args.offset..args.offset + count as u64;
        for part in self.filled.iter().filter_map(|part| common(part, &range)) {
            let at = |offset: u64| (offset - range.start) as usize;
            get(open, part.start, &mut bytes[at(part.start)..at(part.end)])?;
        }
        Ok(bytes)
    }

    /// Writes to the file system, and to memory.
    pub(crate) fn write(
        &mut self,
        fs: &dyn FileSystem,
        cx: &Context<'_>,
        (file, args, bytes): (File, WriteArgs, &[u8]),
    ) -> Result<usize> {
        let before = fs.getattr(&own_context(), self.ino, None)?.size;
        let count = fs.write(cx, file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))?;
        let appends = args.flags.has(OpenFlags::APPEND) && !args.from_cache;
        let start = match appends {
            true => fs.getattr(cx, self.ino, None)?.size.saturating_sub(count as u64),
            false => args.offset,
        };
        // Data that mappings have stored beyond the end does not become part of the file.
        self.clear(&(before..start))?;
        let range = start..start + count as u64;
        let end = range.end.max(before);
        let is_long = self.open.as_ref().is_some_and(|open| open.extend(end).is_ok());
        let parts: Vec<_> = self.filled.iter().filter_map(|part| common(part, &range)).collect();
        for part in parts {
            if !is_long || self.remaining_memory()? < part.end - part.start {
                self.drop_part(pages(&part));
                continue;
            }
            let at = |offset: u64| (offset - range.start) as usize;
            let open = self.open.as_ref().ok_or(Errno::EIO)?;
            write_memory(open, part.start, &bytes[at(part.start)..at(part.end)])?;
        }
        Ok(count)
    }

    /// Runs `change`, which sets the length of the file to `size`. The memory beyond either length
    /// becomes zeros.
    pub(crate) fn resize<T>(
        &mut self,
        fs: &dyn FileSystem,
        size: u64,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let before = fs.getattr(&own_context(), self.ino, None)?.size;
        let changed = change()?;
        self.clear(&(before.min(size)..LENGTH))?;
        // If the memory cannot be so long, an access there is a SIGBUS.
        let _ = self.open.as_ref().map(|open| open.extend(size));
        Ok(changed)
    }

    /// Runs `change`, which changes `range` of the file system's data in some other way.
    pub(crate) fn change<T>(
        &mut self,
        fs: &dyn FileSystem,
        range: Range<u64>,
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.write_back(fs, 0..u64::MAX)?;
        let before = fs.getattr(&own_context(), self.ino, None)?.size;
        let changed = change()?;
        let _ = self.extend(fs);
        // Data stored beyond the end does not become part of the file.
        self.reload(fs, pages(&(range.start.min(before)..range.end)))?;
        Ok(changed)
    }
}

impl OpenMapping {
    /// The length of the memory. A client may have made it longer.
    fn len(&self) -> Result<u64> {
        Ok(rustix::fs::fstat(&self.memory).map_err(errno)?.st_size as u64)
    }

    /// Makes the memory at least as long as a file of `size` bytes, in whole pages.
    fn extend(&self, size: u64) -> Result<()> {
        let wanted = size.next_multiple_of(PAGE);
        if wanted <= self.len()? {
            return Ok(());
        }
        // Beyond a limit of the size of files the kernel would send SIGXFSZ.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if wanted > LENGTH.min(limit.unwrap_or(LENGTH)) {
            return Err(Errno::EOVERFLOW);
        }
        match rustix::fs::ftruncate(&self.memory, wanted) {
            // A client has made it longer meanwhile.
            Ok(()) | Err(rustix::io::Errno::PERM) => Ok(()),
            Err(error) => Err(errno(error)),
        }
    }

    /// Returns the bytes that the memory takes, including bytes that clients have stored through
    /// mappings.
    fn used_memory(&self) -> Result<u64> {
        let blocks = rustix::fs::fstat(&self.memory).map_err(errno)?.st_blocks;
        Ok(blocks as u64 * 512)
    }

    /// The first part of `range` that is not a hole of the memory.
    fn data_in(&self, range: &Range<u64>) -> Result<Option<Range<u64>>> {
        let seek = |from| match rustix::fs::seek(&self.memory, from) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(errno(error)),
        };
        let Some(start) = seek(SeekFrom::Data(range.start))? else { return Ok(None) };
        let end = seek(SeekFrom::Hole(start))?.unwrap_or(range.end);
        Ok(common(&(start..end), range))
    }

    /// Writes changed pages of `range` to the file system.
    fn write_back(&self, fs: &dyn FileSystem, range: Range<u64>) -> Result<()> {
        let (cx, page) = (own_context(), PAGE as usize);
        let (mut ours, mut theirs) = (vec![0; PIECE], vec![0; PIECE]);
        for part in pieces(range) {
            let len = (part.end - part.start) as usize;
            let (ours, theirs) = (&mut ours[..len], &mut theirs[..len]);
            theirs.fill(0);
            get(self, part.start, ours)?;
            read(fs, &cx, self.file, plain(part.start), theirs)?;
            for (at, (new, old)) in ours.chunks(page).zip(theirs.chunks(page)).enumerate() {
                if new != old {
                    write(fs, &cx, self.file, part.start + at as u64 * PAGE, new)?;
                }
            }
        }
        Ok(())
    }
}

/// Memory for a file, which does not become shorter.
fn memory() -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("defuse-map", flags).map_err(errno)?;
    // Other users cannot open it through /proc.
    rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR).map_err(errno)?;
    let seals = SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals).map_err(errno)?;
    Ok(memory)
}

/// Returns the first part of `range` that is not a hole of the file. A file system that does not
/// report holes has none.
fn data_in(fs: &dyn FileSystem, file: File, range: Range<u64>) -> Option<Range<u64>> {
    if range.start >= range.end {
        return None;
    }
    let start = match fs.lseek(&own_context(), file, range.start, Whence::Data) {
        Ok(start) => start,
        Err(Errno::ENXIO) => return None,
        Err(_) => return Some(range),
    };
    let end = fs.lseek(&own_context(), file, start, Whence::Hole).unwrap_or(range.end);
    common(&(start..end.max(start)), &range)
}

fn plain(offset: u64) -> ReadArgs {
    ReadArgs { offset, flags: OpenFlags(OpenFlags::RDWR), lock_owner: None }
}

/// Reads until `room` is full or the file ends.
fn read(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    file: File,
    args: ReadArgs,
    room: &mut [u8],
) -> Result<usize> {
    let mut done = 0;
    while done < room.len() {
        let rest = &mut room[done..];
        let len = rest.len();
        let mut sink = SliceSink::new(rest);
        let mut out = ReadBuf::new(&mut sink, len);
        let args = ReadArgs { offset: args.offset + done as u64, ..args };
        match fs.read(cx, file, args, &mut out) {
            Ok(()) => {}
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        match out.filled_len() {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

fn write(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    file: File,
    offset: u64,
    bytes: &[u8],
) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let offset = offset + done as u64;
        let flags = OpenFlags(OpenFlags::RDWR);
        let args = WriteArgs { offset, flags, ..WriteArgs::default() };
        let mut source = SliceSource::new(&bytes[done..]);
        match fs.write(cx, file, args, &mut WriteBuf::new(&mut source))? {
            0 => return Err(Errno::EIO),
            count => done += count,
        }
    }
    Ok(())
}

/// Reads the memory.
fn get(open: &OpenMapping, offset: u64, room: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < room.len() {
        let count = rustix::io::pread(&open.memory, &mut room[done..], offset + done as u64);
        match count.map_err(errno)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(())
}

/// Writes the memory.
fn write_memory(open: &OpenMapping, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let count = rustix::io::pwrite(&open.memory, &bytes[done..], offset + done as u64);
        match count.map_err(errno)? {
            0 => return Err(Errno::EIO),
            count => done += count,
        }
    }
    Ok(())
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
