//! Copies between open files: by the file system if both are on one mount, otherwise through
//! memory.

use defuse_fs::{CopyRange, Errno, FileKind};
use defuse_probe::Op;

use crate::client::DirectClient;
use crate::data::{OFFSET_MAX, sync_changed};
use crate::description::FileDescription;
use crate::stop::{CallError, Result};
use crate::task::ClientTask;

/// Bytes copied at a time between two mounts.
const PIECE: usize = 128 << 10;

/// One end of a copy: an open file and an offset. `None` uses the file position, and moves it.
pub type CopyEnd<'a> = (&'a FileDescription, Option<u64>);

impl DirectClient {
    /// Copies up to `len` bytes, copy_file_range(2), also between mounts. Returns the number of
    /// bytes copied, 0 at the end of the source. Errors: `EBADF`, `EISDIR`, and `EINVAL` for files
    /// that are not regular and for overlapping ranges of one file.
    pub fn copy_file_range(
        &self,
        task: &ClientTask,
        from: CopyEnd<'_>,
        to: CopyEnd<'_>,
        len: usize,
    ) -> Result<usize> {
        let (src, dst) = (from.0, to.0);
        src.file()?;
        dst.file()?;
        if [src.kind, dst.kind].contains(&FileKind::Directory) {
            return Err(Errno::EISDIR.into());
        }
        if src.kind != FileKind::Regular || dst.kind != FileKind::Regular {
            return Err(Errno::EINVAL.into());
        }
        if !src.reads() || !dst.writes() || dst.flags().has(defuse_fs::OpenFlags::APPEND) {
            return Err(Errno::EBADF.into());
        }
        let src_offset = from.1.unwrap_or_else(|| src.position());
        let dst_offset = to.1.unwrap_or_else(|| dst.position());
        let copied = self.copy_at(task, (src, src_offset), (dst, dst_offset), len)?;
        if from.1.is_none() {
            src.with_position(|_| (src_offset + copied as u64, ()));
        }
        if to.1.is_none() {
            dst.with_position(|_| (dst_offset + copied as u64, ()));
        }
        Ok(copied)
    }

    fn copy_at(
        &self,
        task: &ClientTask,
        (src, src_offset): (&FileDescription, u64),
        (dst, dst_offset): (&FileDescription, u64),
        len: usize,
    ) -> Result<usize> {
        let length = len.min(0x7fff_f000) as u64;
        let end = |offset: u64| offset.checked_add(length).filter(|&end| end <= OFFSET_MAX);
        if end(src_offset).is_none() || end(dst_offset).is_none() {
            return Err(Errno::EOVERFLOW.into());
        }
        let limit = task.raw_file_size_limit();
        if dst_offset >= limit && length > 0 {
            return Err(Errno::EFBIG.into());
        }
        let length = length.min(limit - dst_offset.min(limit));
        let same_mount = std::sync::Arc::ptr_eq(src.mount(), dst.mount());
        if same_mount {
            let same_file = src.inode().node.ino() == dst.inode().node.ino();
            if same_file {
                // Only existing data can overlap, so the range ends at the end of the file.
                let who = task.credentials();
                let size = src.mount().fetch_attr(&src.inode().node, src.fh(), &who)?.size;
                let there = length.min(size.saturating_sub(src_offset));
                if there > 0 && src_offset.abs_diff(dst_offset) < there {
                    return Err(Errno::EINVAL.into());
                }
            }
            let copy = CopyRange {
                src: src.file()?,
                src_offset,
                dst: dst.file()?,
                dst_offset,
                length,
                flags: 0,
            };
            let mount = dst.mount();
            let cx = task.context(mount.origin);
            let copied = mount.call(Op::COPY_FILE_RANGE, |fs| fs.copy_file_range(&cx, &copy));
            dst.inode().node.invalidate();
            match copied {
                Err(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EXDEV) => {}
                copied => {
                    let copied = copied?;
                    sync_changed(task, dst, dst.flags())?;
                    return Ok(copied as usize);
                }
            }
        }
        self.copy_through_memory(task, (src, src_offset), (dst, dst_offset), length as usize)
    }

    fn copy_through_memory(
        &self,
        task: &ClientTask,
        (src, src_offset): (&FileDescription, u64),
        (dst, dst_offset): (&FileDescription, u64),
        len: usize,
    ) -> Result<usize> {
        let mut piece = vec![0; PIECE.min(len)];
        let mut done = 0;
        while done < len {
            let room = piece.len().min(len - done);
            let at = done as u64;
            let step =
                self.pread(task, src, &mut piece[..room], src_offset + at).and_then(
                    |got| match got {
                        0 => Ok(0),
                        got => self.pwrite(task, dst, &piece[..got], dst_offset + at),
                    },
                );
            match step {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(stop) if done == 0 => return Err(stop),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Passes up to `len` bytes of an open file to `out`, which returns the number of bytes it
    /// took; for sendfile(2) to any destination. `from` is an offset; `None` uses the file
    /// position, which then moves by the bytes taken.
    pub fn send_to(
        &self,
        task: &ClientTask,
        (file, from): CopyEnd<'_>,
        len: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<usize, Errno>,
    ) -> Result<usize> {
        let start = from.unwrap_or_else(|| file.position());
        let mut piece = vec![0; PIECE.min(len)];
        let mut done = 0;
        while done < len {
            let room = piece.len().min(len - done);
            let got = self.pread(task, file, &mut piece[..room], start + done as u64)?;
            let taken = match got {
                0 => break,
                got => out(&piece[..got]).map_err(CallError::from),
            };
            match taken {
                Ok(count) => done += count.min(got),
                Err(stop) if done == 0 => return Err(stop),
                Err(_) => break,
            }
            if taken != Ok(got) {
                break;
            }
        }
        if from.is_none() {
            file.with_position(|_| (start + done as u64, ()));
        }
        Ok(done)
    }
}
