//! Locks of clients that are alive and cannot answer.
//!
//! The end of a client is known at once, since its connection ends. A client that is stopped (by a
//! signal, a debugger, or a frozen control group) keeps its connection and its locks. If a waiter
//! has waited for one of these locks for a limit, and all processes that share the lock were
//! stopped during that time, the lock is released, and the next call of each gets `EIO`.
//!
//! A process that runs or sleeps keeps its locks, as POSIX requires, however long it takes. So no
//! client has to send signs of life, and a program needs no thread for them. A stopped client holds
//! up others in no other way: its requests run without it, and its memory can be taken away at any
//! time.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use defuse_fs::{Caller, Context, Errno, FileSystem, Ino, LockRequest, Result};

use crate::credentials::PeerCredentials;
use crate::ledger::{ConnectionLedger, LockHolder};
use crate::usage::ClientHoldings;

/// A process, as its kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    /// Its user.
    pub uid: u32,
    /// The time of its start. Together with the number it identifies the process for ever.
    pub start: u64,
    /// Its name.
    pub name: String,
    /// True if none of its threads can run until the process is continued.
    pub is_stopped: bool,
}

/// The caller of a connection for several processes, such as a kernel with a mount.
const MANY: u32 = u32::MAX;

/// The client of a connection.
pub(crate) struct WatchedClient {
    pub(crate) who: Arc<PeerCredentials>,
    pub(crate) ledger: Arc<ConnectionLedger>,
    /// The process that makes the calls: 0 if it is not known yet, [`MANY`] if there are several.
    caller: AtomicU32,
    /// The client has lost a lock, and no call has reported it yet.
    has_lost: AtomicBool,
    /// The number of locks that the client has lost.
    lost: AtomicU64,
}

impl WatchedClient {
    pub(crate) fn new(
        who: Arc<PeerCredentials>,
        ledger: Arc<ConnectionLedger>,
    ) -> Arc<WatchedClient> {
        // The process that connects may do so for its child.
        let (caller, has_lost) = (AtomicU32::new(0), AtomicBool::new(false));
        Arc::new(WatchedClient { who, ledger, caller, has_lost, lost: AtomicU64::new(0) })
    }

    fn lose(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.has_lost.store(true, Ordering::Relaxed);
    }

    /// True until its next call after it has lost a lock.
    pub(crate) fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// Returns the objects that the client holds, and the locks that it has lost.
    pub(crate) fn holdings(&self) -> ClientHoldings {
        ClientHoldings {
            locks_lost: self.lost.load(Ordering::Relaxed),
            ..self.ledger.usage.holdings()
        }
    }

    /// Records that a process makes a call. `EIO` once after the client has lost a lock.
    pub(crate) fn calls(&self, pid: u32) -> Result<()> {
        let before = self.caller.load(Ordering::Relaxed);
        if before != pid && before != MANY && pid != 0 {
            self.caller.store(if before == 0 { pid } else { MANY }, Ordering::Relaxed);
        }
        if self.has_lost.load(Ordering::Relaxed) && self.has_lost.swap(false, Ordering::Relaxed) {
            return Err(Errno::EIO);
        }
        Ok(())
    }
}

/// The clients of a file system, and their waits for locks.
#[derive(Default)]
pub(crate) struct LockWatch {
    clients: Mutex<Vec<Weak<WatchedClient>>>,
    waits: Mutex<HashMap<u64, WatchedWait>>,
    next: AtomicU64,
    /// Locks that were released.
    released: AtomicU64,
    /// The time since which a process was stopped at every check.
    stopped: Mutex<HashMap<(u32, u64), Instant>>,
}

struct WatchedWait {
    ino: Ino,
    /// The request, with the owner's number in the file system.
    request: LockRequest,
    since: Instant,
}

impl LockWatch {
    pub(crate) fn add(&self, client: &Arc<WatchedClient>) {
        let mut clients = lock(&self.clients);
        clients.retain(|one| one.strong_count() > 0);
        clients.push(Arc::downgrade(client));
    }

    /// The number of locks that were released since the beginning.
    pub(crate) fn count_released(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }

