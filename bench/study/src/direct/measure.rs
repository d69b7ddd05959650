//! The rounds: measures every case on every target in turn.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::caches;
use defuse_probe::Op as Request;

use super::places::{self, DirectSetup, MOUNT, TargetGroup, WORK_PREFIX};
use super::results::{DirectCase, DirectCell, DirectResults, DirectTable, LowerFileSystem, SCHEMA};
use super::worker::{self, WorkerOp, WorkerOrder};
use super::{DirectOptions, DirectScale, startup};
use crate::check;
use crate::interrupt::InterruptFlag;
use crate::results::MachineFacts;

/// No round begins that would probably end after this time.
const ENOUGH: Duration = Duration::from_secs(150);
/// A file that fits into a processor's cache, for tables that do not compare data transfer: 1024
/// blocks of 4 KiB.
const SMALL_FILE: u64 = 4 << 20;
/// Minimum number of passes over a file for each target in a round.
const PASSES: u64 = 4;
/// Minimum duration in milliseconds: about ten passes of the fastest target.
const AT_LEAST_MS: u64 = 25;

/// Runs all measurements. `tell` receives lines of progress.
///
/// After a signal, the current round is dropped, and the previous rounds are the result.
///
/// # Errors
///
/// Fails if a requirement is missing, before creating anything; and with any later error, because
/// an incomplete table compares nothing.
pub fn run(options: &DirectOptions, tell: &mut dyn FnMut(&str)) -> Result<DirectResults> {
    let libfuse = check_requirements(options)?;
    for path in check::clear_directories(&options.work, WORK_PREFIX) {
        tell(&format!("removed the remains of an earlier measurement: {}", path.display()));
    }
    let mut results = begin_results(options, libfuse.as_deref());
    for left_out in &results.left_out {
        tell(&format!("left out: {left_out}"));
    }
    let interrupt = InterruptFlag::catch()?;
    let mut stage = DirectSetup::set(options, libfuse.as_deref())?;
    let cpus = worker::processors()?;
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    for round in 1..=options.rounds {
        if round > 1 && begun.elapsed() + longest > ENOUGH {
            tell(&format!("ended after {} rounds: two and a half minutes are over", round - 1));
            break;
        }
        let start = Instant::now();
        let (cpu, cells) = (cpus[round as usize % cpus.len()], Vec::new());
        let mut current =
            DirectRound { stage: &mut stage, scale: &options.scale, round, cpu, turn: 0, cells };
        let done = current.measure(&interrupt)?;
        results.cells.append(&mut current.cells);
        if done {
            let data = stage.data(LowerFileSystem::Tmpfs);
            results.starts.push(startup::measure(options, &data, round)?);
        }
        if !done || interrupt.is_set() {
            results.interrupted = true;
            break;
        }
        results.rounds = round;
        longest = longest.max(start.elapsed());
        tell(&format!(
            "round {round} of {} in {:.1} s",
            options.rounds,
            start.elapsed().as_secs_f64()
        ));
    }
    let rounds = results.rounds;
    results.cells.retain(|cell| cell.round <= rounds);
    results.starts.retain(|start| start.round <= rounds);
    ensure!(rounds > 0, "interrupted in the first round: nothing was measured");
    Ok(results)
}

/// Checks the requirements before creating anything. Returns the path of libfuse's program.
fn check_requirements(options: &DirectOptions) -> Result<Option<std::path::PathBuf>> {
    check::can_make_and_mount()?;
    ensure!(options.rounds > 0, "--rounds 0 measures nothing: write 1 or more");
    check::space(&options.work, places::image_bytes(options), "--work")?;
    let needed = places::ram_bytes(options) + options.scale.file_bytes;
    if let Some(available) = read_available_memory() {
        ensure!(
            available > needed,
            "{} MiB of memory are available, and {} MiB are needed for files on tmpfs: free memory, or use --scale tiny",
            available >> 20,
            needed.div_ceil(1 << 20)
        );
    }
    places::find_libfuse(options)
}

/// Available memory in bytes.
pub(crate) fn read_available_memory() -> Option<u64> {
    parse_available(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

/// Available memory in bytes, from the contents of `/proc/meminfo`.
fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn begin_results(options: &DirectOptions, libfuse: Option<&Path>) -> DirectResults {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let left_out = if libfuse.is_some() {
        "libfuse on ext4: it has no direct_io, and with O_DIRECT it would leave out the cache of ext4, too"
    } else {
        "libfuse: no passthrough_hp was found; `cargo xtask bench --targets libfuse` builds it, --libfuse names it"
    };
    DirectResults {
        schema: SCHEMA.into(),
        program: env!("CARGO_PKG_VERSION").into(),
        optimised: !cfg!(debug_assertions),
        started_unix_ms: u64::try_from(now.as_millis()).unwrap_or(0),
        machine: MachineFacts::read_machine(),
        load: load.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0),
        rounds: 0,
        writes: options.scale.writes,
        file_bytes: options.scale.file_bytes,
        targets: places::targets(libfuse),
        left_out: vec![left_out.to_owned()],
        interrupted: false,
        cells: Vec::new(),
        starts: Vec::new(),
    }
}

/// One round.
struct DirectRound<'a> {
    stage: &'a mut DirectSetup,
    scale: &'a DirectScale,
    round: u32,
    /// The processor of all targets' programs, another one in each round.
    cpu: usize,
    /// Number of cases measured, so that another target begins each time.
    turn: usize,
    cells: Vec<DirectCell>,
}

