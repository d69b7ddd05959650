//! Decodes the replies of an untrusted server: every length, name, number and type is checked. A
//! reply that the kernel would refuse results in `EIO`. Values that the kernel corrects are
//! corrected in the same way, because servers rely on it (`fs/fuse/inode.c`, `fs/fuse/dir.c`).

use std::time::Duration;

use defuse_fs::{
    Attr, CacheMode, Entry, Errno, Fh, FileKind, Ino, Lock, LockType, NAME_MAX, OpenReply, Result,
    StatFs, Timestamp,
};
use zerocopy::FromBytes;

use crate::abi;
use crate::convert::library_dev;
use crate::vendor::{self, PublishedAttr};

/// The maximum validity of a reply, in seconds. A longer one could overflow `Instant`.
const FOREVER_S: u64 = u32::MAX as u64;

/// Decodes a reply that consists of one structure.
///
/// # Errors
///
/// `EIO` for any other length.
pub fn decode_whole<T: FromBytes>(body: &[u8]) -> Result<T> {
    T::read_from_bytes(body).map_err(|_| Errno::EIO)
}

/// Checks that a reply is empty.
///
/// # Errors
///
/// `EIO` if it is not.
pub fn check_empty(body: &[u8]) -> Result<()> {
    if body.is_empty() { Ok(()) } else { Err(Errno::EIO) }
}

fn to_duration(secs: u64, nanos: u32) -> Duration {
    // Limits the fraction to less than a second, as the kernel does (fuse_time_to_jiffies).
    Duration::new(secs.min(FOREVER_S), nanos.min(999_999_999))
}

/// A time. The nanoseconds are limited as in the kernel (`fuse_change_attributes_common`), because
/// programs leave them uninitialised.
fn time(secs: u64, nanos: u32) -> Timestamp {
    Timestamp { secs: secs as i64, nanos: nanos.min(999_999_999) }
}

fn attr(from: &abi::Attr, valid_for: Duration) -> Result<Attr> {
    // fuse_invalid_attr: a size is a loff_t.
    if from.size > i64::MAX as u64 {
        return Err(Errno::EIO);
    }
    Ok(Attr {
        st_ino: from.ino,
        kind: FileKind::from_mode(from.mode).ok_or(Errno::EIO)?,
        perm: from.mode & 0o7777,
        nlink: from.nlink,
        uid: from.uid,
        gid: from.gid,
        rdev: library_dev(from.rdev),
        size: from.size,
        blocks: from.blocks,
        // 0 means no preference.
        blksize: if from.blksize == 0 { 4096 } else { from.blksize },
        atime: time(from.atime, from.atimensec),
        mtime: time(from.mtime, from.mtimensec),
        ctime: time(from.ctime, from.ctimensec),
        btime: None,
        valid_for,
    })
}

/// Decodes the reply to GETATTR and SETATTR.
///
/// # Errors
///
/// `EIO` for an unknown file type or an impossible size.
pub fn attr_out(body: &[u8]) -> Result<Attr> {
    let out: abi::AttrOut = decode_whole(body)?;
    attr(&out.attr, to_duration(out.attr_valid, out.attr_valid_nsec))
}

/// Decodes attributes beside a name. They have no lifetime of their own.
///
/// # Errors
///
/// The errors of [`attr_out`].
pub fn decode_published_attr(from: &PublishedAttr) -> Result<Attr> {
    let btime = (from.flags & PublishedAttr::HAS_BTIME != 0)
        .then(|| time(from.btime as u64, from.btime_nanos));
    Ok(Attr { btime, ..attr(&from.attr, Duration::ZERO)? })
}

/// `STATX_BTIME` of statx(2).
const STATX_BTIME: u32 = 0x800;
/// The fields of GETATTR (`STATX_BASIC_STATS`).
const STATX_BASIC: u32 = 0x7ff;

