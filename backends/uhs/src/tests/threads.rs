//! Many threads at once, each on names of its own, in a directory of its own and in a directory
//! that all share. The power fails at any moment. After that, the names of each thread are the
//! names after one of its operations.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use defuse_block::{BlockDevice, SimDevice};
use defuse_fs::{
    Errno, Fh, File, FileKind, FileSystem, Ino, RenameFlags, SliceSource, WriteArgs, WriteBuf,
};

use super::queues::make_shared_options;
use super::{OPTIONS, cx, device, list, make_fresh, name, node, open, open_with};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

const THREADS: usize = 4;
const OPERATIONS: usize = 120;

/// Groups are small, so that threads fill them.
const RULES: CommitRules = CommitRules { full_group: 6, early_run: 1, ..CommitRules::ALL };

/// A name of a thread: one of a few, in its own directory or in the shared one.
type ThreadName = (bool, u8);

/// The names of a thread, with inode and size.
type ThreadNames = BTreeMap<ThreadName, (u64, u64)>;

struct ThreadWorkload<'a> {
    fs: &'a Uhs,
    thread: usize,
    own: Ino,
    shared: Ino,
    random: fastrand::Rng,
    state: ThreadNames,
}

/// The states of a thread, and for each sync the events before its end and the state that it made
/// durable.
struct ThreadHistory {
    states: Vec<ThreadNames>,
    synced: Vec<(usize, usize)>,
}

fn text_of(thread: usize, (shared, number): ThreadName) -> String {
    if shared { format!("{thread}-{number}") } else { number.to_string() }
}

impl ThreadWorkload<'_> {
    fn place(&self, at: ThreadName) -> (Ino, String) {
        (if at.0 { self.shared } else { self.own }, text_of(self.thread, at))
    }

    fn choose_name(&mut self) -> ThreadName {
        (self.random.bool(), self.random.u8(..5))
    }

    fn step(&mut self) {
        let (from, to) = (self.choose_name(), self.choose_name());
        let ((dir, text), (other, new)) = (self.place(from), self.place(to));
        let (text, new, cx) = (name(&text), name(&new), cx());
        let (here, there) = (self.state.get(&from).copied(), self.state.get(&to).copied());
        match self.random.u8(..10) {
            0..=2 => {
                let made = self.fs.mknod(&cx, dir, text, &node(FileKind::Regular));
                assert_eq!(made.as_ref().err(), here.map(|_| Errno::EEXIST).as_ref());
                if let Ok(entry) = made {
                    self.state.insert(from, (entry.ino.0, 0));
                    self.fs.forget(entry.ino, 1);
                }
            }
            3 => {
                let gone = self.fs.unlink(&cx, dir, text);
                assert_eq!(gone.is_ok(), self.state.remove(&from).is_some());
            }
            4..=6 => {
                let moved = self.fs.rename(&cx, (dir, text), (other, new), RenameFlags(0));
                assert_eq!(moved.is_ok(), here.is_some());
                let same = here.map(|file| file.0) == there.map(|file| file.0);
                if let Some(file) = here.filter(|_| !same) {
                    self.state.remove(&from);
                    self.state.insert(to, file);
                }
            }
            7 => {
                let flags = RenameFlags(RenameFlags::EXCHANGE);
                let moved = self.fs.rename(&cx, (dir, text), (other, new), flags);
                assert_eq!(moved.is_ok(), here.is_some() && there.is_some());
                if let (Some(here), Some(there)) = (here, there) {
                    self.state.insert(from, there);
                    self.state.insert(to, here);
                }
            }
            8 => {
                let Some((ino, _)) = here else { return };
                let made = self.fs.link(&cx, Ino(ino), other, new);
                assert_eq!(made.as_ref().err(), there.map(|_| Errno::EEXIST).as_ref());
                if let Ok(entry) = made {
                    self.fs.forget(entry.ino, 1);
                    self.state.insert(to, self.state[&from]);
                }
            }
            _ => self.write(here),
        }
    }

    /// Appends to a file, small or with pages.
    fn write(&mut self, file: Option<(u64, u64)>) {
        let Some((ino, size)) = file else { return };
        let bytes = vec![self.thread as u8; [10, 5000][self.random.usize(..2)]];
        let mut source = SliceSource::new(&bytes);
        let args = WriteArgs { offset: size, ..WriteArgs::default() };
        let file = File { ino: Ino(ino), fh: Fh(0) };
        let taken = self.fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
        assert_eq!(taken, Ok(bytes.len()));
        let grown = size + bytes.len() as u64;
        self.state.values_mut().filter(|file| file.0 == ino).for_each(|file| file.1 = grown);
    }

    fn play(mut self, sim: &SimDevice) -> ThreadHistory {
        let mut played = ThreadHistory { states: vec![ThreadNames::new()], synced: Vec::new() };
        for _ in 0..OPERATIONS {
            self.step();
            played.states.push(self.state.clone());
            if self.random.u8(..16) == 0 {
                assert_eq!(self.fs.syncfs(&cx()), Ok(()));
                played.synced.push((sim.events(), played.states.len() - 1));
            }
        }
        played
    }
}

