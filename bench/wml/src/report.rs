//! The result of a run, as numbers, as text in the shape of Filebench's summary, and as JSON.

use std::fmt;

use serde::Serialize;

use crate::plan::{PlanScaling, StatisticsRow, WorkloadPlan, WorkloadRunPlan};
use crate::statistics::FlowopHistogram;

/// One flowop, over all threads.
#[derive(Clone, Debug, Serialize)]
pub struct FlowopReport {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: &'static str,
    /// It is included in the summary.
    pub io: bool,
    /// Number of operations.
    pub operations: u64,
    /// Operations per second.
    pub operations_per_second: f64,
    /// Bytes of data transferred.
    pub bytes: u64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// The mean latency in ns.
    pub mean_ns: u64,
    /// Median latency in ns.
    pub p50_ns: u64,
    /// 99th percentile of the latency in ns.
    pub p99_ns: u64,
    /// Minimum latency in ns.
    pub min_ns: u64,
    /// Maximum latency in ns.
    pub max_ns: u64,
    /// Counts by powers of two of ns, if the file contains `enable lathist`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<(u64, u64)>,
}

impl FlowopReport {
    fn new(row: &StatisticsRow, measured: &FlowopHistogram, seconds: f64, histogram: bool) -> Self {
        let rate = |amount: u64| if seconds > 0.0 { amount as f64 / seconds } else { 0.0 };
        FlowopReport {
            name: row.name.clone(),
            kind: row.kind,
            io: row.io,
            operations: measured.count,
            operations_per_second: rate(measured.count),
            bytes: measured.bytes,
            bytes_per_second: rate(measured.bytes),
            mean_ns: measured.mean_ns(),
            p50_ns: measured.percentile_ns(0.5),
            p99_ns: measured.percentile_ns(0.99),
            min_ns: measured.min_ns(),
            max_ns: measured.max_ns(),
            histogram: if histogram { measured.powers() } else { Vec::new() },
        }
    }
}

/// Totals of a run.
pub(crate) struct RunTotals {
    pub cpu_ns: u64,
    pub threads: u64,
}

/// The result of one `run`, or of one of its periods.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// The name of the workload.
    pub workload: String,
    /// Duration in seconds.
    pub seconds: f64,
    /// Number of threads.
    pub threads: u64,
    /// The seed of all random numbers.
    pub seed: u64,
    /// The changes by scaling.
    pub scaling: PlanScaling,
    /// Average size of all files together when all exist, in bytes.
    pub data_bytes: u64,
    /// All I/O flowops together.
    pub total: FlowopReport,
    /// Number of operations that read data.
    pub reads: u64,
    /// Number of operations that wrote data.
    pub writes: u64,
    /// CPU time of the threads per I/O operation, in ns; 0 for a period.
    pub cpu_ns_per_operation: u64,
    /// Each flowop, in the order of the file.
    pub flowops: Vec<FlowopReport>,
}

impl RunReport {
    pub(crate) fn new(
        plan: &WorkloadPlan,
        run: &WorkloadRunPlan,
        rows: &[FlowopHistogram],
        seconds: f64,
        totals: &RunTotals,
    ) -> Self {
        let mut io = FlowopHistogram::default();
        let (mut reads, mut writes) = (0, 0);
        let mut flowops = Vec::new();
        for (row, measured) in plan.rows.iter().zip(rows) {
            if row.io {
                io.merge(measured);
                reads += if row.reads { measured.count } else { 0 };
                writes += if row.writes { measured.count } else { 0 };
            }
            flowops.push(FlowopReport::new(row, measured, seconds, run.histogram));
        }
        let all = StatisticsRow {
            name: "total".into(),
            kind: "total",
            io: true,
            reads: false,
            writes: false,
        };
        RunReport {
            workload: plan.name.clone(),
            seconds,
            threads: totals.threads,
            seed: plan.seed,
            scaling: plan.scaling.clone(),
            data_bytes: plan.data_bytes(),
            total: FlowopReport::new(&all, &io, seconds, run.histogram),
            reads,
            writes,
            cpu_ns_per_operation: totals.cpu_ns.checked_div(io.count).unwrap_or(0),
            flowops,
        }
    }

    /// The flowop called `name`.
    pub fn flowop(&self, name: &str) -> Option<&FlowopReport> {
        self.flowops.iter().find(|flowop| flowop.name == name)
    }

    /// The last line of the summary.
    pub fn summary(&self) -> String {
        let FlowopReport { operations, operations_per_second, bytes_per_second, .. } = &self.total;
        let rate = |count: u64| if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 };
        format!(
            "IO Summary: {operations} ops {operations_per_second:.3} ops/s {:.0}/{:.0} rd/wr \
             {:.1} mb/s {} ms/op",
            rate(self.reads),
            rate(self.writes),
            bytes_per_second / f64::from(1 << 20),
            milliseconds(self.total.mean_ns),
        )
    }
}

fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:24} {:>12} {:>12} {:>10} {:>9} {:>9} {:>9} {:>9}",
            "Flowop", "ops", "ops/s", "mb/s", "ms/op", "p50", "p99", "max"
        )?;
        for flowop in self.flowops.iter().filter(|flowop| flowop.operations > 0) {
            writeln!(
                f,
                "{:24} {:>12} {:>12.1} {:>10.1} {:>9} {:>9} {:>9} {:>9}",
                flowop.name,
                flowop.operations,
                flowop.operations_per_second,
                flowop.bytes_per_second / f64::from(1 << 20),
                milliseconds(flowop.mean_ns),
                milliseconds(flowop.p50_ns),
                milliseconds(flowop.p99_ns),
                milliseconds(flowop.max_ns),
            )?;
            for (from, count) in &flowop.histogram {
                writeln!(f, "    from {from:>14} ns {count:>12}")?;
            }
        }
        let (cpu, threads) = (self.cpu_ns_per_operation as f64 / 1e3, self.threads);
        let seconds = self.seconds;
        writeln!(f, "{} {cpu:.1} us cpu/op, {threads} threads, {seconds:.3} s", self.summary())
    }
}