/// Decodes the reply to STATX; `None` if it lacks a field of GETATTR.
///
/// # Errors
///
/// The errors of [`attr_out`].
pub fn statx_out(body: &[u8]) -> Result<Option<Attr>> {
    let out: abi::StatxOut = decode_whole(body)?;
    let stat = &out.stat;
    if stat.mask & STATX_BASIC != STATX_BASIC {
        return Ok(None);
    }
    if stat.size > i64::MAX as u64 {
        return Err(Errno::EIO);
    }
    let time = |from: &abi::SxTime| time(from.tv_sec as u64, from.tv_nsec);
    let (major, minor) = (u64::from(stat.rdev_major), u64::from(stat.rdev_minor));
    let mode = u32::from(stat.mode);
    Ok(Some(Attr {
        st_ino: stat.ino,
        kind: FileKind::from_mode(mode).ok_or(Errno::EIO)?,
        perm: mode & 0o7777,
        nlink: stat.nlink,
        uid: stat.uid,
        gid: stat.gid,
        // makedev(3).
        rdev: (minor & 0xff)
            | ((major & 0xfff) << 8)
            | ((minor & !0xff) << 12)
            | ((major & !0xfff) << 32),
        size: stat.size,
        blocks: stat.blocks,
        blksize: if stat.blksize == 0 { 4096 } else { stat.blksize },
        atime: time(&stat.atime),
        mtime: time(&stat.mtime),
        ctime: time(&stat.ctime),
        btime: if stat.mask & STATX_BTIME != 0 { Some(time(&stat.btime)) } else { None },
        valid_for: to_duration(out.attr_valid, out.attr_valid_nsec),
    }))
}

/// Decodes an entry. `None` for the node 0: the name does not exist.
fn entry(out: &abi::EntryOut) -> Result<Option<Entry>> {
    if out.nodeid == 0 {
        return Ok(None);
    }
    Ok(Some(Entry {
        ino: Ino(out.nodeid),
        generation: out.generation,
        attr: attr(&out.attr, to_duration(out.attr_valid, out.attr_valid_nsec))?,
        valid_for: to_duration(out.entry_valid, out.entry_valid_nsec),
    }))
}

/// Decodes the reply to LOOKUP. Only the name `..` may lead to the root.
///
/// # Errors
///
/// `ENOENT` if the name does not exist; `EIO` for an invalid entry.
pub fn lookup_out(body: &[u8], may_be_root: bool) -> Result<Entry> {
    let found = entry(&decode_whole(body)?)?.ok_or(Errno::ENOENT)?;
    if found.ino == Ino::ROOT && !may_be_root { Err(Errno::EIO) } else { Ok(found) }
}

/// Decodes the reply to a creation of `kind`, or of any kind.
///
/// # Errors
///
/// `EIO` for an invalid entry or another kind.
pub fn decode_created_entry(body: &[u8], kind: Option<FileKind>) -> Result<Entry> {
    let made = entry(&decode_whole(body)?)?.ok_or(Errno::EIO)?;
    let other = kind.is_some_and(|kind| kind != made.attr.kind);
    if made.ino == Ino::ROOT || other { Err(Errno::EIO) } else { Ok(made) }
}

/// Decodes the reply to OPEN and OPENDIR.
///
/// # Errors
///
/// `EIO` for another length.
pub fn open_out(body: &[u8]) -> Result<OpenReply> {
    Ok(decode_open_out(&decode_whole(body)?))
}

/// The bytes of a file that came with the reply to OPEN ([`vendor::OPEN_HAS_BYTES`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenBytes<'a> {
    /// All of its bytes.
    pub bytes: &'a [u8],
    /// Reading changes the access time ([`vendor::OPEN_READ_IS_DUE`]).
    pub read_is_due: bool,
}

/// Decodes the reply to an OPEN that requested bytes, with the bytes if there are some.
///
/// # Errors
///
/// `EIO` for an invalid reply.
pub fn open_out_with_bytes(body: &[u8]) -> Result<(OpenReply, Option<OpenBytes<'_>>)> {
    let (out, bytes) = abi::OpenOut::read_from_prefix(body).map_err(|_| Errno::EIO)?;
    let has = |flag| out.open_flags & flag != 0;
    let has_bytes = has(vendor::OPEN_HAS_BYTES);
    let most = if has_bytes { vendor::OPEN_BYTES_MAX } else { 0 };
    if bytes.len() > most {
        return Err(Errno::EIO);
    }
    let read_is_due = has(vendor::OPEN_READ_IS_DUE);
    Ok((decode_open_out(&out), has_bytes.then_some(OpenBytes { bytes, read_is_due })))
}

fn decode_open_out(out: &abi::OpenOut) -> OpenReply {
    let has = |flag| out.open_flags & flag != 0;
    let cache = match () {
        () if has(abi::FOPEN_DIRECT_IO) => CacheMode::Direct,
        () if has(abi::FOPEN_KEEP_CACHE) => CacheMode::Keep,
        () => CacheMode::Cached,
    };
    OpenReply {
        fh: Fh(out.fh),
        cache,
        backing: None,
        lower: None,
        no_flush: has(abi::FOPEN_NOFLUSH | vendor::OPEN_FLUSH_ENDS_LOCKS),
        stream: has(abi::FOPEN_STREAM) || has(abi::FOPEN_NONSEEKABLE),
        parallel_direct_writes: has(abi::FOPEN_PARALLEL_DIRECT_WRITES),
        cache_dir: has(abi::FOPEN_CACHE_DIR),
    }
}

