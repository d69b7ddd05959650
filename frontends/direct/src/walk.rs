//! Path walks: from a path to an inode, path_resolution(7).

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::Arc;

use defuse_fs::{Attr, Errno, FileKind, Ino, OpenArgs};
use defuse_probe::Op;

use crate::access::{self, NeededAccess};
use crate::call_target::UncheckedOpen;
use crate::client::DirectClient;
use crate::credentials::TaskCredentials;
use crate::description::FileDescription;
use crate::kernel_walk;
use crate::mount::{MountSpot, ReachedAttributes};
use crate::mounted_inode::MountedInode;
use crate::node::CachedInode;
use crate::open_how::ResolveFlags;
use crate::prefix_cache::WalkBegin;
use crate::remaining_path::{ComponentKind, PATH_MAX, PathComponent, RemainingPath};
use crate::stop::{CallError, Result};
use crate::task::ClientTask;
use crate::work_dir::WorkDir;

/// Limit on the links in one walk, as in the kernel.
const MAX_LINKS: u32 = 40;

/// The start of a relative path.
#[derive(Clone, Copy, Debug)]
pub enum WalkStart<'a> {
    /// The working directory of the task, `AT_FDCWD`.
    Cwd,
    /// An open directory of a mount.
    Dir(&'a FileDescription),
    /// An open file of a mount, also with `O_PATH`. The path must be empty and refers to the file
    /// itself, as with `AT_EMPTY_PATH` and below `/proc/self/fd`.
    Itself(&'a FileDescription),
    /// A directory of the kernel's name space, by its absolute path.
    Path(&'a [u8]),
}

enum WalkPosition {
    Inside(MountedInode),
    /// At this path, whose links are resolved already, without a trailing slash.
    Outside(Vec<u8>),
}

/// The end of a path. It is on the stack, because a box would cost an allocation for every path.
#[allow(clippy::large_enum_variant)]
pub(crate) enum PathEnd<'a> {
    /// A component, not yet looked up.
    Component(PathComponent<'a>),
    /// No component: the path has only slashes, or is the mount point itself.
    Nothing,
}

/// The parent directory of a path, and its last component.
pub(crate) struct PathParent<'a> {
    pub dir: MountedInode,
    pub last: PathEnd<'a>,
}

/// The end of a walk.
pub(crate) enum ReachedInode<T> {
    /// The inode.
    Node(MountedInode),
    /// An inode without a node, in the directory, with the data that is known about it.
    Peeked(MountedInode, T),
}

/// A walk in progress.
pub(crate) struct PathWalk<'a> {
    client: &'a DirectClient,
    pub who: &'a TaskCredentials,
    at: WalkPosition,
    /// The directory where a restricted walk begins.
    start: Option<MountedInode>,
    rest: RemainingPath<'a>,
    links: u32,
    pub resolve: ResolveFlags,
    /// Follow a link at the end of the path.
    pub follow_last: bool,
    /// The walk has been inside of a mount, so the caller's path is no longer valid for the kernel.
    entered: bool,
    /// How to open the file at the end of the path, if that may be done together with the lookup.
    open: Option<OpenArgs>,
    /// The file at the end of the path, if it was opened so. It is released before its inode is
    /// forgotten.
    opened: Option<UncheckedOpen>,
    /// The inode that was looked up last, with its attributes.
    reached: Cell<Option<(Arc<CachedInode>, ReachedAttributes)>>,
    /// While the walk leads to the last directory of the caller's path by names alone: its start,
    /// and the path to there.
    by_names: Option<(WalkBegin, &'a [u8])>,
    /// True if the position is a directory that the caller may search, as a walk has found lately.
    may_search: bool,
}

impl DirectClient {
    /// The directory of a mount that a new mount at `target` covers. Fails with the path outside of
    /// all mounts.
    pub(crate) fn find_covered(&self, target: &[u8]) -> Result<MountedInode> {
        let who = TaskCredentials::user(0, 0, &[]);
        let task = ClientTask::new(who.clone(), crate::WorkDir::Outside(b"/".to_vec()));
        self.walk(&task, &who, WalkStart::Cwd, target)?.node(true)
    }

    /// Begins a walk. Fails with `ENOENT` for an empty path, `ENAMETOOLONG`, and `ENOTDIR` if `at`
    /// is no directory.
    pub(crate) fn walk<'a>(
        &'a self,
        task: &ClientTask,
        who: &'a TaskCredentials,
        at: WalkStart<'_>,
        path: &'a [u8],
    ) -> Result<PathWalk<'a>> {
        self.walk_within(task, who, (at, path), ResolveFlags::default())
    }

    /// Begins a walk with restrictions, openat2(2).
    pub(crate) fn walk_within<'a>(
        &'a self,
        task: &ClientTask,
        who: &'a TaskCredentials,
        path: (WalkStart<'_>, &'a [u8]),
        resolve: ResolveFlags,
    ) -> Result<PathWalk<'a>> {
        let is_free = resolve == ResolveFlags::default();
        let walk = self.begin(task, who, path, is_free)?;
        if is_free { Ok(walk) } else { walk.restrict(resolve) }
    }

    fn begin<'a>(
        &'a self,
        task: &ClientTask,
        who: &'a TaskCredentials,
        (at, path): (WalkStart<'_>, &'a [u8]),
        is_free: bool,
    ) -> Result<PathWalk<'a>> {
        if path.is_empty() && !matches!(at, WalkStart::Itself(_)) {
            return Err(Errno::ENOENT.into());
        }
        if path.len() > PATH_MAX {
            return Err(Errno::ENAMETOOLONG.into());
        }
        let mut walk = PathWalk {
            client: self,
            who,
            at: WalkPosition::Outside(Vec::new()),
            start: None,
            rest: RemainingPath::new(path, 0),
            links: 0,
            resolve: ResolveFlags::default(),
            follow_last: false,
            entered: false,
            reached: Cell::default(),
            open: None,
            opened: None,
            by_names: None,
            may_search: false,
        };
        if let WalkStart::Itself(file) = at {
            walk.begin_in(file.inode(), is_free);
            return Ok(walk);
        }
        let table = self.mounts.load();
        let found = if path[0] == b'/' { table.prefix(path) } else { table.find_named(path) };
        if let Some((mount, len)) = found {
            walk.rest = RemainingPath::new(path, len);
            walk.enter(MountedInode::root(mount))?;
            if is_free && let WalkPosition::Inside(here) = walk.take_at() {
                walk.begin_in(&here, true);
            }
            return Ok(walk);
        }
        if path[0] != b'/' {
            walk.begin_at(task, at, is_free)?;
        }
        if matches!(walk.at, WalkPosition::Outside(_)) && !table.has_paths() {
            return Err(CallError::outside_mounts(None));
        }
        Ok(walk)
    }
}

