//! The tree of a file set: the directory and size of each file.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rand_distr::{Distribution, Gamma};

use super::pool::EntryPool;
use crate::plan::FilesetPlan;
use crate::random::{RandomAmount, RandomGenerator, generator};

/// Maximum depth of a tree for any distribution, because paths are limited.
const MAX_DEPTH: u32 = 200;

struct FilesetDirectory {
    parent: u32,
    serial: u32,
}

struct FilesetFile {
    directory: u32,
    serial: u32,
    size: u64,
}

/// A file set, and the state of its files.
pub(crate) struct RunFileset {
    pub plan: FilesetPlan,
    /// The root of the tree.
    pub root: PathBuf,
    directories: Vec<FilesetDirectory>,
    files: Vec<FilesetFile>,
    leafdirs: Vec<FilesetDirectory>,
    /// The files that may exist.
    pub pool: EntryPool,
    /// The empty directories that may exist.
    pub leaf_pool: EntryPool,
    next_directory: AtomicU32,
}

impl RunFileset {
    /// Creates the tree that `plan` describes. `number` distinguishes the sets of one run.
    pub fn new(plan: &FilesetPlan, seed: u64, number: usize) -> Self {
        let mut builder = FilesetBuilder::new(plan, generator(seed, (1 << 32) + number as u64));
        builder.populate(None, 1, 0);
        let FilesetBuilder { directories, files, leafdirs, .. } = builder;
        let entries = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        RunFileset {
            root: plan.path.join(&plan.name),
            plan: plan.clone(),
            pool: EntryPool::new(entries(files.len())),
            leaf_pool: EntryPool::new(entries(leafdirs.len())),
            next_directory: AtomicU32::new(0),
            directories,
            files,
            leafdirs,
        }
    }

    pub fn files(&self) -> u32 {
        self.files.len() as u32
    }

    pub fn leafdirs(&self) -> u32 {
        self.leafdirs.len() as u32
    }

    pub fn directories(&self) -> u32 {
        self.directories.len() as u32
    }

    /// The next directory in rotation.
    pub fn next_directory(&self) -> u32 {
        self.next_directory.fetch_add(1, Relaxed) % self.directories()
    }

    /// The planned size of a file, in bytes.
    pub fn size(&self, file: u32) -> u64 {
        self.files[file as usize].size
    }

    pub fn file_path(&self, file: u32) -> PathBuf {
        let file = &self.files[file as usize];
        self.path(file.directory, Some(file.serial))
    }

    pub fn leafdir_path(&self, leafdir: u32) -> PathBuf {
        let leafdir = &self.leafdirs[leafdir as usize];
        self.path(leafdir.parent, Some(leafdir.serial))
    }

    pub fn directory_path(&self, directory: u32) -> PathBuf {
        self.path(directory, None)
    }

    fn path(&self, mut directory: u32, last: Option<u32>) -> PathBuf {
        let mut serials = Vec::with_capacity(8);
        serials.extend(last);
        // The root has the number 0, and its name is the name of the set.
        while directory != 0 {
            let FilesetDirectory { parent, serial } = self.directories[directory as usize];
            serials.push(serial);
            directory = parent;
        }
        let mut names = String::with_capacity(serials.len() * 9);
        for serial in serials.iter().rev() {
            // Writing to a string cannot fail.
            let _ = write!(names, "/{serial:08}");
        }
        let mut path = self.root.clone().into_os_string();
        path.push(names);
        path.into()
    }
}

struct FilesetBuilder<'a> {
    plan: &'a FilesetPlan,
    random: RandomGenerator,
    mean_depth: f64,
    directories: Vec<FilesetDirectory>,
    files: Vec<FilesetFile>,
    leafdirs: Vec<FilesetDirectory>,
}

impl<'a> FilesetBuilder<'a> {
    fn new(plan: &'a FilesetPlan, random: RandomGenerator) -> Self {
        let entries = (plan.entries + plan.leafdirs) as f64;
        // A width of 0 or 1 gives no depth; then every file has its own directory.
        let depth = entries.ln() / plan.dirwidth.mean().floor().ln();
        let mean_depth = if depth.is_finite() && depth > 0.0 { depth } else { 1.0 };
        FilesetBuilder {
            plan,
            random,
            mean_depth,
            directories: Vec::new(),
            files: Vec::new(),
            leafdirs: Vec::new(),
        }
    }

    /// `mean`, or a value of the gamma distribution with that mean if widths and depths vary.
    fn spread(&mut self, mean: f64, gamma: f64) -> f64 {
        match Gamma::new(gamma, mean / gamma) {
            Ok(distribution) if gamma > 0.0 => distribution.sample(&mut self.random),
            _ => mean,
        }
    }

    fn depth_here(&mut self) -> f64 {
        let depth = match &self.plan.dirdepth {
            Some(depth) => depth.get(&mut self.random) as f64,
            None => self.spread(self.mean_depth, self.plan.dirgamma).floor(),
        };
        depth.max(1.0)
    }

    fn width_here(&mut self) -> f64 {
        let width = match &self.plan.dirwidth {
            RandomAmount::Fixed(width) => self.spread(*width as f64, self.plan.dirgamma),
            RandomAmount::Random(variable) => variable.sample(&mut self.random),
        };
        // A directory has at least one file.
        if width > 0.0 { width.ceil() } else { 1.0 }
    }

    fn size_here(&mut self) -> u64 {
        match &self.plan.size {
            RandomAmount::Fixed(size) => self.spread(*size as f64, self.plan.size_gamma) as u64,
            random => random.get(&mut self.random),
        }
    }

    /// Adds a directory and its subtree. The root continues until all entries are placed.
    fn populate(&mut self, parent: Option<u32>, serial: u32, depth: u32) {
        let depth = depth + 1;
        let here = self.directories.len() as u32;
        self.directories.push(FilesetDirectory { parent: parent.unwrap_or(0), serial });
        let (deepest, width) = (self.depth_here(), self.width_here());
        let is_leaf = parent.is_some() && (f64::from(depth) >= deepest || depth >= MAX_DEPTH);
        let room = |serial: u32| parent.is_none() || f64::from(serial) <= width;
        let mut serial = 1;
        while room(serial) && (self.files.len() as u64) < self.plan.entries {
            if is_leaf {
                let size = self.size_here();
                self.files.push(FilesetFile { directory: here, serial, size });
            } else {
                self.populate(Some(here), serial, depth);
            }
            serial += 1;
        }
        // Filebench restarts the count here, which can give a file and a directory the same name.
        let first = serial;
        while room(serial + 1 - first) && (self.leafdirs.len() as u64) < self.plan.leafdirs {
            if is_leaf {
                self.leafdirs.push(FilesetDirectory { parent: here, serial });
            } else {
                self.populate(Some(here), serial, depth);
            }
            serial += 1;
        }
    }
}
