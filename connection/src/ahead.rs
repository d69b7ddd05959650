//! Several small files of a directory, opened and read by one call: for a client that opens one after the other.

use defuse_fs::{
    AccessMode, Context, Errno, File, FileKind, FileSystem, Ino, Name, OpenArgs, OpenFlags,
    OpenReply, PathResolution, ReadArgs, ReadBuf, ReleaseArgs, Result, SliceSink,
};

use crate::connection::PeerConnection;
use crate::pages::WholeBytes;
use crate::rules::{EXEC, READ};
use crate::steps::{DirectoryNames, look};

/// The most names that one call looks at.
const MOST_NAMES: usize = 256;

/// The files that a client wants to have opened.
#[derive(Clone, Copy, Debug)]
pub struct WantedFiles {
    /// The position in the directory: 0, or as returned by the call before.
    pub from: u64,
    /// The flags of open(2).
    pub flags: OpenFlags,
    /// The most files.
    pub most: usize,
    /// The most bytes of a file.
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
    /// Opens small regular files of the directory `dir` for reading, those that the client may open, and tells `told` of each. It
    /// returns false for a file that it cannot take, and for all after that. `version` is that of the attributes of an inode, `None`
    /// where nobody can tell whether the file changes.
    ///
    /// Returns the position for the next call; `None` at the end of the directory.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EAGAIN` after the client has lost a lock, of which the next call tells; `EINVAL` for
    /// other flags than those of reading; `EACCES` where the user may not read or search the directory; those of opendir(3) and readdir(3); `ENOSYS` for a file system that cannot resolve paths.
    pub fn open_ahead(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        wanted: WantedFiles,
        version: impl Fn(Ino) -> Option<u64>,
        mut told: impl FnMut(WholeOpenFile) -> bool,
    ) -> Result<Option<u64>> {
        // The client is told of a lock that it has lost by a call whose error somebody sees.
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
        let listed = DirectoryNames::list(call.fs, cx, dir, (wanted.from, MOST_NAMES))?;
        let mut count = 0;
        let mut at = wanted.from;
        for (bytes, next) in &listed.all {
            // The other half of the files that the client may have open are for those that it asks for.
            if count == wanted.most || !self.ledger.usage.has_room_ahead() {
                return Ok(Some(at));
            }
            // The listing has . and .., which are no names.
            let looked = Name::new(bytes).map(|name| look(&self.ledger, &call, cx, (dir, name)));
            let found = match looked {
                Ok(Err(Errno::ENOSYS)) => return Err(Errno::ENOSYS),
                Ok(Ok(PathResolution::Inode { ino, attr, .. })) => Some((ino, attr)),
                _ => None,
            };
            let is_small = found.filter(|(_, attr)| {
                attr.kind == FileKind::Regular && attr.size <= wanted.most_bytes as u64
            });
            if let Some((ino, _)) = is_small {
                // One that cannot be opened is left to the open that asks for it.
                if let Ok(file) = self.open_whole(cx, ino, wanted, &version) {
                    let (ino, fh) = (file.ino, file.opened.fh);
                    if !told(file) {
                        self.close_ahead(cx, File { ino, fh }, (wanted.flags, false));
                        return Ok(Some(at));
                    }
                    count += 1;
                }
            }
            at = *next;
        }
        Ok((!listed.is_end).then_some(at))
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
        match self.whole(cx, file, wanted.most_bytes) {
            Some(whole) if version(ino) == Some(before) => {
                Ok(WholeOpenFile { ino, opened, version: before, whole })
            }
            _ => {
                self.close_ahead(cx, file, (wanted.flags, false));
                Err(Errno::EAGAIN)
            }
        }
    }

    /// Closes a file that was opened for reading. The access time follows if the client has read bytes that came with the open.
    pub fn close_ahead(&self, cx: &Context<'_>, file: File, (flags, has_read): (OpenFlags, bool)) {
        if has_read && !self.has_lost() {
            let mut byte = [0];
            let mut sink = SliceSink::new(&mut byte);
            let _ = self.read(cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 1));
        }
        let _ = self.release(cx, file, ReleaseArgs::of(flags));
    }
}