impl<'a> PathWalk<'a> {
    fn begin_at(&mut self, task: &ClientTask, at: WalkStart<'_>, is_free: bool) -> Result<()> {
        match at {
            WalkStart::Cwd => task.with_cwd(|cwd| match cwd {
                WorkDir::Inside(held) => self.begin_in(&held.here, is_free),
                WorkDir::Outside(path) => self.at = WalkPosition::Outside(trim(path)),
            }),
            WalkStart::Dir(dir) => {
                if !dir.inode().node.is_dir() {
                    return Err(Errno::ENOTDIR.into());
                }
                self.begin_in(dir.inode(), is_free);
            }
            WalkStart::Itself(file) => self.begin_in(file.inode(), is_free),
            WalkStart::Path(path) => self.at = WalkPosition::Outside(trim(path)),
        }
        Ok(())
    }

    /// Begins in `here`. A walk without restrictions may go on from a place that is further.
    fn begin_in(&mut self, here: &MountedInode, is_free: bool) {
        self.entered = true;
        if is_free && self.skip_to_last_directory(here) {
            return;
        }
        self.start = (!is_free).then(|| here.clone());
        self.at = WalkPosition::Inside(here.clone());
    }

    /// Goes from `here` to the last directory of the path at once, if a walk reached it by the same
    /// names lately.
    fn skip_to_last_directory(&mut self, here: &MountedInode) -> bool {
        let Some(path) = self.rest.parent_path() else { return false };
        let Some(begin) = here.mount.begin(&here.node) else { return false };
        let Some(found) = here.mount.prefix_cache().get_path(begin.parent, path, self.who) else {
            self.by_names = Some((begin, path));
            return false;
        };
        let reached = found.attr.map_or(ReachedAttributes::Nothing, ReachedAttributes::Lately);
        self.reached.set(Some((Arc::clone(&found.node), reached)));
        self.at =
            WalkPosition::Inside(MountedInode { node: found.node, mount: Arc::clone(&here.mount) });
        self.may_search = true;
        self.rest.skip(path);
        true
    }