/// The names of each thread that a mounted file system has.
fn list_names(fs: &Uhs) -> Vec<ThreadNames> {
    let look_up = |dir: Ino, text: &str| {
        let entry = fs.lookup(&cx(), dir, name(text)).unwrap();
        fs.forget(entry.ino, 1);
        entry
    };
    let shared = look_up(Ino::ROOT, "shared").ino;
    let of = |thread: usize| {
        let own = look_up(Ino::ROOT, &format!("own{thread}")).ino;
        let mut state = ThreadNames::new();
        for (dir, is_shared) in [(own, false), (shared, true)] {
            for text in list(fs, dir) {
                let parts = text.rsplit_once('-').unwrap_or((&text, &text));
                if is_shared && parts.0 != thread.to_string() {
                    continue;
                }
                let entry = look_up(dir, &text);
                let at = (is_shared, parts.1.parse().unwrap());
                state.insert(at, (entry.ino.0, entry.attr.size));
            }
        }
        state
    };
    (0..THREADS).map(of).collect()
}

/// Performs random operations on threads, and judges states in which the power may fail.
fn run(seed: u64, rules: CommitRules) -> Result<usize, String> {
    run_with(OPTIONS, seed, rules)
}

fn run_with(options: UhsOptions, seed: u64, rules: CommitRules) -> Result<usize, String> {
    let ram = make_fresh();
    let sim = device(&ram, seed);
    let (fs, _) = open_with(sim.clone(), options, rules);
    let dir = |text: &str| fs.mkdir(&cx(), Ino::ROOT, name(text), &node(FileKind::Directory));
    let shared = dir("shared").unwrap().ino;
    let own: Vec<Ino> =
        (0..THREADS).map(|thread| dir(&format!("own{thread}")).unwrap().ino).collect();
    fs.syncfs(&cx()).unwrap();
    let begin = sim.events();
    let played: Vec<ThreadHistory> = thread::scope(|scope| {
        let start = |(thread, own): (usize, Ino)| {
            let (fs, sim, random) =
                (&fs, &sim, fastrand::Rng::with_seed(seed * 10 + thread as u64));
            let player =
                ThreadWorkload { fs, thread, own, shared, random, state: ThreadNames::new() };
            scope.spawn(move || player.play(sim))
        };
        let threads: Vec<_> = own.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let now: Vec<ThreadNames> =
        played.iter().map(|played| played.states[OPERATIONS].clone()).collect();
    assert_eq!(list_names(&fs), now);
    fs.abandon();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut judged = 0;
    let mut cuts = sim.power_cuts();
    while let Some(cut) = cuts.next() {
        if cut.event_index() < begin || random.usize(..sim.events() - begin + 1) >= 60 {
            continue;
        }
        let failed = Arc::new(cut.sample(&mut random));
        let report = check(&(Arc::clone(&failed) as Arc<dyn BlockDevice>)).unwrap();
        let (fs, problems) = open((*failed).clone(), rules);
        if !report.problems.is_empty() || !problems.is_empty() {
            return Err(format!("seed {seed}, event {}: {:?}", cut.event_index(), report.problems));
        }
        for (thread, (found, played)) in list_names(&fs).iter().zip(&played).enumerate() {
            let durable = played.synced.iter().filter(|(events, _)| *events <= cut.event_index());
            let durable = durable.map(|(_, state)| *state).max().unwrap_or(0);
            if !played.states[durable..].contains(found) {
                let place = format!("seed {seed}, event {}, thread {thread}", cut.event_index());
                return Err(format!("{place}: {found:?} is no state from {durable} on"));
            }
        }
        judged += 1;
    }
    Ok(judged)
}

#[test]
fn after_a_power_failure_the_names_of_each_thread_are_those_after_one_of_its_operations() {
    let judged: usize =
        (0..40).map(|seed| run(seed, RULES).unwrap_or_else(|why| panic!("{why}"))).sum();
    assert!(judged > 1000, "{judged} states");
}

#[test]
fn the_names_of_each_thread_survive_when_threads_share_queues() {
    let run = |seed| {
        run_with(make_shared_options(seed), seed, RULES).unwrap_or_else(|why| panic!("{why}"))
    };
    let judged: usize = (0..36).map(run).sum();
    assert!(judged > 900, "{judged} states");
}

#[test]
fn the_suite_of_threads_notices_groups_that_are_not_counted() {
    let rules = CommitRules { groups_are_counted: false, ..RULES };
    assert!((0..40).any(|seed| run(seed, rules).is_err()));
}

#[test]
fn a_name_that_is_replaced_never_misses() {
    let (fs, _) = open(make_fresh(), RULES);
    let make = |text: &str| {
        let made = fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
        fs.forget(made.ino, 1);
    };
    make("kept");
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for _ in 0..3000 {
                make("new");
                let (from, to) = ((Ino::ROOT, name("new")), (Ino::ROOT, name("kept")));
                fs.rename(&cx(), from, to, RenameFlags(0)).unwrap();
            }
        });
        let mut seen = 0;
        while !writer.is_finished() {
            let entry = fs.lookup(&cx(), Ino::ROOT, name("kept")).unwrap();
            fs.forget(entry.ino, 1);
            seen += 1;
        }
        assert!(seen > 100, "{seen} lookups");
    });
}

#[test]
fn directories_that_threads_move_into_each_other_stay_a_tree() {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), RULES);
    let dir = |parent: Ino, text: &str| {
        fs.mkdir(&cx(), parent, name(text), &node(FileKind::Directory)).unwrap().ino
    };
    let (x, y) = (dir(Ino::ROOT, "x"), dir(Ino::ROOT, "y"));
    let (a, b) = (dir(x, "a"), dir(y, "b"));
    let play = |(moving, home, other): (&str, Ino, Ino)| {
        let mut moved = 0;
        for at in 0..20_000 {
            let (from, to) = if at % 2 == 0 { (home, other) } else { (other, home) };
            let (from, to) = ((from, name(moving)), (to, name(moving)));
            moved += usize::from(fs.rename(&cx(), from, to, RenameFlags(0)).is_ok());
        }
        moved
    };
    let moved: usize = thread::scope(|scope| {
        let play = &play;
        let threads = [("a", x, b), ("b", y, a)].map(|way| scope.spawn(move || play(way)));
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(moved > 100, "{moved} renames");
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    let report = check(&(Arc::new(ram) as Arc<dyn BlockDevice>)).unwrap();
    assert_eq!((report.problems, report.inodes), (Vec::new(), 5));
}
