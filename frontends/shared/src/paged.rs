//! A layer that keeps pages of open files in memory that clients read.
//!
//! Each change of a file through this layer drops the pages that it changes before it begins, and
//! withdraws the length if that may change. Pages are filled by reads, unless a change has begun
//! meanwhile. So a client never sees old data after a change of any client was answered, nor after
//! it saw newer data.
//!
//! The memory is bounded (`memory.rs`): parts of files leave it when others need it.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_cache::PolicyKind;
use defuse_connection::PageSource;
use defuse_fs::{
    Attr, Caller, Context, CopyRange, Entry, Errno, Fallocate, Fh, Figure, File, FileSystem, Ino,
    IoctlArgs, IoctlReply, Name, NewNode, Notify, OpenArgs, OpenFlags, OpenReply, Origin,
    PollHandle, ReadArgs, ReadBuf, RecallCallback, ReleaseArgs, Result, SetAttr, Shortcuts,
    SliceSink, WriteArgs, WriteBuf, delegate,
};
use defuse_ring::pages::{PAGE, PageWriter};

use crate::counts::PartDivision;
use crate::memory::{FrameGroups, PageGroups};

/// The maximum number of pages of a read that fills them: 1 MiB that begins within a page.
const MOST_FILLED: u64 = 257;
const ALL: Range<u64> = 0..u64::MAX;
/// The divisor for the part of the memory that may be heads.
pub(crate) const HEADS: u64 = 8;
/// Frames of all files, most of which are empty: at most this multiple of the memory. One user may
/// have half of them.
const RESERVED: u64 = 4;

/// The memory for pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedOptions {
    /// Bytes of pages of all files, 1 MiB at least. A file takes at most 16 MiB, and at most half
    /// of this.
    pub bytes: u64,
    /// The policy that decides which pages leave.
    pub policy: PolicyKind,
}

impl PagedOptions {
    /// The minimum number of bytes.
    pub const LEAST: u64 = 1 << 20;
}

impl Default for PagedOptions {
    fn default() -> Self {
        PagedOptions { bytes: 512 << 20, policy: PolicyKind::default() }
    }
}

/// A file system, with pages of its open files in memory.
pub struct PagedFileSystem {
    inner: Arc<dyn FileSystem>,
    table: Arc<PagedTable>,
    options: PagedOptions,
}

struct PagedTable(Mutex<PagedState>);

struct PagedState {
    files: HashMap<Ino, PagedFile>,
    bound: FrameGroups,
    taken: PageMemory,
}

/// The memory for pages, of all users and of each: the users that were the first to read a file.
#[derive(Default)]
struct PageMemory {
    all: PageBytes,
    users: HashMap<u32, PageBytes>,
}

/// Bytes of the heads of files, and of these and their frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PageBytes {
    heads: u64,
    whole: u64,
}

impl PageBytes {
    fn measure(pages: &PageWriter) -> PageBytes {
        let bytes = PageBytes { heads: pages.bytes_of_heads(), whole: pages.bytes() };
        assert!(bytes.heads <= bytes.whole, "{bytes:?}: heads are a part of the whole");
        bytes
    }

    fn add_bytes(self, more: PageBytes) -> PageBytes {
        PageBytes { heads: self.heads + more.heads, whole: self.whole + more.whole }
    }

    fn subtract(self, less: PageBytes) -> PageBytes {
        assert!(less.heads <= self.heads && less.whole <= self.whole, "{less:?} of {self:?}");
        PageBytes { heads: self.heads - less.heads, whole: self.whole - less.whole }
    }
}

impl PageMemory {
    /// True if a user may have so many bytes more, of `most` bytes for pages.
    fn has_room(&self, uid: u32, bytes: PageBytes, most: u64) -> bool {
        let all = self.all.add_bytes(bytes);
        let own = self.users.get(&uid).copied().unwrap_or_default().add_bytes(bytes);
        // Heads are always in memory. Frames could be, if clients touched all of them.
        let (heads, whole) = (most / HEADS, most * RESERVED);
        all.heads <= heads && own.heads <= heads / 2 && all.whole <= whole && own.whole <= whole / 2
    }

    fn add(&mut self, ChargedPages { pages, uid }: &ChargedPages) {
        let (bytes, own) = (PageBytes::measure(pages), self.users.entry(*uid).or_default());
        (self.all, *own) = (self.all.add_bytes(bytes), own.add_bytes(bytes));
    }