    /// Takes the position; the caller sets it anew.
    fn take_at(&mut self) -> WalkPosition {
        std::mem::replace(&mut self.at, WalkPosition::Outside(Vec::new()))
    }

    /// Keeps the last directory of the path, which the caller may search, if only names led to it.
    fn cache_last_directory(&mut self, here: &MountedInode) {
        if let Some((begin, path)) = self.by_names.take() {
            let passed = here.mount.prefix_cache();
            passed.keep_path(&begin, path, (&here.node, self.recent_attributes(here)), self.who);
        }
    }

    fn restrict(mut self, resolve: ResolveFlags) -> Result<Self> {
        self.resolve = resolve;
        let confined = resolve.has(ResolveFlags::BENEATH) || resolve.has(ResolveFlags::IN_ROOT);
        if resolve.has(ResolveFlags::CACHED) {
            return Err(Errno::EAGAIN.into());
        }
        // An absolute path, or a path that starts with the name of a mount, does not start at the
        // directory.
        if confined && self.start.is_none() && self.entered {
            return Err(Errno::EXDEV.into());
        }
        Ok(self)
    }

    /// Walks to the inode at the end of the path. Follows a link there if `follow` is set, or if a
    /// slash comes after it.
    pub fn node(&mut self, follow: bool) -> Result<MountedInode> {
        match self.reach::<Infallible>(follow, |_, _| Ok(None))? {
            ReachedInode::Node(here) => Ok(here),
            ReachedInode::Peeked(_, never) => match never {},
        }
    }

    /// Walks like [`node`](PathWalk::node). With `open`, the inode may be open already, before the
    /// permission to do so was checked.
    pub fn node_to_open(
        &mut self,
        follow: bool,
        open: Option<OpenArgs>,
    ) -> Result<(MountedInode, Option<UncheckedOpen>)> {
        self.open = open;
        let here = self.node(follow)?;
        Ok((here, self.opened.take()))
    }

    /// Walks like [`node`](PathWalk::node), but makes no node for the inode at the end if its
    /// attributes are known without one.
    pub fn attr_or_node(&mut self, follow: bool) -> Result<ReachedInode<Attr>> {
        let who = self.who;
        self.reach(follow, |dir, component| {
            if component.part != ComponentKind::Name || component.slash {
                return Ok(None);
            }
            let attr = dir.mount.peek(&dir.node, component.name()?, who)?;
            Ok(attr.filter(|attr| !follow || attr.kind != FileKind::Symlink))
        })
    }

