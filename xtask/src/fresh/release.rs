//! A release of Debian. Mirrors and settings come from the apt of this machine; none is built in.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::apt::{self, AptTool};
use crate::command;

/// The format for the list of apt's sources, one line per list.
const FORMAT: &str = "$(CREATED_BY)\t$(ORIGIN)\t$(REPO_URI)\t$(CODENAME)\t$(COMPONENT)";

/// The settings of apt.conf(5) for access to a mirror: proxies, certificates, clocks, timeouts.
const SETTINGS: [&str; 6] = [
    "Acquire::http",
    "Acquire::https",
    "Acquire::Check-",
    "Acquire::Retries",
    "Acquire::ForceIPv",
    "Acquire::Max-FutureTime",
];

/// A release, and its sources.
#[derive(Debug)]
pub struct DebianRelease {
    name: String,
    /// Lines of sources.list(5).
    sources: String,
    /// Lines of apt.conf(5).
    settings: String,
}

impl DebianRelease {
    /// The release of this name.
    ///
    /// # Errors
    ///
    /// Fails if apt on this machine has no mirror of Debian.
    pub fn find(name: &str) -> Result<DebianRelease> {
        ensure!(apt::is_there(), "there is no apt, whose mirror and settings are used");
        let own = codename().context("/etc/os-release names no release")?;
        let mut sources = sources(&targets()?, &own, name);
        if sources.is_empty() {
            // apt knows the origin of a mirror only from its lists.
            AptTool::for_this_machine().update()?;
            sources = self::sources(&targets()?, &own, name);
        }
        ensure!(!sources.is_empty(), "this machine's apt knows no mirror of Debian");
        let dump = command::output(Command::new("apt-config").arg("dump"))?;
        Ok(DebianRelease { name: name.to_owned(), sources, settings: settings(&dump) })
    }

    /// The name of the release.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its lines of sources.list(5).
    pub fn sources(&self) -> &str {
        &self.sources
    }

    /// The lines of apt.conf(5) that this machine needs to access a mirror.
    pub fn settings(&self) -> &str {
        &self.settings
    }

    /// Options for an apt that has only the lists of this release, below `dir`.
    pub fn apt_options(&self, dir: &Path) -> Result<Vec<String>> {
        for made in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(made))?;
        }
        let list = dir.join("sources.list");
        fs::write(&list, &self.sources)?;
        let dir = dir.display();
        Ok(vec![
            format!("Dir::Etc::SourceList={}", list.display()),
            format!("Dir::Etc::SourceParts={dir}/no-more-sources"),
            format!("Dir::Etc::PreferencesParts={dir}/no-preferences"),
            format!("Dir::State={dir}/state"),
            format!("Dir::Cache={dir}/cache"),
            "APT::Sandbox::User=root".to_owned(),
            // The machine's default release could make apt remove packages.
            "APT::Default-Release=".to_owned(),
        ])
    }
}

/// The name of this machine's release.
pub fn codename() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
    Some(name.trim_matches('"').to_owned())
}

fn targets() -> Result<String> {
    command::output(Command::new("apt-get").args(["indextargets", "--format", FORMAT]))
}

/// Lines of sources.list(5) for `release`, made from the lists of the release `own`.
fn sources(targets: &str, own: &str, release: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for target in targets.lines() {
        let fields: Vec<&str> = target.split('\t').collect();
        let ["Packages", "Debian", uri, suite, component] = fields[..] else { continue };
        // bookworm, bookworm-updates, bookworm-security.
        let Some(rest) = suite.strip_prefix(own) else { continue };
        let line = format!("deb {uri} {release}{rest} {component}\n");
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.concat()
}

fn settings(dump: &str) -> String {
    let wanted = |line: &&str| SETTINGS.iter().any(|setting| line.starts_with(setting));
    dump.lines().filter(wanted).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_release_comes_from_the_mirrors_of_this_one() {
        let targets = "Packages\tDebian\thttp://a/debian/\tbookworm\tmain\n\
            DEP-11\tDebian\thttp://a/debian/\tbookworm\tmain\n\
            Packages\tDebian\thttp://a/security/\tbookworm-security\tmain\n\
            Packages\tSomebody\thttp://b/\tnodistro\tmain\n";
        let expected =
            "deb http://a/debian/ trixie main\ndeb http://a/security/ trixie-security main\n";
        assert_eq!(sources(targets, "bookworm", "trixie"), expected);
        assert_eq!(sources("", "bookworm", "trixie"), "");
    }

    #[test]
    fn only_settings_for_access_to_a_mirror_are_copied() {
        let dump = "APT::Architecture \"amd64\";\nAcquire::Check-Date \"false\";\n\
            Acquire::http::Proxy \"http://127.0.0.1:3142\";\nAcquire::Languages \"none\";\n";
        let expected =
            "Acquire::Check-Date \"false\";\nAcquire::http::Proxy \"http://127.0.0.1:3142\";\n";
        assert_eq!(settings(dump), expected);
    }
}
