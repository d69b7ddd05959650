//! From a decoded request to the file system and back: one short function for each operation.
//!
//! A function returns an error for the dispatcher to send, or has sent its reply already. If the
//! kernel does not take a reply that granted something (the caller was killed meanwhile), the grant
//! is undone: the lookup is forgotten, the handle released.

mod compound;
pub(crate) mod data;
mod deferred;
mod files;
mod names;
mod pages;
mod privileges;
mod synced_opens;

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use defuse_fs::{
    AccessMask, Caller, Context, Entry, Errno, FailureDomain, Fh, File, FileSystem, Ino,
    InterruptCheck, Lifecycle, Name, Notify, Origin, Result, SupplementaryGroups,
};
use defuse_probe::Recorder;
use defuse_probe::clock::ClockMoment;
use zerocopy::{Immutable, IntoBytes};

use crate::backing::BackingFiles;
use crate::groups::{ClientGroups, ProcessGroups, UnknownGroups};
use crate::init::NegotiatedInit;
use crate::inode_bound::InodeBound;
use crate::notify::KernelNotify;
use crate::options::SessionOptions;
use crate::transport::RequestReply;
use crate::user_share::UserShare;
use crate::workers::watchdog::SharedWatchdog;
use deferred::{BytesInFlight, DeferredTable};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::convert::{self, CacheTimeouts};
use defuse_wire::request::{DecodedRequest, RequestBody, RequestPayload};
use pages::CachedPages;
use privileges::WriterCounts;
use synced_opens::SyncedOpens;

/// The state of the session that handlers need.
pub(crate) struct Dispatcher {
    pub(crate) fs: Arc<dyn FileSystem>,
    pub(crate) notify: Arc<KernelNotify>,
    pub(crate) recorder: Recorder,
    pub(crate) negotiated: NegotiatedInit,
    timeouts: CacheTimeouts,
    /// The file system lets missing names be cached.
    may_cache_missing: bool,
    /// Attributes may have a birth time.
    birth_times: bool,
    /// True if the file system can complete operations later, on request.
    may_submit: bool,
    /// True if this session requests it.
    submits: AtomicBool,
    direct_io: bool,
    /// The kernel checks permissions, but not by ACLs.
    acls_ignored: bool,
    /// True if the other side uses access lists.
    has_acls: bool,
    backings: Option<BackingFiles>,
    /// `None` without a bound.
    pub(crate) inodes: Option<Arc<InodeBound>>,
    deferred: DeferredTable,
    in_flight: BytesInFlight,
    /// `None` where the kernel waits for each direct write, or has no pages.
    pages: Option<CachedPages>,
    /// The value of [`ClientHooks::share`].
    pub(crate) share: Option<Arc<UserShare>>,
    writers: WriterCounts,
    synced_opens: SyncedOpens,
    /// The requests come from the kernel, which vouches for their callers, and not from a client
    /// over a socket.
    is_kernel: bool,
    /// The identity of the session, in the context of each request.
    pub(crate) origin: Origin,
    groups: Arc<dyn SupplementaryGroups>,
    memory: Option<Arc<dyn SharedMemory>>,
    /// The value of [`ClientHooks::tells_groups`].
    tells_groups: bool,
}

