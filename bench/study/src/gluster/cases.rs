//! The cases: experiments on a volume, and their selection.

use defuse_measure::gluster::{BrickLayout, VolumeSetup};
use serde::{Deserialize, Serialize};

/// A volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeKind {
    /// Distributed over two bricks.
    Dist,
    /// Replicated on two bricks.
    Repl,
    /// Replicated on two directories by the client itself, without servers.
    Graph,
    /// Distributed over two bricks, whose lookups take 300 µs longer.
    Slow,
}

/// The options of table 5.2 of the paper.
pub const PAPER: [(&str, &str); 8] = [
    ("server.event-threads", "2"),
    ("client.event-threads", "2"),
    ("performance.io-thread-count", "6"),
    ("performance.client-io-threads", "on"),
    ("performance.readdir-ahead", "on"),
    ("performance.read-ahead", "off"),
    ("performance.write-behind", "off"),
    ("performance.io-cache", "off"),
];

/// Options by which the servers notify clients of changes, as clients that cache for long need it,
/// for so many files.
const TELLS: [(&str, &str); 3] = [
    ("features.cache-invalidation", "on"),
    ("features.cache-invalidation-timeout", "600"),
    ("network.inode-lru-limit", "200000"),
];

/// Latency of lookups. The threads of a server wait, so that there must be more of them.
const SLOW: [(&str, &str); 5] = [
    ("performance.io-thread-count", "16"),
    ("debug.delay-gen", "posix"),
    ("delay-gen.delay-duration", "300"),
    ("delay-gen.delay-percentage", "100"),
    ("delay-gen.enable", "lookup"),
];

impl VolumeKind {
    /// All volumes.
    pub const ALL: [VolumeKind; 4] =
        [VolumeKind::Dist, VolumeKind::Repl, VolumeKind::Graph, VolumeKind::Slow];

    /// Its name, also the name of the volume.
    pub fn name(self) -> &'static str {
        match self {
            VolumeKind::Dist => "dist",
            VolumeKind::Repl => "repl",
            VolumeKind::Graph => "graph",
            VolumeKind::Slow => "slow",
        }
    }

    /// A description for the report.
    pub fn title(self) -> &'static str {
        match self {
            VolumeKind::Dist => "distributed over 2 bricks",
            VolumeKind::Repl => "replicated on 2 bricks",
            VolumeKind::Graph => "replicated on 2 directories within the client, no servers",
            VolumeKind::Slow => "distributed, lookups take 300 µs longer",
        }
    }

    /// The volume of this name.
    ///
    /// # Errors
    ///
    /// A message for the user if there is none.
    pub fn from_name(name: &str) -> Result<VolumeKind, String> {
        let found = VolumeKind::ALL.into_iter().find(|place| place.name() == name);
        found.ok_or_else(|| format!("there is no volume {name:?}: write dist, repl, graph or slow"))
    }

    /// The volume to make on the servers; `None` for one without servers.
    pub fn volume(self) -> Option<VolumeSetup> {
        let mut options = PAPER.to_vec();
        options.extend(TELLS);
        match self {
            VolumeKind::Graph => return None,
            VolumeKind::Slow => {
                options.retain(|(key, _)| *key != SLOW[0].0);
                options.extend(SLOW);
            }
            VolumeKind::Dist | VolumeKind::Repl => {}
        }
        let layout = match self {
            VolumeKind::Repl => BrickLayout::Replicated,
            _ => BrickLayout::Distributed,
        };
        Some(VolumeSetup { name: self.name().to_owned(), layout, options })
    }
}

/// The work of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CaseWork {
    /// fio reads or writes files.
    Io {
        /// The order of the offsets, and the direction.
        pattern: IoPattern,
        /// Bytes in a request.
        block: u64,
        /// The engine of fio.
        engine: FioEngine,
    },
    /// Threads work on small files in one directory.
    Names(SmallFileOp),
}

/// The order of the offsets, and the direction, in the words of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoPattern {
    /// Sequential reads.
    Read,
    /// Random reads.
    RandRead,
    /// Sequential writes.
    Write,
    /// Random writes.
    RandWrite,
}

impl IoPattern {
    /// All patterns.
    pub const ALL: [IoPattern; 4] =
        [IoPattern::Read, IoPattern::RandRead, IoPattern::Write, IoPattern::RandWrite];

    /// Its name, as fio takes it.
    pub fn name(self) -> &'static str {
        match self {
            IoPattern::Read => "read",
            IoPattern::RandRead => "randread",
            IoPattern::Write => "write",
            IoPattern::RandWrite => "randwrite",
        }
    }
}

/// An engine of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FioEngine {
    /// A job waits for each request.
    Sync,
    /// A job has as many requests in flight as its depth.
    Libaio,
}

impl FioEngine {
    /// Its name, as fio takes it.
    pub fn name(self) -> &'static str {
        match self {
            FioEngine::Sync => "sync",
            FioEngine::Libaio => "libaio",
        }
    }
}

/// An operation on small files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SmallFileOp {
    /// Creates files of 4 KiB.
    Create,
    /// Lists the directory, with the attributes of all files, after the caches were dropped.
    List,
    /// Reads the attributes of each file, a second after this client has listed them.
    Stat,
    /// Removes the files.
    Delete,
    /// Reads the attributes of each file, after the caches were dropped.
    Lookup,
}