/// Decodes the reply to CREATE and TMPFILE.
///
/// # Errors
///
/// `EIO` for an invalid entry, or one that is not a regular file.
pub fn create_out(body: &[u8]) -> Result<(Entry, OpenReply)> {
    let out: crate::reply::CreateOut = decode_whole(body)?;
    let made = entry(&out.entry)?.ok_or(Errno::EIO)?;
    if made.ino == Ino::ROOT || made.attr.kind != FileKind::Regular {
        return Err(Errno::EIO);
    }
    Ok((made, decode_open_out(&out.open)))
}

/// The lookup and the handle in a reply that was refused. The client returns them.
pub fn find_granted(body: &[u8], with_open: bool) -> (Option<Ino>, Option<Fh>) {
    let Ok((out, rest)) = abi::EntryOut::read_from_prefix(body) else { return (None, None) };
    let known = out.nodeid != 0 && out.nodeid != abi::FUSE_ROOT_ID;
    let open = abi::OpenOut::read_from_prefix(rest).ok().filter(|_| with_open);
    (known.then_some(Ino(out.nodeid)), open.map(|(out, _)| Fh(out.fh)))
}

/// Decodes the reply to WRITE or COPY_FILE_RANGE of `most` bytes.
///
/// # Errors
///
/// `EIO` if it exceeds `most`.
pub fn write_out(body: &[u8], most: u64) -> Result<u64> {
    let out: abi::WriteOut = decode_whole(body)?;
    let count = u64::from(out.size);
    if count > most { Err(Errno::EIO) } else { Ok(count) }
}

/// Decodes the reply to READLINK. As in the kernel, the target ends at a NUL and is shorter than a
/// page.
///
/// # Errors
///
/// `EIO` for a target that is empty or too long.
pub fn link_out(body: &[u8]) -> Result<Vec<u8>> {
    let target = body.split(|&byte| byte == 0).next().unwrap_or_default();
    let fits = !target.is_empty() && body.len() < 4096;
    if fits { Ok(target.to_vec()) } else { Err(Errno::EIO) }
}

/// Decodes the reply to STATFS.
///
/// # Errors
///
/// `EIO` for another length.
pub fn statfs_out(body: &[u8]) -> Result<StatFs> {
    let st = decode_whole::<abi::StatfsOut>(body)?.st;
    Ok(StatFs {
        blocks: st.blocks,
        blocks_free: st.bfree,
        blocks_available: st.bavail,
        files: st.files,
        files_free: st.ffree,
        bsize: st.bsize,
        // statvfs(3) replaces 0 by the block size; the kernel's convert_fuse_statfs does not.
        frsize: if st.frsize == 0 { st.bsize } else { st.frsize },
        name_max: st.namelen,
    })
}

/// Decodes the reply to GETLK: the conflicting lock, if any.
///
/// # Errors
///
/// `EIO` for an invalid lock.
pub fn lk_out(body: &[u8]) -> Result<Option<Lock>> {
    let lk = decode_whole::<abi::LkOut>(body)?.lk;
    let typ = match lk.type_ {
        0 => LockType::Read,
        1 => LockType::Write,
        2 => return Ok(None),
        _ => return Err(Errno::EIO),
    };
    // convert_fuse_file_lock.
    if lk.start > lk.end || lk.start > i64::MAX as u64 {
        return Err(Errno::EIO);
    }
    Ok(Some(Lock { typ, start: lk.start, end: lk.end, pid: lk.pid }))
}

/// One entry of a listing.
#[derive(Debug)]
pub struct ListingEntry<'a> {
    /// `d_ino` of readdir(3).
    pub ino: u64,
    /// The position of the next entry, never 0.
    pub next: u64,
    /// The type of the inode.
    pub kind: FileKind,
    /// The name, which is valid.
    pub name: &'a [u8],
    /// READDIRPLUS: the inode of the name; `None` if the server did not look it up.
    pub entry: Option<Entry>,
    /// READDIRPLUS: the inode to which the reply added a lookup.
    pub looked_up: Option<Ino>,
}

/// The entries of a reply to READDIR or READDIRPLUS. A truncated entry ends the listing, as in the
/// kernel (`parse_dirfile`). Any other error is `EIO`, and ends it too.
pub struct ListingEntries<'a> {
    rest: &'a [u8],
    plus: bool,
}

