//! Path walks: from a path to an inode, path_resolution(7).

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::Arc;

use defuse_fs::{Attr, Errno, FileKind, Ino, OpenArgs};
use defuse_probe::Op;

use crate::access::{self, Access};
use crate::client::Client;
use crate::credentials::Credentials;
use crate::cwd::WorkDir;
use crate::description::Description;
use crate::mount::{Mount, Spot, Told};
use crate::node::Node;
use crate::open::Resolve;
use crate::outside;
use crate::passed::Begin;
use crate::resolve::OpenedAhead;
use crate::rest::{Component, PATH_MAX, Part, Rest};
use crate::stop::{Result, Stop};
use crate::task::Task;

/// Limit on the links in one walk, as in the kernel.
const MAX_LINKS: u32 = 40;

/// The start of a relative path.
#[derive(Clone, Copy, Debug)]
pub enum At<'a> {
    /// The working directory of the task, `AT_FDCWD`.
    Cwd,
    /// An open directory of a mount.
    Dir(&'a Description),
    /// An open file of a mount, also with `O_PATH`. The path must be empty and refers to the file
    /// itself, as with `AT_EMPTY_PATH` and below `/proc/self/fd`.
    Itself(&'a Description),
    /// A directory of the kernel's name space, by its absolute path.
    Path(&'a [u8]),
}

/// An inode, and the mount through which it was reached.
#[derive(Clone, Debug)]
pub(crate) struct Here {
    pub node: Arc<Node>,
    pub mount: Arc<Mount>,
}

impl Here {
    fn root(mount: &Arc<Mount>) -> Self {
        Here { node: Arc::clone(&mount.root), mount: Arc::clone(mount) }
    }

    fn is(&self, other: &Here) -> bool {
        Arc::ptr_eq(&self.mount, &other.mount) && self.node.ino() == other.node.ino()
    }
}

enum Position {
    Inside(Here),
    /// At this path, whose links are resolved already, without a trailing slash.
    Outside(Vec<u8>),
}

/// The end of a path. It is on the stack, because a box would cost an allocation for every path.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Last<'a> {
    /// A component, not yet looked up.
    Component(Component<'a>),
    /// No component: the path has only slashes, or is the mount point itself.
    Nothing,
}

/// The parent directory of a path, and its last component.
pub(crate) struct Parent<'a> {
    pub dir: Here,
    pub last: Last<'a>,
}

/// The end of a walk.
pub(crate) enum Reached<T> {
    /// The inode.
    Node(Here),
    /// The inode has no node: this is known of it. It lies in the directory.
    Peeked(Here, T),
}

/// A walk in progress.
pub(crate) struct Walk<'a> {
    client: &'a Client,
    pub who: &'a Credentials,
    at: Position,
    /// The directory where a restricted walk begins.
    start: Option<Here>,
    rest: Rest<'a>,
    links: u32,
    pub resolve: Resolve,
    /// Follow a link at the end of the path.
    pub follow_last: bool,
    /// The walk has been inside of a mount, so the caller's path is no longer valid for the kernel.
    entered: bool,
    /// How to open the file at the end of the path, if that may be done together with the lookup.
    open: Option<OpenArgs>,
    /// The file at the end of the path, if it was opened so. It is released before its inode is forgotten.
    opened: Option<OpenedAhead>,
    /// The inode that was looked up last, with its attributes.
    told: Cell<Option<(Arc<Node>, Told)>>,
    /// While the walk leads to the last directory of the caller's path by names alone: its begin, and the path to there.
    by_names: Option<(Begin, &'a [u8])>,
    /// The position is a directory that the caller may search, as a walk has found lately.
    may_search: bool,
}

impl Client {
    /// Begins a walk. Fails with `ENOENT` for an empty path, `ENAMETOOLONG`, and `ENOTDIR` if `at`
    /// is no directory.
    pub(crate) fn walk<'a>(
        &'a self,
        task: &Task,
        who: &'a Credentials,
        at: At<'_>,
        path: &'a [u8],
    ) -> Result<Walk<'a>> {
        self.walk_within(task, who, (at, path), Resolve::default())
    }

    /// Begins a walk with restrictions, openat2(2).
    pub(crate) fn walk_within<'a>(
        &'a self,
        task: &Task,
        who: &'a Credentials,
        path: (At<'_>, &'a [u8]),
        resolve: Resolve,
    ) -> Result<Walk<'a>> {
        let is_free = resolve == Resolve::default();
        let walk = self.begin(task, who, path, is_free)?;
        if is_free { Ok(walk) } else { walk.restrict(resolve) }
    }

    fn begin<'a>(
        &'a self,
        task: &Task,
        who: &'a Credentials,
        (at, path): (At<'_>, &'a [u8]),
        is_free: bool,
    ) -> Result<Walk<'a>> {
        if path.is_empty() && !matches!(at, At::Itself(_)) {
            return Err(Errno::ENOENT.into());
        }
        if path.len() > PATH_MAX {
            return Err(Errno::ENAMETOOLONG.into());
        }
        let mut walk = Walk {
            client: self,
            who,
            at: Position::Outside(Vec::new()),
            start: None,
            rest: Rest::new(path, 0),
            links: 0,
            resolve: Resolve::default(),
            follow_last: false,
            entered: false,
            told: Cell::default(),
            open: None,
            opened: None,
            by_names: None,
            may_search: false,
        };
        if let At::Itself(file) = at {
            walk.begin_in(file.here(), is_free);
            return Ok(walk);
        }
        let table = self.mounts.load();
        let found = if path[0] == b'/' { table.prefix(path) } else { table.named(path) };
        if let Some((mount, len)) = found {
            walk.rest = Rest::new(path, len);
            walk.enter(Here::root(mount))?;
            if is_free && let Position::Inside(here) = walk.take_at() {
                walk.begin_in(&here, true);
            }
            return Ok(walk);
        }
        if path[0] != b'/' {
            walk.begin_at(task, at, is_free)?;
        }
        if matches!(walk.at, Position::Outside(_)) && !table.has_paths() {
            return Err(Stop::outside(None));
        }
        Ok(walk)
    }
}

