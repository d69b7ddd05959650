//! The execution state: open files and directories that the next program of a process gets at
//! execve(2).
//!
//! Some of them cannot be found again by name, so they keep the numbers that the file system
//! assigned. The file system must treat the next program as the same client, for example because
//! the next program gets the connection to its server, too. Lookup counts and handles are
//! transferred unchanged.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::{Errno, Fh, FileKind, Ino};

use crate::client::DirectClient;
use crate::description::{DescriptionParts, FileDescription, InheritedFile, NEXT_ID};
use crate::mount::ClientMount;
use crate::mounted_inode::MountedInode;
use crate::stop::Result;
use crate::task::ClientTask;
use crate::work_dir::{HeldDirectory, WorkDir};

/// The state of an open file that the next program needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFileState {
    /// The inode. One lookup count is transferred with it.
    pub ino: Ino,
    /// The handle; `None` for `O_PATH`.
    pub fh: Option<Fh>,
    /// The type of the file.
    pub kind: FileKind,
    /// The current flags of open(2).
    pub flags: u32,
    /// The file has no position.
    pub stream: bool,
    /// A flush is needed at every close(2): by the file system, or because locks were taken.
    pub needs_flush: bool,
    /// The owner of its locks, see [`FileDescription::id`].
    pub id: u64,
}

impl FileDescription {
    /// The state that the next program needs.
    pub fn exec_state(&self) -> OpenFileState {
        OpenFileState {
            ino: self.inode().node.ino(),
            fh: self.fh(),
            kind: self.kind,
            flags: self.flags().0,
            stream: self.stream,
            needs_flush: self.needs_flush() || self.may_hold_locks(),
            id: self.id(),
        }
    }
}

impl WorkDir {
    /// The mount and the inode of a working directory that lies in a mount.
    pub fn working_directory(&self) -> Option<(&Arc<ClientMount>, Ino)> {
        match self {
            WorkDir::Inside(HeldDirectory { here, .. }) => Some((&here.mount, here.node.ino())),
            WorkDir::Outside(_) => None,
        }
    }
}

impl DirectClient {
    /// Creates the open file that has this state, and takes over its lookup count and handle. Fails
    /// with `ENFILE`.
    pub fn take_over(
        &self,
        task: &ClientTask,
        mount: &Arc<ClientMount>,
        state: &OpenFileState,
    ) -> Result<Arc<FileDescription>> {
        if state.needs_flush {
            // The previous program may have locked it, or another file of the mount.
            mount.has_locked.store(true, Ordering::Relaxed);
        }
        let here = adopt(mount, state.ino, state.kind);
        let opened = state.fh.map(|fh| defuse_fs::OpenReply {
            fh,
            stream: state.stream,
            no_flush: !state.needs_flush,
            ..defuse_fs::OpenReply::default()
        });
        let who = task.credentials();
        let parts = DescriptionParts { here, opened, pin: None, flags: state.flags, who };
        let taken = InheritedFile { id: state.id };
        let file = FileDescription::from_handover(parts, self.options.arena.as_ref(), taken);
        Ok(file.ok_or(Errno::ENFILE)?)
    }

    /// Makes the directory `ino` of `mount` the working directory, and takes over its lookup count.
    pub fn take_over_cwd(&self, task: &ClientTask, mount: &Arc<ClientMount>, ino: Ino) {
        task.set_cwd(WorkDir::Inside(HeldDirectory::new(adopt(mount, ino, FileKind::Directory))));
    }

    /// Returns the next id of an open file. No open file of this process has this id or a higher
    /// one.
    pub fn next_file_id(&self) -> u64 {
        NEXT_ID.load(Ordering::Relaxed)
    }

    /// Sets the next id of an open file, so that ids continue after the ids of the previous
    /// program.
    pub fn set_next_file_id(&self, next: u64) {
        NEXT_ID.fetch_max(next, Ordering::Relaxed);
    }
}

fn adopt(mount: &Arc<ClientMount>, ino: Ino, kind: FileKind) -> MountedInode {
    if ino == Ino::ROOT {
        return MountedInode { node: Arc::clone(&mount.root), mount: Arc::clone(mount) };
    }
    MountedInode { node: mount.core.node(ino, kind, 1), mount: Arc::clone(mount) }
}
