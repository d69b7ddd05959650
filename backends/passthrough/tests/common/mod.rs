//! Shared by the tests of this crate: a served directory, and short forms of the operations.

#![allow(dead_code)]

use std::path::{Path, PathBuf};

use defuse_fs::*;
use defuse_passthrough::{Passthrough, PassthroughOptions};

/// A served directory, usually a temporary one.
pub struct ServedDirectory {
    pub fs: Passthrough,
    path: PathBuf,
    _dir: Option<tempfile::TempDir>,
}

impl Drop for ServedDirectory {
    fn drop(&mut self) {
        // The directory is in a sticky one and is removed after this.
        self.act_as_myself();
    }
}

/// The directories that tests run in: a tmpfs, and the default directory, which is on a disk.
pub fn bases() -> Vec<PathBuf> {
    let shm = PathBuf::from("/dev/shm");
    let mut bases = vec![std::env::temp_dir()];
    bases.extend(shm.is_dir().then_some(shm));
    bases
}

/// Runs `test` in every base, with and without file handles.
pub fn run_everywhere(options: &PassthroughOptions, test: impl Fn(&ServedDirectory)) {
    for base in bases() {
        for file_handles in
            [defuse_passthrough::FileHandles::Auto, defuse_passthrough::FileHandles::Off]
        {
            let options = PassthroughOptions { file_handles, ..options.clone() };
            eprintln!("{} {file_handles:?}", base.display());
            test(&ServedDirectory::new(&base, options));
        }
    }
}

/// True for root. Otherwise prints that the test is skipped.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can act as other users, and mount");
    }
    root
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

pub fn cx(uid: u32, gid: u32) -> Context<'static> {
    Context::new(Caller { uid, gid, pid: 0 })
}

/// The context of the process itself.
pub fn own_context() -> Context<'static> {
    cx(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

pub fn regular(cx: &Context<'_>, perm: u32) -> NewNode<'static> {
    NewNode::new(FileKind::Regular, perm, cx.caller)
}

pub fn flags(flags: u32) -> OpenArgs {
    OpenArgs { flags: OpenFlags(flags), kill_suidgid: false }
}

impl ServedDirectory {
    pub fn new(base: &Path, options: PassthroughOptions) -> Self {
        let dir = tempfile::Builder::new().prefix("defuse-pt-").tempdir_in(base).unwrap();
        let mut served = ServedDirectory::serve(dir.path(), options);
        served._dir = Some(dir);
        served
    }

    /// Serves a directory that stays.
    pub fn serve(path: &Path, options: PassthroughOptions) -> Self {
        let fs = Passthrough::new(path, options).unwrap();
        ServedDirectory { fs, path: path.to_path_buf(), _dir: None }
    }

    /// Makes this thread act as the process again, since it keeps the credentials of its last
    /// operation.
    pub fn act_as_myself(&self) {
        self.fs.statfs(&own_context(), Ino::ROOT).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn create(&self, text: &str) -> (Entry, File) {
        let cx = own_context();
        let args = flags(OpenFlags::RDWR | OpenFlags::CREAT | OpenFlags::EXCL);
        let (entry, opened) =
            self.fs.create(&cx, Ino::ROOT, name(text), &regular(&cx, 0o644), args).unwrap();
        (entry, File { ino: entry.ino, fh: opened.fh })
    }

    pub fn mkdir(&self, parent: Ino, text: &str) -> Entry {
        let cx = own_context();
        let node = NewNode::new(FileKind::Directory, 0o755, cx.caller);
        self.fs.mkdir(&cx, parent, name(text), &node).unwrap()
    }

    pub fn lookup(&self, text: &str) -> Result<Entry> {
        self.fs.lookup(&own_context(), Ino::ROOT, name(text))
    }

    pub fn open(&self, ino: Ino, bits: u32) -> Result<File> {
        self.fs.open(&own_context(), ino, flags(bits)).map(|opened| File { ino, fh: opened.fh })
    }

    pub fn read(&self, file: File, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut memory = vec![0; len];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, len);
        let args = ReadArgs { offset, ..ReadArgs::default() };
        self.fs.read(&own_context(), file, args, &mut out)?;
        let filled = out.filled_len();
        memory.truncate(filled);
        Ok(memory)
    }

    pub fn write(&self, file: File, args: WriteArgs, bytes: &[u8]) -> Result<usize> {
        let mut source = SliceSource::new(bytes);
        self.fs.write(&own_context(), file, args, &mut WriteBuf::new(&mut source))
    }

    pub fn write_at(&self, file: File, offset: u64, bytes: &[u8]) -> Result<usize> {
        self.write(file, WriteArgs { offset, ..WriteArgs::default() }, bytes)
    }

    pub fn release(&self, file: File) {
        self.fs.release(&own_context(), file, ReleaseArgs::default()).unwrap();
    }

    pub fn xattr(&self, ino: Ino, name: &str) -> Result<Vec<u8>> {
        let name = XattrName::new(name.as_bytes()).unwrap();
        match self.fs.getxattr(&own_context(), ino, name, 4096)? {
            Xattr::Value(value) => Ok(value),
            Xattr::Size(_) => panic!("a size for a buffer"),
        }
    }

    pub fn set_xattr(&self, ino: Ino, name: &str, value: &[u8]) -> Result<()> {
        let name = XattrName::new(name.as_bytes()).unwrap();
        self.fs.setxattr(&own_context(), ino, name, value, SetXattrFlags::default())
    }

    pub fn list(&self, ino: Ino, room: usize, plus: bool) -> Result<Vec<ListedEntry>> {
        let opened = self.fs.opendir(&own_context(), ino, OpenFlags::default())?;
        let dir = File { ino, fh: opened.fh };
        let (mut all, mut from) = (Vec::new(), 0);
        loop {
            let got = self.list_some(dir, from, room, plus)?;
            let Some(last) = got.last() else { break };
            from = last.next;
            all.extend(got);
        }
        self.fs.releasedir(&own_context(), dir)?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub fn list_some(
        &self,
        dir: File,
        from: u64,
        room: usize,
        plus: bool,
    ) -> Result<Vec<ListedEntry>> {
        let mut sink = EntryListing { room, plus, items: Vec::new() };
        self.fs.readdir(&own_context(), dir, from, &mut DirBuf::new(&mut sink))?;
        Ok(sink.items)
    }
}

/// An entry of a listing.
pub struct ListedEntry {
    pub name: String,
    pub ino: u64,
    pub next: u64,
    pub kind: FileKind,
    pub entry: Option<Entry>,
}

struct EntryListing {
    room: usize,
    plus: bool,
    items: Vec<ListedEntry>,
}

impl DirSink for EntryListing {
    fn wants_entries(&self) -> bool {
        self.plus
    }
    fn fits(&self, _: usize) -> bool {
        self.items.len() < self.room
    }
    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        self.items.push(ListedEntry {
            name: String::from_utf8_lossy(item.name).into_owned(),
            ino: item.ino,
            next: item.next,
            kind: item.kind,
            entry: entry.copied(),
        });
    }
}
