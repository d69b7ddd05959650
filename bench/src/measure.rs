//! Measures one cell: one workload on one target with one number of threads.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde::Serialize;

use crate::cpu::{CpuSample, CpuTimes};
use crate::workloads::{BatchDirs, BatchJob, BenchmarkCase, WorkDeadline};

/// Limit on the time for preparation, as a multiple of the measured time. After it, a cell ends
/// with less measured time.
const PATIENCE: u32 = 6;

/// The measurement of one cell in one round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct RoundMeasurement {
    /// Number of operations.
    pub operations: u64,
    /// Time of the operations in seconds, without preparation.
    pub seconds: f64,
    /// CPU time of the application, in nanoseconds.
    pub app_ns: u64,
    /// CPU time of the daemon, in nanoseconds.
    pub daemon_ns: u64,
    /// CPU time of the whole system, including unrelated programs, in nanoseconds.
    pub system_ns: u64,
}

impl RoundMeasurement {
    /// Operations per second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds
    }

    /// CPU time of application and daemon per operation, in microseconds.
    pub fn cpu_us(&self) -> f64 {
        (self.app_ns + self.daemon_ns) as f64 / 1e3 / self.operations as f64
    }

    /// CPU time of the whole system per operation, in microseconds. It includes the kernel's
    /// threads for write-back, but also unrelated work.
    pub fn system_us(&self) -> f64 {
        self.system_ns as f64 / 1e3 / self.operations as f64
    }

    fn add(&mut self, operations: u64, elapsed: Duration, used: CpuTimes) {
        self.operations += operations;
        self.seconds += elapsed.as_secs_f64();
        self.app_ns += used.app_ns;
        self.daemon_ns += used.daemon_ns;
        self.system_ns += used.system_ns;
    }
}

/// Runs batches of a workload until `least` time has been measured. `place_of` returns the
/// directory of each batch.
pub fn measure(
    case: &BenchmarkCase,
    daemon: Option<u32>,
    least: Duration,
    mut place_of: impl FnMut() -> BatchDirs,
) -> Result<RoundMeasurement> {
    let started = Instant::now();
    let mut sum = RoundMeasurement::default();
    loop {
        let place = place_of();
        let batch = case.jobs(&place).and_then(|jobs| {
            let left = least.saturating_sub(Duration::from_secs_f64(sum.seconds));
            run_batch(jobs, daemon, left)
        });
        // Clean up after a failed batch, too, but report the error of the batch first.
        let cleaned = case.clean_up(&place);
        let (operations, elapsed, used) = batch?;
        cleaned?;
        sum.add(operations, elapsed, used);
        if sum.seconds >= least.as_secs_f64() || started.elapsed() > least * PATIENCE {
            return Ok(sum);
        }
    }
}

/// Releases the jobs together and waits for all of them.
fn run_batch(
    jobs: Vec<BatchJob>,
    daemon: Option<u32>,
    time: Duration,
) -> Result<(u64, Duration, CpuTimes)> {
    let ready = Barrier::new(jobs.len() + 1);
    let go = Barrier::new(jobs.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = jobs
            .into_iter()
            .map(|job| {
                let (ready, go) = (&ready, &go);
                scope.spawn(move || {
                    ready.wait();
                    go.wait();
                    job(&WorkDeadline(Instant::now() + time))
                })
            })
            .collect();
        ready.wait();
        let before = CpuSample::take(daemon);
        let start = Instant::now();
        go.wait();
        let done: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let elapsed = start.elapsed();
        let used = before.usage_until(&CpuSample::take(daemon));
        let mut operations = 0;
        for result in done {
            operations += result.map_err(|_| anyhow!("a workload thread panicked"))??;
        }
        Ok((operations, elapsed, used))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_per_operation() {
        let mut sum = RoundMeasurement::default();
        let used = CpuTimes { app_ns: 3_000, daemon_ns: 1_000, system_ns: 9_000 };
        sum.add(2, Duration::from_millis(500), used);
        assert_eq!((sum.rate(), sum.cpu_us(), sum.system_us()), (4.0, 2.0, 4.5));
    }

    #[test]
    fn a_batch_adds_up_its_threads() {
        let jobs: Vec<BatchJob> =
            (0..4).map(|_| Box::new(|_: &WorkDeadline| Ok(5_u64)) as BatchJob).collect();
        assert_eq!(run_batch(jobs, None, Duration::ZERO).unwrap().0, 20);
        let failing: Vec<BatchJob> = vec![Box::new(|_| Err(anyhow!("no")))];
        assert!(run_batch(failing, None, Duration::ZERO).is_err());
    }
}
