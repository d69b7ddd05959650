//! The file system: its state, and the user as whom a call acts.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use defuse_fs::posix::drop_set_id;
use defuse_fs::{
    Attr, Context, Entry, Errno, Fh, Figure, FileKind, Ino, Name, OpenFlags, Result, Timestamp,
    XattrName,
};

use crate::absent::AbsentAttributes;
use crate::address::VolumeAddress;
use crate::answers::{
    CallerIdentity, ChangeSubject, DIRECTORIES_HOLD, LookupAnswer, MetadataCache, OwnChangeGuard,
    QueryContext,
};
use crate::attributes::attr;
use crate::changes::{ClientChange, ClientChanges};
use crate::contents::{OpenOnDemand, UnopenedFiles};
use crate::defaults::DefaultAclCache;
use crate::file::GfapiHandle;
use crate::listing::OpenListing;
use crate::locks::VolumeLocks;
use crate::looked_up::LookedUpNames;
use crate::name_locks::{ChangeGuard, ChangeLocks, LookupGuard, RenameGuard};
use crate::nodes::{GlusterInodes, InodeReference};
use crate::pages::DroppedPages;
use crate::subvolumes::{LayoutHash, SubvolumeMap};
use crate::transfer::{AnswerThread, TransferBuffers};
use crate::upcalls::volfile::ClientGraph;
use crate::upcalls::{self, CHANGES, CacheCoherence, NamedChild, UpcallNotifier, VolfileQuery};
use crate::volume::{Gfid, InodeObject, RetainedObject, VolumeConnection};
use crate::writes::WriteTracker;
use crate::{GlusterOptions, connect};

/// Time for which the groups of a process are cached.
const GROUPS_VALID_FOR: Duration = Duration::from_secs(1);

/// Time for which a mode without set-user-id is cached, for writes to an open file. Other clients
/// may set the bit meanwhile; changes by this client count at once.
const MODE_VALID_FOR: Duration = Duration::from_secs(1);

/// The warning about a sharded volume. GlusterFS's own client damages files in the same way.
const SHARDS: &str = "the volume is sharded (features.shard): a file that is written while its directory is listed, as by \
     `ls -l` during cp, may be damaged, also by GlusterFS's own client: sharding is safe for images of virtual \
     machines with one writer";

/// Maximum number of processes with cached groups.
const GROUPS_KEPT: usize = 1024;

/// A GlusterFS volume.
pub struct Gluster {
    pub(crate) volume: Arc<VolumeConnection>,
    pub(crate) nodes: Arc<GlusterInodes>,
    parts: Arc<SubvolumeMap>,
    pub(crate) watch: Arc<CacheCoherence>,
    /// The query to the management servers, and the longest time for which frontends may cache, if
    /// they may for long.
    asks: Option<(VolfileQuery, Duration)>,
    pub(crate) open: RwLock<HashMap<u64, OpenObject>>,
    next_fh: AtomicU64,
    pub(crate) locks: VolumeLocks,
    /// The changes of this client, and the attributes that a kernel has.
    pub(crate) changes: Arc<ClientChanges>,
    /// The open files that are not opened on the servers.
    pub(crate) unopened: Arc<UnopenedFiles>,
    /// The opens that dropped pages of a kernel.
    pub(crate) pages: DroppedPages,
    /// Attributes that files were seen without.
    pub(crate) absent: AbsentAttributes,
    /// The names that a kernel looked up last.
    pub(crate) looked_up: LookedUpNames,
    pub(crate) defaults: DefaultAclCache,
    /// The answers that are kept here, and not in the frontends.
    answers: Option<MetadataCache<RetainedObject>>,
    /// The locks of changes, if no kernel serializes them.
    turns: Option<ChangeLocks>,
    pub(crate) pool: Arc<TransferBuffers>,
    pub(crate) settings: GlusterSettings,
    groups: Mutex<HashMap<ProcessCredentials, CachedGroups>>,
    /// The number of mode changes by this client. Each makes cached modes invalid.
    pub(crate) mode_changes: AtomicU64,
}

/// Process, user and group.
type ProcessCredentials = (u32, u32, u32);

/// The groups of a process, and the time of the query.
type CachedGroups = (Instant, Arc<[u32]>);

/// The settings of a file system that do not change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GlusterSettings {
    /// Threads belong to an application: their user is restored after a call.
    pub restores: bool,
    /// The thread that answers transfers.
    pub answer_on: AnswerThread,
    /// See [`GlusterOptions::submits`].
    pub submits: bool,
    /// The servers keep access lists.
    pub posix_acl: bool,
    /// The translators of the client.
    pub graph: ClientGraph,
    /// The kernel of this machine supports labels of SELinux.
    pub labels: bool,
    /// See [`GlusterOptions::untold_for`].
    pub untold_for: Duration,
    /// No kernel serializes changes of one name.
    pub takes_turns: bool,
}

