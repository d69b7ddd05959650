//! The cases: experiments on a volume, and their selection.

use defuse_measure::gluster::Volume;
use serde::{Deserialize, Serialize};

/// A volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
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

/// The servers tell of changes, as clients that cache for long need it, and of so many files.
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

impl Place {
    /// All volumes.
    pub const ALL: [Place; 4] = [Place::Dist, Place::Repl, Place::Graph, Place::Slow];

    /// Its name, also that of the volume.
    pub fn name(self) -> &'static str {
        match self {
            Place::Dist => "dist",
            Place::Repl => "repl",
            Place::Graph => "graph",
            Place::Slow => "slow",
        }
    }

    /// A description for the report.
    pub fn title(self) -> &'static str {
        match self {
            Place::Dist => "distributed over 2 bricks",
            Place::Repl => "replicated on 2 bricks",
            Place::Graph => "replicated on 2 directories within the client, no servers",
            Place::Slow => "distributed, lookups take 300 µs longer",
        }
    }

    /// The volume of this name.
    ///
    /// # Errors
    ///
    /// A message for the user if there is none.
    pub fn named(name: &str) -> Result<Place, String> {
        let found = Place::ALL.into_iter().find(|place| place.name() == name);
        found.ok_or_else(|| format!("there is no volume {name:?}: write dist, repl, graph or slow"))
    }

    /// The volume to make on the servers; `None` for one without servers.
    pub fn volume(self) -> Option<Volume> {
        let mut options = PAPER.to_vec();
        options.extend(TELLS);
        match self {
            Place::Graph => return None,
            Place::Slow => {
                options.retain(|(key, _)| *key != SLOW[0].0);
                options.extend(SLOW);
            }
            Place::Dist | Place::Repl => {}
        }
        let is_replicated = self == Place::Repl;
        Some(Volume { name: self.name().to_owned(), is_replicated, options })
    }
}

/// The work of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// fio reads or writes files.
    Io {
        /// The order of the offsets, and the direction.
        pattern: Pattern,
        /// Bytes in a request.
        block: u64,
        /// The engine of fio.
        engine: Engine,
    },
    /// Threads work on small files in one directory.
    Names(Names),
}

/// The order of the offsets, and the direction, in the words of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Sequential reads.
    Read,
    /// Random reads.
    RandRead,
    /// Sequential writes.
    Write,
    /// Random writes.
    RandWrite,
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Pattern; 4] =
        [Pattern::Read, Pattern::RandRead, Pattern::Write, Pattern::RandWrite];

    /// Its name, as fio takes it.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Read => "read",
            Pattern::RandRead => "randread",
            Pattern::Write => "write",
            Pattern::RandWrite => "randwrite",
        }
    }
}

/// An engine of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// A job waits for each request.
    Sync,
    /// A job has as many requests in flight as its depth.
    Libaio,
}

impl Engine {
    /// Its name, as fio takes it.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Sync => "sync",
            Engine::Libaio => "libaio",
        }
    }
}

/// An operation on small files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Names {
    /// Creates files of 4 KiB.
    Create,
    /// Lists the directory, with the attributes of all files, after the caches were dropped.
    List,
    /// Asks for the attributes of each file, a second after this client has listed them.
    Stat,
    /// Removes the files.
    Delete,
    /// Asks for the attributes of each file, after the caches were dropped.
    Lookup,
}

impl Names {
    /// All operations, in the order in which they are done.
    pub const ALL: [Names; 5] =
        [Names::Create, Names::List, Names::Stat, Names::Delete, Names::Lookup];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Names::Create => "create",
            Names::List => "list",
            Names::Stat => "stat",
            Names::Delete => "delete",
            Names::Lookup => "lookup",
        }
    }

    /// The number of threads: a directory is listed by one.
    pub fn jobs(self) -> u32 {
        match self {
            Names::List | Names::Stat => 1,
            Names::Create | Names::Delete | Names::Lookup => 16,
        }
    }
}

