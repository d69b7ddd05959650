//! Runs a sequence of operations on both sides and compares the results.

use std::collections::BTreeMap;
use std::fmt::Debug;

use anyhow::{Context as _, Result, bail, ensure};
use defuse_fs::{
    Attr, Caller, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, Fallocate, File,
    FileKind, FileSystem, Ino, LockOwner, Name, NewNode, OpenArgs, OpenFlags, ReadArgs, ReadBuf,
    ReleaseArgs, RenameFlags, SetAttr, SetXattrFlags, SliceSink, SliceSource, Whence, WriteArgs,
    WriteBuf, Xattr, XattrName,
};

use super::reference::{ModelId, ModelNode, ROOT, ReferenceModel};
use super::{MissingPolicy, ModelOp, SpecialKind};

/// The caller of all operations.
const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };

/// Runs `ops` on `fs`, which must be empty.
pub(super) fn run(fs: &dyn FileSystem, ops: &[ModelOp], missing: MissingPolicy) -> Result<()> {
    let mut driver = ModelDriver::new(fs, missing)?;
    for (number, op) in ops.iter().enumerate() {
        driver.step(op).with_context(|| format!("step {number}, {op:?}"))?;
    }
    driver.finish().context("at the end")
}

/// An inode that was looked up.
struct DriverInode {
    ino: Ino,
    id: ModelId,
    lookups: u64,
}

/// A file that was opened.
struct DriverHandle {
    file: File,
    id: ModelId,
}

struct ModelDriver<'a> {
    fs: &'a dyn FileSystem,
    cx: Context<'a>,
    model: ReferenceModel,
    known: Vec<DriverInode>,
    handles: Vec<DriverHandle>,
    missing: MissingPolicy,
    /// The file system declares that open truncates; only then frontends pass `O_TRUNC`.
    truncates: bool,
}

type ModelAnswer<T> = defuse_fs::Result<T>;

impl<'a> ModelDriver<'a> {
    fn new(fs: &'a dyn FileSystem, missing: MissingPolicy) -> Result<Self> {
        let cx = Context::new(CALLER);
        let attr = fs.getattr(&cx, Ino::ROOT, None)?;
        let mut root = ModelNode::new(FileKind::Directory, attr.perm);
        (root.uid, root.gid) = (attr.uid, attr.gid);
        let known = vec![DriverInode { ino: Ino::ROOT, id: ROOT, lookups: 1 }];
        Ok(ModelDriver {
            fs,
            cx,
            model: ReferenceModel::new(root),
            known,
            handles: Vec::new(),
            missing,
            truncates: fs.caps().open_truncates,
        })
    }

    /// True if both failed in the same way or the step is not compared. The caller compares the
    /// values of a success.
    fn compare_results<T: Debug, U: Debug>(
        &self,
        real: ModelAnswer<T>,
        model: ModelAnswer<U>,
    ) -> Result<Option<(T, U)>> {
        match (real, model) {
            (Ok(real), Ok(model)) => Ok(Some((real, model))),
            (Err(real), Err(model)) if real == model => Ok(None),
            (real, model) => bail!("the file system says {real:?}, the model {model:?}"),
        }
    }

    /// True if the file system does not implement the operation and need not.
    fn lacks<T>(&self, real: &ModelAnswer<T>) -> bool {
        self.missing == MissingPolicy::Allowed
            && matches!(real, Err(Errno::ENOSYS | Errno::EOPNOTSUPP))
    }

    fn node(&self, pick: usize) -> (Ino, ModelId) {
        let known = &self.known[pick % self.known.len()];
        (known.ino, known.id)
    }

    /// A known directory. There is always one: the root.
    fn dir(&self, pick: usize) -> (Ino, ModelId) {
        let dirs: Vec<_> =
            self.known.iter().filter(|known| self.model.nodes[known.id].is_dir()).collect();
        let known = dirs[pick % dirs.len()];
        (known.ino, known.id)
    }

    fn handle(&self, pick: usize) -> Option<(File, ModelId)> {
        let handle = self.handles.get(pick % self.handles.len().max(1))?;
        Some((handle.file, handle.id))
    }

