//! Names in use. They keep a path valid while the backend works on it.
//!
//! An operation acquires all names that it needs at once, and holds none while it waits, so that
//! there is no deadlock. An operation that waits to change a name delays later ones, except those
//! that also change names, because it might have to wait for them.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Context, Errno, Ino, Result};

use super::tree::{NameEdge, PathTree};
use super::types::PathRef;

/// The interval at which a waiting operation checks for an interrupt.
const INTERRUPT_CHECK: Duration = Duration::from_millis(10);

/// The tree behind a mutex. A path of the tree can be held for longer than the mutex.
#[derive(Debug)]
pub(super) struct PathTreeLock {
    tree: Mutex<PathTree>,
    changed: Condvar,
    /// Number of waiters on `changed`. Without waiters the system call is skipped.
    waiting: AtomicUsize,
}

/// A path that an operation needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum NeededPath<'a> {
    /// The path of this inode.
    Node(Ino),
    /// A name in this directory.
    Name(Ino, &'a [u8]),
    /// A name in this directory, to be changed.
    Change(Ino, &'a [u8]),
}

/// The reason why names cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldRefusal {
    /// The inode is unknown or has no name: `ESTALE`.
    Gone,
    /// The directory has no name: `ENOENT`.
    DirGone,
    /// The name to be changed by the want with this index is on the path of another want.
    Nested(usize),
    /// The caller gave up: `EINTR`.
    Interrupted,
}

impl From<HoldRefusal> for Errno {
    fn from(refusal: HoldRefusal) -> Self {
        match refusal {
            HoldRefusal::Gone => Errno::ESTALE,
            HoldRefusal::DirGone => Errno::ENOENT,
            HoldRefusal::Nested(_) => Errno::EINVAL,
            HoldRefusal::Interrupted => Errno::EINTR,
        }
    }
}

/// Paths that remain valid until this is dropped.
pub(super) struct HeldPaths<'a> {
    names: &'a PathTreeLock,
    paths: Vec<HeldPath>,
}

#[derive(Debug)]
struct HeldPath {
    path: Vec<u8>,
    steps: Vec<HeldStep>,
    /// The last step is held for a change.
    change: bool,
}

/// A name on a path: its directory, and its position in the path.
#[derive(Debug)]
struct HeldStep {
    parent: Ino,
    start: usize,
    end: usize,
}

impl HeldPath {
    fn name(&self, step: &HeldStep) -> &[u8] {
        &self.path[step.start..step.end]
    }

    /// The name to be changed.
    fn changed_name(&self) -> Option<(Ino, &[u8])> {
        let last = self.steps.last().filter(|_| self.change)?;
        Some((last.parent, self.name(last)))
    }

    /// The names that are shared.
    fn shared_names(&self) -> impl Iterator<Item = (Ino, &[u8])> {
        let count = self.steps.len() - usize::from(self.change);
        self.steps[..count].iter().map(|step| (step.parent, self.name(step)))
    }
}

impl HeldPaths<'_> {
    /// The path of the want with this index.
    pub fn path(&self, place: usize) -> PathRef<'_> {
        PathRef::from_checked(&self.paths[place].path)
    }
}

impl Drop for HeldPaths<'_> {
    fn drop(&mut self) {
        let mut tree = self.names.lock();
        for held in &self.paths {
            for (parent, name) in held.shared_names() {
                tree.with_edge(parent, name, |edge| edge.shared -= 1);
            }
            if let Some((parent, name)) = held.changed_name() {
                tree.with_edge(parent, name, |edge| edge.exclusive = false);
            }
        }
        drop(tree);
        self.names.wake();
    }
}

