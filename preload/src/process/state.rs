//! The state of this process: its mounts, its open files, and who it is.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use defuse_direct::{
    CellArena, ClientMount, ClientOptions, ClientTask, DirectClient, LinkProtection, WorkDir,
};
use defuse_fs::{Errno, FileSystem};
use defuse_preload_plan::{ForkPolicy, InheritedDescriptors, ProgramPlan};

use crate::machine::descriptors::{close, keep_above};
use crate::machine::message::write_line;
use crate::machine::{pid, sys};
use crate::process::compose::{InheritedConnection, RelayFileSystem};
use crate::process::run_memory::RunMemory;
use crate::process::table::{DescriptorEntry, EntryTable};
use crate::process::{compose, credentials, holders, run_lifetime, user_namespace, zone};

/// A mount of the plan.
pub struct RunMount {
    /// How it survives a fork.
    pub fork: ForkPolicy,
    /// Its path.
    pub target: Vec<u8>,
    /// The connection to the process that serves it; `None` if this process does.
    pub relay: Option<Arc<RelayFileSystem>>,
    /// The mount as the client knows it.
    pub mount: Arc<ClientMount>,
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// True if the run that served it had ended when this program began.
    pub is_gone: bool,
    /// True if its files have descriptors that the kernel can read and write.
    pub backs: bool,
}

/// The state of one process. No child shares our memory: see [`crate::process::fork`].
pub struct ProcessView {
    /// The task of all threads but those with credentials of their own.
    task: ClientTask,
    /// Descriptors.
    pub table: EntryTable,
}

/// The state of the library in a program of a run.
pub struct RunProcess {
    /// The in-process client, which serves all calls inside of mounts.
    pub client: DirectClient,
    /// The state of this process.
    view: ProcessView,
    /// The mounts, in the plan's order.
    pub mounts: Vec<RunMount>,
    /// The memory that all processes of the run share.
    pub shared: RunMemory,
    /// The descriptors that lead from one program of the run to the next.
    pub inherited: InheritedDescriptors,
    /// The plan.
    pub plan: ProgramPlan,
    /// Descriptors from here on are ours and not the program's.
    pub floor: i32,
    /// The limit of descriptors that the program believes in.
    pub limit: AtomicU32,
    /// An `O_PATH` descriptor, of which placeholders are duplicates.
    pub placeholder: AtomicI32,
}

static PROCESS: AtomicPtr<RunProcess> = AtomicPtr::new(std::ptr::null_mut());

/// The state; `None` before it is there, and in programs that no run started.
#[inline]
pub fn get() -> Option<&'static RunProcess> {
    let process = PROCESS.load(Ordering::Acquire);
    // SAFETY: it is null, or what `install` leaked.
    unsafe { process.as_ref() }
}

/// Makes `process` the state, forever.
pub fn install(process: RunProcess) -> &'static RunProcess {
    let process = Box::leak(Box::new(process));
    PROCESS.store(process, Ordering::Release);
    process
}

