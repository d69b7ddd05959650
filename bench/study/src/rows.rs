//! The 45 rows, and the published results.
//!
//! `data/fast17-table3.csv` and `data/fast17-request-counts.csv` come from table 3 of Vangoor,
//! Tarasov, Zadok, *To FUSE or Not to FUSE: Performance of User-Space File Systems* (FAST '17), and
//! from the raw results that its authors published with their code: means of three runs, requests
//! by type and queue on Linux 4.1.

use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

const TABLE: &str = include_str!("../data/fast17-table3.csv");
const REQUESTS: &str = include_str!("../data/fast17-request-counts.csv");
const GIB: u64 = 1 << 30;

/// A kind of device: the two of the paper, which can be emulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StorageMedia {
    /// The paper's disk: Seagate Savvio 15K.2, 15,000 revolutions a minute.
    Hdd,
    /// The paper's solid-state drive: Intel X25-M.
    Ssd,
}

impl StorageMedia {
    /// Its name in options and results.
    pub fn name(self) -> &'static str {
        match self {
            StorageMedia::Hdd => "hdd",
            StorageMedia::Ssd => "ssd",
        }
    }
}

/// The two configurations of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StackfsConfig {
    /// One thread, WRITE of 4 KiB, no write-back, no splice.
    Base,
    /// Threads, WRITE of 128 KiB, write-back, splice.
    Opt,
}

impl StackfsConfig {
    /// The configuration of Stackfs with which a configuration of this name is compared.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "base" => Some(StackfsConfig::Base),
            "opt" => Some(StackfsConfig::Opt),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            StackfsConfig::Base => "base",
            StackfsConfig::Opt => "opt",
        }
    }
}

/// The paper's classes of a change in throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeClass {
    /// Better, or less than 5 % worse.
    Green,
    /// 5 to 25 % worse.
    Yellow,
    /// 25 to 50 % worse.
    Orange,
    /// More than 50 % worse.
    Red,
}

impl ChangeClass {
    /// All, best first.
    pub const ALL: [ChangeClass; 4] =
        [ChangeClass::Green, ChangeClass::Yellow, ChangeClass::Orange, ChangeClass::Red];

    /// The class of a change in per cent. A value on a limit is in the worse class, as published
    /// (row 39).
    pub fn classify(change_pct: f64) -> ChangeClass {
        match change_pct {
            change if change > -5.0 => ChangeClass::Green,
            change if change > -25.0 => ChangeClass::Yellow,
            change if change > -50.0 => ChangeClass::Orange,
            _ => ChangeClass::Red,
        }
    }

    /// The mark of the paper.
    pub fn mark(self) -> char {
        match self {
            ChangeClass::Green => '+',
            ChangeClass::Yellow => '*',
            ChangeClass::Orange => '#',
            ChangeClass::Red => '!',
        }
    }

    /// The colour as a word.
    pub fn name(self) -> &'static str {
        match self {
            ChangeClass::Green => "green",
            ChangeClass::Yellow => "yellow",
            ChangeClass::Orange => "orange",
            ChangeClass::Red => "red",
        }
    }
}

/// A family of workloads, as the paper groups its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkloadFamily {
    /// Rows 1 to 12.
    SequentialReads,
    /// Rows 13 to 20.
    RandomReads,
    /// Rows 21 to 28.
    SequentialWrites,
    /// Rows 29 to 36.
    RandomWrites,
    /// Rows 37 and 38.
    Creates,
    /// Rows 39 and 40.
    SmallFileReads,
    /// Rows 41 and 42.
    Deletes,
    /// Rows 43 to 45.
    Servers,
}

impl WorkloadFamily {
    /// All, in the order of their rows.
    pub const ALL: [WorkloadFamily; 8] = [
        WorkloadFamily::SequentialReads,
        WorkloadFamily::RandomReads,
        WorkloadFamily::SequentialWrites,
        WorkloadFamily::RandomWrites,
        WorkloadFamily::Creates,
        WorkloadFamily::SmallFileReads,
        WorkloadFamily::Deletes,
        WorkloadFamily::Servers,
    ];

    /// The family of row `number`.
    pub fn from_row(number: u8) -> WorkloadFamily {
        match number {
            0..=12 => WorkloadFamily::SequentialReads,
            13..=20 => WorkloadFamily::RandomReads,
            21..=28 => WorkloadFamily::SequentialWrites,
            29..=36 => WorkloadFamily::RandomWrites,
            37..=38 => WorkloadFamily::Creates,
            39..=40 => WorkloadFamily::SmallFileReads,
            41..=42 => WorkloadFamily::Deletes,
            _ => WorkloadFamily::Servers,
        }
    }

