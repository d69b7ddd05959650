//! The measured program. It reads orders from its standard input, and makes system calls on one
//! file.
//!
//! It knows nothing of file systems: it opens, reads and writes through the standard library, both
//! natively and within a run.

use std::fs::File;
use std::io::{self, BufRead, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::switches::ContextSwitches;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// Alignment of the buffer, as `O_DIRECT` requires.
const ALIGN: usize = 4096;
/// The largest block size.
const MOST: u64 = 64 << 20;

/// The operation on the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerOp {
    /// Writes that extend the file, from an empty file on.
    Write,
    /// Writes that overwrite existing data.
    Rewrite,
    /// Reads.
    Read,
}

impl WorkerOp {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            WorkerOp::Write => "write",
            WorkerOp::Rewrite => "rewrite",
            WorkerOp::Read => "read",
        }
    }
}

/// Consecutive blocks from the beginning of the file, repeated in several passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerOrder {
    /// The operation.
    pub op: WorkerOp,
    /// Bytes per call.
    pub block: u64,
    /// Number of calls per pass.
    pub calls: u64,
    /// Minimum number of passes.
    pub passes: u64,
    /// Minimum duration in milliseconds. A processor that has waited (for the daemon of a mount,
    /// for example) is slower for a while, which must not affect the next target.
    pub at_least_ms: u64,
    /// The processor to use. A program that moves to another processor finds cold caches, which
    /// costs more than the difference between targets.
    pub cpu: usize,
}

/// The measurement. The time is the time of the fastest pass, because other load can only slow a
/// pass down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMeasurement {
    /// Number of calls per pass.
    pub calls: u64,
    /// Bytes transferred per pass.
    pub bytes: u64,
    /// Number of passes.
    pub passes: u64,
    /// Nanoseconds from before the first call until after the last one.
    pub ns: u64,
    /// Context switches of the application, in all passes.
    pub app: ContextSwitches,
    /// Context switches of the serving process.
    pub server: ContextSwitches,
}

/// The measured calls.
pub trait MeasuredCalls {
    /// Truncates the file to 0 bytes.
    fn truncate(&mut self) -> io::Result<()>;
    /// Seeks to the beginning.
    fn rewind(&mut self) -> io::Result<()>;
    /// Reads the next bytes.
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize>;
    /// Writes the next bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
}

impl MeasuredCalls for File {
    fn truncate(&mut self) -> io::Result<()> {
        self.set_len(0)
    }

    fn rewind(&mut self) -> io::Result<()> {
        Seek::rewind(self)
    }

    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        Read::read(self, room)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Write::write(self, bytes)
    }
}

/// Opens the file, and creates it if necessary. If `o_direct` is set, the kernel bypasses its
/// cache.
///
/// # Errors
///
/// Fails with the errors of open(2).
pub fn open(path: &Path, o_direct: bool) -> Result<File> {
    let flags = if o_direct { rustix::fs::OFlags::DIRECT.bits() as i32 } else { 0 };
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).custom_flags(flags);
    options.open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// Executes the orders on standard input until it ends: one [`WorkerOrder`] per line, with one
/// [`WorkerMeasurement`] each. `server` is the process whose context switches are counted, too.
///
/// # Errors
///
/// Fails on invalid orders, and on calls that fail or transfer too little.
pub fn work(calls: &mut dyn MeasuredCalls, server: Option<u32>) -> Result<()> {
    let server = server.map(|pid| pid.to_string());
    let mut memory = Vec::new();
    for line in io::stdin().lock().lines() {
        let order: WorkerOrder = serde_json::from_str(&line?).context("an order is invalid")?;
        let outcome = perform(calls, order, server.as_deref(), &mut memory)?;
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &outcome)?;
        out.write_all(b"\n")?;
        out.flush()?;
    }
    Ok(())
}

