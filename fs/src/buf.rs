//! Buffers. They belong to the frontend: memory of the caller, the payload of a ring entry, or a
//! pipe. A backend names the source or the destination of the data, and the frontend copies as
//! little as possible.
//!
//! A frontend may lend the memory of a buffer, so that a device or a library fills it without a
//! copy ([`ReadBuf::lend`], [`WriteBuf::borrow`]). Memory that is shared with an untrusted peer
//! never becomes a Rust slice: the peer could change it after it was checked. A backend can get its
//! address for calls outside of Rust that take any bytes ([`ReadBuf::lend_shared`],
//! [`WriteBuf::borrow_shared`]). A device that works after the call that passed the buffer owns the
//! memory until it is done ([`Io::take_room`](crate::Io::take_room)).

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use crate::{Entry, Errno, FileKind, Result};

/// The frontend's side of a [`ReadBuf`]. It receives the data of a read.
pub trait ReadSink {
    /// Appends `bytes`. They fit, as [`ReadBuf`] guarantees.
    fn put(&mut self, bytes: &[u8]) -> Result<()>;

    /// Appends `len` zero bytes; they fit.
    fn put_zeros(&mut self, len: usize) -> Result<()>;

    /// Appends up to `len` bytes of the open file `fd` from `offset`, if possible without a copy
    /// through user space. Returns the number of bytes; fewer than `len` means end of file.
    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize>;

    /// Lends the memory of the next bytes: at least one, and at most `len`. It keeps its address
    /// until the operation has ended. Returns `None` (the default) if another process can write to
    /// the memory, or if there is none.
    fn lend(&mut self, _len: usize) -> Option<&mut [u8]> {
        None
    }

    /// The address of the memory of the next `len` bytes, which another process may read and write
    /// at any time. It is valid until the operation has ended. Returns `None` (the default) for
    /// memory that [`lend`](ReadSink::lend) lends, and if there is none.
    fn lend_shared(&mut self, _len: usize) -> Option<NonNull<u8>> {
        None
    }

    /// Appends the first `count` bytes of the memory that [`lend`](ReadSink::lend) or
    /// [`lend_shared`](ReadSink::lend_shared) would lend now.
    /// Fails with `EINVAL` if fewer bytes or none are lent.
    fn advance(&mut self, _count: usize) -> Result<()> {
        Err(Errno::EINVAL)
    }
}

/// The buffer of a read. It is filled from the start, up to the requested length.
pub struct ReadBuf<'a> {
    sink: &'a mut dyn ReadSink,
    capacity: usize,
    filled: usize,
}

impl<'a> ReadBuf<'a> {
    /// An empty buffer of `capacity` bytes over `sink`.
    pub fn new(sink: &'a mut dyn ReadSink, capacity: usize) -> Self {
        ReadBuf::resume(sink, capacity, 0)
    }

    pub(crate) fn resume(sink: &'a mut dyn ReadSink, capacity: usize, filled: usize) -> Self {
        ReadBuf { sink, capacity, filled }
    }

    /// Free space in bytes.
    pub fn remaining(&self) -> usize {
        self.capacity - self.filled
    }

    /// Number of bytes appended so far.
    pub fn filled_len(&self) -> usize {
        self.filled
    }

    /// Runs `fill` on a buffer limited to `max` further bytes, for reads that take parts from
    /// several places.
    pub fn with_limit<T>(&mut self, max: usize, fill: impl FnOnce(&mut Self) -> T) -> T {
        let capacity = self.capacity;
        self.capacity = capacity.min(self.filled.saturating_add(max));
        let result = fill(self);
        self.capacity = capacity;
        result
    }

    /// Appends as many of `bytes` as fit. Returns their number.
    pub fn put(&mut self, bytes: &[u8]) -> Result<usize> {
        let len = bytes.len().min(self.remaining());
        if len > 0 {
            self.sink.put(&bytes[..len])?;
            self.filled += len;
        }
        Ok(len)
    }

