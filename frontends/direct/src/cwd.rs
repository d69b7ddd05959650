//! Working directories, and the directories that relative paths start from.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::{DirBuf, DirItem, DirSink, Entry, Errno, File, FileKind, Name, OpenFlags};
use defuse_probe::Op;

use crate::access::{self, Access};
use crate::client::Client;
use crate::credentials::Credentials;
use crate::description::Description;
use crate::mount::{Mount, Spot};
use crate::node::Node;
use crate::stop::{Result, Stop};
use crate::task::Task;
use crate::walk::{At, Here, Last, Parent};

/// A directory, inside of a mount or outside of all.
#[derive(Clone, Debug)]
pub enum WorkDir {
    /// A directory in a mount. The mount stays in use while this value exists.
    Inside(Held),
    /// An absolute path of the kernel's name space.
    Outside(Vec<u8>),
}

/// A directory of a mount, and a reference that keeps the mount in use.
#[derive(Debug)]
pub struct Held {
    pub(crate) here: Here,
    /// Keeps the directory open, and so its number valid, if it has no lookup.
    open: Option<Arc<Description>>,
}

impl Held {
    pub(crate) fn new(here: Here) -> Self {
        Held::with(here, None)
    }

    fn with(here: Here, open: Option<Arc<Description>>) -> Self {
        here.mount.users.fetch_add(1, Ordering::Relaxed);
        Held { here, open }
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        Held::with(self.here.clone(), self.open.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.here.mount.users.fetch_sub(1, Ordering::Release);
    }
}

impl Client {
    /// Changes the working directory, chdir(2). If `path` is outside of all mounts, the caller
    /// calls the kernel's chdir(2) and then [`Task::set_cwd`].
    pub fn chdir(&self, task: &Task, path: &[u8]) -> Result<()> {
        let who = task.credentials();
        let here = self.walk(task, &who, At::Cwd, path)?.node(true)?;
        enter(task, &who, Held::new(here))
    }

    /// Changes the working directory to an open directory, fchdir(2).
    pub fn fchdir(&self, task: &Task, dir: &Arc<Description>) -> Result<()> {
        let who = task.credentials();
        let here = dir.here().clone();
        let open = (!here.node.has_lookups()).then(|| Arc::clone(dir));
        enter(task, &who, Held::with(here, open))
    }

    /// The path of the working directory, getcwd(2). Fails with `ENOENT` if it was removed.
    pub fn getcwd(&self, task: &Task) -> Result<Vec<u8>> {
        match &*task.cwd() {
            WorkDir::Outside(_) => Err(Stop::outside(None)),
            inside @ WorkDir::Inside(_) => Ok(self.path_of_work_dir(task, inside)?),
        }
    }

    /// The path of a directory that is or was the working directory. Fails with `ENOENT` if it was removed. In a mount, this
    /// looks for the name of each directory up to the root of the mount.
    pub fn path_of_work_dir(&self, task: &Task, dir: &WorkDir) -> defuse_fs::Result<Vec<u8>> {
        match dir {
            WorkDir::Outside(path) => Ok(path.clone()),
            WorkDir::Inside(held) => self.path_of(&held.here, &task.credentials()),
        }
    }

    /// The absolute path of the file at `path`, without links, `.` and `..`, realpath(3).
    pub fn real_path(&self, task: &Task, path: &[u8]) -> Result<Vec<u8>> {
        let who = task.credentials();
        let mut walk = self.walk(task, &who, At::Cwd, path)?;
        walk.follow_last = true;
        loop {
            let Parent { dir, last } = walk.parent()?;
            let Last::Component(last) = last else { return Ok(self.path_of(&dir, &who)?) };
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
    pub(crate) fn path_of(&self, here: &Here, who: &Credentials) -> defuse_fs::Result<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut node = Arc::clone(&here.node);
        let attr = here.mount.fresh_attr(&node, None, who)?;
        if attr.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        // If there are more levels than a path can have, directories are being moved during the
        // climb.
        for _ in 0..crate::rest::PATH_MAX {
            let Some(parent) = here.mount.parent(&node, who)? else {
                return Ok(join(&here.mount, &names));
            };
            names.push(name_in(&here.mount, &parent, &node, who)?);
            node = parent;
        }
        Err(Errno::ENAMETOOLONG)
    }
}

fn enter(task: &Task, who: &Credentials, held: Held) -> Result<()> {
    let here = &held.here;
    if !here.node.is_dir() {
        return Err(Errno::ENOTDIR.into());
    }
    access::check(&here.mount, &here.node, who, Access::EXEC)?;
    task.set_cwd(WorkDir::Inside(held));
    Ok(())
}

fn join(mount: &Mount, names: &[Vec<u8>]) -> Vec<u8> {
    let mut path = mount.target();
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    // The root of a named mount ends with a slash, so that it is a path and not a plain word.
    if names.is_empty() && matches!(mount.spot, Spot::Name(_)) {
        path.push(b'/');
    }
    path
}

/// The name of `child` in `parent`. A directory does not know its own name, so this searches the
/// parent.
fn name_in(
    mount: &Mount,
    parent: &Node,
    child: &Node,
    who: &Credentials,
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
    mount: &Mount,
    dir: File,
    parent: &Node,
    child: &Node,
    who: &Credentials,
) -> defuse_fs::Result<Vec<u8>> {
    let cx = who.context(mount.origin);
    let mut from = 0;
    loop {
        let mut sink = Directories { found: Vec::new(), seen: 0, next: from };
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
struct Directories {
    found: Vec<Vec<u8>>,
    seen: usize,
    next: u64,
}

impl DirSink for Directories {
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