    /// Walks to the end of the path, unless `peek` accepts a name at the end of a part of the path.
    fn reach<T>(
        &mut self,
        follow: bool,
        peek: impl Fn(&MountedInode, &PathComponent<'_>) -> Result<Option<T>>,
    ) -> Result<ReachedInode<T>> {
        self.follow_last = follow;
        loop {
            let PathParent { dir, last } = self.parent()?;
            let component = match last {
                PathEnd::Nothing => return Ok(ReachedInode::Node(dir)),
                PathEnd::Component(component) => component,
            };
            if let Some(peeked) = peek(&dir, &component)? {
                return Ok(ReachedInode::Peeked(dir, peeked));
            }
            if let Some(here) = self.last_node(dir, &component, follow)? {
                return Ok(ReachedInode::Node(here));
            }
        }
    }

    /// Looks up the last component in `dir`. Returns `None` if it is a link, which the walk follows
    /// next.
    pub fn last_node(
        &mut self,
        dir: MountedInode,
        last: &PathComponent<'_>,
        follow: bool,
    ) -> Result<Option<MountedInode>> {
        match last.part {
            ComponentKind::Dot => return Ok(Some(dir)),
            ComponentKind::DotDot => {
                self.walk_to_parent(&dir)?;
                return match &self.at {
                    WalkPosition::Inside(here) => Ok(Some(here.clone())),
                    WalkPosition::Outside(_) => self.reenter_or_leave(),
                };
            }
            ComponentKind::Name => {}
        }
        let found = self.child(&dir, last)?;
        if found.node.kind() == FileKind::Symlink && (follow || last.slash) {
            self.follow(&dir, &found, true)?;
            return Ok(None);
        }
        if last.slash && !found.node.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        Ok(Some(found))
    }

    /// Handles a walk whose last `..` led out of a mount: another mount may be at the new place.
    fn reenter_or_leave(&mut self) -> Result<Option<MountedInode>> {
        let WalkPosition::Outside(path) = &self.at else { return Ok(None) };
        match self.client.mounts.load().prefix(path) {
            Some((mount, len)) if len == path.len() => Ok(Some(MountedInode::root(mount))),
            _ => Err(CallError::outside_mounts(Some(join_rest(path, &[])))),
        }
    }

    /// Walks to the directory of the last component. The caller has search permission to it.
    pub fn parent(&mut self) -> Result<PathParent<'a>> {
        loop {
            let here = match self.take_at() {
                WalkPosition::Outside(path) => self.enter_from_kernel(path)?,
                WalkPosition::Inside(here) => here,
            };
            let Some(component) = self.rest.next() else {
                return Ok(PathParent { dir: here, last: PathEnd::Nothing });
            };
            if !here.node.is_dir() {
                return Err(Errno::ENOTDIR.into());
            }
            if !std::mem::take(&mut self.may_search) {
                let reached = self.recent_attributes(&here);
                access::check_known(
                    &here.mount,
                    (&here.node, reached),
                    self.who,
                    NeededAccess::EXEC,
                )?;
            }
            if component.last {
                self.cache_last_directory(&here);
                return Ok(PathParent { dir: here, last: PathEnd::Component(component) });
            }
            self.step(here, &component)?;
        }
    }

    /// Walks one component that is not the last.
    fn step(&mut self, here: MountedInode, component: &PathComponent<'_>) -> Result<()> {
        if component.part != ComponentKind::Name {
            self.by_names = None;
        }
        match component.part {
            ComponentKind::Dot => {
                self.at = WalkPosition::Inside(here);
                Ok(())
            }
            ComponentKind::DotDot => self.walk_to_parent(&here),
            ComponentKind::Name => {
                let (node, reached, until) =
                    here.mount.pass(&here.node, component.name()?, self.who)?;
                if let Some((begin, _)) = &mut self.by_names {
                    begin.pass(until);
                }
                let found = self.enter_found(&here, node, reached)?;
                if !Arc::ptr_eq(&found.mount, &here.mount) {
                    self.by_names = None;
                }
                match found.node.kind() {
                    FileKind::Directory => self.at = WalkPosition::Inside(found),
                    FileKind::Symlink => {
                        self.by_names = None;
                        return self.follow(&here, &found, false);
                    }
                    _ => return Err(Errno::ENOTDIR.into()),
                }
                Ok(())
            }
        }
    }

    /// Looks up a name, and enters the mount that covers it.
    fn child(&mut self, dir: &MountedInode, component: &PathComponent<'_>) -> Result<MountedInode> {
        let name = component.name()?;
        let is_refused = |args: &OpenArgs| args.flags.writable() && dir.mount.read_only();
        let open = self.open.filter(|args| !component.slash && !is_refused(args));
        let (node, attr, opened) = dir.mount.look_up_to_open(&dir.node, name, self.who, open)?;
        self.opened = opened.zip(open).map(|(opened, args)| {
            UncheckedOpen::new(&dir.mount, self.who, (node.ino(), args.flags), opened)
        });
        self.enter_found(dir, node, attr.map_or(ReachedAttributes::Nothing, ReachedAttributes::Now))
    }

    /// Records the result of a lookup in `dir`, and enters the mount that covers it.
    fn enter_found(
        &self,
        dir: &MountedInode,
        node: Arc<CachedInode>,
        reached: ReachedAttributes,
    ) -> Result<MountedInode> {
        self.reached.set(Some((Arc::clone(&node), reached)));
        self.topmost(MountedInode { node, mount: Arc::clone(&dir.mount) })
    }

