//! What a daemon gives up once it has mounted: privileges and system calls that no request needs.
//!
//! A mistake in the daemon, or in what it parses, then leads no further than to what its file system
//! and its mount need. `-o no_sandbox` leaves everything as it was.

mod filter;

pub use filter::Needs;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

/// What stays: to act on files as any user (a passthrough), to register backing files, to unmount and to
/// abort the connection (`CAP_SYS_ADMIN`), to fill rings with locked memory, and to take on and put away
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

/// Gives up what is not kept, for this thread and those that it starts: programs that are executed
/// gain nothing (`no_new_privs`, prctl(2)), and have no capabilities (the bounding set,
/// capabilities(7)). What cannot be given up is a warning.
pub fn enter() {
    let given_up = set_no_new_privs(true).and_then(|()| {
        let caps = capabilities(None)?;
        // The set ends where the kernel knows no further capability.
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
        log::warn!("not all privileges were given up: {errno}");
    }
}

/// Has the kernel refuse what is not needed, for all threads. Comes last, because it also refuses what it
/// takes to mount and to set a session up.
pub fn filter(needs: Needs) {
    if let Err(error) = filter::install(needs) {
        log::warn!("no system calls are refused (seccomp): {error}");
    }
}
