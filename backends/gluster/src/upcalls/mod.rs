//! Cache coherence with other clients: servers report their changes, so that frontends may cache
//! for long. This module decides what they may cache, and invalidates it.
//!
//! A server remembers which clients have queried a file, for the time of
//! `features.cache-invalidation-timeout`, and sends them messages about changes by others.
//! Frontends keep attributes of files and names for at most half of this time. Attributes of
//! directories are kept for a short time only: servers do not report every change of a directory.
//! If another client replaces a name by a file that this client does not know, the change time of
//! the directory shows it.

mod events;
mod inbox;
mod names;
mod notifier;
pub mod volfile;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::{Ino, Notify};

use crate::nodes::{GlusterInodes, InodeReference};
use crate::volume::{Gfid, VolumeConnection};

use events::NAME_CHANGED;
pub(crate) use events::{receive, take, take_if_due};
pub use inbox::{UpcallInbox, UpcallSequence};
pub(crate) use names::CHANGES;
use names::{EntryName, FrontendNames};
pub(crate) use notifier::{UpcallNotifier, VolfileQuery};

/// The answers that frontends keep, and the times for which they may.
pub(crate) struct CacheCoherence {
    pub inbox: Arc<UpcallInbox>,
    /// The time if servers do not report changes.
    short: Duration,
    /// The time if servers report changes, in milliseconds; 0 while they do not.
    long_ms: AtomicU64,
    names: Mutex<FrontendNames>,
    frontends: Mutex<Vec<Arc<dyn Notify>>>,
    /// Frontends keep nothing for long, and receive no notifications: this process keeps the
    /// answers.
    keeps_here: bool,
    attached: AtomicBool,
    /// The reason why everything is kept for a short time, while it is.
    why_short: Mutex<String>,
    /// A translator of the client acknowledges writes before the servers have them, or may do so as
    /// far as is known.
    holds_writes: AtomicBool,
}

/// A child in a directory, as far as its name matters.
pub(crate) struct NamedChild {
    pub ino: Ino,
    pub gfid: Gfid,
    /// The child has only one name, as far as is known.
    pub is_single: bool,
    pub is_dir: bool,
    /// The child comes from a listing: it has the attributes of another inode if another client was
    /// just changing its name.
    pub is_listed: bool,
}

impl CacheCoherence {
    /// Makes a state in which everything is kept for a `short` time. With `keeps_here`, frontends
    /// never keep it for longer.
    pub fn new(short: Duration, keeps_here: bool) -> CacheCoherence {
        CacheCoherence {
            inbox: Arc::default(),
            short,
            long_ms: AtomicU64::new(0),
            names: Mutex::default(),
            frontends: Mutex::default(),
            keeps_here,
            attached: AtomicBool::new(false),
            why_short: Mutex::new("its servers were not asked yet".to_owned()),
            holds_writes: AtomicBool::new(true),
        }
    }

    /// Adds a frontend. True if it is the first. With two, nothing is kept for long: servers do not
    /// report changes by this client.
    pub fn attach(&self, notify: Arc<dyn Notify>) -> bool {
        if self.keeps_here {
            return !self.attached.swap(true, Ordering::AcqRel);
        }
        let mut frontends = lock(&self.frontends);
        frontends.push(notify);
        if frontends.len() == 2 {
            // The time is cleared before cached answers are invalidated.
            self.long_ms.store(0, Ordering::SeqCst);
            self.inbox.put_all();
        }
        frontends.len() == 1
    }

    /// Sets the time for which frontends may cache. Servers report changes for twice this time
    /// after a query; zero if they do not.
    pub fn keep_for(&self, long: Duration) {
        // The lock prevents that a second frontend attaches meanwhile.
        let frontends = lock(&self.frontends);
        let is_longer = frontends.len() <= 1 && long > self.short;
        let long = if is_longer { long.as_millis() as u64 } else { 0 };
        self.long_ms.store(long, Ordering::SeqCst);
    }

    /// Sets the reason why everything is kept for a short time, while it is.
    pub fn note_reason(&self, reason: impl Into<String>) {
        *lock(&self.why_short) = reason.into();
    }

    /// The reason why everything is kept for a short time; `None` if it is not.
    pub fn explain_short_lifetime(&self) -> Option<String> {
        if self.is_on() {
            return None;
        }
        match lock(&self.frontends).len() {
            0 | 1 => Some(lock(&self.why_short).clone()),
            count => Some(format!("{count} frontends share the volume")),
        }
    }

