//! What the commands need beyond cargo and a C compiler, and how it is installed.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::command;

/// Something that has to be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tool {
    /// The Debian package, or the component of rustup.
    pub name: &'static str,
    /// A program or, with a leading slash, a file: where it is there, the tool is installed.
    pub shows: &'static str,
    /// What is left out without it; `None` where nothing is left.
    pub part: Option<&'static str>,
    component: bool,
}

impl Tool {
    /// A Debian package without which nothing is left.
    pub const fn package(name: &'static str, shows: &'static str) -> Tool {
        Tool { name, shows, part: None, component: false }
    }

    /// A Debian package without which `part` is left out and the rest goes on.
    pub const fn package_for(name: &'static str, shows: &'static str, part: &'static str) -> Tool {
        Tool { name, shows, part: Some(part), component: false }
    }

    /// A component of the Rust toolchain.
    pub const fn component(name: &'static str, shows: &'static str) -> Tool {
        Tool { name, shows, part: None, component: true }
    }

    /// Whether it is there.
    pub fn is_there(&self) -> bool {
        if self.component {
            // The program of rustup is there even where the component is not.
            let mut version = Command::new(self.shows);
            version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            return version.current_dir(command::root()).status().is_ok_and(|s| s.success());
        }
        if self.shows.starts_with('/') {
            return Path::new(self.shows).exists();
        }
        command::find(self.shows).is_some()
    }

    /// How it is installed by hand.
    pub fn by_hand(&self) -> String {
        let how = if self.component { "rustup component add" } else { "apt-get install" };
        format!("{how} {}", self.name)
    }
}

/// Installs those of `tools` that are missing, as far as that is possible, and says what it does.
pub fn provide(tools: &[Tool]) {
    let missing: Vec<&Tool> = tools.iter().filter(|tool| !tool.is_there()).collect();
    let (components, packages): (Vec<&Tool>, Vec<&Tool>) =
        missing.into_iter().partition(|tool| tool.component);
    install_components(&names(&components));
    install_packages(&names(&packages));
    for tool in tools.iter().filter(|tool| !tool.is_there()) {
        println!("missing: {} (by hand: {})", tool.name, tool.by_hand());
    }
}

fn names(tools: &[&Tool]) -> Vec<&'static str> {
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
        println!("rustup is not there to install {}", names.join(", "));
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
    if command::find("apt-get").is_none() || !command::is_root() {
        println!("apt-get and root are needed to install {}", names.join(", "));
        return;
    }
    println!("installing Debian packages: {}", names.join(", "));
    if install(names).is_err() {
        // A machine that never asked for the package lists has none, and old ones lead nowhere.
        say_failure(command::run(apt_get().args(["-q", "update"])));
        say_failure(install(names));
    }
}

fn install(names: &[&str]) -> anyhow::Result<()> {
    command::run(apt_get().args(["-q", "install", "-y", "--no-install-recommends"]).args(names))
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    command
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
    fn what_is_there_is_found_by_program_and_by_file() {
        assert!(Tool::package("coreutils", "ls").is_there());
        assert!(Tool::package("base-files", "/etc").is_there());
        assert!(!Tool::package("nothing", "no-such-program").is_there());
        assert!(!Tool::package("nothing", "/no/such/file").is_there());
    }

    #[test]
    fn a_package_is_installed_once_whoever_needs_it() {
        let tool = Tool::package("g++", "g++");
        let part = Tool::package_for("fuse3", "fusermount3", "mounts of other users");
        assert_eq!(names(&[&tool, &part, &tool]), ["fuse3", "g++"]);
    }
}