impl SmallFileOp {
    /// All operations, in the order in which they are done.
    pub const ALL: [SmallFileOp; 5] = [
        SmallFileOp::Create,
        SmallFileOp::List,
        SmallFileOp::Stat,
        SmallFileOp::Delete,
        SmallFileOp::Lookup,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            SmallFileOp::Create => "create",
            SmallFileOp::List => "list",
            SmallFileOp::Stat => "stat",
            SmallFileOp::Delete => "delete",
            SmallFileOp::Lookup => "lookup",
        }
    }

    /// The number of threads: a directory is listed by one.
    pub fn jobs(self) -> u32 {
        match self {
            SmallFileOp::List | SmallFileOp::Stat => 1,
            SmallFileOp::Create | SmallFileOp::Delete | SmallFileOp::Lookup => 16,
        }
    }
}

/// A case: work that is compared among targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlusterCase {
    /// The volume.
    pub place: VolumeKind,
    /// The work.
    pub work: CaseWork,
    /// Number of processes of fio, or of threads.
    pub jobs: u32,
    /// Requests in flight for each job.
    pub depth: u32,
}

impl GlusterCase {
    /// The name without jobs: `randread-4k-sync`, `create`.
    pub fn workload(&self) -> String {
        match self.work {
            CaseWork::Io { pattern, block, engine } => {
                format!("{}-{}-{}", pattern.name(), size(block), engine.name())
            }
            CaseWork::Names(op) => op.name().to_owned(),
        }
    }

    /// The name within the volume: `randread-4k-sync-32`, `randread-4k-libaio-16x32`, `create-16`.
    pub fn name(&self) -> String {
        format!("{}-{}", self.workload(), self.load())
    }

    /// Jobs, and their depth with an engine that has one.
    pub fn load(&self) -> String {
        match self.work {
            CaseWork::Io { engine: FioEngine::Libaio, .. } => {
                format!("{}x{}", self.jobs, self.depth)
            }
            _ => self.jobs.to_string(),
        }
    }
}

/// A number of bytes as the name of a block size.
pub fn size(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{}m", bytes >> 20) } else { format!("{}k", bytes >> 10) }
}

/// The cases to choose from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseSelection {
    /// The volumes.
    pub places: Vec<VolumeKind>,
    /// Numbers of jobs.
    pub jobs: Vec<u32>,
    /// Requests in flight for each job, for libaio.
    pub depths: Vec<u32>,
    /// Beginnings of names of cases; all if empty.
    pub only: Vec<String>,
}

impl CaseSelection {
    /// The cases of a volume, in the order of measurement.
    pub fn cases(&self, place: VolumeKind) -> Vec<GlusterCase> {
        let mut cases = Vec::new();
        if place != VolumeKind::Slow {
            self.io(place, &mut cases);
        }
        for op in SmallFileOp::ALL {
            // A volume without servers has no latency that threads could hide.
            let fits = match place {
                VolumeKind::Slow => op == SmallFileOp::Lookup,
                VolumeKind::Graph => false,
                VolumeKind::Dist | VolumeKind::Repl => op != SmallFileOp::Lookup,
            };
            if fits {
                cases.push(GlusterCase {
                    place,
                    work: CaseWork::Names(op),
                    jobs: op.jobs(),
                    depth: 1,
                });
            }
        }
        cases.retain(|case| {
            let name = case.name();
            self.only.is_empty() || self.only.iter().any(|only| name.starts_with(only.as_str()))
        });
        cases
    }

    fn io(&self, place: VolumeKind, cases: &mut Vec<GlusterCase>) {
        for engine in [FioEngine::Sync, FioEngine::Libaio] {
            let depths = if engine == FioEngine::Libaio { &self.depths[..] } else { &[1] };
            for block in [4 << 10, 1 << 20] {
                for pattern in IoPattern::ALL {
                    let work = CaseWork::Io { pattern, block, engine };
                    let of_jobs = |&jobs| {
                        depths.iter().map(move |&depth| GlusterCase { place, work, jobs, depth })
                    };
                    cases.extend(self.jobs.iter().flat_map(of_jobs));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(only: &[&str]) -> CaseSelection {
        CaseSelection {
            places: VolumeKind::ALL.to_vec(),
            jobs: vec![1, 32],
            depths: vec![1, 16],
            only: only.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    fn names(place: VolumeKind, only: &[&str]) -> Vec<String> {
        choice(only).cases(place).iter().map(GlusterCase::name).collect()
    }

    #[test]
    fn cases_are_chosen_by_the_beginning_of_their_names() {
        assert_eq!(names(VolumeKind::Dist, &[]).len(), 2 * 4 * 2 * (1 + 2) + 4);
        let chosen =
            names(VolumeKind::Repl, &["randread-4k-sync", "randwrite-4k-libaio-32x16", "del"]);
        let expected =
            ["randread-4k-sync-1", "randread-4k-sync-32", "randwrite-4k-libaio-32x16", "delete-16"];
        assert_eq!(chosen, expected);
        assert_eq!(names(VolumeKind::Slow, &[]), ["lookup-16"]);
        assert!(names(VolumeKind::Graph, &["create"]).is_empty());
    }

    #[test]
    fn volumes_have_the_options_of_the_paper_once() {
        for place in VolumeKind::ALL {
            let Some(volume) = place.volume() else { continue };
            for (key, _) in PAPER {
                let count = volume.options.iter().filter(|(name, _)| *name == key).count();
                assert_eq!(count, 1, "{key} of {}", volume.name);
            }
        }
        assert!(VolumeKind::from_name("other").unwrap_err().contains("write dist"));
    }
}