    fn remove(&mut self, ChargedPages { pages, uid }: &ChargedPages) {
        let bytes = PageBytes::measure(pages);
        self.all = self.all.subtract(bytes);
        let Some(own) = self.users.get_mut(uid) else { return };
        *own = own.subtract(bytes);
        if *own == PageBytes::default() {
            self.users.remove(uid);
        }
    }
}

impl PageGroups for HashMap<Ino, PagedFile> {
    fn pages(&mut self, ino: Ino) -> Option<&mut PageWriter> {
        self.get_mut(&ino)?.pages.as_mut().map(|charged| &mut charged.pages)
    }
}

/// A file that is open, or that is changing.
#[derive(Default)]
struct PagedFile {
    opens: u64,
    /// Changes that have begun and not ended.
    running: u64,
    /// The number of changes that have begun.
    epoch: u64,
    /// A client has mapped the file: no pages until its last close.
    is_mapped: bool,
    /// The file system has read the file since its last change: it has set the time of the last
    /// access.
    is_read: bool,
    pages: Option<ChargedPages>,
}

struct ChargedPages {
    pages: PageWriter,
    uid: u32,
}

/// The pages of a read.
enum ReadPages {
    /// The file system has to read.
    Nothing,
    Missing(MissingPages),
    /// The bytes of pages that were hidden.
    Bytes(Vec<u8>),
}

/// Pages that a read is going to fill.
struct MissingPages {
    /// The number of changes that had begun before.
    epoch: u64,
    /// Readers see no length of the file.
    has_no_length: bool,
    pages: Range<u64>,
}

impl std::fmt::Debug for PagedFileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Paged({} files)", self.table.lock().files.len())
    }
}

impl PagedTable {
    fn lock(&self) -> MutexGuard<'_, PagedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change of these bytes of the file; of its length, too, if it `resizes` or goes
    /// beyond the end.
    fn begin(&self, ino: Ino, range: Range<u64>, resizes: bool) {
        let PagedState { files, bound, .. } = &mut *self.lock();
        let entry = files.entry(ino).or_default();
        entry.running += 1;
        if entry.pages.is_some() {
            bound.counts.count_mut(ino).changes += 1;
        }
        let fits = |one: &ChargedPages| one.pages.has_length() && range.end <= one.pages.size();
        let resizes = resizes || !entry.pages.as_ref().is_some_and(fits);
        entry.forget(range, resizes);
    }

    fn end(&self, ino: Ino) {
        let files = &mut self.lock().files;
        if let Some(entry) = files.get_mut(&ino) {
            assert!(entry.running > 0, "a change of {ino:?} ends that has not begun");
            entry.running -= 1;
        }
        PagedTable::remove_unused(files, ino);
    }

    fn record_open(&self, ino: Ino) {
        self.lock().files.entry(ino).or_default().opens += 1;
    }

    fn record_close(&self, ino: Ino) {
        let PagedState { files, bound, taken } = &mut *self.lock();
        if let Some(entry) = files.get_mut(&ino) {
            entry.opens = entry.opens.saturating_sub(1);
            if entry.opens == 0 {
                entry.epoch += 1;
                entry.is_mapped = false;
                if let Some(charged) = entry.pages.take() {
                    taken.remove(&charged);
                    bound.remove_file(ino, charged.pages.groups());
                    bound.counts.count_mut(ino).files -= 1;
                }
            }
        }
        PagedTable::remove_unused(files, ino);
    }

    fn remove_unused(files: &mut HashMap<Ino, PagedFile>, ino: Ino) {
        if files.get(&ino).is_some_and(|entry| entry.opens == 0 && entry.running == 0) {
            files.remove(&ino);
        }
    }

    /// Records a change of a file that the file system reports.
    fn record_change(&self, ino: Ino, range: Range<u64>) {
        if let Some(entry) = self.lock().files.get_mut(&ino) {
            entry.forget(range, true);
        }
    }
}

impl PagedFile {
    fn forget(&mut self, range: Range<u64>, resizes: bool) {
        self.epoch += 1;
        self.is_read = false;
        if let Some(ChargedPages { pages, .. }) = &mut self.pages {
            if resizes {
                pages.withdraw_length();
            }
            pages.forget(range);
        }
    }