/// Memory that mappings of a file share, for clients that request it by SETUPMAPPING.
pub trait SharedMemory: Send + Sync {
    /// A descriptor of the memory of `file`, filled with `len` bytes at `offset` at least.
    fn map(&self, cx: &Context<'_>, file: File, range: (u64, u64), writes: bool)
    -> Result<OwnedFd>;

    /// A descriptor of the cached pages of `file`, to read only.
    ///
    /// # Errors
    ///
    /// `ENOSYS` where there are none.
    fn pages(&self, _cx: &Context<'_>, _file: File) -> Result<OwnedFd> {
        Err(Errno::ENOSYS)
    }

    /// A descriptor of the versions of names and attributes, to read only.
    ///
    /// # Errors
    ///
    /// `ENOSYS` where there are none.
    fn versions(&self) -> Result<OwnedFd> {
        Err(Errno::ENOSYS)
    }

    /// Returns a read-only descriptor of the name memory of clients with the same rights.
    ///
    /// # Errors
    ///
    /// `ENOSYS` where there are none.
    fn name_memory(&self) -> Result<OwnedFd> {
        Err(Errno::ENOSYS)
    }

    /// The reply to an IOCTL was sent. Work follows for which no caller waits.
    fn finish_ioctl(&self) {}

    /// All bytes of an open file, if it is small and the client can know how long they hold; and
    /// true if a read changes the access time, which this does not do.
    fn read_whole(&self, _cx: &Context<'_>, _file: File) -> Option<(Vec<u8>, bool)> {
        None
    }

    /// One mapping of `ino` has ended.
    fn unmap(&self, cx: &Context<'_>, ino: Ino) -> Result<()>;
}

/// A client in the kernel's place, which may send wrong data about the calling process.
#[derive(Clone, Default)]
pub struct ClientHooks {
    /// The memory of files that it maps; `None` where it cannot map any.
    pub memory: Option<Arc<dyn SharedMemory>>,
    /// The supplementary groups of the callers; `None` if they are unknown.
    pub groups: Option<Arc<dyn SupplementaryGroups>>,
    /// True if the client's claims about the groups of callers are trusted.
    pub tells_groups: bool,
    /// Watches the threads of the session; `None` for a thread of the session's own.
    pub watchdog: Option<SharedWatchdog>,
    /// The counters that the session shares with other sessions of its user; `None` if there are no
    /// limits.
    pub share: Option<Arc<UserShare>>,
}

/// The other end of a session.
#[derive(Clone)]
pub(crate) enum SessionPeer {
    /// The kernel, which guarantees the identity of callers. Backing files are registered with the
    /// device.
    Kernel(Arc<OwnedFd>),
    /// A client in the kernel's place.
    Client(ClientHooks),
}

/// The outcome of a request, for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestOutcome {
    pub(crate) ok: bool,
    /// Bytes read or written.
    pub(crate) bytes: u64,
    /// True if the reply is deferred, and counted when it is sent.
    pub(crate) deferred: bool,
}

/// The outcome of a handler that did not fail.
enum HandlerOutcome {
    Sent,
    Moved(usize),
    Deferred,
}

/// The data of one request that handlers pass around.
struct RequestCall<'a> {
    cx: Context<'a>,
    unique: u64,
    opcode: Opcode,
    ino: Ino,
    started: ClockMoment,
    /// The groups of the caller, if the client sent them.
    sent_groups: Option<Arc<dyn SupplementaryGroups>>,
    /// Part of a chain, which is answered at once.
    in_chain: bool,
}

impl Dispatcher {
    /// A dispatcher from `peer` to `fs`.
    pub(crate) fn new(
        (fs, origin): (Arc<dyn FileSystem>, Origin),
        notify: Arc<KernelNotify>,
        negotiated: NegotiatedInit,
        options: &SessionOptions,
        peer: SessionPeer,
    ) -> Self {
        let caps = fs.caps();
        // With write-back the kernel knows size and times better than this process, but not the
        // space in use, which changes when it writes back; the kernel requests that only when
        // attributes expire.
        let writeback = negotiated.uses(abi::FUSE_WRITEBACK_CACHE);
        let file_attr_most = if writeback { Duration::from_secs(1) } else { Duration::MAX };
        let has_acls = negotiated.uses(abi::FUSE_POSIX_ACL);
        let acls_ignored = options.default_permissions && !has_acls;
        let (device, groups, memory, tells_groups, share) = match peer {
            SessionPeer::Kernel(device) => {
                let other = options.groups.as_ref().map(|source| Arc::clone(&source.0));
                let groups = other.unwrap_or_else(|| Arc::new(ProcessGroups));
                (Some(device), groups, None, false, None)
            }
            SessionPeer::Client(ClientHooks { memory, groups, tells_groups, share, .. }) => {
                let groups = groups.unwrap_or_else(|| Arc::new(UnknownGroups));
                (None, groups, memory, tells_groups, share)
            }
        };
        let is_kernel = device.is_some();
        let is_async = is_kernel && negotiated.uses(abi::FUSE_ASYNC_DIO);
        let backings =
            device.filter(|_| negotiated.uses(abi::FUSE_PASSTHROUGH)).map(BackingFiles::new);
        let most = options.max_inodes.filter(|_| is_kernel);
        let inodes = most.map(|most| InodeBound::new(most, Arc::clone(&notify) as Arc<dyn Notify>));
        Dispatcher {
            fs,
            origin,
            notify,
            recorder: if options.statistics { Recorder::new() } else { Recorder::new_disabled() },
            negotiated,
            timeouts: CacheTimeouts {
                attr: options.attr_timeout,
                entry: options.entry_timeout,
                negative: options.negative_timeout,
                file_attr_most,
                has_unwritten_pages: false,
            },
            may_cache_missing: !caps.negative_lifetime.is_zero(),
            birth_times: caps.birth_times,
            may_submit: caps.submits,
            submits: AtomicBool::new(caps.submits && options.policy.submits()),
            direct_io: options.direct_io,
            has_acls,
            acls_ignored,
            backings,
            inodes,
            deferred: DeferredTable::default(),
            in_flight: BytesInFlight::default(),
            pages: is_async.then(CachedPages::new),
            share,
            writers: WriterCounts::default(),
            synced_opens: SyncedOpens::default(),
            is_kernel,
            groups,
            memory,
            tells_groups,
        }
    }

