//! One run: starts the threads together, and ends them in time.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use super::control::RunControl;
use super::failure::RunFailure;
use super::worker::WorkloadThread;
use super::{RunObserver, RunSettings};
use crate::driver::WorkloadDriver;
use crate::files::RunFileset;
use crate::plan::{FlowopKind, FlowopPlan, WorkloadPlan, WorkloadRunPlan};
use crate::report::RunReport;
use crate::statistics::FlowopHistogram;

/// Interval of the timer.
const TICK: Duration = Duration::from_millis(100);

/// Runs the threads of `run` until they end or the time is over.
pub(super) fn run<D: WorkloadDriver>(
    plan: &WorkloadPlan,
    run: &WorkloadRunPlan,
    sets: &[RunFileset],
    driver: &D,
    settings: RunSettings,
    observer: &dyn RunObserver,
) -> Result<RunReport, RunFailure> {
    let control = RunControl::new(plan, run);
    let instances = run.threads.iter().flat_map(|t| (0..t.instances).map(move |_| t));
    let instances: Vec<_> = instances.collect();
    for (number, thread) in instances.iter().enumerate() {
        announce(&control, &thread.flowops, number);
    }
    let mut seconds = 0.0;
    // Threads wait at the gate until all are ready. It opens even after an error.
    let gate = RwLock::new(());
    let closed = gate.write().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        let (ready, all_ready) = channel::<()>();
        let (ended, watch) = channel::<()>();
        for (number, thread) in instances.iter().enumerate() {
            let (control, gate, ready, ended) = (&control, &gate, ready.clone(), ended.clone());
            let body = move || {
                let mut worker = WorkloadThread::new(plan, thread, number, sets, driver, control);
                // The receiver is gone if a later thread could not be started.
                let _ = ready.send(());
                drop(gate.read());
                worker.run();
                drop(ended);
            };
            let name = format!("wml-{number}");
            if let Err(error) = thread::Builder::new().name(name).spawn_scoped(scope, body) {
                let failure = format!("only {number} threads could be started: {error}");
                control.fail(RunFailure::new(failure));
                return drop(closed);
            }
        }
        drop((ready, ended));
        all_ready.iter().take(instances.len()).for_each(drop);
        let began = Instant::now();
        drop(closed);
        watch_run(plan, run, settings, observer, &control, &watch, began);
        seconds = began.elapsed().as_secs_f64();
    });
    match control.take_failure() {
        Some(failure) => Err(failure),
        None => Ok(RunReport::new(
            plan,
            run,
            &collect(plan, &control),
            seconds,
            &control_totals(&control),
        )),
    }
}

/// The totals: CPU time and number of threads.
fn control_totals(control: &RunControl) -> crate::report::RunTotals {
    crate::report::RunTotals { cpu_ns: control.cpu_ns(), threads: control.threads.len() as u64 }
}

fn announce(control: &RunControl, steps: &[FlowopPlan], thread: usize) {
    for step in steps {
        match &step.kind {
            FlowopKind::Composite(inner) => announce(control, inner, thread),
            FlowopKind::SemBlock => {
                control.meetings.announce(step.statistics, thread, step.highwater)
            }
            _ => {}
        }
    }
}

/// The time limit of a run.
pub(super) fn limit_of(run: &WorkloadRunPlan, settings: RunSettings) -> Option<Duration> {
    let limit = run.seconds.map(Duration::from_secs);
    [limit, settings.timeout].into_iter().flatten().min()
}

/// Waits until all threads have ended, reports progress to the observer, and ends the run in time.
fn watch_run(
    plan: &WorkloadPlan,
    run: &WorkloadRunPlan,
    settings: RunSettings,
    observer: &dyn RunObserver,
    control: &RunControl,
    watch: &std::sync::mpsc::Receiver<()>,
    began: Instant,
) {
    let limit = limit_of(run, settings);
    let period = Duration::from_secs(run.period);
    let mut next_report = period;
    let mut before = None::<(Vec<FlowopHistogram>, Duration)>;
    while watch.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        let passed = began.elapsed();
        observer.report_run(passed.as_secs_f64(), control.io());
        if limit.is_some_and(|limit| passed >= limit) {
            control.stop();
        }
        if run.period > 0 && passed >= next_report {
            next_report += period;
            let now = collect(plan, control);
            let (rows, since) = match before.as_ref().filter(|_| run.resets) {
                Some((before, since)) => {
                    let pairs = now.iter().zip(before);
                    (pairs.map(|(now, before)| now.delta_since(before)).collect(), *since)
                }
                None => (now.clone(), Duration::ZERO),
            };
            let seconds = (passed - since).as_secs_f64();
            observer.interval(&RunReport::new(plan, run, &rows, seconds, &control_totals(control)));
            before = Some((now, passed));
        }
    }
}

/// Merges the measurements of all threads so far, by row.
fn collect(plan: &WorkloadPlan, control: &RunControl) -> Vec<FlowopHistogram> {
    let mut rows = vec![FlowopHistogram::default(); plan.rows.len()];
    for thread in &control.threads {
        for (row, cell) in rows.iter_mut().zip(&thread.cells) {
            if let Some(cell) = cell {
                cell.add_to(row);
            }
        }
    }
    rows
}
