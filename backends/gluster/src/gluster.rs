//! The file system: its state, and the user that a call acts as.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use defuse_fs::{Context, Entry, Errno, Fh, Ino, OpenFlags, Result};

use crate::address::Address;
use crate::attributes::attr;
use crate::file::Handle;
use crate::listing::Listing;
use crate::locks::Locks;
use crate::nodes::Nodes;
use crate::transfer::{AnswerOn, Pool};
use crate::volume::{Gfid, Object, Volume};
use crate::{Options, connect};

/// Time for which the groups of a process are not asked for again.
const GROUPS_VALID_FOR: Duration = Duration::from_secs(1);

/// Maximum number of processes whose groups are kept.
const GROUPS_KEPT: usize = 1024;

/// A GlusterFS volume.
pub struct Gluster {
    pub(crate) volume: Arc<Volume>,
    pub(crate) nodes: Nodes,
    pub(crate) open: RwLock<HashMap<u64, Opened>>,
    next_fh: AtomicU64,
    pub(crate) locks: Locks,
    pub(crate) pool: Arc<Pool>,
    pub(crate) settings: Settings,
    groups: Mutex<HashMap<Process, KnownGroups>>,
}

/// Process, user and group.
type Process = (u32, u32, u32);

/// The groups of a process, and the time when they were asked for.
type KnownGroups = (Instant, Arc<[u32]>);

/// The settings of a file system that do not change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Validity of names and attributes.
    pub valid_for: Duration,
    /// Threads of an application call: they get their user back.
    pub restores: bool,
    /// The thread that answers transfers.
    pub answer_on: AnswerOn,
    /// See [`Options::submits`].
    pub submits: bool,
    /// The servers keep access lists.
    pub posix_acl: bool,
}

/// An open file or directory.
#[derive(Clone)]
pub(crate) enum Opened {
    File(Arc<OpenFile>),
    Dir(Arc<Listing>),
}

/// An open file.
pub(crate) struct OpenFile {
    pub ino: Ino,
    pub flags: OpenFlags,
    pub handle: Arc<Handle>,
    /// A handle without `O_APPEND`, for a file whose flags were changed.
    pub plain: Mutex<Option<Arc<Handle>>>,
    /// Written since the last flush.
    pub dirty: AtomicBool,
}

impl Gluster {
    /// Opens the volume at `//HOST[,HOST...]/VOLUME[/DIR]`.
    ///
    /// # Errors
    ///
    /// A text that names the object and the next step: a wrong form, a missing library, servers that cannot
    /// be reached, a volume or a directory that is not there.
    pub fn connect(address: &str, options: &Options) -> Result<Gluster, String> {
        connect::open(&Address::parse(address)?, options)
    }

    pub(crate) fn new(volume: Arc<Volume>, root: Gfid, settings: Settings) -> Gluster {
        Gluster {
            volume,
            nodes: Nodes::new(root),
            open: RwLock::default(),
            next_fh: AtomicU64::new(1),
            locks: Locks::default(),
            pool: Arc::default(),
            settings,
            groups: Mutex::default(),
        }
    }