/// The place where an inode was found.
#[derive(Clone, Copy)]
pub(crate) struct EntryLocation<'a> {
    pub dir: Gfid,
    /// The name of the inode. Without it, the name is not kept.
    pub name: Option<Name<'a>>,
    /// A listing contained the inode, with its attributes.
    pub is_listed: bool,
}

/// An open file or directory.
#[derive(Clone)]
pub(crate) enum OpenObject {
    File(Arc<OpenVolumeFile>),
    Dir(Arc<OpenListing>),
}

/// The last time when a file was seen without bits that a write drops, and the number of mode
/// changes by this client until then.
#[derive(Default)]
pub(crate) struct PlainModeCache(Mutex<Option<(Instant, u64)>>);

impl PlainModeCache {
    /// True if the file was seen without these bits a moment ago, and this client has changed no
    /// mode since.
    pub(crate) fn is_known(&self, changes: u64) -> bool {
        let seen = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|(at, before)| before == changes && at.elapsed() < MODE_VALID_FOR)
    }

    /// Records that the file had this mode after `changes`. Returns the mode that a write leaves,
    /// if it differs.
    pub(crate) fn record_mode(&self, mode: u32, changes: u64) -> Option<u32> {
        let (perm, plain) = (mode & 0o7777, drop_set_id(mode & 0o7777, true));
        if plain != perm {
            return Some(plain);
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), changes));
        None
    }
}

/// An open file.
pub(crate) struct OpenVolumeFile {
    pub ino: Ino,
    pub flags: OpenFlags,
    pub handle: Arc<OpenOnDemand>,
    /// A handle without `O_APPEND`, for a file whose flags have changed.
    pub plain: Mutex<Option<Arc<GfapiHandle>>>,
    /// The writes that this client has acknowledged.
    pub writes: Arc<WriteTracker>,
    /// The file had no set-user-id and no set-group-id to drop at this time.
    pub plain_mode: PlainModeCache,
}

impl OpenVolumeFile {
    /// The handle, which may be opened now.
    pub(crate) fn handle(&self) -> Result<Arc<GfapiHandle>> {
        self.handle.get()
    }
}

impl Gluster {
    /// Opens the volume at `//HOST[,HOST...]/VOLUME[/DIR]`.
    ///
    /// # Errors
    ///
    /// A text that names the object and the next step: a wrong form, a missing library, servers
    /// that cannot be reached, a volume or a directory that is not there.
    pub fn connect(address: &str, options: &GlusterOptions) -> Result<Gluster, String> {
        connect::open(&VolumeAddress::with_options(address, options)?, options)
    }

    pub(crate) fn new(
        volume: Arc<VolumeConnection>,
        root: Gfid,
        settings: GlusterSettings,
        (watch, asks): (CacheCoherence, Option<(VolfileQuery, Duration)>),
    ) -> Gluster {
        let parts = Arc::<SubvolumeMap>::default();
        Gluster {
            volume,
            nodes: Arc::new(GlusterInodes::new(root, Arc::clone(&parts))),
            parts,
            watch: Arc::new(watch),
            asks,
            open: RwLock::default(),
            next_fh: AtomicU64::new(1),
            locks: VolumeLocks::default(),
            changes: Arc::default(),
            unopened: UnopenedFiles::new(),
            pages: DroppedPages::default(),
            absent: AbsentAttributes::default(),
            looked_up: LookedUpNames::default(),
            defaults: DefaultAclCache::default(),
            answers: None,
            turns: settings.takes_turns.then(ChangeLocks::default),
            pool: Arc::default(),
            settings,
            groups: Mutex::default(),
            mode_changes: AtomicU64::new(0),
        }
    }

    /// Keeps answers in this process, for several frontends.
    pub(crate) fn with_metadata_cache(mut self) -> Gluster {
        self.answers = Some(MetadataCache::new(Arc::clone(&self.watch.inbox)));
        self
    }

