//! The state of this process: its mounts, its open files, and who it is.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use defuse_direct::{Arena, Client, Credentials, Mount, Options, Place, Protected, Task};
use defuse_fs::{Errno, FileSystem};
use defuse_preload_plan::{ForkPolicy, Inherited, Plan};

use crate::machine::sys;
use crate::process::{
    compose, compose::Relay, exec_state::Connection, shared::Shared, table::Table,
};

/// A mount of the plan.
pub struct Mounted {
    /// What a fork does to it.
    pub fork: ForkPolicy,
    /// Where it is.
    pub target: Vec<u8>,
    /// The way to the process that has it, where there is one.
    pub relay: Option<Arc<Relay>>,
    /// It itself.
    pub mount: Arc<Mount>,
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// Its files have descriptors that the kernel can read and write.
    pub backs: bool,
}

/// What every process has of its own. No child shares our memory: see [`crate::process::fork`].
pub struct View {
    /// Who asks, and from where, but for threads with credentials of their own.
    task: Task,
    /// Descriptors.
    pub table: Table,
}

/// What a program of a run has beside its own state.
pub struct Process {
    /// Everything inside of mounts.
    pub client: Client,
    /// What this process has of its own.
    view: View,
    /// The mounts, in the plan's order.
    pub mounts: Vec<Mounted>,
    /// What all processes have in common.
    pub shared: Shared,
    /// The descriptors that lead from one program of the run to the next.
    pub inherited: Inherited,
    /// The plan.
    pub plan: Plan,
    /// Descriptors from here on are ours and not the program's.
    pub floor: i32,
    /// The limit of descriptors that the program believes in.
    pub limit: AtomicU32,
    /// An `O_PATH` descriptor, of which placeholders are duplicates.
    pub placeholder: AtomicI32,
    /// The process that this state belongs to.
    pub pid: AtomicI32,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// The state; `None` before it is there, and in programs that no run started.
#[inline]
pub fn get() -> Option<&'static Process> {
    let process = PROCESS.load(Ordering::Acquire);
    // SAFETY: it is null, or what `install` leaked.
    unsafe { process.as_ref() }
}

/// Makes `process` the state, for good.
pub fn install(process: Process) -> &'static Process {
    let process = Box::leak(Box::new(process));
    PROCESS.store(process, Ordering::Release);
    process
}

/// This process.
pub fn pid() -> i32 {
    sys::plain(libc::SYS_getpid, 0, 0, 0).unwrap_or(0) as i32
}

/// How many numbers we take for ourselves.
const ZONE: u64 = 4096;
/// Where our descriptors begin at most: the kernel copies a table up to the largest number at every
/// fork, which at sixteen thousand takes half as long again.
const HIGHEST: u64 = 3072;

/// Where our own descriptors begin, and the limit that the program is to see.
///
/// The program's numbers have to be those that it would get without us, so ours lie above. The soft
/// limit is raised for them where the hard one lets us; otherwise the program gets fewer. All programs
/// of a process begin them at one number, the `floor` of the first, whatever limit they set: what one
/// leaves to the next lies there.
pub fn raise_limit(told: Option<u32>, floor: Option<u64>) -> (u64, u64) {
    let mut limit: libc::rlimit = sys::zeroed();
    let args = [0, libc::RLIMIT_NOFILE as u64, 0, &raw mut limit as u64, 0, 0];
    // SAFETY: prlimit64 fills the record.
    let _ = unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) };
    let seen = told.map_or(limit.rlim_cur, u64::from);
    let floor = floor.unwrap_or(seen.min(HIGHEST));
    if limit.rlim_max >= floor + ZONE {
        let new = libc::rlimit { rlim_cur: limit.rlim_cur.max(floor + ZONE), ..limit };
        let args = [0, libc::RLIMIT_NOFILE as u64, &raw const new as u64, 0, 0, 0];
        // SAFETY: prlimit64 reads the record.
        let _ = unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) };
        return (floor, seen);
    }
    let room = limit.rlim_max.saturating_sub(floor);
    let floor = if room >= 512 { floor } else { limit.rlim_max * 3 / 4 };
    (floor, seen.min(floor))
}