    /// The pages, if they may be filled now.
    fn fillable(&mut self) -> Option<&mut PageWriter> {
        let ready = self.running == 0 && !self.is_mapped;
        self.pages.as_mut().filter(|_| ready).map(|charged| &mut charged.pages)
    }
}

impl PagedFileSystem {
    /// Creates pages for the files of `inner`. `None` if it may change without this layer
    /// (`Caps::exclusive`), or requires its operations to be submitted.
    pub fn wrap(inner: Arc<dyn FileSystem>, options: PagedOptions) -> Option<Arc<PagedFileSystem>> {
        PagedFileSystem::with(inner, options, None)
    }

    /// Like [`wrap`](PagedFileSystem::wrap), for a file system of `parts`, whose pages are counted
    /// separately: [`figures_of`](PagedFileSystem::figures_of).
    pub fn wrap_parts(
        inner: Arc<dyn FileSystem>,
        options: PagedOptions,
        parts: PartDivision,
    ) -> Option<Arc<PagedFileSystem>> {
        PagedFileSystem::with(inner, options, Some(parts))
    }

    fn with(
        inner: Arc<dyn FileSystem>,
        options: PagedOptions,
        parts: Option<PartDivision>,
    ) -> Option<Arc<PagedFileSystem>> {
        let caps = inner.caps();
        let bound = FrameGroups::new(options.bytes.max(PagedOptions::LEAST), options.policy, parts);
        let state = PagedState { files: HashMap::new(), bound, taken: PageMemory::default() };
        let table = Arc::new(PagedTable(Mutex::new(state)));
        (caps.exclusive && !caps.submits)
            .then(|| Arc::new(PagedFileSystem { inner, table, options }))
    }

    /// Bytes of memory that pages take now, by the kernel's count.
    pub fn bytes_in_use(&self) -> u64 {
        let state = self.table.lock();
        let pages = state.files.values().filter_map(|entry| entry.pages.as_ref());
        pages.map(|one| one.pages.bytes_in_use().unwrap_or(0)).sum()
    }

    /// The figures about pages of files in a part.
    pub fn figures_of(&self, part: usize) -> Vec<Figure> {
        self.table.lock().bound.counts.part(part).figures()
    }

    fn change<T>(
        &self,
        ino: Ino,
        (range, resizes): (Range<u64>, bool),
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.table.begin(ino, range, resizes);
        let _ended = PageChangeGuard(&self.table, ino);
        change()
    }

    /// Looks for the pages of a read of `len` bytes, and notifies the policy of the read.
    fn find(&self, by: Caller, ino: Ino, args: ReadArgs, len: usize) -> ReadPages {
        let end = args.offset.saturating_add(len as u64);
        let pages = args.offset / PAGE as u64..end.div_ceil(PAGE as u64);
        if pages.end - pages.start > MOST_FILLED {
            return ReadPages::Nothing;
        }
        let PagedState { files, bound, .. } = &mut *self.table.lock();
        let Some(entry) = files.get_mut(&ino) else { return ReadPages::Nothing };
        let (epoch, is_read) = (entry.epoch, entry.is_read);
        let Some(of_file) = entry.fillable() else { return ReadPages::Nothing };
        let has_no_length = !of_file.has_length();
        let size = if has_no_length { u64::MAX } else { of_file.size() };
        // Pages behind the end of the file do not exist, and must not take the place of others.
        let pages = pages.start..pages.end.min(size.div_ceil(PAGE as u64));
        bound.counts.count_mut(ino).requests += 1;
        let mut groups: Vec<u64> = pages.clone().map(|page| of_file.group_of(page)).collect();
        groups.dedup();
        // The policy is notified of all of them, also after one that was hidden.
        let used = groups.into_iter().map(|group| bound.record_use(files, ino, group, by));
        let were_hidden = used.filter(|was_hidden| *was_hidden).count() > 0;
        let Some(of_file) = files.pages(ino) else { return ReadPages::Nothing };
        if pages.is_empty() {
            return ReadPages::Nothing;
        }
        if has_no_length || pages.clone().any(|page| !of_file.has(page)) {
            return ReadPages::Missing(MissingPages { epoch, has_no_length, pages });
        }
        // A client would have read them without a request, were they not hidden.
        match were_hidden && is_read {
            true => ReadPages::Bytes(copy(of_file, args.offset..end.min(size))),
            false => ReadPages::Nothing,
        }
    }