    /// Acts as the caller, with its groups, until the result is dropped.
    pub(crate) fn act(&self, cx: &Context<'_>) -> ActingUser<'_> {
        self.act_as(cx, (cx.caller.uid, cx.caller.gid))
    }

    /// Acts as another user with the groups of the caller: the owner of a new inode.
    pub(crate) fn act_as(&self, cx: &Context<'_>, (uid, gid): (u32, u32)) -> ActingUser<'_> {
        // The servers let root do anything.
        let groups = if uid == 0 { Arc::default() } else { self.groups(cx) };
        self.volume.act_as(uid, gid, &groups);
        self.act_for(CallerIdentity { uid, gid, groups })
    }

    /// Acts as the caller on an open file, for which servers check no rights.
    pub(crate) fn act_on_open(&self, cx: &Context<'_>) -> ActingUser<'_> {
        let (uid, gid) = (cx.caller.uid, cx.caller.gid);
        self.volume.act_as(uid, gid, &[]);
        self.act_for(CallerIdentity { uid, gid, groups: Arc::default() })
    }

    fn act_for(&self, who: CallerIdentity) -> ActingUser<'_> {
        self.watch.inbox.record_use();
        let changes = self.changes.now();
        let query = QueryContext { since: self.watch.inbox.now(), changes, who };
        ActingUser { volume: &self.volume, restores: self.settings.restores, query }
    }

    /// Starts the thread that queries the subvolumes of directories.
    pub(crate) fn start_asking_for_parts(&self) {
        let (volume, parts) = (Arc::clone(&self.volume), Arc::clone(&self.parts));
        let thread = std::thread::Builder::new().name("gluster-parts".to_owned());
        if let Err(error) = thread.spawn(move || parts.ask(&volume)) {
            log::warn!("a lost server may hold up requests for others: no thread: {error}");
        }
    }

    /// Starts the threads that take messages of servers, and that notify frontends of changes by
    /// other clients.
    pub(crate) fn start_telling(&self) {
        let Some((asks, long)) = self.asks.clone() else { return };
        if let Err(errno) = upcalls::take(&self.volume, &self.watch.inbox) {
            self.warn_of_short_times(&format!("no upcalls: {errno}"));
            return;
        }
        let (volume, inbox) = (Arc::clone(&self.volume), Arc::clone(&self.watch.inbox));
        let thread = std::thread::Builder::new().name("gluster-inbox".to_owned());
        if let Err(error) = thread.spawn(move || upcalls::receive(&volume, &inbox)) {
            self.warn_of_short_times(&format!("no thread: {error}"));
            return;
        }
        let (watch, nodes) = (Arc::clone(&self.watch), Arc::clone(&self.nodes));
        let (volume, refusal) = (Arc::clone(&self.volume), None);
        let notifier = UpcallNotifier { watch, nodes, volume, asks, long, refusal };
        let thread = std::thread::Builder::new().name("gluster-upcalls".to_owned());
        if let Err(error) = thread.spawn(move || notifier.run()) {
            self.warn_of_short_times(&format!("no thread: {error}"));
        }
    }

    fn warn_of_short_times(&self, why: &str) {
        log::warn!("names and attributes are kept for a short time: {why}");
        self.watch.note_reason(why);
    }

    /// The supplementary groups of the caller; none if they are unknown.
    fn groups(&self, cx: &Context<'_>) -> Arc<[u32]> {
        if cx.groups_are_known() {
            return cx.supplementary_groups().unwrap_or_default().into();
        }
        let key = (cx.caller.pid, cx.caller.uid, cx.caller.gid);
        let lock = || self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((query, groups)) = lock().get(&key)
            && query.elapsed() < GROUPS_VALID_FOR
        {
            return Arc::clone(groups);
        }
        let groups: Arc<[u32]> = cx.supplementary_groups().unwrap_or_default().into();
        let mut kept = lock();
        if kept.len() >= GROUPS_KEPT {
            kept.clear();
        }
        kept.insert(key, (Instant::now(), Arc::clone(&groups)));
        groups
    }

    /// A reference to a known inode. Fails with `ESTALE` if it is gone.
    pub(crate) fn object(&self, ino: Ino) -> Result<InodeObject<'_>> {
        self.volume.object(self.nodes.gfid(ino)?).map_err(|errno| self.map_inode_error(ino, errno))
    }

    /// A reference to a directory in which a name is used.
    pub(crate) fn directory(&self, gfid: Gfid) -> Result<InodeObject<'_>> {
        self.volume.object(gfid)
    }

