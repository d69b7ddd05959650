//! Whole paths, from names and attributes that the server has sent to this client, or to others
//! with its rights. They hold while their versions stay.
//!
//! A name that is not known is requested with the rest of its path, in one request. After a few
//! names of a directory, all its names are requested at once; if that has paid off in the
//! directories before, already at the first name of the next one. None of these requests is a
//! lookup: the server forgets which inodes it reported, and then a request fails with `ESTALE` and
//! is made again from the start.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use defuse_fs::{
    ATTRIBUTES_HOLD, Attr, Context, Entry, Errno, Fh, File, FileKind, Ino, IoctlArgs, Name,
    NormalPath, PathResolution, Result, Timestamp, Versions,
};
use defuse_ring::InodeVersionSet;
use defuse_ring::names::{AttributeStamp, NameReader};
use defuse_wire::decode;
use defuse_wire::vendor::{NAMES, PublishedAttr, RESOLVE, ResolveHead, ResolveStep};
use zerocopy::{FromBytes, IntoBytes};

use super::RemoteShared;
use super::prefetch_rate::{PrefetchRate, SingleRequests};

/// The maximum number of names that are kept. Beyond it, all are forgotten.
const MOST: usize = 1 << 15;

/// The names in the name memory of clients with the rights of this one; `None` if the server has no
/// such memory.
pub(super) type SharedNames = Option<Arc<NameReader>>;

/// The names that the server has sent.
#[derive(Default)]
pub(super) struct ServedNameCache {
    pub(super) versions: OnceLock<Arc<dyn Versions>>,
    /// The names that were also sent to other clients.
    pub(super) shared: OnceLock<SharedNames>,
    lacks: AtomicBool,
    known: RwLock<KnownNames>,
    /// Counts reads by this client, which may change an access time.
    reads: AtomicU64,
    /// The count at the last read of an inode, by the lowest bits of its number.
    last_read: LastRead,
    /// Inodes without extended attributes that this client has looked at last.
    bare: InodeVersionSet,
    /// Counts requests that were avoided because the path was known.
    hits: AtomicU64,
}

/// The number of places in [`ServedNameCache::last_read`]. Inodes share them.
const PLACES: usize = 1024;

struct LastRead(Box<[AtomicU64]>);

impl Default for LastRead {
    fn default() -> Self {
        LastRead((0..PLACES).map(|_| AtomicU64::new(0)).collect())
    }
}

impl LastRead {
    fn count_of(&self, ino: Ino) -> u64 {
        self.0[ino.0 as usize % PLACES].load(Ordering::Acquire)
    }
}

#[derive(Default)]
struct KnownNames {
    dirs: HashMap<Ino, KnownDirectory>,
    names: usize,
    rate: PrefetchRate,
}

/// A directory.
#[derive(Default)]
struct KnownDirectory {
    names: HashMap<Box<[u8]>, ServedName>,
    single_requests: SingleRequests,
    /// The version of the rights to the directory, and true if every user may search it with these.
    open_to_all: Option<(u64, bool)>,
}

/// A name, with its versions.
#[derive(Clone, Copy)]
struct ServedName {
    name: u64,
    /// The version of the rights to the directory, which `open_to_all` depends on.
    rights: u64,
    open_to_all: bool,
    /// The inode; `None` if the name does not exist.
    inode: Option<NamedInode>,
}

#[derive(Clone, Copy)]
struct NamedInode {
    ino: Ino,
    attr: Attr,
    stamp: AttributeStamp,
    /// The count of reads before the request.
    reads: u64,
    /// True if the inode has no extended attributes.
    is_bare: bool,
}

/// The known part of a path.
enum KnownPrefix {
    /// The whole path, and the directory of its last name.
    Known(PathResolution, Ino),
    /// From this directory on, after so many bytes of the path, a request is needed.
    From { dir: Ino, at: usize, open_to_all: bool },
}