    /// Reads by pages, which it fills.
    fn read_and_fill(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
        missing: MissingPages,
    ) -> Result<()> {
        let MissingPages { epoch, has_no_length, pages } = missing;
        // The length is the new one now, or a change has begun.
        let size = has_no_length.then(|| self.inner.getattr(cx, file.ino, Some(file.fh)));
        // The data is not read into the reply, which its client can change before it is in the
        // pages.
        let len = (pages.end - pages.start) as usize * PAGE;
        let mut bytes = vec![0; len];
        let mut sink = SliceSink::new(&mut bytes);
        let mut read = ReadBuf::new(&mut sink, len);
        let begin = pages.start * PAGE as u64;
        self.inner.read(cx, file, ReadArgs { offset: begin, ..args }, &mut read)?;
        // There is no data behind the end of the file, whatever the buffer contained.
        let filled = read.filled_len();
        assert!(filled <= len, "{filled} bytes were read into {len}");
        bytes[filled..].fill(0);
        let from = (args.offset - begin) as usize;
        let end = filled.min(from + out.remaining());
        out.put(bytes.get(from..end).unwrap_or_default())?;
        let PagedState { files, bound, .. } = &mut *self.table.lock();
        let entry = files.get_mut(&file.ino).filter(|entry| entry.epoch == epoch);
        let Some(entry) = entry else { return Ok(()) };
        entry.is_read |= !args.flags.has(OpenFlags::NOATIME);
        let Some(of_file) = entry.fillable() else { return Ok(()) };
        for (page, bytes) in pages.zip(bytes.as_chunks().0).take(filled.div_ceil(PAGE)) {
            // Its group may have left meanwhile.
            if !of_file.has(page) && bound.holds(file.ino, of_file.group_of(page)) {
                of_file.write_page(page, bytes);
                bound.counts.count_mut(file.ino).filled += 1;
            }
        }
        if let Some(Ok(attr)) = size {
            of_file.publish_length(attr.size);
        }
        Ok(())
    }

    fn record_open_reply(&self, ino: Ino, opened: OpenReply) -> OpenReply {
        self.table.record_open(ino);
        opened
    }
}

/// Bytes of a file that are in its pages, which are all there.
fn copy(pages: &PageWriter, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; range.end.saturating_sub(range.start) as usize];
    let (mut at, mut rest) = (range.start, bytes.as_mut_slice());
    while !rest.is_empty() {
        let within = (at % PAGE as u64) as usize;
        let (part, others) = rest.split_at_mut(rest.len().min(PAGE - within));
        pages.get(at / PAGE as u64, within, part);
        at += part.len() as u64;
        rest = others;
    }
    bytes
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// Ends a change, also if it panics.
struct PageChangeGuard<'a>(&'a PagedTable, Ino);

impl Drop for PageChangeGuard<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl PageSource for PagedFileSystem {
    fn pages(&self, ino: Ino, uid: u32) -> Result<OwnedFd> {
        let size = self.inner.getattr(&Context::new(Caller::default()), ino, None)?.size;
        let PagedState { files, bound, taken } = &mut *self.table.lock();
        let entry = files.get(&ino).filter(|entry| entry.opens > 0).ok_or(Errno::ESTALE)?;
        if entry.is_mapped || bound.counts.is_without(ino) {
            return Err(Errno::EBUSY);
        }
        if let Some(charged) = &entry.pages {
            return charged.pages.reader().map_err(errno);
        }
        let most = self.options.bytes.max(PagedOptions::LEAST);
        // Without a length, until a read fills it.
        let pages = PageWriter::new(size.min(most / 2)).map_err(errno)?;
        if !taken.has_room(uid, PageBytes::measure(&pages), most) {
            return Err(Errno::ENOMEM);
        }
        let fd = pages.reader().map_err(errno)?;
        let charged = ChargedPages { pages, uid };
        taken.add(&charged);
        assert!(taken.all.whole <= most * RESERVED, "files have more frames than there may be");
        files.entry(ino).or_default().pages = Some(charged);
        bound.counts.count_mut(ino).files += 1;
        Ok(fd)
    }

