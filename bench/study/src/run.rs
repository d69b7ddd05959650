//! The study: runs all cells, and writes their results as they come.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use defuse_measure::limits;

use crate::cell::Bench;
use crate::cgroup::Hierarchies;
use crate::check::{self, Work};
use crate::device::Device;
use crate::interrupt::Interrupt;
use crate::kernel::KernelStages;
use crate::options::{Config, DeviceChoice, Options};
use crate::results::{Cell, DeviceFacts, Machine, NOT_OPTIMISED, Results, SCHEMA};
use crate::rows::Row;
use crate::sizes::{self, Estimate, Sizes};
use crate::throttle::{self, Limits};

/// Runs the study and writes the results into its directory, cell by cell. `tell` receives lines of
/// progress.
///
/// After a signal, the current cell is dropped, and the previous measurements are the result.
///
/// # Errors
///
/// Fails if a requirement is missing, before the start, or if the directory cannot be written. A
/// failed cell is a result, and the study continues.
pub fn run(options: &Options, tell: &mut dyn FnMut(&str)) -> Result<Results> {
    let hierarchies = Hierarchies::detect();
    let estimate = Estimate::of(options);
    check::before_start(options, &estimate, &hierarchies)?;
    let kernel = KernelStages::probe(options.kernel_stages);
    let mut results = beginning(options, &hierarchies, &kernel)?;
    for path in check::clear_left_behind(&options.work, &hierarchies) {
        tell(&format!("removed the remains of an earlier study: {}", path.display()));
    }
    introduce(options, &estimate, &results, tell);
    let interrupt = Interrupt::catch()?;
    // The paper's profiles hold a descriptor for each inode that the kernel knows.
    limits::raise_file_limit();
    let work = Work::create(&options.work)?;
    let device = Device::create(work.path(), estimate.image_bytes, estimate.inodes)?;
    let bench =
        Bench { options, device, work: work.path().to_owned(), hierarchies, kernel, interrupt };
    all_cells(bench, &mut results, tell)?;
    Ok(results)
}

/// Empty results, or those to continue with.
fn beginning(
    options: &Options,
    hierarchies: &Hierarchies,
    kernel: &KernelStages,
) -> Result<Results> {
    let fresh = fresh(options, hierarchies, kernel);
    if !options.resume {
        ensure!(
            !options.out.join(crate::results::FILE).exists(),
            "{} has results already: continue with --resume, or name another directory with --out",
            options.out.display()
        );
        return Ok(fresh);
    }
    let mut old = Results::read(&options.out)?;
    for (what, same) in [
        ("--scale", old.scale == fresh.scale),
        ("--seed", old.seed == fresh.seed),
        ("--device", old.device.emulated == fresh.device.emulated),
    ] {
        ensure!(
            same,
            "the results in {} were measured with another {what}: give the same, or another --out",
            options.out.display()
        );
    }
    for config in &options.configs {
        match old.configs.iter().find(|old| old.name == config.name) {
            Some(known) if known != config => {
                bail!(
                    "configuration {} was another one in {}: give it another name",
                    config.name,
                    options.out.display()
                )
            }
            Some(_) => {}
            None => old.configs.push(config.clone()),
        }
    }
    old.rows.extend(&options.rows);
    old.rows.sort_unstable();
    old.rows.dedup();
    old.runs = old.runs.max(options.runs);
    Ok(old)
}

fn fresh(options: &Options, hierarchies: &Hierarchies, kernel: &KernelStages) -> Results {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let emulated = match options.device {
        DeviceChoice::Emulated(media) => Some(media),
        DeviceChoice::None => None,
    };
    let memory = match hierarchies.memory_version() {
        _ if options.scale == crate::options::Scale::Tiny => "not limited at scale tiny".into(),
        Some(version) => format!("limited by {version}, 4 GB for 60 GB of data"),
        None => "memory not limited: no memory control group can be created here".into(),
    };
    Results {
        schema: SCHEMA.into(),
        program: version(),
        started_unix_ms: u64::try_from(now.as_millis()).unwrap_or(0),
        machine: Machine::this(),
        scale: options.scale,
        seed: options.seed,
        runs: options.runs,
        rows: options.rows.clone(),
        configs: options.configs.clone(),
        device: DeviceFacts {
            description: emulated
                .map_or_else(|| "loop device, not throttled".into(), throttle::describe),
            emulated,
            limits: emulated.map(Limits::of),
            image_on: check::file_system_of(&options.work),
        },
        memory,
        kernel_stages: kernel.describe(),
        interrupted: false,
        cells: Vec::new(),
    }
}