    /// Returns the attributes of the inode at the end of the walk, if all of them arrived from the
    /// file system during the walk. They need no request, even if nothing is cached.
    pub fn final_attributes(&self, here: &MountedInode) -> Option<Attr> {
        let ReachedAttributes::Now(attr) = self.find_reached_attributes(here) else { return None };
        let is_whole = attr.btime.is_some() || !here.mount.caps().birth_times;
        is_whole.then_some(attr)
    }

    /// Returns the attributes of the inode that permission checks use, if the last step of the walk
    /// found them.
    pub fn recent_attributes(&self, here: &MountedInode) -> Option<Attr> {
        match self.find_reached_attributes(here) {
            ReachedAttributes::Now(attr) | ReachedAttributes::Lately(attr) => Some(attr),
            ReachedAttributes::Nothing => None,
        }
    }

    fn find_reached_attributes(&self, here: &MountedInode) -> ReachedAttributes {
        let last = self.reached.take();
        let reached = last.as_ref().filter(|(node, _)| Arc::ptr_eq(node, &here.node));
        let reached = reached.map_or(ReachedAttributes::Nothing, |(_, reached)| *reached);
        self.reached.set(last);
        reached
    }

    fn topmost(&self, mut here: MountedInode) -> Result<MountedInode> {
        while here.node.covers.load(std::sync::atomic::Ordering::Relaxed) > 0 {
            let table = self.client.mounts.load();
            let Some(mount) = table.find_covering(here.mount.id, here.node.ino()) else { break };
            if self.resolve.has(ResolveFlags::NO_XDEV) {
                return Err(Errno::EXDEV.into());
            }
            here = MountedInode::root(mount);
        }
        Ok(here)
    }

    fn enter(&mut self, root: MountedInode) -> Result<()> {
        if self.entered && self.resolve.has(ResolveFlags::NO_XDEV) {
            return Err(Errno::EXDEV.into());
        }
        self.entered = true;
        let root = self.topmost(root)?;
        self.at = WalkPosition::Inside(root);
        Ok(())
    }

    /// Walks `..`: the parent of the directory, not of the path as written.
    fn walk_to_parent(&mut self, here: &MountedInode) -> Result<()> {
        if self.start.as_ref().is_some_and(|start| start.is(here)) {
            if self.resolve.has(ResolveFlags::IN_ROOT) {
                self.at = WalkPosition::Inside(here.clone());
                return Ok(());
            }
            if self.resolve.has(ResolveFlags::BENEATH) {
                return Err(Errno::EXDEV.into());
            }
        }
        let mut here = here.clone();
        while here.node.ino() == Ino::ROOT {
            let below = match &here.mount.spot {
                // A named mount has no parent.
                MountSpot::Name(_) => {
                    self.at = WalkPosition::Inside(here);
                    return Ok(());
                }
                _ if self.resolve.has(ResolveFlags::NO_XDEV) => return Err(Errno::EXDEV.into()),
                MountSpot::Path(path) => {
                    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
                    self.at = WalkPosition::Outside(path[..end].to_vec());
                    return Ok(());
                }
                MountSpot::Covers { node, mount, .. } => {
                    MountedInode { node: Arc::clone(node), mount: Arc::clone(mount) }
                }
            };
            here = below;
        }
        let parent = here.mount.parent(&here.node, self.who)?;
        let node = parent.unwrap_or_else(|| Arc::clone(&here.mount.root));
        let here = self.topmost(MountedInode { node, mount: here.mount })?;
        self.at = WalkPosition::Inside(here);
        Ok(())
    }

    /// Continues with the text of a link in `dir`.
    fn follow(&mut self, dir: &MountedInode, link: &MountedInode, trailing: bool) -> Result<()> {
        self.count_link()?;
        if trailing {
            self.client.protected.check_link(dir, link, self.who)?;
        }
        let cx = self.who.context(link.mount.origin);
        let text = link.mount.call(Op::READLINK, |fs| fs.readlink(&cx, link.node.ino()))?;
        if text.is_empty() {
            return Err(Errno::ENOENT.into());
        }
        self.at = WalkPosition::Inside(dir.clone());
        self.continue_with(text)
    }

