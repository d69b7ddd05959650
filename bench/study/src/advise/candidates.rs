//! Selects options that could help, by the requests of the run. Every candidate is tried.

use defuse_probe::{Op, RequestStage};
use serde::Serialize;

use super::{CommandRun, RunSeries};
use crate::options::{ConfigKind, StudyConfig};

/// A mount option, and the reason to try it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CandidateOption {
    /// The option as written after `-o`.
    pub option: String,
    /// The observation that the option would change.
    pub because: String,
    /// The condition under which it is safe.
    pub needs: String,
}

impl CandidateOption {
    /// The mount configuration with this option.
    pub fn config(&self, base: &StudyConfig) -> StudyConfig {
        let ConfigKind::Defuse(words) = &base.kind else { return base.clone() };
        let mut words = words.clone();
        words.extend(["-o".to_owned(), self.option.clone()]);
        StudyConfig { name: format!("{}+", base.name), kind: ConfigKind::Defuse(words) }
    }
}

/// Fewer requests of a type than this do not justify an option.
const WORTH: u64 = 20;

/// The options to try. Mounts of other programs have none, because their options are unknown.
pub fn select_for_run(
    native: &RunSeries,
    mounted: &RunSeries,
    config: &StudyConfig,
) -> Vec<CandidateOption> {
    let (ConfigKind::Defuse(words), Some(run)) = (&config.kind, mounted.median_run()) else {
        return Vec::new();
    };
    let has =
        |option: &str| words.iter().flat_map(|word| word.split(',')).any(|word| word == option);
    let slower = mounted.seconds() > native.seconds();
    let mut found: Vec<CandidateOption> =
        select_all(run).into_iter().filter(|candidate| slower && !has(&candidate.option)).collect();
    if words.iter().any(|word| word == "base" || word == "opt") {
        // The paper's configurations are fixed; newer features are not part of them.
        found.retain(|candidate| candidate.option != "passthrough");
    }
    found
}

fn select_all(run: &CommandRun) -> Vec<CandidateOption> {
    let count = |op| count_requests(run, op).0;
    let mut found = Vec::new();
    let mut add = |option: &str, because: String, needs: &str| {
        found.push(CandidateOption { option: option.into(), because, needs: needs.into() });
    };
    let names = count(Op::LOOKUP) + count(Op::GETATTR);
    if names >= WORTH {
        add(
            "timeout=60,exclusive",
            format!("{names} requests ask for names and attributes"),
            "the source changes only through this mount",
        );
    }
    let (writes, bytes) = count_requests(run, Op::WRITE);
    if writes >= WORTH && bytes / writes < 64 << 10 {
        add(
            "writeback",
            format!("{writes} WRITE requests carry {} bytes each", bytes / writes),
            "no other process writes the source",
        );
    }
    let reads = count(Op::READ);
    if reads >= WORTH {
        add(
            "passthrough",
            format!("{reads} READ requests go through the daemon"),
            "root, and Linux 6.9",
        );
        add(
            "cache=keep",
            format!("{reads} READ requests fetch pages that may have been there"),
            "no other process writes the source",
        );
    }
    let attributes = count(Op::GETXATTR) + count(Op::LISTXATTR);
    if attributes >= WORTH {
        add(
            "no_xattr",
            format!("{attributes} requests ask for extended attributes"),
            "no ACLs, capabilities or other extended attributes are needed",
        );
    }
    found
}

/// Number of requests of a type, and the bytes that they transferred.
pub fn count_requests(run: &CommandRun, op: Op) -> (u64, u64) {
    let sources = [(&run.daemon, RequestStage::User), (&run.kernel, RequestStage::Total)];
    let found = sources.into_iter().find_map(|(snapshot, stage)| Some((snapshot.as_ref()?, stage)));
    let stats = found.and_then(|(snapshot, stage)| snapshot.get_stage(stage, op));
    stats.map_or((0, 0), |stats| (stats.latency.count, stats.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_probe::{Recorder, StatsSnapshot};

    fn run(ops: &[(Op, u64, u64)]) -> CommandRun {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for &(op, count, bytes) in ops {
            (0..count).for_each(|_| cells.record(op, 1000, true));
            cells.add_bytes(op, bytes);
        }
        let daemon: StatsSnapshot = recorder.snapshot();
        CommandRun { seconds: 2.0, daemon: Some(daemon), ..CommandRun::default() }
    }

    fn options(ops: &[(Op, u64, u64)], config: &str) -> Vec<String> {
        let series = |seconds| RunSeries {
            name: "x".into(),
            runs: vec![CommandRun { seconds, ..run(ops) }],
        };
        let config = StudyConfig::custom(config).unwrap();
        select_for_run(&series(1.0), &series(2.0), &config)
            .into_iter()
            .map(|candidate| candidate.option)
            .collect()
    }

    #[test]
    fn small_writes_suggest_write_back_and_large_ones_do_not() {
        assert_eq!(options(&[(Op::WRITE, 100, 100 * 4096)], "x=-o no_splice"), ["writeback"]);
        assert!(options(&[(Op::WRITE, 100, 100 << 20)], "x=-o no_splice").is_empty());
    }

    #[test]
    fn options_already_set_or_without_requests_are_not_advised() {
        assert!(options(&[(Op::WRITE, 100, 4096)], "x=-o writeback").is_empty());
        assert!(options(&[(Op::LOOKUP, 2, 0)], "x=-o no_splice").is_empty());
        assert_eq!(options(&[(Op::LOOKUP, 200, 0)], "x=-o no_splice"), ["timeout=60,exclusive"]);
    }

    #[test]
    fn other_programs_and_fast_mounts_have_no_candidates() {
        assert!(options(&[(Op::LOOKUP, 200, 0)], "x=bindfs {source} {mountpoint}").is_empty());
        let series = |seconds| RunSeries {
            name: "x".into(),
            runs: vec![CommandRun { seconds, ..run(&[(Op::LOOKUP, 200, 0)]) }],
        };
        assert!(
            select_for_run(&series(2.0), &series(1.0), &StudyConfig::from_name("default").unwrap())
                .is_empty()
        );
    }
}
