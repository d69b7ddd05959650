//! Cases that fail or cannot run, and the reasons why that cannot be fixed. docs/conformance.md
//! repeats them, and a test compares.

use super::Suite;

/// One case that cannot pass on some configurations.
#[derive(Debug)]
pub struct Exclusion {
    /// The suite.
    pub suite: Suite,
    /// The configurations. A final `*` matches anything.
    pub configs: &'static [&'static str],
    /// The case.
    pub case: &'static str,
    /// The case would wait for ever, so it is not started.
    pub hangs: bool,
    /// The reason why it cannot pass.
    pub reason: &'static str,
}

const WRITEBACK: &[&str] =
    &["passthrough-writeback", "memory-writeback", "passthrough-opt", "memory-opt"];

/// All exclusions.
pub const EXCLUSIONS: &[Exclusion] = &[
    Exclusion {
        suite: Suite::Posix,
        configs: WRITEBACK,
        case: "attributes::blocks_report_the_space_in_use",
        hangs: false,
        reason: "With the kernel's write-back cache the file system receives written data \
                 later, and has not allocated blocks for it at the time of stat(2); ext4 counts \
                 reserved blocks.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: WRITEBACK,
        case: "data::fallocate_punches_holes",
        hangs: false,
        reason: "The hole is punched, but the number of blocks before it was too small, for the \
                 reason of blocks_report_the_space_in_use, so that the comparison fails.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "run-passthrough-backing_off"],
        case: "locks::getlk_names_range_and_holder",
        hangs: false,
        reason: "Locks in the lower file system belong to open files, which have no process \
                 (fcntl(2): l_pid is -1), so the process id of the holder is unknown.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "memory-locks"],
        case: "locks::the_lock_of_an_open_file_is_dropped_with_its_last_descriptor",
        hangs: false,
        reason: "The kernel keeps no list of forwarded locks, so at the last close it sends no \
                 unlock for the lock of an open file (F_OFD_SETLK), and FUSE_RELEASE does not \
                 contain its owner: the lock stays until the file is closed everywhere. Locks \
                 of processes and flock are released.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "run-passthrough-backing_off"],
        case: "locks::a_cycle_of_waits_gives_edeadlk",
        hangs: true,
        reason: "Linux detects deadlocks among locks of processes only, and the locks in the \
                 lower file system belong to open files (fcntl(2)): a deadlock lasts until a \
                 signal arrives.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-*"],
        case: "rmdir::ebusy",
        hangs: false,
        reason: "The kernel cannot mount anything on a directory that it does not know \
                 (EOPNOTSUPP).",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-passthrough-backing_off", "run-memory", "run-uhs"],
        case: "open::etxtbsy",
        hangs: false,
        reason: "The kernel has no file to execute, so the program is a copy in memory: writing \
                 to the file does not affect it.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-passthrough-backing_off", "run-memory", "run-uhs"],
        case: "truncate::etxtbsy",
        hangs: false,
        reason: "As for open::etxtbsy: the program is a copy in memory.",
    },
];

/// The reason why `case` need not pass on `config`; `None` if it must.
pub fn reason(suite: Suite, config: &str, case: &str) -> Option<&'static str> {
    find(suite, config, case).map(|exclusion| exclusion.reason)
}

/// Like [`reason`], for a case that is not even started.
pub fn hangs(suite: Suite, config: &str, case: &str) -> Option<&'static str> {
    find(suite, config, case).filter(|exclusion| exclusion.hangs).map(|exclusion| exclusion.reason)
}

fn find(suite: Suite, config: &str, case: &str) -> Option<&'static Exclusion> {
    EXCLUSIONS.iter().find(|exclusion| {
        exclusion.suite == suite
            && exclusion.case == case
            && exclusion.configs.iter().any(|pattern| fits(pattern, config))
    })
}

fn fits(pattern: &str, config: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => config.starts_with(start),
        None => pattern == config,
    }
}
