//! Cases that fail or cannot run, and the reasons why that cannot be fixed. docs/conformance.md
//! repeats them, and a test compares.

use super::Suite;

/// One case that cannot pass on some configurations.
#[derive(Debug)]
pub struct Exclusion {
    /// The suite.
    pub suite: Suite,
    /// The configurations. An initial or final `*` matches anything.
    pub configs: &'static [&'static str],
    /// The case. An initial or final `*` matches anything.
    pub case: &'static str,
    /// The case would wait for ever, so it is not started.
    pub hangs: bool,
    /// The reason why it cannot pass.
    pub reason: &'static str,
}

const WRITEBACK: &[&str] =
    &["passthrough-writeback", "memory-writeback", "passthrough-opt", "memory-opt"];

/// Locks are those of the lower file system.
const LOWER_LOCKS: &[&str] = &[
    "passthrough-locks",
    "run-passthrough-backing_off",
    "shared-passthrough",
    "run-shared-passthrough",
];

/// The kernel has a placeholder for each open file.
const PLACEHOLDERS: &[&str] =
    &["run-passthrough-backing_off", "run-memory", "run-uhs", "run-shared-*", "run-gluster-*"];

const GLUSTER: &[&str] = &["gluster-*", "run-gluster-*"];

/// The path of a brick is longer than that of the mount.
const SHORTER_THAN_BRICKS: &[&str] = &["run-gluster-*"];

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
        configs: LOWER_LOCKS,
        case: "locks::getlk_names_range_and_holder",
        hangs: false,
        reason: "Locks in the lower file system belong to open files, which have no process \
                 (fcntl(2): l_pid is -1), so the process id of the holder is unknown.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: &["passthrough-locks", "memory-locks", "shared-*"],
        case: "locks::the_lock_of_an_open_file_is_dropped_with_its_last_descriptor",
        hangs: false,
        reason: "The kernel keeps no list of forwarded locks, so at the last close it sends no \
                 unlock for the lock of an open file (F_OFD_SETLK), and FUSE_RELEASE does not \
                 contain its owner: the lock stays until the file is closed everywhere. Locks \
                 of processes and flock are released.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: LOWER_LOCKS,
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
        configs: PLACEHOLDERS,
        case: "open::etxtbsy",
        hangs: false,
        reason: "The kernel has no file to execute, so the program is a copy in memory: writing \
                 to the file does not affect it.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: PLACEHOLDERS,
        case: "truncate::etxtbsy",
        hangs: false,
        reason: "As for open::etxtbsy: the program is a copy in memory.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "attributes::chmod_sets_all_twelve_bits",
        hangs: false,
        reason: "A distributed volume marks files that move between bricks by set-group-id with the \
                 sticky bit, and hides both bits of a file that has them. GlusterFS's own client fails \
                 here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "attributes::utimens_keeps_nanoseconds",
        hangs: false,
        reason: "The case sets a time before 1970. GlusterFS merges the times of several bricks by taking \
                 the latest, beginning with 0, so that such a time may become 1970.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "attributes::utimens_sets_times_before_and_after_1970",
        hangs: false,
        reason: "A time before 1970 may become 1970, for the reason of utimens_keeps_nanoseconds. \
                 GlusterFS's own client fails here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "data::fallocate_lengthens_or_keeps_the_size",
        hangs: false,
        reason: "The servers allocate the space, but their answer has the number of blocks that the size \
                 needs. GlusterFS's own client fails here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "links::a_thousand_links_are_counted",
        hangs: false,
        reason: "A volume has at most 100 links of a file (storage.max-hardlinks). GlusterFS's own client \
                 fails here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "rename::a_replaced_file_that_is_open_lives_on",
        hangs: false,
        reason: "The file lives on, but its number of links stays 1, because the servers keep it under a \
                 name of their own until it is closed. GlusterFS's own client fails here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "xattrs::setting_moves_the_change_time",
        hangs: false,
        reason: "The servers do not move the change time for an extended attribute that they answer from \
                 a cache. GlusterFS's own client fails here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "permissions::a_set_user_id_file_of_root_keeps_the_bit_when_root_writes",
        hangs: false,
        reason: "The servers drop the bits at each write, whoever writes. GlusterFS's own client fails \
                 here, too.",
    },
    Exclusion {
        suite: Suite::Posix,
        configs: GLUSTER,
        case: "locks::a_cycle_of_waits_gives_edeadlk",
        hangs: true,
        reason: "The servers do not look for circles of waits, so that both processes wait for ever. \
                 GlusterFS's own client waits, too.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: GLUSTER,
        case: "posix_fallocate::update_ctime_success",
        hangs: false,
        reason: "The servers keep the change time of a file whose space was allocated. GlusterFS's own \
                 client fails here, too.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: GLUSTER,
        case: "rename::to_multiply_linked::*",
        hangs: false,
        reason: "The servers keep the change time of a replaced file that has other names. GlusterFS's \
                 own client fails here, too.",
    },
    Exclusion {
        suite: Suite::Pjdfstest,
        configs: SHORTER_THAN_BRICKS,
        case: "*::enametoolong_path",
        hangs: false,
        reason: "The case makes a path of 4095 bytes below a mount point that is shorter than the path of a \
                 brick, and the brick's own path is then too long.",
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
            && fits(exclusion.case, case)
            && exclusion.configs.iter().any(|pattern| fits(pattern, config))
    })
}

fn fits(pattern: &str, config: &str) -> bool {
    match (pattern.strip_suffix('*'), pattern.strip_prefix('*')) {
        (Some(start), _) => config.starts_with(start),
        (None, Some(end)) => config.ends_with(end),
        (None, None) => pattern == config,
    }
}
