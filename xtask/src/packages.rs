//! The tools that the commands need beyond cargo and a C compiler, and their installation.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::apt::{self, AptTool};
use crate::command;

/// A tool to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequiredTool {
    /// The Debian package, with a `*` for a version that differs between releases, or the component
    /// of rustup.
    pub name: &'static str,
    /// A program or, with a leading slash, a file (`*` stands for a version) that shows that the
    /// tool is installed.
    pub shows: &'static str,
    /// The tests that are left out without it; `None` if all are.
    pub part: Option<&'static str>,
    component: bool,
}

impl RequiredTool {
    /// A Debian package that is required.
    pub const fn package(name: &'static str, shows: &'static str) -> RequiredTool {
        RequiredTool { name, shows, part: None, component: false }
    }

    /// A Debian package without which only `part` is left out.
    pub const fn package_for(
        name: &'static str,
        shows: &'static str,
        part: &'static str,
    ) -> RequiredTool {
        RequiredTool { name, shows, part: Some(part), component: false }
    }

    /// A component of the Rust toolchain.
    pub const fn component(name: &'static str, shows: &'static str) -> RequiredTool {
        RequiredTool { name, shows, part: None, component: true }
    }

    /// True if the tool is installed.
    pub fn is_there(&self) -> bool {
        if self.component {
            // The program of rustup exists even if the component is missing.
            let mut version = Command::new(self.shows);
            version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            return version.current_dir(command::root()).status().is_ok_and(|s| s.success());
        }
        if self.shows.starts_with('/') {
            return exists(Path::new("/"), self.shows);
        }
        command::find(self.shows).is_some()
    }

    /// The name of the Debian package, as [`apt`] takes it; `None` for a component of the
    /// toolchain.
    pub fn debian(&self) -> Option<&'static str> {
        (!self.component).then_some(self.name)
    }

    /// The command for a manual installation.
    pub fn install_command(&self) -> String {
        let how = if self.component { "rustup component add" } else { "apt-get install" };
        format!("{how} {}", self.name)
    }
}

/// Installs the missing tools as far as possible, and prints what it does.
pub fn provide(tools: &[RequiredTool]) {
    let missing: Vec<&RequiredTool> = tools.iter().filter(|tool| !tool.is_there()).collect();
    let (components, packages): (Vec<&RequiredTool>, Vec<&RequiredTool>) =
        missing.into_iter().partition(|tool| tool.component);
    install_components(&names(&components));
    install_packages(&names(&packages));
    for tool in tools.iter().filter(|tool| !tool.is_there()) {
        println!("missing: {} (by hand: {})", tool.name, tool.install_command());
    }
}

fn names(tools: &[&RequiredTool]) -> Vec<&'static str> {
    let mut names: Vec<_> = tools.iter().map(|tool| tool.name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn install_components(names: &[&str]) {
    if names.is_empty() {
        return;
    }
    if command::find("rustup").is_none() {
        println!("rustup is missing, which is needed to install {}", names.join(", "));
        return;
    }
    println!("installing components of Rust: {}", names.join(", "));
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add"]).args(names).current_dir(command::root());
    say_failure(command::run(&mut rustup));
}

fn install_packages(names: &[&str]) {
    if names.is_empty() {
        return;
    }
    if !apt::is_there() || !command::is_root() {
        println!("apt-get and root are needed to install {}", names.join(", "));
        return;
    }
    println!("installing Debian packages: {}", names.join(", "));
    AptTool::for_this_machine().install(names);
}

/// True if `dir` has a file that matches `path`, in which `*` stands for any characters but a
/// slash.
fn exists(dir: &Path, path: &str) -> bool {
    let (first, rest) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
    let first = first.trim_start_matches('/');
    let goes_on = |dir: &Path| if rest.is_empty() { dir.exists() } else { exists(dir, rest) };
    let Some((start, end)) = first.split_once('*') else { return goes_on(&dir.join(first)) };
    let fits = |name: &str| {
        name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
    };
    let entries = dir.read_dir().into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(fits)).any(|e| goes_on(&e.path()))
}

fn say_failure(outcome: anyhow::Result<()>) {
    if let Err(error) = outcome {
        println!("{error:#}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_tool_is_found_by_program_and_by_file() {
        assert!(RequiredTool::package("coreutils", "ls").is_there());
        assert!(RequiredTool::package("base-files", "/etc").is_there());
        assert!(!RequiredTool::package("nothing", "no-such-program").is_there());
        assert!(!RequiredTool::package("nothing", "/no/such/file").is_there());
        assert!(RequiredTool::package("procps", "/pr*c/self/stat*").is_there());
        assert!(!RequiredTool::package("nothing", "/proc/sel*/no-such-file").is_there());
    }

    #[test]
    fn a_package_is_installed_once_for_all_steps() {
        let tool = RequiredTool::package("g++", "g++");
        let part = RequiredTool::package_for("fuse3", "fusermount3", "mounts of other users");
        assert_eq!(names(&[&tool, &part, &tool]), ["fuse3", "g++"]);
    }
}
