//! Directory entries.

use crate::abi::{Dirent, Direntplus, EntryOut, rec_align};
use std::fmt;
use zerocopy::IntoBytes;

/// `FUSE_NAME_MAX` of most kernels: longer names make READDIR fail with EIO. The contract permits
/// no such names.
const NAME_MAX: usize = 1024;

/// The entry does not fit. Send the entries before it, and the kernel requests the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirBufferFull;

impl fmt::Display for DirBufferFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the directory buffer is full")
    }
}

impl std::error::Error for DirBufferFull {}

/// Fills a buffer with entries of READDIR or READDIRPLUS.
///
/// An entry is written completely or not at all, so that the written bytes are always a valid
/// reply. A length of 0 means the end of the directory. The buffer must therefore have the
/// requested length.
#[derive(Debug)]
pub struct DirEncoder<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> DirEncoder<'a> {
    /// An encoder that fills `buf` from its start.
    pub fn new(buf: &'a mut [u8]) -> DirEncoder<'a> {
        DirEncoder { buf, len: 0 }
    }

    /// Adds an entry of READDIR. `off` is the position of the next entry, and `kind` is the file
    /// type as in `d_type` (`mode >> 12`).
    pub fn push(
        &mut self,
        name: &[u8],
        ino: u64,
        off: u64,
        kind: u32,
    ) -> Result<(), DirBufferFull> {
        let dirent = Dirent { ino, off, namelen: name.len() as u32, type_: kind };
        self.append(dirent.as_bytes(), name)
    }

    /// Adds an entry of READDIRPLUS. On success it counts as a lookup, unless its `nodeid` is 0 or
    /// it is `.` or `..`. On [`DirBufferFull`] it does not. The inode number and type come from the
    /// attributes.
    pub fn push_plus(
        &mut self,
        name: &[u8],
        off: u64,
        entry: &EntryOut,
    ) -> Result<(), DirBufferFull> {
        let (ino, type_) = (entry.attr.ino, (entry.attr.mode & 0o170000) >> 12);
        let dirent = Dirent { ino, off, namelen: name.len() as u32, type_ };
        self.append(Direntplus { entry_out: *entry, dirent }.as_bytes(), name)
    }

    /// True if an entry with a name of this length fits.
    pub fn fits(&self, name_len: usize, plus: bool) -> bool {
        let head = if plus { size_of::<Direntplus>() } else { size_of::<Dirent>() };
        rec_align(head + name_len) <= self.buf.len() - self.len
    }

    /// Bytes written so far: the length of the reply's body.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if no entry was added.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn append(&mut self, head: &[u8], name: &[u8]) -> Result<(), DirBufferFull> {
        debug_assert!(!name.is_empty() && name.len() <= NAME_MAX);
        let used = head.len() + name.len();
        let end = self.len.checked_add(rec_align(used)).ok_or(DirBufferFull)?;
        let record = self.buf.get_mut(self.len..end).ok_or(DirBufferFull)?;
        record[..head.len()].copy_from_slice(head);
        record[head.len()..used].copy_from_slice(name);
        // The buffer is reused: padding must not reveal earlier content.
        record[used..].fill(0);
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    /// Reads entries like the kernel's `parse_dirfile`.
    fn parse(mut bytes: &[u8]) -> Vec<(Vec<u8>, u64, u64, u32)> {
        let mut entries = Vec::new();
        while !bytes.is_empty() {
            let (dirent, rest) = Dirent::read_from_prefix(bytes).unwrap();
            let name = rest[..dirent.namelen as usize].to_vec();
            entries.push((name, dirent.ino, dirent.off, dirent.type_));
            bytes = &bytes[rec_align(24 + dirent.namelen as usize)..];
        }
        entries
    }

    #[test]
    fn entries_are_aligned_and_read_back() {
        let mut buf = [0xff; 200];
        let mut dir = DirEncoder::new(&mut buf);
        for (at, name) in [&b"."[..], b"..", b"12345678", b"nine bytes"].iter().enumerate() {
            dir.push(name, at as u64 + 1, at as u64 + 10, 4).unwrap();
            assert_eq!(dir.len() % 8, 0);
        }
        let len = dir.len();
        assert_eq!(len, 32 + 32 + 32 + 40);
        assert_eq!(buf[25..32], [0; 7], "padding is zero");
        let entries = parse(&buf[..len]);
        assert_eq!(entries.len(), 4);
        assert_eq!(entries[2], (b"12345678".to_vec(), 3, 12, 4));
        assert_eq!(buf[len..], [0xff; 200 - 136], "nothing is written beyond");
    }

    #[test]
    fn a_full_buffer_contains_no_partial_entry() {
        let mut buf = [0xff; 63];
        let mut dir = DirEncoder::new(&mut buf);
        assert!(dir.fits(8, false) && dir.fits(32, false) && !dir.fits(33, false));
        dir.push(b"one", 1, 1, 8).unwrap();
        // 31 bytes are left, and the shortest entry needs 32.
        assert!(!dir.fits(1, false));
        assert_eq!(dir.push(b"x", 2, 2, 8), Err(DirBufferFull));
        assert_eq!(dir.len(), 32);
        assert_eq!(buf[32..], [0xff; 31]);
        let mut dir = DirEncoder::new(&mut []);
        assert_eq!(dir.push(b"x", 2, 2, 8), Err(DirBufferFull));
        assert!(dir.is_empty());
    }

    #[test]
    fn plus_entries_take_number_and_type_from_the_attributes() {
        let mut entry = EntryOut { nodeid: 5, ..Default::default() };
        (entry.attr.ino, entry.attr.mode) = (77, 0o040755);
        let mut buf = [0; 320];
        let mut dir = DirEncoder::new(&mut buf);
        assert!(dir.fits(8, true));
        dir.push_plus(b"directory", 3, &entry).unwrap();
        assert_eq!(dir.len(), 128 + 24 + 16);
        assert_eq!(dir.push_plus(b"directory", 3, &entry), Err(DirBufferFull));
        let (plus, rest) = Direntplus::read_from_prefix(&buf[..]).unwrap();
        assert_eq!((plus.entry_out, plus.dirent.ino, plus.dirent.type_), (entry, 77, 4));
        assert_eq!(&rest[..9], b"directory");
    }
}
