//! Working directories, and the directories that relative paths start from.

use std::sync::Arc;

use defuse_fs::{DirBuf, DirItem, DirSink, Entry, Errno, File, FileKind, Name, OpenFlags};
use defuse_probe::Op;

use crate::access::{self, NeededAccess};
use crate::client::DirectClient;
use crate::credentials::TaskCredentials;
use crate::description::FileDescription;
use crate::mount::{ClientMount, MountSpot};
use crate::mounted_inode::MountedInode;
use crate::node::CachedInode;
use crate::stop::{CallError, Result};
use crate::task::ClientTask;
use crate::walk::{PathEnd, PathParent, WalkStart};
use crate::work_dir::{HeldDirectory, WorkDir};

impl DirectClient {
    /// Changes the working directory, chdir(2). If `path` is outside of all mounts, the caller
    /// calls the kernel's chdir(2) and then [`ClientTask::set_cwd`].
    pub fn chdir(&self, task: &ClientTask, path: &[u8]) -> Result<()> {
        let who = task.credentials();
        let here = self.walk(task, &who, WalkStart::Cwd, path)?.node(true)?;
        enter(task, &who, HeldDirectory::new(here))
    }

    /// Changes the working directory to an open directory, fchdir(2).
    pub fn fchdir(&self, task: &ClientTask, dir: &Arc<FileDescription>) -> Result<()> {
        let who = task.credentials();
        let here = dir.inode().clone();
        let open = (!here.node.has_lookups()).then(|| Arc::clone(dir));
        enter(task, &who, HeldDirectory::with(here, open))
    }

    /// The path of the working directory, getcwd(2). Fails with `ENOENT` if it was removed.
    pub fn getcwd(&self, task: &ClientTask) -> Result<Vec<u8>> {
        match &*task.cwd() {
            WorkDir::Outside(_) => Err(CallError::outside_mounts(None)),
            inside @ WorkDir::Inside(_) => Ok(self.path_of_work_dir(task, inside)?),
        }
    }

    /// The path of a directory that is or was the working directory. Fails with `ENOENT` if it was
    /// removed. In a mount, this looks for the name of each directory up to the root of the mount.
    pub fn path_of_work_dir(&self, task: &ClientTask, dir: &WorkDir) -> defuse_fs::Result<Vec<u8>> {
        match dir {
            WorkDir::Outside(path) => Ok(path.clone()),
            WorkDir::Inside(held) => self.path_of(&held.here, &task.credentials()),
        }
    }

    /// The absolute path of the file at `path`, without links, `.` and `..`, realpath(3).
    pub fn real_path(&self, task: &ClientTask, path: &[u8]) -> Result<Vec<u8>> {
        let who = task.credentials();
        let mut walk = self.walk(task, &who, WalkStart::Cwd, path)?;
        walk.follow_last = true;
        loop {
            let PathParent { dir, last } = walk.parent()?;
            let PathEnd::Component(last) = last else { return Ok(self.path_of(&dir, &who)?) };
            let Some(found) = walk.last_node(dir.clone(), &last, true)? else { continue };
            if found.node.is_dir() {
                return Ok(self.path_of(&found, &who)?);
            }
            let mut full = self.path_of(&dir, &who)?;
            if !full.ends_with(b"/") {
                full.push(b'/');
            }
            full.extend_from_slice(last.bytes());
            return Ok(full);
        }
    }

    /// The path of a directory in a mount. Fails with `ENOENT` if it was removed.
    pub(crate) fn path_of(
        &self,
        here: &MountedInode,
        who: &TaskCredentials,
    ) -> defuse_fs::Result<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut node = Arc::clone(&here.node);
        let attr = here.mount.fetch_attr(&node, None, who)?;
        if attr.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        // If there are more levels than a path can have, directories are being moved during the
        // climb.
        for _ in 0..crate::remaining_path::PATH_MAX {
            let Some(parent) = here.mount.parent(&node, who)? else {
                return Ok(join(&here.mount, &names));
            };
            names.push(name_in(&here.mount, &parent, &node, who)?);
            node = parent;
        }
        Err(Errno::ENAMETOOLONG)
    }
}

fn enter(task: &ClientTask, who: &TaskCredentials, held: HeldDirectory) -> Result<()> {
    let here = &held.here;
    if !here.node.is_dir() {
        return Err(Errno::ENOTDIR.into());
    }
    access::check(&here.mount, &here.node, who, NeededAccess::EXEC)?;
    task.set_cwd(WorkDir::Inside(held));
    Ok(())
}

fn join(mount: &ClientMount, names: &[Vec<u8>]) -> Vec<u8> {
    let mut path = mount.target();
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    // The root of a named mount ends with a slash, so that it is a path and not a plain word.
    if names.is_empty() && matches!(mount.spot, MountSpot::Name(_)) {
        path.push(b'/');
    }
    path
}

/// The name of `child` in `parent`. A directory does not know its own name, so this searches the
/// parent.
fn name_in(
    mount: &ClientMount,
    parent: &CachedInode,
    child: &CachedInode,
    who: &TaskCredentials,
) -> defuse_fs::Result<Vec<u8>> {
    let cx = who.context(mount.origin);
    let opened = mount
        .call(Op::OPENDIR, |fs| fs.opendir(&cx, parent.ino(), OpenFlags(OpenFlags::DIRECTORY)))?;
    let dir = File { ino: parent.ino(), fh: opened.fh };
    let found = search(mount, dir, parent, child, who);
    let _ = mount.call(Op::RELEASEDIR, |fs| fs.releasedir(&cx, dir));
    found
}

fn search(
    mount: &ClientMount,
    dir: File,
    parent: &CachedInode,
    child: &CachedInode,
    who: &TaskCredentials,
) -> defuse_fs::Result<Vec<u8>> {
    let cx = who.context(mount.origin);
    let mut from = 0;
    loop {
        let mut sink = DirectoryCollector { found: Vec::new(), seen: 0, next: from };
        mount.call(Op::READDIR, |fs| fs.readdir(&cx, dir, from, &mut DirBuf::new(&mut sink)))?;
        if sink.seen == 0 {
            return Err(Errno::ENOENT);
        }
        for name in sink.found {
            let found = Name::new(&name).and_then(|name| mount.lookup(parent, name, who));
            if found.is_ok_and(|node| node.ino() == child.ino()) {
                return Ok(name);
            }
        }
        from = sink.next;
    }
}

/// Collects the names of directories.
struct DirectoryCollector {
    found: Vec<Vec<u8>>,
    seen: usize,
    next: u64,
}

impl DirSink for DirectoryCollector {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        self.seen < 256
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.seen += 1;
        self.next = item.next;
        if item.kind == FileKind::Directory && !matches!(item.name, b"." | b"..") {
            self.found.push(item.name.to_vec());
        }
    }
}
