//! A path file system in memory that checks its arguments.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use crate::path::{PathCaps, PathDirEntry, PathFile, PathFileSystem, PathOperand, PathRef};
use crate::{
    Attr, Context, Errno, Fh, FileKind, NewNode, OpenArgs, OpenReply, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, Result, Timestamp, WriteArgs, WriteBuf,
};

pub(crate) struct PathTestBackend {
    caps: PathCaps,
    state: Mutex<PathTestState>,
}

#[derive(Default)]
pub(crate) struct PathTestState {
    pub names: BTreeMap<Vec<u8>, u64>,
    files: HashMap<u64, PathTestInode>,
    pub open: HashMap<u64, u64>,
    last_fh: u64,
    /// Arbitrary numbers, for backends without stable ones.
    noise: u64,
}

struct PathTestInode {
    kind: FileKind,
    data: Vec<u8>,
    nlink: u32,
}

impl PathTestBackend {
    pub fn new(stable_ino: bool, handles_survive_unlink: bool) -> Self {
        let caps = PathCaps { stable_ino, handles_survive_unlink, ..PathCaps::default() };
        let mut state = PathTestState::default();
        state.add(b"/", FileKind::Directory);
        PathTestBackend { caps, state: Mutex::new(state) }
    }

    /// A backend whose handles survive, and that gets paths as long as there are any.
    pub fn with_paths(stable_ino: bool) -> Self {
        let mut backend = PathTestBackend::new(stable_ino, true);
        backend.caps.paths_while_named = true;
        backend
    }

    pub fn show_st_ino(&mut self) {
        self.caps.shows_st_ino = true;
    }

    pub fn state(&self) -> MutexGuard<'_, PathTestState> {
        // Gives other threads the chance to invalidate the path of this call.
        std::thread::yield_now();
        self.state.lock().unwrap()
    }

    /// Returns the inode of an open file, by its handle or by its path, as promised. If both are
    /// given, they must agree.
    fn file(&self, state: &PathTestState, file: PathFile<'_>) -> Result<u64> {
        let opened = *state.open.get(&file.fh.0).expect("a handle that is open");
        let may_lack = self.caps.handles_survive_unlink;
        if may_lack && (!self.caps.paths_while_named || file.path.is_none()) {
            assert_eq!(file.path, None);
            return Ok(opened);
        }
        let found = state.find(file.path()?)?;
        assert_eq!(found, opened, "the path of a handle leads to another file");
        Ok(found)
    }

    fn target(&self, state: &PathTestState, target: PathOperand<'_>) -> Result<u64> {
        match target {
            PathOperand::Path(path) => state.find(path),
            PathOperand::Open(file) => self.file(state, file),
        }
    }

    fn make(&self, path: PathRef<'_>, kind: FileKind) -> Result<()> {
        let mut state = self.state();
        state.parent(path)?;
        if state.names.contains_key(path.as_bytes()) {
            return Err(Errno::EEXIST);
        }
        state.add(path.as_bytes(), kind);
        Ok(())
    }
}

impl PathTestState {
    fn add(&mut self, path: &[u8], kind: FileKind) {
        // The lowest free number, to provoke errors by early reuse.
        let number = (1..).find(|number| !self.files.contains_key(number)).unwrap();
        self.files.insert(number, PathTestInode { kind, data: Vec::new(), nlink: 1 });
        self.names.insert(path.to_vec(), number);
    }

    fn find(&self, path: PathRef<'_>) -> Result<u64> {
        self.parent(path)?;
        self.names.get(path.as_bytes()).copied().ok_or(Errno::ENOENT)
    }

    fn parent(&self, path: PathRef<'_>) -> Result<()> {
        let Some((dir, _)) = path.split() else { return Ok(()) };
        let number = self.names.get(dir.as_bytes()).ok_or(Errno::ENOENT)?;
        let is_dir = self.files[number].kind == FileKind::Directory;
        if is_dir { Ok(()) } else { Err(Errno::ENOTDIR) }
    }

    fn kind(&self, path: &[u8]) -> Option<FileKind> {
        Some(self.files[self.names.get(path)?].kind)
    }

    /// The names below a directory, at any depth.
    fn list_below(&self, dir: &[u8]) -> Vec<Vec<u8>> {
        let mut start = dir.to_vec();
        if dir != b"/" {
            start.push(b'/');
        }
        let names = self.names.keys();
        names.filter(|name| name.len() > start.len() && name.starts_with(&start)).cloned().collect()
    }

    fn drop_name(&mut self, path: &[u8]) {
        let number = self.names.remove(path).unwrap();
        self.files.get_mut(&number).unwrap().nlink -= 1;
        self.collect(number);
    }

    fn collect(&mut self, number: u64) {
        let open = self.open.values().any(|&open| open == number);
        if self.files.get(&number).is_some_and(|file| file.nlink == 0) && !open {
            self.files.remove(&number);
        }
    }

    fn check_replace(&self, from: &[u8], to: &[u8]) -> Result<()> {
        match (self.kind(from).ok_or(Errno::ENOENT)?, self.kind(to)) {
            (FileKind::Directory, Some(FileKind::Directory)) if !self.list_below(to).is_empty() => {
                Err(Errno::ENOTEMPTY)
            }
            (FileKind::Directory, Some(FileKind::Directory)) => Ok(()),
            (FileKind::Directory, Some(_)) => Err(Errno::ENOTDIR),
            (_, Some(FileKind::Directory)) => Err(Errno::EISDIR),
            _ => Ok(()),
        }
    }

