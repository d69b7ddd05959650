//! The study: runs all cells, and writes their results as they come.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use defuse_measure::limits;

use crate::cell::StudyContext;
use crate::cgroup::CgroupHierarchies;
use crate::check::{self, StudyDirectory};
use crate::device::StudyDevice;
use crate::interrupt::InterruptFlag;
use crate::kernel::KernelStages;
use crate::options::{DeviceChoice, StudyConfig, StudyOptions};
use crate::results::{DeviceFacts, MachineFacts, NOT_OPTIMISED, SCHEMA, StudyCell, StudyResults};
use crate::rows::PublishedRow;
use crate::sizes::{self, RowSizes, StudyEstimate};
use crate::throttle::{self, ThrottleLimits};

/// Runs the study and writes the results into its directory, cell by cell. `tell` receives lines of
/// progress.
///
/// After a signal, the current cell is dropped, and the previous measurements are the result.
///
/// # Errors
///
/// Fails if a requirement is missing, before the start, or if the directory cannot be written. A
/// failed cell is a result, and the study continues.
pub fn run(options: &StudyOptions, tell: &mut dyn FnMut(&str)) -> Result<StudyResults> {
    let hierarchies = CgroupHierarchies::detect();
    let estimate = StudyEstimate::compute(options);
    check::check_options(options, &estimate, &hierarchies)?;
    let kernel = KernelStages::probe(options.kernel_stages);
    let mut results = begin_results(options, &hierarchies, &kernel)?;
    for path in check::clear_left_behind(&options.work, &hierarchies) {
        tell(&format!("removed the remains of an earlier study: {}", path.display()));
    }
    introduce(options, &estimate, &results, tell);
    let interrupt = InterruptFlag::catch()?;
    // The paper's profiles hold a descriptor for each inode that the kernel knows.
    limits::raise_file_limit();
    let work = StudyDirectory::create(&options.work)?;
    let device = StudyDevice::create(work.path(), estimate.image_bytes, estimate.inodes)?;
    let bench = StudyContext {
        options,
        device,
        work: work.path().to_owned(),
        hierarchies,
        kernel,
        interrupt,
    };
    run_cells(bench, &mut results, tell)?;
    Ok(results)
}

/// Empty results, or those to continue with.
fn begin_results(
    options: &StudyOptions,
    hierarchies: &CgroupHierarchies,
    kernel: &KernelStages,
) -> Result<StudyResults> {
    let fresh = make_results(options, hierarchies, kernel);
    if !options.resume {
        ensure!(
            !options.out.join(crate::results::FILE).exists(),
            "{} has results already: continue with --resume, or name another directory with --out",
            options.out.display()
        );
        return Ok(fresh);
    }
    let mut old = StudyResults::read(&options.out)?;
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
    old.runs = old.runs.max(options.most_runs());
    Ok(old)
}

fn make_results(
    options: &StudyOptions,
    hierarchies: &CgroupHierarchies,
    kernel: &KernelStages,
) -> StudyResults {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let emulated = match options.device {
        DeviceChoice::Emulated(media) => Some(media),
        DeviceChoice::None => None,
    };
    let memory = match hierarchies.memory_version() {
        _ if options.scale == crate::options::StudyScale::Tiny => {
            "not limited at scale tiny".into()
        }
        Some(version) => format!("limited by {version}, 4 GB for 60 GB of data"),
        None => "memory not limited: no memory control group can be created here".into(),
    };
    StudyResults {
        schema: SCHEMA.into(),
        program: version(),
        started_unix_ms: u64::try_from(now.as_millis()).unwrap_or(0),
        machine: MachineFacts::read_machine(),
        scale: options.scale,
        seed: options.seed,
        runs: options.most_runs(),
        rows: options.rows.clone(),
        configs: options.configs.clone(),
        device: DeviceFacts {
            description: emulated
                .map_or_else(|| "loop device, not throttled".into(), throttle::describe),
            emulated,
            limits: emulated.map(ThrottleLimits::for_media),
            image_on: check::file_system_of(&options.work),
        },
        memory,
        kernel_stages: kernel.describe(),
        interrupted: false,
        cells: Vec::new(),
    }
}

