//! What is asked for: rows, configurations, device, scale.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::rows::Media;

/// How large a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Under a second a cell: for request counts, not for speed.
    Tiny,
    /// About 5 seconds a cell.
    Small,
    /// As published: 60 GiB of data, and hours.
    Paper,
}

impl Scale {
    /// Its name in options and results.
    pub fn name(self) -> &'static str {
        match self {
            Scale::Tiny => "tiny",
            Scale::Small => "small",
            Scale::Paper => "paper",
        }
    }
}

impl FromStr for Scale {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Scale::Tiny, Scale::Small, Scale::Paper];
        let found = all.into_iter().find(|scale| scale.name() == text);
        found.ok_or_else(|| format!("there is no scale {text:?}: write tiny, small or paper"))
    }
}

/// How a configuration reaches the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind", content = "how")]
pub enum Kind {
    /// The directory on ext4 itself.
    Native,
    /// A mount of this program, with these arguments after source and mount point.
    Defuse(Vec<String>),
    /// Any program that mounts, as words; `{source}` and `{mountpoint}` stand for the directories.
    Command(Vec<String>),
}

/// One of the things that are compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Its name in results.
    pub name: String,
    /// How it reaches the files.
    #[serde(flatten)]
    pub kind: Kind,
}

/// The terms of the paper: the kernel asks again after a second.
const PAPER_TIMEOUTS: &str = "entry_timeout=1,attr_timeout=1,negative_timeout=0";

impl Config {
    /// The directory itself.
    pub fn native() -> Config {
        Config { name: "native".into(), kind: Kind::Native }
    }

    /// Whether its daemon holds a descriptor for every inode that the kernel knows: the paper's file systems do.
    pub fn holds_inodes_open(&self) -> bool {
        matches!(&self.kind, Kind::Defuse(words) if words
            .windows(2)
            .any(|pair| pair[0] == "--profile" && ["base", "opt"].contains(&pair[1].as_str())))
    }

    /// A configuration that has a name of its own.
    pub fn named(name: &str) -> Result<Config, String> {
        let mount = |words: &[&str]| Kind::Defuse(words.iter().map(|&word| word.into()).collect());
        let kind = match name {
            "native" => Kind::Native,
            "base" => mount(&["--profile", "base", "-o", PAPER_TIMEOUTS]),
            "opt" => mount(&["--profile", "opt", "-o", PAPER_TIMEOUTS]),
            "default" => mount(&[]),
            _ => {
                return Err(format!(
                    "there is no configuration {name:?}: write native, base, opt, default, or --config {name}=COMMAND"
                ));
            }
        };
        Ok(Config { name: name.to_owned(), kind })
    }

    /// Understands `NAME=COMMAND`. A command that begins with `-` is taken for options of `defuse mount`.
    pub fn custom(text: &str) -> Result<Config, String> {
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
            return Ok(Config { name: name.to_owned(), kind: Kind::Defuse(words) });
        }
        for needed in ["{source}", "{mountpoint}"] {
            if !words.iter().any(|word| word.contains(needed)) {
                return Err(format!(
                    "--config {name}: the command has no {needed}, so it cannot mount what is measured"
                ));
            }
        }
        Ok(Config { name: name.to_owned(), kind: Kind::Command(words) })
    }
}

/// Words of a command line, with quotes and backslashes as in a shell, and nothing else of a shell.
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

/// Which device is emulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The block device as fast as it is.
    None,
    /// Throttled to the figures of one of the paper's devices.
    Emulated(Media),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(DeviceChoice::None),
            "hdd" => Ok(DeviceChoice::Emulated(Media::Hdd)),
            "ssd" => Ok(DeviceChoice::Emulated(Media::Ssd)),
            _ => Err(format!("there is no device {text:?}: write ssd, hdd or none")),
        }
    }
}

/// Everything that was asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// Rows, in their order.
    pub rows: Vec<u8>,
    /// How large they are.
    pub scale: Scale,
    /// What is compared. The first one called `native` is the measure of the others.
    pub configs: Vec<Config>,
    /// How often each cell is measured.
    pub runs: u32,
    /// The device.
    pub device: DeviceChoice,
    /// Where results go.
    pub out: PathBuf,
    /// Where the image of the file system lies meanwhile.
    pub work: PathBuf,
    /// For the random choices of workloads.
    pub seed: u64,
    /// Goes on with the results that are in `out`.
    pub resume: bool,
    /// This program, which mounts and runs workloads.
    pub program: PathBuf,
    /// Whether the kernel's queues are measured too, where that is permitted.
    pub kernel_stages: bool,
    /// How many descriptors a daemon may have (the hard limit, `RLIMIT_NOFILE`).
    pub open_files: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_have_names() {
        assert_eq!(Config::named("native").unwrap().kind, Kind::Native);
        assert!(
            matches!(Config::named("base").unwrap().kind, Kind::Defuse(words) if words.contains(&"base".into()))
        );
        assert!(Config::named("fast").unwrap_err().contains("--config fast=COMMAND"));
    }

    #[test]
    fn commands_mount_what_is_measured() {
        let config = Config::custom("bind=bindfs -f '{source}' {mountpoint}").unwrap();
        let Kind::Command(words) = config.kind else { panic!() };
        assert_eq!(words, ["bindfs", "-f", "{source}", "{mountpoint}"]);
        assert!(Config::custom("x=bindfs {source}").unwrap_err().contains("{mountpoint}"));
        assert!(Config::custom("bindfs").is_err());
        assert!(Config::custom("../x=a {source} {mountpoint}").is_err());
        let ours = Config::custom("wb=-o writeback").unwrap();
        assert_eq!(ours.kind, Kind::Defuse(vec!["-o".into(), "writeback".into()]));
    }

    #[test]
    fn words_are_split_as_by_a_shell() {
        assert_eq!(split_words(r#"a "b c" d\ e '' "#).unwrap(), ["a", "b c", "d e", ""]);
        assert!(split_words("a 'b").is_err());
        assert!(split_words("  ").is_err());
    }
}