    fn move_all(&mut self, from: &[u8], to: &[u8]) -> Vec<(Vec<u8>, u64)> {
        let mut moved = self.list_below(from);
        moved.push(from.to_vec());
        let renamed = |old: &[u8]| [to, &old[from.len()..]].concat();
        moved.iter().map(|old| (renamed(old), self.names.remove(old).unwrap())).collect()
    }
}

impl PathFileSystem for PathTestBackend {
    fn path_caps(&self) -> PathCaps {
        self.caps.clone()
    }

    fn getattr(&self, _: &Context<'_>, target: PathOperand<'_>) -> Result<Attr> {
        let mut state = self.state();
        let number = self.target(&state, target)?;
        state.noise += 1;
        let file = &state.files[&number];
        Ok(Attr {
            st_ino: if self.caps.stable_ino { number } else { state.noise },
            kind: file.kind,
            perm: 0o755,
            nlink: file.nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: file.data.len() as u64,
            blocks: 0,
            blksize: 4096,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: None,
            valid_for: std::time::Duration::ZERO,
        })
    }

    fn mknod(&self, _: &Context<'_>, path: PathRef<'_>, node: &NewNode<'_>) -> Result<()> {
        self.make(path, node.kind)
    }

    fn mkdir(&self, _: &Context<'_>, path: PathRef<'_>, _: &NewNode<'_>) -> Result<()> {
        self.make(path, FileKind::Directory)
    }

    fn link(&self, _: &Context<'_>, old: PathRef<'_>, new: PathRef<'_>) -> Result<()> {
        let mut state = self.state();
        let number = state.find(old)?;
        state.parent(new)?;
        if state.files[&number].kind == FileKind::Directory {
            return Err(Errno::EPERM);
        }
        if state.names.contains_key(new.as_bytes()) {
            return Err(Errno::EEXIST);
        }
        state.names.insert(new.as_bytes().to_vec(), number);
        state.files.get_mut(&number).unwrap().nlink += 1;
        Ok(())
    }

    fn unlink(&self, _: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        let mut state = self.state();
        let number = state.find(path)?;
        if state.files[&number].kind == FileKind::Directory {
            return Err(Errno::EISDIR);
        }
        state.drop_name(path.as_bytes());
        Ok(())
    }

    fn rmdir(&self, _: &Context<'_>, path: PathRef<'_>) -> Result<()> {
        let mut state = self.state();
        let number = state.find(path)?;
        if state.files[&number].kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        if !state.list_below(path.as_bytes()).is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        state.drop_name(path.as_bytes());
        Ok(())
    }

    fn rename(
        &self,
        _: &Context<'_>,
        from: PathRef<'_>,
        to: PathRef<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        let mut state = self.state();
        let number = state.find(from)?;
        state.parent(to)?;
        let (from, to) = (from.as_bytes(), to.as_bytes());
        let there = state.names.get(to).copied();
        if flags.has(RenameFlags::EXCHANGE) {
            there.ok_or(Errno::ENOENT)?;
            let (one, other) = (state.move_all(from, to), state.move_all(to, from));
            state.names.extend(one.into_iter().chain(other));
            return Ok(());
        }
        if flags.has(RenameFlags::NOREPLACE) && there.is_some() {
            return Err(Errno::EEXIST);
        }
        state.check_replace(from, to)?;
        if there == Some(number) {
            return Ok(());
        }
        if there.is_some() {
            state.drop_name(to);
        }
        let moved = state.move_all(from, to);
        state.names.extend(moved);
        Ok(())
    }

    fn open(&self, _: &Context<'_>, path: PathRef<'_>, _: OpenArgs) -> Result<OpenReply> {
        let mut state = self.state();
        let number = state.find(path)?;
        state.last_fh += 1;
        let fh = state.last_fh;
        state.open.insert(fh, number);
        Ok(OpenReply::new(Fh(fh)))
    }

    fn read(
        &self,
        _: &Context<'_>,
        file: PathFile<'_>,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let state = self.state();
        let number = self.file(&state, file)?;
        let data = &state.files[&number].data;
        out.put(&data[data.len().min(args.offset as usize)..]).map(|_| ())
    }

    fn write(
        &self,
        _: &Context<'_>,
        file: PathFile<'_>,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut state = self.state();
        let number = self.file(&state, file)?;
        let (start, len) = (args.offset as usize, data.remaining());
        let bytes = &mut state.files.get_mut(&number).unwrap().data;
        bytes.resize(bytes.len().max(start + len), 0);
        data.take(&mut bytes[start..start + len])
    }

    fn truncate(&self, _: &Context<'_>, target: PathOperand<'_>, size: u64) -> Result<()> {
        let mut state = self.state();
        let number = self.target(&state, target)?;
        state.files.get_mut(&number).unwrap().data.resize(size as usize, 0);
        Ok(())
    }

    fn release(&self, _: &Context<'_>, file: PathFile<'_>, _: ReleaseArgs) -> Result<()> {
        let mut state = self.state();
        let number = state.open.remove(&file.fh.0).expect("a handle is released once");
        state.collect(number);
        Ok(())
    }

    fn readdir(&self, _: &Context<'_>, dir: PathFile<'_>) -> Result<Vec<PathDirEntry>> {
        let state = self.state();
        // The tests do not open directories of a backend whose handles have no path.
        let path = dir.path()?;
        state.find(path)?;
        let names = state.list_below(path.as_bytes()).into_iter();
        let start = path.as_bytes().len() + usize::from(path != PathRef::ROOT);
        let here = names.filter(|name| !name[start..].contains(&b'/'));
        let entry = |name: Vec<u8>| PathDirEntry {
            kind: state.kind(&name).unwrap(),
            st_ino: state.names[&name],
            name: name[start..].to_vec(),
        };
        Ok(here.map(entry).collect())
    }
}
