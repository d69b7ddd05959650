//! A small file system: one directory of files in memory, behind one lock.
//!
//! docs/writing-a-file-system.md explains the contract with it. It is tested like every other
//! backend, and `defuse` opens it as `example:`.
//!
//! It is not for use: it has no directories below the root, no links, no rename and no extended
//! attributes (`ENOSYS`), and performs one operation at a time. `defuse-memory` has all of these.

#![forbid(unsafe_code)]

mod kind;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_fs::posix::{CreateParent, new_inode};
use defuse_fs::*;

pub use kind::KIND;

/// Maximum size of a file in bytes. A write may begin at any offset, and must not take all memory.
const MAX_BYTES: u64 = 1 << 20;

/// The file system.
pub struct Example {
    /// Maximum number of inodes, including the root.
    max_inodes: usize,
    state: Mutex<ExampleState>,
}

struct ExampleState {
    names: BTreeMap<Vec<u8>, Ino>,
    inodes: BTreeMap<Ino, ExampleInode>,
    /// The last inode number. No number is used twice.
    last: u64,
}

struct ExampleInode {
    attr: Attr,
    bytes: Vec<u8>,
    /// Lookups that frontends hold.
    lookups: u64,
}

impl Example {
    /// A file system for up to `max_inodes` inodes, including the root.
    pub fn new(max_inodes: usize) -> Self {
        let node = NewNode::new(FileKind::Directory, 0o1777, Caller::default());
        let root =
            ExampleInode { attr: Attr::for_new(Ino::ROOT, &node), bytes: Vec::new(), lookups: 0 };
        let inodes = BTreeMap::from([(Ino::ROOT, root)]);
        let state = ExampleState { names: BTreeMap::new(), inodes, last: Ino::ROOT.0 };
        Example { max_inodes, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, ExampleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExampleState {
    fn inode(&mut self, ino: Ino) -> Result<&mut ExampleInode> {
        self.inodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn find(&self, parent: Ino, name: Name<'_>) -> Result<Ino> {
        let is_root = parent == Ino::ROOT;
        let found = is_root.then(|| self.names.get(name.as_bytes())).ok_or(Errno::ENOTDIR)?;
        found.copied().ok_or(Errno::ENOENT)
    }

    /// Returns the entry of an inode, and adds a lookup.
    fn entry(&mut self, ino: Ino) -> Result<Entry> {
        let inode = self.inode(ino)?;
        inode.lookups += 1;
        Ok(Entry { ino, generation: 0, attr: inode.attr, valid_for: Duration::ZERO })
    }

    /// Frees an inode that has neither a name nor lookups.
    fn free_unused(&mut self, ino: Ino) {
        let is_unused = |inode: &ExampleInode| inode.attr.nlink == 0 && inode.lookups == 0;
        if self.inodes.get(&ino).is_some_and(is_unused) {
            self.inodes.remove(&ino);
        }
    }
}

impl ExampleInode {
    fn resize(&mut self, size: u64) -> Result<()> {
        match self.attr.kind {
            FileKind::Directory => return Err(Errno::EISDIR),
            _ if size > MAX_BYTES => return Err(Errno::EFBIG),
            _ => self.bytes.resize(size as usize, 0),
        }
        let (now, blocks) = (Timestamp::now(), size.div_ceil(512));
        self.attr = Attr { size, blocks, mtime: now, ctime: now, ..self.attr };
        Ok(())
    }
}

impl FileSystem for Example {
    fn lookup(&self, _: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let mut state = self.state();
        let ino = state.find(parent, name)?;
        state.entry(ino)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        let mut state = self.state();
        if let Ok(inode) = state.inode(ino) {
            inode.lookups = inode.lookups.saturating_sub(lookups);
        }
        state.free_unused(ino);
    }

    fn getattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>) -> Result<Attr> {
        Ok(self.state().inode(ino)?.attr)
    }

    fn setattr(&self, _: &Context<'_>, ino: Ino, _: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        let mut state = self.state();
        let inode = state.inode(ino)?;
        // First, because nothing else can fail.
        set.size.map_or(Ok(()), |size| inode.resize(size))?;
        set.apply(&mut inode.attr);
        Ok(inode.attr)
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let state = &mut *self.state();
        match state.find(parent, name) {
            Err(Errno::ENOENT) if node.kind != FileKind::Regular => return Err(Errno::EOPNOTSUPP),
            Err(Errno::ENOENT) if state.inodes.len() >= self.max_inodes => {
                return Err(Errno::ENOSPC);
            }
            Err(Errno::ENOENT) => state.last += 1,
            found => return Err(found.err().unwrap_or(Errno::EEXIST)),
        }
        let ino = Ino(state.last);
        let root = &mut state.inode(Ino::ROOT)?.attr;
        (root.mtime, root.ctime) = (Timestamp::now(), Timestamp::now());
        let parent = CreateParent { perm: root.perm, gid: root.gid, default_acl: None };
        let made = new_inode(parent, node, cx.caller.uid == 0);
        let attr = Attr { perm: made.perm, gid: made.gid, ..Attr::for_new(ino, node) };
        state.inodes.insert(ino, ExampleInode { attr, bytes: Vec::new(), lookups: 0 });
        state.names.insert(name.as_bytes().to_vec(), ino);
        state.entry(ino)
    }

    fn unlink(&self, _: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        let mut state = self.state();
        let ino = state.find(parent, name)?;
        state.names.remove(name.as_bytes());
        state.inode(ino)?.attr.nlink = 0;
        state.free_unused(ino);
        Ok(())
    }

    fn read(
        &self,
        _: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let mut state = self.state();
        let bytes = &state.inode(file.ino)?.bytes;
        let start = args.offset.min(bytes.len() as u64) as usize;
        out.put(&bytes[start..]).map(drop)
    }

    fn write(
        &self,
        _: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut state = self.state();
        let inode = state.inode(file.ino)?;
        let appends = args.flags.has(OpenFlags::APPEND) && !args.from_cache;
        let start = if appends { inode.attr.size } else { args.offset };
        let end = start.checked_add(data.remaining() as u64).ok_or(Errno::EFBIG)?;
        if end > start {
            inode.resize(end.max(inode.attr.size))?;
        }
        data.take(inode.bytes.get_mut(start as usize..end as usize).unwrap_or_default())
    }

    /// The position after an entry is its inode number plus one, which other names do not change.
    fn readdir(&self, _: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        if dir.ino != Ino::ROOT {
            return Err(Errno::ENOTDIR);
        }
        let state = self.state();
        let mut entries: Vec<_> =
            state.names.iter().map(|(name, ino)| (ino.0 + 1, &name[..])).collect();
        entries.extend([(1, &b"."[..]), (2, b"..")]);
        entries.sort_unstable();
        for (next, name) in entries.into_iter().filter(|(next, _)| *next > from) {
            let (ino, kind) = match next {
                1 | 2 => (Ino::ROOT.0, FileKind::Directory),
                _ => (next - 1, FileKind::Regular),
            };
            if out.push(DirItem { ino, next, kind, name }) == PushOutcome::Full {
                break;
            }
        }
        Ok(())
    }
}
