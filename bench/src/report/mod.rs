//! The results, and their output formats.

mod markdown;
mod rows;
mod table;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::args::BenchmarkArgs;
use crate::measure::RoundMeasurement;
use crate::stats::{PeerVerdict, QuartileSummary, paired_ratios};
use crate::target::{TargetRole, TargetSpec};
use crate::workloads::BenchmarkCase;

/// The results of a run, with the information needed to repeat it.
#[derive(Debug, Clone, Serialize)]
pub struct BenchmarkResults {
    /// The command line.
    pub command: String,
    /// Kernel release.
    pub kernel: String,
    /// Number of processors.
    pub processors: usize,
    /// File system of the served directory.
    pub backing: String,
    /// Number of completed rounds.
    pub rounds: usize,
    /// Name and version of each target.
    pub targets: Vec<(String, String)>,
    /// The rows.
    pub cells: Vec<BenchmarkCell>,
}

/// One workload with one number of threads, on all targets.
#[derive(Debug, Clone, Serialize)]
pub struct BenchmarkCell {
    /// Workload.
    pub workload: String,
    /// Description of one operation.
    pub what: String,
    /// Number of application threads.
    pub threads: usize,
    /// Required ratio of our result to the better peer.
    pub required: f64,
    /// One series for each target.
    pub series: Vec<TargetSeries>,
}

/// The measurements of one target in a cell, by round.
#[derive(Debug, Clone, Serialize)]
pub struct TargetSeries {
    /// Target.
    pub target: String,
    #[serde(skip)]
    role: TargetRole,
    /// `None` for a round that failed.
    pub rounds: Vec<Option<RoundMeasurement>>,
    /// The reason why a round failed.
    pub failure: Option<String>,
}

/// Comparison of our result with the better peer in one cell.
#[derive(Debug, Clone, Serialize)]
pub struct PeerComparison {
    /// The better peer.
    pub peer: String,
    /// Ratio of our ops/s to the peer.
    pub rate: QuartileSummary,
    /// Ratio of the CPU time of application and daemon per operation to the peer.
    pub cpu: Option<QuartileSummary>,
    /// Ratio of the CPU time of the whole system to the peer.
    pub system: Option<QuartileSummary>,
    /// The verdict on the ratio.
    pub verdict: PeerVerdict,
}

impl BenchmarkResults {
    /// Creates results without cells.
    pub fn new<'a>(args: &BenchmarkArgs, specs: impl Iterator<Item = &'a TargetSpec>) -> Self {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        Self {
            command: command_line(),
            kernel,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            backing: format!("{:?} in {}", args.backing, args.work_dir().display()),
            rounds: 0,
            targets: specs.map(|spec| (spec.name.clone(), spec.version.clone())).collect(),
            cells: Vec::new(),
        }
    }

    /// The failures and their reasons, one per line.
    pub fn failures(&self) -> String {
        let mut out = String::new();
        for cell in &self.cells {
            for series in &cell.series {
                if let Some(failure) = &series.failure {
                    let (workload, threads, target) =
                        (&cell.workload, cell.threads, &series.target);
                    let _ = writeln!(out, "\n{workload} x{threads} failed on {target}: {failure}");
                }
            }
        }
        out
    }
}

impl BenchmarkCell {
    /// The series of the native directory, if measured.
    pub fn native(&self) -> Option<&TargetSeries> {
        self.series.iter().find(|series| series.role == TargetRole::Native)
    }

    /// The peer with most operations per second, for tables without our target.
    pub fn best_peer(&self) -> Option<&TargetSeries> {
        let peers = self.series.iter().filter(|series| series.role == TargetRole::Peer);
        let rated = peers.filter_map(|peer| Some((peer, peer.rate()?.median)));
        rated.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(peer, _)| peer)
    }

    /// Our first target, to which the verdict applies. Its variants are only shown.
    pub fn own_target(&self) -> Option<&TargetSeries> {
        self.series.iter().find(|series| series.role == TargetRole::Ours)
    }

    /// Compares our target with the better peer: the one with the lowest ratio of ours to it, by
    /// rounds.
    pub fn comparison(&self) -> Option<PeerComparison> {
        let ours = self.own_target()?;
        let peers = self.series.iter().filter(|series| series.role == TargetRole::Peer);
        let ratios = peers.filter_map(|peer| Some((peer, ours.rate_over(peer)?)));
        let (peer, rate) = ratios.min_by(|a, b| a.1.median.total_cmp(&b.1.median))?;
        let verdict = PeerVerdict::judge(rate, self.required);
        let (cpu, system) = (ours.cpu_over(peer), ours.ratio_to(peer, RoundMeasurement::system_us));
        Some(PeerComparison { peer: peer.target.clone(), rate, cpu, system, verdict })
    }

    /// One line about the latest round.
    pub fn describe_latest(&self) -> String {
        let one = |series: &TargetSeries| match series.rounds.last() {
            Some(Some(measured)) => format!("{} {:.0}/s", series.target, measured.rate()),
            _ => format!("{} failed", series.target),
        };
        self.series.iter().map(one).collect::<Vec<_>>().join("  ")
    }
}

impl TargetSeries {
    /// Creates a series without measurements.
    pub fn new(spec: &TargetSpec) -> Self {
        Self { target: spec.name.clone(), role: spec.role, rounds: Vec::new(), failure: None }
    }

    /// Adds a round. A failure is printed at once and does not end the run, because other cells may
    /// succeed.
    pub fn push(&mut self, measured: Result<RoundMeasurement>) {
        if let Err(error) = &measured {
            eprintln!("{} failed: {error:#}", self.target);
            self.failure.get_or_insert_with(|| format!("{error:#}"));
        }
        self.rounds.push(measured.ok());
    }

