//! Small files that are read with their open, and several of a directory by one call: for a client
//! that opens them one after the other.

use defuse_fs::{
    AccessMode, Context, Errno, File, FileKind, FileSystem, Ino, Name, OpenArgs, OpenFlags,
    OpenReply, PathResolution, ReadArgs, ReadBuf, ReleaseArgs, Result, SliceSink, Timestamp,
};

use crate::call::CheckedCall;
use crate::connection::PeerConnection;
use crate::rules::{EXEC, READ};
use crate::steps::{DirectoryNames, resolve_name};

/// The maximum number of names that one call examines.
const MOST_NAMES: usize = 256;

/// The names that are listed beyond the number of wanted files.
const OTHER_NAMES: usize = 4;

/// All bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeBytes {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// True if reading changes the access time, which has not happened.
    pub read_is_due: bool,
}

/// The files that a client requests to be opened.
#[derive(Clone, Copy, Debug)]
pub struct WantedFiles {
    /// The position in the directory: 0, or as returned by the call before.
    pub from: u64,
    /// The flags of open(2).
    pub flags: OpenFlags,
    /// The maximum number of files.
    pub most: usize,
    /// The maximum number of bytes of a file.
    pub most_bytes: usize,
}

/// A file that was opened, with all of its bytes.
#[derive(Debug)]
pub struct WholeOpenFile {
    /// The inode, without a lookup.
    pub ino: Ino,
    /// The open file.
    pub opened: OpenReply,
    /// The version of the attributes, which has not changed since before the open.
    pub version: u64,
    /// The bytes.
    pub whole: WholeBytes,
}

