//! The names that frontends keep for long, by directory, so that they can be invalidated.
//!
//! A server reports a changed directory, but not which of its names has changed.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use defuse_fs::Ino;

use super::{NamedChild, UpcallSequence};
use crate::volume::Gfid;

/// Maximum number of names, and of directories. Without room, frontends keep a name for a short
/// time.
const NAMES: usize = 1 << 18;
const DIRS: usize = 1 << 16;

/// Time for which, after a change by another client, the names of a directory are kept for a short
/// time only, and its listings are not trusted. A server that answers a lookup while it performs
/// the change may list the name with the former inode, until the next lookup of the name.
const RESTLESS: Duration = Duration::from_secs(30);

/// Time after which all servers have performed a change, and have reported it.
pub const CHANGES: Duration = Duration::from_secs(5);

/// Time between two searches for names that are no longer kept.
const SEARCH_EVERY: Duration = Duration::from_secs(5);

/// A name in its directory.
pub type NameBytes = Box<[u8]>;

/// A directory, and a name in it.
pub type EntryName<'a> = (Gfid, &'a [u8]);

/// The names.
#[derive(Debug, Default)]
pub struct FrontendNames {
    dirs: HashMap<Gfid, FrontendDirectory>,
    /// Number of names of all directories.
    count: usize,
    searched: Option<Instant>,
}

#[derive(Debug, Default)]
struct FrontendDirectory {
    names: HashMap<NameBytes, FrontendName>,
    /// Number of names of each child. Most children have none when this is checked, and a search
    /// would take as long as there are names.
    children: HashMap<Ino, u32>,
    /// The time of the last query about the directory. The servers report changes of the directory
    /// for some time after it.
    queried: Option<Instant>,
    /// The change time of the directory then, and a moment before that query.
    changed: Option<((i64, i64), UpcallSequence)>,
    /// The moment when a change by this client last began or ended.
    ours: Option<UpcallSequence>,
    /// The moment when a renaming by this client last ended.
    moved: Option<UpcallSequence>,
    /// Number of changes by this client that run now.
    running: u32,
    /// The time when another client was last known to have changed the directory.
    reported: Option<Instant>,
}

#[derive(Debug)]
struct FrontendName {
    until: Instant,
    child: Ino,
    is_dir: bool,
    /// The time of the listing from which the inode and its attributes come.
    listed: Option<Instant>,
}

impl FrontendNames {
    /// Records a query after `since` about a directory, which was last changed at `changed`. True
    /// if another client has changed it while its names were kept. Answers may come in another
    /// order than the queries.
    pub fn record_query(
        &mut self,
        dir: Gfid,
        (changed, since): ((i64, i64), UpcallSequence),
        now: Instant,
    ) -> bool {
        if !self.dirs.contains_key(&dir) && !self.has_room(now) {
            return false;
        }
        let dir = self.dirs.entry(dir).or_default();
        dir.queried = Some(now);
        let Some((old, before)) = dir.changed.replace((changed, since)) else { return false };
        let is_ours = dir.running > 0 || dir.ours.is_some_and(|ours| ours > before.min(since));
        old != changed && !is_ours && !dir.names.is_empty()
    }

    /// Records that a change of a directory by this client begins at `at`, or ends.
    pub fn record_own_change(&mut self, dir: Gfid, at: UpcallSequence, begins: bool) {
        if let Some(dir) = self.dirs.get_mut(&dir) {
            dir.ours = Some(at);
            // The directory may have become known, or known again, during a change.
            dir.running =
                if begins { dir.running.saturating_add(1) } else { dir.running.saturating_sub(1) };
        }
    }

    /// Keeps a name until `now` + `long`, for `child`. False if that cannot be done: the directory
    /// is restless, or there was no query about it in the last `long`.
    pub fn hold(
        &mut self,
        dir: Gfid,
        name: &[u8],
        child: &NamedChild,
        (now, long): (Instant, Duration),
    ) -> bool {
        let has_room = self.has_room(now);
        let Some(dir) = self.dirs.get_mut(&dir) else { return false };
        if dir.is_restless(now) || !dir.is_queried(long, now) {
            return false;
        }
        let listed = child.is_listed.then_some(now);
        let held =
            FrontendName { until: now + long, child: child.ino, is_dir: child.is_dir, listed };
        let is_new = !dir.names.contains_key(name);
        if is_new && !has_room {
            return false;
        }
        dir.insert(name, held);
        self.count += usize::from(is_new);
        true
    }