    /// True if the requests come from the kernel.
    pub(crate) fn is_of_kernel(&self) -> bool {
        self.is_kernel
    }

    /// True if the requests come from several users.
    pub(crate) fn serves_many(&self) -> bool {
        self.is_kernel || self.tells_groups
    }

    /// Handles one request that needs a reply, and sends the reply. A panic of the file system
    /// results in `EIO` for this request alone.
    pub(crate) fn handle(
        self: &Arc<Self>,
        request: &DecodedRequest<'_>,
        reply: &mut dyn RequestReply,
        interrupt: &dyn InterruptCheck,
        started: ClockMoment,
    ) -> RequestOutcome {
        let caller = Caller { uid: request.uid, gid: request.gid, pid: request.pid };
        let sent = request.caller_groups.filter(|_| self.tells_groups);
        let sent = sent
            .map(|groups| Arc::new(ClientGroups(groups.collect())) as Arc<dyn SupplementaryGroups>);
        let groups = sent.clone();
        let groups = groups.as_deref().unwrap_or(&*self.groups);
        let call = RequestCall {
            cx: Context::with_interrupt(caller, request.unique, interrupt)
                .with_groups(groups)
                .from_origin(self.origin),
            unique: request.unique,
            opcode: request.opcode,
            ino: Ino(request.nodeid),
            started,
            sent_groups: sent,
            in_chain: false,
        };
        match self.attempt(&call, &request.body, reply) {
            Ok(HandlerOutcome::Sent) => RequestOutcome { ok: true, ..RequestOutcome::default() },
            Ok(HandlerOutcome::Moved(count)) => {
                RequestOutcome { ok: true, bytes: count as u64, deferred: false }
            }
            Ok(HandlerOutcome::Deferred) => RequestOutcome { ok: true, bytes: 0, deferred: true },
            Err(errno) => {
                // ENOENT: the kernel gave up on the request, so no caller waits for the reply.
                let _ = reply.send_errno(errno.raw());
                RequestOutcome::default()
            }
        }
    }

    /// Runs a handler. A panic of the file system is `EIO`.
    fn attempt(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        body: &RequestBody<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let result = catch_unwind(AssertUnwindSafe(|| self.run(call, body, reply)));
        result.unwrap_or_else(|_| {
            log::error!("{}: the file system panicked; answering EIO", call.opcode.name());
            Err(Errno::EIO)
        })
    }