impl ServedNameCache {
    fn write(&self) -> RwLockWriteGuard<'_, KnownNames> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the path as far as it is known.
    fn walk(
        &self,
        versions: &dyn Versions,
        owes: &dyn Fn(Ino, u64) -> bool,
        (from, path): (Ino, NormalPath<'_>),
    ) -> KnownPrefix {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let (mut dir, mut at, mut open_to_all) = (from, 0, true);
        for name in path.names() {
            let bytes = name.as_bytes();
            let is_last = at + bytes.len() == path.as_bytes().len();
            let holds = |served: &ServedName| {
                served.holds(versions, dir, bytes)
                    && (!is_last || served.has_attributes(versions, owes, &self.last_read))
            };
            // The name memory has more information.
            let own = || {
                let served = known.dirs.get(&dir).and_then(|dir| dir.names.get(bytes));
                served.copied().filter(holds)
            };
            let Some(served) = self.find_shared(dir, bytes).filter(holds).or_else(own) else {
                return KnownPrefix::From { dir, at, open_to_all };
            };
            let open_after = open_to_all && served.open_to_all;
            match served.inode {
                None => {
                    return KnownPrefix::Known(
                        PathResolution::Missing { open_to_all: open_after },
                        dir,
                    );
                }
                Some(NamedInode { ino, attr, stamp, is_bare, .. }) if is_last => {
                    if is_bare {
                        self.bare.add(ino.0, stamp.version);
                    }
                    let found = PathResolution::Inode { ino, attr, open_to_all: open_after };
                    return KnownPrefix::Known(found, dir);
                }
                Some(inode) if inode.attr.kind != FileKind::Directory => {
                    return KnownPrefix::Known(PathResolution::Walk, dir);
                }
                Some(inode) => dir = inode.ino,
            }
            open_to_all = open_after;
            at += bytes.len() + 1;
        }
        KnownPrefix::Known(PathResolution::Walk, dir)
    }

    /// Notes an inode without extended attributes, as which the server has just published the name.
    fn note_bare(&self, dir: Ino, name: &[u8]) {
        let inode = self.find_shared(dir, name).and_then(|served| served.inode);
        if let Some(inode) = inode.filter(|inode| inode.is_bare) {
            self.bare.add(inode.ino.0, inode.stamp.version);
        }
    }

    /// Looks up the name in the name memory of clients with the same rights.
    fn find_shared(&self, dir: Ino, name: &[u8]) -> Option<ServedName> {
        let found = self.shared.get()?.as_ref()?.find(dir.0, name)?;
        let inode = match found.inode {
            None => None,
            Some((ino, _)) if ino <= Ino::ROOT.0 => return None,
            Some((ino, attr)) => {
                let beside: PublishedAttr = zerocopy::transmute!(attr);
                let attr = decode::decode_published_attr(&beside).ok()?;
                let is_bare = beside.flags & PublishedAttr::NO_XATTRS != 0;
                let stamp = found.stamps.attributes;
                // This client may have read it since.
                Some(NamedInode { ino: Ino(ino), attr, stamp, reads: 0, is_bare })
            }
        };
        let (name, rights, open_to_all) =
            (found.stamps.name, found.stamps.rights, found.open_to_all);
        Some(ServedName { name, rights, open_to_all, inode })
    }

    /// True if `name` is known to be in `dir`, whatever is known about its inode.
    pub(super) fn knows_inode_of(&self, dir: Ino, name: &[u8]) -> bool {
        let Some(versions) = self.versions.get() else { return false };
        let holds = |served: &ServedName| served.holds(&**versions, dir, name);
        let own = || {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            known.dirs.get(&dir).and_then(|dir| dir.names.get(name)).copied().filter(holds)
        };
        let served = self.find_shared(dir, name).filter(holds).or_else(own);
        served.is_some_and(|served| served.inode.is_some())
    }

    /// Call it before a request that makes a name. `None` if nothing is kept.
    pub(super) fn begin_change(&self) -> Option<RequestStart> {
        self.versions.get().map(|versions| self.begin_request(&**versions))
    }

    /// Call it before a request whose answer is kept.
    pub(super) fn begin_request(&self, versions: &dyn Versions) -> RequestStart {
        RequestStart { all: versions.all(), reads: self.reads.load(Ordering::Acquire) }
    }

    /// This client has read a file, a directory or a link.
    pub(super) fn record_read(&self, ino: Ino) {
        if self.versions.get().is_some() {
            let count = self.reads.fetch_add(1, Ordering::AcqRel) + 1;
            self.last_read.0[ino.0 as usize % PLACES].fetch_max(count, Ordering::AcqRel);
        }
    }

    /// Keeps the names of a reply, unless something has changed since `before`.
    fn keep(
        &self,
        versions: &dyn Versions,
        before: RequestStart,
        answers: &[(Ino, &[u8], NameAnswer)],
    ) {
        let RequestStart { all, reads } = before;
        let of = |(dir, name, found): &(Ino, &[u8], NameAnswer)| {
            let version_of = |inode: &(Ino, Attr)| {
                let (ino, attr) = *inode;
                let stamp = AttributeStamp::now(versions.attributes(ino)?);
                Some(NamedInode { ino, attr, stamp, reads, is_bare: false })
            };
            let inode = match &found.inode {
                None => None,
                Some(inode) => Some(version_of(inode)?),
            };
            let (name, rights) = (versions.name(*dir, name)?, versions.rights(*dir)?);
            Some(ServedName { name, rights, open_to_all: found.open_to_all, inode })
        };
        let kept: Option<Vec<ServedName>> = answers.iter().map(of).collect();
        let Some(kept) = kept.filter(|_| all.is_some() && versions.all() == all) else { return };
        let mut known = self.write();
        if known.names + kept.len() > MOST {
            *known = KnownNames::default();
        }
        for ((dir, name, _), one) in answers.iter().zip(kept) {
            let dir = known.dirs.entry(*dir).or_default();
            dir.open_to_all = Some((one.rights, one.open_to_all));
            let before = dir.names.insert((*name).into(), one);
            known.names += usize::from(before.is_none());
        }
    }

    /// True if every user may search `dir`; `None` if that is not known.
    fn is_open_to_all(&self, versions: &dyn Versions, dir: Ino) -> Option<bool> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let (rights, is_open) = known.dirs.get(&dir)?.open_to_all?;
        (versions.rights(dir) == Some(rights)).then_some(is_open)
    }

