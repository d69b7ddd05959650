//! Directory listings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use defuse_fs::{
    CacheMode, DirBuf, DirItem, Errno, File, FileKind, Ino, OpenReply, PushOutcome, Result,
};
use rustix::fs::OFlags;

use crate::lower::{StatxResult, distinct_ino};
use crate::passthrough::Passthrough;
use crate::tables::dir_stream::{Dirent, ListedDir};
use crate::tables::inode::LowerInode;
use crate::tables::open_files::LowerOpenFile;

impl Passthrough {
    pub(crate) fn opendir(&self, ino: Ino) -> Result<OpenReply> {
        let inode = self.inodes.get(ino)?;
        if inode.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let fd = self.open_without_atime(&inode, OFlags::DIRECTORY | self.extra_flags())?;
        let fd = Arc::new(self.place_descriptor(fd));
        // It also serves what comes next: the attributes of the directory, and its names.
        if !inode.is_pinned() {
            self.cache_of(&inode).lend(&inode, &fd);
        }
        let lower = self.is_inherited().then(|| Arc::clone(&fd));
        let fh = self.files.insert(LowerOpenFile::directory(fd))?;
        // A cached listing is validated by the ctime of the directory, so it is trusted no longer
        // than attributes are.
        let cache_dir = self.options.cache != CacheMode::Direct;
        let cache = if cache_dir { CacheMode::Keep } else { CacheMode::Direct };
        Ok(OpenReply { cache_dir, cache, lower, ..OpenReply::new(fh) })
    }

    pub(crate) fn dir_file(&self, dir: File) -> Result<Arc<LowerOpenFile>> {
        let open = self.files.get(dir.fh)?;
        if open.dir.is_some() { Ok(open) } else { Err(Errno::ENOTDIR) }
    }

    pub(crate) fn readdir(&self, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let open = self.dir_file(dir)?;
        let inode = self.inodes.get(dir.ino)?;
        let of = ListedDir {
            fd: open.fd.as_fd(),
            ino: dir.ino,
            f_type: self.mounts.get(inode.key.mount).map(|mount| mount.f_type),
            tables: &self.positions,
            is_inherited: self.is_inherited(),
        };
        let stream = open.dir.as_ref().ok_or(Errno::ENOTDIR)?;
        let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.go_to(&of, from)?;
        let mut listed = false;
        loop {
            let before = stream.lower;
            let Some((positions, mut entry)) = stream.peek(&of)? else { break };
            let (len, lower) = (entry.len, entry.next);
            let next = self.positions.tell(positions, dir.ino, before, lower);
            entry.next = next;
            match self.push_entry(&inode, of.fd, &entry, out) {
                Some(PushOutcome::Full) => break,
                Some(PushOutcome::Added) => listed = true,
                None => {}
            }
            stream.advance(len, next, lower);
            // The next call would most often find the end, and the one after it once more.
            if listed && stream.is_drained() {
                break;
            }
        }
        Ok(())
    }

    /// `None` for an entry that is gone meanwhile, so that it need not be listed.
    fn push_entry(
        &self,
        inode: &Arc<LowerInode>,
        dir: BorrowedFd<'_>,
        entry: &Dirent<'_>,
        out: &mut DirBuf<'_>,
    ) -> Option<PushOutcome> {
        let kind = match entry.kind() {
            Some(kind) => kind,
            None if entry.is_dot() => FileKind::Directory,
            None => StatxResult::read_at(dir, entry.name).and_then(|stat| stat.kind()).ok()?,
        };
        let ino = distinct_ino(entry.ino, inode.key.mount);
        let item = DirItem { ino, next: entry.next, kind, name: entry.name };
        let pushed = out.push_with(item, || {
            if entry.is_dot() { None } else { self.lookup_in(inode, dir, entry.name).ok() }
        });
        Some(pushed)
    }
}
