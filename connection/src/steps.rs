//! Whole paths and whole directories in one call, without lookups: the data by which a client finds
//! a name again without a request.
//!
//! The client may then name the reported inodes for some time: the ledger remembers a limited
//! number of them. Afterwards the reply is `ESTALE`, and the client repeats its request.

use std::sync::{MutexGuard, PoisonError};

use defuse_fs::{
    Attr, Caller, Context, DirBuf, DirItem, DirSink, Entry, Errno, File, FileKind, FileSystem, Ino,
    Name, NormalPath, OpenFlags, PathResolution, Result, shortcuts_of,
};

use crate::call::CheckedCall;
use crate::connection::PeerConnection;
use crate::ledger::ConnectionLedger;
use crate::pages::{LookupVersions, NameSource};
use crate::rules::{EXEC, READ};

/// The maximum number of names that are published later. A client could request more before they
/// are published.
const MOST_UNTOLD: usize = 1024;

/// An inode on the way of a path, or in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStep {
    /// The inode, without a lookup.
    pub ino: Ino,
    /// Its attributes.
    pub attr: Attr,
    /// True if every user may search the directory in which it was found.
    pub open_to_all: bool,
}

/// The end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkEnd {
    /// The last step belongs to the last name.
    Found,
    /// The next name does not exist in the directory.
    Missing {
        /// True if every user may search the directory.
        open_to_all: bool,
    },
    /// The next name has to be looked up.
    Walk,
}

impl<F: FileSystem> PeerConnection<F> {
    /// Passes each inode on the way of `path` to the callback.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EACCES` where the user may not search a directory
    /// on the way; `ENOSYS` for a file system that cannot resolve paths.
    pub fn walk_steps(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
        mut report: impl FnMut(PathStep),
    ) -> Result<WalkEnd> {
        let call = self.check(cx, &[from])?;
        let mut names = path.names().peekable();
        let mut dir = from;
        while let Some(name) = names.next() {
            // The published rights are not newer than the checked ones.
            let before = versions_before(&self.ledger, (dir, name));
            call.guard(|guard| guard.permit(dir, EXEC))?;
            let resolved = resolve_name(&self.ledger, &call, cx, (dir, name))?;
            if let (Some(before), Some(names)) = (before, self.ledger.names()) {
                share(&**names, before, (dir, name), &resolved, (call.fs, cx));
            }
            match resolved {
                PathResolution::Inode { ino, attr, open_to_all } => {
                    report(PathStep { ino, attr, open_to_all });
                    if attr.kind != FileKind::Directory && names.peek().is_some() {
                        return Ok(WalkEnd::Walk);
                    }
                    dir = ino;
                }
                PathResolution::Missing { open_to_all } => {
                    return Ok(WalkEnd::Missing { open_to_all });
                }
                PathResolution::Walk => return Ok(WalkEnd::Walk),
            }
        }
        Ok(WalkEnd::Found)
    }

