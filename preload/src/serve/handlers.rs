//! The function that serves each system call.

use std::sync::OnceLock;

use crate::process::table::DescriptorEntry;
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::{
    attributes, cwd, data, descriptors, directory, exec, names, open, path, poll, rings, sockets,
    watch, xattrs,
};

/// The way in which a call is served.
#[derive(Clone, Copy)]
pub enum CallHandler {
    /// By the descriptor in its first argument, if that is a file of a mount.
    Fd(NativeAccess, fn(&ProgramCall<'_>, &DescriptorEntry) -> CallResult),
    /// By anything else; the function passes on calls that do not concern a mount.
    Any(fn(&ProgramCall<'_>) -> CallResult),
}

/// The descriptors for which the kernel serves a call.
#[derive(Clone, Copy)]
pub enum NativeAccess {
    Never,
    /// Descriptors that have the file's bytes.
    Bytes,
    /// Descriptors that are the file itself.
    File,
}

impl NativeAccess {
    /// True if the kernel serves the call for this descriptor.
    #[inline]
    pub fn has(self, entry: &DescriptorEntry) -> bool {
        match self {
            NativeAccess::Never => false,
            NativeAccess::Bytes => entry.backed,
            NativeAccess::File => entry.is_file_itself,
        }
    }
}

/// Serves rt_sigaction(2). It is registered before the program begins; until then the kernel has
/// the call.
pub static SIGACTION: OnceLock<fn(&ProgramCall<'_>) -> CallResult> = OnceLock::new();

fn sigaction(call: &ProgramCall<'_>) -> CallResult {
    SIGACTION.get().map_or(Err(CallFailure::Pass), |serve| serve(call))
}

/// How the call of this number is served; `None` for one that is always the kernel's.
#[inline]
pub fn handler(number: u64) -> Option<CallHandler> {
    use CallHandler::{Any, Fd};
    use NativeAccess::{Bytes, File, Never};
    Some(match number as i64 {
        libc::SYS_read => Fd(Bytes, data::read),
        libc::SYS_write => Fd(Bytes, data::write),
        libc::SYS_pread64 => Fd(Bytes, data::pread),
        libc::SYS_pwrite64 => Fd(Bytes, data::pwrite),
        libc::SYS_readv => Fd(Bytes, data::readv),
        libc::SYS_writev => Fd(Bytes, data::writev),
        libc::SYS_preadv => Fd(Bytes, data::preadv),
        libc::SYS_pwritev => Fd(Bytes, data::pwritev),
        libc::SYS_preadv2 => Fd(Bytes, data::preadv2),
        libc::SYS_pwritev2 => Fd(Bytes, data::pwritev2),
        libc::SYS_lseek => Fd(Bytes, data::lseek),
        libc::SYS_readahead | libc::SYS_fadvise64 => Fd(Bytes, data::advise),
        libc::SYS_sync_file_range => Fd(Bytes, data::sync),
        libc::SYS_sendfile => Any(data::sendfile),
        libc::SYS_copy_file_range => Any(data::copy_file_range),
        libc::SYS_splice => Any(data::splice),
        libc::SYS_tee | libc::SYS_vmsplice => Fd(Bytes, data::refuse_pipe),
        libc::SYS_ftruncate => Fd(File, data::ftruncate),
        libc::SYS_fallocate => Fd(File, data::fallocate),
        libc::SYS_fsync | libc::SYS_fdatasync => Fd(File, data::sync),
        libc::SYS_syncfs => Fd(Never, data::syncfs),
        libc::SYS_sync => Any(data::sync_all),
        libc::SYS_mmap => Any(data::mmap),
        libc::SYS_rt_sigaction => Any(sigaction),
        libc::SYS_munmap => Any(data::munmap),
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => Any(data::mprotect),
        libc::SYS_mremap => Any(data::mremap),
        libc::SYS_msync => Any(data::msync),
        libc::SYS_io_setup => Any(data::asynchronous),
        libc::SYS_io_uring_setup => Any(rings::setup),
        libc::SYS_io_uring_register => Any(rings::register),
        libc::SYS_ioctl => Fd(Bytes, data::ioctl),
        libc::SYS_flock => Fd(Bytes, data::flock),

        libc::SYS_open => Any(open::open),
        libc::SYS_creat => Any(open::creat),
        libc::SYS_openat => Any(open::openat),
        libc::SYS_openat2 => Any(open::openat2),
        libc::SYS_close => Any(descriptors::close),
        libc::SYS_close_range => Any(descriptors::close_range),
        libc::SYS_dup => Fd(Never, descriptors::dup),
        libc::SYS_dup2 => Any(descriptors::dup2),
        libc::SYS_dup3 => Any(descriptors::dup3),
        libc::SYS_fcntl => Fd(Never, descriptors::fcntl),
        libc::SYS_prlimit64 => Any(descriptors::prlimit),
        libc::SYS_getrlimit | libc::SYS_setrlimit => Any(descriptors::rlimit),

        libc::SYS_stat | libc::SYS_lstat => Any(attributes::stat),
        libc::SYS_newfstatat => Any(attributes::fstatat),
        libc::SYS_fstat => Fd(Never, attributes::fstat),
        libc::SYS_statx => Any(attributes::statx),
        libc::SYS_statfs => Any(attributes::statfs),
        libc::SYS_fstatfs => Fd(Never, attributes::fstatfs),
        libc::SYS_access => Any(attributes::access),
        libc::SYS_faccessat | libc::SYS_faccessat2 => Any(attributes::faccessat),
        libc::SYS_chmod => Any(attributes::chmod),
        libc::SYS_fchmod => Fd(File, attributes::fchmod),
        libc::SYS_fchmodat | 452 => Any(attributes::fchmodat),
        libc::SYS_chown | libc::SYS_lchown => Any(attributes::chown),
        libc::SYS_fchown => Fd(File, attributes::fchown),
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

        libc::SYS_getdents64 => Fd(Never, directory::getdents64),
        libc::SYS_getdents => Fd(Never, directory::getdents),

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
        libc::SYS_unshare | libc::SYS_setns => Any(cwd::namespaces),

        libc::SYS_setxattr..=libc::SYS_fremovexattr => Any(xattrs::serve_xattr_call),

        // setxattrat(2) and its kin, and file_getattr(2) and file_setattr(2).
        463..=466 | 468 | 469 => Any(path::refuse_unknown),

        libc::SYS_poll | libc::SYS_ppoll => Any(poll::poll),
        libc::SYS_select | libc::SYS_pselect6 => Any(poll::select),
        libc::SYS_epoll_ctl => Any(poll::epoll_ctl),

        libc::SYS_bind => Any(sockets::bind),
        libc::SYS_connect => Any(sockets::connect),

        libc::SYS_execve | libc::SYS_execveat => Any(exec::exec),
        libc::SYS_exit_group => Any(exec::exit),

        libc::SYS_seccomp | libc::SYS_prctl => Any(exec::filter),

        libc::SYS_inotify_add_watch => Any(watch::add),
        libc::SYS_fanotify_mark | libc::SYS_name_to_handle_at => Any(path::refuse_unsupported),
        libc::SYS_mount | libc::SYS_umount2 => Any(path::refuse_unsupported),
        _ => return None,
    })
}
