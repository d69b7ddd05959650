//! The memory and the plan that all processes of a run share. SPEC.md describes every field.
//!
//! The memory is a memfd that all of them map `MAP_SHARED`. Every program of the run can write to
//! it, even a program that has become another user since. The plan is a second memfd that no
//! process can change, because it decides which code is loaded and changed.

use crate::codec::{MalformedState, StateError};

/// The version of the memory. SPEC.md describes its fields.
pub const VERSION: u32 = 1;
/// The version of the plan, two digits behind the word `defuse`.
pub const PLAN_VERSION: u64 = 5;
/// The first bytes of the plan.
const MAGIC: &[u8; 6] = b"defuse";
/// Where the length of the plan is.
const PLAN_LEN: usize = 8;
/// Where the plan begins.
const PLAN: usize = 16;
/// Where it is noted that there is a directory of nodes.
pub const NODES: usize = 4;
/// Notes which warnings were printed.
pub const REPORTED: usize = 8;
/// Where calls are counted that may have made a path lead to another directory.
pub const PATH_CHANGES: usize = 12;

/// The messages that a run prints once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OnceMessage {
    /// A program of a mount cannot be executed from memory.
    NoMemory = 1,
    /// A program filters its system calls.
    Filter = 2,
    /// A process would share memory and not descriptors.
    SharedMemory = 4,
    /// A program with `--dispatch` makes system calls of 32 bits.
    Calls32 = 8,
}
/// Where the counters begin.
pub const COUNTERS: usize = 4096;
/// How many system calls have counters.
pub const CALLS: usize = 512;
/// Where the counters by site begin.
pub const SITE_COUNTERS: usize = COUNTERS + CALLS * 24;
/// How many sites have counters: the C library has some two hundred.
pub const SITES: usize = 8192;
/// Open files that a run can have at once; beyond it `ENFILE`.
pub const CELLS: usize = 1 << 16;
/// The length in bytes of the cells of an open file.
pub const CELL: usize = 24;
/// Where the states of open files begin.
pub const STATES: usize = SITE_COUNTERS + SITES * 24;
/// Where positions and flags begin.
pub const OPEN_FILES: usize = STATES + CELLS * 4;
/// Processes that a run can have at once; beyond it fork(2) fails with `EAGAIN`.
pub const SLOTS: usize = 8192;
/// Where the words of processes begin.
pub const PROCESSES: usize = OPEN_FILES + CELLS * CELL;
/// Where the number of slots is that were ever taken.
pub const HIGH_WATER: usize = PROCESSES + SLOTS * 4;
/// Where the marks of programs begin.
pub const PROGRAMS: usize = HIGH_WATER + 4096;
/// How many programs can be marked; others are not looked at.
pub const PROGRAM_MARKS: usize = 8192;
/// Where the bits of processes begin.
pub const HELD: usize = PROGRAMS + PROGRAM_MARKS * 8;
/// The length of the memory. Pages that are not touched take no memory.
pub const LEN: usize = HELD + SLOTS * (CELLS / 8);

/// Where images begin, behind a plan of this length in bytes; on a page.
pub fn images_at(plan_len: usize) -> usize {
    (PLAN + plan_len).next_multiple_of(4096)
}

/// The directory in which [`node_directory`] lies.
pub const NODES_IN: &str = "/tmp";

/// The name in [`NODES_IN`] of the directory in which the processes of a run that are user `uid`
/// keep nodes of the kernel for fifos, devices and sockets that they open in mounts. `token` is the
/// token of the plan, so that no process outside of the run can know the name before the directory
/// exists. A program of the run that is another user can: users of the directory therefore check
/// its owner.
pub fn node_directory(token: u128, uid: u32) -> String {
    format!("{}{uid}", node_prefix(token))
}

/// The prefix of the names of all such directories of a run. `defuse run` removes them.
pub fn node_prefix(token: u128) -> String {
    format!(".defuse-{token:032x}-")
}