    /// The answer to a lookup of a name in a directory. It counts as a lookup.
    pub(crate) fn entry(
        &self,
        (object, stat): (&InodeObject<'_>, &libc::stat),
        (dir, name): (Gfid, Name<'_>),
        query: &QueryContext,
    ) -> Result<Entry> {
        let place = EntryLocation { dir, name: Some(name), is_listed: false };
        self.entry_of((object.gfid()?, stat), place, query)
    }

    /// The answer to a lookup with a known identity. It counts as a lookup.
    pub(crate) fn entry_of(
        &self,
        (gfid, stat): (Gfid, &libc::stat),
        place: EntryLocation<'_>,
        query: &QueryContext,
    ) -> Result<Entry> {
        let mut attr = attr(stat, Duration::ZERO)?;
        let EntryLocation { dir, name, is_listed } = place;
        let (ino, left) = self.nodes.look_up_from(gfid, Some(dir), hash_of(&attr, name));
        if let Some(left) = left {
            self.watch.invalidate_old_names(left, ino);
        }
        let is_watched = self.listen(ino, || self.refer(gfid));
        attr.valid_for = self.attribute_lifetime(gfid, &attr, (is_watched, query));
        self.keep_answer((gfid, stat), Some(place), query, || self.volume.keep(gfid).ok());
        let is_dir = attr.kind == FileKind::Directory;
        let child =
            NamedChild { ino, gfid, is_single: attr.nlink == 1 || is_dir, is_dir, is_listed };
        let valid_for = match name {
            Some(name) if is_watched && self.receives_upcalls_of(dir) => {
                let valid_for = self.watch.name(dir, name.as_bytes(), &child, query.since);
                if self.nodes.parent(ino) == Ok(Some(dir)) {
                    valid_for
                } else {
                    // Another thread has found it elsewhere meanwhile.
                    self.watch.invalidate_old_names(dir, ino);
                    Duration::ZERO
                }
            }
            _ => self.watch.short_lifetime(),
        };
        if is_listed {
            // The attributes are invalidated together with the name.
            attr.valid_for = attr.valid_for.min(valid_for);
        }
        if !self.settings.takes_turns {
            let moment = (query.changes, query.since, is_listed.then_some(dir));
            self.changes.record_attributes(gfid, &attr, moment);
            // libgfapi itself looks up a listed name before it removes it.
            if let Some(name) = name.filter(|_| !is_listed) {
                self.looked_up.add((dir, name.as_bytes()), gfid, is_dir);
            }
        }
        Ok(Entry { ino, generation: 0, attr, valid_for })
    }

    /// The attributes of an inode, from the answer to a query. Messages about the inode arrive if
    /// `is_watched`.
    pub(crate) fn attr_of(
        &self,
        ino: Ino,
        stat: &libc::stat,
        (is_watched, query): (bool, &QueryContext),
    ) -> Result<Attr> {
        let mut attr = attr(stat, Duration::ZERO)?;
        let gfid = self.nodes.gfid(ino)?;
        attr.valid_for = self.attribute_lifetime(gfid, &attr, (is_watched, query));
        if !self.settings.takes_turns {
            self.changes.record_attributes(gfid, &attr, (query.changes, query.since, None));
        }
        self.keep_answer((gfid, stat), None, query, || self.volume.keep(gfid).ok());
        Ok(attr)
    }

    /// The metadata cache, and the time for which it keeps answers; `None` if it keeps none.
    fn metadata_cache(&self) -> Option<(&MetadataCache<RetainedObject>, Duration)> {
        let time = self.watch.long().unwrap_or(self.settings.untold_for);
        self.answers.as_ref().filter(|_| !time.is_zero()).map(|answers| (answers, time))
    }

    /// Takes messages of servers, if they report changes, before a kept answer is used.
    fn take_messages(&self) {
        if self.watch.is_on() {
            upcalls::take_if_due(&self.volume, &self.watch.inbox);
        }
    }

    /// Keeps the answer about an inode, also for a name in a directory, if answers are kept here.
    /// `refer` makes a reference to the inode.
    pub(crate) fn keep_answer(
        &self,
        (gfid, stat): (Gfid, &libc::stat),
        place: Option<EntryLocation<'_>>,
        query: &QueryContext,
        refer: impl FnOnce() -> Option<RetainedObject>,
    ) {
        let Some((answers, long)) = self.metadata_cache() else { return };
        let inbox = &self.watch.inbox;
        if inbox.has_report_since(gfid, query.since) || answers.has_changed(gfid, query) {
            return;
        }
        let Some(reference) = refer() else { return };
        let now = Instant::now();
        let is_dir = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
        let holds = if is_dir { long.min(DIRECTORIES_HOLD) } else { long };
        let listed_in = place.filter(|place| place.is_listed).map(|place| place.dir);
        answers.keep_attributes((gfid, stat, listed_in), query, now + holds, reference);
        if is_dir && answers.record_fetch(gfid, now) {
            self.volume.keep(gfid).into_iter().for_each(|it| answers.keep_dir(gfid, now, it));
        }
        let Some(EntryLocation { dir, name: Some(name), is_listed }) = place else { return };
        let name = name.as_bytes();
        // Frontends do not keep this name, so that no number is needed.
        let is_single = is_dir || stat.st_nlink == 1;
        let child = NamedChild { ino: Ino(0), gfid, is_single, is_dir, is_listed };
        let valid = self.watch.name(dir, name, &child, query.since);
        answers.keep_name((dir, name), Some(gfid), query, now + name_holds(valid, long));
    }

    /// Keeps the fact that a name is missing, for a rename to this name.
    pub(crate) fn keep_missing(&self, (dir, name): (Gfid, Name<'_>), query: &QueryContext) {
        let Some((answers, long)) = self.metadata_cache() else { return };
        let (gfid, ino) = (dir, Ino(0));
        let none = NamedChild { ino, gfid, is_single: true, is_dir: false, is_listed: false };
        let valid = self.watch.name(dir, name.as_bytes(), &none, query.since);
        let until = Instant::now() + name_holds(valid, long);
        answers.keep_name((dir, name.as_bytes()), None, query, until);
    }

    /// True if listings should bring attributes, to keep them here.
    pub(crate) fn keeps_listings(&self) -> bool {
        self.metadata_cache().is_some()
    }

    /// The answer to a name in a directory, if it is kept here.
    pub(crate) fn find_kept_entry(
        &self,
        acting: &ActingUser<'_>,
        (dir, name): (Gfid, Name<'_>),
    ) -> Option<Entry> {
        let (answers, _) = self.metadata_cache()?;
        self.take_messages();
        let find = || answers.name(&acting.query.who, dir, name.as_bytes(), Instant::now());
        let (gfid, stat) = match find() {
            LookupAnswer::Inode(gfid, stat) => (gfid, stat),
            LookupAnswer::Unknown => return None,
            LookupAnswer::LookAtDirectory => {
                self.look_at(dir, &acting.query).ok()?;
                let LookupAnswer::Inode(gfid, stat) = find() else { return None };
                (gfid, stat)
            }
        };
        let valid_for = self.watch.short_lifetime();
        let attr = attr(&stat, valid_for).ok()?;
        let ino = self.nodes.look_up(gfid, Some(dir), hash_of(&attr, Some(name)));
        Some(Entry { ino, generation: 0, attr, valid_for })
    }

    /// The attributes of an inode, if they are kept here.
    pub(crate) fn find_kept_attributes(&self, acting: &ActingUser<'_>, ino: Ino) -> Option<Attr> {
        let (answers, _) = self.metadata_cache()?;
        self.take_messages();
        let gfid = self.nodes.gfid(ino).ok()?;
        let stat = answers.find_attributes(&acting.query.who, gfid, Instant::now())?;
        attr(&stat, self.watch.short_lifetime()).ok()
    }

    /// The attributes of an inode that a kernel asks for again although they hold, because it
    /// assumes that a read or a change in the directory has changed them: they are as valid as they
    /// were.
    pub(crate) fn find_recent_attributes(&self, ino: Ino) -> Option<Attr> {
        if self.settings.takes_turns {
            return None;
        }
        let gfid = self.nodes.gfid(ino).ok()?;
        let recent = self.changes.recent_attributes(gfid, self.watch.short_lifetime())?;
        // The change time of a directory shows changes by others that servers do not report. It
        // must be asked for after each change of this client, which would hide an earlier one.
        if self.watch.is_on() && recent.attr.kind == FileKind::Directory {
            return None;
        }
        self.take_messages();
        let valid_for = recent.attr.valid_for.checked_sub(recent.age)?;
        let has_report = |gfid| self.watch.inbox.has_report_since(gfid, recent.reported);
        let is_valid = !has_report(gfid) && !recent.listed_in.is_some_and(has_report);
        is_valid.then_some(Attr { valid_for, ..recent.attr })
    }

    /// Records that a file was made in a directory, whose attributes have no other change than the
    /// time, if that is known.
    pub(crate) fn finish_file_made(&self, change: Option<ClientChange>, stat: &libc::stat) {
        if let Some(change) = change.filter(|_| self.settings.graph.has_client_times) {
            let nanos = stat.st_ctime_nsec as u32;
            change.finish_file_made(Timestamp { secs: stat.st_ctime, nanos });
        }
    }

    /// True if an inode is known to lack an extended attribute.
    pub(crate) fn is_known_to_lack(&self, gfid: Gfid, name: XattrName<'_>) -> bool {
        let Some((answers, _)) = self.metadata_cache() else { return false };
        self.take_messages();
        answers.lacks(gfid, name.as_bytes(), Instant::now())
    }

    /// Keeps the fact that an inode lacks an extended attribute.
    pub(crate) fn keep_lack(&self, gfid: Gfid, name: XattrName<'_>, query: &QueryContext) {
        let Some((answers, long)) = self.metadata_cache() else { return };
        answers.note_lack(gfid, name.as_bytes(), query.since, Instant::now() + long);
    }

    /// Fetches the attributes of a directory, to notice changes that servers do not report.
    pub(crate) fn look_at(&self, dir: Gfid, query: &QueryContext) -> Result<libc::stat> {
        let stat = self.volume.stat(&self.directory(dir)?)?;
        let changed = (stat.st_ctime, stat.st_ctime_nsec);
        self.watch.directory(dir, changed, query.since);
        self.keep_answer((dir, &stat), None, query, || self.volume.keep(dir).ok());
        Ok(stat)
    }

    /// True if no other client has changed a directory lately. If the servers do not report
    /// changes, the change time of the directory decides, which comes from the clock of the client
    /// that changed it.
    pub(crate) fn is_quiet(&self, dir: Gfid, query: &QueryContext) -> bool {
        self.watch.is_quiet(&self.volume, dir).unwrap_or_else(|| {
            let Ok(stat) = self.look_at(dir, query) else { return false };
            is_past(stat.st_ctime, SystemTime::now())
        })
    }

    /// The reason why names and attributes are kept for a short time, if they are.
    pub(crate) fn explain_short_times(&self) -> Vec<String> {
        let here = self.answers.as_ref().map_or(Duration::ZERO, |_| self.settings.untold_for);
        let time = self.watch.short_lifetime().max(here);
        let note = |why| match time.is_zero() {
            true => format!("names and attributes are not kept: {why}"),
            false => format!("names and attributes are kept for {time:?}: {why}"),
        };
        let shards = self.settings.graph.shards.then(|| SHARDS.to_owned());
        self.watch.explain_short_lifetime().map(note).into_iter().chain(shards).collect()
    }

    /// Numbers of answers that are kept here.
    pub(crate) fn cache_figures(&self) -> Vec<Figure> {
        let Some(answers) = &self.answers else { return Vec::new() };
        let [files, names, answered] = answers.counts();
        vec![
            Figure::count("answers_files", files),
            Figure::count("answers_names", names),
            Figure::count("answers_given", answered).since_start(),
        ]
    }

    /// Records that this client changes the subjects, until the result is dropped.
    pub(crate) fn begin_own_change<'a>(
        &self,
        things: &[ChangeSubject<'a>],
    ) -> Option<OwnChangeGuard<'a>> {
        self.answers.as_ref().map(|answers| answers.begin_change(things.to_vec()))
    }

    /// The lock for a lookup of a name; see [`ChangeLocks`].
    pub(crate) fn lock_lookup(&self, (dir, name): (Gfid, Name<'_>)) -> Option<LookupGuard<'_>> {
        Some(self.turns.as_ref()?.look((dir, name.as_bytes())))
    }

    /// The locks for a change of names.
    pub(crate) fn lock_names(&self, names: &[(Gfid, Name<'_>)]) -> Option<ChangeGuard<'_>> {
        let turns = self.turns.as_ref()?;
        let names: Vec<_> = names.iter().map(|(dir, name)| (*dir, name.as_bytes())).collect();
        Some(turns.names(&names))
    }

    /// The locks for the inodes `changed`, whose names are changed in `dirs`. Taken after the locks
    /// of the names.
    pub(crate) fn lock_inodes(&self, dirs: &[Gfid], changed: &[Gfid]) -> Option<ChangeGuard<'_>> {
        Some(self.turns.as_ref()?.inodes(dirs, changed))
    }

    /// The lock for a directory that moves to another one.
    pub(crate) fn lock_move(&self) -> Option<RenameGuard<'_>> {
        Some(self.turns.as_ref()?.move_directory())
    }

    /// True if no kernel has checked a change of a name just before, so that this crate must check
    /// it.
    pub(crate) fn checks_changes(&self) -> bool {
        self.turns.is_some()
    }

    /// Records an [`begin_own_change`](Gluster::begin_own_change) of the attributes of an inode
    /// that frontends know.
    pub(crate) fn begin_own_change_of(&self, ino: Ino) -> Option<OwnChangeGuard<'static>> {
        self.answers.as_ref()?;
        self.begin_own_change(&[ChangeSubject::Attributes(self.nodes.gfid(ino).ok()?)])
    }

    /// The inode of a name, and true if it is a directory, for a change of the name that also
    /// changes the attributes of the inode. `None` if there is none, or if the frontend is a
    /// kernel, which knows the inode.
    pub(crate) fn child(
        &self,
        (dir, gfid): (&InodeObject<'_>, Gfid),
        name: &CStr,
    ) -> Option<(Gfid, bool)> {
        let known =
            |answers: &MetadataCache<_>| answers.child(gfid, name.to_bytes(), Instant::now());
        match self.answers.as_ref().and_then(known) {
            Some(known) => known,
            None if self.turns.is_none() => None,
            None => {
                let (object, stat) = self.volume.look_up(Some(dir), name).ok()?;
                Some((object.gfid().ok()?, stat.st_mode & libc::S_IFMT == libc::S_IFDIR))
            }
        }
    }

    fn attribute_lifetime(
        &self,
        gfid: Gfid,
        attr: &Attr,
        (is_watched, query): (bool, &QueryContext),
    ) -> Duration {
        match attr.kind {
            FileKind::Directory => {
                let changed = (attr.ctime.secs, i64::from(attr.ctime.nanos));
                self.watch.directory(gfid, changed, query.since)
            }
            _ if is_watched => self.watch.attribute_lifetime(gfid, query.since),
            _ => self.watch.short_lifetime(),
        }
    }

    /// Ensures that messages about an inode arrive, if frontends may keep it for long.
    pub(crate) fn listen(&self, ino: Ino, refer: impl FnOnce() -> Option<InodeReference>) -> bool {
        self.watch.listen(&self.nodes, ino, refer)
    }

    /// Performs `listen` for a known inode, before a query about it.
    pub(crate) fn listen_to(&self, ino: Ino) -> bool {
        self.nodes.gfid(ino).is_ok_and(|gfid| self.listen(ino, || self.refer(gfid)))
    }

    pub(crate) fn refer(&self, gfid: Gfid) -> Option<InodeReference> {
        self.volume.keep(gfid).ok().map(|kept| Box::new(kept) as InodeReference)
    }

    /// True if messages about a directory arrive.
    fn receives_upcalls_of(&self, dir: Gfid) -> bool {
        self.nodes.ino(dir).is_some_and(|ino| self.listen(ino, || self.refer(dir)))
    }

    /// Adds an open file or directory.
    pub(crate) fn add_open(&self, opened: OpenObject) -> Fh {
        let fh = self.next_fh.fetch_add(1, Ordering::Relaxed);
        let file = match &opened {
            OpenObject::File(file) => Some(file.ino),
            OpenObject::Dir(_) => None,
        };
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(fh, opened);
        if let Some(ino) = file {
            self.nodes.record_open(ino, Fh(fh));
        }
        Fh(fh)
    }

    /// Removes an open file or directory.
    pub(crate) fn remove_open(&self, fh: Fh) -> Option<OpenObject> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&fh.0)
    }

    /// An open file. Fails with `EBADF`.
    pub(crate) fn file(&self, fh: Fh) -> Result<Arc<OpenVolumeFile>> {
        match self.find_open_object(fh) {
            Some(OpenObject::File(file)) => Ok(file),
            _ => Err(Errno::EBADF),
        }
    }

    /// An open directory. Fails with `EBADF`.
    pub(crate) fn dir(&self, fh: Fh) -> Result<Arc<OpenListing>> {
        match self.find_open_object(fh) {
            Some(OpenObject::Dir(dir)) => Ok(dir),
            _ => Err(Errno::EBADF),
        }
    }

    fn find_open_object(&self, fh: Fh) -> Option<OpenObject> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&fh.0).cloned()
    }

    /// Runs `by_name` on an inode. If it has no name any more, runs `by_file` on one of its open
    /// files; fails with `ESTALE` if there is none.
    pub(crate) fn reach<T>(
        &self,
        ino: Ino,
        by_name: impl FnOnce(&InodeObject<'_>) -> Result<T>,
        by_file: impl FnOnce(&OpenVolumeFile) -> Result<T>,
    ) -> Result<T> {
        let gfid = self.nodes.gfid(ino)?;
        let reached = self.object(ino).and_then(|object| by_name(&object));
        let reached = reached.inspect_err(|&errno| self.record_missing(gfid, errno));
        match reached {
            Err(Errno::ENOENT | Errno::ESTALE) => match self.nodes.find_open_file(ino) {
                Some(fh) => by_file(&*self.file(fh)?),
                None => reached.map_err(|errno| self.map_inode_error(ino, errno)),
            },
            reached => reached,
        }
    }

    /// Opens a known inode, or fetches its attributes.
    pub(crate) fn open_known<T>(
        &self,
        ino: Ino,
        open: impl Fn(&InodeObject<'_>) -> Result<T>,
    ) -> Result<T> {
        let gfid = self.nodes.gfid(ino)?;
        let once = || self.volume.object(gfid).and_then(|object| open(&object));
        let opened = try_again(&|| once().inspect_err(|&errno| self.record_missing(gfid, errno)));
        opened.map_err(|errno| self.map_inode_error(ino, errno))
    }

    /// Records that an operation found an inode to be gone: the next one asks the servers for it,
    /// which may have moved it.
    pub(crate) fn record_missing(&self, gfid: Gfid, errno: Errno) {
        if matches!(errno, Errno::ENOENT | Errno::ESTALE) {
            self.volume.release_inode(gfid);
        }
    }

    /// The error of an operation on an inode, which has no name of its own that could be missing.
    /// After `ESTALE`, the frontend looks up again the name by which it found the inode: another
    /// client may have replaced it, and then the name existed all the time. No answer in the
    /// metadata cache may lead to the inode after that.
    pub(crate) fn map_inode_error(&self, ino: Ino, errno: Errno) -> Errno {
        if !matches!(errno, Errno::ENOENT | Errno::ESTALE) {
            return errno;
        }
        if self.answers.is_some()
            && let Ok(gfid) = self.nodes.gfid(ino)
        {
            self.watch.inbox.put(gfid, 0);
        }
        Errno::ESTALE
    }
}

/// Repeats an operation a little later if an inode seems to be gone: while another client changes
/// an inode, the bricks of a replicated volume differ for a moment, and an inode of a renamed
/// directory has no path. The frontend repeats only once more.
pub(crate) fn try_again<T>(once: &dyn Fn() -> Result<T>) -> Result<T> {
    const PAUSES_MS: [u64; 4] = [2, 10, 40, 100];
    let mut done = once();
    for pause in PAUSES_MS {
        if !matches!(done, Err(Errno::ENOENT | Errno::ESTALE)) {
            break;
        }
        std::thread::sleep(Duration::from_millis(pause));
        done = once();
    }
    done
}

/// The time for which this process keeps a name that a frontend could keep for `valid`: for `long`,
/// or for a short time. An answer that a message has overtaken does not hold anyway.
fn name_holds(valid: Duration, long: Duration) -> Duration {
    if valid == long { long } else { long.min(DIRECTORIES_HOLD) }
}

/// The hash by which the name of a file is assigned to a subvolume. Directories are in all
/// subvolumes.
fn hash_of(attr: &Attr, name: Option<Name<'_>>) -> Option<LayoutHash> {
    let is_file = attr.kind != FileKind::Directory;
    name.filter(|_| is_file).map(|name| LayoutHash::from_name(name.as_bytes()))
}

impl Drop for Gluster {
    fn drop(&mut self) {
        self.watch.inbox.end();
        self.parts.end();
    }
}

/// True if a change at `seconds` has ended on all servers at `now`. A change in the future has not:
/// the clock of another client is ahead.
fn is_past(seconds: i64, now: SystemTime) -> bool {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    now.saturating_sub(seconds) > CHANGES.as_secs() as i64
}

/// A thread that acts as a user.
pub(crate) struct ActingUser<'a> {
    volume: &'a VolumeConnection,
    restores: bool,
    /// The caller, and a moment before all answers from now on.
    pub query: QueryContext,
}

impl Drop for ActingUser<'_> {
    fn drop(&mut self) {
        if self.restores {
            self.volume.act_as_process();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_that_seems_to_be_gone_is_tried_again() {
        let count = std::cell::Cell::new(0);
        let after = |tries, errno| {
            count.set(0);
            try_again(&|| {
                count.set(count.get() + 1);
                if count.get() < tries { Err(errno) } else { Ok(count.get()) }
            })
        };
        assert_eq!(after(3, Errno::ESTALE), Ok(3));
        assert_eq!((after(9, Errno::ENOENT), count.get()), (Err(Errno::ENOENT), 5));
        assert_eq!((after(2, Errno::EIO), count.get()), (Err(Errno::EIO), 1));
    }

    #[test]
    fn a_change_is_past_after_some_seconds_and_not_before_its_time() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let past = [990, 994, 995, 1000, 1001, i64::MAX, i64::MIN].map(|at| is_past(at, now));
        assert_eq!(past, [true, true, false, false, false, false, true]);
    }

    #[test]
    fn a_mode_without_set_user_id_is_known_until_this_client_changes_a_mode() {
        let mode = PlainModeCache::default();
        assert!(!mode.is_known(0));
        for (set, left) in [(0o106_755, 0o755), (0o104_777, 0o777), (0o102_711, 0o711)] {
            assert_eq!(mode.record_mode(set, 0), Some(left));
            assert!(!mode.is_known(0), "{set:o}");
        }
        assert_eq!(mode.record_mode(0o100_755, 3), None);
        assert!(mode.is_known(3) && !mode.is_known(4));
    }
}
