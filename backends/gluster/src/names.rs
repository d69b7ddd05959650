//! Operations on names.

use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_fs::posix::rename::check_kinds;
use defuse_fs::{Context, Entry, Errno, FileKind, Ino, Name, NewNode, OpenArgs, OpenReply, Result};

use crate::answers::{ChangeSubject, QueryContext};
use crate::contents::OpenOnDemand;
use crate::data::open_flags;
use crate::gluster::{EntryLocation, Gluster, OpenVolumeFile, PlainModeCache, try_again};
use crate::volume::{Gfid, InodeObject, c_name};

/// A name, and its directory.
fn name_subjects(dir: Gfid, name: Name<'_>) -> [ChangeSubject<'_>; 2] {
    [ChangeSubject::Name(dir, name.as_bytes()), ChangeSubject::Attributes(dir)]
}

/// Further lookups of a name after [`try_again`] has given up, of 150 ms each.
const MORE_TRIES: u32 = 6;

/// Time from the lookup of a name to its removal without another lookup. A distributed volume
/// removes a name where the file was that libgfapi knows by it. If another client has renamed
/// another file to this name meanwhile, that can be the pointer to this other file, which no lookup
/// would find again.
const UNLINKED_WITHIN: Duration = Duration::from_millis(20);

/// The default access list of a directory.
pub(crate) const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

impl Gluster {
    pub(crate) fn look_up(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let mut acting = self.act(cx);
        let gfid = self.nodes.gfid(parent)?;
        if let Some(entry) = self.find_kept_entry(&acting, (gfid, name)) {
            return Ok(entry);
        }
        let _turn = self.lock_lookup((gfid, name));
        // The moment is taken after the wait, so that it includes the changes that have ended.
        acting.query.since = self.watch.inbox.now();
        if self.watch.needs_asking(gfid) {
            // If this fails, nothing is kept.
            let _ = self.look_at(gfid, &acting.query);
        }
        let found = self.find(gfid, &c_name(name)?)?;
        if found.is_none() {
            self.keep_missing((gfid, name), &acting.query);
        }
        let (object, stat) = found.ok_or(Errno::ENOENT)?;
        self.entry((&object, &stat), (gfid, name), &acting.query)
    }

    /// Looks up a name on the servers. A name of an existing directory leads to an inode or to
    /// none: `ESTALE` means that another client is renaming it, and lasts as long as the slowest
    /// brick takes.
    fn find(&self, dir: Gfid, name: &CStr) -> Result<Option<(InodeObject<'_>, libc::stat)>> {
        let look_up = || self.volume.look_up(Some(&self.directory(dir)?), name);
        let ask = || match look_up() {
            Err(Errno::ENOENT) => Ok(None),
            Err(Errno::ESTALE) => {
                self.volume.release_inode(dir);
                Err(Errno::ESTALE)
            }
            found => found.map(Some),
        };
        let mut found = try_again(&ask);
        for _ in 0..MORE_TRIES {
            let is_there =
                || self.volume.object(dir).and_then(|dir| self.volume.stat(&dir)).is_ok();
            if !matches!(found, Err(Errno::ESTALE)) || !is_there() {
                break;
            }
            found = try_again(&ask);
        }
        found
    }