    /// Records that a wait for a lock begins.
    pub(crate) fn wait(&self, ino: Ino, request: LockRequest, since: Instant) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.waits).insert(number, WatchedWait { ino, request, since });
        number
    }

    /// A wait has ended.
    pub(crate) fn end_wait(&self, number: u64) {
        lock(&self.waits).remove(&number);
    }

    /// Implements [`ServiceState::release_stopped`](crate::ServiceState::release_stopped).
    pub(crate) fn release(
        &self,
        fs: &dyn FileSystem,
        (limit, now): (Duration, Instant),
        look: &dyn Fn(u32) -> Option<ProcessStatus>,
    ) -> usize {
        let waits: Vec<(Ino, LockRequest, Instant)> =
            lock(&self.waits).values().map(|one| (one.ino, one.request, one.since)).collect();
        let mut stopped = lock(&self.stopped);
        let before = std::mem::take(&mut *stopped);
        if waits.is_empty() {
            return 0;
        }
        let clients: Vec<Arc<WatchedClient>> =
            lock(&self.clients).iter().filter_map(Weak::upgrade).collect();
        let mut released = 0;
        for (ino, request, since) in waits {
            for (client, holder) in holders(&clients, ino, &request) {
                let sharing = find_sharing(&clients, client, &holder);
                let Some(all) = StoppedProcesses::find_all(&sharing, client, &holder, look) else {
                    continue;
                };
                let seen = all.0.iter().map(|(pid, process)| {
                    let key = (*pid, process.start);
                    *stopped.entry(key).or_insert(before.get(&key).copied().unwrap_or(now))
                });
                // From then on, all have been stopped and a waiter has waited.
                let from = seen.fold(since, Instant::max);
                let in_time = now.saturating_duration_since(from) < limit;
                if in_time || !client.ledger.lose(fs, &holder) {
                    continue;
                }
                released += 1;
                self.released.fetch_add(1, Ordering::Relaxed);
                sharing.iter().for_each(|one| one.lose());
                let file = describe_file(fs, ino, &sharing);
                log::warn!(
                    "{all} lost its lock on {file}: others have waited for it for {limit:?}"
                );
            }
        }
        released
    }
}

/// Returns the locks that conflict with a request, with the clients that have them.
fn holders<'a>(
    clients: &'a [Arc<WatchedClient>],
    ino: Ino,
    request: &LockRequest,
) -> Vec<(&'a Arc<WatchedClient>, LockHolder)> {
    let of = |client: &'a Arc<WatchedClient>| {
        let holders = client.ledger.holders(ino, request);
        holders.into_iter().map(move |holder| (client, holder))
    };
    clients.iter().flat_map(of).collect()
}

/// All clients that share a lock.
fn find_sharing<'a>(
    clients: &'a [Arc<WatchedClient>],
    own: &WatchedClient,
    holder: &LockHolder,
) -> Vec<&'a Arc<WatchedClient>> {
    let shares = |one: &&Arc<WatchedClient>| holder.is_shared_with(&own.ledger, &one.ledger);
    clients.iter().filter(shares).collect()
}

/// The path by which one of `sharing` found a file, and the number that `find -inum` takes.
pub(crate) fn describe_file(
    fs: &dyn FileSystem,
    ino: Ino,
    sharing: &[&Arc<WatchedClient>],
) -> String {
    let attr = fs.getattr(&Context::new(Caller::default()), ino, None);
    let number = attr.map_or(ino.0, |attr| attr.st_ino);
    let known = |one: &&Arc<WatchedClient>| one.ledger.paths.as_ref()?.path_of(ino);
    match sharing.iter().find_map(known) {
        // A client may have chosen the name.
        Some(path) => {
            format!("{} (inode {number})", String::from_utf8_lossy(&path).escape_debug())
        }
        None => format!("inode {number}"),
    }
}

/// Processes that are all stopped.
struct StoppedProcesses(Vec<(u32, ProcessStatus)>);

impl StoppedProcesses {
    /// Returns all processes that share a lock. `None` if one of them runs, or is not known.
    fn find_all(
        sharing: &[&Arc<WatchedClient>],
        own: &WatchedClient,
        holder: &LockHolder,
        look: &dyn Fn(u32) -> Option<ProcessStatus>,
    ) -> Option<StoppedProcesses> {
        let mut pids = Vec::new();
        for client in sharing {
            match client.caller.load(Ordering::Relaxed) {
                0 => return None,
                // Of several processes, the one with a record lock is known.
                MANY if !holder.is_of_process() || holder.pid == 0 => return None,
                MANY => pids.push(holder.pid),
                pid => pids.push(pid),
            }
        }
        pids.sort_unstable();
        pids.dedup();
        let all = pids.into_iter().map(|pid| look(pid).map(|process| (pid, process)));
        let all: Vec<_> = all.collect::<Option<_>>()?;
        // A client names its processes itself. It may have named a process of another user.
        let counts = |process: &ProcessStatus| own.who.is_root() || process.uid == own.who.uid;
        let stopped = |(_, process): &(u32, ProcessStatus)| process.is_stopped && counts(process);
        (!all.is_empty() && all.iter().all(stopped)).then_some(StoppedProcesses(all))
    }
}

impl std::fmt::Display for StoppedProcesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (nth, (pid, process)) in self.0.iter().enumerate() {
            let and = if nth > 0 { ", and " } else { "" };
            let ProcessStatus { name, uid, .. } = process;
            // A process names itself.
            let name = name.escape_debug();
            write!(f, "{and}process {pid} ({name}) of user {uid}, which is stopped,")?;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