    /// Passes up to `most` names of the directory `dir` to the callback, until it returns false.
    /// [`share_names`](PeerConnection::share_names) publishes them for other clients: that takes as
    /// long again, and the client need not wait for it.
    ///
    /// # Errors
    ///
    /// The errors of [`walk_steps`](PeerConnection::walk_steps), and `EACCES` if the user may not
    /// read the directory.
    pub fn names(
        &self,
        cx: &Context<'_>,
        dir: Ino,
        most: usize,
        mut report: impl FnMut(Name<'_>, PathStep) -> bool,
    ) -> Result<()> {
        let call = self.check(cx, &[dir])?;
        let rights = self.ledger.names().and_then(|names| names.rights(dir));
        call.guard(|guard| guard.permit(dir, READ | EXEC))?;
        let listed = DirectoryNames::list(call.fs, cx, dir, (0, most))?;
        for (bytes, _) in &listed.all {
            // The listing has . and .., which are no names.
            let Ok(name) = Name::new(bytes) else { continue };
            let before = versions_before(&self.ledger, (dir, name));
            match resolve_name(&self.ledger, &call, cx, (dir, name)) {
                Ok(resolved @ PathResolution::Inode { ino, attr, open_to_all }) => {
                    if let Some(before) = before.filter(|before| Some(before.rights) == rights) {
                        self.queue_publication(UnpublishedName {
                            before,
                            dir,
                            name: bytes[..].into(),
                            resolved,
                        });
                    }
                    if !report(name, PathStep { ino, attr, open_to_all }) {
                        break;
                    }
                }
                Err(Errno::ENOSYS) => return Err(Errno::ENOSYS),
                // It was removed meanwhile.
                _ => {}
            }
        }
        Ok(())
    }

    /// Publishes the names that were reported to this client, for others with the same rights.
    pub fn share_names(&self) {
        let Some(names) = self.ledger.names() else { return };
        let all = std::mem::take(&mut *self.lock_unpublished());
        let cx = Context::new(Caller::default());
        let fs = (self.behind.unchecked() as &dyn FileSystem, &cx);
        for UnpublishedName { before, dir, name, resolved } in &all {
            if let Ok(name) = Name::new(name) {
                share(&**names, *before, (*dir, name), resolved, fs);
            }
        }
    }

    fn queue_publication(&self, name: UnpublishedName) {
        let mut untold = self.lock_unpublished();
        if untold.len() < MOST_UNTOLD {
            untold.push(name);
        }
    }

    fn lock_unpublished(&self) -> MutexGuard<'_, Vec<UnpublishedName>> {
        self.untold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name that was reported to a client, and is published for other clients later.
pub(crate) struct UnpublishedName {
    before: LookupVersions,
    dir: Ino,
    name: Box<[u8]>,
    resolved: PathResolution,
}

/// Returns the versions before a lookup of a name, for a client with a name memory.
fn versions_before(ledger: &ConnectionLedger, place: (Ino, Name<'_>)) -> Option<LookupVersions> {
    ledger.names().and_then(|names| names.versions_before(place))
}

/// Resolves a name for a client, to which the inode is reported.
pub(crate) fn resolve_name<F: FileSystem>(
    ledger: &ConnectionLedger,
    call: &CheckedCall<'_, F>,
    cx: &Context<'_>,
    (dir, name): (Ino, Name<'_>),
) -> Result<PathResolution> {
    let resolved = shortcuts_of(call.fs).resolve(cx, dir, name.into())?;
    if let PathResolution::Inode { ino, .. } = resolved {
        ledger.record_report(ino);
        ledger.record_lookup(dir, name, ino);
    }
    Ok(resolved)
}

/// Publishes a name for other clients.
fn share(
    names: &dyn NameSource,
    before: LookupVersions,
    place: (Ino, Name<'_>),
    resolved: &PathResolution,
    fs: (&dyn FileSystem, &Context<'_>),
) {
    match resolved {
        PathResolution::Inode { ino, attr, open_to_all } => {
            names.publish(before, place, Some((*ino, attr)), *open_to_all, fs);
        }
        PathResolution::Missing { open_to_all } => {
            names.publish(before, place, None, *open_to_all, fs)
        }
        PathResolution::Walk => {}
    }
}

/// The names of a directory, each with the position after it.
pub(crate) struct DirectoryNames {
    pub(crate) all: Vec<(Vec<u8>, u64)>,
    /// True if nothing follows.
    pub(crate) is_end: bool,
    most: usize,
}

impl DirectoryNames {
    /// Lists up to `most` names of `dir` from a position on.
    pub(crate) fn list(
        fs: &dyn FileSystem,
        cx: &Context<'_>,
        dir: Ino,
        (from, most): (u64, usize),
    ) -> Result<DirectoryNames> {
        let flags = OpenFlags(OpenFlags::DIRECTORY);
        let open = File { ino: dir, fh: fs.opendir(cx, dir, flags)?.fh };
        let mut listed = DirectoryNames { all: Vec::new(), is_end: false, most };
        let mut next = from;
        let mut outcome = Ok(());
        while listed.all.len() < most {
            let before = listed.all.len();
            outcome = fs.readdir(cx, open, next, &mut DirBuf::new(&mut listed));
            if outcome.is_err() {
                break;
            }
            let Some((_, after)) = listed.all.get(before..).and_then(<[_]>::last) else {
                listed.is_end = true;
                break;
            };
            next = *after;
        }
        let _ = fs.releasedir(cx, open);
        outcome.map(|()| listed)
    }
}

impl DirSink for DirectoryNames {
    fn wants_entries(&self) -> bool {
        false
    }

    fn fits(&self, _: usize) -> bool {
        self.all.len() < self.most
    }

    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.all.push((item.name.to_vec(), item.next));
    }
}
