//! The exclusions of volumes of GlusterFS, for defuse and for GlusterFS's own client.
//!
//! An exclusion that has the own client among its configurations states that the case fails there,
//! too. The step `gluster-suites` of `cargo xtask test` fails if it does not, and
//! `testkit/tests/gluster_faults.rs` compares waits that do not end.

use super::ExclusionEffect::{Fails, Hangs, MayFail};
use super::SuiteExclusion;
use crate::suites::ConformanceSuite;

const EVERY: &[&str] = &["gluster-*", "run-gluster-*", "native-gluster-*"];
const EVERY_DIST: &[&str] = &["gluster-dist", "run-gluster-dist", "native-gluster-dist"];
const OUR_DIST: &[&str] = &["gluster-dist", "run-gluster-dist"];
const NATIVE: &[&str] = &["native-gluster-*"];
const NATIVE_REPL: &[&str] = &["native-gluster-repl"];

/// The path of a brick is longer than the path of the mount.
const SHORTER_THAN_BRICKS: &[&str] = &["run-gluster-*"];

// Reasons of two cases each.
const ANY_TIMES: &str = "With --acl, GlusterFS's own client lets every user who may write a file set any times. It \
                         passes on defuse.";
const OTHER_ERROR: &str = "With --acl, the error of GlusterFS's own client is EACCES, and not EPERM. It passes on \
                           defuse.";

pub(super) const ALL: &[SuiteExclusion] = &[
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY_DIST,
        case: "attributes::chmod_sets_all_twelve_bits",
        effect: Fails,
        reason: "A distributed volume marks files that move between bricks by set-group-id with the \
                 sticky bit, and hides both bits of a file that has them. GlusterFS's own client fails \
                 here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: OUR_DIST,
        case: "attributes::utimens_keeps_nanoseconds",
        effect: MayFail,
        reason: "The case sets a time before 1970. GlusterFS merges the times of several bricks by \
                 taking the latest, beginning with 0, so that such a time may become 1970.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY_DIST,
        case: "attributes::utimens_sets_times_before_and_after_1970",
        effect: Fails,
        reason: "A time before 1970 may become 1970, for the reason of utimens_keeps_nanoseconds. \
                 GlusterFS's own client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY,
        case: "data::fallocate_lengthens_or_keeps_the_size",
        effect: Fails,
        reason: "The servers allocate the space, but their answer has the number of blocks that the \
                 size needs. GlusterFS's own client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY,
        case: "links::a_thousand_links_are_counted",
        effect: Fails,
        reason: "A volume has at most 100 links of a file (storage.max-hardlinks). GlusterFS's own \
                 client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY,
        case: "xattrs::setting_moves_the_change_time",
        effect: Fails,
        reason: "The servers do not move the change time for an extended attribute that they answer \
                 from a cache. GlusterFS's own client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY,
        case: "permissions::a_set_user_id_file_of_root_keeps_the_bit_when_root_writes",
        effect: Fails,
        reason: "The servers drop the bits at each write by any user. GlusterFS's own client fails \
                 here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: EVERY,
        case: "locks::a_cycle_of_waits_gives_edeadlk",
        effect: Hangs,
        reason: "The servers do not look for circles of waits, so that both processes wait for ever. \
                 GlusterFS's own client waits, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: EVERY,
        case: "posix_fallocate::update_ctime_success",
        effect: Fails,
        reason: "The servers keep the change time of a file whose space was allocated. GlusterFS's own \
                 client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: EVERY,
        case: "rename::to_multiply_linked::*",
        effect: Fails,
        reason: "The servers keep the change time of a replaced file that has other names. GlusterFS's \
                 own client fails here, too.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: SHORTER_THAN_BRICKS,
        case: "*::enametoolong_path",
        effect: Fails,
        reason: "The case makes a path of 4095 bytes below a mount point that is shorter than the path \
                 of a brick, and the brick's own path is then too long.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "names::an_unlinked_file_can_be_used_while_it_is_open",
        effect: Fails,
        reason: "GlusterFS's own client fails fchmod(2) of an open file that has no name any more \
                 (ESTALE). It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "rename::a_replaced_file_that_is_open_lives_on",
        effect: Fails,
        reason: "GlusterFS's own client says that an open file whose name was replaced still has one \
                 link. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "locks::flock_and_record_locks_ignore_each_other",
        effect: Fails,
        reason: "With GlusterFS's own client, a lock by flock(2) conflicts with one by fcntl(2). It \
                 passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE_REPL,
        case: "locks::a_wait_is_ended_by_a_signal",
        effect: Fails,
        reason: "With GlusterFS's own client, a file of a replicated volume stays locked after a signal \
                 has ended a wait for its lock. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "data::append_always_writes_at_the_end",
        effect: MayFail,
        reason: "GlusterFS's own client acknowledges writes early, and sends an append without waiting \
                 for them, so that it may be written elsewhere. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Tree,
        configs: NATIVE_REPL,
        case: "tree, seed *",
        effect: MayFail,
        reason: "Four processes change one tree at once. A call of one of them failed with GlusterFS's own \
                 client in one of two runs. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "*_by_another_clears_set_user_id",
        effect: Fails,
        reason: "GlusterFS's own client refuses to drop set-user-id when another user writes or \
                 truncates, so that these fail (EPERM). It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "xattrs::an_access_list_changes_the_mode",
        effect: Fails,
        reason: "GlusterFS's own client keeps an access list that says no more than the mode. It passes \
                 on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "permissions::a_directory_needs_search_to_be_crossed_and_read_to_be_listed",
        effect: Fails,
        reason: "With --acl, the kernel leaves permissions to GlusterFS's own client, and does not ask \
                 it about names that it knows. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "permissions::set_times_needs_owner_or_write",
        effect: Fails,
        reason: ANY_TIMES,
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: NATIVE,
        case: "utimensat::nobody",
        effect: Fails,
        reason: OTHER_ERROR,
    },
    SuiteExclusion {
        suite: ConformanceSuite::Pjdfstest,
        configs: NATIVE,
        case: "utimensat::write_perm",
        effect: Fails,
        reason: ANY_TIMES,
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "permissions::a_sticky_directory_protects_names_of_others",
        effect: Fails,
        reason: OTHER_ERROR,
    },
    SuiteExclusion {
        suite: ConformanceSuite::Posix,
        configs: NATIVE,
        case: "permissions::root_may_do_everything_except_execute_files_without_execute_bits",
        effect: Fails,
        reason: "With --acl, GlusterFS's own client says that root may execute a file without execute \
                 bits. It passes on defuse.",
    },
    SuiteExclusion {
        suite: ConformanceSuite::File,
        configs: NATIVE,
        case: "file, seed *",
        effect: Fails,
        reason: "GlusterFS's own client takes FALLOC_FL_ZERO_RANGE as an allocation: the range keeps \
                 its data. It passes on defuse.",
    },
];
