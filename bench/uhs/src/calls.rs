//! Single calls of one process on `memory:`: by shared memory, by a socket, and by a mount of the kernel.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use defuse_fs::{
    Caller, Context as Cx, Errno, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs,
    OpenFlags, ReadArgs, ReadBuf, SliceSink, SliceSource, WriteArgs, WriteBuf,
};
use defuse_measure::server::Server;
use defuse_remote::{LaneUse, Remote, RemoteOptions};

use crate::mounted::with_mount;
use crate::results::{Better, Results};
use crate::targets::Stage;

/// Calls of each kind in a turn, and turns: the figure is that of the best turn, since others use the processors, too.
const CALLS: u32 = 2000;
const TURNS: usize = 15;
const BLOCK: usize = 4096;

/// One round.
pub(crate) fn measure(
    stage: &mut Stage,
    program: &Path,
    dir: &Path,
    results: &mut Results,
) -> Result<()> {
    let socket = dir.join("calls");
    let server = Server::start(program, "memory:".as_ref(), &socket)?;
    let by = |lanes| -> Result<Client> {
        let options = RemoteOptions { lanes, ..RemoteOptions::default() };
        Client::new(Remote::connect(&socket, options)?)
    };
    let (shared, messages) = (by(LaneUse::Required)?, by(LaneUse::Never)?);
    with_mount(stage, program, "memory", |at| {
        let mounted = at.join("file");
        fs::write(&mounted, [7; BLOCK])?;
        let mounted = OpenOptions::new().read(true).write(true).open(mounted)?;
        let mut best = [[f64::MAX; 3]; 3];
        let (mut names, mut room) = (0, [0; BLOCK]);
        for _ in 0..TURNS {
            for (client, best) in [&shared, &messages].into_iter().zip(&mut best) {
                keep(&mut best[0], || client.read())?;
                keep(&mut best[1], || client.look(&mut names))?;
                keep(&mut best[2], || client.write())?;
            }
            keep(&mut best[2][0], || Ok(mounted.read_exact_at(&mut room, 0)?))?;
            keep(&mut best[2][1], || {
                names += 1;
                let found = fs::symlink_metadata(at.join(format!("missing {names}")));
                anyhow::ensure!(found.is_err(), "a name that nobody has made");
                Ok(())
            })?;
            keep(&mut best[2][2], || Ok(mounted.write_all_at(&room, 0)?))?;
        }
        for (target, best) in ["shared", "socket", "kernel mount"].into_iter().zip(best) {
            for (row, ns) in ["read of a cached 4 KiB", "look for a new name", "write of 4 KiB"]
                .into_iter()
                .zip(best)
            {
                results.add((row, "ns", Better::Less, 0.0), target, ns);
            }
        }
        Ok(())
    })?;
    drop((shared, messages));
    drop(server);
    Ok(())
}

/// Keeps the least time of a call, in nanoseconds.
fn keep(best: &mut f64, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    for _ in 0..CALLS {
        call()?;
    }
    *best = best.min(begun.elapsed().as_nanos() as f64 / f64::from(CALLS));
    Ok(())
}

/// A client with an open file.
struct Client {
    fs: Remote,
    file: File,
}

fn cx() -> Cx<'static> {
    Cx::new(Caller { uid: 0, gid: 0, pid: 1 })
}

impl Client {
    fn new(fs: Remote) -> Result<Client> {
        let text = format!("file {:016x}", fastrand::u64(..));
        let name = Name::new(text.as_bytes()).ok().context("a name")?;
        let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
        let flags = OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT);
        let args = OpenArgs { flags, kill_suidgid: false };
        let (entry, opened) = fs.create(&cx(), Ino::ROOT, name, &node, args)?;
        let client = Client { fs, file: File { ino: entry.ino, fh: opened.fh } };
        client.write()?;
        Ok(client)
    }

    fn read(&self) -> Result<()> {
        let mut room = [0; BLOCK];
        let mut sink = SliceSink::new(&mut room);
        let mut out = ReadBuf::new(&mut sink, BLOCK);
        self.fs.read(&cx(), self.file, ReadArgs::default(), &mut out)?;
        anyhow::ensure!(out.filled() == BLOCK, "a read of {} bytes", out.filled());
        Ok(())
    }

    fn look(&self, names: &mut u64) -> Result<()> {
        *names += 1;
        let text = format!("missing {names}");
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
