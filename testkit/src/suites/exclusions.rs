//! What fails or cannot be run, and why that is not to be mended. docs/conformance.md repeats it,
//! and a test compares.

use super::Suite;

/// One case that does not hold on some configurations.
#[derive(Debug)]
pub struct Exclusion {
    /// The suite.
    pub suite: Suite,
    /// The configurations, `*` at the end standing for anything.
    pub configs: &'static [&'static str],
    /// The case.
    pub case: &'static str,
    /// It would wait for ever, so it is not begun.
    pub hangs: bool,
    /// Why it cannot hold.
    pub reason: &'static str,
}

const WRITEBACK: &[&str] =
    &["passthrough-writeback", "memory-writeback", "passthrough-opt", "memory-opt"];

/// All of them.
pub const EXCLUSIONS: &[Exclusion] = &[
    Exclusion {
        suite: Suite::Posix,
        configs: WRITEBACK,
        case: "attributes::blocks_tell_the_space_in_use",
        hangs: false,
        reason: "With the kernel's write-back the file system learns of written bytes later, and \
                 has not given them blocks yet when it is asked; ext4 counts what it has reserved.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: WRITEBACK,
        case: "data::fallocate_punches_holes",
        hangs: false,
        reason: "The hole is there; only the number of blocks from before it was not, for the \
                 reason of blocks_tell_the_space_in_use, so there is nothing to compare with.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "run-passthrough-backing_off"],
        case: "locks::getlk_names_range_and_holder",
        hangs: false,
        reason: "Locks are taken in the lower file system as those of open files, which have no \
                 process (fcntl(2): l_pid is -1), so the holder has no number to be told.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "memory-locks"],
        case: "locks::the_lock_of_an_open_file_is_dropped_with_its_last_descriptor",
        hangs: false,
        reason: "Of forwarded locks the kernel keeps no list, so at the last close it sends no unlock \
                 for the lock of an open file (F_OFD_SETLK), and FUSE_RELEASE names no owner of it: \
                 the lock stays until the file is open nowhere. Locks of processes and flock are \
                 dropped.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "run-passthrough-backing_off"],
        case: "locks::a_circle_of_waits_gives_edeadlk",
        hangs: true,
        reason: "Linux looks for circles among locks of processes only, and the locks in the lower \
                 file system are those of open files (fcntl(2)): who waits in a circle waits until \
                 a signal comes.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-*"],
        case: "rmdir::ebusy",
        hangs: false,
        reason: "Nothing of the kernel can be mounted on a directory that it does not know \
                 (EOPNOTSUPP).",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-passthrough-backing_off", "run-memory"],
        case: "open::etxtbsy",
        hangs: false,
        reason: "What is executed is a copy in memory, because the kernel has no file to execute: \
                 whoever writes to the file does not disturb it.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: &["run-passthrough-backing_off", "run-memory"],
        case: "truncate::etxtbsy",
        hangs: false,
        reason: "As open::etxtbsy: what is executed is a copy in memory.",
    },
];

/// Why `case` need not hold on `config`; `None` where it must.
pub fn reason(suite: Suite, config: &str, case: &str) -> Option<&'static str> {
    find(suite, config, case).map(|exclusion| exclusion.reason)
}

/// As [`reason`], for a case that is not even to be begun.
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
