//! A pipe that carries file data between a file and the device without a copy, splice(2).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::errno;
use defuse_fs::{Errno, Result};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// A pipe with room for one message of a fixed size.
pub(crate) struct MessagePipe {
    reader: OwnedFd,
    writer: OwnedFd,
    /// Bytes inside.
    level: usize,
    capacity: usize,
}

/// A pipe holds pages: the header takes one, and data that begins within a page one more.
const OVERHEAD: usize = 2 * 4096;

impl MessagePipe {
    /// A pipe for messages of up to `wanted` bytes of data. Where that is more than
    /// /proc/sys/fs/pipe-max-size permits, it takes less: see [`capacity`](MessagePipe::capacity).
    pub(crate) fn new(wanted: usize) -> Result<Self> {
        let (reader, writer) =
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(errno)?;
        let full = (wanted + OVERHEAD).next_power_of_two();
        let mut sizes = [full, 1 << 20, 1 << 18].into_iter().filter(|&size| size <= full);
        let set = sizes.find_map(|size| fcntl_setpipe_size(&writer, size).ok());
        let capacity = set.ok_or(Errno::EPERM)?.saturating_sub(OVERHEAD);
        Ok(MessagePipe { reader, writer, level: 0, capacity })
    }

    /// Bytes of file data that fit, in whole pages, beside a header.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn level(&self) -> usize {
        self.level
    }

    /// Puts `bytes` in by copying.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let count = rustix::io::write(&self.writer, bytes).map_err(errno)?;
        self.level += count;
        if count == bytes.len() { Ok(()) } else { Err(Errno::EIO) }
    }

    /// Takes bytes out by copying; all of `out` is filled unless the pipe runs empty.
    pub(crate) fn pull(&mut self, out: &mut [u8]) -> Result<usize> {
        let want = out.len().min(self.level);
        let mut done = 0;
        while done < want {
            match rustix::io::read(&self.reader, &mut out[done..want]).map_err(errno)? {
                0 => break,
                count => done += count,
            }
        }
        self.level -= done;
        Ok(done)
    }

    /// Moves up to `len` bytes of `fd` into the pipe: from `offset`, or from the position of a
    /// stream.
    pub(crate) fn fill(
        &mut self,
        fd: BorrowedFd<'_>,
        offset: Option<u64>,
        len: usize,
    ) -> Result<usize> {
        let mut at = offset;
        let count =
            splice(fd, at.as_mut(), &self.writer, None, len, SpliceFlags::MOVE).map_err(errno)?;
        self.level += count;
        Ok(count)
    }

    /// Moves up to `len` bytes out into `fd`: at `offset`, or into a stream.
    pub(crate) fn drain(
        &mut self,
        fd: BorrowedFd<'_>,
        offset: Option<u64>,
        len: usize,
    ) -> Result<usize> {
        let mut at = offset;
        let count = splice(self.reader.as_fd(), None, fd, at.as_mut(), len, SpliceFlags::MOVE)
            .map_err(errno)?;
        self.level -= count.min(self.level);
        Ok(count)
    }

    /// Discards the bytes in the pipe.
    pub(crate) fn clear(&mut self) -> Result<()> {
        // Before nearly every request the pipe is empty, and clearing the scratch memory would be
        // most of the work for a small request.
        if self.level == 0 {
            return Ok(());
        }
        let mut scratch = [0; 4096];
        while self.level > 0 {
            if self.pull(&mut scratch)? == 0 {
                return Err(Errno::EIO);
            }
        }
        Ok(())
    }
}