    fn run(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        body: &RequestBody<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let (cx, ino) = (&call.cx, call.ino);
        match body {
            RequestBody::Lookup { name } => self.lookup(call, name, reply),
            RequestBody::Getattr(args) => self.getattr(call, args, reply),
            RequestBody::Statx(args) => self.statx(call, args, reply),
            RequestBody::Setattr(args) => self.setattr(call, args, reply),
            RequestBody::Readlink => self.readlink(call, reply),
            RequestBody::Symlink { name, target, ext } => {
                self.symlink(call, name, target, ext, reply)
            }
            RequestBody::Mknod { args, name, ext } => self.mknod(call, args, name, ext, reply),
            RequestBody::Mkdir { args, name, ext } => self.mkdir(call, args, name, ext, reply),
            RequestBody::Unlink { name } => {
                send_success(self.fs.unlink(cx, ino, Name::new(name)?), reply)
            }
            RequestBody::Rmdir { name } => {
                send_success(self.fs.rmdir(cx, ino, Name::new(name)?), reply)
            }
            RequestBody::Rename { args, name, newname } => {
                self.rename(call, (args.newdir, 0), name, newname, reply)
            }
            RequestBody::Rename2 { args, name, newname } => {
                self.rename(call, (args.newdir, args.flags), name, newname, reply)
            }
            RequestBody::Link { args, name } => self.link(call, args, name, reply),
            RequestBody::Open(args) => self.open(call, args, reply),
            RequestBody::Create { args, name, ext } => self.create(call, args, name, ext, reply),
            RequestBody::Tmpfile { args, ext, .. } => self.tmpfile(call, args, ext, reply),
            RequestBody::Read(args) => self.read(call, args, reply),
            RequestBody::Write { args, data } => self.write(call, args, data, reply),
            RequestBody::Statfs => pod(reply, &convert::statfs(&self.fs.statfs(cx, ino)?)),
            RequestBody::Release(args) => self.release(call, args, reply),
            RequestBody::Fsync(args) => self.fsync(call, args, reply),
            RequestBody::Flush(args) => self.flush(call, args, reply),
            RequestBody::Setxattr { args, name, value } => {
                self.setxattr(call, args, name, value, reply)
            }
            RequestBody::Getxattr { args, name } => self.getxattr(call, args, name, reply),
            RequestBody::Listxattr(args) => self.listxattr(call, args, reply),
            RequestBody::Removexattr { name } => self.removexattr(call, name, reply),
            RequestBody::Opendir(args) => self.opendir(call, args, reply),
            RequestBody::Readdir(args) => self.readdir(call, args, false, reply),
            RequestBody::Readdirplus(args) => self.readdir(call, args, true, reply),
            RequestBody::Releasedir(args) => {
                send_success(self.fs.releasedir(cx, File { ino, fh: Fh(args.fh) }), reply)
            }
            RequestBody::Fsyncdir(args) => self.fsyncdir(call, args, reply),
            RequestBody::Getlk(args) => self.getlk(call, args, reply),
            RequestBody::Setlk(args) => self.setlk(call, args, reply),
            RequestBody::Setlkw(args) => self.setlkw(call, args, reply),
            RequestBody::Access(args) => {
                send_success(self.fs.access(cx, ino, AccessMask(args.mask)), reply)
            }
            RequestBody::Bmap(args) => {
                let block = self.fs.bmap(cx, ino, args.blocksize, args.block)?;
                pod(reply, &abi::BmapOut { block })
            }
            RequestBody::Ioctl { args, data } => self.ioctl(call, args, data, reply),
            RequestBody::Poll(args) => self.poll(call, args, reply),
            RequestBody::Fallocate(args) => self.fallocate(call, args, reply),
            RequestBody::Lseek(args) => self.lseek(call, args, reply),
            RequestBody::CopyFileRange(args) => self.copy_file_range(call, args, false, reply),
            RequestBody::CopyFileRange64(args) => self.copy_file_range(call, args, true, reply),
            RequestBody::Syncfs(_) => self.syncfs(call, reply),
            // umount(2) of a `fuseblk` mount waits for the answer.
            RequestBody::Destroy if self.is_kernel => self.syncfs(call, reply),
            RequestBody::Destroy => send_success(Ok(()), reply),
            // A second INIT: the session has its agreement.
            RequestBody::Init(_) => Err(Errno::EIO),
            RequestBody::Compound { chain } => self.compound(call, chain, reply),
            // This is not a character device.
            RequestBody::CuseInit(_) => Err(Errno::ENOSYS),
            RequestBody::Setupmapping(args) => self.setupmapping(call, args, reply),
            RequestBody::Removemapping(items) => self.removemapping(call, *items, reply),
            // Handled where they are received, without an answer.
            RequestBody::Forget(_)
            | RequestBody::BatchForget(_)
            | RequestBody::Interrupt(_)
            | RequestBody::NotifyReply { .. } => Err(Errno::EINVAL),
        }
    }