/// A duplicate of `fd` among our own numbers, closed at exec or not.
pub fn keep_above(fd: i32, floor: i32, cloexec: bool) -> Result<i32, Errno> {
    let how = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    Ok(sys::plain(libc::SYS_fcntl, fd as u64, how as u64, floor as u64)? as i32)
}

/// Closes one of our own descriptors.
pub fn close(fd: i32) {
    let _ = sys::plain(libc::SYS_close, fd as u64, 0, 0);
}

impl Process {
    /// The state for `plan`: all its mounts are there afterwards. The error is for people.
    pub fn new(
        shared: Shared,
        plan: Plan,
        inherited: Inherited,
        limits: (u64, u64),
        connections: Vec<Connection>,
    ) -> Result<Self, String> {
        let (floor, limit) = limits;
        let arena: Arc<dyn Arena> = Arc::new(shared);
        let [symlinks, hardlinks, regular] = plan.protected;
        let protected = Protected { symlinks: symlinks > 0, hardlinks: hardlinks > 0, regular };
        let (arena, protected) = (Some(arena), Some(protected));
        let client = Client::new(Options { arena, protected, ..Options::default() });
        let mut mounts = Vec::new();
        let mut connections: Vec<_> = connections.into_iter().map(Some).collect();
        for (place, mount) in plan.mounts.iter().enumerate() {
            let mut own = connections.iter_mut();
            let own = own.find(|own| own.as_ref().is_some_and(|own| own.mount == place));
            let target = String::from_utf8_lossy(&mount.target).into_owned();
            let failed = |why: String| format!("cannot mount {target}: {why}");
            let sockets = &inherited.sockets;
            let composed = compose::open(mount, sockets, floor as u32, own.and_then(Option::take));
            let composed = composed.map_err(failed)?;
            let backs = composed.fs.caps().backing_files;
            let fs = Arc::clone(&composed.fs);
            let made = client.mount(&mount.target, composed.fs, &composed.args);
            let made = made.map_err(|errno| failed(errno.to_string()))?;
            mounts.push(Mounted {
                relay: composed.relay,
                backs,
                fork: composed.fork,
                target: mount.target.clone(),
                mount: made,
                fs,
            });
        }
        let task = task().ok_or("who this is cannot be told")?;
        let placeholder = placeholder(floor as i32).map_err(|errno| format!("/: {errno}"))?;
        Ok(Process {
            client,
            view: View { task, table: Table::default() },
            mounts,
            shared,
            inherited,
            plan,
            floor: floor as i32,
            limit: AtomicU32::new(limit.min(u64::from(u32::MAX)) as u32),
            placeholder: AtomicI32::new(placeholder),
            pid: AtomicI32::new(pid()),
        })
    }

