//! `defuse bench gluster`, and its subprocesses.

use std::path::PathBuf;

use defuse_study::gluster::cases::{CaseSelection, VolumeKind};
use defuse_study::gluster::names::{SmallFileOrder, perform};
use defuse_study::gluster::targets::{ALL, GlusterTargetSpec};
use defuse_study::gluster::{self, GlusterStudyOptions, InsideOrder, goals};

use crate::main_program;
use defuse_command::or_failed;
use defuse_command::{CommandFailure, Result, print, warn};

/// Measure clients of GlusterFS on the same volumes
///
/// Starts servers of its own (GlusterFS 10 or later, and fio), with the volume options of the paper
/// on multithreaded FUSE for GlusterFS, and compares GlusterFS's own client with 1, 2 and 4 reader
/// threads with defuse: with one worker, with the policies of the paper, adaptive, over io_uring,
/// and as `defuse run`, in turns. fio reads and writes past all caches; threads create, list, stat
/// and remove small files. Shows rates, CPU time, and for each goal if it is met. Without --quick,
/// all cases take hours: choose some by --only. Needs root. The kernel removes everything with this
/// process. Ctrl-C keeps the complete cases.
#[derive(clap::Args)]
pub struct GlusterBenchArgs {
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// An overview: 1 and 32 jobs, depth 32, 300 ms a case, at most 2 rounds
    #[arg(long)]
    quick: bool,
    /// The volumes: dist (2 bricks), repl (2 copies), graph (2 copies within the client, no
    /// servers), slow (lookups take 300 µs longer)
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = VolumeKind::from_name, default_value = "dist,repl,graph,slow")]
    volumes: Vec<VolumeKind>,
    /// Only cases whose names begin so, such as randread-4k, write-1m-sync-32,
    /// randread-4k-libaio-16x32, create
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// The targets: native-N (GlusterFS's client with N readers), one, paper, merged, adaptive,
    /// uring, run
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = GlusterTargetSpec::from_name, default_values = ALL)]
    targets: Vec<GlusterTargetSpec>,
    /// A further mount of defuse with options of its own, such as p8=workers=paper:8; may be
    /// repeated
    #[arg(long, value_name = "NAME=OPTIONS", value_parser = GlusterTargetSpec::variant)]
    variant: Vec<GlusterTargetSpec>,
    /// Numbers of jobs of fio
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32], value_parser = clap::value_parser!(u32).range(1..=256))]
    jobs: Vec<u32>,
    /// Requests in flight of each job, with libaio
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32], value_parser = clap::value_parser!(u32).range(1..=1024))]
    depths: Vec<u32>,
    /// Time of a case of fio, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
    time: u64,
    /// Size of the file of each job, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=65536))]
    file_size: u64,
    /// Number of small files
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    files: u32,
    /// Write gluster.json and gluster.html (without network access) to this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the results as JSON instead of the tables
    #[arg(long)]
    json: bool,
}

/// Measure among the servers, for `defuse bench gluster`
#[derive(clap::Args)]
pub struct GlusterInsideArgs {
    /// The order, as JSON
    order: String,
}

/// Work on small files, for `defuse bench gluster`
#[derive(clap::Args)]
pub struct NamesArgs {
    /// The order, as JSON
    order: String,
}

impl GlusterBenchArgs {
    fn options(&self) -> Result<GlusterStudyOptions> {
        let quick =
            |all: &[u32], some: &[u32]| if self.quick { some.to_vec() } else { all.to_vec() };
        Ok(GlusterStudyOptions {
            choice: CaseSelection {
                places: self.volumes.clone(),
                jobs: quick(&self.jobs, &[1, 32]),
                depths: quick(&self.depths, &[32]),
                only: self.only.clone(),
            },
            targets: [self.targets.as_slice(), self.variant.as_slice()].concat(),
            rounds: if self.quick { self.rounds.min(2) } else { self.rounds },
            time_ms: if self.quick { self.time.min(300) } else { self.time },
            file_bytes: self.file_size << 20,
            files: self.files,
            program: main_program()?,
        })
    }
}

/// Runs the benchmark.
pub fn run(args: &GlusterBenchArgs) -> Result {
    let options = args.options()?;
    if let Some(dir) = &args.out {
        // Fail now, not after an hour.
        std::fs::create_dir_all(dir).map_err(|error| {
            let dir = dir.display();
            CommandFailure::Failed(format!(
                "cannot make {dir}: {error}: name another directory with --out"
            ))
        })?;
    }
    let results = gluster::run(&options, &mut |line| warn(&line)).map_err(or_failed)?;
    if let Some(dir) = &args.out {
        results.write(dir).map_err(or_failed)?;
        let page = gluster::write_report(&results, dir).map_err(or_failed)?;
        warn(&format!("the report is {}", page.display()));
    }
    if args.json {
        let mut value = serde_json::to_value(&results).map_err(CommandFailure::from_error)?;
        value["goals"] =
            serde_json::to_value(goals::judge_all(&results)).map_err(CommandFailure::from_error)?;
        print(&format!("{value}\n"))?;
    } else {
        print(&gluster::table(&results))?;
    }
    if results.interrupted {
        return Err(CommandFailure::Failed("interrupted: not all rounds were measured".into()));
    }
    Ok(())
}

/// Measures among the servers, and prints the results as JSON.
pub fn run_inside(args: &GlusterInsideArgs) -> Result {
    let order: InsideOrder =
        serde_json::from_str(&args.order).map_err(CommandFailure::from_error)?;
    let measured = gluster::rounds(&order.options, order.results, &mut |line| warn(&line));
    let text =
        serde_json::to_string(&measured.map_err(or_failed)?).map_err(CommandFailure::from_error)?;
    print(&text)
}

/// Works on small files, and prints the figures as JSON.
pub fn run_names(args: &NamesArgs) -> Result {
    let order: SmallFileOrder =
        serde_json::from_str(&args.order).map_err(CommandFailure::from_error)?;
    let outcome = perform(&order).map_err(or_failed)?;
    print(&format!("{}\n", serde_json::to_string(&outcome).map_err(CommandFailure::from_error)?))
}
