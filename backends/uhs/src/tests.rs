//! Random operations on a simulated device, with power failures at every moment.

use std::collections::BTreeMap;
use std::sync::Arc;

use defuse_block::{Blocking, Device, Ram, Sim};
use defuse_fs::{
    Caller, Context, DirBuf, DirItem, DirSink, Entry, Errno, Fh, File, FileKind, FileSystem, Ino,
    Name, NewNode, OpenFlags, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, SetAttr, SliceSink,
    SliceSource, WriteArgs, WriteBuf,
};

use crate::commit::Rules;
use crate::{Options, Problem, Uhs, check};

const BLOCKS: u64 = 8 * 512;
const OPTIONS: Options =
    Options { read_only: false, commit: None, cache_pages: 16, dirty_pages: 64 };

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(77)
}

fn fresh() -> Ram {
    let ram = Ram::new(4096, BLOCKS);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    ram
}

fn open(device: impl Device + 'static, rules: Rules) -> (Uhs, Vec<Problem>) {
    Uhs::open_by(Arc::new(device), OPTIONS, rules, random()).unwrap()
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn node(kind: FileKind) -> NewNode<'static> {
    NewNode::new(kind, 0o644, cx().caller)
}

/// The byte that files without names are filled with.
const OF_THE_DEAD: u8 = 7;

/// A file as a walk finds it. Times are left out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    ino: u64,
    mode: u32,
    nlink: u32,
    size: u64,
    target: Vec<u8>,
}

/// All paths, and the data of all files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Snapshot {
    names: BTreeMap<String, Seen>,
    data: BTreeMap<u64, Vec<u8>>,
}

#[derive(Default)]
struct Names(Vec<String>);

impl DirSink for Names {
    fn wants_entries(&self) -> bool {
        false
    }
    fn fits(&self, _: usize) -> bool {
        true
    }
    fn add(&mut self, item: DirItem<'_>, _: Option<&Entry>) {
        self.0.push(String::from_utf8_lossy(item.name).into_owned());
    }
}

fn list(fs: &Uhs, dir: Ino) -> Vec<String> {
    let mut names = Names::default();
    let opened = fs.opendir(&cx(), dir, OpenFlags(0)).unwrap();
    let file = File { ino: dir, fh: opened.fh };
    fs.readdir(&cx(), file, 0, &mut DirBuf::new(&mut names)).unwrap();
    fs.releasedir(&cx(), file).unwrap();
    names.0.retain(|name| name != "." && name != "..");
    names.0
}

fn contents(fs: &Uhs, ino: Ino, size: u64) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, size as usize);
    fs.read(&cx(), File { ino, fh: Fh(0) }, ReadArgs::default(), &mut out).unwrap();
    assert_eq!(out.filled() as u64, size);
    bytes
}

fn snapshot(fs: &Uhs) -> Snapshot {
    let mut found = Snapshot::default();
    walk(fs, Ino::ROOT, String::new(), &mut found);
    found
}

fn walk(fs: &Uhs, dir: Ino, path: String, found: &mut Snapshot) {
    for child in list(fs, dir) {
        let entry = fs.lookup(&cx(), dir, name(&child)).unwrap();
        let path = format!("{path}/{child}");
        let attr = entry.attr;
        let target = match attr.kind {
            FileKind::Symlink => fs.readlink(&cx(), entry.ino).unwrap(),
            _ => Vec::new(),
        };
        let (ino, mode, nlink, size) = (entry.ino.0, attr.mode(), attr.nlink, attr.size);
        found.names.insert(path.clone(), Seen { ino, mode, nlink, size, target });
        match attr.kind {
            FileKind::Directory => walk(fs, entry.ino, path, found),
            FileKind::Regular => {
                found.data.insert(ino, contents(fs, entry.ino, size));
            }
            _ => {}
        }
        fs.forget(entry.ino, 1);
    }
}

/// Operations on a few names, by chance.
struct Player<'a> {
    fs: &'a Uhs,
    random: fastrand::Rng,
}

