//! A directory from its creation to its removal: changes by clients in turn, looks by all of them
//! all the time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::checks::OperationAnswer;
use super::client::ComparedClient;
use super::history::ClientLook;
use super::world::{ClientWorld, DIRS, NAMES, NameNumber, WorldChange, names};

/// Numbers of operations of all episodes.
#[derive(Debug, Default)]
pub struct EpisodeCounts {
    pub changes: AtomicU64,
    pub looks: AtomicU64,
    /// Changes that were left out, because the client did not know the present state yet.
    pub left_out: AtomicU64,
    /// Looks that found a former state, as promised.
    pub late: AtomicU64,
    /// Looks that the kernel refused, because it had to move a directory in its tree during a
    /// renaming.
    pub moved: AtomicU64,
    /// Episodes that ended with a renaming which the servers refuse to every client.
    pub refused: AtomicU64,
}

/// Most changes of one episode.
const CHANGES: u32 = 80;

/// An open file.
struct EpisodeFile {
    id: String,
    client: usize,
    node: usize,
}

/// An episode.
pub struct ClientEpisode<'a> {
    clients: &'a [ComparedClient],
    counts: &'a EpisodeCounts,
    world: Mutex<ClientWorld>,
    held: Mutex<Vec<EpisodeFile>>,
    /// The servers refuse a change of the model to every client, so that nothing can be compared
    /// from then on.
    refused: AtomicBool,
    /// The changes so far, for errors.
    log: Mutex<Vec<(Instant, String)>>,
    begun: Instant,
}

