//! The options of a study: rows, configurations, device, scale.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::rows::{StorageMedia, WorkloadFamily};

/// The size of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StudyScale {
    /// Under a second per cell: for request counts, not for speed.
    Tiny,
    /// About 5 seconds per cell.
    Small,
    /// As published: 60 GiB of data, and hours.
    Paper,
}

impl StudyScale {
    /// Its name in options and results.
    pub fn name(self) -> &'static str {
        match self {
            StudyScale::Tiny => "tiny",
            StudyScale::Small => "small",
            StudyScale::Paper => "paper",
        }
    }
}

impl FromStr for StudyScale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [StudyScale::Tiny, StudyScale::Small, StudyScale::Paper];
        let found = all.into_iter().find(|scale| scale.name() == text);
        found.ok_or_else(|| format!("there is no scale {text:?}: write tiny, small or paper"))
    }
}

/// The way in which a configuration accesses the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", content = "how")]
pub enum ConfigKind {
    /// The directory on ext4 itself.
    Native,
    /// A mount by this program, with these arguments after source and mount point.
    Defuse(Vec<String>),
    /// Any mounting program, as words. `{source}` and `{mountpoint}` are replaced by the
    /// directories.
    Command(Vec<String>),
}

/// A configuration to compare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StudyConfig {
    /// Its name in results.
    pub name: String,
    /// The way in which it accesses the files.
    #[serde(flatten)]
    pub kind: ConfigKind,
}

/// The timeouts of the paper: the kernel revalidates after a second.
const PAPER_TIMEOUTS: &str = "entry_timeout=1,attr_timeout=1,negative_timeout=0";

impl StudyConfig {
    /// The directory itself.
    pub fn native() -> StudyConfig {
        StudyConfig { name: "native".into(), kind: ConfigKind::Native }
    }

    /// True if its daemon holds a descriptor for every inode that the kernel knows, as the paper's
    /// file systems do.
    pub fn holds_inodes_open(&self) -> bool {
        matches!(&self.kind, ConfigKind::Defuse(words) if words
            .windows(2)
            .any(|pair| pair[0] == "--profile" && ["base", "opt"].contains(&pair[1].as_str())))
    }

    /// A predefined configuration.
    pub fn from_name(name: &str) -> Result<StudyConfig, String> {
        let mount =
            |words: &[&str]| ConfigKind::Defuse(words.iter().map(|&word| word.into()).collect());
        let kind = match name {
            "native" => ConfigKind::Native,
            "base" => mount(&["--profile", "base", "-o", PAPER_TIMEOUTS]),
            "opt" => mount(&["--profile", "opt", "-o", PAPER_TIMEOUTS]),
            "default" => mount(&[]),
            _ => {
                return Err(format!(
                    "there is no configuration {name:?}: write native, base, opt, default, or --config {name}=COMMAND"
                ));
            }
        };
        Ok(StudyConfig { name: name.to_owned(), kind })
    }

    /// Parses `NAME=COMMAND`. A command that begins with `-` is a list of options for `defuse
    /// mount`.
    pub fn custom(text: &str) -> Result<StudyConfig, String> {
        let Some((name, command)) = text.split_once('=') else {
            return Err(format!(
                "{text:?}: write NAME=COMMAND, such as sshfs='sshfs -f host:{{source}} {{mountpoint}}'"
            ));
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(plain) || name.starts_with('.') {
            return Err(format!(
                "{name:?} is no name for a configuration: use letters, digits, - _ and ."
            ));
        }
        let words = split_words(command).map_err(|error| format!("--config {name}: {error}"))?;
        if command.starts_with('-') {
            return Ok(StudyConfig { name: name.to_owned(), kind: ConfigKind::Defuse(words) });
        }
        for needed in ["{source}", "{mountpoint}"] {
            if !words.iter().any(|word| word.contains(needed)) {
                return Err(format!(
                    "--config {name}: the command has no {needed}, so it cannot mount what is measured"
                ));
            }
        }
        Ok(StudyConfig { name: name.to_owned(), kind: ConfigKind::Command(words) })
    }
}

/// Splits a command line into words, with quotes and backslashes as in a shell, and no other shell
/// syntax.
pub fn split_words(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('\\', None | Some('"')) => {
                let next = chars.next().ok_or("a backslash at the end")?;
                word.get_or_insert_default().push(next);
            }
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".into());
    }
    words.extend(word);
    if words.is_empty() { Err("the command is empty".into()) } else { Ok(words) }
}

