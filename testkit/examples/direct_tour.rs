//! Several file systems in one process, some of the same type, with copies between them, a listing,
//! asynchronous reads and statistics: `cargo run -p defuse-testkit --example direct_tour --
//! DIRECTORY`. The equivalent in C is `capi/examples/tour.c`.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DirectClient, FileDescription,
    JobOutcome, JobQueue, OpenHow, QueueOptions, Result, WalkStart,
};
use defuse_fs::{Errno, FileKind, FileSystem, OpenFlags};
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::{CredentialsPolicy, Passthrough, PassthroughOptions};

const PIECES: usize = 4;
const PIECE: usize = 64 << 10;
const SIZE: usize = PIECES * PIECE;
/// `O_RDONLY`.
const READ: u32 = 0;
const NEW: u32 = OpenFlags::WRONLY | OpenFlags::CREAT | OpenFlags::TRUNC;

struct DirectTour {
    client: DirectClient,
    task: ClientTask,
}

impl DirectTour {
    fn mount(&self, target: &str, fs: impl FileSystem + 'static) -> Result<(), defuse_fs::Errno> {
        self.client.mount(target.as_bytes(), Arc::new(fs), &ClientMountArgs::default())?;
        println!("mounted {target}");
        Ok(())
    }

    fn open(&self, path: &str, flags: u32) -> Result<Arc<FileDescription>> {
        let how = OpenHow { flags, mode: 0o644, ..OpenHow::default() };
        self.client.open(&self.task, WalkStart::Cwd, path.as_bytes(), how)
    }

    /// Copies between mounts of any types.
    fn copy(&self, from: &str, to: &str) -> Result<()> {
        let (source, target) = (self.open(from, READ)?, self.open(to, NEW)?);
        let mut total = 0;
        loop {
            let ends = ((&*source, None), (&*target, None));
            match self.client.copy_file_range(&self.task, ends.0, ends.1, SIZE)? {
                0 => break,
                count => total += count,
            }
        }
        source.close(&self.task)?;
        target.close(&self.task)?;
        println!("copied {total} bytes from {from} to {to}");
        Ok(())
    }

    fn list(&self, path: &str) -> Result<()> {
        let dir = self.open(path, OpenFlags::DIRECTORY)?;
        for entry in self.client.read_dir(&self.task, &dir)? {
            if entry.kind == FileKind::Regular {
                println!("{path} has {}", String::from_utf8_lossy(&entry.name));
            }
        }
        Ok(dir.close(&self.task)?)
    }

    /// Several concurrent reads, which complete in any order.
    fn read_later(self: &Arc<Self>, path: &str, expected: &[u8]) -> Result<()> {
        let file = self.open(path, READ)?;
        let queue = JobQueue::new(QueueOptions::default())?;
        for piece in 0..PIECES {
            let (tour, file) = (Arc::clone(self), Arc::clone(&file));
            let work = move || {
                let mut room = vec![0; PIECE];
                let offset = (piece * PIECE) as u64;
                let count = tour.client.pread(&tour.task, &file, &mut room, offset)?;
                room.truncate(count);
                Ok::<_, CallError>(room)
            };
            queue.submit(piece as u64, Box::new(work), None)?;
        }
        let mut memory = vec![0; SIZE];
        for (piece, outcome) in queue.collect(PIECES, PIECES, None)? {
            let JobOutcome::Done(bytes) = outcome else { return Err(Errno::EIO.into()) };
            memory[piece as usize * PIECE..][..PIECE].copy_from_slice(&bytes?);
        }
        let same = if memory == expected { "the same bytes" } else { "other bytes" };
        println!("read {PIECES} pieces of {path} at once: {same}");
        Ok(file.close(&self.task)?)
    }

    fn statistics(&self, target: &str) -> Result<()> {
        let snapshot = self.client.statistics(target.as_bytes())?;
        let mut all = Vec::new();
        for stats in &snapshot.ops {
            let (op, count) = (stats.op.name(), stats.latency.count);
            all.push(format!("{count} {op} ({} bytes)", stats.bytes));
        }
        println!("statistics of {target} {}", all.join(", "));
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir =
        std::env::args_os().nth(1).map(PathBuf::from).ok_or("usage: direct_tour DIRECTORY")?;
    let client = DirectClient::new(ClientOptions::default());
    let tour = Arc::new(DirectTour { client, task: ClientTask::for_this_process()? });
    // The threads belong to the program, so their credentials must be restored.
    let options =
        PassthroughOptions { credentials: CredentialsPolicy::Restore, ..Default::default() };
    tour.mount("mem:", MemoryFileSystem::new(Default::default()))?;
    tour.mount("scratch:", MemoryFileSystem::new(Default::default()))?;
    tour.mount("/data", Passthrough::new(&dir, options.clone())?)?;
    tour.mount("/more", Passthrough::new(&dir, options)?)?;

    let bytes: Vec<u8> = (0..SIZE).map(|place| (place / PIECE + place % 251) as u8).collect();
    let file = tour.open("mem:/one", NEW)?;
    assert_eq!(tour.client.write(&tour.task, &file, &bytes)?, SIZE);
    file.close(&tour.task)?;
    drop(file);
    tour.copy("mem:/one", "scratch:/two")?;
    tour.copy("scratch:/two", "/data/three")?;
    tour.list("/data")?;
    tour.read_later("/more/three", &bytes)?;
    let targets = ["mem:", "scratch:", "/data", "/more"];
    targets.iter().try_for_each(|target| tour.statistics(target))?;
    for target in targets {
        tour.client.unmount(target.as_bytes(), false)?;
    }
    println!(
        "done: {} mounts of 2 types, 2 files copied, {PIECES} reads finished later, {} bytes moved",
        targets.len(),
        3 * SIZE
    );
    Ok(())
}
