//! The reference model: simple maps and vectors. Inodes are never freed.

use std::collections::BTreeMap;

use defuse_fs::{Errno, Fallocate, FileKind, RenameFlags, Result};

/// The number of an inode of the model: its index in the list.
pub(super) type ModelId = usize;
pub(super) const ROOT: ModelId = 0;

const PAGE: usize = 4096;

#[derive(Clone, Debug)]
pub(super) struct ModelNode {
    pub kind: FileKind,
    pub perm: u32,
    pub uid: u32,
    pub gid: u32,
    pub names: u32,
    pub rdev: u64,
    /// The data of a file, or the target of a symbolic link.
    pub bytes: Vec<u8>,
    pub children: BTreeMap<Vec<u8>, ModelId>,
    pub parent: ModelId,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub linkable: bool,
}

impl ModelNode {
    pub fn new(kind: FileKind, perm: u32) -> Self {
        ModelNode {
            kind,
            perm,
            uid: 0,
            gid: 0,
            names: 0,
            rdev: 0,
            bytes: Vec::new(),
            children: BTreeMap::new(),
            parent: ROOT,
            xattrs: BTreeMap::new(),
            linkable: false,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }
}

#[derive(Clone, Debug)]
pub(super) struct ReferenceModel {
    pub nodes: Vec<ModelNode>,
}

impl ReferenceModel {
    pub fn new(root: ModelNode) -> Self {
        ReferenceModel { nodes: vec![ModelNode { names: 1, ..root }] }
    }

    pub fn nlink(&self, id: ModelId) -> u32 {
        let node = &self.nodes[id];
        if !node.is_dir() {
            return node.names;
        }
        let subdirs = node.children.values().filter(|&&child| self.nodes[child].is_dir()).count();
        if node.names == 0 { 0 } else { 2 + subdirs as u32 }
    }

    fn live_dir(&self, dir: ModelId) -> Result<&ModelNode> {
        let node = &self.nodes[dir];
        match node.is_dir() {
            false => Err(Errno::ENOTDIR),
            true if node.names == 0 => Err(Errno::ENOENT),
            true => Ok(node),
        }
    }

    pub fn lookup(&self, dir: ModelId, name: &[u8]) -> Result<ModelId> {
        self.live_dir(dir)?.children.get(name).copied().ok_or(Errno::ENOENT)
    }

    pub fn make(&mut self, dir: ModelId, name: &[u8], node: ModelNode) -> Result<ModelId> {
        if self.live_dir(dir)?.children.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let id = self.make_nameless(dir, node)?;
        self.nodes[id].names = 1;
        self.nodes[dir].children.insert(name.to_vec(), id);
        Ok(id)
    }