impl<'a> ListingEntries<'a> {
    /// The entries in `body`; `plus` for READDIRPLUS.
    pub fn new(body: &'a [u8], plus: bool) -> Self {
        ListingEntries { rest: body, plus }
    }

    fn step(&mut self) -> Option<Result<ListingEntry<'a>>> {
        let rest = std::mem::take(&mut self.rest);
        let (out, after) = if self.plus {
            let (out, after) = abi::EntryOut::read_from_prefix(rest).ok()?;
            (Some(out), after)
        } else {
            (None, rest)
        };
        let (dirent, after) = abi::Dirent::read_from_prefix(after).ok()?;
        let len = dirent.namelen as usize;
        let head = rest.len() - after.len();
        let size = head.checked_add(len).map(abi::rec_align)?;
        if size > rest.len() {
            return None;
        }
        let name = &after[..len];
        let bad = name.is_empty() || len > NAME_MAX || name.iter().any(|&b| b == b'/' || b == 0);
        // A position of 0 would restart the listing.
        if bad || dirent.off == 0 {
            return Some(Err(Errno::EIO));
        }
        self.rest = &rest[size..];
        Some(decode_listed(out, &dirent, name))
    }
}

fn decode_listed<'a>(
    out: Option<abi::EntryOut>,
    dirent: &abi::Dirent,
    name: &'a [u8],
) -> Result<ListingEntry<'a>> {
    // `DT_UNKNOWN` and invalid types become a regular file, which is the least harmful: no program
    // descends into it without a check.
    let kind = FileKind::from_mode(dirent.type_ << 12).unwrap_or(FileKind::Regular);
    let dots = name == b"." || name == b"..";
    let node = out.filter(|out| out.nodeid != 0 && !dots);
    let looked_up = node.map(|out| Ino(out.nodeid)).filter(|&ino| ino != Ino::ROOT);
    // With invalid attributes there is no entry, and the client returns the lookup.
    let entry = node.and_then(|out| entry(&out).ok().flatten()).filter(|e| e.ino != Ino::ROOT);
    Ok(ListingEntry { ino: dirent.ino, next: dirent.off, kind, name, entry, looked_up })
}

impl<'a> Iterator for ListingEntries<'a> {
    type Item = Result<ListingEntry<'a>>;

    fn next(&mut self) -> Option<Result<ListingEntry<'a>>> {
        if self.rest.is_empty() { None } else { self.step() }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;
    use crate::reply::DirEncoder;

    fn file() -> abi::Attr {
        abi::Attr { ino: 5, mode: 0o100644, nlink: 1, ..abi::Attr::default() }
    }

    #[test]
    fn impossible_attributes_are_refused() {
        let good = abi::AttrOut {
            attr: file(),
            attr_valid: u64::MAX,
            attr_valid_nsec: u32::MAX,
            dummy: 0,
        };
        let decoded = attr_out(good.as_bytes()).unwrap();
        assert_eq!((decoded.kind, decoded.perm, decoded.blksize), (FileKind::Regular, 0o644, 4096));
        assert!(decoded.valid_for.as_secs() >= u64::from(u32::MAX));
        for bad in [abi::Attr { mode: 0o644, ..file() }, abi::Attr { size: 1 << 63, ..file() }] {
            assert_eq!(attr_out(abi::AttrOut { attr: bad, ..good }.as_bytes()), Err(Errno::EIO));
        }
        assert_eq!(attr_out(&good.as_bytes()[1..]), Err(Errno::EIO));
        assert_eq!(attr_out(&[good.as_bytes(), &[0]].concat()), Err(Errno::EIO));
    }

    /// An example of libfuse, `memfs_ll`, leaves the nanoseconds of its inodes uninitialised. Each
    /// access failed with EIO, while a kernel mount shows the file.
    #[test]
    fn values_that_the_kernel_corrects_are_corrected() {
        let wild = u32::MAX;
        let attr = abi::Attr { atimensec: wild, mtimensec: wild, ctimensec: 7, ..file() };
        let out = abi::AttrOut { attr, attr_valid: 1, attr_valid_nsec: wild, dummy: wild };
        let seen = attr_out(out.as_bytes()).unwrap();
        let nanos = [seen.atime.nanos, seen.mtime.nanos, seen.ctime.nanos];
        assert_eq!(nanos, [999_999_999, 999_999_999, 7]);
        let mut statx = abi::StatxOut::default();
        statx.stat = abi::Statx { mask: STATX_BASIC | STATX_BTIME, mode: 0o100644, ..statx.stat };
        statx.stat.btime.tv_nsec = wild;
        let seen = statx_out(statx.as_bytes()).unwrap().unwrap();
        assert_eq!(seen.btime.unwrap().nanos, 999_999_999);
        // A server that returns fewer fields gets a GETATTR.
        statx.stat.mask = STATX_BTIME;
        assert_eq!(statx_out(statx.as_bytes()), Ok(None));
        assert_eq!(link_out(b"target\0rest"), Ok(b"target".to_vec()));
        assert_eq!(link_out(b"\0"), Err(Errno::EIO));
        assert_eq!(link_out(&[b'x'; 4096]), Err(Errno::EIO));
    }

