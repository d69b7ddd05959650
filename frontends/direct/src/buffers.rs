//! Implements the contract's buffers over the caller's memory.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use defuse_fs::{Errno, ReadSink, Result, WriteSource};

fn raw(errno: rustix::io::Errno) -> Errno {
    Errno::from_raw(errno.raw_os_error())
}

/// One memory area that a read fills, with pread(2) where the data is in a lower file.
pub(crate) struct ReadArea<'a> {
    room: &'a mut [u8],
    at: usize,
}

impl<'a> ReadArea<'a> {
    pub fn new(room: &'a mut [u8]) -> Self {
        ReadArea { room, at: 0 }
    }
}

impl ReadSink for ReadArea<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let end = self.at + bytes.len();
        self.room.get_mut(self.at..end).ok_or(Errno::EIO)?.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        let end = self.at + len;
        self.room.get_mut(self.at..end).ok_or(Errno::EIO)?.fill(0);
        self.at = end;
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let room = self.room.get_mut(self.at..self.at + len).ok_or(Errno::EIO)?;
        let done = fill(fd, room, offset)?;
        self.at += done;
        Ok(done)
    }

    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        self.room.get_mut(self.at..self.at + len)
    }

    fn advance(&mut self, count: usize) -> Result<()> {
        let fits = count <= self.room.len() - self.at;
        self.at += if fits { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

/// Reads until `room` is full or the file ends, because some file systems return short reads.
fn fill(fd: BorrowedFd<'_>, room: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < room.len() {
        match rustix::io::pread(fd, &mut room[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(errno) if done == 0 => return Err(raw(errno)),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Several memory areas, filled in order.
pub(crate) struct ReadVector<'a, 'b> {
    pieces: &'a mut [IoSliceMut<'b>],
    piece: usize,
    at: usize,
}

impl<'a, 'b> ReadVector<'a, 'b> {
    pub fn new(pieces: &'a mut [IoSliceMut<'b>]) -> Self {
        ReadVector { pieces, piece: 0, at: 0 }
    }

    /// Passes `len` bytes of room to `fill`, area by area, and stops after a short one.
    fn for_each_area(
        &mut self,
        len: usize,
        mut fill: impl FnMut(&mut [u8], usize) -> Result<usize>,
    ) -> Result<usize> {
        let mut done = 0;
        while done < len {
            let piece = self.pieces.get_mut(self.piece).ok_or(Errno::EIO)?;
            let end = piece.len().min(self.at + len - done);
            let room = &mut piece[self.at..end];
            if room.is_empty() {
                (self.piece, self.at) = (self.piece + 1, 0);
                continue;
            }
            let wanted = room.len();
            let count = match fill(room, done) {
                Ok(count) => count,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            };
            self.at += count;
            done += count;
            if count < wanted {
                break;
            }
        }
        Ok(done)
    }
}

impl ReadSink for ReadVector<'_, '_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let put = |room: &mut [u8], done: usize| {
            room.copy_from_slice(&bytes[done..done + room.len()]);
            Ok(room.len())
        };
        self.for_each_area(bytes.len(), put).map(drop)
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        let put = |room: &mut [u8], _| {
            room.fill(0);
            Ok(room.len())
        };
        self.for_each_area(len, put).map(drop)
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        self.for_each_area(len, |room, done| fill(fd, room, offset + done as u64))
    }

    /// Lends the rest of one area.
    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        while self.pieces.get(self.piece)?.len() == self.at {
            (self.piece, self.at) = (self.piece + 1, 0);
        }
        let piece = &mut self.pieces[self.piece];
        let end = piece.len().min(self.at + len);
        Some(&mut piece[self.at..end])
    }

    fn advance(&mut self, count: usize) -> Result<()> {
        let lent = self.lend(count).map_or(0, |room| room.len());
        self.at += if count <= lent { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

/// One memory area that a write takes its data from, with pwrite(2) where the data goes to a lower
/// file.
pub(crate) struct WriteArea<'a> {
    rest: &'a [u8],
}

impl<'a> WriteArea<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        WriteArea { rest: bytes }
    }
}