    /// The inode of a name that frontends keep, and true if it is a directory.
    pub fn child(&self, dir: Gfid, name: &[u8], now: Instant) -> Option<(Ino, bool)> {
        let held = self.dirs.get(&dir)?.names.get(name)?;
        (held.until > now).then_some((held.child, held.is_dir))
    }

    /// True if another client has changed the directory lately, as far as is known.
    pub fn was_changed(&self, dir: Gfid, now: Instant) -> bool {
        self.dirs.get(&dir).is_some_and(|dir| dir.is_restless(now))
    }

    /// True if there was a query about the directory in the last `time`.
    pub fn is_queried(&self, dir: Gfid, time: Duration, now: Instant) -> bool {
        self.dirs.get(&dir).is_some_and(|dir| dir.is_queried(time, now))
    }

    /// Records a rename by this client, until `at`: frontends keep the new name for as long as the
    /// former one. Returns the inode if both names are known here, so that the new one is
    /// invalidated in time.
    pub fn record_rename(
        &mut self,
        (old_dir, old): EntryName<'_>,
        (new_dir, new): EntryName<'_>,
        at: UpcallSequence,
    ) -> Option<Ino> {
        let mut remove = |dir: Gfid, name: &[u8]| {
            let dir = self.dirs.get_mut(&dir)?;
            dir.moved = Some(at);
            let held = dir.remove(name)?;
            self.count -= 1;
            Some(held)
        };
        remove(new_dir, new);
        let held = remove(old_dir, old)?;
        let (dir, child) = (self.dirs.get_mut(&new_dir)?, held.child);
        dir.insert(new, held);
        self.count += 1;
        Some(child)
    }

    /// True if this client has renamed from or to `dir` after `since`: an answer about a name may
    /// refer to another name in the frontend.
    pub fn has_moved(&self, dir: Gfid, since: UpcallSequence) -> bool {
        self.dirs.get(&dir).and_then(|dir| dir.moved).is_some_and(|moved| moved > since)
    }

    /// Records that another client has changed a directory: removes and returns all names. Each has
    /// its inode if its attributes come from a recent listing.
    pub fn take(&mut self, dir: Gfid, now: Instant) -> Vec<(NameBytes, Option<Ino>)> {
        let Some(dir) = self.dirs.get_mut(&dir) else { return Vec::new() };
        dir.reported = Some(now);
        self.count -= dir.names.len();
        dir.children.clear();
        let is_late = |listed: Instant| now.duration_since(listed) < CHANGES;
        let child = |held: FrontendName| held.listed.is_some_and(is_late).then_some(held.child);
        dir.names.drain().map(|(name, held)| (name, child(held))).collect()
    }

    /// Removes and returns the names of `child`.
    pub fn take_child(&mut self, dir: Gfid, child: Ino) -> Vec<NameBytes> {
        let Some(dir) = self.dirs.get_mut(&dir) else { return Vec::new() };
        if dir.children.remove(&child).is_none() {
            return Vec::new();
        }
        let taken: Vec<NameBytes> =
            dir.names.extract_if(|_, held| held.child == child).map(|(name, _)| name).collect();
        self.count -= taken.len();
        taken
    }

    /// Removes and returns all names.
    pub fn take_all(&mut self) -> Vec<(Gfid, Vec<NameBytes>)> {
        self.count = 0;
        let taken = self.dirs.drain().map(|(dir, it)| (dir, it.names.into_keys().collect()));
        taken.collect()
    }

    /// Searches for names that are no longer kept if there is no room.
    fn has_room(&mut self, now: Instant) -> bool {
        let full = |names: &FrontendNames| names.count >= NAMES || names.dirs.len() >= DIRS;
        let is_early = |searched: Instant| now.duration_since(searched) < SEARCH_EVERY;
        if full(self) && !self.searched.is_some_and(is_early) {
            self.searched = Some(now);
            for dir in self.dirs.values_mut() {
                dir.names.retain(|_, held| held.until > now);
                dir.children.clear();
                for held in dir.names.values() {
                    *dir.children.entry(held.child).or_default() += 1;
                }
            }
            self.dirs.retain(|_, dir| !dir.names.is_empty());
            self.count = self.dirs.values().map(|dir| dir.names.len()).sum();
        }
        !full(self)
    }
}

