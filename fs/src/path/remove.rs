//! Removal of the names of open files.

use std::sync::atomic::Ordering;

use crate::{Context, Errno, FileKind, Ino, Name, RenameFlags, Result};

use super::adapter::PathAdapter;
use super::held::{HoldRefusal, NeededPath};
use super::{PathFileSystem, PathOperand, PathRef};

/// Prefix of the names of hidden files.
const HIDDEN: &str = ".defuse_hidden";

/// Maximum number of names to try for a file. Names of an earlier run may exist.
const HIDDEN_TRIES: usize = 64;

impl<P: PathFileSystem> PathAdapter<P> {
    /// Removes a name. If it is the last name of an open file, and the backend needs a name to
    /// access it, hides the file.
    pub(super) fn unlink_or_hide(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
    ) -> Result<()> {
        let name = name.as_bytes();
        let held = self.names.hold(cx, &[NeededPath::Change(parent, name)])?;
        if self.must_hide(parent, name) {
            return self.hide(cx, parent, name, held.path(0)).map(|_| ());
        }
        let ends = self.find_ending(cx, parent, name, held.path(0));
        self.inner.unlink(cx, held.path(0))?;
        let mut tree = self.names.lock();
        if let Some(ino) = ends {
            tree.forget_st_ino(ino);
        }
        tree.detach(parent, name);
        Ok(())
    }

