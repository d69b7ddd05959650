//! The core: whether a system call concerns a mount, and what it does there.

mod attributes;
mod cwd;
mod data;
mod descriptors;
mod directory;
mod exec;
pub mod handover;
mod mappings;
mod names;
pub mod nodes;
mod open;
mod path;
mod poll;
mod rings;
mod sockets;
pub mod spawn;
mod watch;
mod xattrs;

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_direct::{Client, Stop, Task};
use defuse_fs::Errno;

use crate::machine::{
    inside::{self, Inside},
    sys,
};
use crate::process::{
    shared::Fate,
    state::{self, Process},
    table::{Entry, Table},
};

pub use cwd::go_to;
pub use data::is_regular;
pub use open::kernel_path;

/// Why a call was not served.
pub enum Fail {
    /// It failed.
    Errno(Errno),
    /// The kernel is to do it, with other paths.
    Outside(defuse_direct::Outside),
    /// The kernel is to do another call, which may block.
    Kernel(Box<ByKernel>),
    /// The kernel is to do the call on the lower open file of an entry. It may block.
    Lower(Arc<Entry>, Option<libc::flock>),
    /// The kernel is to do it as it is.
    Pass,
}

/// A call for the kernel.
pub struct ByKernel {
    /// Which call.
    pub number: i64,
    /// Its arguments, but for the second.
    pub args: [u64; 6],
    /// The second argument.
    pub path: CString,
    /// What stays open until the call has returned.
    pub held: Option<crate::serve::nodes::Held>,
    /// A descriptor that comes of it stands for this.
    pub entry: Option<Arc<Entry>>,
}

impl From<ByKernel> for Fail {
    fn from(call: ByKernel) -> Self {
        Fail::Kernel(Box::new(call))
    }
}

impl From<Errno> for Fail {
    fn from(errno: Errno) -> Self {
        Fail::Errno(errno)
    }
}

impl From<Stop> for Fail {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Errno(errno) => Fail::Errno(errno),
            Stop::Outside(outside) => Fail::Outside(outside),
        }
    }
}

/// What a call returns, or why it was not served.
pub type Served = Result<i64, Fail>;

/// A call of the program.
pub struct Call<'a> {
    /// This process.
    pub process: &'static Process,
    /// Which call.
    pub number: u64,
    /// Its arguments.
    pub args: &'a [u64; 6],
}

impl Call<'_> {
    /// The client.
    pub fn client(&self) -> &'static Client {
        &self.process.client
    }

    /// Who asks.
    pub fn task(&self) -> &'static Task {
        self.process.task()
    }

    /// The descriptors.
    pub fn table(&self) -> &'static Table {
        &self.process.view().table
    }

    /// The argument `at` as a C `int`.
    pub fn int(&self, at: usize) -> i32 {
        self.args[at] as i32
    }

    /// The argument `at` as a length; no call moves more than `MAX_RW_COUNT`.
    pub fn len(&self, at: usize) -> usize {
        (self.args[at] as usize).min(0x7fff_f000)
    }

    /// The open file at the descriptor in argument `at`.
    pub fn entry(&self, at: usize) -> Option<Arc<Entry>> {
        self.table().get(self.int(at)).and_then(|found| (*found).clone())
    }

    /// The kernel does the call as it is.
    pub fn kernel(&self) -> i64 {
        sys::pass(self.number, self.args)
    }
}

/// How often a call begins anew whose names lead to something else meanwhile.
const TRIES: usize = 8;

