//! Open files and directories of the adapter.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Errno, Fh, Ino, Result};

use super::held::PathTreeLock;
use super::tree::PathHandle;
use super::types::PathDirEntry;

/// A handle lent to an operation that has none. It is not released before this is dropped.
pub(super) struct BorrowedHandle<'a> {
    names: &'a PathTreeLock,
    ino: Ino,
    pub fh: Fh,
}

impl Drop for BorrowedHandle<'_> {
    fn drop(&mut self) {
        if let Ok(node) = self.names.lock().node_mut(self.ino) {
            let borrowed = |handle: &&mut PathHandle| handle.fh == self.fh && handle.borrowed > 0;
            if let Some(handle) = node.handles.iter_mut().find(borrowed) {
                handle.borrowed -= 1;
            }
        }
        self.names.wake();
    }
}

impl PathTreeLock {
    /// Registers an open handle of `ino`. Fails with `ESTALE` if the frontend has forgotten the
    /// inode meanwhile.
    pub fn add_handle(&self, ino: Ino, fh: Fh, writable: bool) -> Result<()> {
        let handle = PathHandle { fh, writable, borrowed: 0, closing: false };
        self.lock().node_mut(ino)?.handles.push(handle);
        Ok(())
    }

    /// Borrows any open handle of `ino`, for writing if `write` is set. Fails with `ESTALE` if
    /// there is none.
    pub fn borrow_handle(&self, ino: Ino, write: bool) -> Result<BorrowedHandle<'_>> {
        let mut tree = self.lock();
        let handles = tree.node_mut(ino)?.handles.iter_mut();
        let handle = handles.filter(|handle| !handle.closing).find(|it| it.writable || !write);
        let handle = handle.ok_or(Errno::ESTALE)?;
        handle.borrowed += 1;
        Ok(BorrowedHandle { names: self, ino, fh: handle.fh })
    }

    /// Waits until the handle is not borrowed, and prevents further borrowing.
    pub fn close_handle(&self, ino: Ino, fh: Fh) {
        let mut tree = self.lock();
        while let Ok(node) = tree.node_mut(ino) {
            let open = node.handles.iter_mut().filter(|it| it.fh == fh && !it.closing);
            match open.min_by_key(|handle| handle.borrowed) {
                Some(handle) if handle.borrowed == 0 => {
                    handle.closing = true;
                    return;
                }
                Some(_) => tree = self.wait(tree),
                None => return,
            }
        }
    }

    /// Removes a closed handle. Returns true if it was the last one of a hidden file.
    pub fn drop_handle(&self, ino: Ino, fh: Fh) -> bool {
        let mut tree = self.lock();
        let Ok(node) = tree.node_mut(ino) else { return false };
        if let Some(place) = node.handles.iter().position(|it| it.fh == fh && it.closing) {
            node.handles.swap_remove(place);
        }
        let last = node.hidden.is_some() && node.handles.is_empty();
        if !last {
            tree.collect(ino);
        }
        last
    }
}

/// The open directories, each with the listing for its readdir calls.
#[derive(Debug, Default)]
pub(super) struct OpenPathDirs {
    open: Mutex<DirTable>,
}

#[derive(Debug, Default)]
struct DirTable {
    dirs: HashMap<Fh, Arc<OpenPathDir>>,
    last: u64,
}

/// An open directory.
#[derive(Debug)]
pub(super) struct OpenPathDir {
    /// The backend's handle.
    pub fh: Fh,
    pub listing: Mutex<Option<Arc<[PathDirEntry]>>>,
}

impl OpenPathDirs {
    fn lock(&self) -> MutexGuard<'_, DirTable> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a handle of the adapter for the backend's handle `fh`.
    pub fn add(&self, fh: Fh) -> Fh {
        let mut table = self.lock();
        table.last += 1;
        let own = Fh(table.last);
        table.dirs.insert(own, Arc::new(OpenPathDir { fh, listing: Mutex::default() }));
        own
    }

    /// Returns the directory that is open as `fh`. Fails with `EBADF`.
    pub fn get(&self, fh: Fh) -> Result<Arc<OpenPathDir>> {
        self.lock().dirs.get(&fh).cloned().ok_or(Errno::EBADF)
    }

    /// Removes an open directory.
    pub fn remove(&self, fh: Fh) -> Result<Arc<OpenPathDir>> {
        self.lock().dirs.remove(&fh).ok_or(Errno::EBADF)
    }
}
