//! `uhs:` behind shared memory, whose clients end at random points, and then a power failure at any
//! moment of that.
//!
//! Each client makes, changes, renames and removes files by several threads until its connection is
//! cut in the middle of a request. A file that is durable stays as it is. Whatever moment the power
//! fails at: the check finds nothing, data that was durable before is there, a name that was being
//! changed is old or new, and nothing is left of files that only ended clients had open.
//!
//! `DEFUSE_FULL=1` plays many more; `DEFUSE_SEED=N` repeats one.

#[path = "served/content.rs"]
mod content;
#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_block::{BlockDevice, RamDevice, SimDevice};
use defuse_fs::{
    Errno, Fh, File, FileKind, FileSystem, Ino, NewNode, OpenArgs, OpenFlags, ReleaseArgs, Result,
};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::{SharedLayers, SharedOptions};
use defuse_socket::ServerOptions;
use defuse_testkit::listing;
use defuse_uhs::{Uhs, UhsOptions, check};
use served::{TestServer, context, name, read, write};

/// Blocks of 4 KiB.
const BLOCKS: u64 = 8192;
/// Clients at a time, and the threads of each.
const CLIENTS: usize = 2;
const THREADS: usize = 2;

const OPTIONS: UhsOptions = UhsOptions {
    read_only: false,
    commit: None,
    discard: false,
    separation: None,
    queues: None,
    worker: false,
    cache_pages: 256,
    dirty_pages: 64,
    index: 64 << 20,
    writeback: false,
    access_times: defuse_fs::posix::AccessTimeRule::Relative,
};

fn is_full() -> bool {
    std::env::var_os("DEFUSE_FULL").is_some()
}

fn open(device: Arc<dyn BlockDevice>) -> Uhs {
    let (fs, problems) = Uhs::open(device, OPTIONS, fastrand::Rng::with_seed(6)).unwrap();
    assert_eq!(problems, []);
    fs
}

/// The content of a file by its name.
fn content(text: &str) -> Vec<u8> {
    content::make_content(text, 20_000)
}

/// The past, for the judge.
#[derive(Default)]
struct CrashHistory {
    /// Durable files, with the number of events of the device before they were acknowledged.
    durable: Mutex<BTreeMap<String, usize>>,
    /// Clients that were cut off.
    cut: AtomicU64,
}

/// One thread of a client, until its connection is cut.
struct CrashThread<'a> {
    client: &'a RemoteClient,
    sim: &'a SimDevice,
    history: &'a CrashHistory,
    who: String,
    random: fastrand::Rng,
}

impl CrashThread<'_> {
    fn run(&mut self) {
        for number in 0.. {
            match self.step(&format!("{} {number}", self.who)) {
                Ok(()) => {}
                // The end of the connection, in the middle of the request.
                Err(Errno::ENOTCONN) => return,
                Err(errno) => panic!("{}: {errno}", self.who),
            }
        }
    }

    /// A file of its own: durable, or soon renamed or removed, perhaps while it is open.
    fn step(&mut self, text: &str) -> Result<()> {
        let (cx, client) = (context(), self.client);
        let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
        let args =
            OpenArgs { flags: OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT), kill_suidgid: false };
        let (entry, opened) = client.create(&cx, Ino::ROOT, name(text), &node, args)?;
        let file = File { ino: entry.ino, fh: opened.fh };
        let bytes = content(text);
        for (at, part) in bytes.chunks(7000).enumerate() {
            write(client, file, at as u64 * 7000, part)?;
        }
        let to = format!("{text} renamed");
        match self.random.u8(..4) {
            0 => {
                client.fsync(&cx, file, false)?;
                let events = self.sim.events();
                self.history.durable.lock().unwrap().insert(text.to_owned(), events);
            }
            1 => client.unlink(&cx, Ino::ROOT, name(text))?,
            kind => {
                let places = ((Ino::ROOT, name(text)), (Ino::ROOT, name(&to)));
                client.rename(&cx, places.0, places.1, Default::default())?;
                if kind == 2 {
                    client.fsync(&cx, file, false)?;
                    let events = self.sim.events();
                    self.history.durable.lock().unwrap().insert(to, events);
                }
            }
        }
        // A file without a name is still there for a client that has the file open.
        assert!(read(client, file, 0, bytes.len() + 1)? == bytes, "{text}");
        if self.random.bool() {
            client.release(&cx, file, ReleaseArgs::default())?;
            client.forget(entry.ino, 1);
        }
        Ok(())
    }
}

