//! Open directories, and listing them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use defuse_fs::{Context, DirBuf, DirItem, Entry, Errno, FileKind, Ino, Name, PushOutcome, Result};

use crate::answers::QueryContext;
use crate::file::{GfapiHandle, NOT_OPEN_THERE, REOPEN_PAUSES_MS, VolumeDirEntry};
use crate::gluster::{EntryLocation, Gluster, OpenObject};
use crate::volume::{Gfid, c_name};

/// An open directory.
pub(crate) struct OpenListing {
    gfid: Gfid,
    /// Replaced if a brick does not know the handle any more.
    handle: RwLock<Arc<GfapiHandle>>,
    at: Mutex<ListingCursor>,
}

/// Maximum number of entries that are taken from libgfapi at a time.
const BATCH: usize = 128;

/// Longest time between two answers of a listing, so that its entries are not older than answers
/// may be.
const PAUSE: Duration = Duration::from_secs(1);

/// The place of a listing.
struct ListingCursor {
    /// The position of the next entry.
    position: u64,
    /// The next entries.
    batch: VecDeque<VolumeDirEntry>,
    /// The entries were requested with attributes.
    with: bool,
    /// The listed inodes and attributes belong to their names: no other client was changing the
    /// names.
    is_believed: bool,
    /// The time of the last answer.
    answered: Instant,
    /// The listing has paused, and libgfapi may have fetched the next entries before.
    has_paused: bool,
    /// The moment after which libgfapi fetched the entries.
    query: QueryContext,
}

