//! The facts about a release that its packages state: version, time, licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;

/// The programs and the library whose dependencies are in the packages.
const CRATES: [&str; 3] = ["defuse", "defuse-study-program", "defuse-capi"];

/// The beginnings of names of files with licences and notices.
const LICENCES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// The system of the packages, as the compiler calls it.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The facts.
#[derive(Clone, Debug)]
pub struct ReleaseFacts {
    pub version: String,
    /// Seconds of the last commit: the time of every file.
    pub time: u64,
    /// Name and address of the packager.
    pub maintainer: String,
    /// The address of the project; empty if its manifests have none.
    pub homepage: String,
    /// debian/copyright, in its form for programs.
    pub copyright: String,
    /// The licences and notices of all crates that are linked.
    pub notices: String,
    /// The level of compression.
    pub level: u8,
}

impl ReleaseFacts {
    /// The facts of the checkout. A commit without a tag of its version is an earlier version than
    /// the release.
    pub fn from_checkout() -> Result<ReleaseFacts> {
        let last = |format: &str| git(&["log", "-1", &format!("--format={format}")]);
        let time: u64 = last("%ct")?.parse().context("the time of the last commit")?;
        let plain = env!("CARGO_PKG_VERSION");
        let is_release =
            git(&["tag", "--points-at", "HEAD"])?.lines().any(|tag| tag == format!("v{plain}"));
        let day = git(&["log", "-1", "--format=%cd", "--date=format-local:%Y%m%d.%H%M%S"])?;
        let version =
            if is_release { plain.to_owned() } else { format!("{plain}~git{day}.{}", last("%h")?) };
        let crates = LinkedCrate::list_all()?;
        Ok(ReleaseFacts {
            version,
            time,
            maintainer: packager().map_or_else(|| last("%an <%ae>"), Ok)?,
            homepage: option_env!("CARGO_PKG_REPOSITORY").unwrap_or_default().to_owned(),
            copyright: copyright(&crates),
            notices: notices(&crates)?,
            level: 6,
        })
    }

    /// The time as in a message, RFC 5322.
    pub fn date(&self) -> Result<String> {
        let mut date = Command::new("date");
        date.env("LC_ALL", "C").args(["--utc", "--rfc-email", &format!("--date=@{}", self.time)]);
        Ok(command::output(&mut date)?.trim().to_owned())
    }
}

/// The packager, by the variables of Debian's tools.
fn packager() -> Option<String> {
    let [name, address] = ["DEBFULLNAME", "DEBEMAIL"].map(std::env::var);
    Some(format!("{} <{}>", name.ok()?, address.ok()?))
}

fn git(arguments: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.env("TZ", "UTC").args(arguments).current_dir(command::root());
    Ok(command::output(&mut git)?.trim().to_owned())
}

/// A crate of others that is linked into a program or library of the packages.
pub struct LinkedCrate {
    name: String,
    version: String,
    licence: String,
    dir: PathBuf,
}

impl LinkedCrate {
    /// All of them, sorted.
    fn list_all() -> Result<Vec<LinkedCrate>> {
        let mut tree = command::cargo();
        tree.args([
            "tree",
            "--offline",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ]);
        let said = command::output(tree.args(CRATES.iter().flat_map(|name| ["--package", name])))?;
        let linked: BTreeSet<(&str, &str)> = said.lines().filter_map(parse_name).collect();
        let mut metadata = command::cargo();
        // Crates for other systems are not downloaded.
        metadata.args(["metadata", "--offline", "--format-version=1", "--filter-platform", TARGET]);
        let all: serde_json::Value = serde_json::from_str(&command::output(&mut metadata)?)?;
        let packages = all["packages"].as_array().context("cargo names no packages")?;
        let mut crates = Vec::new();
        for package in packages.iter().filter(|package| !package["source"].is_null()) {
            let text = |key: &str| package[key].as_str().unwrap_or_default();
            if linked.contains(&(text("name"), text("version"))) {
                let manifest = Path::new(text("manifest_path"));
                crates.push(LinkedCrate {
                    name: text("name").to_owned(),
                    version: text("version").to_owned(),
                    licence: text("license").to_owned(),
                    dir: manifest.parent().unwrap_or(manifest).to_owned(),
                });
            }
        }
        crates.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
        Ok(crates)
    }

    /// The files with licences and notices, sorted.
    fn licences(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.dir).with_context(|| self.dir.display().to_string())?;
        let is_licence = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            path.is_file() && LICENCES.iter().any(|start| name.starts_with(start))
        };
        let mut files: Vec<PathBuf> =
            entries.map_while(Result::ok).map(|entry| entry.path()).filter(is_licence).collect();
        files.sort();
        Ok(files)
    }
}

/// Name and version in a line `NAME vVERSION …`.
fn parse_name(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split(' ');
    Some((words.next()?, words.next()?.strip_prefix('v')?))
}

/// The machine-readable form of debian/copyright.
pub fn copyright(crates: &[LinkedCrate]) -> String {
    let mut text = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: defuse\n\n\
         Files: *\nCopyright: the authors of defuse\nLicense: Expat or Apache-2.0\n\
         Comment: The programs contain these crates, whose licences and notices are in\n \
         /usr/share/doc/defuse/NOTICE.gz:\n"
        .to_owned();
    for LinkedCrate { name, version, licence, .. } in crates {
        let _ = writeln!(text, " {name} {version}: {licence}");
    }
    let expat = fs::read_to_string(command::root().join("LICENSE-MIT")).unwrap_or_default();
    text += "\nLicense: Expat\n";
    for line in expat.lines() {
        let _ = writeln!(text, " {}", if line.trim().is_empty() { "." } else { line });
    }
    text += "\nLicense: Apache-2.0\n On Debian systems, the text is in /usr/share/common-licenses/Apache-2.0.\n";
    text
}

/// The licences and notices of all crates, each text once.
fn notices(crates: &[LinkedCrate]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for one in crates {
        for file in one.licences()? {
            let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let of = format!("{} {} ({}): {name}", one.name, one.version, one.licence);
            texts.entry(text.replace('\r', "")).or_default().push(of);
        }
    }
    let mut all = String::new();
    for (text, of) in texts {
        let line = "-".repeat(79);
        let _ = write!(all, "{line}\n{}\n{line}\n\n{}\n\n", of.join("\n"), text.trim_end());
    }
    Ok(all)
}