    /// Counts the lookup of `entry` and compares its attributes.
    fn record_lookup(&mut self, entry: &Entry, id: ModelId) -> Result<()> {
        match self.known.iter_mut().find(|known| known.ino == entry.ino) {
            Some(known) => {
                ensure!(known.id == id, "inode {:?} stands for two", entry.ino);
                known.lookups += 1;
            }
            None => {
                let twice = self.known.iter().any(|known| known.id == id);
                ensure!(!twice, "one inode has two numbers, the second is {:?}", entry.ino);
                self.known.push(DriverInode { ino: entry.ino, id, lookups: 1 });
            }
        }
        self.compare_attr(&entry.attr, id)
    }

    fn compare_attr(&self, attr: &Attr, id: ModelId) -> Result<()> {
        let node = &self.model.nodes[id];
        let real = (attr.kind, attr.perm, attr.uid, attr.gid, attr.rdev);
        let model = (node.kind, node.perm, node.uid, node.gid, node.rdev);
        ensure!(real == model, "attributes {real:?}, in the model {model:?}");
        let nlink = self.model.nlink(id);
        ensure!(attr.nlink == nlink, "{} links, in the model {nlink}", attr.nlink);
        if !node.is_dir() {
            let size = node.bytes.len() as u64;
            ensure!(attr.size == size, "{} bytes, in the model {size}", attr.size);
        }
        Ok(())
    }

    fn compare_entry(
        &mut self,
        real: ModelAnswer<Entry>,
        model: ModelAnswer<ModelId>,
    ) -> Result<()> {
        match self.compare_results(real, model)? {
            Some((entry, id)) => self.record_lookup(&entry, id),
            None => Ok(()),
        }
    }

    fn step(&mut self, op: &ModelOp) -> Result<()> {
        match *op {
            ModelOp::Lookup { .. }
            | ModelOp::LookupParent { .. }
            | ModelOp::Unlink { .. }
            | ModelOp::Rmdir { .. }
            | ModelOp::Link { .. }
            | ModelOp::Rename { .. } => self.step_names(op),
            ModelOp::Mknod { .. }
            | ModelOp::Mkdir { .. }
            | ModelOp::Symlink { .. }
            | ModelOp::Create { .. }
            | ModelOp::Tmpfile { .. } => self.step_new(op),
            ModelOp::Open { .. } | ModelOp::Close { .. } | ModelOp::Forget { .. } => {
                self.step_refs(op)
            }
            ModelOp::Write { .. }
            | ModelOp::Read { .. }
            | ModelOp::Fallocate { .. }
            | ModelOp::Copy { .. }
            | ModelOp::Seek { .. } => self.step_bytes(op),
            _ => self.step_attributes(op),
        }
    }