    /// The name of the family.
    pub fn name(self) -> &'static str {
        match self {
            WorkloadFamily::SequentialReads => "sequential reads",
            WorkloadFamily::RandomReads => "random reads",
            WorkloadFamily::SequentialWrites => "sequential writes",
            WorkloadFamily::RandomWrites => "random writes",
            WorkloadFamily::Creates => "creating small files",
            WorkloadFamily::SmallFileReads => "reading small files",
            WorkloadFamily::Deletes => "deleting files",
            WorkloadFamily::Servers => "servers (file, mail, web)",
        }
    }
}

/// One row of the published table.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedRow {
    /// 1 to 45.
    pub number: u8,
    /// The name, such as `seq-rd-4KB-1th-1f`.
    pub name: String,
    hdd: PublishedResults,
    ssd: PublishedResults,
}

/// The published results of a row on one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PublishedResults {
    /// Throughput of Ext4, in flow operations per second.
    pub native_ops_per_s: f64,
    /// Change with StackfsBase, in per cent.
    pub base_pct: f64,
    /// Change with StackfsOpt, in per cent.
    pub opt_pct: f64,
}

impl PublishedResults {
    /// The change with one of the configurations, in per cent.
    pub fn change_pct(&self, stackfs: StackfsConfig) -> f64 {
        match stackfs {
            StackfsConfig::Base => self.base_pct,
            StackfsConfig::Opt => self.opt_pct,
        }
    }
}

/// Published requests of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedRequests {
    /// The type, such as `LOOKUP`.
    pub op: String,
    /// Number of requests through the background queue.
    pub background: u64,
    /// Number of requests through the pending queue, which is all of them.
    pub pending: u64,
}

impl PublishedRow {
    /// All 45 rows, in order.
    pub fn list() -> &'static [PublishedRow] {
        static ROWS: LazyLock<Vec<PublishedRow>> =
            LazyLock::new(|| TABLE.lines().skip(1).map(parse_row).collect());
        &ROWS
    }

    /// The row of this number.
    pub fn get(number: u8) -> Option<&'static PublishedRow> {
        PublishedRow::list().get(usize::from(number).checked_sub(1)?)
    }

    /// The published results for a device.
    pub fn published_results(&self, media: StorageMedia) -> &PublishedResults {
        match media {
            StorageMedia::Hdd => &self.hdd,
            StorageMedia::Ssd => &self.ssd,
        }
    }

    /// Its family.
    pub fn family(&self) -> WorkloadFamily {
        WorkloadFamily::from_row(self.number)
    }

    /// Number of flow operations of one published run. Every row is a fixed amount of work.
    pub fn published_operations(&self, media: StorageMedia) -> u64 {
        let hdd = media == StorageMedia::Hdd;
        let place = usize::from(self.number.saturating_sub(1) % 4);
        let io_bytes = [4 << 10, 32 << 10, 128 << 10, 1 << 20][place];
        match self.number {
            5..=8 => 32 * 60 * GIB / io_bytes,
            13..=20 if hdd => [262_144, 262_144, 196_608, 61_440][place],
            0..=28 => 60 * GIB / io_bytes,
            29..=36 => [1_572_864, 983_040, 491_520, 61_440][place],
            37..=38 => 12_000_000,
            39..=40 => {
                if hdd {
                    1_200_000
                } else {
                    4_000_000
                }
            }
            41..=42 => {
                if hdd {
                    2_000_000
                } else {
                    4_000_000
                }
            }
            43 => {
                if hdd {
                    1_000_000
                } else {
                    3_000_000
                }
            }
            44 => {
                if hdd {
                    1_000_000
                } else {
                    7_000_000
                }
            }
            _ => {
                if hdd {
                    1_000_000
                } else {
                    8_000_000
                }
            }
        }
    }

    /// The requests of one published run, by type.
    pub fn published_requests(
        &self,
        media: StorageMedia,
        stackfs: StackfsConfig,
    ) -> Vec<PublishedRequests> {
        let prefix = format!("{},{},{},", media.name(), stackfs.name(), self.run_name(media));
        REQUESTS.lines().filter_map(|line| parse_requests(line.strip_prefix(&prefix)?)).collect()
    }

    /// The authors' name of the run.
    fn run_name(&self, media: StorageMedia) -> String {
        let files = if media == StorageMedia::Hdd { "2Mf" } else { "4Mf" };
        match self.number {
            37 => "cr-wr-4KB-1th-4Mf".into(),
            38 => "cr-wr-4KB-32th-4Mf".into(),
            39 => "preall-re-4KB-1th-1Mf".into(),
            40 => "preall-re-4KB-32th-1Mf".into(),
            41 => format!("preall-de-4KB-1th-{files}"),
            42 => format!("preall-de-4KB-32th-{files}"),
            43 => "File-server-50th".into(),
            44 => "Mail-server-16th".into(),
            45 => "Web-server-100th".into(),
            _ => {
                let name = self.name.replace("seq-rd", "sq-re").replace("rnd-rd", "rd-re");
                name.replace("seq-wr", "sq-wr").replace("rnd-wr", "rd-wr")
            }
        }
    }
}

