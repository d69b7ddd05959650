//! The traces on a server: `defuse serve --shared` of an image of uhs, and a process of its own for
//! each one of the trace.
//!
//! The processes read in turns, in the order of the trace, so that the server sees what a
//! simulation sees, less the uses that need no request. Files are open with `O_DIRECT`, past the
//! cache of uhs: the reads of the device are the misses.

mod layout;
mod reader;
mod results;

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use defuse_cache::PolicyKind;
use defuse_measure::command;
use defuse_measure::server::ServerProcess;
use serde_json::Value;

pub use reader::work;
pub use results::{LiveCell, LiveFigures, LiveResults};

use crate::replay::{replay, warm};
use crate::results::PolicyCase;
use crate::traces::{EXTENT, ExtentTrace, make_all};
use layout::{TraceLayout, fits};
use reader::{ReaderProcess, ReaderTurn};

/// Time limit for a server to be found.
const PATIENCE: Duration = Duration::from_secs(20);
/// The smallest cache of a server.
const LEAST: u64 = 1 << 20;

/// The amount of work.
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// Uses of each trace, about.
    pub uses: usize,
    /// The seed of the traces.
    pub seed: u64,
    /// The sizes of the cache, in thousandths of the bytes of the trace.
    pub sizes: Vec<u64>,
    /// Only traces with one of these texts in their names; all if there is none.
    pub only: Vec<String>,
    /// The directory for the image.
    pub work: PathBuf,
    /// defuse.
    pub program: PathBuf,
}

/// A directory that goes with its value.
struct LiveDirectory(PathBuf);

impl Drop for LiveDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Replays the traces on servers, with all policies. `say` receives a line for each trace.
///
/// # Errors
///
/// Fails if a server or a reader does, and if no trace is chosen.
pub fn run(options: &LiveOptions, say: &mut dyn FnMut(String)) -> Result<LiveResults> {
    let name = format!("defuse-bench-eviction-{}", std::process::id());
    let work = LiveDirectory(options.work.join(name));
    let made = fs::DirBuilder::new().mode(0o700).create(&work.0);
    made.with_context(|| format!("cannot make {}: name another --work", work.0.display()))?;
    let (uses, seed) = (options.uses, options.seed);
    let mut results = LiveResults { uses, seed, sizes: options.sizes.clone(), cells: Vec::new() };
    let is_chosen = |trace: &ExtentTrace| {
        options.only.is_empty() || options.only.iter().any(|text| trace.name.contains(text))
    };
    for trace in make_all(uses, seed).iter().filter(|trace| fits(trace) && is_chosen(trace)) {
        say(format!("{}: {} uses", trace.name, trace.steps.len()));
        TraceStage::new(options, &work.0, trace)?.measure(options, &mut results)?;
    }
    ensure!(!results.cells.is_empty(), "no trace has {:?} in its name", options.only);
    Ok(results)
}

/// The bytes of a cache for `--cache`, and the part of them that pages take.
fn cache(trace: &ExtentTrace, thousandths: u64) -> (u64, u64) {
    // An eighth of the cache is for heads of frames.
    let cache = (trace.bytes * thousandths / 7000 * 8).max(LEAST);
    (cache, cache / 8 * 7)
}

/// A trace, and an image with its files.
struct TraceStage<'a> {
    program: &'a Path,
    trace: &'a ExtentTrace,
    layout: TraceLayout,
    image: PathBuf,
    socket: PathBuf,
}