impl Player<'_> {
    /// A directory, and how many lookups it takes to forget it.
    fn dir(&mut self) -> (Ino, u64) {
        let at = ["d", "e", "x"][self.random.usize(..3)];
        match self.fs.lookup(&cx(), Ino::ROOT, name(at)) {
            Ok(entry) if entry.attr.kind == FileKind::Directory => (entry.ino, 1),
            Ok(entry) => {
                self.fs.forget(entry.ino, 1);
                (Ino::ROOT, 0)
            }
            Err(_) => (Ino::ROOT, 0),
        }
    }

    fn name(&mut self) -> Name<'static> {
        name(["a", "b", "c", "d", "e"][self.random.usize(..5)])
    }

    /// One operation. True for a sync that succeeded.
    fn step(&mut self) -> bool {
        let dirs = [self.dir(), self.dir()];
        let synced = self.operation(dirs[0].0, dirs[1].0);
        dirs.iter().for_each(|(ino, lookups)| self.fs.forget(*ino, *lookups));
        synced
    }

    fn operation(&mut self, dir: Ino, other: Ino) -> bool {
        let (from, to) = (self.name(), self.name());
        let cx = cx();
        let entered = |entry: Result<Entry, Errno>| {
            if let Ok(entry) = entry {
                self.fs.forget(entry.ino, 1);
            }
        };
        match self.random.u8(..18) {
            0 | 1 => entered(self.fs.mknod(&cx, dir, from, &node(FileKind::Regular))),
            2 => entered(self.fs.mkdir(&cx, dir, from, &node(FileKind::Directory))),
            3 => entered(self.fs.symlink(&cx, dir, from, b"target", &node(FileKind::Symlink))),
            4 => drop(self.fs.unlink(&cx, dir, from).ok()),
            5 => drop(self.fs.rmdir(&cx, dir, from).ok()),
            6 | 7 => {
                let flags =
                    [0, 0, RenameFlags::NOREPLACE, RenameFlags::EXCHANGE, RenameFlags::WHITEOUT];
                let flags = RenameFlags(flags[self.random.usize(..5)]);
                let _ = self.fs.rename(&cx, (dir, from), (other, to), flags);
            }
            8 => {
                if let Ok(entry) = self.fs.lookup(&cx, dir, from) {
                    entered(self.fs.link(&cx, entry.ino, other, to));
                    self.fs.forget(entry.ino, 1);
                }
            }
            9..=12 => self.write(dir, from),
            13 => self.set(dir, from),
            14 => self.use_while_unlinked(dir, from),
            _ => return self.fs.syncfs(&cx).is_ok(),
        }
        false
    }

    fn with_file(&mut self, dir: Ino, at: Name<'_>, run: impl FnOnce(&mut Self, Ino, u64)) {
        let Ok(entry) = self.fs.lookup(&cx(), dir, at) else { return };
        if entry.attr.kind == FileKind::Regular {
            run(self, entry.ino, entry.attr.size);
        }
        self.fs.forget(entry.ino, 1);
    }

    fn write(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, size| {
            let ends = [0, size.saturating_sub(100), size, size + 5000, 3000];
            let offset = ends[player.random.usize(..5)];
            let lengths = [1, 100, 2500, 4096, 9000, 30_000];
            let longest = lengths[player.random.usize(..6)];
            let len = player.random.usize(1..=longest);
            // No two writes have the same bytes, so that every sector tells which one it is of.
            let mut bytes = vec![0; len];
            player.random.fill(&mut bytes);
            let mut source = SliceSource::new(&bytes);
            let args = WriteArgs { offset, ..WriteArgs::default() };
            let file = File { ino, fh: Fh(0) };
            let _ = player.fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
        });
    }

    fn set(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, size| {
            let sizes = [0, size / 2, size.saturating_sub(1), size + 1, size + 10_000, 4096];
            let set = match player.random.bool() {
                true => SetAttr { perm: Some(player.random.u32(..0o1000)), ..SetAttr::default() },
                false => {
                    let size = Some(sizes[player.random.usize(..6)]);
                    SetAttr { size, ..SetAttr::default() }
                }
            };
            let _ = player.fs.setattr(&cx(), ino, None, &set);
        });
    }

    fn use_while_unlinked(&mut self, dir: Ino, at: Name<'_>) {
        self.with_file(dir, at, |player, ino, _| {
            let file = File { ino, fh: Fh(0) };
            player.fs.open(&cx(), ino, Default::default()).unwrap();
            let _ = player.fs.unlink(&cx(), dir, at);
            let mut source = SliceSource::new(&[OF_THE_DEAD; 18 * 512]);
            let mut data = WriteBuf::new(&mut source);
            let _ = player.fs.write(&cx(), file, WriteArgs::default(), &mut data);
            if player.random.bool() {
                let _ = player.fs.syncfs(&cx());
            }
            player.fs.release(&cx(), file, ReleaseArgs::default()).unwrap();
        });
    }
}

