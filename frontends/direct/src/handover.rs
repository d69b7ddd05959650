//! Open files and directories that go from one program of a process to the next, execve(2), with the
//! file system's own numbers: by name some of them cannot be found again.
//!
//! That takes a file system that knows the next program for the same: one behind a connection that is
//! handed over, too. Lookups and handles are taken over as they are.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::{Errno, Fh, FileKind, Ino};

use crate::client::Client;
use crate::cwd::{Held, Place};
use crate::description::{Description, NEXT_ID, Parts, Taken};
use crate::mount::Mount;
use crate::stop::Result;
use crate::task::Task;
use crate::walk::Here;

/// What another program has to know of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// The inode, of which one lookup goes along.
    pub ino: Ino,
    /// The handle; `None` for `O_PATH`.
    pub fh: Option<Fh>,
    /// What it is.
    pub kind: FileKind,
    /// The flags of open(2) as they are now.
    pub flags: u32,
    /// It has no position.
    pub stream: bool,
    /// The file system wants to hear of every close(2).
    pub needs_flush: bool,
    /// The owner of its locks, see [`Description::id`].
    pub id: u64,
}

impl Description {
    /// What the next program has to know of it.
    pub fn parcel(&self) -> Parcel {
        Parcel {
            ino: self.here().node.ino(),
            fh: self.fh(),
            kind: self.kind,
            flags: self.flags().0,
            stream: self.stream,
            needs_flush: self.needs_flush(),
            id: self.id(),
        }
    }
}

impl Place {
    /// The mount and the inode of a working directory that lies in a mount.
    pub fn inside(&self) -> Option<(&Arc<Mount>, Ino)> {
        match self {
            Place::Inside(Held(here)) => Some((&here.mount, here.node.ino())),
            Place::Outside(_) => None,
        }
    }
}

impl Client {
    /// The open file of a parcel, whose lookup and handle are this program's now. `ENFILE`.
    pub fn take_over(
        &self,
        task: &Task,
        mount: &Arc<Mount>,
        parcel: &Parcel,
    ) -> Result<Arc<Description>> {
        let here = adopt(mount, parcel.ino, parcel.kind);
        let opened = parcel.fh.map(|fh| defuse_fs::Opened {
            fh,
            stream: parcel.stream,
            no_flush: !parcel.needs_flush,
            ..defuse_fs::Opened::default()
        });
        let who = (*task.credentials()).clone();
        let parts = Parts { here, opened, flags: parcel.flags, who };
        let taken = Taken { id: parcel.id };
        let file = Description::taken_over(parts, self.options.arena.as_ref(), taken);
        Ok(file.ok_or(Errno::ENFILE)?)
    }

    /// Stands in the directory `ino` of `mount`, whose lookup is this program's now.
    pub fn take_over_cwd(&self, task: &Task, mount: &Arc<Mount>, ino: Ino) {
        task.set_cwd(Place::Inside(Held::new(adopt(mount, ino, FileKind::Directory))));
    }

    /// The number from which on no open file of this process has had its id.
    pub fn next_file_id(&self) -> u64 {
        NEXT_ID.load(Ordering::Relaxed)
    }

    /// Open files get ids from `next` on, as the program before would have given them.
    pub fn set_next_file_id(&self, next: u64) {
        NEXT_ID.fetch_max(next, Ordering::Relaxed);
    }
}

fn adopt(mount: &Arc<Mount>, ino: Ino, kind: FileKind) -> Here {
    if ino == Ino::ROOT {
        return Here { node: Arc::clone(&mount.root), mount: Arc::clone(mount) };
    }
    Here { node: mount.core.node(ino, kind, 1), mount: Arc::clone(mount) }
}