    /// Counts a name of `dir` that was requested alone. True if it is time to request all names.
    fn count_single_request(&self, dir: Ino) -> bool {
        let mut known = self.write();
        let KnownNames { dirs, rate, .. } = &mut *known;
        dirs.entry(dir).or_default().single_requests.is_enough(rate)
    }

    /// Counts the names of a directory that arrived together.
    fn count_names(&self, names: usize) {
        let hits = self.hits.load(Ordering::Relaxed);
        self.write().rate.count(names as u64, hits);
    }

    fn is_bare(&self, ino: Ino) -> bool {
        let version = self.versions.get().and_then(|versions| versions.attributes(ino));
        version.is_some_and(|version| self.bare.has(ino.0, version))
    }

    pub(super) fn forget(&self) {
        if self.versions.get().is_some() {
            *self.write() = KnownNames::default();
        }
    }
}

impl NamedInode {
    /// True if the access time is current at the server, or not much older.
    fn has_access_time(&self, owes: &dyn Fn(Ino, u64) -> bool, last_read: &LastRead) -> bool {
        // The version shows the first read of a file after a change. It does not show a read that
        // updates the access time because a day has passed.
        if self.attr.kind == FileKind::Regular && self.attr.read_is_due(self.attr.atime) {
            return !owes(self.ino, self.stamp.version);
        }
        if !self.attr.read_is_due(Timestamp::now()) {
            return true;
        }
        last_read.count_of(self.ino) <= self.reads && self.stamp.age() < ATTRIBUTES_HOLD
    }
}

impl ServedName {
    fn holds(&self, versions: &dyn Versions, dir: Ino, name: &[u8]) -> bool {
        versions.name(dir, name) == Some(self.name) && versions.rights(dir) == Some(self.rights)
    }

    fn has_attributes(
        &self,
        versions: &dyn Versions,
        owes: &dyn Fn(Ino, u64) -> bool,
        last_read: &LastRead,
    ) -> bool {
        self.inode.as_ref().is_none_or(|inode| {
            versions.attributes(inode.ino) == Some(inode.stamp.version)
                && inode.has_access_time(owes, last_read)
        })
    }
}

/// The state before a request.
#[derive(Clone, Copy)]
pub(super) struct RequestStart {
    /// The version of everything.
    pub(super) all: Option<u64>,
    /// The count of reads.
    reads: u64,
}