    /// What this process has of its own.
    #[inline]
    pub fn view(&'static self) -> &'static View {
        &self.view
    }

    /// This process is a child with memory of its own from now on: after fork(2).
    pub fn adopt(&'static self) {
        self.pid.store(pid(), Ordering::Relaxed);
        crate::process::holders::in_child(&self.shared, self.inherited.memory, self.floor);
        if let Some(leash) = self.inherited.leash {
            crate::process::leash::bind(leash, self.floor);
        }
        for mount in &self.mounts {
            if let Some(Err(why)) = mount.relay.as_ref().map(|relay| relay.follow_fork()) {
                crate::catch::start::say(&format!(
                    "{}: {why}: files of it cannot be used in this child",
                    String::from_utf8_lossy(&mount.target)
                ));
            }
        }
        // What the parent has for itself alone.
        self.mounts.iter().filter(|mount| mount.relay.is_none()).for_each(|mount| mount.fs.trim());
        // The credentials are those of the thread that made it.
        let pid = self.pid.load(Ordering::Relaxed) as u32;
        self.view.task.set_pid(pid);
        // SAFETY: as in `task`.
        if let Some(own) = unsafe { OWN.get().as_ref() } {
            own.set_pid(pid);
        }
    }

    /// The place of `mount` in the plan.
    pub fn place_of(&self, mount: &Arc<Mount>) -> Option<usize> {
        self.mounts.iter().position(|mounted| Arc::ptr_eq(&mounted.mount, mount))
    }

    /// A mount whose state neither a child nor another program would have.
    pub fn lost(&self) -> Option<&Mounted> {
        self.mounts.iter().find(|mount| mount.fork == ForkPolicy::Deny)
    }

    /// Whether `fd` is one of our own.
    #[inline]
    pub fn is_reserved(&self, fd: i32) -> bool {
        let may_be = fd >= self.floor && fd < self.floor + ZONE as i32;
        may_be
            && !self.view.table.has(fd)
            && (self.inherited.sockets.contains(&fd)
                || self.inherited.leash == Some(fd)
                || crate::process::leash::is_own(fd)
                || is_of_a_kind_with_ours(fd))
    }

    /// Who asks on this thread, and from where.
    #[inline]
    pub fn task(&'static self) -> &'static Task {
        if CHANGES.load(Ordering::Acquire) != SEEN.get() {
            self.look_at_credentials();
        }
        // SAFETY: it is null, or the task that `look_at_credentials` made for this thread, which
        // lives until the thread ends; what is made of it here is used by this thread alone.
        unsafe { OWN.get().as_ref() }.unwrap_or(&self.view.task)
    }

    /// Takes note of what this thread may do now. The kernel has credentials for every thread; the C
    /// library sees to it that all threads of a process change theirs together, so that most never
    /// differ.
    #[cold]
    fn look_at_credentials(&'static self) {
        SEEN.set(CHANGES.load(Ordering::Acquire));
        let Some(now) = credentials() else { return };
        // SAFETY: as in `task`.
        match unsafe { OWN.get().as_ref() } {
            Some(own) => own.set_credentials(now),
            None if now == *self.view.task.credentials() => {}
            None => OWN.set(Box::into_raw(Box::new(self.view.task.with_credentials(now)))),
        }
    }

    /// The kernel's working directory becomes the program's.
    pub fn outside(&'static self) {
        if let Some(path) = kernel_cwd() {
            self.task().set_cwd(Place::Outside(path));
        }
    }
}

fn kernel_cwd() -> Option<Vec<u8>> {
    let mut room = [0u8; 4096];
    let args = [room.as_mut_ptr() as u64, room.len() as u64, 0, 0, 0, 0];
    // SAFETY: getcwd fills the room.
    let len = sys::check(unsafe { sys::syscall(libc::SYS_getcwd as u64, &args) }).ok()?;
    Some(room[..(len as usize).checked_sub(1)?].to_vec())
}

/// Who this process is as it begins, with one thread.
fn task() -> Option<Task> {
    let cwd = kernel_cwd().unwrap_or_else(|| b"/".to_vec());
    let task = Task::new(credentials()?, Place::Outside(cwd));
    // There is no other way to ask for it but a file of /proc, which takes a hundred times as long.
    let umask = sys::plain(libc::SYS_umask, 0o077, 0, 0).ok()?;
    let _ = sys::plain(libc::SYS_umask, umask as u64, 0, 0);
    task.set_umask(umask as u32);
    let mut limit: libc::rlimit = sys::zeroed();
    let args = [0, libc::RLIMIT_FSIZE as u64, 0, &raw mut limit as u64, 0, 0];
    // SAFETY: prlimit64 fills the record.
    let told = sys::check(unsafe { sys::syscall(libc::SYS_prlimit64 as u64, &args) });
    let is_limited = told.is_ok() && limit.rlim_cur != libc::RLIM_INFINITY;
    task.set_file_size_limit(is_limited.then_some(limit.rlim_cur));
    Some(task)
}

/// Whether a descriptor is of a kind of which we have some. A program that has so many that they lie
/// among our own has mostly sockets, pipes, and what polls them: those are its own.
#[cold]
fn is_of_a_kind_with_ours(fd: i32) -> bool {
    let mut stat: libc::stat = sys::zeroed();
    let args = [fd as u64, &raw mut stat as u64, 0, 0, 0, 0];
    // SAFETY: the kernel fills the structure.
    if sys::check(unsafe { sys::syscall(libc::SYS_fstat as u64, &args) }).is_err() {
        return false;
    }
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFDIR => true,
        // To a process that has a file system for us.
        libc::S_IFSOCK => {
            let option = |name: i32| {
                let (mut value, mut len) = (0i32, 4u32);
                let (value_at, len_at) = (&raw mut value as u64, &raw mut len as u64);
                let args = [fd as u64, libc::SOL_SOCKET as u64, name as u64, value_at, len_at, 0];
                // SAFETY: the kernel writes four bytes, and how many these were.
                let got = unsafe { sys::syscall(libc::SYS_getsockopt as u64, &args) };
                (got == 0).then_some(value)
            };
            option(libc::SO_DOMAIN) == Some(libc::AF_UNIX)
                && option(libc::SO_TYPE) == Some(libc::SOCK_SEQPACKET)
        }
        _ => false,
    }
}

/// How often a thread of this process has changed its credentials: each looks at its own when it
/// sees another number than before.
static CHANGES: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static SEEN: Cell<u32> = const { Cell::new(0) };
    /// The task of a thread whose credentials differed once from those of the process.
    static OWN: Cell<*const Task> = const { Cell::new(std::ptr::null()) };
}