impl<'a> Walk<'a> {
    fn begin_at(&mut self, task: &Task, at: At<'_>, is_free: bool) -> Result<()> {
        match at {
            At::Cwd => task.with_cwd(|cwd| match cwd {
                WorkDir::Inside(held) => self.begin_in(&held.here, is_free),
                WorkDir::Outside(path) => self.at = Position::Outside(trimmed(path)),
            }),
            At::Dir(dir) => {
                if !dir.here().node.is_dir() {
                    return Err(Errno::ENOTDIR.into());
                }
                self.begin_in(dir.here(), is_free);
            }
            At::Itself(file) => self.begin_in(file.here(), is_free),
            At::Path(path) => self.at = Position::Outside(trimmed(path)),
        }
        Ok(())
    }

    /// Begins in `here`. A walk without restrictions may go on from a place that is further.
    fn begin_in(&mut self, here: &Here, is_free: bool) {
        self.entered = true;
        if is_free && self.leap(here) {
            return;
        }
        self.start = (!is_free).then(|| here.clone());
        self.at = Position::Inside(here.clone());
    }

    /// Goes from `here` to the last directory of the path at once, if a walk came there by the same names lately. This
    /// takes no reference count of what threads share, but that of the mount.
    fn leap(&mut self, here: &Here) -> bool {
        let Some(path) = self.rest.before_last() else { return false };
        let Some(begin) = here.mount.begin(&here.node) else { return false };
        let Some(found) = here.mount.passed().get_path(begin.parent, path, self.who) else {
            self.by_names = Some((begin, path));
            return false;
        };
        let told = found.attr.map_or(Told::Nothing, Told::Lately);
        self.told.set(Some((Arc::clone(&found.node), told)));
        self.at = Position::Inside(Here { node: found.node, mount: Arc::clone(&here.mount) });
        self.may_search = true;
        self.rest.skip(path);
        true
    }

    /// The position, which somebody sets anew.
    fn take_at(&mut self) -> Position {
        std::mem::replace(&mut self.at, Position::Outside(Vec::new()))
    }

    /// Keeps the last directory of the path, which the caller may search, if only names led to it.
    fn keep_leap(&mut self, here: &Here) {
        if let Some((begin, path)) = self.by_names.take() {
            let passed = here.mount.passed();
            passed.keep_path(&begin, path, (&here.node, self.told_lately(here)), self.who);
        }
    }