    /// Appends up to `len` zero bytes (a hole), as many as fit. Returns their number.
    pub fn put_zeros(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.remaining());
        if len > 0 {
            self.sink.put_zeros(len)?;
            self.filled += len;
        }
        Ok(len)
    }

    /// Lends the memory of the next bytes, at least one, if the frontend supports it. The user
    /// writes to it, and reports the number of valid bytes by [`advance`](ReadBuf::advance). The
    /// memory may contain data of earlier operations. It keeps its address until the operation has
    /// ended ([`Io`](crate::Io) included), so that a device may fill it meanwhile. On `None`, also
    /// for a full buffer, use [`put`](ReadBuf::put).
    pub fn lend(&mut self) -> Option<&mut [u8]> {
        let len = self.remaining();
        if len == 0 {
            return None;
        }
        let room = self.sink.lend(len)?;
        let len = len.min(room.len());
        Some(&mut room[..len])
    }

    /// The address of all free space, if that is memory which another process may read and write
    /// meanwhile: for system calls and C libraries that write there. It is valid until the
    /// operation has ended ([`Io`](crate::Io) included). `None` also for a full buffer.
    /// [`advance`](ReadBuf::advance) reports the bytes.
    pub fn lend_shared(&mut self) -> Option<NonNull<u8>> {
        match self.remaining() {
            0 => None,
            len => self.sink.lend_shared(len),
        }
    }

    /// Appends the first `count` bytes of the memory from [`lend`](ReadBuf::lend), after they were
    /// written. Fails with `EINVAL` for more than was lent.
    pub fn advance(&mut self, count: usize) -> Result<()> {
        if count > self.remaining() {
            return Err(Errno::EINVAL);
        }
        self.sink.advance(count)?;
        self.filled += count;
        Ok(())
    }

    /// Appends data of the open file `fd` from `offset` until the buffer is full or the file ends.
    /// Returns the number of bytes. Fails with the errors of pread(2).
    pub fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let len = self.remaining();
        if len == 0 {
            return Ok(0);
        }
        let got = self.sink.fill_from(fd, offset, len)?;
        debug_assert!(got <= len, "a sink took more than the requested length");
        self.filled += got.min(len);
        Ok(got)
    }
}

/// The frontend's side of a [`WriteBuf`]. It provides the data of a write.
pub trait WriteSource {
    /// Number of bytes that were not taken yet.
    fn remaining(&self) -> usize;

    /// Moves the next bytes to the start of `out`. Returns their number, the smaller of `out.len()`
    /// and [`remaining`](WriteSource::remaining).
    fn take(&mut self, out: &mut [u8]) -> Result<usize>;

    /// Moves up to `len` of the next bytes into the open file `fd` at `offset`, if possible without
    /// a copy through user space. Returns the number of bytes written. If it fails, no byte is
    /// taken. `fd` may be open with `O_APPEND` or `O_DIRECT`, which splice(2) and similar calls
    /// refuse; the data is then copied.
    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize>;

    /// Lends the memory of the next bytes, at least one if any remain. It keeps its address and
    /// content until the operation has ended. Returns `None` (the default) if another process can
    /// write to the memory, or if there is none.
    fn borrow(&mut self) -> Option<&[u8]> {
        None
    }

    /// The address of all the remaining bytes, in memory that another process may write to at any
    /// time. It is valid until the operation has ended. Returns `None` (the default) for memory
    /// that [`borrow`](WriteSource::borrow) lends, and if there is none.
    fn borrow_shared(&mut self) -> Option<NonNull<u8>> {
        None
    }

    /// Takes the first `count` bytes of the memory that [`borrow`](WriteSource::borrow) or
    /// [`borrow_shared`](WriteSource::borrow_shared) would lend
    /// now. Fails with `EINVAL` if fewer bytes or none are lent.
    fn skip(&mut self, _count: usize) -> Result<()> {
        Err(Errno::EINVAL)
    }
}

/// The data of a write, taken from the start.
pub struct WriteBuf<'a> {
    source: &'a mut dyn WriteSource,
}

impl<'a> WriteBuf<'a> {
    /// A buffer over `source`.
    pub fn new(source: &'a mut dyn WriteSource) -> Self {
        WriteBuf { source }
    }

