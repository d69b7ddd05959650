//! System calls that containers refuse: those that the default profile of Docker leaves out for a
//! process without added capabilities, profiles/seccomp/default.json of moby, since version 25,
//! which leaves out io_uring(7).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Is, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// Refused with `EPERM`, whatever their arguments.
const REFUSED: &[i64] = &[
    // Rings.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // For CAP_SYS_ADMIN.
    libc::SYS_bpf,
    libc::SYS_fanotify_init,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    // For other capabilities.
    libc::SYS_open_by_handle_at,
    libc::SYS_reboot,
    libc::SYS_delete_module,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_acct,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_process_madvise,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_vhangup,
    libc::SYS_get_mempolicy,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    // Calls that no container may make.
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_pivot_root,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_userfaultfd,
];

/// Refused calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[
    libc::SYS__sysctl,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[];

/// The calls that are newer than an older profile: it refuses them with `EPERM`, too, and not with
/// `ENOSYS`.
const NEWER: std::ops::Range<i64> = 451..480;

/// Flags of clone(2) that make name spaces.
const NAME_SPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Refuses these calls to the calling thread and to all that it starts and executes.
///
/// # Errors
///
/// Fails if the kernel refuses the filter.
pub(super) fn refuse() -> Result<()> {
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let all = REFUSED.iter().chain(REFUSED_HERE).copied().chain(NEWER);
    let mut refused: ContainerRules = all.map(|number| (number, Vec::new())).collect();
    let first = |is, value: u64| -> Result<SeccompRule> {
        let condition = SeccompCondition::new(0, Width::Dword, is, value)?;
        Ok(SeccompRule::new(vec![condition])?)
    };
    let new = |flag: &i32| {
        let flag = u64::from(*flag as u32);
        first(Is::MaskedEq(flag), flag)
    };
    let spaces: Result<Vec<SeccompRule>> = NAME_SPACES.iter().map(new).collect();
    refused.insert(libc::SYS_clone, spaces?);
    refused.insert(libc::SYS_socket, vec![first(Is::Eq, libc::AF_VSOCK as u64)?]);
    // The default personality, the personalities of 32 bits and of uname 2.6, and a question.
    let mut other = Vec::new();
    for allowed in [0, 8, 0x2_0000, 0x2_0008, 0xffff_ffff] {
        other.push(SeccompCondition::new(0, Width::Dword, Is::Ne, allowed)?);
    }
    refused.insert(libc::SYS_personality, vec![SeccompRule::new(other)?]);
    install(refused, libc::EPERM, target)?;
    // A C library that hears of no clone3(2) takes clone(2), whose flags a filter can read.
    install(ContainerRules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS, target)
}

type ContainerRules = BTreeMap<i64, Vec<SeccompRule>>;

fn install(refused: ContainerRules, errno: i32, target: TargetArch) -> Result<()> {
    let refuse = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(refused, SeccompAction::Allow, refuse, target)?;
    let program: BpfProgram = filter.try_into()?;
    apply_filter(&program).context("seccomp")
}