    fn restrict(mut self, resolve: Resolve) -> Result<Self> {
        self.resolve = resolve;
        let confined = resolve.has(Resolve::BENEATH) || resolve.has(Resolve::IN_ROOT);
        if resolve.has(Resolve::CACHED) {
            return Err(Errno::EAGAIN.into());
        }
        // An absolute path, or one that starts with the name of a mount, does not start at the
        // directory.
        if confined && self.start.is_none() && self.entered {
            return Err(Errno::EXDEV.into());
        }
        Ok(self)
    }

    /// Walks to the inode at the end of the path. Follows a link there if `follow` is set, or if a
    /// slash comes after it.
    pub fn node(&mut self, follow: bool) -> Result<Here> {
        match self.reach::<Infallible>(follow, |_, _| Ok(None))? {
            Reached::Node(here) => Ok(here),
            Reached::Peeked(_, never) => match never {},
        }
    }

    /// Walks like [`node`](Walk::node). With `open`, the inode may be open already, before the permission to do so was checked.
    pub fn node_to_open(
        &mut self,
        follow: bool,
        open: Option<OpenArgs>,
    ) -> Result<(Here, Option<OpenedAhead>)> {
        self.open = open;
        let here = self.node(follow)?;
        Ok((here, self.opened.take()))
    }

    /// Walks like [`node`](Walk::node), but makes no node of the inode at the end if its attributes are told without.
    pub fn attr_or_node(&mut self, follow: bool) -> Result<Reached<Attr>> {
        let who = self.who;
        self.reach(follow, |dir, component| {
            if component.part != Part::Name || component.slash {
                return Ok(None);
            }
            let attr = dir.mount.peek(&dir.node, component.name()?, who)?;
            Ok(attr.filter(|attr| !follow || attr.kind != FileKind::Symlink))
        })
    }