/// A run with everything that is needed to judge what a power failure left.
struct Run {
    sim: Sim,
    /// The state before the first operation and after each, with the events until then.
    states: Vec<Snapshot>,
    /// For each acknowledgement the events before it, and the state that is durable.
    acknowledged: Vec<(usize, usize)>,
}

impl Run {
    fn new(ram: &Ram, seed: u64, rules: Rules, lies: bool) -> Run {
        let sim = Sim::from_ram(ram, seed);
        let (fs, problems) = open(sim.clone(), rules);
        assert_eq!(problems, []);
        if lies {
            sim.lie_about_flushes();
        }
        let mut run = Run { sim, states: vec![snapshot(&fs)], acknowledged: vec![(0, 0)] };
        let mut player = Player { fs: &fs, random: fastrand::Rng::with_seed(seed) };
        for _ in 0..player.random.usize(10..60) {
            let synced = player.step();
            run.states.push(snapshot(&fs));
            if synced {
                run.acknowledged.push((run.sim.events(), run.states.len() - 1));
            }
        }
        // The fall of the last one is no clean end.
        std::mem::forget(fs);
        run
    }

    /// Judges a state of the device. `durable` is the newest state that was acknowledged.
    fn judge(&self, durable: usize, ram: &Ram, rules: Rules) -> Result<(), String> {
        let report =
            check(&(Arc::new(ram.clone()) as Arc<dyn Device>)).map_err(|e| e.to_string())?;
        if !report.problems.is_empty() {
            return Err(format!("the check found {:?}", report.problems));
        }
        let (fs, problems) = Uhs::open_by(Arc::new(ram.clone()), OPTIONS, rules, random())
            .map_err(|e| e.to_string())?;
        if !problems.is_empty() {
            return Err(format!("the mount found {problems:?}"));
        }
        let found = snapshot(&fs);
        let Some(at) =
            (durable..self.states.len()).find(|at| self.states[*at].names == found.names)
        else {
            return Err(format!(
                "names of no state from {durable} on: {:#?}\ninstead of {:#?}",
                found.names, self.states[durable].names
            ));
        };
        // Data reaches the device before the names and sizes of its moment, and later writes may follow.
        let later = &self.states[at..];
        for (ino, bytes) in &found.data {
            for (sector, content) in bytes.chunks(512).enumerate() {
                let same = |state: &Snapshot| {
                    let data = state.data.get(ino).and_then(|data| data.get(sector * 512..));
                    let Some(old) = data.filter(|old| !old.is_empty()) else { return false };
                    // The file may have been shorter then, and longer since.
                    let (kept, zeros) = content.split_at(old.len().min(content.len()));
                    old.starts_with(kept) && zeros.iter().all(|byte| *byte == 0)
                };
                // Whoever had removed the file may have written to it after that.
                let removed = later.iter().any(|state| !state.data.contains_key(ino));
                let of_the_dead = removed && content.iter().all(|byte| *byte == OF_THE_DEAD);
                if !later.iter().any(same) && !of_the_dead {
                    return Err(format!("state {at}: inode {ino}, sector {sector} is of no state"));
                }
            }
        }
        // Nothing is lost: the space of a remount is that of this mount.
        drop(fs);
        let again =
            check(&(Arc::new(ram.clone()) as Arc<dyn Device>)).map_err(|e| e.to_string())?;
        match (again.problems.is_empty(), again.free_blocks == report.free_blocks) {
            (true, true) => Ok(()),
            _ => Err(format!("after the mount: {again:?} instead of {report:?}")),
        }
    }