    /// Acts as the caller, with its groups, until the result is dropped.
    pub(crate) fn act(&self, cx: &Context<'_>) -> Acting<'_> {
        self.act_as(cx, (cx.caller.uid, cx.caller.gid))
    }

    /// Acts as another user with the groups of the caller: the owner of a new inode.
    pub(crate) fn act_as(&self, cx: &Context<'_>, (uid, gid): (u32, u32)) -> Acting<'_> {
        // The servers let root do anything.
        let groups = if uid == 0 { None } else { Some(self.groups(cx)) };
        self.volume.act_as(uid, gid, groups.as_deref().unwrap_or_default());
        Acting { volume: &self.volume, restores: self.settings.restores }
    }

    /// Acts as the caller on an open file, for which servers check nothing.
    pub(crate) fn act_on_open(&self, cx: &Context<'_>) -> Acting<'_> {
        self.volume.act_as(cx.caller.uid, cx.caller.gid, &[]);
        Acting { volume: &self.volume, restores: self.settings.restores }
    }

    /// The supplementary groups of the caller; none where nobody knows them.
    fn groups(&self, cx: &Context<'_>) -> Arc<[u32]> {
        let key = (cx.caller.pid, cx.caller.uid, cx.caller.gid);
        let lock = || self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((asked, groups)) = lock().get(&key)
            && asked.elapsed() < GROUPS_VALID_FOR
        {
            return Arc::clone(groups);
        }
        let groups: Arc<[u32]> = cx.supplementary_groups().unwrap_or_default().into();
        let mut kept = lock();
        if kept.len() >= GROUPS_KEPT {
            kept.clear();
        }
        kept.insert(key, (Instant::now(), Arc::clone(&groups)));
        groups
    }

    /// A reference to a known inode.
    pub(crate) fn object(&self, ino: Ino) -> Result<Object<'_>> {
        self.volume.object(self.nodes.gfid(ino)?)
    }

    /// The answer of a lookup, which counts.
    pub(crate) fn entry(
        &self,
        (object, stat): (&Object<'_>, &libc::stat),
        parent: Gfid,
    ) -> Result<Entry> {
        self.entry_of((object.gfid()?, stat), parent)
    }

    /// The answer of a lookup, which counts, of an identity.
    pub(crate) fn entry_of(
        &self,
        (gfid, stat): (Gfid, &libc::stat),
        parent: Gfid,
    ) -> Result<Entry> {
        let valid_for = self.settings.valid_for;
        let attr = attr(stat, valid_for)?;
        let parent = (attr.kind == defuse_fs::FileKind::Directory).then_some(parent);
        let ino = self.nodes.look_up(gfid, parent);
        Ok(Entry { ino, generation: 0, attr, valid_for })
    }

    /// Adds an open file or directory.
    pub(crate) fn add_open(&self, opened: Opened) -> Fh {
        let fh = self.next_fh.fetch_add(1, Ordering::Relaxed);
        let file = match &opened {
            Opened::File(file) => Some(file.ino),
            Opened::Dir(_) => None,
        };
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(fh, opened);
        if let Some(ino) = file {
            self.nodes.opened(ino, Fh(fh));
        }
        Fh(fh)
    }

    /// Removes an open file or directory.
    pub(crate) fn remove_open(&self, fh: Fh) -> Option<Opened> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&fh.0)
    }

    /// An open file. Fails with `EBADF`.
    pub(crate) fn file(&self, fh: Fh) -> Result<Arc<OpenFile>> {
        match self.opened(fh) {
            Some(Opened::File(file)) => Ok(file),
            _ => Err(Errno::EBADF),
        }
    }

    /// An open directory. Fails with `EBADF`.
    pub(crate) fn dir(&self, fh: Fh) -> Result<Arc<Listing>> {
        match self.opened(fh) {
            Some(Opened::Dir(dir)) => Ok(dir),
            _ => Err(Errno::EBADF),
        }
    }

    fn opened(&self, fh: Fh) -> Option<Opened> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&fh.0).cloned()
    }

    /// Runs `by_name` on an inode. If it has no name any more, runs `by_file` on one of its open files.
    pub(crate) fn reach<T>(
        &self,
        ino: Ino,
        by_name: impl FnOnce(&Object<'_>) -> Result<T>,
        by_file: impl FnOnce(&OpenFile) -> Result<T>,
    ) -> Result<T> {
        let reached = self.object(ino).and_then(|object| by_name(&object));
        match reached {
            Err(Errno::ENOENT | Errno::ESTALE) => match self.nodes.any_open(ino) {
                Some(fh) => by_file(&*self.file(fh)?),
                None => reached,
            },
            reached => reached,
        }
    }
}

/// A thread that acts as a user.
pub(crate) struct Acting<'a> {
    volume: &'a Volume,
    restores: bool,
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        if self.restores {
            self.volume.act_as_process();
        }
    }
}