    /// Records whether, by its configuration, a translator of the client may acknowledge writes
    /// before the servers have them.
    pub fn note_writes(&self, are_held: bool) {
        self.holds_writes.store(are_held, Ordering::Release);
    }

    /// True if writes that libgfapi has acknowledged may not be on the servers.
    pub fn holds_writes(&self) -> bool {
        self.holds_writes.load(Ordering::Acquire)
    }

    /// The time for which answers are kept that are not kept for long.
    pub fn short_lifetime(&self) -> Duration {
        self.short
    }

    /// True if frontends may keep something for long.
    pub fn is_on(&self) -> bool {
        self.long().is_some()
    }

    /// Ensures that messages about an inode arrive. Must be called before a query about the inode,
    /// or while there is another reference to the inode.
    pub fn listen(
        &self,
        nodes: &GlusterInodes,
        ino: Ino,
        refer: impl FnOnce() -> Option<InodeReference>,
    ) -> bool {
        !self.keeps_here && self.long().is_some_and(|long| nodes.keep(ino, long, refer))
    }

    /// The time for which attributes from a query after `since` are valid. Messages about the inode
    /// must [arrive](CacheCoherence::listen).
    pub fn attribute_lifetime(&self, gfid: Gfid, since: UpcallSequence) -> Duration {
        let Some(long) = self.long() else { return self.short };
        if self.inbox.has_report_since(gfid, since) { Duration::ZERO } else { long }
    }

    /// The time for which attributes of a directory from a query after `since` are valid. Compares
    /// the attributes with the former ones.
    pub fn directory(&self, gfid: Gfid, changed: (i64, i64), since: UpcallSequence) -> Duration {
        let queried = (changed, since);
        if self.long().is_some() && lock(&self.names).record_query(gfid, queried, Instant::now()) {
            self.inbox.put(gfid, 0);
        }
        self.short
    }

    /// The time for which a name from a query after `since` is valid.
    pub fn name(
        &self,
        dir: Gfid,
        name: &[u8],
        child: &NamedChild,
        since: UpcallSequence,
    ) -> Duration {
        let Some(long) = self.long() else { return self.short };
        let now = Instant::now();
        let mut names = lock(&self.names);
        // If a file has several names, no server reports that one of them was replaced.
        let is_sure = child.is_single && !names.has_moved(dir, since);
        if !is_sure || !names.hold(dir, name, child, (now, long)) {
            return self.short;
        }
        drop(names);
        let inbox = &self.inbox;
        let is_old =
            inbox.has_report_since(dir, since) || inbox.has_report_since(child.gfid, since);
        if is_old { Duration::ZERO } else { long }
    }

    /// The inode of a name, and true if it is a directory, as far as frontends know by messages of
    /// the servers; `None` if they do not.
    pub fn find_name(
        &self,
        nodes: &GlusterInodes,
        volume: &VolumeConnection,
        (dir, name): EntryName<'_>,
    ) -> Option<(Gfid, bool)> {
        if self.keeps_here || self.long().is_none() {
            return None;
        }
        take_if_due(volume, &self.inbox);
        let (child, is_dir) = lock(&self.names).child(dir, name, Instant::now())?;
        let (gfid, is_behind) = (nodes.gfid(child).ok()?, |gfid| self.inbox.is_behind(gfid));
        (!is_behind(dir) && !is_behind(gfid)).then_some((gfid, is_dir))
    }

    /// True if no other client has changed a directory lately, false if one has, as far as servers
    /// report it; `None` if this is unknown.
    pub fn is_quiet(&self, volume: &VolumeConnection, dir: Gfid) -> Option<bool> {
        let long = self.long()?;
        take_if_due(volume, &self.inbox);
        let (now, is_behind) = (Instant::now(), self.inbox.is_behind(dir));
        let names = lock(&self.names);
        if is_behind || names.was_changed(dir, now) {
            return Some(false);
        }
        names.is_queried(dir, long, now).then_some(true)
    }

    /// True if names are kept for long, but servers may soon stop reporting changes of `dir`: a new
    /// query about it is necessary.
    pub fn needs_asking(&self, dir: Gfid) -> bool {
        self.long().is_some_and(|long| !lock(&self.names).is_queried(dir, long, Instant::now()))
    }