/// A case: work that is compared among targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The volume.
    pub place: Place,
    /// The work.
    pub work: Work,
    /// Number of processes of fio, or of threads.
    pub jobs: u32,
    /// Requests in flight for each job.
    pub depth: u32,
}

impl Case {
    /// The name without jobs: `randread-4k-sync`, `create`.
    pub fn workload(&self) -> String {
        match self.work {
            Work::Io { pattern, block, engine } => {
                format!("{}-{}-{}", pattern.name(), size(block), engine.name())
            }
            Work::Names(op) => op.name().to_owned(),
        }
    }

    /// The name within the volume: `randread-4k-sync-32`, `randread-4k-libaio-16x32`, `create-16`.
    pub fn name(&self) -> String {
        format!("{}-{}", self.workload(), self.load())
    }

    /// Jobs, and their depth with an engine that has one.
    pub fn load(&self) -> String {
        match self.work {
            Work::Io { engine: Engine::Libaio, .. } => format!("{}x{}", self.jobs, self.depth),
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
pub struct Choice {
    /// The volumes.
    pub places: Vec<Place>,
    /// Numbers of jobs.
    pub jobs: Vec<u32>,
    /// Requests in flight for each job, for libaio.
    pub depths: Vec<u32>,
    /// Beginnings of names of cases; all if empty.
    pub only: Vec<String>,
}

impl Choice {
    /// The cases of a volume, in the order of measurement.
    pub fn cases(&self, place: Place) -> Vec<Case> {
        let mut cases = Vec::new();
        if place != Place::Slow {
            self.io(place, &mut cases);
        }
        for op in Names::ALL {
            // A volume without servers has no latency that threads could hide.
            let fits = match place {
                Place::Slow => op == Names::Lookup,
                Place::Graph => false,
                Place::Dist | Place::Repl => op != Names::Lookup,
            };
            if fits {
                cases.push(Case { place, work: Work::Names(op), jobs: op.jobs(), depth: 1 });
            }
        }
        cases.retain(|case| {
            let name = case.name();
            self.only.is_empty() || self.only.iter().any(|only| name.starts_with(only.as_str()))
        });
        cases
    }

    fn io(&self, place: Place, cases: &mut Vec<Case>) {
        for engine in [Engine::Sync, Engine::Libaio] {
            let depths = if engine == Engine::Libaio { &self.depths[..] } else { &[1] };
            for block in [4 << 10, 1 << 20] {
                for pattern in Pattern::ALL {
                    let work = Work::Io { pattern, block, engine };
                    let of_jobs =
                        |&jobs| depths.iter().map(move |&depth| Case { place, work, jobs, depth });
                    cases.extend(self.jobs.iter().flat_map(of_jobs));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(only: &[&str]) -> Choice {
        Choice {
            places: Place::ALL.to_vec(),
            jobs: vec![1, 32],
            depths: vec![1, 16],
            only: only.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    fn names(place: Place, only: &[&str]) -> Vec<String> {
        choice(only).cases(place).iter().map(Case::name).collect()
    }

    #[test]
    fn cases_are_chosen_by_the_beginning_of_their_names() {
        assert_eq!(names(Place::Dist, &[]).len(), 2 * 4 * 2 * (1 + 2) + 4);
        let chosen = names(Place::Repl, &["randread-4k-sync", "randwrite-4k-libaio-32x16", "del"]);
        let expected =
            ["randread-4k-sync-1", "randread-4k-sync-32", "randwrite-4k-libaio-32x16", "delete-16"];
        assert_eq!(chosen, expected);
        assert_eq!(names(Place::Slow, &[]), ["lookup-16"]);
        assert!(names(Place::Graph, &["create"]).is_empty());
    }

    #[test]
    fn volumes_have_the_options_of_the_paper_once() {
        for place in Place::ALL {
            let Some(volume) = place.volume() else { continue };
            for (key, _) in PAPER {
                let count = volume.options.iter().filter(|(name, _)| *name == key).count();
                assert_eq!(count, 1, "{key} of {}", volume.name);
            }
        }
        assert!(Place::named("other").unwrap_err().contains("write dist"));
    }
}