    /// The parent of a directory: the directory in which the last lookup found it.
    pub(crate) fn look_up_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let acting = self.act(cx);
        let root = self.nodes.gfid(Ino::ROOT)?;
        let parent = match ino {
            Ino::ROOT => root,
            _ => self.nodes.parent(ino)?.ok_or(Errno::ENOENT)?,
        };
        let object = self.volume.object(parent)?;
        let stat = self.volume.stat(&object)?;
        let above = self.nodes.ino(parent).and_then(|ino| self.nodes.parent(ino).ok().flatten());
        let above = above.unwrap_or(root);
        let place = EntryLocation { dir: above, name: None, is_listed: false };
        self.entry_of((object.gfid()?, &stat), place, &acting.query)
    }

    pub(crate) fn make(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let acting = self.act_as(cx, (node.uid, node.gid));
        let (gfid, new) = (self.nodes.gfid(parent)?, c_name(name)?);
        let dir = self.directory(gfid)?;
        let _change = self.watch.begin_change(&[gfid]);
        let _turn = self.lock_names(&[(gfid, name)]);
        let _inodes = self.lock_inodes(&[gfid], &[]);
        let _own = self.begin_own_change(&name_subjects(gfid, name));
        let of_dir = self.client_change(parent);
        let perm = self.perm((&dir, gfid), node);
        let make = || match node.kind {
            FileKind::Directory => self.volume.mkdir(&dir, &new, perm),
            kind => self.volume.mknod(&dir, &new, kind.mode_bits() | perm, node.rdev),
        };
        let (object, stat) = self.make_missing((&dir, &new), make)?;
        if node.kind != FileKind::Directory {
            self.finish_file_made(of_dir, &stat);
        }
        self.entry((&object, &stat), (gfid, name), &acting.query)
    }

    pub(crate) fn make_link_to(
        &self,
        cx: &Context<'_>,
        (parent, name): (Ino, Name<'_>),
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        let acting = self.act_as(cx, (node.uid, node.gid));
        let gfid = self.nodes.gfid(parent)?;
        let target = CString::new(target).map_err(|_| Errno::EINVAL)?;
        let dir = self.directory(gfid)?;
        let _change = self.watch.begin_change(&[gfid]);
        let _turn = self.lock_names(&[(gfid, name)]);
        let _inodes = self.lock_inodes(&[gfid], &[]);
        let _own = self.begin_own_change(&name_subjects(gfid, name));
        let of_dir = self.client_change(parent);
        let new = c_name(name)?;
        let make = || self.volume.symlink(&dir, &new, &target);
        let (object, stat) = self.make_missing((&dir, &new), make)?;
        self.finish_file_made(of_dir, &stat);
        self.entry((&object, &stat), (gfid, name), &acting.query)
    }

    pub(crate) fn make_and_open(
        &self,
        cx: &Context<'_>,
        (parent, name): (Ino, Name<'_>),
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let acting = self.act_as(cx, (node.uid, node.gid));
        let gfid = self.nodes.gfid(parent)?;
        let dir = self.directory(gfid)?;
        let _change = self.watch.begin_change(&[gfid]);
        let _turn = self.lock_names(&[(gfid, name)]);
        let _inodes = self.lock_inodes(&[gfid], &[]);
        let _own = self.begin_own_change(&name_subjects(gfid, name));
        let of_dir = self.client_change(parent);
        let (perm, flags) = (self.perm((&dir, gfid), node), open_flags(args.flags));
        let changes = self.mode_changes.load(Ordering::Acquire);
        let new = c_name(name)?;
        let make = || self.volume.create(&dir, &new, flags, perm);
        let query = Instant::now();
        let (object, stat, handle) = self.make_missing((&dir, &new), make)?;
        self.finish_file_made(of_dir, &stat);
        let entry = self.entry((&object, &stat), (gfid, name), &acting.query)?;
        self.nodes.record_creation(entry.ino, query);
        let file = OpenVolumeFile {
            ino: entry.ino,
            flags: args.flags,
            handle: OpenOnDemand::from_handle(handle),
            plain: Mutex::default(),
            writes: Arc::default(),
            plain_mode: PlainModeCache::default(),
        };
        file.plain_mode.record_mode(stat.st_mode, changes);
        Ok((entry, self.add_open_file(file)))
    }

    pub(crate) fn make_name(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        (parent, name): (Ino, Name<'_>),
    ) -> Result<Entry> {
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(parent)?;
        let (object, dir) = (self.object(ino)?, self.directory(gfid)?);
        let _change = self.watch.begin_change(&[gfid]);
        let linked = self.nodes.gfid(ino)?;
        let _client = (self.client_change(ino), self.client_change(parent));
        let _turn = self.lock_names(&[(gfid, name)]);
        let _inodes = self.lock_inodes(&[gfid], &[linked]);
        let [of_name, of_dir] = name_subjects(gfid, name);
        let _own = self.begin_own_change(&[of_name, of_dir, ChangeSubject::Attributes(linked)]);
        if self.checks_changes() {
            // A distributed volume leaves a part of the name that a removed inode would have got.
            self.volume.stat(&object).map_err(|errno| self.map_inode_error(ino, errno))?;
        }
        let new = c_name(name)?;
        let make = || self.volume.link(&object, &dir, &new);
        self.make_missing((&dir, &new), make).map_err(|errno| match errno {
            Errno::EISDIR => Errno::EPERM,
            errno => errno,
        })?;
        let stat = self.volume.stat(&object)?;
        let entry = self.entry((&object, &stat), (gfid, name), &acting.query);
        self.watch.record_link(object.gfid()?);
        entry
    }

    /// Removes a name of a directory, or of anything else.
    pub(crate) fn remove(
        &self,
        cx: &Context<'_>,
        (parent, name): (Ino, Name<'_>),
        is_dir: bool,
    ) -> Result<()> {
        let _acting = self.act(cx);
        let _turn = self.lock_names(&[(self.nodes.gfid(parent)?, name)]);
        let [of_name, of_dir] = name_subjects(self.nodes.gfid(parent)?, name);
        let gfid = self.nodes.gfid(parent)?;
        let place = (gfid, name.as_bytes());
        // libgfapi has one call for files and directories, which removes whatever it finds.
        let known = self.watch.find_name(&self.nodes, &self.volume, place);
        let looked_up = self.looked_up.take(place, UNLINKED_WITHIN);
        // A removed directory would be lost if another client had just made a file of its name.
        let looked_up = looked_up.filter(|&(child, is)| !is_dir && !is && self.volume.has(child));
        let known = known.or(looked_up);
        let (dir, name) = (self.directory(gfid)?, c_name(name)?);
        let _change = self.watch.begin_change(&[gfid]);
        let mut _own = None;
        let (removed, is) = match known {
            Some(known) => known,
            None => {
                let (object, stat) = self.volume.look_up(Some(&dir), &name)?;
                let removed = object.gfid()?;
                _own =
                    self.begin_own_change(&[of_name, of_dir, ChangeSubject::Attributes(removed)]);
                (removed, stat.st_mode & libc::S_IFMT == libc::S_IFDIR)
            }
        };
        let _inodes = self.lock_inodes(&[gfid], &[removed]);
        let ino = self.nodes.ino(removed);
        self.open_before(|open| Some(open) == ino);
        let _removed = (ino.and_then(|ino| self.client_change(ino)), self.client_change(parent));
        match (is, is_dir) {
            (true, false) => Err(Errno::EISDIR),
            (false, true) => Err(Errno::ENOTDIR),
            _ => self.volume.unlink(&dir, &name),
        }
    }

    /// Renames. The kernel never requests a rename of a directory to the name of a file, of a file
    /// to the name of a directory, or between two names of an inode. Each brick of a distributed
    /// volume would perform what it can, so that the bricks would disagree about the name.
    pub(crate) fn move_name(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
    ) -> Result<()> {
        let acting = self.act(cx);
        let (origin, target) = (self.nodes.gfid(from.0)?, self.nodes.gfid(to.0)?);
        let (old_dir, new_dir) = (self.directory(origin)?, self.directory(target)?);
        let _change = self.watch.begin_change(&[origin, target]);
        let (old, new) = (c_name(from.1)?, c_name(to.1)?);
        let _turn = self.lock_names(&[(origin, from.1), (target, to.1)]);
        let mut things = [name_subjects(origin, from.1), name_subjects(target, to.1)].concat();
        let moved = self.child((&old_dir, origin), &old);
        let replaced = self.child((&new_dir, target), &new);
        if let (Some(moved), Some(replaced)) = (moved, replaced) {
            if moved.0 == replaced.0 {
                return Ok(());
            }
            check_kinds(moved.1, replaced.1)?;
        }
        let children: Vec<Gfid> = [moved, replaced].iter().flatten().map(|child| child.0).collect();
        let _inodes = self.lock_inodes(&[origin, target], &children);
        let moves_dir = origin != target && moved.is_some_and(|(_, is_dir)| is_dir);
        let _moves = moves_dir.then(|| self.lock_move());
        things.extend(children.into_iter().map(ChangeSubject::Attributes));
        let _own = self.begin_own_change(&things);
        for name in [(origin, from.1), (target, to.1)] {
            self.looked_up.take((name.0, name.1.as_bytes()), Duration::ZERO);
        }
        self.open_before(|open| self.nodes.parent(open) == Ok(Some(target)));
        let _client = (self.client_change(from.0), self.client_change(to.0));
        let _rename = self.changes.begin_rename();
        self.volume.rename((&old_dir, &old), (&new_dir, &new))?;
        let names = ((origin, from.1.as_bytes()), (target, to.1.as_bytes()));
        let is_known = self.watch.record_rename(&self.nodes, names, acting.query.since);
        if from.0 != to.0
            && !is_known
            && let Ok((object, _)) = self.volume.look_up(Some(&new_dir), &new)
            && let Ok(moved) = object.gfid()
        {
            self.nodes.record_move(moved, target);
        }
        Ok(())
    }

    /// Makes a name. A server may refuse it with `EEXIST` although it is missing: a lookup by one
    /// client during the removal by another client has left it in the server's memory, until the
    /// next lookup.
    fn make_missing<T>(
        &self,
        (dir, name): (&InodeObject<'_>, &CStr),
        make: impl Fn() -> Result<T>,
    ) -> Result<T> {
        match make() {
            Err(Errno::EEXIST)
                if self.volume.look_up(Some(dir), name).err() == Some(Errno::ENOENT) =>
            {
                make()
            }
            made => made,
        }
    }

    /// The permission bits to create with. The servers know no umask, but apply the default access
    /// list of a directory, which replaces the umask.
    fn perm(&self, (dir, gfid): (&InodeObject<'_>, Gfid), node: &NewNode<'_>) -> u32 {
        let masked = node.perm & !(node.umask & 0o777);
        let ask =
            || self.volume.get_xattr(dir, Some(DEFAULT_ACL), &mut []).is_ok_and(|len| len > 0);
        let inherits = masked != node.perm
            && self.settings.posix_acl
            && self.defaults.has(gfid, self.watch.short_lifetime(), ask);
        if inherits { node.perm } else { masked }
    }

    /// Attributes, also of a file without a name.
    pub(crate) fn fetch_attributes(
        &self,
        ino: Ino,
        query: &QueryContext,
    ) -> Result<defuse_fs::Attr> {
        let is_watched = self.listen_to(ino);
        let by_file = |file: &OpenVolumeFile| file.handle()?.stat();
        let ask = || self.reach(ino, |object| self.volume.stat(object), by_file);
        let stat = match (try_again(&ask), self.nodes.find_open_file(ino)) {
            // Another client has removed a file that was not opened on the servers.
            (Err(Errno::ENOENT | Errno::ESTALE), Some(fh)) => {
                let file = self.file(fh)?;
                let small = file.handle.unopened_file().ok_or(Errno::ESTALE)?;
                return Ok(defuse_fs::Attr { nlink: 0, valid_for: Duration::ZERO, ..small.attr });
            }
            (stat, _) => stat?,
        };
        self.attr_of(ino, &stat, (is_watched, query))
    }
}
