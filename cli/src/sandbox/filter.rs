//! The filter of system calls of a daemon, seccomp(2).
//!
//! The filter lists the calls that a daemon never needs and refuses them with EPERM. All others
//! stay allowed: a list of allowed calls would have to follow the C library, the kernel and the
//! kinds of sources, and a missing call would fail for users. A call by a convention other than
//! this program (32-bit calls) ends the process.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Is,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter_all_threads,
    sock_filter,
};

/// The calls that a daemon still needs when the filter is in force.
#[derive(Clone, Copy, Debug, Default)]
pub struct FilterNeeds {
    /// Open files by handles, open_by_handle_at(2): for a source in a directory.
    pub handles: bool,
    /// Create rings: for a session over io_uring, and for a source that does its own I/O by
    /// it. The operations of a ring pass no filter.
    pub rings: bool,
    /// Connect to other machines: sockets of the Internet, for a source that is there.
    pub network: bool,
    /// Unmount, umount2(2): for every mount, not for a server.
    pub unmounts: bool,
}

/// Calls that a serving daemon never needs.
pub const NEVER: &[i64] = &[
    // Other programs and processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // The kernel's code, and ways into it.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_personality,
    libc::SYS_lookup_dcookie,
    libc::SYS_nfsservctl,
    libc::SYS_syslog,
    // Mounts and name spaces.
    libc::SYS_mount,
    libc::SYS_open_tree,
    OPEN_TREE_ATTR,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    // The machine.
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
];

/// Linux 6.15; libc has no name for it. The number is the same on all architectures.
const OPEN_TREE_ATTR: i64 = 467;

/// Calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
pub const OF_THE_MACHINE: &[i64] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
    libc::SYS__sysctl,
];
#[cfg(not(target_arch = "x86_64"))]
pub const OF_THE_MACHINE: &[i64] = &[];

/// Flags of clone(2) that give the new thread a name space of its own.
const NAME_SPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Installs the filter for all threads of this process, and for those that they start. Sets
/// `no_new_privs`, without which only root may install a filter (seccomp(2)).
///
/// # Errors
///
/// A message: unsupported machine, no seccomp in this kernel, or no permission.
pub fn install(needs: FilterNeeds) -> Result<(), String> {
    let target = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| error.to_string())?;
    let refused =
        program(make_rules(needs), libc::EPERM, target).map_err(|error| error.to_string())?;
    // Its flags are in memory, where no filter sees them. The C library then uses clone(2).
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let absent = program(Ok(clone3), libc::ENOSYS, target).map_err(|error| error.to_string())?;
    for program in [refuse_x32(refused), absent] {
        apply_filter_all_threads(&program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The only calls of a keeper: to read orders and the list of mounts, to unmount, to write and
/// remove files, and what memory, threads and the C library need for that.
const OF_KEEPER: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_fcntl,
    libc::SYS_fchmod,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_syncfs,
    libc::SYS_umount2,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// The calls of a keeper that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const OF_KEEPER_HERE: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OF_KEEPER_HERE: &[i64] = &[];

/// Refuses all calls to all threads of this process but the calls of a keeper.
///
/// # Errors
///
/// Fails with the errors of [`install`].
pub fn install_for_keeper() -> Result<(), String> {
    let target = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| error.to_string())?;
    let allowed: FilterRules =
        OF_KEEPER.iter().chain(OF_KEEPER_HERE).map(|number| (*number, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(allowed, refuse, SeccompAction::Allow, target);
    let program: Result<BpfProgram, _> = filter.and_then(TryInto::try_into);
    let program = program.map_err(|error| error.to_string())?;
    apply_filter_all_threads(&program).map_err(|error| error.to_string())
}

/// The refused calls. Each is refused if one of its conditions holds, or always if it has none.
type FilterRules = BTreeMap<i64, Vec<SeccompRule>>;

fn make_rules(needs: FilterNeeds) -> Result<FilterRules, BackendError> {
    let mut refused: FilterRules =
        NEVER.iter().chain(OF_THE_MACHINE).map(|number| (*number, Vec::new())).collect();
    let depends = [
        (needs.handles, &[libc::SYS_open_by_handle_at][..]),
        (needs.rings, &[libc::SYS_io_uring_setup, libc::SYS_io_uring_register]),
        (needs.rings, &[libc::SYS_io_uring_enter]),
        (needs.unmounts, &[libc::SYS_umount2]),
    ];
    for (_, numbers) in depends.iter().filter(|(needed, _)| !needed) {
        refused.extend(numbers.iter().map(|number| (*number, Vec::new())));
    }
    let internet: &[i32] = if needs.network { &[libc::AF_INET, libc::AF_INET6] } else { &[] };
    refused.insert(libc::SYS_socket, vec![match_other_families(internet)?]);
    // A thread with a umask and a working directory of its own.
    refused.insert(libc::SYS_unshare, vec![match_first_argument(Is::Ne, libc::CLONE_FS)?]);
    // Threads, and nothing else.
    let thread = libc::CLONE_THREAD as u64;
    let mut clone = vec![match_first_argument(Is::MaskedEq(thread), 0)?];
    for flag in NAME_SPACES {
        clone.push(match_first_argument(Is::MaskedEq(u64::from(flag as u32)), flag)?);
    }
    refused.insert(libc::SYS_clone, clone);
    Ok(refused)
}

/// A condition on the lower half of the first argument: an `int`, or flags of 32 bits.
fn match_first_argument(is: Is, value: i32) -> Result<SeccompRule, BackendError> {
    let value = u64::from(value as u32);
    SeccompRule::new(vec![SeccompCondition::new(0, Width::Dword, is, value)?])
}

/// Sockets of any family but `AF_UNIX` and `others`.
fn match_other_families(others: &[i32]) -> Result<SeccompRule, BackendError> {
    let other =
        |family: &i32| SeccompCondition::new(0, Width::Dword, Is::Ne, u64::from(*family as u32));
    let families = std::iter::once(&libc::AF_UNIX).chain(others);
    SeccompRule::new(families.map(other).collect::<Result<_, _>>()?)
}

/// Refuses the calls of `rules` with `errno`, and allows all others.
fn program(
    rules: Result<FilterRules, BackendError>,
    errno: i32,
    target: TargetArch,
) -> Result<BpfProgram, BackendError> {
    let refuse = SeccompAction::Errno(errno as u32);
    SeccompFilter::new(rules?, SeccompAction::Allow, refuse, target)?.try_into()
}

/// The filter, which goes by numbers, after one for the calls of x32: the kernel treats them as
/// calls of x86-64 with other numbers (`__X32_SYSCALL_BIT`, asm/unistd.h).
fn refuse_x32(filter: BpfProgram) -> BpfProgram {
    if !cfg!(target_arch = "x86_64") {
        return filter;
    }
    const X32: u32 = 0x4000_0000;
    // Numbers of linux/bpf_common.h: load the number of the call; is it at least X32?; answer.
    let load = sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };
    let compare = sock_filter { code: 0x35, jt: 0, jf: 1, k: X32 };
    let refuse = u32::from(SeccompAction::Errno(libc::EPERM as u32));
    let answer = sock_filter { code: 0x06, jt: 0, jf: 0, k: refuse };
    [load, compare, answer].into_iter().chain(filter).collect()
}