impl<'a> ClientEpisode<'a> {
    /// Runs the episode of a seed.
    ///
    /// # Errors
    ///
    /// The first wrong answer.
    pub fn run(
        clients: &'a [ComparedClient],
        counts: &'a EpisodeCounts,
        seed: u64,
    ) -> Result<(), String> {
        let episode = ClientEpisode {
            clients,
            counts,
            world: Mutex::new(ClientWorld::new(format!("@e{seed}"))),
            held: Mutex::default(),
            refused: AtomicBool::new(false),
            log: Mutex::default(),
            begun: Instant::now(),
        };
        let mut random = fastrand::Rng::with_seed(seed);
        match episode.run_all(&mut random, seed) {
            Err(_) if episode.refused.load(Ordering::Acquire) => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                while !episode.held.lock().unwrap().is_empty() {
                    // The file may have another state than in the model.
                    let _ = episode.close(&mut random);
                }
                Ok(())
            }
            done => done.map_err(|error| episode.explain(&error, seed)),
        }
    }

    fn run_all(&self, random: &mut fastrand::Rng, seed: u64) -> Result<(), String> {
        let maker = random.usize(..self.clients.len());
        let place = self.lock().place.clone();
        for dir in [place.clone(), format!("{place}/a"), format!("{place}/b")] {
            let made = self.clients[maker].call(&format!("mkdir {dir}"));
            made.map_err(|errno| format!("mkdir {dir}: errno {errno}"))?;
        }
        for _ in 0..random.u32(2..8) {
            self.change(random, maker)?;
        }
        // Now the others know it, so that each keeps its answers for as long as it may.
        for client in 0..self.clients.len() {
            names().try_for_each(|at| self.look_at(client, at).map(drop))?;
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let observer =
                scope.spawn(|| self.observe(&mut fastrand::Rng::with_seed(!seed), &done));
            let changed = (0..random.u32(1..=CHANGES)).try_for_each(|_| self.step(random));
            done.store(true, Ordering::Release);
            changed.and(observer.join().unwrap())
        })?;
        self.settle();
        for client in 0..self.clients.len() {
            self.look_at_all(client)?;
        }
        self.remove(random, &place)
    }

    /// A change, or a pause, or another open file.
    fn step(&self, random: &mut fastrand::Rng) -> Result<(), String> {
        let client = random.usize(..self.clients.len());
        match random.u32(..40) {
            0..3 => self.open(random, client),
            3..5 => self.close(random),
            5..9 => {
                std::thread::sleep(Duration::from_millis(random.u64(..100)));
                Ok(())
            }
            9 => {
                self.settle();
                Ok(())
            }
            _ => self.change(random, client),
        }
    }

    /// Waits until all clients must know all changes.
    fn settle(&self) {
        let last = self.lock().last_change;
        loop {
            let now = Instant::now();
            let late = self.clients.iter().map(|client| client.promise(now)).max().unwrap();
            let left = (last + late).saturating_duration_since(now);
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
    }

    /// A change by a client that knows the present state.
    fn change(&self, random: &mut fastrand::Rng, client: usize) -> Result<(), String> {
        let change = self.lock().choose(random);
        self.make(&change, client).map(drop)
    }

    /// False if the client does not know the present state yet.
    fn make(&self, change: &WorldChange, client: usize) -> Result<bool, String> {
        for at in ClientWorld::concerned_names(change) {
            if !self.look_at(client, at)? {
                self.counts.left_out.fetch_add(1, Ordering::Relaxed);
                return Ok(false);
            }
        }
        let mut world = self.lock();
        let words = world.words(change);
        let last = world.last_change;
        world.begin(change);
        drop(world);
        let answer = self.carry_out(client, &words, last);
        self.note(format!("{} {words}: {answer:?}", self.clients[client].name));
        self.counts.changes.fetch_add(1, Ordering::Relaxed);
        let ino = match (&answer, change) {
            (Err(errno), _) => {
                if matches!(change, WorldChange::Rename { .. }) && *errno == libc::EEXIST {
                    self.refused.store(self.is_refused_natively(&words), Ordering::Release);
                }
                self.lock().end(client, None);
                return Err(format!("{} {words}: errno {errno}", self.clients[client].name));
            }
            (Ok(words), WorldChange::Create { .. }) => Some(words[0].clone()),
            (Ok(_), WorldChange::Symlink { at, .. } | WorldChange::Mkdir { at }) => {
                let path = self.lock().path(*at);
                let found = self.clients[client].call(&format!("stat {path}"));
                Some(found.map_err(|errno| format!("a new {path}: errno {errno}"))?[0].clone())
            }
            _ => None,
        };
        self.lock().end(client, ino.map(|ino| ino.parse().unwrap()));
        Ok(true)
    }

    /// Carries a change out. Another look of the same client, which began before the last change,
    /// may have brought the former state back, with which the kernel refuses the change for as long
    /// as is promised.
    fn carry_out(&self, client: usize, words: &str, last: Instant) -> OperationAnswer {
        loop {
            let begun = Instant::now();
            let answer = self.clients[client].call(words);
            if answer.is_ok() || begun > last + self.clients[client].promise(begun) {
                return answer;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// True if GlusterFS's own client may not carry a change out either. A brick of a distributed
    /// volume that answered a look during the removal of a name remembers the name, and refuses
    /// renamings to it with `EEXIST` until a client looks at that name.
    fn is_refused_natively(&self, words: &str) -> bool {
        let native = self.clients.iter().find(|client| client.name == "native");
        native.is_some_and(|client| client.call(words) == Err(libc::EEXIST))
    }

    fn open(&self, random: &mut fastrand::Rng, client: usize) -> Result<(), String> {
        let at = random.usize(names());
        if self.lock().kind(at) != Some('f') || !self.look_at(client, at)? {
            return Ok(());
        }
        let mut world = self.lock();
        let (node, path) = (world.node(at).unwrap(), world.path(at));
        world.hold(node, true);
        let id = format!("{}-{}", world.place, random.u64(..));
        drop(world);
        let answer = self.clients[client].call(&format!("hold {id} {path}"));
        self.note(format!("{} hold {path}: {answer:?}", self.clients[client].name));
        answer.map_err(|errno| format!("an open of {path}: errno {errno}"))?;
        self.held.lock().unwrap().push(EpisodeFile { id, client, node });
        Ok(())
    }

    fn close(&self, random: &mut fastrand::Rng) -> Result<(), String> {
        let mut held = self.held.lock().unwrap();
        if held.is_empty() {
            return Ok(());
        }
        let at = random.usize(..held.len());
        let file = held.swap_remove(at);
        drop(held);
        let closed = self.clients[file.client].call(&format!("release {}", file.id));
        self.lock().hold(file.node, false);
        closed.map(drop).map_err(|errno| format!("a close: errno {errno}"))
    }

    /// Looks at random things until it is done.
    fn observe(&self, random: &mut fastrand::Rng, done: &AtomicBool) -> Result<(), String> {
        while !done.load(Ordering::Acquire) {
            let (client, at) = (random.usize(..self.clients.len()), random.usize(names()));
            match random.u32(..10) {
                0..3 => self.read(client, at)?,
                3 => self.read_held(random.usize(..10))?,
                4 | 5 => self.list_all(client, at / NAMES)?,
                _ => self.look_at(client, at).map(drop)?,
            }
            std::thread::sleep(Duration::from_millis(random.u64(..20)));
        }
        Ok(())
    }

    fn look_at_all(&self, client: usize) -> Result<(), String> {
        for at in names() {
            self.look_at(client, at)?;
            let (kind, path, text) = {
                let world = self.lock();
                (world.kind(at), world.path(at), world.text(at).map(str::to_owned))
            };
            match kind {
                Some('f') => self.read(client, at)?,
                Some('l') => {
                    let read = self.clients[client].call(&format!("readlink {path}"));
                    if read.as_ref().ok().and_then(|words| words.first()) != text.as_ref() {
                        return Err(format!("{path} is a link to {read:?}, not {text:?}"));
                    }
                }
                _ => {}
            }
        }
        (0..DIRS.len()).try_for_each(|dir| self.list(client, dir))?;
        let count = self.held.lock().unwrap().len();
        (0..count).try_for_each(|number| self.read_held(number))
    }

    /// Looks at a name. True if the client knows the present state.
    fn look_at(&self, client: usize, at: NameNumber) -> Result<bool, String> {
        let path = self.lock().path(at);
        let is_latest =
            self.ask(client, &format!("stat {path}"), Some(at), |world, look, answer| {
                world.check_stat(at, look, answer)
            })?;
        self.counts.late.fetch_add(u64::from(!is_latest), Ordering::Relaxed);
        Ok(is_latest)
    }

    fn read(&self, client: usize, at: NameNumber) -> Result<(), String> {
        let path = self.lock().path(at);
        self.ask(client, &format!("read {path}"), Some(at), |world, look, answer| {
            world.check_read(at, look, answer)
        })
    }

    fn list(&self, client: usize, dir: usize) -> Result<(), String> {
        let words = format!("list {}/{}", self.lock().place, DIRS[dir]);
        let is_native = self.clients[client].is_native();
        self.ask(client, &words, None, |world, look, answer| {
            world.check_list(dir, look, (answer, is_native))
        })
    }

    /// Lists a directory, and looks at each name, of which the client may have learned from the
    /// listing.
    fn list_all(&self, client: usize, dir: usize) -> Result<(), String> {
        self.list(client, dir)?;
        (dir * NAMES..(dir + 1) * NAMES).try_for_each(|at| self.look_at(client, at).map(drop))
    }

    fn read_held(&self, number: usize) -> Result<(), String> {
        // No other thread closes it meanwhile.
        let held = self.held.lock().unwrap();
        let Some(file) = held.get(number) else { return Ok(()) };
        let words = format!("held {}", file.id);
        self.ask(file.client, &words, None, |world, look, answer| {
            world.check_held(file.node, look, answer)
        })
    }

    /// Calls a client, on a name or on an open file, and checks the answer. Calls again if the
    /// servers have not notified any client of a change, which the first look after the promised
    /// time discovers.
    fn ask<T>(
        &self,
        client: usize,
        words: &str,
        at: Option<NameNumber>,
        check: impl Fn(&ClientWorld, ClientLook, &OperationAnswer) -> Result<T, String>,
    ) -> Result<T, String> {
        let once = || {
            self.counts.looks.fetch_add(1, Ordering::Relaxed);
            let (answer, look) = self.answer(client, words, at);
            let world = self.lock_after_change();
            let wrong = |error| {
                let error = format!("{} {words}: {error}", self.clients[client].name);
                self.note(format!("WRONG, asked {:?} ago: {error}", look.begun.elapsed()));
                error
            };
            check(&world, look, &answer).map_err(wrong)
        };
        let mut checked = once();
        if checked.is_err() && at.is_some_and(|at| self.lock().is_silent(at)) {
            std::thread::sleep(Duration::from_millis(300));
            checked = once();
        }
        checked
    }

    /// The answer of a client to a look. The kernel refuses a name of a directory with `ESTALE` if
    /// it knows the directory by a name in another one, and another thread renames something on the
    /// same mount (`__d_unalias`): the client repeats its call then.
    fn answer(
        &self,
        client: usize,
        words: &str,
        at: Option<NameNumber>,
    ) -> (OperationAnswer, ClientLook) {
        const TIMES: u32 = 10;
        let once = || {
            let begun = Instant::now();
            let answer = self.clients[client].call(words);
            let promise = self.clients[client].promise(begun);
            (answer, ClientLook { by: client, begun, ended: Instant::now(), promise })
        };
        let mut requested = once();
        for _ in 0..TIMES {
            let (Err(libc::ESTALE), Some(at)) = (&requested.0, at) else { break };
            if !self.clients[client].is_mount() || !self.lock().has_moved(at, requested.1) {
                break;
            }
            self.counts.moved.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            requested = once();
        }
        requested
    }

    /// Removes everything.
    fn remove(&self, random: &mut fastrand::Rng, place: &str) -> Result<(), String> {
        while !self.held.lock().unwrap().is_empty() {
            self.close(random)?;
        }
        let client = random.usize(..self.clients.len());
        for at in names() {
            if self.lock().kind(at).is_some() && !self.make(&WorldChange::Remove { at }, client)? {
                return Err(format!("n{at} is not known before its removal"));
            }
        }
        for dir in [format!("{place}/a"), format!("{place}/b"), place.to_owned()] {
            let removed = self.clients[client].call(&format!("rmdir {dir}"));
            removed.map_err(|errno| format!("rmdir {dir}: errno {errno}"))?;
        }
        Ok(())
    }

    fn note(&self, text: String) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), text));
    }

    /// The error, the changes before it, and the answers of all clients from then on.
    fn explain(&self, error: &str, seed: u64) -> String {
        let mut text = format!("episode {seed}: {error}\n");
        let failed = Instant::now();
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, what) in log.iter() {
            let ms = failed.duration_since(*at).as_millis();
            text += &format!("{ms:>7} ms before: {what}\n");
        }
        for wait in [0, 300, 700, 3000, 6000] {
            std::thread::sleep(Duration::from_millis(wait));
            text += &format!("{} ms after:\n", failed.elapsed().as_millis());
            let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            for client in self.clients {
                let all: Vec<String> = names()
                    .map(|at| match client.call(&format!("stat {}", world.path(at))) {
                        Ok(words) => words.join(" "),
                        Err(errno) => format!("errno {errno}"),
                    })
                    .collect();
                text += &format!("  {:>8}: {}\n", client.name, all.join(", "));
            }
        }
        text + &format!("it took {:?}", self.begun.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, ClientWorld> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model while no change runs, whose inode the model would not know.
    fn lock_after_change(&self) -> MutexGuard<'_, ClientWorld> {
        loop {
            let world = self.lock();
            if !world.running {
                return world;
            }
            drop(world);
            std::thread::sleep(Duration::from_micros(300));
        }
    }
}