impl PathTreeLock {
    pub fn new() -> Self {
        PathTreeLock {
            tree: Mutex::new(PathTree::new()),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Locks the tree for bookkeeping. Must not be held during a call to a backend.
    pub fn lock(&self) -> MutexGuard<'_, PathTree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the operations that wait for names or handles. Called after unlocking the tree: an
    /// operation that begins to wait afterwards has seen the change, and one that misses the call
    /// checks again soon.
    pub fn wake(&self) {
        if self.waiting.load(Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits for a short time, or until a change.
    pub fn wait<'t>(&self, tree: MutexGuard<'t, PathTree>) -> MutexGuard<'t, PathTree> {
        self.waiting.fetch_add(1, Relaxed);
        let waited = self.changed.wait_timeout(tree, INTERRUPT_CHECK);
        self.waiting.fetch_sub(1, Relaxed);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until all of `wants` are available, and holds them.
    pub fn hold(
        &self,
        cx: &Context<'_>,
        wants: &[NeededPath<'_>],
    ) -> Result<HeldPaths<'_>, HoldRefusal> {
        let mut tree = self.lock();
        if let Some(paths) = try_hold(&mut tree, wants)? {
            return Ok(HeldPaths { names: self, paths });
        }
        set_wanted(&mut tree, wants, |edge| edge.wanted += 1);
        let paths = loop {
            tree = self.wait(tree);
            match try_hold(&mut tree, wants) {
                Ok(None) if cx.is_interrupted() => break Err(HoldRefusal::Interrupted),
                Ok(None) => {}
                Ok(Some(paths)) => break Ok(paths),
                Err(refusal) => break Err(refusal),
            }
        };
        set_wanted(&mut tree, wants, |edge| edge.wanted -= 1);
        drop(tree);
        if paths.is_err() {
            self.wake();
        }
        paths.map(|paths| HeldPaths { names: self, paths })
    }
}

/// Applies `change` to the edges that `wants` change.
fn set_wanted(tree: &mut PathTree, wants: &[NeededPath<'_>], change: impl Fn(&mut NameEdge)) {
    for want in wants {
        if let NeededPath::Change(parent, name) = *want {
            tree.with_edge(parent, name, &change);
        }
    }
}

/// Holds all of `wants`, or none (`None`) if one of them is in use.
fn try_hold(
    tree: &mut PathTree,
    wants: &[NeededPath<'_>],
) -> Result<Option<Vec<HeldPath>>, HoldRefusal> {
    let mut paths = Vec::with_capacity(wants.len());
    for want in wants {
        paths.push(build(tree, want)?);
    }
    for (place, held) in paths.iter().enumerate() {
        let on_path =
            |name| paths.iter().any(|other| other.shared_names().any(|step| step == name));
        if held.changed_name().is_some_and(on_path) {
            return Err(HoldRefusal::Nested(place));
        }
    }
    // Operations that change names do not wait for others that want to: each might be on the
    // other's path, which would be a deadlock.
    let polite = !paths.iter().any(|held| held.change);
    let free = paths.iter().all(|held| {
        let blocked = |(parent, name): (Ino, &[u8])| {
            tree.edge(parent, name)
                .is_some_and(|edge| edge.exclusive || (polite && edge.wanted > 0))
        };
        let in_use = |(parent, name): (Ino, &[u8])| {
            tree.edge(parent, name).is_some_and(|edge| edge.exclusive || edge.shared > 0)
        };
        !held.shared_names().any(blocked) && !held.changed_name().is_some_and(in_use)
    });
    if !free {
        return Ok(None);
    }
    for held in &paths {
        for (parent, name) in held.shared_names() {
            tree.with_edge(parent, name, |edge| edge.shared += 1);
        }
        if let Some((parent, name)) = held.changed_name() {
            tree.with_edge(parent, name, |edge| edge.exclusive = true);
        }
    }
    Ok(Some(paths))
}

/// Builds the path of a want, with its names.
fn build(tree: &PathTree, want: &NeededPath<'_>) -> Result<HeldPath, HoldRefusal> {
    let (dir, last) = match *want {
        NeededPath::Node(ino) => (ino, None),
        NeededPath::Name(parent, name) | NeededPath::Change(parent, name) => {
            (parent, Some((parent, name)))
        }
    };
    let gone = if last.is_some() { HoldRefusal::DirGone } else { HoldRefusal::Gone };
    let chain = tree.chain(dir).map_err(|_| HoldRefusal::Gone)?.ok_or(gone)?;
    let (mut path, mut steps) = (Vec::new(), Vec::with_capacity(chain.len() + 1));
    for (parent, name) in chain.into_iter().rev().chain(last) {
        path.push(b'/');
        let start = path.len();
        path.extend_from_slice(name);
        steps.push(HeldStep { parent, start, end: path.len() });
    }
    if path.is_empty() {
        path.push(b'/');
    }
    Ok(HeldPath { path, steps, change: matches!(want, NeededPath::Change(..)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::tree::NamedFile;
    use crate::{Caller, FileKind, InterruptToken};

    const DIR: NamedFile = NamedFile { kind: FileKind::Directory, st_ino: None, fresh: true };

    #[test]
    fn an_operation_below_a_directory_delays_its_rename() {
        let names = PathTreeLock::new();
        let cx = Context::new(Caller::default());
        let dir = names.lock().bind(Ino::ROOT, b"a", DIR).unwrap();
        let below = names.hold(&cx, &[NeededPath::Name(dir, b"x")]).ok().unwrap();
        assert_eq!(below.path(0).as_bytes(), b"/a/x");

        let token = InterruptToken::default();
        token.trip();
        let gone = Context::with_interrupt(Caller::default(), 1, &token);
        let change = [NeededPath::Change(Ino::ROOT, b"a")];
        assert_eq!(names.hold(&gone, &change).err(), Some(HoldRefusal::Interrupted));

        std::thread::scope(|scope| {
            let mover = scope.spawn(|| drop(names.hold(&cx, &change)));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!mover.is_finished());
            // A later operation gives priority to the rename.
            assert_eq!(
                names.hold(&gone, &[NeededPath::Node(dir)]).err(),
                Some(HoldRefusal::Interrupted)
            );
            drop(below);
        });
        assert_eq!(
            names.hold(&cx, &[NeededPath::Node(dir)]).ok().unwrap().path(0).as_bytes(),
            b"/a"
        );
        names.lock().forget(dir, 1);
        assert_eq!(names.lock().len(), 1);
    }

    #[test]
    fn changing_a_name_on_the_path_of_another_want_is_refused() {
        let names = PathTreeLock::new();
        let cx = Context::new(Caller::default());
        let dir = names.lock().bind(Ino::ROOT, b"a", DIR).unwrap();
        let below = [NeededPath::Change(Ino::ROOT, b"a"), NeededPath::Change(dir, b"x")];
        assert_eq!(names.hold(&cx, &below).err(), Some(HoldRefusal::Nested(0)));
        let above = [NeededPath::Change(dir, b"x"), NeededPath::Change(Ino::ROOT, b"a")];
        assert_eq!(names.hold(&cx, &above).err(), Some(HoldRefusal::Nested(1)));
        assert_eq!(
            names.hold(&cx, &[NeededPath::Name(Ino(99), b"x")]).err(),
            Some(HoldRefusal::Gone)
        );
        // Nothing stays in use after a refusal.
        assert!(names.lock().edge(dir, b"x").is_none());
    }
}
