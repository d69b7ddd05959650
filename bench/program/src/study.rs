//! `defuse study`, and its subprocess that runs workloads.

use std::path::PathBuf;

use defuse_study::options::{DeviceChoice, StudyConfig, StudyOptions, StudyScale};
use defuse_study::results::StudyResults;
use defuse_study::{engine, report, rows};
use rustix::process::{Resource, getrlimit};

use crate::main_program;
use defuse_command::{CommandFailure, Result, or_failed, print, warn};

/// Measure what user space costs, with the 45 workloads of "To FUSE or Not to FUSE"
///
/// Creates for each row and configuration a fresh ext4 on a temporary loop device, with the files
/// of the row, a mount, cold caches, and a control group that keeps the paper's ratio of memory to
/// data. Then runs the workload. Writes results.json and a self-contained report.html, and prints a
/// table like the paper's. Needs root. Removes everything that it creates. Ctrl-C ends the
/// study and keeps the results.
#[derive(clap::Args)]
pub struct StudyArgs {
    /// The rows, such as 1-12,37 [default: all]
    #[arg(long, value_name = "LIST", value_parser = rows::parse_numbers, default_value = "1-45", hide_default_value = true)]
    rows: std::vec::Vec<u8>,
    /// The size: tiny (request counts), small (5 s per cell) or paper (60 GiB, and hours)
    #[arg(long, default_value = "small")]
    scale: StudyScale,
    /// The configurations to compare: native, base, opt, default
    #[arg(long, value_name = "LIST", default_value = "native,base,opt")]
    configs: String,
    /// A further configuration, by options of a mount or by any command that mounts {source} on
    /// {mountpoint}
    #[arg(long, value_name = "NAME=COMMAND")]
    config: Vec<String>,
    /// Number of measurements of each cell [default: 1; 3 for rows that vary from run to run, 37
    /// and 38]
    #[arg(long, value_name = "N")]
    runs: Option<u32>,
    /// The device to emulate by throttling: ssd, hdd, or none
    #[arg(long, default_value = "ssd")]
    device: DeviceChoice,
    /// The directory for results
    #[arg(long, value_name = "DIR", default_value = "defuse-study")]
    out: PathBuf,
    /// The directory for the image of the file system
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work: PathBuf,
    /// Seed of the random choices of workloads
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Continue with the results in --out
    #[arg(long)]
    resume: bool,
    /// Do not measure the kernel's queues, which adds a little time to each request
    #[arg(long)]
    no_kernel_stages: bool,
    /// Only write table and report again, from the results in DIR
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    report: Option<PathBuf>,
    /// Print the results as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Run a workload for `defuse study`
#[derive(clap::Args)]
pub struct EngineArgs {
    /// The description of the workload
    job: PathBuf,
}

/// Runs a study, or writes the report of an earlier one.
pub fn run(args: &StudyArgs) -> Result {
    let (results, dir) = match &args.report {
        Some(dir) => (StudyResults::read(dir).map_err(or_failed)?, dir),
        None => {
            let options = options(args)?;
            let results =
                defuse_study::run(&options, &mut |line| warn(&line)).map_err(or_failed)?;
            (results, &args.out)
        }
    };
    let page = report::write(&results, dir).map_err(or_failed)?;
    if args.json {
        print(&(serde_json::to_string(&results).map_err(CommandFailure::from_error)? + "\n"))?;
    } else {
        print(&report::table(&results))?;
    }
    warn(&format!("the report is {}", page.display()));
    let failures = results.cells.iter().filter(|cell| cell.error.is_some()).count();
    match failures {
        _ if results.interrupted => {
            Err(CommandFailure::Failed("interrupted: go on with --resume".into()))
        }
        0 => Ok(()),
        _ => Err(CommandFailure::Failed(format!(
            "{failures} cells failed: the report says why, and --resume tries them again"
        ))),
    }
}

/// Runs one workload.
pub fn run_engine(args: &EngineArgs) -> Result {
    match engine::work(&args.job).map_err(or_failed)? {
        Some(output) => print(&output),
        None => Ok(()),
    }
}

fn options(args: &StudyArgs) -> Result<StudyOptions> {
    let mut configs = Vec::new();
    for name in args.configs.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        configs.push(StudyConfig::from_name(name).map_err(CommandFailure::Usage)?);
    }
    for text in &args.config {
        configs.push(StudyConfig::custom(text).map_err(CommandFailure::Usage)?);
    }
    for (place, config) in configs.iter().enumerate() {
        if configs[..place].iter().any(|other| other.name == config.name) {
            return Err(CommandFailure::Usage(format!(
                "configuration {} is named twice: name it once",
                config.name
            )));
        }
    }
    Ok(StudyOptions {
        rows: args.rows.clone(),
        scale: args.scale,
        configs,
        runs: args.runs,
        device: args.device,
        out: args.out.clone(),
        work: args.work.clone(),
        seed: args.seed,
        resume: args.resume,
        program: main_program()?,
        kernel_stages: !args.no_kernel_stages,
        open_files: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
    })
}