    fn step_names(&mut self, op: &ModelOp) -> Result<()> {
        let (fs, cx) = (self.fs, self.cx);
        match *op {
            ModelOp::Lookup { dir, name } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                let model = self.model.lookup(id, name);
                self.compare_entry(fs.lookup(&cx, ino, component(name)), model)
            }
            ModelOp::LookupParent { dir } => {
                let (ino, id) = self.dir(dir);
                // The parent of a removed directory is unspecified.
                if self.model.nodes[id].names == 0 {
                    return Ok(());
                }
                let real = fs.lookup_parent(&cx, ino);
                if self.lacks(&real) {
                    return Ok(());
                }
                self.compare_entry(real, Ok(self.model.nodes[id].parent))
            }
            ModelOp::Unlink { dir, name } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                let model = self.model.unlink(id, name);
                self.compare_results(fs.unlink(&cx, ino, component(name)), model).map(drop)
            }
            ModelOp::Rmdir { dir, name } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                let real = fs.rmdir(&cx, ino, component(name));
                if self.lacks(&real) {
                    return Ok(());
                }
                let model = self.model.rmdir(id, name);
                self.compare_results(real, model).map(drop)
            }
            ModelOp::Link { node, dir, name } => {
                let ((ino, id), (dir, parent), name) = (self.node(node), self.dir(dir), text(name));
                let real = fs.link(&cx, ino, dir, component(name));
                if self.lacks(&real) {
                    return Ok(());
                }
                let model = self.model.link(id, parent, name);
                self.compare_entry(real, model)
            }
            ModelOp::Rename { from, old, to, new, flags } => {
                let ((from, from_id), (to, to_id)) = (self.dir(from), self.dir(to));
                let (old, new, flags) = (text(old), text(new), u32::from(flags));
                let places = ((from, component(old)), (to, component(new)));
                let real = fs.rename(&cx, places.0, places.1, RenameFlags(flags));
                // A file system without support for flags refuses them like unknown flags.
                let refused = real == Err(Errno::EINVAL) && flags != 0;
                if self.lacks(&real) || (refused && self.missing == MissingPolicy::Allowed) {
                    return Ok(());
                }
                let model = self.model.rename((from_id, old), (to_id, new), flags);
                self.compare_results(real, model).map(drop)
            }
            _ => unreachable!("not a step of names"),
        }
    }

    fn step_new(&mut self, op: &ModelOp) -> Result<()> {
        let (fs, cx) = (self.fs, self.cx);
        match *op {
            ModelOp::Mknod { dir, name, kind, perm, umask } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                let (kind, rdev) = special(kind);
                let new = NewNode { umask: umask.into(), rdev, ..new(kind, perm) };
                let real = fs.mknod(&cx, ino, component(name), &new);
                if self.lacks(&real) {
                    return Ok(());
                }
                let node = ModelNode { rdev, ..ModelNode::new(kind, u32::from(perm & !umask)) };
                let model = self.model.make(id, name, node);
                self.compare_entry(real, model)
            }
            ModelOp::Mkdir { dir, name, perm } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                // Linux ignores all other bits in mkdir, so frontends do not request them.
                let perm = perm & 0o1777;
                let new = new(FileKind::Directory, perm);
                let real = fs.mkdir(&cx, ino, component(name), &new);
                if self.lacks(&real) {
                    return Ok(());
                }
                let node = ModelNode::new(FileKind::Directory, perm.into());
                let model = self.model.make(id, name, node);
                self.compare_entry(real, model)
            }
            ModelOp::Symlink { dir, name, length } => {
                let ((ino, id), name) = (self.dir(dir), text(name));
                let target = vec![b't'; length.into()];
                let new = new(FileKind::Symlink, 0o777);
                let real = fs.symlink(&cx, ino, component(name), &target, &new);
                if self.lacks(&real) {
                    return Ok(());
                }
                let node = ModelNode { bytes: target, ..ModelNode::new(FileKind::Symlink, 0o777) };
                let model = self.model.make(id, name, node);
                self.compare_entry(real, model)
            }
            ModelOp::Create { dir, name, perm, truncate } => {
                self.create(dir, text(name), perm, truncate)
            }
            ModelOp::Tmpfile { dir, exclusive } => {
                let (ino, id) = self.dir(dir);
                // The error for a removed directory differs between kernels.
                if self.model.nodes[id].names == 0 {
                    return Ok(());
                }
                let flags = if exclusive { OpenFlags::EXCL } else { 0 };
                let real = fs.tmpfile(&cx, ino, &new(FileKind::Regular, 0o600), open_args(flags));
                if self.lacks(&real) {
                    return Ok(());
                }
                let node =
                    ModelNode { linkable: !exclusive, ..ModelNode::new(FileKind::Regular, 0o600) };
                let model = self.model.make_nameless(id, node);
                self.record_new_open(real, model)
            }
            _ => unreachable!("not a step that makes something"),
        }
    }

    fn create(&mut self, dir: usize, name: &[u8], perm: u16, truncate: bool) -> Result<()> {
        let (ino, id) = self.dir(dir);
        let truncate = if truncate { OpenFlags::TRUNC } else { 0 };
        let flags = OpenFlags::CREAT | OpenFlags::EXCL | truncate;
        let new = new(FileKind::Regular, perm);
        let real = self.fs.create(&self.cx, ino, component(name), &new, open_args(flags));
        let model = match self.model.lookup(id, name) {
            Ok(_) => Err(Errno::EEXIST),
            Err(_) => self.model.make(id, name, ModelNode::new(FileKind::Regular, perm.into())),
        };
        self.record_new_open(real, model)
    }

    fn record_new_open(
        &mut self,
        real: ModelAnswer<(Entry, defuse_fs::OpenReply)>,
        model: ModelAnswer<ModelId>,
    ) -> Result<()> {
        if let Some(((entry, opened), id)) = self.compare_results(real, model)? {
            self.handles.push(DriverHandle { file: File { ino: entry.ino, fh: opened.fh }, id });
            self.record_lookup(&entry, id)?;
        }
        Ok(())
    }

    fn step_refs(&mut self, op: &ModelOp) -> Result<()> {
        match *op {
            ModelOp::Open { node, truncate } => {
                let (ino, id) = self.node(node);
                if self.model.nodes[id].kind != FileKind::Regular {
                    return Ok(());
                }
                let truncate = truncate && self.truncates;
                let flags = if truncate { OpenFlags::TRUNC } else { 0 };
                let opened = self.fs.open(&self.cx, ino, open_args(flags))?;
                if truncate {
                    self.model.set_size(id, 0)?;
                }
                self.handles.push(DriverHandle { file: File { ino, fh: opened.fh }, id });
                Ok(())
            }
            ModelOp::Close { handle } => {
                if self.handles.is_empty() {
                    return Ok(());
                }
                let handle = self.handles.swap_remove(handle % self.handles.len());
                self.close(&handle)
            }
            ModelOp::Forget { node } => {
                let at = node % self.known.len();
                // The root is never forgotten, and an open file keeps its lookup count, as in the
                // kernel.
                let open = self.handles.iter().any(|handle| handle.id == self.known[at].id);
                if at != 0 && !open {
                    let known = self.known.swap_remove(at);
                    self.fs.forget(known.ino, known.lookups);
                }
                Ok(())
            }
            _ => unreachable!("not a step of references"),
        }
    }

    fn close(&self, handle: &DriverHandle) -> Result<()> {
        match self.fs.flush(&self.cx, handle.file, LockOwner(1)) {
            Ok(()) | Err(Errno::ENOSYS) => {}
            Err(errno) => bail!("flush: {errno}"),
        }
        Ok(self.fs.release(&self.cx, handle.file, ReleaseArgs::default())?)
    }

    fn step_bytes(&mut self, op: &ModelOp) -> Result<()> {
        let (fs, cx) = (self.fs, self.cx);
        match *op {
            ModelOp::Write { handle, offset, length, byte, append } => {
                let Some((file, id)) = self.handle(handle) else { return Ok(()) };
                // Bytes that depend on the offset reveal data at a wrong place.
                let data: Vec<u8> = (0..length).map(|i| byte ^ (i % 251) as u8).collect();
                let flags = if append { OpenFlags::APPEND } else { 0 } | OpenFlags::RDWR;
                let args = WriteArgs {
                    offset: offset.into(),
                    flags: OpenFlags(flags),
                    ..WriteArgs::default()
                };
                let mut source = SliceSource::new(&data);
                let real = fs.write(&cx, file, args, &mut WriteBuf::new(&mut source))?;
                let model = self.model.write(id, (!append).then_some(offset as usize), &data);
                ensure!(real == model, "wrote {real}, in the model {model}");
                self.check_attr(file.ino, id)
            }
            ModelOp::Read { handle, offset, length } => {
                let Some((file, id)) = self.handle(handle) else { return Ok(()) };
                self.compare_bytes(file, id, offset as usize, length.into())
            }
            ModelOp::Fallocate { handle, mode, offset, length } => {
                let Some((file, id)) = self.handle(handle) else { return Ok(()) };
                let (mode, length) = (fallocate_mode(mode), length.max(1));
                let range = Fallocate { mode, offset: offset.into(), length: length.into() };
                let real = fs.fallocate(&cx, file, range);
                if self.lacks(&real) {
                    return Ok(());
                }
                let model = self.model.fallocate(id, mode, offset as usize, length as usize);
                self.compare_results(real, model)?;
                self.check_attr(file.ino, id)
            }
            ModelOp::Copy { from, to, src, dst, length } => {
                let (Some(from), Some(to)) = (self.handle(from), self.handle(to)) else {
                    return Ok(());
                };
                self.copy(from, to, ModelCopy { src, dst, length })
            }
            ModelOp::Seek { handle, offset, hole } => {
                let Some((file, id)) = self.handle(handle) else { return Ok(()) };
                self.seek(file, id, offset.into(), hole)
            }
            _ => unreachable!("not a step of bytes"),
        }
    }

    fn copy(&mut self, from: (File, ModelId), to: (File, ModelId), at: ModelCopy) -> Result<()> {
        let copy = CopyRange {
            src: from.0,
            src_offset: at.src.into(),
            dst: to.0,
            dst_offset: at.dst.into(),
            length: at.length.into(),
            flags: 0,
        };
        let real = self.fs.copy_file_range(&self.cx, &copy);
        if self.lacks(&real) || at.length == 0 {
            return Ok(());
        }
        let (src, dst) = ((from.1, at.src as usize), (to.1, at.dst as usize));
        let model = self.model.copy(src, dst, at.length.into());
        if let Some((real, model)) = self.compare_results(real, model)? {
            ensure!(real == model as u64, "copied {real}, in the model {model}");
        }
        self.check_attr(to.0.ino, to.1)
    }

    /// The file system chooses where data ends and holes begin, but a hole must contain zeros, and
    /// the end of the file counts as a hole.
    fn seek(&self, file: File, id: ModelId, offset: u64, hole: bool) -> Result<()> {
        let bytes = &self.model.nodes[id].bytes;
        let whence = if hole { Whence::Hole } else { Whence::Data };
        let real = self.fs.lseek(&self.cx, file, offset, whence);
        if self.lacks(&real) {
            return Ok(());
        }
        let size = bytes.len() as u64;
        let zero_from =
            |from: u64, to: u64| bytes[from as usize..to as usize].iter().all(|&byte| byte == 0);
        match real {
            Err(Errno::ENXIO) if offset >= size => Ok(()),
            Ok(at) if hole && offset < size => {
                ensure!((offset..=size).contains(&at), "a hole at {at}");
                Ok(())
            }
            Ok(at) if !hole && offset < size => {
                ensure!((offset..size).contains(&at), "data at {at} of {size}");
                ensure!(zero_from(offset, at), "data before {at} was called a hole");
                Ok(())
            }
            Err(Errno::ENXIO) if !hole && zero_from(offset, size) => Ok(()),
            other => bail!("from {offset} of {size}: {other:?}"),
        }
    }

    fn step_attributes(&mut self, op: &ModelOp) -> Result<()> {
        let (fs, cx) = (self.fs, self.cx);
        match *op {
            ModelOp::Readdir { dir } => {
                let (ino, id) = self.dir(dir);
                match self.compare_listing(ino, id) {
                    // This is the result of getdents for a removed directory.
                    Err(error)
                        if self.model.nodes[id].names == 0
                            && error.downcast_ref() == Some(&Errno::ENOENT) =>
                    {
                        Ok(())
                    }
                    other => other,
                }
            }
            ModelOp::Readlink { node } => {
                let (ino, id) = self.node(node);
                let node = &self.model.nodes[id];
                let is_link = node.kind == FileKind::Symlink;
                let model = if is_link { Ok(&node.bytes) } else { Err(Errno::EINVAL) };
                let real = fs.readlink(&cx, ino);
                if self.lacks(&real) {
                    return Ok(());
                }
                if let Some((real, model)) = self.compare_results(real, model)? {
                    ensure!(real == *model, "another target");
                }
                Ok(())
            }
            ModelOp::Chmod { node, perm } => {
                let set = SetAttr { perm: Some(perm.into()), ..SetAttr::default() };
                self.set_attr(node, &set, |node| node.perm = perm.into())
            }
            ModelOp::Chown { node, uid, gid } => {
                let (uid, gid) = (u32::from(uid), u32::from(gid));
                let set = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
                self.set_attr(node, &set, |node| {
                    (node.uid, node.gid) = (uid, gid);
                    if !node.is_dir() {
                        let sgid = if node.perm & 0o010 != 0 { 0o2000 } else { 0 };
                        node.perm &= !(0o4000 | sgid);
                    }
                })
            }
            ModelOp::Truncate { node, size } => {
                let (ino, id) = self.node(node);
                if !matches!(self.model.nodes[id].kind, FileKind::Regular | FileKind::Directory) {
                    return Ok(());
                }
                let set = SetAttr { size: Some(size.into()), ..SetAttr::default() };
                let model = self.model.set_size(id, size as usize);
                match self.compare_results(fs.setattr(&cx, ino, None, &set), model)? {
                    Some((attr, ())) => self.compare_attr(&attr, id),
                    None => Ok(()),
                }
            }
            _ => self.step_xattrs(op),
        }
    }

    fn set_attr(
        &mut self,
        pick: usize,
        set: &SetAttr,
        apply: impl Fn(&mut ModelNode),
    ) -> Result<()> {
        let (ino, id) = self.node(pick);
        // Linux has no permissions on symbolic links.
        if self.model.nodes[id].kind == FileKind::Symlink {
            return Ok(());
        }
        apply(&mut self.model.nodes[id]);
        let attr = self.fs.setattr(&self.cx, ino, None, set)?;
        self.compare_attr(&attr, id)
    }

    fn step_xattrs(&mut self, op: &ModelOp) -> Result<()> {
        let (ModelOp::SetXattr { node, name, .. }
        | ModelOp::GetXattr { node, name }
        | ModelOp::RemoveXattr { node, name }) = *op
        else {
            unreachable!("all other steps are handled before")
        };
        let ((ino, id), name) = (self.node(node), xattr_text(name));
        let kind = self.model.nodes[id].kind;
        if !matches!(kind, FileKind::Regular | FileKind::Directory) {
            return Ok(());
        }
        let (fs, cx, key) = (self.fs, self.cx, XattrName::new(name)?);
        match *op {
            ModelOp::SetXattr { length, flags, .. } => {
                let value = vec![length; length.into()];
                let set = SetXattrFlags {
                    create: flags & 1 != 0,
                    replace: flags & 2 != 0,
                    clear_sgid: false,
                };
                let real = fs.setxattr(&cx, ino, key, &value, set);
                // The two flags together are invalid, and it is unspecified which error comes
                // first.
                if self.lacks(&real) || flags == 3 {
                    ensure!(flags != 3 || real.is_err(), "create and replace at once");
                    return Ok(());
                }
                let model = self.model.set_xattr(id, name, &value, flags);
                self.compare_results(real, model).map(drop)
            }
            ModelOp::GetXattr { .. } => {
                let real = fs.getxattr(&cx, ino, key, 256);
                if self.lacks(&real) {
                    return Ok(());
                }
                let model = self.model.nodes[id].xattrs.get(name).ok_or(Errno::ENODATA);
                if let Some((real, model)) = self.compare_results(real, model)? {
                    ensure!(real == Xattr::Value(model.clone()), "another value");
                }
                Ok(())
            }
            _ => {
                let real = fs.removexattr(&cx, ino, key);
                if self.lacks(&real) {
                    return Ok(());
                }
                let old = self.model.nodes[id].xattrs.remove(name);
                self.compare_results(real, old.ok_or(Errno::ENODATA)).map(drop)
            }
        }
    }

    fn check_attr(&self, ino: Ino, id: ModelId) -> Result<()> {
        self.compare_attr(&self.fs.getattr(&self.cx, ino, None)?, id)
    }

    fn compare_bytes(&self, file: File, id: ModelId, offset: usize, len: usize) -> Result<()> {
        let mut memory = vec![0xee; len];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, len);
        let args = ReadArgs { offset: offset as u64, ..ReadArgs::default() };
        self.fs.read(&self.cx, file, args, &mut out)?;
        let filled = out.filled_len();
        let (real, model) = (&memory[..filled], self.model.read(id, offset, len));
        ensure!(filled == model.len(), "read {filled} bytes, in the model {}", model.len());
        let differ = real.iter().zip(model).position(|(real, model)| real != model);
        match differ {
            Some(at) => bail!("byte {} is {}, in the model {}", offset + at, real[at], model[at]),
            None => Ok(()),
        }
    }

    fn compare_listing(&self, ino: Ino, id: ModelId) -> Result<()> {
        let opened = self.fs.opendir(&self.cx, ino, OpenFlags::default())?;
        let dir = File { ino, fh: opened.fh };
        let mut listing = ModelListing::default();
        loop {
            // Few entries at a time, to test that a listing continues from a position.
            listing.room = 3;
            let from = listing.last;
            self.fs.readdir(&self.cx, dir, from, &mut DirBuf::new(&mut listing))?;
            if listing.room == 3 {
                break;
            }
        }
        self.fs.releasedir(&self.cx, dir)?;
        let children = &self.model.nodes[id].children;
        let model: BTreeMap<_, _> = children
            .iter()
            .map(|(name, &child)| (name.clone(), self.model.nodes[child].kind))
            .collect();
        let real: BTreeMap<_, _> = listing.entries.iter().cloned().collect();
        ensure!(real.len() == listing.entries.len(), "a name is listed twice");
        ensure!(real == model, "lists {real:?}, in the model {model:?}");
        Ok(())
    }

    /// Releases everything and compares the whole tree.
    fn finish(mut self) -> Result<()> {
        for handle in &self.handles {
            let size = self.model.nodes[handle.id].bytes.len();
            self.compare_bytes(handle.file, handle.id, 0, size + 1)?;
            self.check_attr(handle.file.ino, handle.id)?;
            self.close(handle)?;
        }
        for known in self.known.split_off(1) {
            self.check_attr(known.ino, known.id)?;
            self.fs.forget(known.ino, known.lookups);
        }
        // All lookups are kept until the end, because only they keep inode numbers constant.
        let mut seen = BTreeMap::new();
        let mut looked_up = Vec::new();
        let same = self.compare_tree(Ino::ROOT, ROOT, &mut seen, &mut looked_up);
        for ino in looked_up {
            self.fs.forget(ino, 1);
        }
        same
    }

    fn compare_tree(
        &self,
        ino: Ino,
        id: ModelId,
        seen: &mut BTreeMap<ModelId, Ino>,
        looked_up: &mut Vec<Ino>,
    ) -> Result<()> {
        ensure!(*seen.entry(id).or_insert(ino) == ino, "one inode has two numbers");
        let node = &self.model.nodes[id];
        self.check_attr(ino, id)?;
        self.compare_xattrs(ino, node)?;
        match node.kind {
            FileKind::Directory => self.compare_listing(ino, id)?,
            FileKind::Symlink => {
                ensure!(self.fs.readlink(&self.cx, ino)? == node.bytes, "another target");
            }
            FileKind::Regular => {
                let opened = self.fs.open(&self.cx, ino, OpenArgs::default())?;
                let file = File { ino, fh: opened.fh };
                self.compare_bytes(file, id, 0, node.bytes.len() + 1)?;
                self.close(&DriverHandle { file, id })?;
            }
            _ => {}
        }
        for (name, &child) in &node.children {
            let show = || String::from_utf8_lossy(name).into_owned();
            let entry = self.fs.lookup(&self.cx, ino, component(name)).with_context(show)?;
            looked_up.push(entry.ino);
            self.compare_tree(entry.ino, child, seen, looked_up).with_context(show)?;
        }
        Ok(())
    }

    fn compare_xattrs(&self, ino: Ino, node: &ModelNode) -> Result<()> {
        for (name, value) in &node.xattrs {
            let real = self.fs.getxattr(&self.cx, ino, XattrName::new(name)?, 256)?;
            ensure!(real == Xattr::Value(value.clone()), "another value of an attribute");
        }
        Ok(())
    }
}