    /// Renames.
    pub(super) fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let (from, to) = ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
        if from == to {
            return self.move_to_itself(cx, from, flags);
        }
        let wants = [NeededPath::Change(from.0, from.1), NeededPath::Change(to.0, to.1)];
        let held = match self.names.hold(cx, &wants) {
            Ok(held) => held,
            Err(refusal) => {
                // ENOENT has priority, as in rename(2).
                let held = self.names.hold(cx, &[NeededPath::Name(from.0, from.1)])?;
                self.inner.getattr(cx, PathOperand::Path(held.path(0)))?;
                return Err(nesting_error(refusal, flags));
            }
        };
        let (from_path, to_path) = (held.path(0), held.path(1));
        if flags.has(RenameFlags::EXCHANGE) {
            self.inner.rename(cx, from_path, to_path, flags)?;
            self.names.lock().exchange(from, to);
            return Ok(());
        }
        let mut hidden = None;
        let (known, open) = (self.st_ino(to), self.must_hide(to.0, to.1));
        let replaces = !flags.has(RenameFlags::NOREPLACE) && (known.is_some() || open);
        if replaces {
            // Errors of the rename must be found before a file is hidden.
            let moved = self.inner.getattr(cx, PathOperand::Path(from_path))?;
            if known.is_some() && known == self.caps.identity(&moved) {
                // Two names of one file: rename(2) does nothing.
                return self.inner.rename(cx, from_path, to_path, flags);
            }
            if open && moved.kind != FileKind::Directory {
                hidden = Some(self.hide(cx, to.0, to.1, to_path)?);
            }
        }
        let ends = self.find_ending(cx, to.0, to.1, to_path);
        if let Err(errno) = self.inner.rename(cx, from_path, to_path, flags) {
            if let Some(hidden) = hidden {
                self.show(cx, to, hidden, to_path);
            }
            return Err(errno);
        }
        self.record_move(from, to, ends);
        Ok(())
    }

    /// Renames in the tree. `ends` is the replaced inode that no longer exists.
    fn record_move(&self, from: (Ino, &[u8]), to: (Ino, &[u8]), ends: Option<Ino>) {
        let mut tree = self.names.lock();
        if let Some(ino) = ends {
            tree.forget_st_ino(ino);
        }
        let moved = tree.child(from.0, from.1);
        tree.rename(from, to);
        if let Some(node) = moved.and_then(|ino| tree.node_mut(ino).ok()) {
            // A hidden file that was renamed by a client must not be removed.
            node.hidden.take_if(|(dir, name)| (*dir, &**name) == from);
        }
    }

    fn move_to_itself(
        &self,
        cx: &Context<'_>,
        (parent, name): (Ino, &[u8]),
        flags: RenameFlags,
    ) -> Result<()> {
        let held = self.names.hold(cx, &[NeededPath::Name(parent, name)])?;
        self.inner.getattr(cx, PathOperand::Path(held.path(0)))?;
        if flags.has(RenameFlags::NOREPLACE) { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// Removes a hidden file after its last handle was released, unless it was opened again.
    pub(super) fn remove_hidden(&self, cx: &Context<'_>, ino: Ino) {
        let Ok(Some((parent, name))) = self.names.lock().node(ino).map(|node| node.hidden.clone())
        else {
            return;
        };
        let Ok(held) = self.names.hold(cx, &[NeededPath::Change(parent, &name)]) else { return };
        let unused = |ino| {
            let tree = self.names.lock();
            let here = tree.child(parent, &name) == Some(ino);
            here && tree.node(ino).is_ok_and(|node| node.handles.is_empty())
        };
        if unused(ino) {
            let ends = self.find_ending(cx, parent, &name, held.path(0));
            // An error cannot be reported. The file then keeps its hidden name.
            let _ = self.inner.unlink(cx, held.path(0));
            let mut tree = self.names.lock();
            if let Ok(node) = tree.node_mut(ino) {
                node.hidden = None;
            }
            if let Some(ino) = ends {
                tree.forget_st_ino(ino);
            }
            tree.detach(parent, &name);
        }
    }

    /// True if the name is the last one of an open file that needs a name.
    fn must_hide(&self, parent: Ino, name: &[u8]) -> bool {
        let tree = self.names.lock();
        let node = tree.child(parent, name).and_then(|ino| tree.node(ino).ok());
        !self.caps.handles_survive_unlink
            && node.is_some_and(|node| !node.handles.is_empty() && node.names.len() == 1)
    }

    /// The backend's inode number of the file at this name.
    fn st_ino(&self, (parent, name): (Ino, &[u8])) -> Option<u64> {
        let tree = self.names.lock();
        tree.node(tree.child(parent, name)?).ok()?.st_ino
    }

    /// The inode that ceases to exist with this name: it has no other known name, and no unknown
    /// link. `None` unless numbers are stable, which may then be reused.
    fn find_ending(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: &[u8],
        path: PathRef<'_>,
    ) -> Option<Ino> {
        let ino = {
            let tree = self.names.lock();
            let ino = tree.child(parent, name)?;
            let node = tree.node(ino).ok()?;
            (node.st_ino.is_some() && node.names.len() == 1).then_some(ino)?
        };
        let links = self.inner.getattr(cx, PathOperand::Path(path)).map_or(0, |attr| attr.nlink);
        (links <= 1).then_some(ino)
    }

    /// Renames the file at `name`, which the caller holds exclusively, to a hidden name. Returns
    /// that name. Fails with `EBUSY` if no free one is found.
    fn hide(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: &[u8],
        path: PathRef<'_>,
    ) -> Result<Vec<u8>> {
        for _ in 0..HIDDEN_TRIES {
            let number = self.hidden.fetch_add(1, Ordering::Relaxed);
            let hidden = format!("{HIDDEN}{number:016x}").into_bytes();
            let hidden_path = sibling(path, &hidden);
            let hidden_ref = PathRef::from_checked(&hidden_path);
            match self.inner.getattr(cx, PathOperand::Path(hidden_ref)) {
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno),
                Ok(_) => continue,
            }
            self.inner.rename(cx, path, hidden_ref, RenameFlags::default())?;
            let mut tree = self.names.lock();
            let ino = tree.child(parent, name);
            tree.rename((parent, name), (parent, &hidden));
            if let Some(node) = ino.and_then(|ino| tree.node_mut(ino).ok()) {
                node.hidden = Some((parent, hidden.clone().into()));
            }
            return Ok(hidden);
        }
        Err(Errno::EBUSY)
    }

    /// Reverts [`hide`](Self::hide), because the operation that needed the name has failed.
    fn show(&self, cx: &Context<'_>, to: (Ino, &[u8]), hidden: Vec<u8>, path: PathRef<'_>) {
        let hidden_path = sibling(path, &hidden);
        let hidden_ref = PathRef::from_checked(&hidden_path);
        // If this fails too, the file remains hidden, and is removed with its last handle.
        if self.inner.rename(cx, hidden_ref, path, RenameFlags::default()).is_ok() {
            let mut tree = self.names.lock();
            let ino = tree.child(to.0, &hidden);
            tree.rename((to.0, &hidden), to);
            if let Some(node) = ino.and_then(|ino| tree.node_mut(ino).ok()) {
                node.hidden = None;
            }
        }
    }
}

/// The error of rename(2) if one name is below the other.
fn nesting_error(refusal: HoldRefusal, flags: RenameFlags) -> Errno {
    match refusal {
        HoldRefusal::Nested(1) if flags.has(RenameFlags::NOREPLACE) => Errno::EEXIST,
        HoldRefusal::Nested(1) if !flags.has(RenameFlags::EXCHANGE) => Errno::ENOTEMPTY,
        other => other.into(),
    }
}

/// The path of `name` in the parent directory of `path`.
fn sibling(path: PathRef<'_>, name: &[u8]) -> Vec<u8> {
    let dir = path.split().map_or(&b"/"[..], |(dir, _)| dir.as_bytes());
    let mut sibling = dir.to_vec();
    if dir != b"/" {
        sibling.push(b'/');
    }
    sibling.extend_from_slice(name);
    sibling
}