    /// FORGET and BATCH_FORGET.
    pub(crate) fn forget(&self, request: &DecodedRequest<'_>) {
        let forget = |nodeid: u64, lookups: u64| {
            if nodeid != abi::FUSE_ROOT_ID {
                if let Some(backings) = &self.backings {
                    backings.forget(Ino(nodeid));
                }
                self.give_back(Ino(nodeid), lookups);
            }
        };
        let run = || match request.body {
            RequestBody::Forget(args) => forget(request.nodeid, args.nlookup),
            RequestBody::BatchForget(items) => {
                items.for_each(|item| forget(item.nodeid, item.nlookup))
            }
            _ => {}
        };
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            log::error!("the file system panicked while forgetting an inode");
        }
    }

    /// Takes back lookups that the client does not hold.
    fn give_back(&self, ino: Ino, lookups: u64) {
        if let Some(inodes) = &self.inodes {
            inodes.forget(ino, lookups);
        }
        self.fs.forget(ino, lookups);
    }

    /// The part of a reply with which the client holds one lookup more.
    fn entry_out(&self, entry: &Entry) -> abi::EntryOut {
        if let Some(inodes) = &self.inodes {
            inodes.record(entry.ino);
        }
        self.timeouts_of(entry.ino).entry_out(entry)
    }

    /// Drops the backing files that were kept for reuse and were not used.
    pub(crate) fn trim(&self) {
        if let Some(backings) = &self.backings {
            backings.trim();
        }
        self.tell(|lifecycle| lifecycle.trim());
    }

    /// Releases caches, because memory is short.
    pub(crate) fn memory_pressure(&self) {
        self.tell(|lifecycle| lifecycle.memory_pressure());
    }

    /// The answer to an IOCTL was sent.
    pub(crate) fn finish_ioctl(&self) {
        let run = || self.memory.as_ref().map(|memory| memory.finish_ioctl());
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            log::error!("the file system panicked after it had answered");
        }
    }

    fn tell(&self, event: impl FnOnce(&dyn Lifecycle)) {
        let run = || self.fs.lifecycle().map(event);
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            log::error!("the file system panicked while it released what it keeps");
        }
    }

    /// NOTIFY_REPLY: the answer of the page cache to a RETRIEVE. `reply` holds the data where the
    /// transport has left it in its pipe.
    pub(crate) fn notify_reply(
        &self,
        unique: u64,
        data: &RequestPayload<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<()> {
        let bytes = data::take_data(data, reply)?;
        self.notify.deliver_retrieved(unique, bytes);
        Ok(())
    }

    /// The part of the storage that the thread of `request` would wait for, as far as the file
    /// system knows. Requests that are answered later hold no thread.
    pub(crate) fn failure_domain(&self, request: &DecodedRequest<'_>) -> Option<FailureDomain> {
        match request.body {
            RequestBody::Read(_) | RequestBody::Write { .. } | RequestBody::Fsync(_)
                if self.submits() =>
            {
                None
            }
            RequestBody::Setlkw(_) => None,
            _ => {
                let name = child_of(&request.body);
                let ask = || self.fs.failure_domain(Ino(request.nodeid), name);
                catch_unwind(AssertUnwindSafe(ask)).unwrap_or_default()
            }
        }
    }

    /// Ends the wait of a deferred request. False where `unique` is not one.
    pub(crate) fn interrupt_deferred(&self, unique: u64) -> bool {
        let token = self.deferred.get(unique);
        token.map(|token| token.trip()).is_some()
    }

    /// Ends the waits of all deferred requests, also of those that begin later: the session is
    /// over.
    pub(crate) fn interrupt_all_deferred(&self) {
        self.deferred.end();
    }
}

/// Returns the name in the directory of a request that the request is about, unless the request
/// makes or removes a directory.
fn child_of<'a>(body: &RequestBody<'a>) -> Option<Name<'a>> {
    let (RequestBody::Lookup { name }
    | RequestBody::Symlink { name, .. }
    | RequestBody::Mknod { name, .. }
    | RequestBody::Create { name, .. }
    | RequestBody::Unlink { name }
    | RequestBody::Link { name, .. }
    | RequestBody::Rename { name, .. }
    | RequestBody::Rename2 { name, .. }) = *body
    else {
        return None;
    };
    Name::new(name).ok()
}

/// Sends success without a body.
fn send_success(result: Result<()>, reply: &mut dyn RequestReply) -> Result<HandlerOutcome> {
    result?;
    let _ = reply.send_errno(0);
    Ok(HandlerOutcome::Sent)
}

/// Sends one structure. It grants nothing, so an undelivered reply does not matter.
fn pod<T: IntoBytes + Immutable>(reply: &mut dyn RequestReply, body: &T) -> Result<HandlerOutcome> {
    let _ = reply.send(&[body.as_bytes()]);
    Ok(HandlerOutcome::Sent)
}