impl WriteSource for WriteArea<'_> {
    fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let (head, rest) = self.rest.split_at(out.len().min(self.rest.len()));
        out[..head.len()].copy_from_slice(head);
        self.rest = rest;
        Ok(head.len())
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let len = len.min(self.rest.len());
        let count = rustix::io::pwrite(fd, &self.rest[..len], offset).map_err(raw)?;
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

/// Several memory areas, of which at most `left` bytes are taken, in order.
pub(crate) struct WriteVector<'a, 'b> {
    pieces: &'a [IoSlice<'b>],
    at: usize,
    left: usize,
}

impl<'a, 'b> WriteVector<'a, 'b> {
    pub fn new(pieces: &'a [IoSlice<'b>], len: usize) -> Self {
        WriteVector { pieces, at: 0, left: len }
    }

    fn front(&mut self) -> &'a [u8] {
        while let Some((first, rest)) = self.pieces.split_first() {
            if self.at < first.len() {
                return &first[self.at..];
            }
            (self.pieces, self.at) = (rest, 0);
        }
        &[]
    }
}

impl WriteSource for WriteVector<'_, '_> {
    fn remaining(&self) -> usize {
        self.left
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < out.len() && self.left > 0 {
            let front = self.front();
            let len = front.len().min(out.len() - done).min(self.left);
            if len == 0 {
                break;
            }
            out[done..done + len].copy_from_slice(&front[..len]);
            self.at += len;
            self.left -= len;
            done += len;
        }
        Ok(done)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let front = self.front();
        let len = front.len().min(len).min(self.left);
        let count = rustix::io::pwrite(fd, &front[..len], offset).map_err(raw)?;
        self.at += count;
        self.left -= count;
        Ok(count)
    }

    /// Lends the rest of one area.
    fn borrow(&mut self) -> Option<&[u8]> {
        let left = self.left;
        let front = self.front();
        Some(&front[..front.len().min(left)])
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        if count > self.borrow().map_or(0, <[u8]>::len) {
            return Err(Errno::EINVAL);
        }
        self.at += count;
        self.left -= count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_filled_and_taken_in_their_order() {
        let (mut a, mut b, mut c) = ([0; 2], [0; 0], [0; 4]);
        let mut pieces =
            [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b), IoSliceMut::new(&mut c)];
        let mut sink = ReadVector::new(&mut pieces);
        sink.put(b"abc").unwrap();
        sink.put_zeros(1).unwrap();
        sink.put(b"d").unwrap();
        assert_eq!((&a, &c), (b"ab", b"c\0d\0"));

        let pieces = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cdef")];
        let mut source = WriteVector::new(&pieces, 5);
        let mut out = [0; 3];
        assert_eq!((source.take(&mut out), &out), (Ok(3), b"abc"));
        assert_eq!((source.take(&mut out), &out, source.remaining()), (Ok(2), b"dec", 0));
    }

    #[test]
    fn each_area_is_lent_for_itself() {
        let (mut a, mut b, mut c) = ([0; 2], [0; 0], [0; 4]);
        let mut pieces =
            [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b), IoSliceMut::new(&mut c)];
        let mut sink = ReadVector::new(&mut pieces);
        sink.put(b"a").unwrap();
        assert_eq!(sink.lend(5).unwrap().len(), 1);
        assert_eq!(sink.advance(2), Err(Errno::EINVAL));
        sink.lend(5).unwrap().copy_from_slice(b"b");
        sink.advance(1).unwrap();
        sink.lend(3).unwrap().copy_from_slice(b"cde");
        sink.advance(3).unwrap();
        sink.put(b"f").unwrap();
        assert!(sink.lend(1).is_none());
        assert_eq!((&a, &c), (b"ab", b"cdef"));

        let pieces = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cdef")];
        let mut source = WriteVector::new(&pieces, 5);
        assert_eq!(source.borrow(), Some(&b"ab"[..]));
        assert_eq!(source.skip(3), Err(Errno::EINVAL));
        source.skip(2).unwrap();
        assert_eq!(source.borrow(), Some(&b"cde"[..]));
        source.skip(3).unwrap();
        assert_eq!(source.borrow(), Some(&b""[..]));
        assert_eq!(source.remaining(), 0);
    }
}
