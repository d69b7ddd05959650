//! `defuse bench`, and its subprocess that makes the measured calls.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Subcommand;
use defuse_bench_cache::live::{self, LiveOptions};
use defuse_bench_uhs::results::{FigureRow, table};
use defuse_bench_uhs::{UhsBenchPart, UhsBenchScale as UhsScale};
use defuse_compose::SourceSettings;
use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, FileDescription, OpenHow, WalkStart,
};
use defuse_fs::layer::Method;
use defuse_fs::source::{CallingThreads, FrontendProperties};
use defuse_fs::{
    Context, File, FileSystem, ReadArgs, ReadBuf, Shortcuts, WriteArgs, WriteBuf, delegate,
};
use defuse_memory::MemoryFileSystem;
use defuse_study::direct::worker::{self, MeasuredCalls};
use defuse_study::direct::{self, DirectOptions, DirectScale};
use defuse_study::programs;
use rustix::fs::OFlags;

use crate::bench_gluster::{self, GlusterBenchArgs};
use crate::main_program;
use crate::sources::SOURCES;
use defuse_command::or_failed;
use defuse_command::{CommandFailure, Result, print, warn};

/// Measure defuse itself on this machine
#[derive(clap::Args)]
pub struct BenchCommandArgs {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    Direct(DirectArgs),
    Eviction(EvictionArgs),
    Gluster(GlusterBenchArgs),
    Run(ProgramsArgs),
    Uhs(UhsArgs),
}

/// Measure uhs beside ext4 and xfs on the same device
///
/// Makes the same operations on the same names, on loop devices with blocks of 4 KiB in memory: uhs
/// inside of this process, ext4 and xfs in the kernel, in turns. Shows rates, CPU time of the whole
/// machine, space, memory, and the separation of queues on a model of an SSD. Needs root, and about
/// 16 GiB of memory at the full scale. Removes everything that it creates.
#[derive(clap::Args)]
pub struct UhsArgs {
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// full (a million files), quick, or tiny: everything once and small, as a test
    #[arg(long, value_parser = UhsScale::from_name, default_value = "quick")]
    scale: UhsScale,
    /// Only these parts: names, sync, data, space, mounts, mounted, personalities, clients, queues,
    /// queues-on-driver, queues-on-device; and queues-on-qemu, which is measured only if it is
    /// named
    #[arg(long, value_name = "PART", value_delimiter = ',', value_parser = UhsBenchPart::from_name)]
    only: Vec<UhsBenchPart>,
    /// The directory for mounts
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work: PathBuf,
    /// Print the results as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Compare the policies of the cache of shared pages by their hit rates
///
/// Replays generated traces of one and of eight processes at five sizes of the cache: LRU, LFU,
/// ARC, S3-FIFO, the formula E of the paper on UHSFS, and E as `defuse serve --shared` uses it.
/// Hits count after the first fifth of a trace. The tables are in Markdown. Everything follows from
/// the seed: no file is read, and no time is measured.
///
/// With --live, the same policies serve: for each trace, policy and size there is a
/// `defuse serve --shared` of an image of uhs, and a process for each one of the trace. The
/// processes read in turns, in the order of the trace. Reads of the device are the misses, and the
/// rates of the simulation with as much memory stand beside them. Takes about ten minutes.
#[derive(clap::Args)]
pub struct EvictionArgs {
    /// Uses in each trace, about [default: 400000; with --live 40000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1000..=100_000_000))]
    uses: Option<u32>,
    /// The seed of the traces
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Measure on servers with client processes, too
    #[arg(long)]
    live: bool,
    /// With --live: the sizes of the memory for pages, in percent of the bytes of the trace
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_values_t = [25, 50, 75], requires = "live",
        value_parser = clap::value_parser!(u64).range(1..=400))]
    sizes: Vec<u64>,
    /// With --live: only traces with one of these texts in their names
    #[arg(long, value_name = "TEXT", value_delimiter = ',', requires = "live")]
    only: Vec<String>,
    /// With --live: the directory for the image
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir(), requires = "live")]
    work: PathBuf,
    /// Print the results as JSON instead of the tables
    #[arg(long)]
    json: bool,
}