fn introduce(
    options: &Options,
    estimate: &Estimate,
    results: &Results,
    tell: &mut dyn FnMut(&str),
) {
    let cells = options.rows.len() * options.configs.len() * options.runs as usize;
    tell(&format!(
        "{} rows, {} configurations, {} runs: {cells} cells, about {}; up to {} MiB in {}",
        options.rows.len(),
        options.configs.len(),
        options.runs,
        duration(estimate.seconds),
        estimate.image_bytes >> 20,
        options.work.display()
    ));
    tell(&format!("device: {}, image on {}", results.device.description, results.device.image_on));
    tell(&format!("memory: {}", results.memory));
    tell(&format!("kernel queues: {}", results.kernel_stages));
    if cfg!(debug_assertions) {
        tell("this build is not optimised, so throughput is meaningless; request counts are valid");
    }
}

/// Run by run, row by row, and configuration by configuration, so that compared cells are close in
/// time. The first configuration of a row changes with the run, so that the order favours none.
fn plan(options: &Options) -> Vec<(u32, u8, &Config)> {
    let mut cells = Vec::new();
    for run in 1..=options.runs {
        for &row in &options.rows {
            let configs = &options.configs;
            let first = run as usize - 1;
            let turn = |place: usize| &configs[(first + place) % configs.len()];
            cells.extend((0..configs.len()).map(|place| (run, row, turn(place))));
        }
    }
    cells
}

fn all_cells(
    mut bench: Bench<'_>,
    results: &mut Results,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let options = bench.options;
    let mut cells = plan(options);
    cells.retain(|(run, row, config)| !results.has(*row, &config.name, *run));
    let expected = |row: u8| sizes::seconds(row, &Sizes::of(row, options), options);
    let mut left: f64 = cells.iter().map(|(_, row, _)| expected(*row)).sum();
    let (begun, all) = (Instant::now(), left);
    results.interrupted = false;
    for (place, (run, row, config)) in cells.iter().enumerate() {
        if bench.interrupt.is_set() {
            results.interrupted = true;
            break;
        }
        let outcome = bench.measure(*row, config);
        if bench.interrupt.is_set() && outcome.is_err() {
            results.interrupted = true;
            break;
        }
        // Rounding may make the rest negative.
        left = (left - expected(*row)).max(0.0);
        let remaining = left * begun.elapsed().as_secs_f64() / (all - left).max(1e-3);
        tell(&progress(place + 1, cells.len(), *row, config, &outcome, remaining));
        let (measured, error) = match outcome {
            Ok(measured) => (Some(measured), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        results.put(Cell { row: *row, config: config.name.clone(), run: *run, measured, error });
        results.write(&options.out)?;
    }
    results.write(&options.out)
}

fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    if cfg!(debug_assertions) { format!("{version} {NOT_OPTIMISED}") } else { version.into() }
}

fn progress(
    place: usize,
    all: usize,
    row: u8,
    config: &Config,
    outcome: &Result<crate::results::Measured>,
    remaining: f64,
) -> String {
    let name = Row::get(row).map_or("", |row| row.name.as_str());
    let told = match outcome {
        Ok(measured) => {
            format!("{:>10.0} ops/s in {:.2} s", measured.ops_per_s(), measured.seconds)
        }
        Err(error) => format!("failed: {error:#}"),
    };
    format!(
        "[{place}/{all}] {row:>2} {name:<20} {:<8} {told}; about {} left",
        config.name,
        duration(remaining)
    )
}

/// A duration as text.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Scale;
    use crate::rows::Media;

    fn options(out: &std::path::Path) -> Options {
        Options {
            rows: vec![1, 37],
            scale: Scale::Tiny,
            configs: ["native", "base"].map(|name| Config::named(name).unwrap()).to_vec(),
            runs: 2,
            device: DeviceChoice::Emulated(Media::Ssd),
            out: out.to_owned(),
            work: out.to_owned(),
            seed: 1,
            resume: false,
            program: "defuse".into(),
            kernel_stages: false,
            open_files: 1 << 20,
        }
    }

    #[test]
    fn configurations_alternate_and_the_first_one_changes() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let order: Vec<_> =
            plan(&options).iter().map(|(run, row, c)| format!("{run} {row} {}", c.name)).collect();
        let expected = [
            "1 1 native",
            "1 1 base",
            "1 37 native",
            "1 37 base",
            "2 1 base",
            "2 1 native",
            "2 37 base",
            "2 37 native",
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn results_are_not_overwritten_and_only_the_same_study_is_continued() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(dir.path());
        let (hierarchies, kernel) = (Hierarchies::default(), KernelStages::probe(false));
        let begin = |options: &Options| beginning(options, &hierarchies, &kernel);
        begin(&options).unwrap().write(dir.path()).unwrap();
        assert!(begin(&options).unwrap_err().to_string().contains("--resume"));
        options.resume = true;
        options.rows = vec![2];
        assert_eq!(begin(&options).unwrap().rows, [1, 2, 37]);
        options.seed = 9;
        assert!(begin(&options).unwrap_err().to_string().contains("--seed"));
        options.seed = 1;
        options.configs[1] = Config::custom("base=-o writeback").unwrap();
        assert!(begin(&options).unwrap_err().to_string().contains("another name"));
    }
}