impl DirectRound<'_> {
    /// Measures all cases. Returns false after a signal.
    fn measure(&mut self, interrupt: &InterruptFlag) -> Result<bool> {
        let cases = self.cases();
        let mut lower = None;
        for case in cases {
            if interrupt.is_set() {
                return Ok(false);
            }
            if lower.replace(case.lower) != Some(case.lower) {
                // Write back the data of earlier cases, so that it is not measured here.
                caches::sync(&self.stage.data(case.lower))?;
            }
            // The signal may also have made a worker fail.
            match self.case(case) {
                Err(_) if interrupt.is_set() => return Ok(false),
                outcome => outcome?,
            }
        }
        Ok(true)
    }

    /// The cases, in order.
    fn cases(&self) -> Vec<DirectCase> {
        let mut cases = Vec::new();
        let mut add = |table, lower, ops: &[WorkerOp], blocks: &[u64]| {
            for &block in blocks {
                cases.extend(ops.iter().map(|&op| DirectCase { table, lower, op, block }));
            }
        };
        add(
            DirectTable::Writes,
            LowerFileSystem::Tmpfs,
            &[WorkerOp::Write],
            &self.scale.write_blocks,
        );
        for lower in [LowerFileSystem::Tmpfs, LowerFileSystem::Ext4] {
            let ops = [WorkerOp::Write, WorkerOp::Rewrite, WorkerOp::Read];
            add(DirectTable::Sequential, lower, &ops, &self.scale.blocks);
        }
        add(
            DirectTable::Memory,
            LowerFileSystem::Tmpfs,
            &[WorkerOp::Rewrite, WorkerOp::Read],
            &[4096],
        );
        let ops = [WorkerOp::Rewrite, WorkerOp::Read];
        add(DirectTable::Share, LowerFileSystem::Tmpfs, &ops, &self.scale.share_blocks);
        cases
    }

    /// Measures one case on each target of its group.
    fn case(&mut self, case: DirectCase) -> Result<()> {
        let order = self.order(case);
        let (round, turn) = (self.round, self.turn);
        self.turn += 1;
        let stage = &mut *self.stage;
        let group: &mut TargetGroup = match (case.table, case.lower) {
            (DirectTable::Writes | DirectTable::Sequential, LowerFileSystem::Tmpfs) => {
                &mut stage.tmpfs
            }
            (DirectTable::Writes | DirectTable::Sequential, LowerFileSystem::Ext4) => {
                &mut stage.ext4
            }
            (DirectTable::Memory, _) => &mut stage.memory,
            (DirectTable::Share, _) => &mut stage.client,
        };
        let members = group.len();
        for place in 0..members {
            let member = &mut group[(place + turn + round as usize) % members];
            if matches!(case.table, DirectTable::Memory | DirectTable::Share)
                && case.op == WorkerOp::Rewrite
            {
                // Files to rewrite or read must exist, in these tables even for the first target.
                member.worker.perform(WorkerOrder {
                    op: WorkerOp::Write,
                    passes: 1,
                    at_least_ms: 0,
                    ..order
                })?;
            }
            if case.table == DirectTable::Writes {
                // There is only one pass, which must not start on an idle processor.
                member.worker.perform(WorkerOrder { at_least_ms: AT_LEAST_MS, ..order })?;
            }
            let requested = member
                .mount
                .filter(|_| case.table == DirectTable::Writes && member.target == MOUNT);
            let requests = |stage: &[crate::mount::StudyMount]| {
                requested.map(|place| requests(&stage[place])).transpose()
            };
            let before = requests(&stage.mounts)?;
            let outcome = member.worker.perform(order)?;
            let after = requests(&stage.mounts)?;
            if case.table == DirectTable::Writes {
                // Only one file may be large at a time.
                member.worker.perform(WorkerOrder { calls: 0, passes: 1, ..order })?;
            }
            self.cells.push(DirectCell {
                case,
                target: member.target.to_owned(),
                round,
                passes: outcome.passes,
                calls: outcome.calls,
                bytes: outcome.bytes,
                ns: outcome.ns,
                app: outcome.app,
                server: outcome.server,
                requests: after.zip(before).map(|(after, before)| after - before),
            });
        }
        Ok(())
    }

    fn order(&self, case: DirectCase) -> WorkerOrder {
        let DirectCase { op, block, .. } = case;
        let small = SMALL_FILE.min(self.scale.file_bytes);
        let (calls, passes, at_least_ms) = match case.table {
            // Context switches are counted for an exact number of calls.
            DirectTable::Writes => (self.scale.writes, 1, 0),
            DirectTable::Sequential => (self.scale.file_bytes / block, PASSES, AT_LEAST_MS),
            DirectTable::Memory | DirectTable::Share => (small / block, 4 * PASSES, AT_LEAST_MS),
        };
        WorkerOrder { op, block, calls, passes, at_least_ms, cpu: self.cpu }
    }
}

/// Number of READ and WRITE requests to a daemon.
fn requests(mount: &crate::mount::StudyMount) -> Result<u64> {
    let Some(snapshot) = mount.snapshot()? else { bail!("a mount of defuse has no statistics") };
    let count = |op| snapshot.get(op).map_or(0, |stats| stats.latency.count);
    Some(count(Request::READ) + count(Request::WRITE)).context("no requests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_comes_from_meminfo() {
        assert_eq!(parse_available("MemFree: 1 kB\nMemAvailable:   12 kB\n"), Some(12288));
        assert_eq!(parse_available("MemFree: 1 kB\n"), None);
    }
}