/// Offsets and length of a copy in bytes.
struct ModelCopy {
    src: u32,
    dst: u32,
    length: u16,
}

#[derive(Default)]
struct ModelListing {
    room: usize,
    last: u64,
    entries: Vec<(Vec<u8>, FileKind)>,
}

impl DirSink for ModelListing {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        self.room > 0
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.room -= 1;
        self.last = item.next;
        if item.name != b"." && item.name != b".." {
            self.entries.push((item.name.to_vec(), item.kind));
        }
    }
}

fn text(number: u8) -> &'static [u8] {
    const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"\xff\xfe", b"a longer name", b"..."];
    NAMES[usize::from(number) % NAMES.len()]
}

fn xattr_text(number: u8) -> &'static [u8] {
    const NAMES: [&[u8]; 3] = [b"user.a", b"user.b", b"user.a.longer"];
    NAMES[usize::from(number) % NAMES.len()]
}

fn component(name: &[u8]) -> Name<'_> {
    Name::new(name).expect("all names of the model are valid")
}

fn new(kind: FileKind, perm: u16) -> NewNode<'static> {
    NewNode::new(kind, perm.into(), CALLER)
}

fn special(kind: SpecialKind) -> (FileKind, u64) {
    match kind {
        SpecialKind::Regular => (FileKind::Regular, 0),
        SpecialKind::Fifo => (FileKind::Fifo, 0),
        SpecialKind::Socket => (FileKind::Socket, 0),
        SpecialKind::Device => (FileKind::CharDevice, 0x103),
    }
}

fn open_args(flags: u32) -> OpenArgs {
    OpenArgs { flags: OpenFlags(flags | OpenFlags::RDWR), kill_suidgid: false }
}

fn fallocate_mode(number: u8) -> u32 {
    const KEEP: u32 = Fallocate::KEEP_SIZE;
    match number {
        0 => 0,
        1 => KEEP,
        2 | 3 => Fallocate::PUNCH_HOLE | KEEP,
        4 => Fallocate::ZERO_RANGE,
        5 => Fallocate::ZERO_RANGE | KEEP,
        6 => Fallocate::COLLAPSE_RANGE,
        _ => Fallocate::INSERT_RANGE,
    }
}