    /// Walks to the end of the path, unless `peek` is content with a name at the end of a part of it.
    fn reach<T>(
        &mut self,
        follow: bool,
        peek: impl Fn(&Here, &Component<'_>) -> Result<Option<T>>,
    ) -> Result<Reached<T>> {
        self.follow_last = follow;
        loop {
            let Parent { dir, last } = self.parent()?;
            let component = match last {
                Last::Nothing => return Ok(Reached::Node(dir)),
                Last::Component(component) => component,
            };
            if let Some(peeked) = peek(&dir, &component)? {
                return Ok(Reached::Peeked(dir, peeked));
            }
            if let Some(here) = self.last_node(dir, &component, follow)? {
                return Ok(Reached::Node(here));
            }
        }
    }

    /// Looks up the last component in `dir`. Returns `None` if it is a link, which the walk follows
    /// next.
    pub fn last_node(
        &mut self,
        dir: Here,
        last: &Component<'_>,
        follow: bool,
    ) -> Result<Option<Here>> {
        match last.part {
            Part::Dot => return Ok(Some(dir)),
            Part::DotDot => {
                self.up(&dir)?;
                return match &self.at {
                    Position::Inside(here) => Ok(Some(here.clone())),
                    Position::Outside(_) => self.outside_or_back(),
                };
            }
            Part::Name => {}
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
    fn outside_or_back(&mut self) -> Result<Option<Here>> {
        let Position::Outside(path) = &self.at else { return Ok(None) };
        match self.client.mounts.load().prefix(path) {
            Some((mount, len)) if len == path.len() => Ok(Some(Here::root(mount))),
            _ => Err(Stop::outside(Some(absolute(path, &[])))),
        }
    }

    /// Walks to the directory of the last component. The caller has search permission to it.
    pub fn parent(&mut self) -> Result<Parent<'a>> {
        loop {
            let here = match self.take_at() {
                Position::Outside(path) => self.come_in(path)?,
                Position::Inside(here) => here,
            };
            let Some(component) = self.rest.next() else {
                return Ok(Parent { dir: here, last: Last::Nothing });
            };
            if !here.node.is_dir() {
                return Err(Errno::ENOTDIR.into());
            }
            if !std::mem::take(&mut self.may_search) {
                let told = self.told_lately(&here);
                access::check_told(&here.mount, (&here.node, told), self.who, Access::EXEC)?;
            }
            if component.last {
                self.keep_leap(&here);
                return Ok(Parent { dir: here, last: Last::Component(component) });
            }
            self.step(here, &component)?;
        }
    }

    /// Walks one component that is not the last.
    fn step(&mut self, here: Here, component: &Component<'_>) -> Result<()> {
        if component.part != Part::Name {
            self.by_names = None;
        }
        match component.part {
            Part::Dot => {
                self.at = Position::Inside(here);
                Ok(())
            }
            Part::DotDot => self.up(&here),
            Part::Name => {
                let (node, told, until) =
                    here.mount.pass(&here.node, component.name()?, self.who)?;
                if let Some((begin, _)) = &mut self.by_names {
                    begin.pass(until);
                }
                let found = self.found(&here, node, told)?;
                if !Arc::ptr_eq(&found.mount, &here.mount) {
                    self.by_names = None;
                }
                match found.node.kind() {
                    FileKind::Directory => self.at = Position::Inside(found),
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
    fn child(&mut self, dir: &Here, component: &Component<'_>) -> Result<Here> {
        let (name, open) = (component.name()?, self.open.filter(|_| !component.slash));
        let (node, attr, opened) = dir.mount.look_up_to_open(&dir.node, name, self.who, open)?;
        self.opened = opened.zip(open).map(|(opened, args)| {
            OpenedAhead::new(&dir.mount, self.who, (node.ino(), args.flags), opened)
        });
        self.found(dir, node, attr.map_or(Told::Nothing, Told::Now))
    }

    /// Notes what a lookup in `dir` has found, and enters the mount that covers it.
    fn found(&self, dir: &Here, node: Arc<Node>, told: Told) -> Result<Here> {
        self.told.set(Some((Arc::clone(&node), told)));
        self.topmost(Here { node, mount: Arc::clone(&dir.mount) })
    }

    /// The attributes of the inode at the end of the walk, if the file system told all of them during the walk. They need not
    /// be asked for, even where nothing is cached.
    pub fn told(&self, here: &Here) -> Option<Attr> {
        let Told::Now(attr) = self.told_of(here) else { return None };
        let is_whole = attr.btime.is_some() || !here.mount.caps().birth_times;
        is_whole.then_some(attr)
    }

    /// Those attributes of the inode that permission checks use, if they are known of the last step of the walk.
    pub fn told_lately(&self, here: &Here) -> Option<Attr> {
        match self.told_of(here) {
            Told::Now(attr) | Told::Lately(attr) => Some(attr),
            Told::Nothing => None,
        }
    }

    fn told_of(&self, here: &Here) -> Told {
        let last = self.told.take();
        let told = last.as_ref().filter(|(node, _)| Arc::ptr_eq(node, &here.node));
        let told = told.map_or(Told::Nothing, |(_, told)| *told);
        self.told.set(last);
        told
    }

    fn topmost(&self, mut here: Here) -> Result<Here> {
        while here.node.covers.load(std::sync::atomic::Ordering::Relaxed) > 0 {
            let table = self.client.mounts.load();
            let Some(mount) = table.covering(here.mount.id, here.node.ino()) else { break };
            if self.resolve.has(Resolve::NO_XDEV) {
                return Err(Errno::EXDEV.into());
            }
            here = Here::root(mount);
        }
        Ok(here)
    }

    fn enter(&mut self, root: Here) -> Result<()> {
        if self.entered && self.resolve.has(Resolve::NO_XDEV) {
            return Err(Errno::EXDEV.into());
        }
        self.entered = true;
        let root = self.topmost(root)?;
        self.at = Position::Inside(root);
        Ok(())
    }

    /// Walks `..`: the parent of the directory, not of the path as written.
    fn up(&mut self, here: &Here) -> Result<()> {
        if self.start.as_ref().is_some_and(|start| start.is(here)) {
            if self.resolve.has(Resolve::IN_ROOT) {
                self.at = Position::Inside(here.clone());
                return Ok(());
            }
            if self.resolve.has(Resolve::BENEATH) {
                return Err(Errno::EXDEV.into());
            }
        }
        let mut here = here.clone();
        while here.node.ino() == Ino::ROOT {
            let below = match &here.mount.spot {
                // A named mount has no parent.
                Spot::Name(_) => {
                    self.at = Position::Inside(here);
                    return Ok(());
                }
                _ if self.resolve.has(Resolve::NO_XDEV) => return Err(Errno::EXDEV.into()),
                Spot::Path(path) => {
                    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
                    self.at = Position::Outside(path[..end].to_vec());
                    return Ok(());
                }
                Spot::Covers { node, mount, .. } => {
                    Here { node: Arc::clone(node), mount: Arc::clone(mount) }
                }
            };
            here = below;
        }
        let parent = here.mount.parent(&here.node, self.who)?;
        let node = parent.unwrap_or_else(|| Arc::clone(&here.mount.root));
        let here = self.topmost(Here { node, mount: here.mount })?;
        self.at = Position::Inside(here);
        Ok(())
    }

    /// Continues with the text of a link in `dir`.
    fn follow(&mut self, dir: &Here, link: &Here, trailing: bool) -> Result<()> {
        self.count_link()?;
        if trailing {
            self.client.protected.check_link(dir, link, self.who)?;
        }
        let cx = self.who.context(link.mount.origin);
        let text = link.mount.call(Op::READLINK, |fs| fs.readlink(&cx, link.node.ino()))?;
        if text.is_empty() {
            return Err(Errno::ENOENT.into());
        }
        self.at = Position::Inside(dir.clone());
        self.go_on_with(text)
    }

    /// Follows a link at which [`last_node`](Walk::last_node) stopped.
    pub fn follow_found(&mut self, dir: &Here, link: &Here) -> Result<()> {
        self.follow(dir, link, true)
    }

    fn count_link(&mut self) -> Result<()> {
        self.links += 1;
        if self.links > MAX_LINKS || self.resolve.has(Resolve::NO_SYMLINKS) {
            return Err(Errno::ELOOP.into());
        }
        Ok(())
    }

    fn go_on_with(&mut self, text: Vec<u8>) -> Result<()> {
        if text.first() == Some(&b'/') {
            if self.resolve.has(Resolve::BENEATH) {
                return Err(Errno::EXDEV.into());
            }
            match &self.start {
                Some(start) if self.resolve.has(Resolve::IN_ROOT) => {
                    self.at = Position::Inside(start.clone());
                }
                _ => self.at = Position::Outside(Vec::new()),
            }
        }
        self.rest.push(text);
        Ok(())
    }

    /// Walks through the kernel's name space from `path` until a mount is entered. If none can be
    /// reached, the kernel must continue.
    fn come_in(&mut self, path: Vec<u8>) -> Result<Here> {
        let original = !self.entered;
        let mut path = path;
        let mut walked = false;
        loop {
            let table = self.client.mounts.load_full();
            if walked || self.entered {
                if let Some(mount) = table.at(&path) {
                    self.enter(Here::root(mount))?;
                    let Position::Inside(here) = &self.at else { continue };
                    return Ok(here.clone());
                }
            } else if let Some((mount, len)) = table.prefix(&path).filter(|_| !path.is_empty()) {
                // The start directory is a mount point by its path.
                if len == path.len() {
                    self.enter(Here::root(mount))?;
                    continue;
                }
            }
            let left = |path: &[u8], rest: &Rest<'_>| {
                let full = absolute(path, &rest.text());
                Stop::outside((!original).then_some(full))
            };
            if !outside::may_lead_in(&table, &path, self.client.follows_kernel_links()) {
                return Err(left(&path, &self.rest));
            }
            let before = self.rest.text();
            let Some(component) = self.rest.next() else { return Err(left(&path, &self.rest)) };
            walked = true;
            match component.part {
                Part::Dot => {}
                Part::DotDot => {
                    let end = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
                    path.truncate(end);
                }
                Part::Name => {
                    let dir_len = path.len();
                    path.push(b'/');
                    path.extend_from_slice(component.bytes());
                    if table.at(&path).is_some() {
                        continue;
                    }
                    let links = self.client.follows_kernel_links();
                    // Each path of a tree of files has another last name.
                    let known = self.client.known_dirs().filter(|_| !component.last);
                    match outside::look(&table, &path, links, known) {
                        outside::Look::GoOn => {}
                        outside::Look::HandOver => return Err(left(&path, &self.rest)),
                        // A final link that does not lead into a mount is left to the kernel.
                        outside::Look::Link(text)
                            if component.last
                                && (!self.follow_last && !component.slash
                                    || !outside::leads_in(&table, &path, &text)) =>
                        {
                            path.truncate(dir_len);
                            let full = absolute(&path, &before);
                            return Err(Stop::outside((!original).then_some(full)));
                        }
                        outside::Look::Link(text) => {
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
fn absolute(path: &[u8], rest: &[u8]) -> Vec<u8> {
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

fn trimmed(path: &[u8]) -> Vec<u8> {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    path[..end].to_vec()
}