impl<F: FileSystem> PeerConnection<F> {
    /// Checks that the client has the file open for reading.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EBADF` for an open file of others; `EACCES` where
    /// it is not open for reading.
    pub fn may_read(&self, cx: &Context<'_>, file: File) -> Result<()> {
        self.check(cx, &[file.ino])?;
        let modes = self.ledger.modes(file).ok_or(Errno::EBADF)?;
        if modes.reads { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Returns all bytes of an open file that has at most `most`. `None` if it has more, is not a
    /// regular file or is mapped, and after any error.
    pub fn read_whole(&self, cx: &Context<'_>, file: File, most: usize) -> Option<WholeBytes> {
        let attr = self.getattr(cx, file.ino, Some(file.fh)).ok()?;
        let size = usize::try_from(attr.size).ok().filter(|size| *size <= most)?;
        if attr.kind != FileKind::Regular || self.is_mapped(file.ino) {
            return None;
        }
        let mut bytes = vec![0; size];
        let args = ReadArgs { flags: OpenFlags(OpenFlags::NOATIME), ..ReadArgs::default() };
        let mut sink = SliceSink::new(&mut bytes);
        let mut out = ReadBuf::new(&mut sink, size);
        if size > 0 {
            self.read(cx, file, args, &mut out).ok()?;
        }
        let is_whole = out.filled_len() == size;
        let read_is_due = attr.read_is_due(Timestamp::now());
        is_whole.then_some(WholeBytes { bytes, read_is_due })
    }

    /// Opens small regular files of the directory `dir` for reading, as far as the client may open
    /// them, and reports each by the callback. The callback returns false for a file that it cannot
    /// take, and for all after that. `version` returns the version of an inode's attributes, or
    /// `None` if changes of the file cannot be noticed.
    ///
    /// Returns the position for the next call; `None` at the end of the directory.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EAGAIN` after the client has lost a lock, which the
    /// next call reports; `EINVAL` for flags other than the flags of reading; `EACCES` if the user
    /// may not read or search the directory; the errors of opendir(3) and readdir(3); `ENOSYS` for
    /// a file system that cannot resolve paths.
    pub fn open_ahead(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        wanted: WantedFiles,
        version: impl Fn(Ino) -> Option<u64>,
        mut report: impl FnMut(WholeOpenFile) -> bool,
    ) -> Result<Option<u64>> {
        // A call whose error reaches the program reports a lost lock to the client.
        if self.has_lost() {
            return Err(Errno::EAGAIN);
        }
        let call = self.check(cx, &[dir])?;
        let others = OpenFlags::TRUNC | OpenFlags::CREAT | OpenFlags::DIRECTORY;
        if wanted.flags.access() != AccessMode::Read || wanted.flags.0 & others != 0 {
            return Err(Errno::EINVAL);
        }
        call.guard(|guard| guard.permit(dir, READ | EXEC))?;
        if !self.ledger.usage.has_room_ahead() {
            return Ok(Some(wanted.from));
        }
        let (mut count, mut at, mut left) = (0, wanted.from, MOST_NAMES);
        // Most names of such a directory are small files.
        let mut piece = wanted.most + OTHER_NAMES;
        while left > 0 {
            let listed = DirectoryNames::list(call.fs, cx, dir, (at, piece.min(left)))?;
            for (bytes, next) in &listed.all {
                // The other half of the files that the client may have open is left for its own
                // opens.
                if count == wanted.most || !self.ledger.usage.has_room_ahead() {
                    return Ok(Some(at));
                }
                if let Some(file) = self.open_small(&call, cx, (dir, bytes), (wanted, &version))? {
                    let (ino, fh) = (file.ino, file.opened.fh);
                    if !report(file) {
                        self.close_ahead(cx, File { ino, fh }, (wanted.flags, false));
                        return Ok(Some(at));
                    }
                    count += 1;
                }
                at = *next;
            }
            if listed.is_end {
                return Ok(None);
            }
            left -= listed.all.len().min(left);
            piece = MOST_NAMES;
        }
        Ok(Some(at))
    }

    /// Opens and reads the file of this name in a directory, if it is small and may be opened.
    /// Fails with `ENOSYS` for a file system that cannot resolve paths.
    fn open_small(
        &self,
        call: &CheckedCall<'_, F>,
        cx: &Context<'_>,
        (dir, name): (Ino, &[u8]),
        (wanted, version): (WantedFiles, &impl Fn(Ino) -> Option<u64>),
    ) -> Result<Option<WholeOpenFile>> {
        // The listing has . and .., which are no names.
        let Ok(name) = Name::new(name) else { return Ok(None) };
        let (ino, attr) = match resolve_name(&self.ledger, call, cx, (dir, name)) {
            Err(Errno::ENOSYS) => return Err(Errno::ENOSYS),
            Ok(PathResolution::Inode { ino, attr, .. }) => (ino, attr),
            _ => return Ok(None),
        };
        if attr.kind != FileKind::Regular || attr.size > wanted.most_bytes as u64 {
            return Ok(None);
        }
        // A file that cannot be opened is left to a later open of the client.
        Ok(self.open_whole(cx, ino, wanted, version).ok())
    }

    /// Opens a file and reads it. `EAGAIN` if it changes meanwhile, or is too large by now.
    fn open_whole(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        wanted: WantedFiles,
        version: &impl Fn(Ino) -> Option<u64>,
    ) -> Result<WholeOpenFile> {
        let before = version(ino).ok_or(Errno::EAGAIN)?;
        let args = OpenArgs { flags: wanted.flags, kill_suidgid: false };
        let opened = self.open(cx, ino, args)?;
        let file = File { ino, fh: opened.fh };
        match self.read_whole(cx, file, wanted.most_bytes) {
            Some(whole) if version(ino) == Some(before) => {
                Ok(WholeOpenFile { ino, opened, version: before, whole })
            }
            _ => {
                self.close_ahead(cx, file, (wanted.flags, false));
                Err(Errno::EAGAIN)
            }
        }
    }

    /// Closes a file that was opened for reading. Updates the access time if the client has read
    /// bytes in the reply to the open.
    pub fn close_ahead(&self, cx: &Context<'_>, file: File, (flags, has_read): (OpenFlags, bool)) {
        if has_read && !self.has_lost() {
            let mut byte = [0];
            let mut sink = SliceSink::new(&mut byte);
            let _ = self.read(cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 1));
        }
        let _ = self.release(cx, file, ReleaseArgs::from_flags(flags));
    }
}