    #[test]
    fn attributes_beside_a_name_are_those_that_were_told() {
        let time = |secs| Timestamp { secs, nanos: 5 };
        for btime in [None, Some(time(-7))] {
            let attr = Attr {
                btime,
                atime: time(-1),
                rdev: 259 << 8 | 7,
                ..attr(&abi::Attr { nlink: 2, ino: 9, ..file() }, Duration::ZERO).unwrap()
            };
            assert_eq!(
                decode_published_attr(&crate::convert::encode_published_attr(&attr)),
                Ok(attr)
            );
        }
        let bad =
            PublishedAttr { attr: abi::Attr { mode: 0, ..file() }, ..PublishedAttr::default() };
        assert_eq!(decode_published_attr(&bad), Err(Errno::EIO));
    }

    #[test]
    fn a_lookup_leads_to_a_node_that_is_not_the_root() {
        let out = |nodeid| abi::EntryOut { nodeid, attr: file(), ..abi::EntryOut::default() };
        assert_eq!(lookup_out(out(7).as_bytes(), false).unwrap().ino, Ino(7));
        assert_eq!(lookup_out(out(0).as_bytes(), false), Err(Errno::ENOENT));
        assert_eq!(lookup_out(out(1).as_bytes(), false), Err(Errno::EIO));
        assert!(lookup_out(out(1).as_bytes(), true).is_ok());
        assert_eq!(decode_created_entry(out(0).as_bytes(), None), Err(Errno::EIO));
        assert_eq!(
            decode_created_entry(out(7).as_bytes(), Some(FileKind::Directory)),
            Err(Errno::EIO)
        );
    }

    #[test]
    fn a_listing_round_trips() {
        let mut buf = [0; 600];
        let mut dir = DirEncoder::new(&mut buf);
        let entry = abi::EntryOut { nodeid: 9, attr: file(), ..abi::EntryOut::default() };
        dir.push_plus(b".", 1, &abi::EntryOut { nodeid: 3, ..entry }).unwrap();
        dir.push_plus(b"name", 2, &entry).unwrap();
        dir.push_plus(b"unseen", 3, &abi::EntryOut { nodeid: 0, ..entry }).unwrap();
        let len = dir.len();
        let items: Vec<_> = ListingEntries::new(&buf[..len], true).collect::<Result<_>>().unwrap();
        let seen = |at: usize| (items[at].name, items[at].next, items[at].looked_up);
        assert_eq!(seen(0), (&b"."[..], 1, None));
        assert_eq!(seen(1), (&b"name"[..], 2, Some(Ino(9))));
        assert_eq!(seen(2), (&b"unseen"[..], 3, None));
        assert!(items[1].entry.is_some() && items[2].entry.is_none());
        // The last entry is truncated. Earlier ones count.
        assert_eq!(ListingEntries::new(&buf[..len - 8], true).count(), 2);
    }

    #[test]
    fn an_invalid_name_ends_a_listing() {
        let dirent = |namelen, off| abi::Dirent { ino: 1, off, namelen, type_: 8 };
        let of = |dirent: abi::Dirent, name: &[u8]| {
            let bytes = [dirent.as_bytes(), name].concat();
            ListingEntries::new(&bytes, false).map(|item| item.map(drop)).collect::<Vec<_>>()
        };
        assert_eq!(of(dirent(3, 1), b"abc\0\0\0\0\0"), [Ok(())]);
        for bad in [
            of(dirent(0, 1), b"abc\0\0\0\0\0"),
            of(dirent(3, 0), b"abc\0\0\0\0\0"),
            of(dirent(3, 1), b"a/c\0\0\0\0\0"),
            of(dirent(3, 1), b"a\0c\0\0\0\0\0"),
            of(dirent(300, 1), &[b'x'; 304]),
        ] {
            assert_eq!(bad, [Err(Errno::EIO)]);
        }
        assert!(of(dirent(u32::MAX, 1), b"abc\0\0\0\0\0").is_empty());
    }
}
