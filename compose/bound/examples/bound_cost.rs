//! Measures operations on a device of a manager: in the process of the application that has the
//! device, and from another process through the manager, while the manager has the device and while
//! the application does.
//!
//! `bound_cost SOCKET /DEVICE` needs a running `defuse manager`, and makes a file `measured` in the
//! root of the device.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use defuse_bound::BoundDevice;
use defuse_fs::source::{CallingThreads, FrontendProperties};
use defuse_fs::{
    Caller, Context, File, FileSystem, Ino, Name, NewNode, OpenArgs, OpenFlags, ReadArgs, ReadBuf,
    SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};

type CostResult<T> = Result<T, Box<dyn Error>>;

/// Operations of one kind in a round.
const COUNT: u32 = 3000;
const ROUNDS: usize = 15;
const NAMES: [&str; 3] = ["getattr", "read of 4 KiB", "write of 4 KiB"];

/// Nanoseconds of an operation of each kind.
type OperationTimes = [f64; NAMES.len()];

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: std::process::id() })
}

/// Opens the file, below the directories `dirs`, and creates it if need be.
fn open(fs: &dyn FileSystem, dirs: &Path) -> CostResult<File> {
    let mut dir = Ino::ROOT;
    for part in dirs.iter().filter(|part| *part != "/") {
        dir = fs.lookup(&cx(), dir, Name::new(part.as_encoded_bytes())?)?.ino;
    }
    let (name, args) = (
        Name::new(b"measured")?,
        OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() },
    );
    let ino = match fs.lookup(&cx(), dir, name) {
        Ok(entry) => entry.ino,
        Err(_) => {
            let node = NewNode::new(defuse_fs::FileKind::Regular, 0o644, cx().caller);
            fs.mknod(&cx(), dir, name, &node)?.ino
        }
    };
    Ok(File { ino, fh: fs.open(&cx(), ino, args)?.fh })
}

fn measure(fs: &dyn FileSystem, file: File) -> CostResult<OperationTimes> {
    let mut bytes = [7; 4096];
    let mut times = OperationTimes::default();
    for (time, kind) in times.iter_mut().zip(0..) {
        let begun = Instant::now();
        for number in 0..COUNT {
            let offset = u64::from(number % 64) * 4096;
            match kind {
                0 => drop(fs.getattr(&cx(), file.ino, None)?),
                1 => {
                    let mut sink = SliceSink::new(&mut bytes);
                    let mut out = ReadBuf::new(&mut sink, 4096);
                    fs.read(&cx(), file, ReadArgs { offset, ..ReadArgs::default() }, &mut out)?;
                }
                _ => {
                    let mut source = SliceSource::new(&bytes);
                    let args = WriteArgs { offset, ..WriteArgs::default() };
                    fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source))?;
                }
            }
        }
        *time = begun.elapsed().as_nanos() as f64 / f64::from(COUNT);
    }
    Ok(times)
}

/// The other process: measures on request.
fn run_other_process(socket: &Path, device: &Path) -> CostResult<()> {
    let options = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    let fs = RemoteClient::connect(socket, options)?;
    let file = open(&fs, device)?;
    measure(&fs, file)?;
    for _ in std::io::stdin().lock().lines() {
        let times = measure(&fs, file)?;
        println!("{}", times.map(|time| time.to_string()).join(" "));
    }
    Ok(())
}

fn keep_best(best: &mut OperationTimes, times: OperationTimes) {
    best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(time));
}

fn main() -> CostResult<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let (socket, device) = match &arguments[..] {
        [socket, device] => (socket, device),
        [socket, device, _other] => return run_other_process(socket, device),
        _ => return Err("write bound_cost SOCKET /DEVICE".into()),
    };
    let mut command = Command::new(std::env::current_exe()?);
    let command = command.args([socket, device]).arg("other");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (mut asks, answers) = (child.stdin.take(), child.stdout.take());
    let mut answers = BufReader::new(answers.ok_or("no output")?);
    let mut ask = || -> CostResult<OperationTimes> {
        asks.as_mut().ok_or("no input")?.write_all(b"go\n")?;
        let mut line = String::new();
        answers.read_line(&mut line)?;
        let mut times = OperationTimes::default();
        for (time, word) in times.iter_mut().zip(line.split_whitespace()) {
            *time = word.parse()?;
        }
        Ok(times)
    };
    let [mut of_manager, mut through, mut here] = [[f64::MAX; NAMES.len()]; 3];
    for _ in 0..ROUNDS {
        keep_best(&mut of_manager, ask()?);
    }
    let frontend = FrontendProperties {
        threads: CallingThreads::Application,
        ..FrontendProperties::default()
    };
    let path = device.to_str().ok_or("the device is not valid UTF-8")?;
    let bound = BoundDevice::take(socket, path, frontend)?;
    let file = open(&bound, Path::new("/"))?;
    measure(&bound, file)?;
    for _ in 0..ROUNDS {
        keep_best(&mut here, measure(&bound, file)?);
        keep_best(&mut through, ask()?);
    }
    println!("best of {ROUNDS} rounds of {COUNT} operations, in nanoseconds");
    println!(
        "{:>16} {:>12} {:>16} {:>16} {:>8}",
        "", "in process", "through manager", "manager has it", "ratio"
    );
    for (kind, name) in NAMES.iter().enumerate() {
        let (own, other, manager) = (here[kind], through[kind], of_manager[kind]);
        println!("{name:>16} {own:>12.0} {other:>16.0} {manager:>16.0} {:>8.1}", other / own);
    }
    drop(asks);
    child.wait()?;
    Ok(())
}