    /// Follows a link at which [`last_node`](PathWalk::last_node) stopped.
    pub fn follow_found(&mut self, dir: &MountedInode, link: &MountedInode) -> Result<()> {
        self.follow(dir, link, true)
    }

    fn count_link(&mut self) -> Result<()> {
        self.links += 1;
        if self.links > MAX_LINKS || self.resolve.has(ResolveFlags::NO_SYMLINKS) {
            return Err(Errno::ELOOP.into());
        }
        Ok(())
    }

    fn continue_with(&mut self, text: Vec<u8>) -> Result<()> {
        if text.first() == Some(&b'/') {
            if self.resolve.has(ResolveFlags::BENEATH) {
                return Err(Errno::EXDEV.into());
            }
            match &self.start {
                Some(start) if self.resolve.has(ResolveFlags::IN_ROOT) => {
                    self.at = WalkPosition::Inside(start.clone());
                }
                _ => self.at = WalkPosition::Outside(Vec::new()),
            }
        }
        self.rest.push(text);
        Ok(())
    }

    /// Walks through the kernel's name space from `path` until a mount is entered. If none can be
    /// reached, the kernel must continue.
    fn enter_from_kernel(&mut self, path: Vec<u8>) -> Result<MountedInode> {
        let path_unchanged = !self.entered;
        let mut path = path;
        let mut walked = false;
        loop {
            let table = self.client.mounts.load_full();
            if walked || self.entered {
                if let Some(mount) = table.find(&path) {
                    self.enter(MountedInode::root(mount))?;
                    let WalkPosition::Inside(here) = &self.at else { continue };
                    return Ok(here.clone());
                }
            } else if let Some((mount, len)) = table.prefix(&path).filter(|_| !path.is_empty()) {
                // The start directory is a mount point by its path.
                if len == path.len() {
                    self.enter(MountedInode::root(mount))?;
                    continue;
                }
            }
            let left = |path: &[u8], rest: &RemainingPath<'_>| {
                let full = join_rest(path, &rest.text());
                CallError::outside_mounts((!path_unchanged).then_some(full))
            };
            if !kernel_walk::may_lead_in(&table, &path, self.client.follows_kernel_links()) {
                return Err(left(&path, &self.rest));
            }
            let before = self.rest.text();
            let Some(component) = self.rest.next() else { return Err(left(&path, &self.rest)) };
            walked = true;
            match component.part {
                ComponentKind::Dot => {}
                ComponentKind::DotDot => {
                    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
                    path.truncate(end);
                }
                ComponentKind::Name => {
                    let dir_len = path.len();
                    path.push(b'/');
                    path.extend_from_slice(component.bytes());
                    if table.find(&path).is_some() {
                        continue;
                    }
                    let links = self.client.follows_kernel_links();
                    // Last names differ: caching them is useless.
                    let known = self.client.known_directories().filter(|_| !component.last);
                    match kernel_walk::follow(&table, &path, links, known) {
                        kernel_walk::OutsideStep::GoOn => {}
                        kernel_walk::OutsideStep::HandOver => return Err(left(&path, &self.rest)),
                        // A final link that does not lead into a mount is left to the kernel.
                        kernel_walk::OutsideStep::Link(text)
                            if component.last
                                && (!self.follow_last && !component.slash
                                    || !kernel_walk::leads_into_mount(&table, &path, &text)) =>
                        {
                            path.truncate(dir_len);
                            let full = join_rest(&path, &before);
                            return Err(CallError::outside_mounts(
                                (!path_unchanged).then_some(full),
                            ));
                        }
                        kernel_walk::OutsideStep::Link(text) => {
                            self.count_link()?;
                            path.truncate(if text.starts_with(b"/") { 0 } else { dir_len });
                            self.rest.push(text);
                        }
                    }
                }
            }
        }
    }
}

/// A path as text: the part walked and the rest.
fn join_rest(path: &[u8], rest: &[u8]) -> Vec<u8> {
    if rest.is_empty() && !path.is_empty() {
        return path.to_vec();
    }
    let mut full = path.to_vec();
    if !rest.starts_with(b"/") {
        full.push(b'/');
    }
    full.extend_from_slice(rest);
    full
}

fn trim(path: &[u8]) -> Vec<u8> {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    path[..end].to_vec()
}