    /// Number of bytes that were not taken yet.
    pub fn remaining(&self) -> usize {
        self.source.remaining()
    }

    /// Runs `drain` on at most `max` of the remaining bytes, for writes that go to several places.
    pub fn with_limit<T>(&mut self, max: usize, drain: impl FnOnce(&mut WriteBuf<'_>) -> T) -> T {
        let mut limited = LimitedSource { source: &mut *self.source, left: max };
        drain(&mut WriteBuf::new(&mut limited))
    }

    /// Moves the next bytes into `out`. Returns their number.
    pub fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        self.source.take(out)
    }

    /// The address of all the remaining bytes, if they lie in memory that another process may write
    /// to meanwhile: for system calls and C libraries that read there, once. It is valid until the
    /// operation has ended.
    pub fn borrow_shared(&mut self) -> Option<NonNull<u8>> {
        if self.remaining() == 0 { None } else { self.source.borrow_shared() }
    }

    /// Lends the memory of the next bytes, at least one, if the frontend supports it. It keeps its
    /// address until the operation has ended. On `None`, also if nothing remains, use
    /// [`take`](WriteBuf::take).
    pub fn borrow(&mut self) -> Option<&[u8]> {
        self.source.borrow().filter(|bytes| !bytes.is_empty())
    }

    /// Takes the first `count` bytes of the memory from [`borrow`](WriteBuf::borrow). Fails with
    /// `EINVAL` for more than was lent.
    pub fn skip(&mut self, count: usize) -> Result<()> {
        self.source.skip(count)
    }

    /// Writes all remaining bytes to the open file `fd` from `offset` on. Returns the number of
    /// bytes. An error after the first bytes results in a short write, as in write(2).
    pub fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64) -> Result<usize> {
        let mut done = 0;
        while self.remaining() > 0 {
            let at = offset.checked_add(done as u64).ok_or(Errno::EFBIG)?;
            match self.source.drain_to(fd, at, self.source.remaining()) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }
}

/// The first bytes of another source.
struct LimitedSource<'a> {
    source: &'a mut dyn WriteSource,
    left: usize,
}

impl WriteSource for LimitedSource<'_> {
    fn remaining(&self) -> usize {
        self.source.remaining().min(self.left)
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let len = out.len().min(self.left);
        let count = self.source.take(&mut out[..len])?;
        self.left -= count;
        Ok(count)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let count = self.source.drain_to(fd, offset, len.min(self.left))?;
        self.left -= count;
        Ok(count)
    }

    fn borrow_shared(&mut self) -> Option<NonNull<u8>> {
        self.source.borrow_shared()
    }

    fn borrow(&mut self) -> Option<&[u8]> {
        let bytes = self.source.borrow()?;
        Some(&bytes[..bytes.len().min(self.left)])
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        let left = self.left.checked_sub(count).ok_or(Errno::EINVAL)?;
        self.source.skip(count)?;
        self.left = left;
        Ok(())
    }
}

/// A sink over private memory.
#[derive(Debug)]
pub struct SliceSink<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> SliceSink<'a> {
    /// Fills `out` from its start.
    pub fn new(out: &'a mut [u8]) -> Self {
        SliceSink { out, at: 0 }
    }
}

impl ReadSink for SliceSink<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let room = self.out.get_mut(self.at..self.at + bytes.len()).ok_or(Errno::EIO)?;
        room.copy_from_slice(bytes);
        self.at += bytes.len();
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        self.out.get_mut(self.at..self.at + len).ok_or(Errno::EIO)?.fill(0);
        self.at += len;
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let room = self.out.get_mut(self.at..self.at + len).ok_or(Errno::EIO)?;
        // The standard library reads at an offset only through an owned descriptor. Frontends
        // implement faster sinks.
        let file = fs::File::from(fd.try_clone_to_owned()?);
        let mut done = 0;
        while done < room.len() {
            match file.read_at(&mut room[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if done == 0 => return Err(error.into()),
                Err(_) => break,
            }
        }
        self.at += done;
        Ok(done)
    }

    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        self.out.get_mut(self.at..self.at + len)
    }

    fn advance(&mut self, count: usize) -> Result<()> {
        let fits = count <= self.out.len() - self.at;
        self.at += if fits { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

/// A source over private memory.
#[derive(Debug)]
pub struct SliceSource<'a> {
    rest: &'a [u8],
}

impl<'a> SliceSource<'a> {
    /// A source that provides `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        SliceSource { rest: bytes }
    }
}