    /// Records that this client changes directories, until the result is dropped.
    pub fn begin_change(&self, dirs: &[Gfid]) -> DirectoryChangeGuard<'_> {
        let changing = DirectoryChangeGuard {
            watch: self,
            dirs: dirs.first().copied(),
            other: dirs.get(1).copied(),
        };
        changing.mark(true);
        changing
    }

    /// Records a rename by this client, after `since`. Frontends keep the new name for as long as
    /// the former one. If no message would invalidate it later, or if a message has arrived
    /// meanwhile, which may have invalidated only the former name, it is invalidated now. True if
    /// the inode is known, and its directory recorded.
    pub fn record_rename(
        &self,
        nodes: &GlusterInodes,
        (from, to): (EntryName<'_>, EntryName<'_>),
        since: UpcallSequence,
    ) -> bool {
        if self.keeps_here || self.long().is_none() {
            return false;
        }
        let child = lock(&self.names).record_rename(from, to, self.inbox.advance());
        let gfid = child.and_then(|child| nodes.gfid(child).ok());
        gfid.iter().for_each(|&gfid| nodes.record_move(gfid, to.0));
        let is_watched = |gfid: Gfid| self.inbox.has_report_since(gfid, since);
        if gfid.is_none_or(|gfid| [from.0, to.0, gfid].into_iter().any(is_watched)) {
            self.inbox.put_name(to.0, to.1);
        }
        gfid.is_some()
    }

    /// Records that a file was opened. If another client may have changed the file since frontends
    /// last fetched its size, frontends fetch it again, since the size ends a read.
    pub fn record_open(&self, nodes: &GlusterInodes, volume: &VolumeConnection, ino: Ino) {
        if !self.keeps_here && !self.is_unchanged(nodes, volume, ino) {
            for frontend in self.frontends() {
                // The frontend may not know the inode.
                let _ = frontend.invalidate_inode(ino, None);
            }
        }
    }

    /// True if no other client has changed a file since frontends last fetched its attributes.
    /// Before this, the messages of the servers have arrived.
    pub fn is_unchanged(&self, nodes: &GlusterInodes, volume: &VolumeConnection, ino: Ino) -> bool {
        let Ok(gfid) = nodes.gfid(ino) else { return false };
        let is_watched = self.long().is_some() && nodes.is_kept(ino);
        is_watched && take(volume, &self.inbox).is_ok() && !self.inbox.is_behind(gfid)
    }

    /// Records that this client has given a further name to an inode: from now on, no server
    /// reports that one of its names was replaced.
    pub fn record_link(&self, gfid: Gfid) {
        if self.long().is_some() {
            self.inbox.put(gfid, NAME_CHANGED);
        }
    }

    /// Records that an inode was found in another directory than before: its names in `dir` are
    /// invalidated. A message about the inode invalidates only its names in the directory where it
    /// was found last.
    pub fn invalidate_old_names(&self, dir: Gfid, ino: Ino) {
        if self.long().is_some() {
            let taken = lock(&self.names).take_child(dir, ino);
            taken.iter().for_each(|name| self.inbox.put_name(dir, name));
        }
    }

    /// The time for which answers may be kept for long, if they may.
    pub fn long(&self) -> Option<Duration> {
        match self.long_ms.load(Ordering::SeqCst) {
            0 => None,
            long => Some(Duration::from_millis(long)),
        }
    }

    fn frontends(&self) -> Vec<Arc<dyn Notify>> {
        lock(&self.frontends).clone()
    }
}

/// Directories that this client is changing: the change may become visible at any time until the
/// answer.
pub(crate) struct DirectoryChangeGuard<'a> {
    watch: &'a CacheCoherence,
    dirs: Option<Gfid>,
    other: Option<Gfid>,
}

impl DirectoryChangeGuard<'_> {
    fn mark(&self, begins: bool) {
        // The end of a change that has begun must always be recorded.
        if !begins || self.watch.long().is_some() {
            let at = self.watch.inbox.advance();
            let mut names = lock(&self.watch.names);
            let dirs = self.dirs.iter().chain(&self.other);
            dirs.for_each(|&dir| names.record_own_change(dir, at, begins));
        }
    }
}