impl RunProcess {
    /// The state for `plan`: all its mounts are there afterwards. The error is a message for users.
    pub fn new(
        shared: RunMemory,
        plan: ProgramPlan,
        inherited: InheritedDescriptors,
        limits: (u64, u64),
        connections: Vec<InheritedConnection>,
    ) -> Result<Self, String> {
        let (floor, limit) = limits;
        let path_changes = Some(shared.path_changes());
        let arena: Arc<dyn CellArena> = Arc::new(shared);
        let [symlinks, hardlinks, regular] = plan.protected;
        let protected =
            LinkProtection { symlinks: symlinks > 0, hardlinks: hardlinks > 0, regular };
        let (arena, protected) = (Some(arena), Some(protected));
        let client = DirectClient::new(ClientOptions {
            arena,
            protected,
            path_changes,
            ..ClientOptions::default()
        });
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
            mounts.push(RunMount {
                relay: composed.relay,
                is_gone: composed.is_gone,
                backs,
                fork: composed.fork,
                target: mount.target.clone(),
                mount: made,
                fs,
            });
        }
        let task =
            credentials::task_at_start().ok_or("the credentials of this process cannot be read")?;
        let placeholder = placeholder(floor as i32).map_err(|errno| format!("/: {errno}"))?;
        Ok(RunProcess {
            client,
            view: ProcessView { task, table: EntryTable::default() },
            mounts,
            shared,
            inherited,
            plan,
            floor: floor as i32,
            limit: AtomicU32::new(limit.min(u64::from(u32::MAX)) as u32),
            placeholder: AtomicI32::new(placeholder),
        })
    }

    /// The state of this process.
    #[inline]
    pub fn view(&'static self) -> &'static ProcessView {
        &self.view
    }

    /// Turns the state of a parent into the state of its child, after fork(2).
    pub fn adopt(&'static self) {
        let pid = pid::note() as u32;
        holders::begin_in_child(&self.shared, self.inherited.memory, self.floor);
        if let Some(leash) = self.inherited.leash {
            run_lifetime::bind(leash, self.floor);
        }
        for mount in &self.mounts {
            if let Some(Err(why)) = mount.relay.as_ref().map(|relay| relay.follow_fork()) {
                write_line(&format!(
                    "{}: {why}: files of it cannot be used in this child",
                    String::from_utf8_lossy(&mount.target)
                ));
            }
        }
        // The file systems that the parent has for itself alone.
        let own = self.mounts.iter().filter(|mount| mount.relay.is_none());
        own.filter_map(|mount| mount.fs.lifecycle()).for_each(|lifecycle| lifecycle.trim());
        // The credentials belong to the thread that made the child.
        self.view.task.set_pid(pid);
        credentials::set_pid(pid);
    }

    /// The place of `mount` in the plan.
    pub fn index_of(&self, mount: &Arc<ClientMount>) -> Option<usize> {
        self.mounts.iter().position(|mounted| Arc::ptr_eq(&mounted.mount, mount))
    }

    /// The connection to the process that serves the mount of `entry`; `None` if this process does.
    pub fn relay_of(&self, entry: &DescriptorEntry) -> Option<&Arc<RelayFileSystem>> {
        self.mounts[self.index_of(entry.file().mount())?].relay.as_ref()
    }

    /// The connections to processes that serve mounts.
    pub fn relays(&self) -> impl Iterator<Item = &RelayFileSystem> {
        self.mounts.iter().filter_map(|mount| mount.relay.as_deref())
    }

    /// A mount whose state neither a child nor the next program would have.
    pub fn find_unshared(&self) -> Option<&RunMount> {
        self.mounts.iter().find(|mount| mount.fork == ForkPolicy::Deny)
    }

    /// The paths of all mounts, for a message.
    pub fn targets(&self) -> String {
        let targets = self.mounts.iter().map(|mount| String::from_utf8_lossy(&mount.target));
        targets.collect::<Vec<_>>().join(", ")
    }

    /// True if `fd` is one of our own.
    #[inline]
    pub fn is_reserved(&self, fd: i32) -> bool {
        let may_be = fd >= self.floor && fd < self.floor + zone::LEN as i32;
        may_be
            && !self.view.table.has(fd)
            && !zone::is_of_program(self.floor, fd)
            && (self.inherited.sockets.contains(&fd)
                || self.inherited.leash == Some(fd)
                || run_lifetime::is_own(fd)
                || zone::is_of_a_kind_with_ours(fd))
    }

    /// The task of this thread: its credentials, and the working directory of the process.
    #[inline]
    pub fn task(&'static self) -> &'static ClientTask {
        credentials::task_of_thread(&self.view.task)
    }

    /// This process has entered another user namespace. In a run with a mount that this process
    /// serves itself, ids stay as they are.
    pub fn enter_user_namespace(&'static self) {
        if self.mounts.iter().all(|mount| mount.relay.is_some()) {
            let before = self.task().credentials();
            user_namespace::enter(before.uid, before.gid);
        }
        credentials::record_change();
    }

    /// The kernel's working directory becomes the program's.
    pub fn adopt_kernel_cwd(&'static self) {
        if let Some(path) = credentials::kernel_cwd() {
            self.task().set_cwd(WorkDir::Outside(path));
        }
    }
}

/// A call that goes past us may take a placeholder for a directory. Nothing can be made in this
/// one, by root neither; the root is one where there is no /proc.
fn placeholder(floor: i32) -> Result<i32, Errno> {
    let flags = (libc::O_PATH | libc::O_CLOEXEC | libc::O_DIRECTORY) as u64;
    let open = |path: &CStr| {
        let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags, 0, 0, 0];
        // SAFETY: the path is a string.
        sys::check(unsafe { sys::syscall(libc::SYS_openat as u64, &args) })
    };
    let fd = open(c"/proc/self/ns").or_else(|_| open(c"/"))? as i32;
    let kept = keep_above(fd, floor, true);
    close(fd);
    kept
}