impl WriteSource for SliceSource<'_> {
    fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let len = out.len().min(self.rest.len());
        let (head, rest) = self.rest.split_at(len);
        out[..len].copy_from_slice(head);
        self.rest = rest;
        Ok(len)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let file = fs::File::from(fd.try_clone_to_owned()?);
        let len = len.min(self.rest.len());
        let count = file.write_at(&self.rest[..len], offset)?;
        self.rest = &self.rest[count..];
        Ok(count)
    }

    fn borrow(&mut self) -> Option<&[u8]> {
        Some(self.rest)
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        self.rest = self.rest.get(count..).ok_or(Errno::EINVAL)?;
        Ok(())
    }
}

/// One entry of readdir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItem<'a> {
    /// `d_ino`: the `st_ino` of the entry. Only a hint to programs.
    pub ino: u64,
    /// `d_off`: the position after this entry, never 0.
    pub next: u64,
    /// `d_type`.
    pub kind: FileKind,
    /// One path component, or `.` or `..`.
    pub name: &'a [u8],
}

/// The result of adding an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushOutcome {
    /// The entry was added.
    Added,
    /// The entry did not fit and was not added. The listing must stop here.
    Full,
}

/// The frontend's side of a [`DirBuf`]. It receives directory entries.
pub trait DirSink {
    /// True if the frontend wants attributes with each entry (READDIRPLUS).
    fn wants_entries(&self) -> bool;
    /// True if an entry with a name of `name_len` bytes fits.
    fn fits(&self, name_len: usize) -> bool;
    /// Appends an entry that fits. `entry` is `Some` only if attributes are wanted.
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>);
}

/// The buffer of readdir.
pub struct DirBuf<'a> {
    sink: &'a mut dyn DirSink,
}

impl<'a> DirBuf<'a> {
    /// A buffer over `sink`.
    pub fn new(sink: &'a mut dyn DirSink) -> Self {
        DirBuf { sink }
    }

    /// True if [`push_with`](DirBuf::push_with) will request an [`Entry`].
    pub fn wants_entries(&self) -> bool {
        self.sink.wants_entries()
    }

    /// True if an entry with a name of `name_len` bytes fits.
    pub fn fits(&self, name_len: usize) -> bool {
        self.sink.fits(name_len)
    }

    /// Appends `item` without attributes.
    pub fn push(&mut self, item: DirItem<'_>) -> PushOutcome {
        self.push_with(item, || None)
    }

    /// Appends `item`, with the entry that `look_up` returns if the frontend wants it. `look_up`
    /// runs only if the entry fits, so that it may count a lookup: the caller receives its result,
    /// and forgets it later like any other lookup. It returns `None` for `.` and `..`, and for a
    /// file that no longer exists.
    pub fn push_with(
        &mut self,
        item: DirItem<'_>,
        look_up: impl FnOnce() -> Option<Entry>,
    ) -> PushOutcome {
        if !self.sink.fits(item.name.len()) {
            return PushOutcome::Full;
        }
        let entry = if self.sink.wants_entries() { look_up() } else { None };
        self.sink.add(item, entry.as_ref());
        PushOutcome::Added
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_read_never_exceeds_the_requested_length() {
        let mut memory = [0xff; 8];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, 6);
        assert_eq!(out.put(b"abcd"), Ok(4));
        assert_eq!(out.put_zeros(100), Ok(2));
        assert_eq!(out.put(b"zz"), Ok(0));
        assert_eq!((out.filled_len(), out.remaining()), (6, 0));
        assert_eq!(&memory, b"abcd\0\0\xff\xff");
    }

