//! The state of a process that calls depend on: credentials, umask, limits, working directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use arc_swap::{ArcSwap, Guard};
use defuse_fs::{Caller, Context, Errno, LockOwner, Origin, OwnerCapability, SupplementaryGroups};

use crate::credentials::{TaskCredentials, cap};
use crate::work_dir::WorkDir;

/// A process, or a thread with its own credentials. Every call takes one. Changes take effect with
/// the next call, and reading takes no lock.
#[derive(Debug)]
pub struct ClientTask {
    credentials: ArcSwap<TaskCredentials>,
    uid: AtomicU32,
    gid: AtomicU32,
    pid: AtomicU32,
    keeps_suid: AtomicBool,
    process: Arc<TaskProcess>,
}

/// The state that all threads of a process share.
#[derive(Debug)]
struct TaskProcess {
    umask: AtomicU32,
    file_size_limit: AtomicU64,
    cwd: ArcSwap<WorkDir>,
}

impl ClientTask {
    /// Creates a task with these credentials and working directory, the umask 022, and no file size
    /// limit.
    pub fn new(credentials: TaskCredentials, cwd: WorkDir) -> Self {
        let process = TaskProcess {
            umask: AtomicU32::new(0o022),
            file_size_limit: AtomicU64::new(u64::MAX),
            cwd: ArcSwap::from_pointee(cwd),
        };
        ClientTask::from_parts(credentials, Arc::new(process))
    }

    /// Creates a task for a thread of this process with its own `credentials`. Umask, limit and
    /// working directory remain shared.
    pub fn with_credentials(&self, credentials: TaskCredentials) -> Self {
        ClientTask::from_parts(credentials, Arc::clone(&self.process))
    }

    fn from_parts(credentials: TaskCredentials, process: Arc<TaskProcess>) -> Self {
        let task = ClientTask {
            credentials: ArcSwap::from_pointee(credentials.clone()),
            uid: AtomicU32::new(0),
            gid: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            keeps_suid: AtomicBool::new(false),
            process,
        };
        task.set_credentials(credentials);
        task
    }

    /// The current state of this process: credentials, umask (from `/proc/self/status`, or 022 if
    /// that fails), `RLIMIT_FSIZE` and working directory.
    pub fn for_this_process() -> Result<Self, Errno> {
        let cwd = std::env::current_dir().map_err(Errno::from)?;
        let cwd = std::os::unix::ffi::OsStringExt::into_vec(cwd.into_os_string());
        let task = ClientTask::new(TaskCredentials::read_calling_thread()?, WorkDir::Outside(cwd));
        task.set_umask(process_umask().unwrap_or(0o022));
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
        task.set_file_size_limit(limit.current);
        Ok(task)
    }

    /// Replaces the credentials.
    pub fn set_credentials(&self, credentials: TaskCredentials) {
        self.uid.store(credentials.uid, Relaxed);
        self.gid.store(credentials.gid, Relaxed);
        self.pid.store(credentials.pid, Relaxed);
        self.keeps_suid.store(credentials.has(cap::FSETID), Relaxed);
        self.credentials.store(Arc::new(credentials));
    }

    /// Sets the process id after fork(2), and keeps the credentials. It allocates nothing.
    pub fn set_pid(&self, pid: u32) {
        self.pid.store(pid, Relaxed);
    }

    /// The current credentials.
    pub fn credentials(&self) -> Arc<TaskCredentials> {
        let known = self.credentials.load_full();
        let pid = self.pid.load(Relaxed);
        if known.pid == pid {
            return known;
        }
        let own = Arc::new(TaskCredentials { pid, ..(*known).clone() });
        // If another thread has replaced the credentials meanwhile, its value stays.
        self.credentials.compare_and_swap(&known, Arc::clone(&own));
        own
    }

    /// The current credentials, for one call. It takes no reference count, which the threads of a
    /// process share.
    pub(crate) fn current_credentials(&self) -> Guard<Arc<TaskCredentials>> {
        let known = self.credentials.load();
        if known.pid == self.pid.load(Relaxed) {
            known
        } else {
            Guard::from_inner(self.credentials())
        }
    }

    /// The umask, 0 to 0o777.
    pub fn umask(&self) -> u32 {
        self.process.umask.load(Relaxed)
    }

    /// Sets the umask and returns the previous one, umask(2).
    pub fn set_umask(&self, umask: u32) -> u32 {
        self.process.umask.swap(umask & 0o777, Relaxed)
    }

    /// Maximum file size in bytes. Calls that exceed it fail with `EFBIG`; the caller then sends
    /// `SIGXFSZ`.
    pub fn file_size_limit(&self) -> Option<u64> {
        Some(self.process.file_size_limit.load(Relaxed)).filter(|&limit| limit != u64::MAX)
    }

    /// Sets the file size limit, `RLIMIT_FSIZE`; `None` for unlimited.
    pub fn set_file_size_limit(&self, limit: Option<u64>) {
        self.process.file_size_limit.store(limit.unwrap_or(u64::MAX), Relaxed);
    }

    /// The working directory.
    pub fn cwd(&self) -> Arc<WorkDir> {
        self.process.cwd.load_full()
    }

    /// Calls `run` with the working directory. It takes no reference count.
    pub(crate) fn with_cwd<T>(&self, run: impl FnOnce(&WorkDir) -> T) -> T {
        run(&self.process.cwd.load())
    }

    /// Replaces the working directory. [`DirectClient::chdir`](crate::DirectClient::chdir) does the
    /// checks.
    pub fn set_cwd(&self, place: WorkDir) {
        self.process.cwd.store(Arc::new(place));
    }

    /// The caller as file systems see it. Takes no lock and no reference count.
    #[inline]
    pub(crate) fn caller(&self) -> Caller {
        Caller {
            uid: self.uid.load(Relaxed),
            gid: self.gid.load(Relaxed),
            pid: self.pid.load(Relaxed),
        }
    }

    /// The context of an operation of this task.
    #[inline]
    pub(crate) fn context(&self, origin: Origin) -> Context<'_> {
        Context::new(self.caller()).with_groups(self).from_origin(origin)
    }

    /// True if writing does not clear the set-user-id bit.
    #[inline]
    pub(crate) fn keeps_suid(&self) -> bool {
        self.keeps_suid.load(Relaxed)
    }

    /// The owner of the record locks of this process.
    pub(crate) fn lock_owner(&self) -> LockOwner {
        LockOwner::for_process(self.pid.load(Relaxed))
    }

    pub(crate) fn raw_file_size_limit(&self) -> u64 {
        self.process.file_size_limit.load(Relaxed)
    }
}

fn process_umask() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(line.trim(), 8).ok()
}

impl SupplementaryGroups for ClientTask {
    fn are_known(&self) -> bool {
        true
    }

    fn groups_of(&self, caller: Caller) -> Result<Vec<u32>, Errno> {
        self.credentials().groups_of(caller)
    }

    fn has_capability(&self, caller: Caller, number: OwnerCapability, owner: (u32, u32)) -> bool {
        self.credentials().has_capability(caller, number, owner)
    }
}