    /// Creates an unnamed node with the attributes that it inherits from its directory.
    pub fn make_nameless(&mut self, dir: ModelId, mut node: ModelNode) -> Result<ModelId> {
        let parent = self.live_dir(dir)?;
        if parent.perm & 0o2000 != 0 {
            node.gid = parent.gid;
            if node.is_dir() {
                node.perm |= 0o2000;
            }
        }
        node.parent = dir;
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    pub fn link(&mut self, id: ModelId, dir: ModelId, name: &[u8]) -> Result<ModelId> {
        if self.nodes[id].is_dir() {
            return Err(Errno::EPERM);
        }
        if self.live_dir(dir)?.children.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let node = &mut self.nodes[id];
        if node.names == 0 && !node.linkable {
            return Err(Errno::ENOENT);
        }
        node.linkable = false;
        node.names += 1;
        self.nodes[dir].children.insert(name.to_vec(), id);
        Ok(id)
    }

    pub fn unlink(&mut self, dir: ModelId, name: &[u8]) -> Result<()> {
        let id = self.lookup(dir, name)?;
        if self.nodes[id].is_dir() {
            return Err(Errno::EISDIR);
        }
        self.drop_name(dir, name);
        Ok(())
    }

    pub fn rmdir(&mut self, dir: ModelId, name: &[u8]) -> Result<()> {
        let id = self.lookup(dir, name)?;
        if !self.nodes[id].is_dir() {
            return Err(Errno::ENOTDIR);
        }
        if !self.nodes[id].children.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.drop_name(dir, name);
        Ok(())
    }

    fn drop_name(&mut self, dir: ModelId, name: &[u8]) {
        if let Some(id) = self.nodes[dir].children.remove(name) {
            self.nodes[id].names -= 1;
        }
    }

    fn is_in(&self, mut id: ModelId, above: ModelId) -> bool {
        while id != ROOT && id != above {
            id = self.nodes[id].parent;
        }
        id == above
    }

    pub fn rename(
        &mut self,
        from: (ModelId, &[u8]),
        to: (ModelId, &[u8]),
        flags: u32,
    ) -> Result<()> {
        let (noreplace, exchange) = (flags & RenameFlags::NOREPLACE, flags & RenameFlags::EXCHANGE);
        let whiteout = flags & RenameFlags::WHITEOUT;
        if flags > 7 || (exchange != 0 && noreplace | whiteout != 0) {
            return Err(Errno::EINVAL);
        }
        self.live_dir(to.0)?;
        let source = self.lookup(from.0, from.1)?;
        let target = self.lookup(to.0, to.1).ok();
        if noreplace != 0 && target.is_some() {
            return Err(Errno::EEXIST);
        }
        if exchange != 0 && target.is_none() {
            return Err(Errno::ENOENT);
        }
        if self.nodes[source].is_dir() && self.is_in(to.0, source) {
            return Err(Errno::EINVAL);
        }
        if let Some(target) = target {
            if self.nodes[target].is_dir() && self.is_in(from.0, target) {
                return Err(if exchange != 0 { Errno::EINVAL } else { Errno::ENOTEMPTY });
            }
            if target == source {
                return Ok(());
            }
            if exchange == 0 {
                match (self.nodes[source].is_dir(), self.nodes[target].is_dir()) {
                    (true, false) => return Err(Errno::ENOTDIR),
                    (false, true) => return Err(Errno::EISDIR),
                    (true, true) if !self.nodes[target].children.is_empty() => {
                        return Err(Errno::ENOTEMPTY);
                    }
                    _ => self.drop_name(to.0, to.1),
                }
            }
        }
        self.nodes[from.0].children.remove(from.1);
        self.place(to, source);
        if let Some(target) = target.filter(|_| exchange != 0) {
            self.place(from, target);
        } else if whiteout != 0 {
            self.make(from.0, from.1, ModelNode::new(FileKind::CharDevice, 0))?;
        }
        Ok(())
    }

    fn place(&mut self, at: (ModelId, &[u8]), id: ModelId) {
        self.nodes[at.0].children.insert(at.1.to_vec(), id);
        self.nodes[id].parent = at.0;
    }

    pub fn set_size(&mut self, id: ModelId, size: usize) -> Result<()> {
        match self.nodes[id].kind {
            FileKind::Regular => self.nodes[id].bytes.resize(size, 0),
            FileKind::Directory => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    pub fn write(&mut self, id: ModelId, offset: Option<usize>, data: &[u8]) -> usize {
        let bytes = &mut self.nodes[id].bytes;
        let offset = offset.unwrap_or(bytes.len());
        if !data.is_empty() {
            bytes.resize(bytes.len().max(offset + data.len()), 0);
            bytes[offset..offset + data.len()].copy_from_slice(data);
        }
        data.len()
    }

    pub fn read(&self, id: ModelId, offset: usize, len: usize) -> &[u8] {
        let bytes = &self.nodes[id].bytes;
        let end = bytes.len().min(offset + len);
        bytes.get(offset..end).unwrap_or_default()
    }

    pub fn copy(
        &mut self,
        src: (ModelId, usize),
        dst: (ModelId, usize),
        len: usize,
    ) -> Result<usize> {
        let data = self.read(src.0, src.1, len).to_vec();
        // Only existing data can overlap, as on Linux.
        if src.0 == dst.0 && src.1.abs_diff(dst.1) < data.len() {
            return Err(Errno::EINVAL);
        }
        Ok(self.write(dst.0, Some(dst.1), &data))
    }

    pub fn fallocate(&mut self, id: ModelId, mode: u32, offset: usize, len: usize) -> Result<()> {
        const KEEP: u32 = Fallocate::KEEP_SIZE;
        let bytes = &mut self.nodes[id].bytes;
        let (size, end) = (bytes.len(), offset + len);
        let aligned = offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
        if mode & (Fallocate::PUNCH_HOLE | Fallocate::ZERO_RANGE) != 0 && offset < size {
            bytes[offset..end.min(size)].fill(0);
        }
        match mode {
            Fallocate::COLLAPSE_RANGE if !aligned || end >= size => return Err(Errno::EINVAL),
            Fallocate::COLLAPSE_RANGE => drop(bytes.drain(offset..end)),
            Fallocate::INSERT_RANGE if !aligned || offset >= size => return Err(Errno::EINVAL),
            Fallocate::INSERT_RANGE => {
                bytes.splice(offset..offset, std::iter::repeat_n(0, len));
            }
            _ if mode & KEEP == 0 => bytes.resize(size.max(end), 0),
            _ => {}
        }
        Ok(())
    }

    pub fn set_xattr(&mut self, id: ModelId, name: &[u8], value: &[u8], flags: u8) -> Result<()> {
        let xattrs = &mut self.nodes[id].xattrs;
        match xattrs.contains_key(name) {
            true if flags & 1 != 0 => return Err(Errno::EEXIST),
            false if flags & 2 != 0 => return Err(Errno::ENODATA),
            _ => xattrs.insert(name.to_vec(), value.to_vec()),
        };
        Ok(())
    }
}