    /// Operations per second.
    pub fn rate(&self) -> Option<QuartileSummary> {
        self.summary(RoundMeasurement::rate)
    }

    /// CPU time of application and daemon per operation, in microseconds.
    pub fn cpu_us(&self) -> Option<QuartileSummary> {
        self.summary(RoundMeasurement::cpu_us)
    }

    /// Ratio of ops/s to another target.
    pub fn rate_over(&self, other: &Self) -> Option<QuartileSummary> {
        self.ratio_to(other, RoundMeasurement::rate)
    }

    /// Ratio of the CPU time of application and daemon per operation to another target.
    pub fn cpu_over(&self, other: &Self) -> Option<QuartileSummary> {
        self.ratio_to(other, RoundMeasurement::cpu_us)
    }

    fn summary(&self, figure: fn(&RoundMeasurement) -> f64) -> Option<QuartileSummary> {
        let figures: Vec<_> = self.rounds.iter().flatten().map(figure).collect();
        QuartileSummary::from_values(&figures)
    }

    fn ratio_to(
        &self,
        other: &Self,
        figure: fn(&RoundMeasurement) -> f64,
    ) -> Option<QuartileSummary> {
        let of = |series: &Self| -> Vec<Option<f64>> {
            series.rounds.iter().map(|round| round.as_ref().map(figure)).collect()
        };
        QuartileSummary::from_values(&paired_ratios(&of(self), &of(other)))
    }
}

/// Prints the table and writes the requested files.
pub fn publish(results: &BenchmarkResults, args: &BenchmarkArgs) -> Result<()> {
    print_text(&format!("{}{}", table::render(&rows::make_rows(results)), results.failures()))?;
    if let Some(file) = &args.json {
        write(file, &serde_json::to_string_pretty(results)?)?;
    }
    if let Some(file) = &args.markdown {
        write(file, &markdown::render(results))?;
    }
    Ok(())
}

/// True if our target never failed and reaches the required ratio in every cell. A failure of a
/// peer does not matter.
pub fn is_acceptable(results: &BenchmarkResults) -> bool {
    let fine = |cell: &BenchmarkCell| {
        let mut ours = cell.series.iter().filter(|series| series.role == TargetRole::Ours);
        ours.all(|series| series.failure.is_none())
            && cell.comparison().is_none_or(|found| found.verdict != PeerVerdict::Below)
    };
    results.rounds > 0 && results.cells.iter().all(fine)
}

/// The list of workloads.
pub fn catalogue() -> String {
    let row = |case: &BenchmarkCase| {
        vec![case.name.to_owned(), format!("{}x", case.required), case.what.to_owned()]
    };
    let mut rows = vec![vec!["workload".into(), "required".into(), "one operation".into()]];
    rows.extend(BenchmarkCase::ALL.iter().map(row));
    table::render(&rows)
}

/// Writes to standard output. A closed pipe is not an error.
pub fn print_text(text: &str) -> Result<()> {
    match std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("write {}", file.display()))
}

/// The command to repeat the run: the program without its build directory.
fn command_line() -> String {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words = ["cargo run --release -p defuse-bench --".to_owned()].into_iter().chain(arguments);
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(target: &str, role: TargetRole, rates: &[u64]) -> TargetSeries {
        let round = |&operations: &u64| {
            let app_ns = 1_000_000;
            Some(RoundMeasurement {
                operations,
                seconds: 1.0,
                app_ns,
                ..RoundMeasurement::default()
            })
        };
        let rounds = rates.iter().map(round).collect();
        TargetSeries { target: target.into(), role, rounds, failure: None }
    }

    pub(super) fn results() -> BenchmarkResults {
        let cell = BenchmarkCell {
            workload: "create-4k".into(),
            what: "create".into(),
            threads: 1,
            required: 1.5,
            series: vec![
                series("native", TargetRole::Native, &[100, 200]),
                series("libfuse", TargetRole::Peer, &[10, 20]),
                series("fuser-1", TargetRole::Peer, &[20, 40]),
                series("defuse", TargetRole::Ours, &[40, 60]),
            ],
        };
        BenchmarkResults {
            command: "run".into(),
            kernel: "6".into(),
            processors: 2,
            backing: "Ext4".into(),
            rounds: 2,
            targets: vec![("libfuse".into(), "3.14".into())],
            cells: vec![cell],
        }
    }

    #[test]
    fn our_target_is_compared_with_the_better_peer_by_rounds() {
        let results = results();
        let found = results.cells[0].comparison().unwrap();
        assert_eq!(found.peer, "fuser-1");
        assert_eq!(found.rate.median, 1.75);
        assert_eq!(found.verdict, PeerVerdict::Met);
        assert!(is_acceptable(&results));
    }

    #[test]
    fn a_failure_of_our_target_or_no_round_is_not_acceptable() {
        let mut failed = results();
        failed.cells[0].series[1].push(Err(anyhow::anyhow!("no")));
        assert!(is_acceptable(&failed));
        failed.cells[0].series[3].push(Err(anyhow::anyhow!("no")));
        assert!(!is_acceptable(&failed));
        let mut none = results();
        none.rounds = 0;
        assert!(!is_acceptable(&none));
    }

    #[test]
    fn without_our_target_there_is_no_verdict() {
        let mut results = results();
        results.cells[0].series.pop();
        assert!(results.cells[0].comparison().is_none());
        assert!(table::render(&rows::make_rows(&results)).contains("create-4k"));
    }
}