fn perform(
    file: &mut dyn MeasuredCalls,
    order: WorkerOrder,
    server: Option<&str>,
    memory: &mut Vec<u8>,
) -> Result<WorkerMeasurement> {
    ensure!((1..=MOST).contains(&order.block), "a block of {} bytes is not possible", order.block);
    pin_to_processor(order.cpu)?;
    let block = align(memory, order.block as usize);
    let of_server = || server.map_or(ContextSwitches::default(), ContextSwitches::read);
    let (server_before, before) = (of_server(), ContextSwitches::read("self"));
    let (mut ns, mut passes) = (u64::MAX, 0);
    let start = Instant::now();
    while passes < order.passes || start.elapsed().as_millis() < u128::from(order.at_least_ms) {
        ns = ns.min(pass(file, order, block)?);
        passes += 1;
    }
    let app = ContextSwitches::read("self").count_since(&before);
    let calls = order.calls;
    let server = of_server().count_since(&server_before);
    Ok(WorkerMeasurement { calls, bytes: calls * order.block, passes, ns, app, server })
}

/// Pins this thread to one processor.
fn pin_to_processor(cpu: usize) -> Result<()> {
    ensure!(cpu < CpuSet::MAX_CPU, "a processor {cpu} cannot be");
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on processor {cpu}"))
}

/// The processors on which this process may run.
///
/// # Errors
///
/// Fails with the errors of sched_getaffinity(2).
pub fn processors() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("the processors are unknown")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// One pass. Returns the time of its calls in nanoseconds.
fn pass(file: &mut dyn MeasuredCalls, order: WorkerOrder, block: &mut [u8]) -> Result<u64> {
    if order.op == WorkerOp::Write {
        file.truncate()?;
    }
    file.rewind()?;
    let start = Instant::now();
    for number in 0..order.calls {
        let moved = match order.op {
            WorkerOp::Read => file.read(block),
            WorkerOp::Write | WorkerOp::Rewrite => file.write(block),
        };
        let moved = moved.with_context(|| format!("{} {number} failed", order.op.name()))?;
        if moved != block.len() {
            bail!("{} {number} moved {moved} of {} bytes", order.op.name(), block.len());
        }
    }
    Ok(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// Aligned memory. Its bytes are not zero, so that no file system turns them into holes.
fn align(memory: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if memory.len() < len + ALIGN {
        memory.resize(len + ALIGN, 0x5a);
    }
    let at = memory.as_ptr().align_offset(ALIGN).min(ALIGN);
    &mut memory[at..at + len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_overwritten_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = open(&dir.path().join("file"), false).unwrap();
        let (mut memory, cpu) = (Vec::new(), processors().unwrap()[0]);
        for (op, passes) in [(WorkerOp::Write, 2), (WorkerOp::Rewrite, 1), (WorkerOp::Read, 3)] {
            let order = WorkerOrder { op, block: 1000, calls: 7, passes, at_least_ms: 0, cpu };
            let outcome = perform(&mut file, order, None, &mut memory).unwrap();
            assert_eq!((outcome.calls, outcome.bytes, outcome.passes), (7, 7000, passes));
            assert!(outcome.ns > 0);
        }
        let long = WorkerOrder {
            op: WorkerOp::Read,
            block: 1000,
            calls: 7,
            passes: 1,
            at_least_ms: 20,
            cpu,
        };
        assert!(perform(&mut file, long, None, &mut memory).unwrap().passes > 1);
        assert_eq!(file.metadata().unwrap().len(), 7000);
        let beyond = WorkerOrder {
            op: WorkerOp::Read,
            block: 1000,
            calls: 8,
            passes: 1,
            at_least_ms: 0,
            cpu,
        };
        let error = perform(&mut file, beyond, None, &mut memory).unwrap_err();
        assert!(error.to_string().contains("0 of 1000 bytes"), "{error}");
    }

    #[test]
    fn buffers_begin_on_an_aligned_address() {
        let mut memory = Vec::new();
        for len in [1, 5000, 4096] {
            let block = align(&mut memory, len);
            assert_eq!((block.as_ptr().align_offset(ALIGN), block.len()), (0, len));
        }
    }
}
