//! Writers with checksummed data, which know what was acknowledged.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BLOCK: usize = 512;
const BLOCKS: u64 = 16;

/// Rounds until a writer begins again at the start of its file, so that nothing hides a block that
/// was lost before.
pub const LONG: u64 = 4096;

/// Running writers, each of which has a file of its own.
pub struct WriterLoad {
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<WriterResult>>,
}

/// The work of a writer.
pub struct WriterResult {
    name: String,
    /// The version of each block that fsync(2) has acknowledged, and the last one that was written.
    blocks: Vec<(u64, u64)>,
    /// Number of rounds that were acknowledged.
    pub syncs: u64,
    /// Syncs since the last failed call, through the same open file.
    pub syncs_since: u64,
    /// Failed calls.
    pub errors: Vec<io::Error>,
    /// Time of the longest call.
    pub longest: Duration,
    /// Time of the longest call on an open file.
    pub longest_of_data: Duration,
}

impl WriterLoad {
    /// Starts a writer for each name in `dir`.
    pub fn start(dir: &Path, names: impl IntoIterator<Item = String>) -> WriterLoad {
        WriterLoad::with(dir, names, 1)
    }

    /// Starts writers that begin again after `rounds`.
    pub fn with(dir: &Path, names: impl IntoIterator<Item = String>, rounds: u64) -> WriterLoad {
        let stop = Arc::new(AtomicBool::new(false));
        let writer = |name: String| {
            let (path, stop) = (dir.join(&name), Arc::clone(&stop));
            std::thread::spawn(move || write(path, name, rounds, &stop))
        };
        let writers = names.into_iter().map(writer).collect();
        WriterLoad { stop, writers }
    }

    /// Ends the writers.
    pub fn stop(self) -> Vec<WriterResult> {
        self.stop.store(true, Ordering::Release);
        self.writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    }
}

/// Threads that each have one request at a time.
pub struct CallerThreads {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Duration>>,
}

impl CallerThreads {
    /// Starts this number of threads, which read the attributes of a file by its name.
    pub fn start_by_name(path: PathBuf, count: usize) -> CallerThreads {
        CallerThreads::start((0..count).map(|_| {
            let path = path.clone();
            move || drop(path.metadata())
        }))
    }

    /// Starts a thread for each file, which changes its mode through an open file.
    pub fn start_by_open_files(paths: impl Iterator<Item = PathBuf>) -> CallerThreads {
        CallerThreads::start(paths.map(|path| {
            let file = File::open(path).unwrap();
            move || drop(file.set_permissions(Permissions::from_mode(0o644)))
        }))
    }

    /// Calls may fail while a server is away.
    fn start<C: Fn() + Send + 'static>(calls: impl Iterator<Item = C>) -> CallerThreads {
        let stop = Arc::new(AtomicBool::new(false));
        let caller = |call: C| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut longest = Duration::ZERO;
                while !stop.load(Ordering::Acquire) {
                    let begun = Instant::now();
                    call();
                    longest = longest.max(begun.elapsed());
                    // Hundreds of them leave the processors to others.
                    std::thread::sleep(Duration::from_millis(500));
                }
                longest
            })
        };
        let threads = calls.map(caller).collect();
        CallerThreads { stop, threads }
    }

    /// Ends the threads. Returns the time of the longest call.
    pub fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Release);
        self.threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    }
}