impl RequestStart {
    /// The state after a request that has made exactly one change since.
    pub(super) fn after_own_change(self, versions: &dyn Versions) -> RequestStart {
        RequestStart { all: self.all.map(|all| versions.successor_of(all)), ..self }
    }
}

/// A name in a reply of the server.
struct NameAnswer {
    inode: Option<(Ino, Attr)>,
    open_to_all: bool,
}

impl RemoteShared {
    /// True if the server resolves paths, and names are kept while their versions stay.
    pub(super) fn resolves_paths(&self) -> bool {
        self.paths.versions.get().is_some() && !self.paths.lacks.load(Ordering::Relaxed)
    }

    /// Keeps a name that this client has made by a request after `before`, with the attributes in
    /// the answer, if that was the only change.
    pub(super) fn record_new_name(
        &self,
        before: Option<RequestStart>,
        (dir, name): (Ino, Name<'_>),
        entry: &Entry,
    ) {
        let Some((before, versions)) = before.zip(self.paths.versions.get()) else { return };
        // The server resolves no names of some directories, because others change them unseen.
        let Some(open_to_all) = self.paths.is_open_to_all(&**versions, dir) else { return };
        let after = before.after_own_change(&**versions);
        self.keep_new_name((&**versions, after), (dir, name), (entry, open_to_all));
    }

    /// True if the answer to a request has said whether every user may search `dir`, and its rights
    /// are still the same.
    pub(super) fn knows_search_of(&self, dir: Ino) -> bool {
        let versions = self.paths.versions.get();
        versions.is_some_and(|versions| self.paths.is_open_to_all(&**versions, dir).is_some())
    }

    /// Like [`keep_new_name`](Self::keep_new_name), with the output of `RESOLVE` for the name. A
    /// server resolves no names of some directories, because others change them unseen.
    pub(super) fn keep_resolved_name(
        &self,
        after: (&dyn Versions, RequestStart),
        place: (Ino, Name<'_>),
        (entry, steps): (&Entry, &[u8]),
    ) {
        if let Some(open_to_all) = decode_search(steps) {
            self.keep_new_name(after, place, (entry, open_to_all));
        }
    }

    /// Keeps a new name, unless something has changed since `after`, the state after its creation.
    pub(super) fn keep_new_name(
        &self,
        (versions, after): (&dyn Versions, RequestStart),
        (dir, name): (Ino, Name<'_>),
        (entry, open_to_all): (&Entry, bool),
    ) {
        let mut attr = entry.attr;
        if self.caps.birth_times {
            // The answer has no time of creation. A new inode was never changed.
            attr.btime = attr.btime.or(Some(attr.ctime));
        }
        let found = NameAnswer { inode: Some((entry.ino, attr)), open_to_all };
        self.paths.keep(versions, after, &[(dir, name.as_bytes(), found)]);
    }

    /// True if the inode is known to have no extended attributes.
    pub(super) fn is_bare(&self, ino: Ino) -> bool {
        self.paths.is_bare(ino) && !self.connection.has_ended()
    }

    /// The answer for a path whose names are all known.
    pub(super) fn resolve_cached(
        &self,
        versions: &dyn Versions,
        path: (Ino, NormalPath<'_>),
    ) -> Option<PathResolution> {
        let owes = |ino, version| self.whole.must_report_read(ino, version);
        match self.paths.walk(versions, &owes, path) {
            KnownPrefix::Known(resolved, _) => Some(resolved),
            KnownPrefix::From { .. } => None,
        }
    }

    /// Resolves a path. `ENOSYS` where the server has no versions or does not know such requests.
    pub(super) fn resolve(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
    ) -> Result<PathResolution> {
        let ask = |versions: &dyn Versions, dir, rest: NormalPath<'_>| {
            self.request_path(cx, versions, dir, rest).map(|resolved| (resolved, None))
        };
        self.resolve_by::<()>((from, path), ask, |_, _, _| None).map(|(resolved, _)| resolved)
    }

    /// Resolves a path. `ask` requests the unknown part of the path, and may return more about the
    /// inode at its end. `add` may do so if the path is known, and gets the directory of its last
    /// name.
    pub(super) fn resolve_by<T>(
        &self,
        (from, path): (Ino, NormalPath<'_>),
        ask: impl Fn(&dyn Versions, Ino, NormalPath<'_>) -> Result<(PathResolution, Option<T>)>,
        add: impl Fn(&dyn Versions, Ino, &PathResolution) -> Option<T>,
    ) -> Result<(PathResolution, Option<T>)> {
        let versions = self.paths.versions.get().ok_or(Errno::ENOSYS)?;
        if self.paths.lacks.load(Ordering::Relaxed) {
            return Err(Errno::ENOSYS);
        }
        if self.connection.has_ended() {
            return Err(Errno::ENOTCONN);
        }
        let owes = |ino, version| self.whole.must_report_read(ino, version);
        self.paths.shared.get_or_init(|| self.request_shared_names());
        let (dir, at, open_to_all) = match self.paths.walk(&**versions, &owes, (from, path)) {
            KnownPrefix::Known(resolved, dir) => {
                self.paths.hits.fetch_add(1, Ordering::Relaxed);
                let more = add(&**versions, dir, &resolved);
                return Ok((resolved, more));
            }
            KnownPrefix::From { dir, at, open_to_all } => (dir, at, open_to_all),
        };
        let rest = NormalPath::new(&path.as_bytes()[at..]).ok_or(Errno::EIO)?;
        match ask(&**versions, dir, rest) {
            Ok((resolved, more)) => Ok((with(resolved, open_to_all), more)),
            // The server has forgotten that it reported the directory, or the directory is gone.
            Err(Errno::ESTALE) if at > 0 => {
                self.paths.forget();
                ask(&**versions, from, path)
            }
            Err(Errno::ENOSYS | Errno::ENOTTY) => {
                self.paths.lacks.store(true, Ordering::Relaxed);
                Err(Errno::ENOSYS)
            }
            Err(errno) => Err(errno),
        }
    }

    fn request_path(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        from: Ino,
        path: NormalPath<'_>,
    ) -> Result<PathResolution> {
        let before = self.paths.begin_request(versions);
        let output = self.request_ioctl(cx, from, RESOLVE, path.as_bytes())?;
        self.record_path(cx, (versions, before), (from, path), &output).map(|known| known.0)
    }

    /// Keeps the reply to a request for a path; `before` was the state before the request. Also
    /// returns the directory of the last name.
    pub(super) fn record_path(
        &self,
        cx: &Context<'_>,
        (versions, before): (&dyn Versions, RequestStart),
        (from, path): (Ino, NormalPath<'_>),
        output: &[u8],
    ) -> Result<(PathResolution, Ino)> {
        let (steps, mut rest) = ResolveHead::read_from_prefix(output).map_err(|_| Errno::EIO)?;
        let mut answers = Vec::new();
        let (mut dir, mut open_to_all, mut last) = (from, true, None);
        let mut names = path.names();
        while !rest.is_empty() {
            let (step, after) = ResolveStep::read_from_prefix(rest).map_err(|_| Errno::EIO)?;
            let name = names.next().ok_or(Errno::EIO)?;
            let found = decode_step(&step)?;
            open_to_all &= found.open_to_all;
            last = found.inode;
            answers.push((dir, name.as_bytes(), found));
            dir = Ino(step.ino);
            rest = after;
        }
        let missing = names.next();
        let resolved = match (steps.end, missing, last) {
            (ResolveHead::FOUND, None, Some((ino, attr))) => {
                PathResolution::Inode { ino, attr, open_to_all }
            }
            (ResolveHead::MISSING, Some(name), _) => {
                let here = steps.open_to_all != 0;
                answers.push((dir, name.as_bytes(), NameAnswer { inode: None, open_to_all: here }));
                PathResolution::Missing { open_to_all: open_to_all && here }
            }
            (ResolveHead::WALK, _, _) => PathResolution::Walk,
            _ => return Err(Errno::EIO),
        };
        self.paths.keep(versions, before, &answers);
        if let Some((dir, name, _)) = answers.last() {
            self.paths.note_bare(*dir, name);
        }
        let parent = answers.last().map_or(from, |(dir, ..)| *dir);
        if matches!(resolved, PathResolution::Inode { .. })
            && self.paths.count_single_request(parent)
        {
            // The result is known already, so that a failure does not matter.
            let _ = self.request_names(cx, versions, parent);
        }
        Ok((resolved, parent))
    }

    /// Requests all names of a directory, or as many as the server sends at once.
    fn request_names(&self, cx: &Context<'_>, versions: &dyn Versions, dir: Ino) -> Result<()> {
        let before = self.paths.begin_request(versions);
        let output = self.request_ioctl(cx, dir, NAMES, &[])?;
        let mut rest = &output[..];
        let mut answers = Vec::new();
        while !rest.is_empty() {
            let (step, after) = ResolveStep::read_from_prefix(rest).map_err(|_| Errno::EIO)?;
            let len = step.name_len as usize;
            let padded = len.checked_next_multiple_of(8).ok_or(Errno::EIO)?;
            let name = after.get(..len).ok_or(Errno::EIO)?;
            rest = after.get(padded..).ok_or(Errno::EIO)?;
            answers.push((
                dir,
                Name::new(name).map_err(|_| Errno::EIO)?.as_bytes(),
                decode_step(&step)?,
            ));
        }
        self.paths.keep(versions, before, &answers);
        self.paths.count_names(answers.len());
        Ok(())
    }

    fn request_ioctl(&self, cx: &Context<'_>, ino: Ino, cmd: u32, input: &[u8]) -> Result<Vec<u8>> {
        let output_len = self.agreement.max_received();
        let args = IoctlArgs { cmd, arg: 0, input, output_len, dir: false, compat32: false };
        self.ioctl(cx, File { ino, fh: Fh(0) }, &args).map(|reply| reply.output)
    }
}

/// Returns the result for a whole path, from the result for its end.
fn with(resolved: PathResolution, all: bool) -> PathResolution {
    match resolved {
        PathResolution::Inode { ino, attr, open_to_all } => {
            PathResolution::Inode { ino, attr, open_to_all: open_to_all && all }
        }
        PathResolution::Missing { open_to_all } => {
            PathResolution::Missing { open_to_all: open_to_all && all }
        }
        PathResolution::Walk => PathResolution::Walk,
    }
}

/// True if every user may search the directory of a resolved path of one name, by the output of
/// `RESOLVE`. `None` where the server does not resolve it.
fn decode_search(output: &[u8]) -> Option<bool> {
    let (head, rest) = ResolveHead::read_from_prefix(output).ok()?;
    match head.end {
        ResolveHead::MISSING => Some(head.open_to_all != 0),
        ResolveHead::FOUND => {
            let (step, _) = ResolveStep::read_from_prefix(rest).ok()?;
            Some(step.open_to_all != 0)
        }
        _ => None,
    }
}

fn decode_step(step: &ResolveStep) -> Result<NameAnswer> {
    let attr = decode::statx_out(step.attr.as_bytes())?.ok_or(Errno::EIO)?;
    if step.ino <= Ino::ROOT.0 {
        return Err(Errno::EIO);
    }
    Ok(NameAnswer { inode: Some((Ino(step.ino), attr)), open_to_all: step.open_to_all != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_are_asked_for_at_once_while_most_of_them_are_used() {
        let paths = ServedNameCache::default();
        let asks = |dir: u64, most: usize| {
            let single_requests = (1..=most).find(|_| paths.count_single_request(Ino(dir)));
            single_requests.inspect(|_| paths.count_names(50))
        };
        let uses = |count| paths.hits.fetch_add(count, Ordering::Relaxed);
        assert_eq!(asks(2, 9), Some(4));
        uses(46);
        assert_eq!(asks(3, 9), Some(4));
        uses(46);
        assert_eq!(asks(4, 9), Some(1));
        uses(49);
        assert_eq!(asks(5, 9), Some(1));
        // Another thread begins before the names of this directory are used.
        assert_eq!(asks(6, 9), Some(1));
        uses(98);
        assert_eq!(asks(7, 9), Some(1));
        // Few are used from here on.
        let rest: Vec<_> = (8..14).map(|dir| asks(dir, 9)).collect();
        assert_eq!((rest[0], rest[4], rest[5]), (Some(1), Some(4), Some(4)));
        // A directory whose names were all requested is requested again later, not at each name.
        assert_eq!((asks(4, 40), asks(4, 40)), (None, Some(9)));
    }
}