impl FrontendDirectory {
    /// Adds a name, and replaces a known one.
    fn insert(&mut self, name: &[u8], held: FrontendName) {
        *self.children.entry(held.child).or_default() += 1;
        match self.names.get_mut(name) {
            Some(known) => {
                let former = std::mem::replace(known, held);
                self.lose(former.child);
            }
            None => drop(self.names.insert(name.into(), held)),
        }
    }

    fn remove(&mut self, name: &[u8]) -> Option<FrontendName> {
        let held = self.names.remove(name)?;
        self.lose(held.child);
        Some(held)
    }

    /// Records that a child has one name less.
    fn lose(&mut self, child: Ino) {
        if let Some(count) = self.children.get_mut(&child) {
            *count -= 1;
            if *count == 0 {
                self.children.remove(&child);
            }
        }
    }

    fn is_restless(&self, now: Instant) -> bool {
        self.reported.is_some_and(|reported| now.duration_since(reported) < RESTLESS)
    }

    fn is_queried(&self, time: Duration, now: Instant) -> bool {
        self.queried.is_some_and(|queried| now.duration_since(queried) <= time)
    }
}

#[cfg(test)]
mod tests {
    use super::super::UpcallInbox;
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const D: Gfid = [1; 16];

    fn child(ino: u64, is_dir: bool) -> NamedChild {
        NamedChild { ino: Ino(ino), gfid: D, is_single: true, is_dir, is_listed: false }
    }

    fn with_names(now: Instant) -> FrontendNames {
        let mut names = FrontendNames::default();
        assert!(
            !names.hold(D, b"a", &child(2, false), (now, LONG)),
            "nobody asked for the directory"
        );
        assert!(!names.record_query(D, ((1, 1), UpcallSequence::default()), now));
        assert!(names.hold(D, b"a", &child(2, false), (now, LONG)));
        assert!(names.hold(D, b"b", &child(3, false), (now, LONG)));
        names
    }

    /// The invalidation of a file that this client had renamed named its former name, and its new
    /// one stayed for minutes.
    #[test]
    fn a_name_is_kept_after_a_renaming_and_taken_back_with_its_file() {
        const E: Gfid = [3; 16];
        let now = Instant::now();
        let mut names = with_names(now);
        assert_eq!(names.child(D, b"a", now), Some((Ino(2), false)));
        assert_eq!((names.child(D, b"c", now), names.child(D, b"a", now + LONG)), (None, None));
        let inbox = UpcallInbox::default();
        let (before, at) = (inbox.now(), inbox.advance());
        assert_eq!(names.record_rename((D, b"a"), (D, b"c"), at), Some(Ino(2)));
        assert!(
            names.has_moved(D, before) && !names.has_moved(D, at) && !names.has_moved(E, before)
        );
        assert_eq!(names.take_child(D, Ino(2)), [NameBytes::from(*b"c")]);
        assert_eq!(
            names.record_rename((D, b"a"), (D, b"b"), at),
            None,
            "it was not kept, and b is replaced"
        );
        assert!(names.hold(D, b"a", &child(4, false), (now, LONG)));
        assert_eq!(
            names.record_rename((D, b"a"), (E, b"a"), at),
            None,
            "nobody asked for the directory"
        );
        assert_eq!((names.take(D, now).len(), names.count), (0, 0));
    }

    #[test]
    fn names_are_taken_back_once_and_then_kept_for_a_short_time_only() {
        let now = Instant::now();
        let mut names = with_names(now);
        let mut taken = names.take(D, now);
        taken.sort();
        assert_eq!(taken, [(NameBytes::from(*b"a"), None), (NameBytes::from(*b"b"), None)]);
        assert_eq!((names.take(D, now).len(), names.count), (0, 0));
        assert!(!names.hold(D, b"a", &child(2, false), (now + RESTLESS / 2, LONG)));
        assert!(names.hold(D, b"a", &child(2, false), (now + RESTLESS, LONG)));
    }