fn write(path: PathBuf, name: String, rounds: u64, stop: &AtomicBool) -> WriterResult {
    let blocks = vec![(0, 0); (rounds * BLOCKS) as usize];
    let mut written = WriterResult {
        name,
        blocks,
        syncs: 0,
        syncs_since: 0,
        errors: Vec::new(),
        longest: Duration::ZERO,
        longest_of_data: Duration::ZERO,
    };
    let mut file = None;
    let mut version = 0;
    while !stop.load(Ordering::Acquire) {
        version += 1;
        if let Err(error) = written.round(&path, &mut file, version) {
            written.errors.push(error);
            written.syncs_since = 0;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    written
}

impl WriterResult {
    /// Writes a version to the blocks of this round, and waits for its acknowledgement.
    fn round(&mut self, path: &Path, open: &mut Option<File>, version: u64) -> io::Result<()> {
        if open.is_none() {
            let opened =
                || File::options().read(true).write(true).create(true).truncate(false).open(path);
            *open = Some(self.time_call(opened)?);
        }
        let Some(file) = open else { return Ok(()) };
        let rounds = self.blocks.len() as u64 / BLOCKS;
        let first = version % rounds * BLOCKS;
        for block in first..first + BLOCKS {
            self.blocks[block as usize].1 = version;
            let bytes = content(&self.name, block, version);
            self.time_data_call(|| file.write_all_at(&bytes, block * BLOCK as u64))?;
        }
        self.time_data_call(|| file.sync_all())?;
        let round = first as usize..(first + BLOCKS) as usize;
        self.blocks[round].iter_mut().for_each(|(acknowledged, _)| *acknowledged = version);
        self.syncs += 1;
        self.syncs_since += 1;
        self.time_call(|| path.metadata())?;
        Ok(())
    }

    fn time_call<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = call();
        self.longest = self.longest.max(begun.elapsed());
        result
    }

    fn time_data_call<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = self.time_call(call);
        self.longest_of_data = self.longest_of_data.max(begun.elapsed());
        result
    }

    /// The name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the file in `dir`: each block has a version that was written, and none that is older
    /// than acknowledged.
    pub fn is_in(&self, dir: &Path) {
        let file = File::open(dir.join(&self.name)).unwrap();
        for (block, &(acknowledged, last)) in self.blocks.iter().enumerate() {
            if acknowledged == 0 {
                continue;
            }
            let mut bytes = vec![0; BLOCK];
            let what = format!("{} block {block} in {}", self.name, dir.display());
            file.read_exact_at(&mut bytes, (block * BLOCK) as u64).expect(&what);
            let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert!(
                (acknowledged..=last).contains(&version),
                "{what}: version {version}, but {acknowledged} was acknowledged and {last} written"
            );
            assert!(bytes == content(&self.name, block as u64, version), "{what}: a mix");
        }
    }
}

/// The content of a block: its version, and bytes that follow from the version and the place.
fn content(name: &str, block: u64, version: u64) -> Vec<u8> {
    let seed = name.bytes().fold(version ^ (block << 32), |seed, byte| {
        seed.wrapping_mul(31).wrapping_add(u64::from(byte))
    });
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; BLOCK];
    random.fill(&mut bytes);
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// The check of acknowledged data would find a write that was lost, torn, or is another file's.
#[test]
fn lost_torn_and_foreign_blocks_are_found() {
    let place = defuse_testkit::mounted::scratch().unwrap();
    let blocks = vec![(5, 6); BLOCKS as usize];
    let none = Duration::ZERO;
    let written = WriterResult {
        name: "a".to_owned(),
        blocks,
        syncs: 1,
        syncs_since: 1,
        errors: Vec::new(),
        longest: none,
        longest_of_data: none,
    };
    let is_found = |name: &str, version, torn: usize| {
        let whole = |block| content(name, block, version);
        let mut all: Vec<u8> = (0..BLOCKS).flat_map(whole).collect();
        if torn > 0 {
            all[torn..torn + 9].fill(7);
        }
        std::fs::write(place.path().join("a"), all).unwrap();
        let check = std::panic::AssertUnwindSafe(|| written.is_in(place.path()));
        std::panic::catch_unwind(check).is_err()
    };
    let good: Vec<u8> = (0..BLOCKS).flat_map(|block| content("a", block, 6)).collect();
    std::fs::write(place.path().join("a"), good).unwrap();
    written.is_in(place.path());
    assert!(is_found("a", 5, 3 * BLOCK + 100), "torn");
    assert!(is_found("a", 4, 0) && is_found("a", 7, 0) && is_found("b", 5, 0));
    std::fs::write(place.path().join("a"), "short").unwrap();
    let check = std::panic::AssertUnwindSafe(|| written.is_in(place.path()));
    assert!(std::panic::catch_unwind(check).is_err());
}
