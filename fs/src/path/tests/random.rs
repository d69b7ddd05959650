//! Random operations: one thread against a model, and many threads against each other.

use std::collections::{BTreeMap, HashMap};

use super::*;

/// Knuth's MMIX generator: sufficient to choose operations, and deterministic on every machine.
struct MmixRandom(u64);

impl MmixRandom {
    fn choose_below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// The object at a path, with the number of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathObject {
    Dir,
    File(usize),
}

/// A model of a file system, without inodes, lookups, or efficient renames of directories.
#[derive(Default)]
struct PathModel {
    things: BTreeMap<String, PathObject>,
    contents: Vec<Vec<u8>>,
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

impl PathModel {
    fn choose_below(&self, path: &str) -> Vec<String> {
        let start = format!("{path}/");
        self.things.keys().filter(|other| other.starts_with(&start)).cloned().collect()
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        let thing = *self.things.get(from).ok_or(Errno::ENOENT)?;
        if from == to {
            return Ok(());
        }
        if to.starts_with(&format!("{from}/")) {
            return Err(Errno::EINVAL);
        }
        if from.starts_with(&format!("{to}/")) {
            return Err(Errno::ENOTEMPTY);
        }
        match (thing, self.things.get(to)) {
            (PathObject::Dir, Some(PathObject::File(_))) => return Err(Errno::ENOTDIR),
            (PathObject::File(_), Some(PathObject::Dir)) => return Err(Errno::EISDIR),
            (PathObject::Dir, Some(PathObject::Dir)) if !self.choose_below(to).is_empty() => {
                return Err(Errno::ENOTEMPTY);
            }
            (one, Some(other)) if thing != PathObject::Dir && one == *other => return Ok(()),
            _ => {}
        }
        for old in self.choose_below(from).into_iter().chain([from.to_string()]) {
            let thing = self.things.remove(&old).unwrap();
            self.things.insert(format!("{to}{}", &old[from.len()..]), thing);
        }
        Ok(())
    }
}

struct PathModelRun {
    mount: AdapterMount,
    model: PathModel,
    random: MmixRandom,
    open: Vec<(File, usize)>,
    lookups: HashMap<Ino, u64>,
    /// True if the names of one file are one inode to the adapter.
    stable: bool,
}

impl PathModelRun {
    fn learn(&mut self, ino: Ino) -> Ino {
        *self.lookups.entry(ino).or_default() += 1;
        ino
    }

    /// An existing directory, with its inode, and a name to use in it.
    fn place(&mut self) -> (String, Ino, &'static str) {
        let (mut path, mut ino) = (String::new(), Ino::ROOT);
        while self.random.choose_below(3) > 0 {
            let name = NAMES[self.random.choose_below(NAMES.len())];
            let next = format!("{path}/{name}");
            if self.model.things.get(&next) != Some(&PathObject::Dir) {
                break;
            }
            let found = self.mount.look_up(ino, name).unwrap();
            ino = self.learn(found);
            path = next;
        }
        let name = NAMES[self.random.choose_below(NAMES.len())];
        (format!("{path}/{name}"), ino, name)
    }