/// How a call is looked at.
#[derive(Clone, Copy)]
enum Handler {
    /// By the descriptor in its first argument, where that is ours. With `true` it moves data and
    /// the like, which the kernel does by itself where the descriptor has the bytes.
    Fd(bool, fn(&Call<'_>, &Entry) -> Served),
    /// By anything else; it passes on what is not ours.
    Any(fn(&Call<'_>) -> Served),
}

/// Serves a call; `None` where the kernel is to do it.
#[inline]
pub fn call(number: u64, args: &[u64; 6]) -> Option<i64> {
    let process = state::get()?;
    if crate::process::fork::is_new_child() {
        inside::alone();
        let _inside = Inside::enter();
        process.adopt();
        // How it was made is not known.
        state::credentials_changed();
    }
    let Some(handler) = handler(number) else {
        if process.plan.report {
            note_missed(process, number, args);
        }
        return None;
    };
    if inside::is_inside() {
        return None;
    }
    if rings::are_in_use() {
        rings::forget_closed(process, number, args);
    }
    let served = match handler {
        Handler::Fd(native, run) => by_descriptor(process, (number, args), native, run),
        Handler::Any(run) => {
            let call = Call { process, number, args };
            let inside = Inside::enter()?;
            let mut result = run(&call);
            if matches!(result, Err(Fail::Errno(Errno::ESTALE))) {
                result = walk_again(&call, run);
            }
            drop(inside);
            finish(&call, result)
        }
    };
    if process.plan.report {
        let fate = if served.is_some() { Fate::Served } else { Fate::Passed };
        process.shared.count(number, fate);
    }
    served
}

/// A call whose file another process removed after its names were walked. From the beginning, as the
/// kernel does it, and a few times more, because it is as fast as the other process.
#[cold]
fn walk_again(call: &Call<'_>, run: fn(&Call<'_>) -> Served) -> Served {
    let mut result = Err(Fail::Errno(Errno::ESTALE));
    for _ in 0..TRIES {
        call.client().forget_names();
        result = run(call);
        if !matches!(result, Err(Fail::Errno(Errno::ESTALE))) {
            break;
        }
    }
    result
}

/// A call that nothing here serves: where it names a descriptor of ours, the kernel refuses it, and
/// that is told.
#[cold]
fn note_missed(process: &'static Process, number: u64, args: &[u64; 6]) {
    if is_missed(process, number, args) {
        process.shared.count(number, Fate::Missed);
    }
}

fn is_missed(process: &'static Process, number: u64, args: &[u64; 6]) -> bool {
    let known = u16::try_from(number).is_ok_and(|n| defuse_preload_plan::calls::name(n).is_some());
    known && handler(number).is_none() && process.view().table.has(args[0] as i32)
}

/// Counts a call once more, by the place that it came from: the trampoline that goes on at `from`.
#[cold]
pub fn count_site(number: u64, args: &[u64; 6], from: u64, served: bool) {
    let Some(process) = state::get() else { return };
    let Some(site) = crate::catch::patch::site_of(from) else { return };
    let fate = match served {
        true => Fate::Served,
        false if is_missed(process, number, args) => Fate::Missed,
        false => Fate::Passed,
    };
    process.shared.count_site(site, fate);
}

#[inline]
fn by_descriptor(
    process: &'static Process,
    (number, args): (u64, &[u64; 6]),
    native: bool,
    run: fn(&Call<'_>, &Entry) -> Served,
) -> Option<i64> {
    let found = process.view().table.get(args[0] as i32)?;
    let entry = found.as_ref()?;
    if native && entry.backed {
        return None;
    }
    let call = Call { process, number, args };
    let inside = Inside::enter()?;
    let result = run(&call, entry);
    drop(inside);
    finish(&call, result)
}

/// Tells people once why files cannot be used any more: their server is gone.
#[cold]
fn tell_of_the_dead(process: &'static Process) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_dead = |mount: &&state::Mounted| mount.relay.as_ref().is_some_and(|r| r.is_dead());
    let Some(mount) = process.mounts.iter().find(is_dead) else { return };
    if !TOLD.swap(true, Ordering::Relaxed) {
        crate::catch::start::say(&format!(
            "{}: the process that served it has ended, and its files are gone for this program: start \
             it anew",
            String::from_utf8_lossy(&mount.target)
        ));
    }
}

/// The kernel's answer for a result; `None` where the kernel is to do it as it is.
fn finish(call: &Call<'_>, result: Served) -> Option<i64> {
    match result {
        Ok(value) => Some(value),
        Err(Fail::Errno(errno)) => {
            if errno == Errno::ENOTCONN {
                tell_of_the_dead(call.process);
            }
            Some(sys::failure(errno))
        }
        Err(Fail::Pass) => None,
        Err(Fail::Outside(outside)) => path::kernel(call, outside),
        // A signal has come before the call could wait, and nothing else would end that.
        Err(Fail::Kernel(..) | Fail::Lower(..)) if crate::catch::signals::waits() => {
            Some(sys::failure(Errno::EINTR))
        }
        Err(Fail::Lower(entry, lock)) => Some(on_lower(call, &entry, lock)),
        Err(Fail::Kernel(by_kernel)) => {
            let ByKernel { number, mut args, path, held, entry } = *by_kernel;
            args[1] = path.as_ptr() as u64;
            let value = sys::pass(number as u64, &args);
            drop(held);
            Some(match entry {
                Some(entry) if value >= 0 => open::took(call, value as i32, entry),
                _ => value,
            })
        }
    }
}

/// The call as the kernel does it on the lower open file, with `lock` in its third argument.
fn on_lower(call: &Call<'_>, entry: &Entry, mut lock: Option<libc::flock>) -> i64 {
    let Some(lower) = &entry.lower else { return sys::failure(Errno::EBADF) };
    let mut args = *call.args;
    args[0] = lower.as_raw_fd() as u64;
    if let Some(lock) = &mut lock {
        args[2] = std::ptr::from_mut(lock) as u64;
    }
    sys::pass(call.number, &args)
}

#[inline]
fn handler(number: u64) -> Option<Handler> {
    use Handler::{Any, Fd};
    Some(match number as i64 {
        libc::SYS_read => Fd(true, data::read),
        libc::SYS_write => Fd(true, data::write),
        libc::SYS_pread64 => Fd(true, data::pread),
        libc::SYS_pwrite64 => Fd(true, data::pwrite),
        libc::SYS_readv => Fd(true, data::readv),
        libc::SYS_writev => Fd(true, data::writev),
        libc::SYS_preadv => Fd(true, data::preadv),
        libc::SYS_pwritev => Fd(true, data::pwritev),
        libc::SYS_preadv2 => Fd(true, data::preadv2),
        libc::SYS_pwritev2 => Fd(true, data::pwritev2),
        libc::SYS_lseek => Fd(true, data::lseek),
        libc::SYS_readahead | libc::SYS_fadvise64 => Fd(true, data::advise),
        libc::SYS_sync_file_range => Fd(true, data::sync),
        libc::SYS_sendfile => Any(data::sendfile),
        libc::SYS_copy_file_range => Any(data::copy_file_range),
        libc::SYS_splice => Any(data::splice),
        libc::SYS_tee | libc::SYS_vmsplice => Fd(true, data::no_pipe),
        libc::SYS_ftruncate => Fd(false, data::ftruncate),
        libc::SYS_fallocate => Fd(false, data::fallocate),
        libc::SYS_fsync | libc::SYS_fdatasync => Fd(false, data::sync),
        libc::SYS_syncfs => Fd(false, data::syncfs),
        libc::SYS_mmap => Any(data::mmap),
        libc::SYS_rt_sigaction => Any(crate::catch::signals::action),
        libc::SYS_munmap => Any(data::munmap),
        libc::SYS_mremap => Any(data::mremap),
        libc::SYS_msync => Any(data::msync),
        libc::SYS_io_setup => Any(data::asynchronous),
        libc::SYS_io_uring_setup => Any(rings::setup),
        libc::SYS_io_uring_register => Any(rings::register),
        libc::SYS_ioctl => Fd(true, data::ioctl),
        libc::SYS_flock => Fd(true, data::flock),

        libc::SYS_open => Any(open::open),
        libc::SYS_creat => Any(open::creat),
        libc::SYS_openat => Any(open::openat),
        libc::SYS_openat2 => Any(open::openat2),
        libc::SYS_close => Any(descriptors::close),
        libc::SYS_close_range => Any(descriptors::close_range),
        libc::SYS_dup => Fd(false, descriptors::dup),
        libc::SYS_dup2 => Any(descriptors::dup2),
        libc::SYS_dup3 => Any(descriptors::dup3),
        libc::SYS_fcntl => Fd(false, descriptors::fcntl),
        libc::SYS_prlimit64 => Any(descriptors::prlimit),
        libc::SYS_getrlimit | libc::SYS_setrlimit => Any(descriptors::rlimit),

        libc::SYS_stat | libc::SYS_lstat => Any(attributes::stat),
        libc::SYS_newfstatat => Any(attributes::fstatat),
        libc::SYS_fstat => Fd(false, attributes::fstat),
        libc::SYS_statx => Any(attributes::statx),
        libc::SYS_statfs => Any(attributes::statfs),
        libc::SYS_fstatfs => Fd(false, attributes::fstatfs),
        libc::SYS_access => Any(attributes::access),
        libc::SYS_faccessat | libc::SYS_faccessat2 => Any(attributes::faccessat),
        libc::SYS_chmod => Any(attributes::chmod),
        libc::SYS_fchmod => Fd(false, attributes::fchmod),
        libc::SYS_fchmodat | 452 => Any(attributes::fchmodat),
        libc::SYS_chown | libc::SYS_lchown => Any(attributes::chown),
        libc::SYS_fchown => Fd(false, attributes::fchown),
        libc::SYS_fchownat => Any(attributes::fchownat),
        libc::SYS_utime => Any(attributes::utime),
        libc::SYS_utimes => Any(attributes::utimes),
        libc::SYS_futimesat => Any(attributes::futimesat),
        libc::SYS_utimensat => Any(attributes::utimensat),
        libc::SYS_truncate => Any(attributes::truncate),
        libc::SYS_umask => Any(cwd::umask),

        libc::SYS_mkdir | libc::SYS_mkdirat => Any(names::mkdir),
        libc::SYS_mknod | libc::SYS_mknodat => Any(names::mknod),
        libc::SYS_rmdir | libc::SYS_unlink | libc::SYS_unlinkat => Any(names::unlink),
        libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => Any(names::rename),
        libc::SYS_link | libc::SYS_linkat => Any(names::link),
        libc::SYS_symlink | libc::SYS_symlinkat => Any(names::symlink),
        libc::SYS_readlink | libc::SYS_readlinkat => Any(names::readlink),

        libc::SYS_getdents64 => Fd(false, directory::getdents64),
        libc::SYS_getdents => Fd(false, directory::getdents),

        libc::SYS_chdir => Any(cwd::chdir),
        libc::SYS_fchdir => Any(cwd::fchdir),
        libc::SYS_getcwd => Any(cwd::getcwd),
        libc::SYS_chroot => Any(cwd::chroot),
        libc::SYS_setuid..=libc::SYS_setgid
        | libc::SYS_setreuid
        | libc::SYS_setregid
        | libc::SYS_setgroups
        | libc::SYS_setresuid
        | libc::SYS_setresgid
        | libc::SYS_setfsuid
        | libc::SYS_setfsgid
        | libc::SYS_capset => Any(cwd::credentials),

        libc::SYS_setxattr..=libc::SYS_fremovexattr => Any(xattrs::any),

        libc::SYS_poll | libc::SYS_ppoll => Any(poll::poll),
        libc::SYS_select | libc::SYS_pselect6 => Any(poll::select),
        libc::SYS_epoll_ctl => Any(poll::epoll_ctl),

        libc::SYS_bind => Any(sockets::bind),
        libc::SYS_connect => Any(sockets::connect),

        libc::SYS_execve | libc::SYS_execveat => Any(exec::exec),
        libc::SYS_exit_group => Any(exec::exit),

        libc::SYS_seccomp | libc::SYS_prctl => Any(exec::filter),

        libc::SYS_inotify_add_watch => Any(watch::add),
        libc::SYS_fanotify_mark | libc::SYS_name_to_handle_at => Any(path::unsupported),
        libc::SYS_mount | libc::SYS_umount2 => Any(path::unsupported),
        _ => return None,
    })
}