/// Read in turns for `defuse bench eviction --live`
#[derive(clap::Args)]
pub struct ReaderArgs {
    /// The socket of the server
    socket: PathBuf,
}

/// Measure the gain of bypassing the kernel: the tables of "Direct-FUSE"
///
/// Makes the same calls on tmpfs and on ext4 (a new loop device): natively, through a mount with
/// direct_io, through libfuse's passthrough_hp if installed, and by an unchanged program under
/// `defuse run`, in turns. Measures bandwidth, context switches, the client's share of a call,
/// `memory:` against tmpfs, and the time of a start. Reports for each goal if it is met, with the
/// spread of the rounds. Takes about two minutes, and needs root. Removes everything that it
/// creates, also after Ctrl-C, which keeps the complete rounds.
#[derive(clap::Args)]
pub struct DirectArgs {
    /// Number of rounds; no round begins after two and a half minutes
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: u32,
    /// full, or tiny: everything once and small, as a test
    #[arg(long, value_parser = DirectScale::from_name, default_value = "full")]
    scale: DirectScale,
    /// Write direct.json and direct.html (without network access) to this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The directory for the image of ext4 and the mounts
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work: PathBuf,
    /// libfuse's passthrough_hp [default: as built by `cargo xtask bench`]
    #[arg(long, value_name = "PROGRAM")]
    libfuse: Option<PathBuf>,
    /// Print the results as JSON instead of the tables
    #[arg(long)]
    json: bool,
}