/// The counts of one system call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Calls that were served inside of the process.
    pub served: u64,
    /// Calls that the kernel got.
    pub passed: u64,
    /// Calls that the kernel got although they named a descriptor of ours.
    pub missed: u64,
}

impl std::ops::AddAssign for CallCounts {
    fn add_assign(&mut self, other: Self) {
        self.served += other.served;
        self.passed += other.passed;
        self.missed += other.missed;
    }
}

/// The counts of the call `number` in `bytes`, the beginning of the memory.
pub fn read_counts(bytes: &[u8], number: usize) -> CallCounts {
    read_counts_at(bytes, COUNTERS + number * 24)
}

/// The counts of the site at this place among the sites of all objects of the plan.
pub fn site_counts(bytes: &[u8], site: usize) -> CallCounts {
    if site < SITES {
        read_counts_at(bytes, SITE_COUNTERS + site * 24)
    } else {
        CallCounts::default()
    }
}

fn read_counts_at(bytes: &[u8], start: usize) -> CallCounts {
    let at = |place: usize| {
        let from = start + place * 8;
        let bytes = bytes.get(from..from + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    CallCounts { served: at(0), passed: at(1), missed: at(2) }
}

/// The plan with what comes before it.
pub fn with_head(plan: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(format!("{PLAN_VERSION:02}").into_bytes());
    bytes.extend((plan.len() as u64).to_le_bytes());
    bytes.extend(plan);
    bytes
}

/// The plan in `bytes`. An error for what another version wrote.
pub fn plan(bytes: &[u8]) -> Result<&[u8], StateError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(MalformedState)?;
    let digits = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
    let found = digits.and_then(|digits| digits.parse().ok()).ok_or(MalformedState)?;
    StateError::check_version("plan", found, PLAN_VERSION)?;
    let len = bytes.get(PLAN_LEN..PLAN).and_then(|bytes| bytes.try_into().ok());
    let len = usize::try_from(u64::from_le_bytes(len.ok_or(MalformedState)?))
        .map_err(|_| MalformedState)?;
    Ok(bytes[PLAN..].get(..len).ok_or(MalformedState)?)
}

/// Checks the version of the memory, which is in its first four bytes.
pub fn check_version(found: u32) -> Result<(), StateError> {
    StateError::check_version("shared memory", found.into(), VERSION.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_or_memory_of_another_version_is_refused_by_its_version() {
        let bytes = with_head(b"plan");
        assert_eq!(plan(&bytes), Ok(&b"plan"[..]));
        for len in 0..bytes.len() {
            assert_eq!(plan(&bytes[..len]), Err(StateError::Malformed), "{len} bytes");
        }
        let other = [b"defuse99", &bytes[8..]].concat();
        let error = StateError::Version { format: "plan", found: 99, known: PLAN_VERSION };
        assert_eq!(plan(&other), Err(error));
        assert_eq!(check_version(VERSION), Ok(()));
        let error = check_version(VERSION + 1).unwrap_err();
        assert!(
            error.to_string().contains("the shared memory of this run has version 2"),
            "{error}"
        );
    }

    #[test]
    fn no_two_fields_of_the_memory_overlap() {
        let fields = [
            (0, 4),
            (NODES, 4),
            (REPORTED, 4),
            (PATH_CHANGES, 4),
            (COUNTERS, CALLS * 24),
            (SITE_COUNTERS, SITES * 24),
            (STATES, CELLS * 4),
            (OPEN_FILES, CELLS * CELL),
            (PROCESSES, SLOTS * 4),
            (HIGH_WATER, 4),
            (PROGRAMS, PROGRAM_MARKS * 8),
            (HELD, SLOTS * (CELLS / 8)),
        ];
        for ((from, len), (next, _)) in fields.iter().zip(&fields[1..]) {
            assert!(from + len <= *next && next % 4 == 0);
        }
        assert_eq!(LEN, HELD + SLOTS * (CELLS / 8));
    }
}