    /// Judges states of all moments, about `wanted` of them.
    fn judge_all(&self, wanted: usize, seed: u64, rules: Rules) -> Result<usize, String> {
        let mut random = fastrand::Rng::with_seed(seed);
        let share = wanted as f64 / (self.sim.events() + 1) as f64;
        let mut judged = 0;
        let mut cuts = self.sim.cuts();
        while let Some(cut) = cuts.next() {
            let before = self.acknowledged.iter().filter(|(events, _)| *events <= cut.at());
            let durable = before.map(|(_, state)| *state).max().unwrap_or(0);
            let mut wish = share;
            while random.f64() < wish {
                wish -= 1.0;
                let ram = match cut.is_small() && random.u8(..4) == 0 {
                    true => random
                        .choice(cut.every().collect::<Vec<_>>())
                        .unwrap_or_else(|| self.sim.now()),
                    false => cut.sample(&mut random),
                };
                self.judge(durable, &ram, rules)
                    .map_err(|why| format!("event {}: {why}", cut.at()))?;
                judged += 1;
            }
        }
        Ok(judged)
    }
}

fn play(seed: u64, rules: Rules, lies: bool) -> Result<usize, String> {
    let ram = fresh();
    Run::new(&ram, seed, rules, lies).judge_all(30, seed, rules)
}

#[test]
fn after_a_power_failure_names_are_those_of_one_moment_and_data_is_what_was_written() {
    let mut judged = 0;
    for seed in 0..300 {
        judged += play(seed, Rules::ALL, false).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 5000, "{judged} states");
    println!("{judged} states");
}

#[test]
fn each_sentence_about_data_is_needed() {
    let without: [(&str, Rules); 3] = [
        ("data is first", Rules { data_is_first: false, ..Rules::ALL }),
        ("blocks wait for the group", Rules { blocks_wait_for_group: false, ..Rules::ALL }),
        ("tails move", Rules { tails_move: false, ..Rules::ALL }),
    ];
    for (name, rules) in without {
        let found = (0..400).find(|seed| play(*seed, rules, false).is_err());
        assert!(found.is_some(), "nothing fails without: {name}");
        println!("without \"{name}\", seed {} fails", found.unwrap_or(0));
    }
}

#[test]
fn the_suite_notices_a_device_that_lies_about_flushes() {
    assert!((0..50).any(|seed| play(seed, Rules::ALL, true).is_err()));
}

/// Mounting zeroed slots and wrote a superblock before it had looked at the inodes.
#[test]
fn a_mount_that_is_read_only_or_finds_damage_writes_nothing() {
    let sim = Sim::from_ram(&fresh(), 1);
    let (fs, _) = open(sim.clone(), Rules::ALL);
    for text in ["a", "b", "c", "d"] {
        fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    fs.mknod(&cx(), Ino::ROOT, name("e"), &node(FileKind::Regular)).unwrap();
    fs.mknod(&cx(), Ino::ROOT, name("f"), &node(FileKind::Regular)).unwrap();
    fs.syncfs(&cx()).unwrap();
    let mut cuts = sim.cuts();
    let mut random = random();
    let mut unfinished = 0;
    while let Some(cut) = cuts.next() {
        let left = Sim::from_ram(&cut.sample(&mut random), 2);
        let device: Arc<dyn Device> = Arc::new(left.clone());
        unfinished += check(&device).unwrap().unfinished;
        let options = Options { read_only: true, ..OPTIONS };
        let (fs, problems) = Uhs::open(device, options, super::tests::random()).unwrap();
        assert_eq!(problems, []);
        let made = fs.mknod(&cx(), Ino::ROOT, name("g"), &node(FileKind::Regular));
        assert_eq!(made.map(drop), Err(Errno::EROFS));
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        drop(fs);
        assert_eq!(left.events(), 0, "event {}", cut.at());
    }
    assert!(unfinished > 0, "nothing was there to undo");
    // A byte of a slot that counts changes at rest.
    drop(fs);
    let damaged = Sim::from_ram(&sim.now(), 2);
    let mut line = Blocking::new(&damaged).unwrap();
    let mut bytes = [0; 4096];
    line.read(514, &mut bytes).unwrap();
    bytes[200] ^= 1;
    line.write(514, &bytes).unwrap();
    let before = damaged.events();
    let (fs, problems) = open(damaged.clone(), Rules::ALL);
    assert!(!problems.is_empty());
    drop(fs);
    assert_eq!(damaged.events(), before);
}