    fn step(&mut self) {
        let (path, dir, at) = self.place();
        let there = self.model.things.get(&path).copied();
        match self.random.choose_below(10) {
            0 | 1 => self.create(&path, dir, at, there),
            2 => {
                let made = self.mount.0.mkdir(&cx(), dir, name(at), &regular());
                let expected = there.map_or(Ok(()), |_| Err(Errno::EEXIST));
                assert_eq!(made.map(|entry| self.learn(entry.ino)).map(|_| ()), expected);
                self.model.things.entry(path).or_insert(PathObject::Dir);
            }
            3 => {
                let expected = match there {
                    None => Err(Errno::ENOENT),
                    Some(PathObject::Dir) => Err(Errno::EISDIR),
                    Some(PathObject::File(_)) => Ok(()),
                };
                assert_eq!(self.mount.unlink(dir, at), expected);
                self.model.things.retain(|other, _| *other != path || expected.is_err());
            }
            4 => {
                let expected = match there {
                    None => Err(Errno::ENOENT),
                    Some(PathObject::File(_)) => Err(Errno::ENOTDIR),
                    // Hidden files keep the directory from being empty, as in other such libraries.
                    Some(PathObject::Dir) => self.mount.0.rmdir(&cx(), dir, name(at)),
                };
                if there != Some(PathObject::Dir) {
                    assert_eq!(self.mount.0.rmdir(&cx(), dir, name(at)), expected);
                } else if expected.is_ok() {
                    assert!(self.model.choose_below(&path).is_empty());
                    self.model.things.remove(&path);
                }
            }
            5 | 6 => self.rename(&path, dir, at),
            7 => self.link(&path, dir, at, there),
            8 => self.open(dir, at, there),
            _ => self.release(),
        }
    }

    fn create(&mut self, path: &str, dir: Ino, at: &str, there: Option<PathObject>) {
        let flags = OpenFlags(WRITE.flags.0 | OpenFlags::EXCL);
        let args = OpenArgs { flags, ..WRITE };
        match self.mount.0.create(&cx(), dir, name(at), &regular(), args) {
            Ok((entry, opened)) => {
                assert_eq!(there, None);
                let (number, ino) = (self.model.contents.len(), self.learn(entry.ino));
                let text = format!("file {number}").into_bytes();
                let file = File { ino, fh: opened.fh };
                self.mount.write(file, &text).unwrap();
                self.open.push((file, number));
                self.model.contents.push(text);
                self.model.things.insert(path.into(), PathObject::File(number));
            }
            Err(errno) => assert_eq!((there.is_some(), errno), (true, Errno::EEXIST)),
        }
    }

    fn rename(&mut self, path: &str, dir: Ino, at: &str) {
        let (to, to_dir, to_at) = self.place();
        let files = [path, &to].map(|path| self.model.things.get(path).copied());
        let same_file = matches!(files, [Some(PathObject::File(one)), Some(PathObject::File(other))]
            if one == other && path != to);
        // Without stable numbers, two names of a file look like two files.
        if same_file && !self.stable {
            return;
        }
        let result = self.mount.rename((dir, at), (to_dir, to_at), 0);
        let hidden = self.mount.names().iter().any(|name| name.contains(".defuse_hidden"));
        let mut trial = PathModel { things: self.model.things.clone(), contents: Vec::new() };
        let expected = trial.rename(path, &to);
        if hidden && expected.is_ok() && result == Err(Errno::ENOTEMPTY) {
            return;
        }
        assert_eq!(result, expected, "{path} to {to}");
        self.model.things = trial.things;
    }

    fn link(&mut self, path: &str, dir: Ino, at: &str, there: Option<PathObject>) {
        let files = self.model.things.iter().filter(|(_, thing)| **thing != PathObject::Dir);
        let files: Vec<_> = files.map(|(path, thing)| (path.clone(), *thing)).collect();
        if files.is_empty() {
            return;
        }
        let (from, thing) = files[self.random.choose_below(files.len())].clone();
        let mut ino = Ino::ROOT;
        for part in from.split('/').skip(1) {
            let found = self.mount.look_up(ino, part).unwrap();
            ino = self.learn(found);
        }
        let linked = self.mount.0.link(&cx(), ino, dir, name(at)).map(|entry| entry.ino);
        match linked {
            Ok(linked) => {
                assert_eq!((there, linked == ino), (None, self.stable));
                self.learn(linked);
                self.model.things.insert(path.into(), thing);
            }
            Err(errno) => assert_eq!((there.is_some(), errno), (true, Errno::EEXIST)),
        }
    }

