//! Measures operations on names through the contract, without a frontend: `memory:` beside uhs on
//! memory, or on an image file.
//!
//! `cargo run --release -p defuse-bench --example names -- memory|ram|IMAGE [FILES [THREADS]]`
//!
//! It prints the CPU time of the whole process for each operation, with the sync at the end of each
//! phase, and the resident memory for each closed file. With uhs on memory the latter includes the
//! device.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use defuse_block::{BlockDevice, DeviceAccess, FileDevice, RamDevice};
use defuse_fs::{
    Caller, Context, FileKind, FileSystem, Ino, Name, NewNode, NoNotify, NormalPath, RenameFlags,
    SetAttr, shortcuts_of,
};
use defuse_uhs::Uhs;
use rustix::time::{ClockId, clock_gettime};

const DIRECTORIES: usize = 1000;

/// An image of so many bytes for each file, and 256 MiB.
const BYTES_OF_A_FILE: u64 = 6144;

struct NamesRun {
    fs: Box<dyn FileSystem>,
    dirs: Vec<Ino>,
    files: usize,
    threads: usize,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| {
        args.get(at).map_or(default, |text| text.parse().expect("a number is expected"))
    };
    let what = args.first().map_or("memory", String::as_str);
    let (files, threads) = (number(1, 1_000_000), number(2, 1));
    let bytes = files as u64 * BYTES_OF_A_FILE + (256 << 20);
    let fs: Box<dyn FileSystem> = match what {
        "memory" => Box::new(defuse_memory::MemoryFileSystem::new(Default::default())),
        "ram" => uhs(Arc::new(RamDevice::new(4096, bytes / 4096))),
        image => {
            fs::File::create(image).and_then(|file| file.set_len(bytes)).expect("an image");
            uhs(Arc::new(
                FileDevice::open(Path::new(image), DeviceAccess::ReadWrite).expect("an image"),
            ))
        }
    };
    fs.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    let mut run = NamesRun { fs, dirs: Vec::new(), files, threads };
    println!("{what}: {files} files in {DIRECTORIES} directories, {threads} threads");
    let before = resident();
    run.run_all();
    println!("{:10} {:6} bytes for each file, with the directories", "resident", {
        (resident() - before) / files
    });
    run.pause();
    if !["memory", "ram"].contains(&what) {
        drop(run);
        fs::remove_file(what).expect("the image is there");
    }
}

fn uhs(device: Arc<dyn BlockDevice>) -> Box<dyn FileSystem> {
    let mut random = fastrand::Rng::new();
    Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random).expect("a file system");
    let (fs, problems) = Uhs::open(device, Default::default(), random).expect("a file system");
    assert_eq!(problems, []);
    Box::new(fs)
}

impl NamesRun {
    fn run_all(&mut self) {
        let cx = context();
        let node = NewNode::new(FileKind::Directory, 0o755, cx.caller);
        for at in 0..DIRECTORIES {
            let text = format!("directory{at}");
            self.dirs.push(self.fs.mkdir(&cx, Ino::ROOT, name(&text), &node).expect("mkdir").ino);
        }
        let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
        self.phase("create", |dir, name| {
            let entry = self.fs.mknod(&context(), self.dirs[dir], name, &node).expect("mknod");
            self.fs.forget(entry.ino, 1);
        });
    }

    fn pause(&self) {
        self.phase("stat", |dir, name| {
            let entry = self.fs.lookup(&context(), self.dirs[dir], name).expect("lookup");
            self.fs.forget(entry.ino, 1);
        });
        self.phase("resolve", |dir, name| {
            let path = format!("directory{dir}/{}", String::from_utf8_lossy(name.as_bytes()));
            let path = NormalPath::new(path.as_bytes()).expect("a path");
            shortcuts_of(&*self.fs).resolve(&context(), Ino::ROOT, path).expect("resolve");
        });
        self.phase("chmod", |dir, name| {
            let entry = self.fs.lookup(&context(), self.dirs[dir], name).expect("lookup");
            let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
            self.fs.setattr(&context(), entry.ino, None, &set).expect("setattr");
            self.fs.forget(entry.ino, 1);
        });
        self.phase("rename", |dir, old| {
            let text = format!("{}.new", String::from_utf8_lossy(old.as_bytes()));
            let (from, to) = ((self.dirs[dir], old), (self.dirs[dir], name(&text)));
            self.fs.rename(&context(), from, to, RenameFlags(0)).expect("rename");
        });
        self.phase("unlink", |dir, old| {
            let text = format!("{}.new", String::from_utf8_lossy(old.as_bytes()));
            self.fs.unlink(&context(), self.dirs[dir], name(&text)).expect("unlink");
        });
    }

    /// Does something with all files, the threads in different directories.
    fn phase(&self, what: &str, operation: impl Fn(usize, Name<'_>) + Sync) {
        let (start, cpu) = (Instant::now(), cpu_ns());
        let of_thread = |thread: usize| {
            for at in 0..self.files {
                let dir = at % DIRECTORIES;
                if dir % self.threads == thread {
                    operation(dir, name(&format!("file{}", at / DIRECTORIES)));
                }
            }
        };
        thread::scope(|scope| {
            (0..self.threads).for_each(|thread| drop(scope.spawn(move || of_thread(thread))));
        });
        let alone = start.elapsed();
        let _ = self.fs.syncfs(&context());
        let each = |ns: u128| ns as f64 / self.files as f64 / 1000.0;
        let (used, all) = (each(cpu_ns() - cpu), start.elapsed());
        println!(
            "{what:10} {used:6.2} us of CPU, {:6.2} us, {:6.2} us with the sync",
            each(alone.as_nanos()),
            each(all.as_nanos())
        );
    }
}

fn context() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

fn cpu_ns() -> u128 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u128 * 1_000_000_000 + time.tv_nsec as u128
}

fn resident() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").expect("statm(5)");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("rss");
    pages * 4096
}