fn introduce(
    options: &StudyOptions,
    estimate: &StudyEstimate,
    results: &StudyResults,
    tell: &mut dyn FnMut(&str),
) {
    let of_row = |row: &u8| options.runs_of(*row) as usize;
    let cells = options.configs.len() * options.rows.iter().map(of_row).sum::<usize>();
    tell(&format!(
        "{} rows, {} configurations, {}: {cells} cells, about {}; up to {} MiB in {}",
        options.rows.len(),
        options.configs.len(),
        describe_runs(options),
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

/// The numbers of runs, for the user.
fn describe_runs(options: &StudyOptions) -> String {
    let most = options.most_runs();
    if options.rows.iter().all(|row| options.runs_of(*row) == most) {
        return format!("{most} {}", if most == 1 { "run" } else { "runs" });
    }
    format!("1 run ({most} of rows that vary)")
}

/// Run by run, row by row, and configuration by configuration, so that compared cells are close in
/// time. The first configuration of a row changes with the run, so that the order favours none.
fn plan(options: &StudyOptions) -> Vec<(u32, u8, &StudyConfig)> {
    let mut cells = Vec::new();
    for run in 1..=options.most_runs() {
        for &row in options.rows.iter().filter(|row| options.runs_of(**row) >= run) {
            let configs = &options.configs;
            let first = run as usize - 1;
            let turn = |place: usize| &configs[(first + place) % configs.len()];
            cells.extend((0..configs.len()).map(|place| (run, row, turn(place))));
        }
    }
    cells
}

fn run_cells(
    mut bench: StudyContext<'_>,
    results: &mut StudyResults,
    tell: &mut dyn FnMut(&str),
) -> Result<()> {
    let options = bench.options;
    let mut cells = plan(options);
    cells.retain(|(run, row, config)| !results.has(*row, &config.name, *run));
    let expected = |row: u8| sizes::seconds(row, &RowSizes::for_row(row, options), options);
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
        results.insert(StudyCell {
            row: *row,
            config: config.name.clone(),
            run: *run,
            measured,
            error,
        });
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
    config: &StudyConfig,
    outcome: &Result<crate::results::CellMeasurement>,
    remaining: f64,
) -> String {
    let name = PublishedRow::get(row).map_or("", |row| row.name.as_str());
    let labels = match outcome {
        Ok(measured) => {
            format!("{:>10.0} ops/s in {:.2} s", measured.ops_per_s(), measured.seconds)
        }
        Err(error) => format!("failed: {error:#}"),
    };
    format!(
        "[{place}/{all}] {row:>2} {name:<20} {:<8} {labels}; about {} left",
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
    use crate::options::StudyScale;
    use crate::rows::StorageMedia;

    fn options(out: &std::path::Path) -> StudyOptions {
        StudyOptions {
            rows: vec![1, 37],
            scale: StudyScale::Tiny,
            configs: ["native", "base"].map(|name| StudyConfig::from_name(name).unwrap()).to_vec(),
            runs: Some(2),
            device: DeviceChoice::Emulated(StorageMedia::Ssd),
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

    /// Row 38 was natively 25 times as fast in one run as in another, and a table of single runs
    /// did not say so.
    #[test]
    fn rows_that_vary_run_three_times_unless_a_number_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let default = StudyOptions { runs: None, scale: StudyScale::Small, ..options(dir.path()) };
        let runs = |options: &StudyOptions, row: u8| {
            plan(options).iter().filter(|cell| cell.1 == row).count()
        };
        assert_eq!((runs(&default, 1), runs(&default, 37)), (2, 6));
        assert_eq!(describe_runs(&default), "1 run (3 of rows that vary)");
        let given = StudyOptions { runs: Some(1), ..default.clone() };
        assert_eq!((runs(&given, 1), runs(&given, 37)), (2, 2));
        let tiny = StudyOptions { scale: StudyScale::Tiny, ..default };
        assert_eq!((runs(&tiny, 37), describe_runs(&tiny)), (2, "1 run".to_owned()));
    }

    #[test]
    fn results_are_not_overwritten_and_only_the_same_study_is_continued() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(dir.path());
        let (hierarchies, kernel) = (CgroupHierarchies::default(), KernelStages::probe(false));
        let begin = |options: &StudyOptions| begin_results(options, &hierarchies, &kernel);
        begin(&options).unwrap().write(dir.path()).unwrap();
        assert!(begin(&options).unwrap_err().to_string().contains("--resume"));
        options.resume = true;
        options.rows = vec![2];
        assert_eq!(begin(&options).unwrap().rows, [1, 2, 37]);
        options.seed = 9;
        assert!(begin(&options).unwrap_err().to_string().contains("--seed"));
        options.seed = 1;
        options.configs[1] = StudyConfig::custom("base=-o writeback").unwrap();
        assert!(begin(&options).unwrap_err().to_string().contains("another name"));
    }
}