    /// The attributes of one file were kept for minutes as the attributes of another file, because
    /// a listing had mixed them up.
    #[test]
    fn attributes_of_a_listing_are_taken_back_with_its_names() {
        let now = Instant::now();
        let mut names = with_names(now);
        let listed = NamedChild { is_listed: true, ..child(3, false) };
        assert!(names.hold(D, b"c", &listed, (now, LONG)));
        assert!(names.hold(D, b"d", &listed, (now - CHANGES, LONG)));
        assert!(!names.was_changed(D, now));
        let mut taken = names.take(D, now);
        taken.sort();
        let listed: Vec<_> = taken.into_iter().map(|(_, listed)| listed).collect();
        assert_eq!(listed, [None, None, Some(Ino(3)), None]);
        assert!(names.was_changed(D, now) && !names.was_changed(D, now + RESTLESS));
    }

    #[test]
    fn names_are_kept_only_while_the_servers_tell_of_the_directory() {
        let now = Instant::now();
        let mut names = with_names(now);
        let late = now + LONG + Duration::from_secs(1);
        assert!(
            !names.hold(D, b"c", &child(4, false), (late, LONG))
                && !names.is_queried(D, LONG, late)
        );
        names.record_query(D, ((1, 1), UpcallSequence::default()), late);
        assert!(names.hold(D, b"c", &child(4, false), (late, LONG)));
    }

    #[test]
    fn a_directory_that_we_did_not_change_was_changed_by_others() {
        let (now, inbox) = (Instant::now(), UpcallInbox::default());
        let mut names = with_names(now);
        let queried = |names: &mut FrontendNames, time| {
            names.record_query(D, ((time, 0), inbox.advance()), now)
        };
        queried(&mut names, 1);
        names.record_own_change(D, inbox.advance(), true);
        assert!(!queried(&mut names, 1), "the change is still on its way");
        assert!(!queried(&mut names, 2));
        names.record_own_change(D, inbox.advance(), false);
        assert!(!queried(&mut names, 3));
        assert!(!queried(&mut names, 3));
        assert!(queried(&mut names, 4));
    }

    /// Names that several threads made were looked up again for half a minute.
    #[test]
    fn answers_of_another_order_than_their_questions_are_no_change_by_others() {
        let (now, inbox) = (Instant::now(), UpcallInbox::default());
        let mut names = with_names(now);
        names.record_own_change(D, inbox.advance(), true);
        let early = inbox.now();
        names.record_own_change(D, inbox.advance(), false);
        let late = inbox.now();
        assert!(!names.record_query(D, ((3, 0), late), now));
        assert!(!names.record_query(D, ((2, 0), early), now));
        assert!(!names.record_query(D, ((3, 0), late), now));
        assert!(names.record_query(D, ((4, 0), inbox.advance()), now));
    }

    #[test]
    fn the_names_of_one_file_are_taken_back() {
        let mut names = with_names(Instant::now());
        assert_eq!(names.take_child(D, Ino(3)), [NameBytes::from(*b"b")]);
        assert_eq!((names.take_child(D, Ino(9)).len(), names.count), (0, 1));
        // The name belongs to another file now, and this file has two names.
        let now = Instant::now();
        assert!(names.hold(D, b"a", &child(5, false), (now, LONG)));
        assert!(names.hold(D, b"b", &child(5, false), (now, LONG)));
        assert_eq!((names.take_child(D, Ino(2)).len(), names.take_child(D, Ino(5)).len()), (0, 2));
        assert!(names.dirs[&D].children.is_empty());
        assert!(names.hold(D, b"a", &child(2, false), (now, LONG)));
        let all = names.take_all();
        assert_eq!((all.len(), all[0].1.len(), names.count), (1, 1, 0));
    }

    #[test]
    fn names_are_bounded_and_old_ones_give_room() {
        let now = Instant::now();
        let mut names = FrontendNames::default();
        names.record_query(D, ((1, 1), UpcallSequence::default()), now);
        for number in 0..NAMES {
            assert!(names.hold(D, &number.to_ne_bytes(), &child(2, false), (now, LONG)));
        }
        assert!(!names.hold(D, b"more", &child(2, false), (now, LONG)));
        let late = now + LONG;
        names.record_query(D, ((1, 1), UpcallSequence::default()), late);
        // All names were old, so that the directory was removed, too.
        assert!(!names.hold(D, b"more", &child(2, false), (late, LONG)) && names.count == 0);
        names.record_query(D, ((1, 1), UpcallSequence::default()), late);
        assert!(names.hold(D, b"more", &child(2, false), (late, LONG)));
    }
}
