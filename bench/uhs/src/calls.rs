//! Single calls of one process on `memory:`: by shared memory, by a socket, and by a mount of the
//! kernel.

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use defuse_fs::{
    Caller, Context as Cx, Errno, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs,
    OpenFlags, ReadArgs, ReadBuf, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_measure::cpu;
use defuse_measure::server::ServerProcess;
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};

use crate::mounted::with_mount;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::TargetStage;

/// Calls of each kind in a turn, and turns: the figure is the figure of the best turn, since others
/// use the processors, too.
const CALLS: u32 = 2000;
const TURNS: usize = 15;
const BLOCK: usize = 4096;

/// Time for which processor time is measured.
const LONG: Duration = Duration::from_millis(400);

/// One round.
pub(crate) fn measure(
    stage: &mut TargetStage,
    program: &Path,
    dir: &Path,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let socket = dir.join("calls");
    let server = ServerProcess::start(program, "memory:".as_ref(), &socket)?;
    let by = |lanes| -> Result<CallClient> {
        let options = RemoteOptions { lanes, ..RemoteOptions::default() };
        CallClient::new(RemoteClient::connect(&socket, options)?)
    };
    let (shared, messages) = (by(LaneUse::Required)?, by(LaneUse::Never)?);
    with_mount(stage, program, "memory", |at| {
        let mounted = at.join("file");
        fs::write(&mounted, [7; BLOCK])?;
        let mounted = OpenOptions::new().read(true).write(true).open(mounted)?;
        let (names, mut room) = (Cell::new(0), [0; BLOCK]);
        let by_mount: [TimedCall<'_>; 3] = [
            Box::new(|| Ok(mounted.read_exact_at(&mut room, 0)?)),
            Box::new(|| {
                let found = fs::symlink_metadata(at.join(make_missing_name(&names)));
                anyhow::ensure!(found.is_err(), "a name that nobody has made");
                Ok(())
            }),
            Box::new(|| Ok(mounted.write_all_at(&[7; BLOCK], 0)?)),
        ];
        let mut targets = [
            ("shared", shared.calls(&names)),
            ("socket", messages.calls(&names)),
            ("kernel mount", by_mount),
        ];
        let mut best = [[f64::MAX; 3]; 3];
        for _ in 0..TURNS {
            for ((_, calls), best) in targets.iter_mut().zip(&mut best) {
                for (call, best) in calls.iter_mut().zip(best) {
                    *best = best.min(time_of(call)?);
                }
            }
        }
        let rows = ["read of a cached 4 KiB", "look for a new name", "write of 4 KiB"];
        for ((target, calls), best) in targets.iter_mut().zip(best) {
            for ((row, call), ns) in rows.into_iter().zip(calls).zip(best) {
                results.add((row, "ns", FigureDirection::Less, 0.0), target, ns);
                results.add((row, "ns of CPU", FigureDirection::Less, 0.0), target, cpu_of(call)?);
            }
        }
        Ok(())
    })?;
    drop((shared, messages));
    drop(server);
    Ok(())
}

/// A name that does not exist, and that no earlier call has used.
fn make_missing_name(names: &Cell<u64>) -> String {
    names.set(names.get() + 1);
    format!("missing {}", names.get())
}

type TimedCall<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// The time of a call, in nanoseconds.
fn time_of(call: &mut TimedCall<'_>) -> Result<f64> {
    let begun = Instant::now();
    (0..CALLS).try_for_each(|_| call())?;
    Ok(begun.elapsed().as_nanos() as f64 / f64::from(CALLS))
}

/// The processor time of the whole machine for a call, in nanoseconds. It is known in steps of 10
/// ms.
fn cpu_of(call: &mut TimedCall<'_>) -> Result<f64> {
    let (before, begun, mut count) = (cpu::CpuSample::take(None), Instant::now(), 0);
    while begun.elapsed() < LONG {
        (0..CALLS).try_for_each(|_| call())?;
        count += CALLS;
    }
    let used = before.usage_until(&cpu::CpuSample::take(None));
    Ok(used.system_ns as f64 / f64::from(count))
}

/// A client with an open file.
struct CallClient {
    fs: RemoteClient,
    file: File,
}

fn cx() -> Cx<'static> {
    Cx::new(Caller { uid: 0, gid: 0, pid: 1 })
}

impl CallClient {
    fn new(fs: RemoteClient) -> Result<CallClient> {
        let text = format!("file {:016x}", fastrand::u64(..));
        let name = Name::new(text.as_bytes()).ok().context("a name")?;
        let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
        let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT);
        let args = OpenArgs { flags, kill_suidgid: false };
        let (entry, opened) = fs.create(&cx(), Ino::ROOT, name, &node, args)?;
        let client = CallClient { fs, file: File { ino: entry.ino, fh: opened.fh } };
        client.write()?;
        Ok(client)
    }

    fn calls<'a>(&'a self, names: &'a Cell<u64>) -> [TimedCall<'a>; 3] {
        let look = || self.stat_names(names);
        [Box::new(|| self.read()), Box::new(look), Box::new(|| self.write())]
    }

    fn read(&self) -> Result<()> {
        let mut room = [0; BLOCK];
        let mut sink = SliceSink::new(&mut room);
        let mut out = ReadBuf::new(&mut sink, BLOCK);
        self.fs.read(&cx(), self.file, ReadArgs::default(), &mut out)?;
        anyhow::ensure!(out.filled_len() == BLOCK, "a read of {} bytes", out.filled_len());
        Ok(())
    }

    fn stat_names(&self, names: &Cell<u64>) -> Result<()> {
        let text = make_missing_name(names);
        let name = Name::new(text.as_bytes()).ok().context("a name")?;
        let found = self.fs.lookup(&cx(), Ino::ROOT, name);
        anyhow::ensure!(found == Err(Errno::ENOENT), "a name that nobody has made");
        Ok(())
    }

    fn write(&self) -> Result<()> {
        let mut source = SliceSource::new(&[7; BLOCK]);
        let args = WriteArgs { flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
        self.fs.write(&cx(), self.file, args, &mut WriteBuf::new(&mut source))?;
        Ok(())
    }
}