    #[test]
    fn a_limit_applies_to_one_part_only() {
        let mut memory = [0; 8];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, 6);
        assert_eq!(out.with_limit(2, |out| out.put(b"abcd")), Ok(2));
        assert_eq!(out.put(b"efghij"), Ok(4));
        assert_eq!(&memory, b"abefgh\0\0");

        let mut source = SliceSource::new(b"hello world");
        let mut data = WriteBuf::new(&mut source);
        let mut taken = [0; 8];
        let first = data.with_limit(5, |data| (data.remaining(), data.take(&mut taken)));
        assert_eq!((first, data.remaining()), ((5, Ok(5)), 6));
    }

    /// Memory that another process can write to. Buffers over it do not lend.
    struct UnlendableMemory;

    impl ReadSink for UnlendableMemory {
        fn put(&mut self, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn put_zeros(&mut self, _: usize) -> Result<()> {
            Ok(())
        }
        fn fill_from(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize> {
            Ok(0)
        }
    }

    impl WriteSource for UnlendableMemory {
        fn remaining(&self) -> usize {
            8
        }
        fn take(&mut self, _: &mut [u8]) -> Result<usize> {
            Ok(0)
        }
        fn drain_to(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize> {
            Ok(0)
        }
    }

    #[test]
    fn shared_memory_is_not_lent() {
        let (mut sink, mut source) = (UnlendableMemory, UnlendableMemory);
        let mut out = ReadBuf::new(&mut sink, 8);
        assert!(out.lend().is_none());
        assert_eq!((out.advance(1), out.filled_len()), (Err(Errno::EINVAL), 0));
        let mut data = WriteBuf::new(&mut source);
        assert!(data.borrow().is_none());
        assert_eq!(data.skip(1), Err(Errno::EINVAL));
    }

    #[test]
    fn private_memory_is_lent_up_to_the_limit_and_only_used_bytes_count() {
        let mut memory = [0; 8];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, 6);
        out.put(b"a").unwrap();
        out.lend().unwrap()[..2].copy_from_slice(b"bc");
        assert_eq!(out.advance(2), Ok(()));
        let lent = out.with_limit(2, |out| out.lend().unwrap().len());
        assert_eq!((lent, out.lend().unwrap().len()), (2, 3));
        assert_eq!(out.with_limit(2, |out| out.advance(3)), Err(Errno::EINVAL));
        out.put(b"def").unwrap();
        assert!(out.lend().is_none(), "it is full");
        assert_eq!(out.advance(1), Err(Errno::EINVAL));
        assert_eq!(&memory, b"abcdef\0\0");

        let mut source = SliceSource::new(b"hello");
        let mut data = WriteBuf::new(&mut source);
        let lent = data.with_limit(2, |data| {
            assert_eq!(data.skip(3), Err(Errno::EINVAL));
            let lent = data.borrow().unwrap().to_vec();
            data.skip(1).unwrap();
            (lent, data.borrow().unwrap().to_vec())
        });
        assert_eq!(lent, (b"he".to_vec(), b"e".to_vec()));
        assert_eq!(data.borrow(), Some(&b"ello"[..]));
        assert_eq!(data.skip(9), Err(Errno::EINVAL));
        data.skip(4).unwrap();
        assert!(data.borrow().is_none());
        assert_eq!(data.remaining(), 0);
    }

    #[test]
    fn buffers_are_copied_from_and_to_files() {
        let path = std::env::temp_dir().join(format!("defuse-buf-{}", std::process::id()));
        let file = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();

        let mut source = SliceSource::new(b"hello world");
        let mut data = WriteBuf::new(&mut source);
        let mut first = [0; 6];
        assert_eq!(data.take(&mut first), Ok(6));
        assert_eq!(data.drain_to(file.as_fd(), 3), Ok(5));
        assert_eq!(data.remaining(), 0);

        let mut memory = [0xff; 16];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, 16);
        assert_eq!(out.fill_from(file.as_fd(), 0), Ok(8));
        assert_eq!(&memory[..8], b"\0\0\0world");
    }
}