/// Measure well-known programs under `defuse run`
///
/// Makes a tree of small files on tmpfs, in a served `memory:`, in a passthrough of tmpfs, and on
/// mounts of both, and runs git status, find and cat, Python imports, make -j2, tar x and rm -r on
/// each, in turns. Shows durations and processor time relative to tmpfs, and the system calls that
/// the kernel executes if strace is installed. The full scale takes about a minute for a round.
/// Removes everything that it creates.
#[derive(clap::Args)]
pub struct ProgramsArgs {
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// full (20,000 files), quick, or tiny: a test
    #[arg(long, value_parser = programs::ProgramsScale::from_name, default_value = "full")]
    scale: programs::ProgramsScale,
    /// A directory on tmpfs for the files
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    work: PathBuf,
    /// Measure another build of defuse, too, in the same rounds
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
    /// Measure no mounts of the kernel
    #[arg(long)]
    no_mounts: bool,
    /// Print the results as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// Make calls for `defuse bench direct`
#[derive(clap::Args)]
pub struct WorkerArgs {
    /// The file
    #[arg(long)]
    file: PathBuf,
    /// Open it with O_DIRECT
    #[arg(long)]
    o_direct: bool,
    /// Count the context switches of this process, too
    #[arg(long)]
    server: Option<u32>,
    /// Count the context switches of the parent process
    #[arg(long, conflicts_with = "server")]
    server_is_parent: bool,
    /// Call the client as a library, on this source
    #[arg(long)]
    client: Option<std::ffi::OsString>,
}

/// Runs a benchmark.
pub fn run(args: &BenchCommandArgs) -> Result {
    match &args.what {
        BenchCommand::Direct(args) => run_direct(args),
        BenchCommand::Eviction(args) => run_eviction(args),
        BenchCommand::Gluster(args) => bench_gluster::run(args),
        BenchCommand::Run(args) => run_programs(args),
        BenchCommand::Uhs(args) => run_uhs(args),
    }
}

fn run_eviction(args: &EvictionArgs) -> Result {
    let uses = args.uses.unwrap_or(if args.live { 40_000 } else { 400_000 }) as usize;
    let (table, results, goals) = if args.live {
        let options = LiveOptions {
            uses,
            seed: args.seed,
            sizes: args.sizes.iter().map(|percent| percent * 10).collect(),
            only: args.only.clone(),
            work: args.work.clone(),
            program: main_program()?,
        };
        let results = live::run(&options, &mut |line| warn(&line)).map_err(or_failed)?;
        (results.table(), serde_json::to_value(&results), results.goals())
    } else {
        let results = defuse_bench_cache::run(uses, args.seed, &mut |line| warn(&line));
        (results.table(), serde_json::to_value(&results), results.goals())
    };
    if !args.json {
        return print(&table);
    }
    let mut value = results.map_err(CommandFailure::from_error)?;
    value["goals"] = serde_json::to_value(goals).map_err(CommandFailure::from_error)?;
    print(&format!("{value}\n"))
}

/// Reads until the standard input ends.
pub fn run_reader(args: &ReaderArgs) -> Result {
    live::work(&args.socket).map_err(or_failed)
}

fn run_uhs(args: &UhsArgs) -> Result {
    let parts = match args.only.as_slice() {
        [] => UhsBenchPart::default_parts(),
        only => only.to_vec(),
    };
    let (scale, rounds, work) = (args.scale.clone(), args.rounds, args.work.clone());
    let program = Some(main_program()?);
    let options = defuse_bench_uhs::UhsBenchOptions { scale, parts, rounds, work, program };
    // All parts take minutes: each is printed when it is done.
    let mut printed = Ok(());
    let mut finished = |rows: &[FigureRow]| {
        if !args.json && printed.is_ok() {
            printed = print(&table(rows));
        }
    };
    let results = defuse_bench_uhs::run(&options, &mut |line| warn(&line), &mut finished);
    let results = results.map_err(or_failed)?;
    if args.json {
        let value = serde_json::to_value(&results).map_err(CommandFailure::from_error)?;
        return print(&format!("{value}\n"));
    }
    printed
}

fn run_direct(args: &DirectArgs) -> Result {
    let options = DirectOptions {
        scale: args.scale.clone(),
        rounds: args.rounds,
        work: args.work.clone(),
        libfuse: args.libfuse.clone(),
        program: main_program()?,
    };
    if let Some(dir) = &args.out {
        // Fail now, not after two minutes.
        std::fs::create_dir_all(dir).map_err(|error| {
            CommandFailure::Failed(format!(
                "cannot make {}: {error}: name another directory with --out",
                dir.display()
            ))
        })?;
    }
    let results = direct::run(&options, &mut |line| warn(&line)).map_err(or_failed)?;
    if let Some(dir) = &args.out {
        results.write(dir).map_err(or_failed)?;
        let page = direct::write_report(&results, dir).map_err(or_failed)?;
        warn(&format!("the report is {}", page.display()));
    }
    if args.json {
        let mut value = serde_json::to_value(&results).map_err(CommandFailure::from_error)?;
        value["goals"] = serde_json::to_value(direct::goals::judge_all(&results))
            .map_err(CommandFailure::from_error)?;
        print(&format!("{value}\n"))?;
    } else {
        print(&direct::table(&results))?;
    }
    if results.interrupted {
        return Err(CommandFailure::Failed("interrupted: not all rounds were measured".into()));
    }
    Ok(())
}

fn run_programs(args: &ProgramsArgs) -> Result {
    let options = programs::ProgramsOptions {
        scale: args.scale.clone(),
        rounds: args.rounds,
        work: args.work.clone(),
        program: main_program()?,
        before: args.before.clone(),
        mounts: !args.no_mounts,
    };
    let results = programs::run(&options, &mut |line| warn(&line)).map_err(or_failed)?;
    if args.json {
        let value = serde_json::to_value(&results).map_err(CommandFailure::from_error)?;
        print(&format!("{value}\n"))?;
    } else {
        print(&programs::table(&results))?;
    }
    if results.interrupted {
        return Err(CommandFailure::Failed("interrupted: not all rounds were measured".into()));
    }
    Ok(())
}

/// Makes calls until the standard input ends.
pub fn run_worker(args: &WorkerArgs) -> Result {
    let parent = || args.server_is_parent.then(std::os::unix::process::parent_id);
    let server = args.server.or_else(parent);
    match &args.client {
        Some(source) => {
            let mut calls = LibraryCalls::open(source, &args.file)?;
            worker::work(&mut calls, server).map_err(or_failed)
        }
        None => {
            let mut file = worker::open(&args.file, args.o_direct).map_err(or_failed)?;
            worker::work(&mut file, server).map_err(or_failed)
        }
    }
}

/// Calls of the client as a library, on a file of one mount.
struct LibraryCalls {
    client: DirectClient,
    task: ClientTask,
    file: Arc<FileDescription>,
    is_dummy: bool,
}

impl LibraryCalls {
    /// Opens `path` of a source. The source `dummy` does nothing.
    fn open(source: &std::ffi::OsStr, path: &Path) -> Result<LibraryCalls> {
        const NAME: &[u8] = b"bench:";
        let is_dummy = source == "dummy";
        let fs: Arc<dyn FileSystem> = if is_dummy {
            Arc::new(DummyFileSystem { inner: MemoryFileSystem::new(Default::default()) })
        } else {
            let frontend = FrontendProperties {
                threads: CallingThreads::Application,
                ..FrontendProperties::default()
            };
            SOURCES.open(source, SourceSettings::for_frontend(frontend))?.fs
        };
        let client = DirectClient::new(Default::default());
        let task = ClientTask::for_this_process().map_err(CommandFailure::from_error)?;
        client.mount(NAME, fs, &ClientMountArgs::default()).map_err(CommandFailure::from_error)?;
        let path = [NAME, path.as_os_str().as_bytes()].concat();
        let flags = (OFlags::RDWR | OFlags::CREATE).bits();
        let how = OpenHow { flags, mode: 0o600, ..OpenHow::default() };
        let file =
            client.open(&task, WalkStart::Cwd, &path, how).map_err(CommandFailure::from_error)?;
        Ok(LibraryCalls { client, task, file, is_dummy })
    }
}

impl MeasuredCalls for LibraryCalls {
    fn truncate(&mut self) -> io::Result<()> {
        self.client.ftruncate(&self.task, &self.file, 0).map_err(io::Error::other)
    }