impl TraceStage<'_> {
    fn new<'a>(
        options: &'a LiveOptions,
        work: &Path,
        trace: &'a ExtentTrace,
    ) -> Result<TraceStage<'a>> {
        let caches = options.sizes.iter().map(|size| cache(trace, *size).0);
        // All of a file has a place in the frames that it may have.
        let most = caches.min().context("no size of a cache")? / 2;
        let layout = TraceLayout::new(trace, most, options.seed);
        let (program, image) = (options.program.as_path(), work.join("image"));
        let stage = TraceStage { program, trace, layout, image, socket: work.join("socket") };
        let bytes = (64 << 20) + stage.layout.extents() * EXTENT / 4;
        let size = format!("--size={bytes}");
        let image = stage.image.to_string_lossy();
        let mkfs = ["mkfs", "uhs", "--sparse", "--force", size.as_str(), &*image];
        command::output(&program.to_string_lossy(), &mkfs)?;
        let server = ServerProcess::start(program, stage.source().as_ref(), &stage.socket)?;
        let (mut maker, mut turn) = (ReaderProcess::start(&stage.socket)?, ReaderTurn::default());
        for (file, extents) in (0..).zip(&stage.layout.files) {
            turn.make(file, *extents);
            maker.perform(&mut turn)?;
        }
        drop(maker);
        server.end()?;
        Ok(stage)
    }

    fn source(&self) -> String {
        format!("uhs:{}", self.image.display())
    }

    fn measure(&self, options: &LiveOptions, results: &mut LiveResults) -> Result<()> {
        for &thousandths in &options.sizes {
            let (bytes, of_pages) = cache(self.trace, thousandths);
            for (policy, kind) in PolicyKind::ALL {
                let simulated = replay(self.trace, kind, of_pages, options.seed);
                let live = self.replay(policy, bytes)?;
                let (trace, overlap) = (self.trace.name, self.trace.overlap);
                let case = PolicyCase { trace, overlap, thousandths, policy };
                results.cells.push(LiveCell { case, simulated, live });
            }
        }
        Ok(())
    }

    /// Replays the trace on a new server.
    fn replay(&self, policy: &str, cache: u64) -> Result<LiveFigures> {
        let options = [format!("--cache={cache}"), format!("--eviction={policy}")];
        let source = self.source();
        let server =
            ServerProcess::start_with(self.program, &options, source.as_ref(), &self.socket)?;
        let start = || ReaderProcess::start(&self.socket);
        let mut readers = (0..self.layout.users()).map(|_| start()).collect::<Result<Vec<_>>>()?;
        let begun = ServerFigures::measure_first(self)?;
        let (warm, uses) = self.layout.uses.split_at(warm(self.layout.uses.len()));
        let mut replayed = self.replay_uses(&mut readers, warm)?;
        let warmed = ServerFigures::take(self)?;
        replayed += self.replay_uses(&mut readers, uses)?;
        let ended = ServerFigures::take(self)?;
        drop(readers);
        server.end()?;
        Ok(LiveFigures {
            uses: uses.len() as u64,
            reads: ended.device_reads - warmed.device_reads,
            hidden: ended.hidden - warmed.hidden,
            missed: ended.missed - warmed.missed,
            evicted: ended.evicted - warmed.evicted,
            all_uses: replayed,
            all_reads: ended.device_reads - begun.device_reads,
            extents: self.layout.extents(),
        })
    }

    /// Has all uses made, in their order. Returns their number.
    fn replay_uses(&self, readers: &mut [ReaderProcess], uses: &[layout::TraceUse]) -> Result<u64> {
        let (mut turn, mut user, mut done) = (ReaderTurn::default(), 0, 0);
        for one in uses {
            if !turn.is_empty() && (one.user != user || turn.is_long()) {
                done += readers[user as usize].perform(&mut turn)?;
            }
            user = one.user;
            turn.read_extent(*one);
        }
        if !turn.is_empty() {
            done += readers[user as usize].perform(&mut turn)?;
        }
        Ok(done)
    }
}

/// The figures of the server, as `defuse stat` shows them.
struct ServerFigures {
    device_reads: u64,
    hidden: u64,
    missed: u64,
    evicted: u64,
}

impl ServerFigures {
    /// The figures of a server that has just begun: it listens a moment before `defuse stat` finds
    /// it.
    fn measure_first(stage: &TraceStage<'_>) -> Result<ServerFigures> {
        let begun = Instant::now();
        loop {
            match ServerFigures::take(stage) {
                Err(_) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                taken => return taken,
            }
        }
    }

    fn take(stage: &TraceStage<'_>) -> Result<ServerFigures> {
        let socket = stage.socket.to_string_lossy();
        let text =
            command::output(&stage.program.to_string_lossy(), &["stat", &*socket, "--json"])?;
        let value: Value = serde_json::from_str(&text)?;
        let figures = value["figures"].as_array().context("a server has figures")?;
        let figure = |name: &str| -> Result<u64> {
            let found = figures.iter().find(|figure| figure["name"] == name);
            let value = found.and_then(|figure| figure["value"].as_u64());
            value.with_context(|| format!("a server with pages has the figure {name}"))
        };
        Ok(ServerFigures {
            device_reads: figure("device_reads")?,
            hidden: figure("pages_groups_hidden")?,
            missed: figure("pages_groups_missed")?,
            evicted: figure("pages_groups_evicted")?,
        })
    }
}