impl OpenListing {
    fn handle(&self) -> Arc<GfapiHandle> {
        Arc::clone(&self.handle.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ListingCursor {
    fn new(position: u64, query: &QueryContext) -> ListingCursor {
        let (query, batch) = (query.clone(), VecDeque::new());
        let (with, is_believed, has_paused) = (false, false, false);
        let answered = Instant::now();
        ListingCursor { position, batch, with, is_believed, answered, has_paused, query }
    }

    /// Continues the listing at `now`.
    fn resume(&mut self, now: Instant) {
        if self.position != 0 && now.duration_since(self.answered) > PAUSE {
            (self.has_paused, self.is_believed) = (true, false);
        }
        self.answered = now;
    }
}

impl Gluster {
    pub(crate) fn open_listing(&self, cx: &Context<'_>, ino: Ino) -> Result<defuse_fs::OpenReply> {
        let acting = self.act(cx);
        let gfid = self.nodes.gfid(ino)?;
        let handle = self.open_known(ino, |object| self.volume.open_dir(object))?;
        let at = ListingCursor::new(0, &acting.query).into();
        let handle = RwLock::new(Arc::new(handle));
        let fh = self.add_open(OpenObject::Dir(OpenListing { gfid, handle, at }.into()));
        Ok(defuse_fs::OpenReply::new(fh))
    }

    pub(crate) fn list(
        &self,
        (dir, now): (&OpenListing, &QueryContext),
        from: u64,
        out: &mut DirBuf<'_>,
    ) -> Result<()> {
        let keeps = self.keeps_listings();
        let plus = out.wants_entries() || keeps;
        let mut at = dir.at.lock().unwrap_or_else(PoisonError::into_inner);
        if at.position != from || (at.with != plus && !at.batch.is_empty()) {
            dir.handle().seek_dir(from);
            *at = ListingCursor::new(from, now);
        }
        at.resume(Instant::now());
        loop {
            if at.batch.is_empty() {
                self.take_entries(dir, (&mut at, plus), now)?;
            }
            let Some(mut listed) = at.batch.pop_front() else { return Ok(()) };
            let is_there = is_name(&listed.name) && self.complete(dir, &mut listed, plus);
            if !is_there {
                at.position = listed.next;
                continue;
            }
            let kind = kind(&listed);
            let item = DirItem { ino: listed.ino, next: listed.next, kind, name: &listed.name };
            let mut entered = false;
            let enter = || {
                entered = true;
                if at.is_believed {
                    self.make_listed_entry((dir, &at.query), &listed)
                } else {
                    None
                }
            };
            let pushed = out.push_with(item, enter);
            if pushed == PushOutcome::Full {
                at.batch.push_front(listed);
                return Ok(());
            }
            if keeps && !entered && at.is_believed {
                self.keep_listed((dir, &at.query), &listed);
            }
            at.position = listed.next;
        }
    }

    /// Takes the next entries from libgfapi, none at the end. A server that is performing a change
    /// may list a name with the inode of the former file and the attributes of the new one. In a
    /// directory that another client has changed lately, inodes and attributes of names are
    /// therefore not returned, and frontends look up the names that they need.
    fn take_entries(
        &self,
        dir: &OpenListing,
        (at, plus): (&mut ListingCursor, bool),
        now: &QueryContext,
    ) -> Result<()> {
        at.with = plus;
        let keeps = plus && (self.watch.is_on() || self.keeps_listings());
        // A replicated volume continues with the brick on which a listing began, even if the brick
        // is lost: each brick has another order. If no entry was returned yet, the listing may
        // begin again.
        let begins = at.position == 0;
        let may_go_on = begins || !self.settings.graph.is_replicated;
        let mut pauses = REOPEN_PAUSES_MS.into_iter();
        while at.batch.len() < BATCH {
            let errno = match dir.handle().next_entry(plus, keeps) {
                Ok(Some(listed)) => {
                    at.batch.push_back(listed);
                    continue;
                }
                Ok(None) => break,
                Err(errno) => errno,
            };
            let may_begin = begins && errno == Errno::ENOTCONN;
            // A brick that was away does not know the handle.
            let may_reopen = may_go_on && errno == NOT_OPEN_THERE;
            if (may_begin || may_reopen)
                && let Some(pause) = pauses.next()
            {
                std::thread::sleep(Duration::from_millis(pause));
                if self.reopen_listing(dir).is_ok() {
                    at.batch.clear();
                    dir.handle().seek_dir(at.position);
                }
                continue;
            }
            // The error is reported after the entries before it.
            match errno {
                _ if !at.batch.is_empty() => break,
                NOT_OPEN_THERE => return Err(Errno::ENOTCONN),
                errno => return Err(errno),
            }
        }
        // This check comes after the servers have listed the entries.
        at.is_believed =
            plus && !at.has_paused && !at.batch.is_empty() && self.is_quiet(dir.gfid, now);
        Ok(())
    }

    /// Opens a directory again, for a listing that goes on.
    fn reopen_listing(&self, dir: &OpenListing) -> Result<()> {
        let handle = Arc::new(self.volume.open_dir(&self.volume.object(dir.gfid)?)?);
        *dir.handle.write().unwrap_or_else(PoisonError::into_inner) = handle;
        Ok(())
    }

    /// Looks up a listed name if the server sent no attributes, as for some directories, and for a
    /// name that another client is just making or removing: without them, the inode number would be
    /// a number of the server, and the kind unknown. False if the name is missing.
    fn complete(&self, dir: &OpenListing, listed: &mut VolumeDirEntry, plus: bool) -> bool {
        let is_itself = listed.name == b"." || listed.name == b"..";
        if is_itself || !plus || listed.found.is_some() {
            return true;
        }
        let look_up = || -> Result<(Gfid, libc::stat)> {
            let (parent, name) = (self.volume.object(dir.gfid)?, Name::new(&listed.name)?);
            let _turn = self.lock_lookup((dir.gfid, name));
            let (object, stat) = self.volume.look_up(Some(&parent), &c_name(name)?)?;
            Ok((object.gfid()?, stat))
        };
        match look_up() {
            Ok((gfid, stat)) => {
                listed.ino = stat.st_ino;
                listed.found = Some((gfid, stat));
                true
            }
            Err(errno) => !matches!(errno, Errno::ENOENT | Errno::ESTALE),
        }
    }

    /// The entry of a listed name.
    fn make_listed_entry(
        &self,
        (dir, query): (&OpenListing, &QueryContext),
        listed: &VolumeDirEntry,
    ) -> Option<Entry> {
        if listed.name == b"." || listed.name == b".." {
            return None;
        }
        let name = Name::new(&listed.name).ok()?;
        // The reference is kept until the entry has one of its own.
        let _kept = listed.kept.take();
        let (gfid, stat) = listed.found.as_ref()?;
        let place = EntryLocation { dir: dir.gfid, name: Some(name), is_listed: true };
        self.entry_of((*gfid, stat), place, query).ok()
    }

    /// Keeps the attributes of a listed name in this process, although the frontend did not request
    /// them.
    fn keep_listed(&self, (dir, query): (&OpenListing, &QueryContext), listed: &VolumeDirEntry) {
        if let Some((gfid, stat)) = &listed.found
            && listed.name != b"."
            && listed.name != b".."
            && let Ok(name) = Name::new(&listed.name)
        {
            let place = EntryLocation { dir: dir.gfid, name: Some(name), is_listed: true };
            self.keep_answer((*gfid, stat), Some(place), query, || listed.kept.take());
        }
    }

    /// Makes the names of a directory durable, if the servers can.
    pub(crate) fn sync_listing(&self, dir: &OpenListing, datasync: bool) -> Result<()> {
        match dir.handle().sync(datasync) {
            // With these errors, a file system reports that the sync is not needed.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EBADF) => Err(Errno::ENOSYS),
            synced => synced,
        }
    }
}

/// True for a name that a directory can have. Servers may send any bytes.
fn is_name(name: &[u8]) -> bool {
    name == b"." || name == b".." || Name::new(name).is_ok()
}

/// The kind of an entry: from its attributes, or from the listing.
fn kind(listed: &VolumeDirEntry) -> FileKind {
    let mode = match &listed.found {
        Some((_, stat)) => stat.st_mode,
        None => u32::from(listed.kind) << 12,
    };
    FileKind::from_mode(mode).unwrap_or(FileKind::Regular)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::CallerIdentity;
    use crate::upcalls::UpcallInbox;

    #[test]
    fn entries_are_not_believed_after_a_pause() {
        let query = QueryContext {
            since: UpcallInbox::default().now(),
            changes: 0,
            who: CallerIdentity::default(),
        };
        let after = |position, pause| {
            let mut at =
                ListingCursor { is_believed: true, ..ListingCursor::new(position, &query) };
            at.resume(at.answered + pause);
            at.resume(at.answered + PAUSE);
            (at.is_believed, at.has_paused)
        };
        assert_eq!(after(7, PAUSE), (true, false));
        assert_eq!(after(7, 2 * PAUSE), (false, true));
        assert_eq!(after(0, 2 * PAUSE), (true, false), "nothing was asked for before");
    }

    #[test]
    fn names_that_no_directory_can_have_are_left_out() {
        assert!(is_name(b".") && is_name(b"..") && is_name(b"a b"));
        assert!(!is_name(b"") && !is_name(b"a/b") && !is_name(b"../x"));
    }
}
