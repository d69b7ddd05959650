//! The sandbox of a daemon: after mounting, it drops privileges and system calls that no request needs.
//!
//! A bug in the daemon then gives an attacker no more than the file system and the mount need.
//! `-o no_sandbox` keeps everything.

mod filter;

pub use filter::Needs;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

/// The capabilities that stay: to act on files as any user (a directory), to register backing files,
/// unmount and abort the connection (`CAP_SYS_ADMIN`), to lock the memory of rings, and to assume and drop
/// the identity of callers (`CAP_SETPCAP` for `SECBIT_NO_SETUID_FIXUP`).
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::LEASE)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::MAC_ADMIN);

/// Drops all other capabilities, for this thread and those that it starts. Executed programs gain no
/// privileges (`no_new_privs`, prctl(2)) and have no capabilities (the bounding set, capabilities(7)). A
/// failure is a warning.
pub fn enter() {
    let given_up = set_no_new_privs(true).and_then(|()| {
        let caps = capabilities(None)?;
        // The first unknown capability ends the set.
        for number in 0..u64::BITS {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            if remove_capability_from_bounding_set(capability).is_err() {
                break;
            }
        }
        let kept = CapabilitySets {
            effective: caps.effective & KEPT,
            permitted: caps.permitted & KEPT,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, kept)
    });
    if let Err(errno) = given_up {
        log::warn!("not all privileges were dropped: {errno}");
    }
}

/// Installs the filter of system calls for all threads. Comes last, because the filter also refuses calls
/// that mounting and starting a session need.
pub fn filter(needs: Needs) {
    if let Err(error) = filter::install(needs) {
        log::warn!("no system calls are refused (seccomp): {error}");
    }
}
