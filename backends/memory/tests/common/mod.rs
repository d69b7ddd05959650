//! Helpers to call a file system.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use defuse_fs::*;
use defuse_memory::{MemoryFileSystem, MemoryOptions};

pub const FH: Fh = Fh(0);

pub fn root() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

pub fn user() -> Context<'static> {
    Context::new(Caller { uid: 1000, gid: 1000, pid: 2 })
}

pub fn memory(size: Option<u64>, inodes: Option<u64>) -> MemoryFileSystem {
    MemoryFileSystem::new(MemoryOptions { size, inodes, ..MemoryOptions::default() })
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

pub fn xattr(text: &str) -> XattrName<'_> {
    XattrName::new(text.as_bytes()).unwrap()
}

pub fn node(kind: FileKind, perm: u32) -> NewNode<'static> {
    NewNode::new(kind, perm, root().caller)
}

pub fn file(fs: &MemoryFileSystem, parent: Ino, text: &str) -> Ino {
    fs.mknod(&root(), parent, name(text), &node(FileKind::Regular, 0o644)).unwrap().ino
}

pub fn dir(fs: &MemoryFileSystem, parent: Ino, text: &str) -> Ino {
    fs.mkdir(&root(), parent, name(text), &node(FileKind::Directory, 0o755)).unwrap().ino
}

/// An inode without an open file.
pub fn handle(ino: Ino) -> File {
    File { ino, fh: FH }
}

pub fn open(fs: &MemoryFileSystem, ino: Ino) -> File {
    File { ino, fh: fs.open(&root(), ino, OpenArgs::default()).unwrap().fh }
}

pub fn write(fs: &MemoryFileSystem, ino: Ino, offset: u64, bytes: &[u8]) -> Result<usize> {
    write_open(fs, handle(ino), offset, bytes)
}

pub fn write_open(fs: &MemoryFileSystem, file: File, offset: u64, bytes: &[u8]) -> Result<usize> {
    let args = WriteArgs { offset, ..WriteArgs::default() };
    fs.write(&root(), file, args, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
}

pub fn read(fs: &MemoryFileSystem, ino: Ino, offset: u64, len: usize) -> Result<Vec<u8>> {
    read_open(fs, handle(ino), offset, len)
}

pub fn read_open(fs: &MemoryFileSystem, file: File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut memory = vec![0xee; len];
    let mut sink = SliceSink::new(&mut memory);
    let mut out = ReadBuf::new(&mut sink, len);
    fs.read(&root(), file, ReadArgs { offset, ..ReadArgs::default() }, &mut out)?;
    let filled = out.filled_len();
    memory.truncate(filled);
    Ok(memory)
}

pub fn rename(fs: &MemoryFileSystem, from: (Ino, &str), to: (Ino, &str), flags: u32) -> Result<()> {
    fs.rename(&root(), (from.0, name(from.1)), (to.0, name(to.1)), RenameFlags(flags))
}

/// Lists a directory, `room` entries at a time.
#[derive(Default)]
pub struct DirLister {
    pub room: usize,
    pub entries: bool,
    /// The handle of the directory; 0 if it is not open.
    pub fh: Fh,
    pub names: Vec<String>,
    pub last: u64,
    pub inos: Vec<Option<Ino>>,
}

impl DirSink for DirLister {
    fn wants_entries(&self) -> bool {
        self.entries
    }
    fn fits(&self, _: usize) -> bool {
        self.room > 0
    }
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        self.room -= 1;
        self.names.push(String::from_utf8(item.name.to_vec()).unwrap());
        self.last = item.next;
        self.inos.push(entry.map(|entry| entry.ino));
    }
}

impl DirLister {
    /// Lists up to `room` more entries, and returns their number.
    pub fn list_more(&mut self, fs: &MemoryFileSystem, dir: Ino, room: usize) -> usize {
        let before = self.names.len();
        self.room = room;
        let from = self.last;
        let dir = File { ino: dir, fh: self.fh };
        fs.readdir(&root(), dir, from, &mut DirBuf::new(self)).unwrap();
        self.names.len() - before
    }
}

/// Submits a wait for a lock; returns where the answer will come, and the interrupt.
pub fn wait_lock(
    fs: &MemoryFileSystem,
    ino: Ino,
    lock: LockRequest,
) -> (Receiver<Result<()>>, Arc<InterruptToken>) {
    let (sender, receiver) = channel();
    let token = Arc::new(InterruptToken::default());
    let answer = Box::new(move |taken| {
        let _ = sender.send(taken);
    });
    let lock = (handle(ino), lock);
    fs.setlkw(LockWait::new(lock, root().caller, 7, Arc::clone(&token), answer));
    (receiver, token)
}
