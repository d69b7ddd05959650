//! The state that a process inherits from the process that started it, and its treatment:
//! docs/daemons.md has the table.
//!
//! A daemon serves others than its starter, and for longer. So what limits or holds the starter
//! must not limit or hold it.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use defuse_fuse::process;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGCHLD, SIGXCPU, SIGXFSZ};

/// Signals that a starter may ignore or that would kill: the kernel reports what they mean by an
/// error of the call, or by the end of a child, as long as there is a handler.
const HANDLED: [i32; 3] = [SIGXFSZ, SIGXCPU, SIGCHLD];

/// Limits that are lifted completely where that is permitted: they count what others write and do.
const LIFTED: [(Resource, &str); 2] = [
    (Resource::Fsize, "file sizes (ulimit -f), in bytes"),
    (Resource::Cpu, "processor time (ulimit -t), in seconds"),
];

/// Limits that are raised to the maximum that the starter has permitted.
const RAISED: [Resource; 5] =
    [Resource::Nofile, Resource::As, Resource::Data, Resource::Memlock, Resource::Nproc];

/// Gives up what this process, a daemon, a server or a helper of one, has from its starter. Comes
/// first, before there are other threads. Returns notes for the user about limits that stay.
pub fn give_up() -> Vec<String> {
    process::unblock_signals();
    for signal in HANDLED {
        // The handler sets a flag that is never read.
        if let Err(error) = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))) {
            log::warn!("signal {signal} is not handled: {error}");
        }
    }
    RAISED.into_iter().for_each(raise);
    LIFTED.into_iter().filter_map(|(resource, name)| lift(resource, name)).collect()
}

/// Raises a limit to its maximum.
fn raise(resource: Resource) {
    let limit = getrlimit(resource);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(resource, raised) {
            log::warn!("a limit stays {:?}: {error}", limit.current);
        }
    }
}

fn lift(resource: Resource, name: &str) -> Option<String> {
    let none = Rlimit { current: None, maximum: None };
    if getrlimit(resource) == none || setrlimit(resource, none).is_ok() {
        return None;
    }
    raise(resource);
    let left = getrlimit(resource).current?;
    Some(format!(
        "the limit of {name} stays {left} for the process that serves: raise it before the start"
    ))
}

/// Keeps the descriptors of this process from the daemon that it starts, except for 0 to 2 and
/// those that `command_line` names (`/dev/fd/N`, `/proc/self/fd/N`).
pub fn keep_descriptors(command_line: &[OsString]) {
    let named: Vec<RawFd> =
        command_line.iter().flat_map(|word| find_named(word.as_bytes())).collect();
    process::close_on_exec(&named);
}

/// The numbers of all descriptors that a word of a command line names.
fn find_named(word: &[u8]) -> Vec<RawFd> {
    let mut named = Vec::new();
    for folder in [&b"/dev/fd/"[..], b"/proc/self/fd/"] {
        let places = word.windows(folder.len()).enumerate().filter(|(_, window)| *window == folder);
        named.extend(places.filter_map(|(at, _)| {
            let rest = &word[at + folder.len()..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            std::str::from_utf8(&rest[..digits]).ok()?.parse::<RawFd>().ok()
        }));
    }
    named
}

/// The limits of this process that its own memory meets, which programs of a run share
/// (memfd_create(2)). A program that it starts has the limits of its starter.
pub struct OwnLimits {
    inherited: [(Resource, Rlimit); 2],
}

/// Address space that a process which serves the mounts of a run needs, with its threads and rings.
const ADDRESS_SPACE: u64 = 640 << 20;

/// Descriptors that a run needs, and those for each of its mounts.
const DESCRIPTORS: u64 = 24;
const DESCRIPTORS_OF_MOUNT: u64 = 8;

impl OwnLimits {
    /// Raises the limits of this process as far as permitted.
    pub fn raise() -> OwnLimits {
        let inherited =
            [Resource::Fsize, Resource::As].map(|resource| (resource, getrlimit(resource)));
        let limits = OwnLimits { inherited };
        limits.lift();
        limits
    }

    /// Gives the program of `command` the limits that this process was given.
    pub fn give(&self, command: &mut Command) {
        let limits: Vec<_> = self.finite().collect();
        // Without limits, the program is started without a copy of this process.
        if !limits.is_empty() {
            process::limit(command, limits);
        }
    }

    /// Lifts the limits if this process may exceed their maximum, or raises them to the maximum.
    fn lift(&self) {
        let none = Rlimit { current: None, maximum: None };
        for (resource, inherited) in self.finite() {
            if setrlimit(resource, none).is_err() {
                let highest = Rlimit { current: inherited.maximum, maximum: inherited.maximum };
                let _ = setrlimit(resource, highest);
            }
        }
    }

    fn finite(&self) -> impl Iterator<Item = (Resource, Rlimit)> {
        self.inherited.into_iter().filter(|(_, inherited)| inherited.current.is_some())
    }

    /// The reason if this process may have too few descriptors to serve `mounts` of a run: its own
    /// programs could not connect to it, and would wait.
    pub fn lacks_descriptors(mounts: usize) -> Option<String> {
        let needed = DESCRIPTORS + mounts as u64 * DESCRIPTORS_OF_MOUNT;
        let limit = getrlimit(Resource::Nofile).maximum.filter(|limit| *limit < needed)?;
        Some(format!(
            "a process may have {limit} open files here (ulimit -Hn), and this run needs {needed}: raise the limit"
        ))
    }

    /// The warning if the process that serves may not get the memory that it needs: where the C
    /// library or the standard library gets none, there is no other message.
    pub fn warn_of_address_space(&self) -> Option<String> {
        let limit = getrlimit(Resource::As).current.filter(|limit| *limit < ADDRESS_SPACE)?;
        Some(format!(
            "the limit of address space is {limit} bytes here (ulimit -v), and a run that serves mounts needs about \
             {ADDRESS_SPACE}: raise it if the run fails"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_a_command_line_names_are_found_anywhere_in_it() {
        let named = |word: &str| find_named(word.as_bytes());
        assert_eq!(named("/dev/fd/7"), [7]);
        assert_eq!(named("passthrough:/proc/self/fd/12/sub"), [12]);
        assert_eq!(named("-oa=/dev/fd/3,b=/dev/fd/4"), [3, 4]);
        for other in ["/dev/fd/", "/dev/fd/x", "/dev/fd/99999999999999", "/dev/fuse", "7"] {
            assert!(named(other).is_empty(), "{other}");
        }
    }
}