/// A client that works until it is cut off.
fn play(served: &TestServer, sim: &SimDevice, history: &CrashHistory, seed: u64) {
    let client = served.client();
    let mut random = fastrand::Rng::with_seed(seed);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (client, random) = (&client, random.fork());
            let who = format!("{seed} {number}");
            scope.spawn(move || CrashThread { client, sim, history, who, random }.run());
        }
        std::thread::sleep(Duration::from_micros(random.u64(500..20_000)));
        rustix::net::shutdown(&client, rustix::net::Shutdown::Both).unwrap();
    });
    history.cut.fetch_add(1, Ordering::Relaxed);
}

/// The names of files, and their content.
fn files(fs: &Uhs) -> BTreeMap<String, Vec<u8>> {
    let cx = context();
    let root =
        File { ino: Ino::ROOT, fh: fs.opendir(&cx, Ino::ROOT, OpenFlags::default()).unwrap().fh };
    let names = listing::list(fs, &cx, root).into_iter();
    names
        .map(|text| {
            let entry = fs.lookup(&cx, Ino::ROOT, name(&text)).unwrap();
            let file = File { ino: entry.ino, fh: Fh(0) };
            let bytes = read(fs, file, 0, entry.attr.size as usize + 1).unwrap();
            assert_eq!(bytes.len() as u64, entry.attr.size);
            fs.forget(entry.ino, 1);
            (text, bytes)
        })
        .collect()
}

/// Judges a state of the device after so many of its events.
fn judge(ram: RamDevice, events: usize, history: &CrashHistory) {
    let device: Arc<dyn BlockDevice> = Arc::new(ram);
    let report = check(&device).unwrap();
    assert_eq!(report.problems, [], "after {events} events");
    let found = files(&open(Arc::clone(&device)));
    for (text, since) in &*history.durable.lock().unwrap() {
        let bytes = found.get(text);
        let made = text.strip_suffix(" renamed").unwrap_or(text);
        assert!(
            *since > events || bytes.is_some_and(|bytes| *bytes == content(made)),
            "{text} is durable since event {since}, and not there after {events}"
        );
    }
    for (text, bytes) in &found {
        let made = text.strip_suffix(" renamed").unwrap_or(text);
        assert!(made == text || !found.contains_key(made), "{made} has both of its names");
        // Data is on the device before the size that covers the data.
        assert!(content(made).starts_with(bytes), "{text} has other data after {events} events");
    }
    // Only names hold inodes.
    let again = check(&device).unwrap();
    assert_eq!((again.problems, again.inodes), (vec![], found.len() as u64 + 1));
}

/// A device on which clients have worked and were cut off, and the history of that.
fn record(seed: u64, rounds: usize) -> (SimDevice, CrashHistory) {
    let ram = RamDevice::new(4096, BLOCKS);
    let device: Arc<dyn BlockDevice> = Arc::new(ram.clone());
    Uhs::make(device, (0o755, 0, 0), &mut fastrand::Rng::with_seed(5)).unwrap();
    let sim = SimDevice::from_ram(&ram, seed);
    let fs: Arc<dyn FileSystem> = Arc::new(open(Arc::new(sim.clone())));
    let layers = SharedLayers::build(fs, SharedOptions::default());
    let options = ServerOptions {
        lanes: layers.transport(),
        pages: layers.page_source(),
        versions: layers.version_source(),
        ..ServerOptions::default()
    };
    let clients = RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() };
    let served = TestServer::new(layers.fs, options, clients);
    let history = CrashHistory::default();
    for round in 0..rounds {
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let seed = seed.wrapping_mul(1000) + (round * CLIENTS + number) as u64;
                let (served, sim, history) = (&served, &sim, &history);
                scope.spawn(move || play(served, sim, history, seed));
            }
        });
    }
    drop(served);
    (sim, history)
}

#[test]
fn a_power_failure_after_the_end_of_clients_leaves_what_was_durable_and_nothing_of_them() {
    let base = std::env::var("DEFUSE_SEED").ok().and_then(|seed| seed.parse().ok());
    let (runs, rounds, states) = if is_full() { (20, 12, 400) } else { (2, 4, 60) };
    for run in 0..runs {
        let seed = base.unwrap_or(1) + run;
        let (sim, history) = record(seed, rounds);
        let all = sim.events();
        let durable = history.durable.lock().unwrap().len();
        println!(
            "seed {seed}: {} clients cut off, {durable} durable files, {all} events",
            history.cut.load(Ordering::Relaxed)
        );
        assert!(durable > 0, "nothing was made durable");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut moments: Vec<usize> = (0..states).map(|_| random.usize(..=all)).collect();
        moments.sort_unstable();
        let mut wanted = moments.into_iter().peekable();
        let mut cuts = sim.power_cuts();
        while let Some(cut) = cuts.next() {
            while wanted.next_if_eq(&cut.event_index()).is_some() {
                judge(cut.sample(&mut random), cut.event_index(), &history);
            }
        }
        judge(sim.copy_present(), all, &history);
    }
}