    fn stop(&self, ino: Ino) {
        if let Some(entry) = self.table.lock().files.get_mut(&ino) {
            entry.is_mapped = true;
            entry.forget(ALL, true);
        }
    }
}

impl FileSystem for PagedFileSystem {
    delegate!(
        to inner, except attach, figures, open, create, tmpfile, read, write, setattr, fallocate,
        copy_file_range, ioctl, release
    );

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    /// Returns the figures of the file system, followed by the figures of the pages. For pages in
    /// parts, only the limit is here.
    fn figures(&self) -> Vec<Figure> {
        let mut figures = self.inner.figures();
        figures.push(Figure::bytes("pages_limit", self.options.bytes.max(PagedOptions::LEAST)));
        let counts = &self.table.lock().bound.counts;
        if counts.is_whole() {
            figures.extend(counts.part(0).figures());
        }
        figures
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        let table = Arc::clone(&self.table);
        self.inner.attach(origin, Arc::new(PageNotify { notify, table }));
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let open = || self.inner.open(cx, ino, args);
        let opened = match args.flags.has(OpenFlags::TRUNC) {
            true => self.change(ino, (ALL, true), open),
            false => open(),
        };
        opened.map(|opened| self.record_open_reply(ino, opened))
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = self.inner.create(cx, parent, name, node, args)?;
        Ok((entry, self.record_open_reply(entry.ino, opened)))
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let (entry, opened) = self.inner.tmpfile(cx, parent, node, args)?;
        Ok((entry, self.record_open_reply(entry.ino, opened)))
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        match self.find(cx.caller, file.ino, args, out.remaining()) {
            ReadPages::Nothing => self.inner.read(cx, file, args, out),
            ReadPages::Missing(missing) => self.read_and_fill(cx, file, args, out, missing),
            ReadPages::Bytes(bytes) => out.put(&bytes).map(drop),
        }
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let end = args.offset.saturating_add(data.remaining() as u64);
        let appends = args.flags.has(OpenFlags::APPEND);
        let range = if appends { ALL } else { args.offset..end };
        self.change(file.ino, (range, appends), || self.inner.write(cx, file, args, data))
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        match set.size {
            Some(_) => self.change(ino, (ALL, true), || self.inner.setattr(cx, ino, fh, set)),
            None => {
                let changed = self.inner.setattr(cx, ino, fh, set);
                // The time of the last access may have been set, and the next read changes it
                // again.
                if let Some(entry) = self.table.lock().files.get_mut(&ino) {
                    entry.is_read = false;
                }
                changed
            }
        }
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        self.change(file.ino, (ALL, true), || self.inner.fallocate(cx, file, range))
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.change(copy.dst.ino, (ALL, true), || self.inner.copy_file_range(cx, copy))
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.change(file.ino, (ALL, true), || self.inner.ioctl(cx, file, args))
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        let released = self.inner.release(cx, file, args);
        self.table.record_close(file.ino);
        released
    }
}

impl Shortcuts for PagedFileSystem {
    delegate!(to inner, only resolve, peek);
}

/// Drops pages that the file system reports as changed, before the client is notified.
struct PageNotify {
    notify: Arc<dyn Notify>,
    table: Arc<PagedTable>,
}

impl Notify for PageNotify {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        let bytes = match range {
            Some((offset, len)) if len > 0 => offset..offset.saturating_add(len),
            Some((offset, _)) => offset..u64::MAX,
            None => 0..0,
        };
        self.table.record_change(ino, bytes);
        self.notify.invalidate_inode(ino, range)
    }
    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()> {
        self.notify.invalidate_entry(parent, name, expire_only)
    }
    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        self.notify.notify_delete(parent, child, name)
    }
    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        self.table.record_change(ino, offset..offset.saturating_add(data.len() as u64));
        self.notify.store(ino, offset, data)
    }
    fn retrieve(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        done: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()> {
        self.notify.retrieve(ino, offset, len, done)
    }
    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        self.notify.poll_wake(handle)
    }
    fn increment_epoch(&self) -> Result<()> {
        self.notify.increment_epoch()
    }
    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        self.notify.prune(inodes)
    }
    fn recall(&self, ino: Ino, limit: Duration, done: RecallCallback) {
        self.table.record_change(ino, ALL);
        self.notify.recall(ino, limit, done);
    }
}