impl fmt::Display for PublishedRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.number, self.name)
    }
}

/// Parses `1-4,37,45`: the numbers in their order, each once.
pub fn parse_numbers(text: &str) -> Result<Vec<u8>, String> {
    let mut numbers = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u8>().ok().filter(|n| (1..=45).contains(n));
        let (Some(first), Some(last)) = (number(first), number(last)) else {
            return Err(format!("{part:?} is no row: write numbers from 1 to 45, such as 1-12,37"));
        };
        if first > last {
            return Err(format!("{part:?} runs backwards: write {last}-{first}"));
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

fn parse_row(line: &str) -> PublishedRow {
    let fields: Vec<&str> = line.split(',').collect();
    let figure = |place: usize| fields[place].parse::<f64>().expect("the table has figures");
    let published = |at: usize| PublishedResults {
        native_ops_per_s: figure(at),
        base_pct: figure(at + 1),
        opt_pct: figure(at + 2),
    };
    let number = fields[0].parse().expect("the table has row numbers");
    PublishedRow { number, name: fields[1].to_owned(), hdd: published(2), ssd: published(5) }
}

fn parse_requests(rest: &str) -> Option<PublishedRequests> {
    let mut fields = rest.split(',');
    let op = fields.next()?.to_owned();
    let background = fields.next()?.parse().ok()?;
    let pending = fields.next()?.parse().ok()?;
    Some(PublishedRequests { op, background, pending })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(media: StorageMedia, stackfs: StackfsConfig) -> [usize; 4] {
        let classes = PublishedRow::list()
            .iter()
            .map(|row| ChangeClass::classify(row.published_results(media).change_pct(stackfs)));
        let classes: Vec<_> = classes.collect();
        ChangeClass::ALL.map(|wanted| classes.iter().filter(|class| **class == wanted).count())
    }

    #[test]
    fn class_counts_match_the_published_table() {
        assert_eq!(counts(StorageMedia::Hdd, StackfsConfig::Base), [23, 7, 9, 6]);
        assert_eq!(counts(StorageMedia::Hdd, StackfsConfig::Opt), [29, 10, 4, 2]);
        assert_eq!(counts(StorageMedia::Ssd, StackfsConfig::Base), [27, 5, 6, 7]);
        assert_eq!(counts(StorageMedia::Ssd, StackfsConfig::Opt), [29, 4, 7, 5]);
    }

    #[test]
    fn every_row_has_published_requests() {
        for row in PublishedRow::list() {
            for media in [StorageMedia::Hdd, StorageMedia::Ssd] {
                for stackfs in [StackfsConfig::Base, StackfsConfig::Opt] {
                    let requests = row.published_requests(media, stackfs);
                    assert!(
                        requests.iter().any(|r| r.op == "LOOKUP"),
                        "{row} {media:?} {stackfs:?}"
                    );
                }
            }
        }
        let writes = |stackfs| {
            let requests =
                PublishedRow::get(21).unwrap().published_requests(StorageMedia::Ssd, stackfs);
            requests.iter().find(|r| r.op == "WRITE").unwrap().pending
        };
        assert_eq!(writes(StackfsConfig::Base), 15_728_640);
        assert!(writes(StackfsConfig::Opt) < 15_728_640 / 25);
    }

    #[test]
    fn lists_of_rows() {
        assert_eq!(parse_numbers("37, 1-3,2").unwrap(), [1, 2, 3, 37]);
        for wrong in ["0", "46", "x", "", "3-1", "1-"] {
            assert!(parse_numbers(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn published_work_agrees_with_published_writes() {
        let row = PublishedRow::get(21).unwrap();
        assert_eq!(row.published_operations(StorageMedia::Ssd), 15_728_640);
        assert_eq!(PublishedRow::get(24).unwrap().published_operations(StorageMedia::Hdd), 61_440);
    }
}
