//! A program that knows which data it made durable, while the process that serves its files is
//! killed.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Numbers that differ from call to call, from a seed.
pub struct LoadRandom(pub u64);

impl LoadRandom {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
}

pub fn data(seed: u64, len: usize) -> Vec<u8> {
    let mut random = LoadRandom(seed);
    (0..len).map(|_| random.next() as u8).collect()
}

/// A program that uses the mount, and what it knows to be durable.
pub struct MountLoad<'a> {
    pub dir: PathBuf,
    random: LoadRandom,
    ends: &'a AtomicBool,
    /// The number of files that were made durable, of all programs.
    count: &'a AtomicU64,
    /// Durable files, each with the seed and length of its content.
    pub durable: Vec<(u64, usize)>,
    pub longest: Duration,
}

impl<'a> MountLoad<'a> {
    /// Starts a program in `dir`, whose choices follow from `seed`, until `ends`.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        (dir, seed): (PathBuf, u64),
        ends: &'a AtomicBool,
        count: &'a AtomicU64,
    ) -> ScopedJoinHandle<'scope, MountLoad<'a>>
    where
        'a: 'scope,
    {
        let (durable, longest) = (Vec::new(), Duration::ZERO);
        let mut load = MountLoad { dir, random: LoadRandom(seed), ends, count, durable, longest };
        scope.spawn(move || {
            load.run();
            load
        })
    }

    /// Makes a call. `None` if it failed as calls may: its answer or its file was lost with a
    /// server.
    fn call<T>(&mut self, what: &str, call: impl FnOnce() -> std::io::Result<T>) -> Option<T> {
        let begun = Instant::now();
        let outcome = call();
        self.longest = self.longest.max(begun.elapsed());
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                let lost = [Errno::IO, Errno::STALE, Errno::NOENT];
                let errno = Errno::from_io_error(&error);
                assert!(errno.is_some_and(|errno| lost.contains(&errno)), "{what}: {error}");
                None
            }
        }
    }

    fn run(&mut self) {
        // Until its directory is durable, it may be lost.
        let dir = self.dir.clone();
        let made = || {
            if !dir.exists() {
                fs::create_dir(&dir)?;
            }
            File::open(&dir)?.sync_all()?;
            File::open(dir.parent().unwrap_or(&dir))?.sync_all()
        };
        while self.call("a durable directory", made).is_none() {}
        let log = self.open_log();
        let mut number = 0;
        while !self.ends.load(Ordering::Relaxed) {
            number += 1;
            self.write_one(number);
            self.write_log(&log, number);
            if number.is_multiple_of(8) {
                self.check_some();
            }
        }
        self.check_log(number);
    }

    pub fn path(&self, seed: u64) -> PathBuf {
        self.dir.join(format!("{seed:x}"))
    }

    /// Writes a file, and remembers it if it was made durable under its last name.
    fn write_one(&mut self, number: u64) {
        let seed = self.random.next() << 16 | number;
        let bytes = data(seed, 1 + self.random.next() as usize % 40_000);
        let (path, temporary) = (self.path(seed), self.dir.join("temporary"));
        let dir = self.dir.clone();
        let written = self.call("a file", || {
            let file = File::create(&temporary)?;
            for (at, part) in bytes.chunks(7000).enumerate() {
                file.write_all_at(part, at as u64 * 7000)?;
            }
            file.sync_all()?;
            drop(file);
            fs::rename(&temporary, &path)?;
            File::open(&dir)?.sync_all()
        });
        if written.is_some() {
            self.durable.push((seed, bytes.len()));
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn check_some(&mut self) {
        for _ in 0..4 {
            if self.durable.is_empty() {
                return;
            }
            let (seed, len) = self.durable[self.random.next() as usize % self.durable.len()];
            let path = self.path(seed);
            let found = self.call("reading", || fs::read(&path).map_err(durable));
            assert!(found.is_none_or(|found| found == data(seed, len)), "{path:?} has other data");
        }
    }

    /// A file that stays open. It is durable, so that it is found again.
    fn open_log(&mut self) -> File {
        let path = self.dir.join("log");
        loop {
            let log = self.call("the log", || {
                let log = OpenOptions::new()
                    .create(true)
                    .truncate(false)
                    .read(true)
                    .write(true)
                    .open(&path)?;
                log.sync_all()?;
                File::open(path.parent().unwrap())?.sync_all()?;
                Ok(log)
            });
            if let Some(log) = log {
                return log;
            }
        }
    }

    /// Writes a record at its place until fsync(2) succeeds. The file itself is never lost.
    fn write_log(&mut self, log: &File, number: u64) {
        let record = data(number, 512);
        while self
            .call("a record", || {
                log.write_all_at(&record, number * 512).map_err(durable)?;
                log.sync_data().map_err(durable)
            })
            .is_none()
        {}
    }

    fn check_log(&mut self, last: u64) {
        let log = fs::read(self.dir.join("log")).unwrap();
        for number in 1..=last {
            let at = number as usize * 512;
            assert!(log[at..at + 512] == data(number, 512), "record {number} of {last}");
        }
    }
}

/// A durable file is never missing.
fn durable(error: std::io::Error) -> std::io::Error {
    assert!(Errno::from_io_error(&error) == Some(Errno::IO), "a durable file: {error}");
    error
}
