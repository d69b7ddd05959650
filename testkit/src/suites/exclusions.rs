//! Cases that fail or cannot run, and the reasons why that cannot be fixed. docs/conformance.md
//! repeats them, and a test compares.

mod volumes;

use super::ConformanceSuite;

/// One case that cannot pass on some configurations.
#[derive(Debug)]
pub struct SuiteExclusion {
    /// The suite.
    pub suite: ConformanceSuite,
    /// The configurations. An initial or final `*` matches anything.
    pub configs: &'static [&'static str],
    /// The case. An initial or final `*` matches anything.
    pub case: &'static str,
    /// The behaviour of the case.
    pub effect: ExclusionEffect,
    /// The reason why it cannot pass.
    pub reason: &'static str,
}

/// The behaviour of an excluded case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusionEffect {
    /// It fails. Tests of volumes check that it still does ([`list_outdated`]).
    Fails,
    /// It fails now and then.
    MayFail,
    /// It would wait for ever, so it is not started.
    Hangs,
}

use ExclusionEffect::{Fails, Hangs};

const WRITEBACK: &[&str] =
    &["passthrough-writeback", "memory-writeback", "passthrough-opt", "memory-opt"];

/// The locks are the locks of the lower file system.
const LOWER_LOCKS: &[&str] = &[
    "passthrough-locks",
    "run-passthrough-backing_off",
    "shared-passthrough",
    "run-shared-passthrough",
];

/// The kernel has a placeholder for each open file.
const PLACEHOLDERS: &[&str] =
    &["run-passthrough-backing_off", "run-memory", "run-uhs", "run-shared-*", "run-gluster-*"];

/// All exclusions.
pub fn all() -> impl Iterator<Item = &'static SuiteExclusion> {
    ALL.iter().chain(volumes::ALL)
}

/// The exclusions of everything but volumes, and of all runs.
const ALL: &[SuiteExclusion] = &[
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: WRITEBACK,
        case: "attributes::blocks_report_the_space_in_use",
        effect: Fails,
        reason: "With the kernel's write-back cache the file system receives written data \
                 later, and has not allocated blocks for it at the time of stat(2); ext4 counts \
                 reserved blocks.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: WRITEBACK,
        case: "data::fallocate_punches_holes",
        effect: Fails,
        reason: "The hole is punched, but the number of blocks before it was too small, for the \
                 reason of blocks_report_the_space_in_use, so that the comparison fails.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: LOWER_LOCKS,
        case: "locks::getlk_names_range_and_holder",
        effect: Fails,
        reason: "Locks in the lower file system belong to open files, which have no process \
                 (fcntl(2): l_pid is -1), so the process id of the holder is unknown.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: &["passthrough-locks", "memory-locks", "shared-*"],
        case: "locks::the_lock_of_an_open_file_is_dropped_with_its_last_descriptor",
        effect: Fails,
        reason: "The kernel keeps no list of forwarded locks, so at the last close it sends no \
                 unlock for the lock of an open file (F_OFD_SETLK), and FUSE_RELEASE does not \
                 contain its owner: the lock stays until the file is closed everywhere. Locks \
                 of processes and flock are released.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: LOWER_LOCKS,
        case: "locks::a_cycle_of_waits_gives_edeadlk",
        effect: Hangs,
        reason: "Linux detects deadlocks among locks of processes only, and the locks in the \
                 lower file system belong to open files (fcntl(2)): a deadlock lasts until a \
                 signal arrives.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: &["run-*"],
        case: "rmdir::ebusy",
        effect: Fails,
        reason: "The kernel cannot mount anything on a directory that it does not know \
                 (EOPNOTSUPP).",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: PLACEHOLDERS,
        case: "open::etxtbsy",
        effect: Fails,
        reason: "The kernel has no file to execute, so the program is a copy in memory: writing \
                 to the file does not affect it.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: PLACEHOLDERS,
        case: "truncate::etxtbsy",
        effect: Fails,
        reason: "As for open::etxtbsy: the program is a copy in memory.",
    },
];

/// The reason why `case` need not pass on `config`; `None` if it must.
pub fn reason(suite: ConformanceSuite, config: &str, case: &str) -> Option<&'static str> {
    find(suite, config, case).map(|exclusion| exclusion.reason)
}

/// Returns the result of [`reason`], for a case that is not even started.
pub fn hang_reason(suite: ConformanceSuite, config: &str, case: &str) -> Option<&'static str> {
    find(suite, config, case)
        .filter(|exclusion| exclusion.effect == Hangs)
        .map(|exclusion| exclusion.reason)
}

/// The cases whose exclusions state that `config` fails, but that did not fail: `failed` are the
/// failed ones. A case with a `*` needs one of its kind.
pub fn list_outdated(suite: ConformanceSuite, config: &str, failed: &[&str]) -> Vec<&'static str> {
    let claims = all().filter(|it| it.effect == Fails && it.is_for(suite, config));
    let wrong = claims.filter(|it| !failed.iter().any(|case| fits(it.case, case)));
    wrong.map(|exclusion| exclusion.case).collect()
}

fn find(suite: ConformanceSuite, config: &str, case: &str) -> Option<&'static SuiteExclusion> {
    all().find(|exclusion| exclusion.is_for(suite, config) && fits(exclusion.case, case))
}

impl SuiteExclusion {
    fn is_for(&self, suite: ConformanceSuite, config: &str) -> bool {
        self.suite == suite && self.configs.iter().any(|pattern| fits(pattern, config))
    }
}

fn fits(pattern: &str, config: &str) -> bool {
    match (pattern.strip_suffix('*'), pattern.strip_prefix('*')) {
        (Some(start), _) => config.starts_with(start),
        (None, Some(end)) => config.ends_with(end),
        (None, None) => pattern == config,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prevents reasons which claim that GlusterFS's own client fails, too, unless the test of its
    /// configurations checks it.
    #[test]
    fn reasons_name_the_own_client_of_glusterfs_where_it_is_excluded() {
        for exclusion in all() {
            let natives = ["native-gluster-dist", "native-gluster-repl"];
            let is_native = natives.iter().any(|config| exclusion.is_for(exclusion.suite, config));
            let is_named = exclusion.reason.contains("GlusterFS's own client");
            assert_eq!(is_named, is_native, "{}", exclusion.case);
        }
    }

    #[test]
    fn an_excluded_case_that_passes_is_outdated() {
        let failed = ["rename::to_multiply_linked::fifo", "posix_fallocate::update_ctime_success"];
        let outdated = |failed| list_outdated(ConformanceSuite::Pjdfstest, "gluster-repl", failed);
        assert!(outdated(&failed).is_empty());
        assert_eq!(outdated(&failed[1..]), ["rename::to_multiply_linked::*"]);
    }
}