impl Drop for DirectoryChangeGuard<'_> {
    fn drop(&mut self) {
        self.mark(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use defuse_fs::NoNotify;

    use super::*;

    const SHORT: Duration = Duration::from_secs(1);
    const LONG: Duration = Duration::from_secs(60);
    const D: Gfid = [1; 16];
    const F: Gfid = [2; 16];

    fn watch() -> (CacheCoherence, GlusterInodes, Ino) {
        let (watch, nodes) =
            (CacheCoherence::new(SHORT, false), GlusterInodes::new(D, Arc::default()));
        let ino = nodes.look_up(F, Some(D), None);
        watch.directory(D, (1, 1), watch.inbox.now());
        watch.keep_for(LONG);
        watch.directory(D, (1, 1), watch.inbox.now());
        (watch, nodes, ino)
    }

    #[test]
    fn an_answer_that_a_message_has_overtaken_is_not_kept() {
        let (watch, nodes, ino) = watch();
        let child = NamedChild { ino, gfid: F, is_single: true, is_dir: false, is_listed: false };
        let since = watch.inbox.now();
        assert!(watch.listen(&nodes, ino, || Some(Box::new(()))));
        assert_eq!(watch.attribute_lifetime(F, since), LONG);
        assert_eq!(watch.name(D, b"f", &child, since), LONG);
        watch.inbox.put(F, 1);
        assert_eq!(watch.attribute_lifetime(F, since), Duration::ZERO);
        assert_eq!(watch.name(D, b"f", &child, since), Duration::ZERO);
        assert_eq!(watch.attribute_lifetime(F, watch.inbox.now()), LONG);
    }

    #[test]
    fn the_reason_for_short_times_is_known_as_long_as_there_is_one() {
        let (watch, ..) = watch();
        assert_eq!(watch.explain_short_lifetime(), None);
        watch.note_reason("the option is off");
        watch.keep_for(Duration::ZERO);
        assert_eq!(watch.explain_short_lifetime().unwrap(), "the option is off");
        watch.keep_for(LONG);
        assert_eq!(watch.explain_short_lifetime(), None);
        watch.keep_for(SHORT);
        assert!(watch.explain_short_lifetime().is_some());
    }

    #[test]
    fn directories_and_files_with_several_names_are_kept_for_a_short_time() {
        let (watch, _, ino) = watch();
        assert_eq!(watch.directory(D, (1, 1), watch.inbox.now()), SHORT);
        let child = NamedChild { ino, gfid: F, is_single: false, is_dir: false, is_listed: false };
        assert_eq!(watch.name(D, b"f", &child, watch.inbox.now()), SHORT);
    }

    /// A file got a further name in another directory, and the removal of the first one was not
    /// seen for minutes.
    #[test]
    fn names_of_a_file_that_is_found_in_another_directory_are_taken_back() {
        const E: Gfid = [3; 16];
        let (watch, nodes, ino) = watch();
        let child = NamedChild { ino, gfid: F, is_single: true, is_dir: false, is_listed: false };
        assert_eq!(watch.name(D, b"f", &child, watch.inbox.now()), LONG);
        assert_eq!(nodes.look_up_from(F, Some(D), None), (ino, None));
        assert_eq!(nodes.look_up_from(F, Some(E), None), (ino, Some(D)));
        watch.invalidate_old_names(D, ino);
        assert_eq!(watch.inbox.take(Duration::ZERO).names, [(D, Box::from(*b"f"))]);
        watch.invalidate_old_names(D, ino);
        assert_eq!(watch.inbox.take(Duration::ZERO).names, []);
    }

    #[test]
    fn two_frontends_keep_everything_for_a_short_time() {
        let (watch, nodes, ino) = watch();
        assert!(watch.attach(Arc::new(NoNotify)) && watch.is_on());
        assert!(!watch.attach(Arc::new(NoNotify)) && !watch.is_on());
        watch.keep_for(LONG);
        assert_eq!(watch.explain_short_lifetime().unwrap(), "2 frontends share the volume");
        assert_eq!(watch.attribute_lifetime(F, watch.inbox.now()), SHORT);
        assert!(!watch.listen(&nodes, ino, || Some(Box::new(()))));
    }

    #[test]
    fn a_directory_that_changes_by_itself_is_reported() {
        let (watch, _, ino) = watch();
        let child = NamedChild { ino, gfid: F, is_single: true, is_dir: false, is_listed: false };
        assert_eq!(watch.name(D, b"f", &child, watch.inbox.now()), LONG);
        drop(watch.begin_change(&[D]));
        watch.directory(D, (2, 2), watch.inbox.now());
        assert_eq!(watch.inbox.take(Duration::ZERO).reports, []);
        watch.directory(D, (3, 3), watch.inbox.now());
        assert_eq!(watch.inbox.take(Duration::ZERO).reports, [(D, 0)]);
    }
}