    fn rewind(&mut self) -> io::Result<()> {
        self.client.lseek(&self.task, &self.file, 0, 0).map(drop).map_err(io::Error::other)
    }

    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let count = self.client.read(&self.task, &self.file, room).map_err(io::Error::other)?;
        // No data, so that only the call is measured.
        Ok(if self.is_dummy { room.len() } else { count })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.client.write(&self.task, &self.file, bytes).map_err(io::Error::other)
    }
}

/// Memory whose reads and writes return at once, moving nothing.
struct DummyFileSystem {
    inner: MemoryFileSystem,
}

impl DummyFileSystem {
    fn intercept<T>(
        &self,
        _: Method,
        _: &Context<'_>,
        call: impl FnOnce(&MemoryFileSystem) -> defuse_fs::Result<T>,
    ) -> defuse_fs::Result<T> {
        call(&self.inner)
    }
}

impl FileSystem for DummyFileSystem {
    delegate!(intercept inner, except read, write, submit);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn read(
        &self,
        _: &Context<'_>,
        _: File,
        _: ReadArgs,
        _: &mut ReadBuf<'_>,
    ) -> defuse_fs::Result<()> {
        Ok(())
    }

    fn write(
        &self,
        _: &Context<'_>,
        _: File,
        _: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> defuse_fs::Result<usize> {
        Ok(data.remaining())
    }

    fn submit(&self, io: defuse_fs::Io) {
        self.inner.submit(io);
    }
}

impl Shortcuts for DummyFileSystem {
    delegate!(intercept inner, only resolve, peek);
}