    fn open(&mut self, dir: Ino, at: &str, there: Option<PathObject>) {
        let found = self.mount.look_up(dir, at);
        assert_eq!(found.is_ok(), there.is_some());
        let Ok(found) = found else { return };
        let ino = self.learn(found);
        if let Some(PathObject::File(number)) = there {
            self.open.push((self.mount.open(ino).unwrap(), number));
        }
    }

    fn release(&mut self) {
        if !self.open.is_empty() {
            let chosen = self.random.choose_below(self.open.len());
            self.mount.release(self.open.swap_remove(chosen).0);
        }
        // From time to time, forgets all inodes that are not open.
        if self.random.choose_below(4) == 0 {
            let open: Vec<_> = self.open.iter().map(|(file, _)| file.ino).collect();
            for (ino, lookups) in std::mem::take(&mut self.lookups) {
                if open.contains(&ino) {
                    self.lookups.insert(ino, lookups);
                } else if ino != Ino::ROOT {
                    self.mount.0.forget(ino, lookups);
                }
            }
        }
    }

    fn check(&self) {
        for &(file, number) in &self.open {
            assert_eq!(self.mount.read(file).unwrap(), self.model.contents[number]);
        }
        let mut names = self.mount.names();
        names.retain(|name| name != "/" && !name.contains(".defuse_hidden"));
        assert_eq!(names, self.model.things.keys().cloned().collect::<Vec<_>>());
    }

    fn end(mut self) {
        while let Some((file, _)) = self.open.pop() {
            self.mount.release(file);
        }
        let hidden = self.mount.names().into_iter().find(|name| name.contains(".defuse_hidden"));
        assert_eq!(hidden, None);
        for (ino, lookups) in self.lookups {
            if ino != Ino::ROOT {
                self.mount.0.forget(ino, lookups);
            }
        }
        assert_eq!(self.mount.nodes(), 1, "nothing is known after everything was forgotten");
        assert!(self.mount.0.inner().state().open.is_empty());
    }
}

#[test]
fn random_operations_agree_with_a_model() {
    for seed in 0..40 {
        run_on_each(|mount, stable, survive| {
            println!("seed {seed}, stable {stable}, survive {survive}");
            let mut run = PathModelRun {
                mount,
                model: PathModel::default(),
                random: MmixRandom(seed),
                open: Vec::new(),
                lookups: HashMap::new(),
                stable,
            };
            for _ in 0..400 {
                run.step();
                run.check();
            }
            run.end();
        });
    }
}

/// Each thread keeps a file and reads it by inode, while all threads rename its parent directories.
/// A path built before a rename and used after it would lead to another file with another text.
#[test]
fn an_inode_never_leads_to_another_file_while_directories_move() {
    run_on_each(|mount, _, _| {
        let dirs = ["x", "y"].map(|at| mount.mkdir(Ino::ROOT, at));
        let files = [0, 1].map(|at| {
            let file = mount.create(dirs[at], "file", format!("file {at}").as_bytes());
            mount.release(file);
            file.ino
        });
        let mount = &mount;
        std::thread::scope(|scope| {
            for (at, &ino) in files.iter().enumerate() {
                scope.spawn(move || {
                    for _ in 0..500 {
                        let open = mount.open(ino).unwrap();
                        assert_eq!(mount.read(open).unwrap(), format!("file {at}").as_bytes());
                        mount.release(open);
                        assert_eq!(mount.0.getattr(&cx(), ino, None).unwrap().size, 6);
                    }
                });
            }
            for flags in [0, RenameFlags::EXCHANGE] {
                scope.spawn(move || {
                    for round in 0..500 {
                        let (from, to) =
                            [("x", "y"), ("y", "x"), ("x", "z"), ("z", "x")][round % 4];
                        // The other thread may have moved the directory already.
                        let _ = mount.rename((Ino::ROOT, from), (Ino::ROOT, to), flags);
                    }
                });
            }
        });
        assert_eq!(mount.nodes(), 5);
    });
}