/// The emulated device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The block device at full speed.
    None,
    /// Throttled to the speed of one of the paper's devices.
    Emulated(StorageMedia),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(DeviceChoice::None),
            "hdd" => Ok(DeviceChoice::Emulated(StorageMedia::Hdd)),
            "ssd" => Ok(DeviceChoice::Emulated(StorageMedia::Ssd)),
            _ => Err(format!("there is no device {text:?}: write ssd, hdd or none")),
        }
    }
}

/// All options.
#[derive(Debug, Clone)]
pub struct StudyOptions {
    /// Rows, in order.
    pub rows: Vec<u8>,
    /// Their size.
    pub scale: StudyScale,
    /// The configurations to compare. The first one called `native` is the reference.
    pub configs: Vec<StudyConfig>,
    /// Number of runs of each cell; `None` for one, and several of rows that vary from run to run.
    pub runs: Option<u32>,
    /// The device.
    pub device: DeviceChoice,
    /// Directory of the results.
    pub out: PathBuf,
    /// Directory for the image of the file system during the study.
    pub work: PathBuf,
    /// Seed of the workloads' random choices.
    pub seed: u64,
    /// Continue with the results in `out`.
    pub resume: bool,
    /// The path of this program, which mounts and runs workloads.
    pub program: PathBuf,
    /// Measure the kernel's queues, too, if permitted.
    pub kernel_stages: bool,
    /// Hard limit on descriptors of a daemon (`RLIMIT_NOFILE`).
    pub open_files: u64,
}

/// Runs of a row that varies.
const SEVERAL_RUNS: u32 = 3;

impl StudyOptions {
    /// Number of runs of each cell of `row`. Creating files natively is up to 25 times as fast in
    /// one run as in another, by the state of the write-back.
    pub fn runs_of(&self, row: u8) -> u32 {
        let varies = WorkloadFamily::from_row(row) == WorkloadFamily::Creates;
        let is_measured = self.scale != StudyScale::Tiny;
        self.runs.unwrap_or(if varies && is_measured { SEVERAL_RUNS } else { 1 })
    }

    /// The largest number of runs of a cell.
    pub fn most_runs(&self) -> u32 {
        self.rows.iter().map(|row| self.runs_of(*row)).max().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_have_names() {
        assert_eq!(StudyConfig::from_name("native").unwrap().kind, ConfigKind::Native);
        assert!(
            matches!(StudyConfig::from_name("base").unwrap().kind, ConfigKind::Defuse(words) if words.contains(&"base".into()))
        );
        assert!(StudyConfig::from_name("fast").unwrap_err().contains("--config fast=COMMAND"));
    }

    #[test]
    fn commands_contain_the_mount_options() {
        let config = StudyConfig::custom("bind=bindfs -f '{source}' {mountpoint}").unwrap();
        let ConfigKind::Command(words) = config.kind else { panic!() };
        assert_eq!(words, ["bindfs", "-f", "{source}", "{mountpoint}"]);
        assert!(StudyConfig::custom("x=bindfs {source}").unwrap_err().contains("{mountpoint}"));
        assert!(StudyConfig::custom("bindfs").is_err());
        assert!(StudyConfig::custom("../x=a {source} {mountpoint}").is_err());
        let ours = StudyConfig::custom("wb=-o writeback").unwrap();
        assert_eq!(ours.kind, ConfigKind::Defuse(vec!["-o".into(), "writeback".into()]));
    }

    #[test]
    fn words_are_split_as_by_a_shell() {
        assert_eq!(split_words(r#"a "b c" d\ e '' "#).unwrap(), ["a", "b c", "d e", ""]);
        assert!(split_words("a 'b").is_err());
        assert!(split_words("  ").is_err());
    }
}