/// After a call that changes the credentials of its thread.
pub fn credentials_changed() {
    CHANGES.fetch_add(1, Ordering::AcqRel);
}

/// At the end of this thread.
pub fn end_of_thread() {
    let own = OWN.replace(std::ptr::null()).cast_mut();
    // One that comes back looks again.
    SEEN.set(0);
    if !own.is_null() {
        // SAFETY: `look_at_credentials` made it by `Box::into_raw`, and nobody else has the address;
        // no call is under way on this thread.
        drop(unsafe { Box::from_raw(own) });
    }
}

/// Those of this thread, credentials(7), by which the kernel decides about files: of the file-system
/// ids, which setfsuid(2) sets.
fn credentials() -> Option<Credentials> {
    let three = |call: i64| {
        let mut ids = [0u32; 3];
        let at = ids.as_mut_ptr();
        let args = [at as u64, at.wrapping_add(1) as u64, at.wrapping_add(2) as u64, 0, 0, 0];
        // SAFETY: getresuid(2) and getresgid(2) write three numbers.
        sys::check(unsafe { sys::syscall(call as u64, &args) }).ok().map(|_| ids)
    };
    let (uids, gids) = (three(libc::SYS_getresuid)?, three(libc::SYS_getresgid)?);
    // Of what is no id, these calls change nothing and say what is set.
    let present = |call| sys::plain(call, u64::from(u32::MAX), 0, 0).ok().map(|id| id as u32);
    let count = sys::plain(libc::SYS_getgroups, 0, 0, 0).ok()?;
    let mut groups = vec![0u32; count as usize];
    let room = [groups.len() as u64, groups.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes as many groups as there is room for.
    sys::check(unsafe { sys::syscall(libc::SYS_getgroups as u64, &room) }).ok()?;
    const VERSION_3: u64 = 0x2008_0522;
    let (header, mut caps) = ([VERSION_3, 0], [[0u32; 3]; 2]);
    let args = [header.as_ptr() as u64, caps.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel reads a version and a process (0: this thread), and writes two records.
    sys::check(unsafe { sys::syscall(libc::SYS_capget as u64, &args) }).ok()?;
    Some(Credentials {
        uid: present(libc::SYS_setfsuid)?,
        gid: present(libc::SYS_setfsgid)?,
        real_uid: uids[0],
        real_gid: gids[0],
        groups: groups.into(),
        caps: u64::from(caps[0][0]) | u64::from(caps[1][0]) << 32,
        pid: pid() as u32,
    })
}

fn placeholder(floor: i32) -> Result<i32, Errno> {
    let flags = (libc::O_PATH | libc::O_CLOEXEC | libc::O_DIRECTORY) as u64;
    let args = [libc::AT_FDCWD as u64, c"/".as_ptr() as u64, flags, 0, 0, 0];
    // SAFETY: the path is a string.
    let fd = sys::check(unsafe { sys::syscall(libc::SYS_openat as u64, &args) })? as i32;
    let kept = keep_above(fd, floor, true);
    close(fd);
    kept
}
