//! Debian's package manager: looks up and installs packages.
//!
//! A name in the tables may contain a `*` for a version (`libpython3.*-testsuite`), which differs
//! between releases. apt resolves it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command;

/// apt, with options that select package lists and the set of installed packages.
#[derive(Clone, Debug, Default)]
pub struct AptTool {
    options: Vec<String>,
}

impl AptTool {
    /// The apt of this machine.
    pub fn for_this_machine() -> AptTool {
        AptTool::default()
    }

    /// The apt of this machine as if no package were installed: an installed package would hide
    /// that it is missing from the lists.
    pub fn for_empty_machine() -> AptTool {
        AptTool { options: vec!["Dir::State::status=/dev/null".to_owned()] }
    }

    /// Adds options of apt.conf(5).
    pub fn with_options(mut self, options: impl IntoIterator<Item = String>) -> AptTool {
        self.options.extend(options);
        self
    }

    /// Downloads the package lists.
    pub fn update(&self) -> Result<()> {
        command::run(self.apt_get(&["-q", "update"]).stdout(Stdio::null()))
    }

    /// Installs the available packages, and prints the names of the others.
    pub fn install(&self, names: &[&str]) {
        let failures =
            install_each(names, &mut |names| self.install_together(names), &|| self.update());
        for failure in failures {
            println!("{failure}");
        }
    }

    fn install_together(&self, names: &[&str]) -> Result<()> {
        let names = self.resolve_all(names)?;
        let options = ["-q", "install", "-y", "--no-install-recommends"];
        command::run(self.apt_get(&options).args(names))
    }

    /// Returns an error message for each of `names` that cannot be installed from the package
    /// lists.
    ///
    /// # Errors
    ///
    /// Fails if there are no package lists.
    pub fn check_installable(&self, names: &[&str]) -> Result<Vec<String>> {
        let there = command::output(&mut self.apt_cache(&["pkgnames", "base-files"]))?;
        if there.trim().is_empty() {
            bail!("apt has no package lists: apt-get update");
        }
        if self.simulate(names).is_ok() {
            return Ok(Vec::new());
        }
        let complaint = |name: &&str| Some(format!("{name}: {:#}", self.simulate(&[name]).err()?));
        let mut complaints: Vec<String> = names.iter().filter_map(complaint).collect();
        if complaints.is_empty() {
            complaints.push("each of them can be installed, but not all together".to_owned());
        }
        Ok(complaints)
    }

    /// The first package on which `package` depends whose name begins so.
    ///
    /// # Errors
    ///
    /// Fails if the package lists have no such package.
    pub fn dependency(&self, package: &str, begins: &str) -> Result<String> {
        let said = command::output(&mut self.apt_cache(&["depends", package]))?;
        let names = said.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let found = names.map(str::trim).find(|name| name.starts_with(begins));
        found.map(str::to_owned).with_context(|| format!("{package} depends on no {begins}*"))
    }

    /// Downloads a package to the directory `to` and returns the file. Nothing is installed.
    ///
    /// # Errors
    ///
    /// Fails with the errors of apt-get(8).
    pub fn download(&self, package: &str, to: &Path) -> Result<PathBuf> {
        // apt-get(8) would otherwise download as a user without rights, who may not write there.
        let options = ["-q", "-o", "APT::Sandbox::User=root", "download", package];
        command::run(self.apt_get(&options).current_dir(to))?;
        let is_it = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(&format!("{package}_")) && name.ends_with(".deb")
        };
        let mut files = to.read_dir()?.map_while(Result::ok).map(|entry| entry.path());
        files.find(is_it).with_context(|| format!("apt-get left no file of {package}"))
    }

    fn simulate(&self, names: &[&str]) -> Result<()> {
        let names = self.resolve_all(names)?;
        let options = ["-q", "--simulate", "install", "--no-install-recommends"];
        command::output(self.apt_get(&options).args(names)).map(drop)
    }

    fn resolve_all(&self, names: &[&str]) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for name in names {
            all.extend(self.resolve(name)?);
        }
        Ok(all)
    }

    /// The packages that match a name of the tables.
    fn resolve(&self, name: &str) -> Result<Vec<String>> {
        let Some(pattern) = search_pattern(name) else { return Ok(vec![name.to_owned()]) };
        let said = command::output(&mut self.apt_cache(&["search", "--names-only", &pattern]))?;
        let found: Vec<String> = said.lines().filter_map(parse_found_name).collect();
        if found.is_empty() {
            bail!("no package of this release is called {name}");
        }
        Ok(found)
    }

    fn apt_get(&self, arguments: &[&str]) -> Command {
        self.command("apt-get", arguments)
    }

    fn apt_cache(&self, arguments: &[&str]) -> Command {
        self.command("apt-cache", arguments)
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C").stdin(Stdio::null());
        for option in &self.options {
            command.args(["-o", option]);
        }
        command.args(arguments);
        command
    }
}

/// True if apt is installed.
pub fn is_there() -> bool {
    command::find("apt-get").is_some() && command::find("apt-cache").is_some()
}

/// Installs `names` together. If that fails, updates the package lists and retries, then installs
/// them one by one, because apt installs nothing if one name is unknown. Returns the failures.
fn install_each(
    names: &[&str],
    install: &mut dyn FnMut(&[&str]) -> Result<()>,
    update: &dyn Fn() -> Result<()>,
) -> Vec<String> {
    if install(names).is_ok() {
        return Vec::new();
    }
    // The package lists may be missing or outdated.
    let mut failures: Vec<String> =
        update().err().map(|error| format!("{error:#}")).into_iter().collect();
    if install(names).is_ok() {
        return failures;
    }
    let mut one = |name: &&str| install(&[name]).err().map(|error| format!("{name}: {error:#}"));
    failures.extend(names.iter().filter_map(&mut one));
    failures
}

/// The regular expression for apt-cache(8) for a name with a `*`, which stands for a version.
fn search_pattern(name: &str) -> Option<String> {
    let literal = |text: &str| text.replace('.', "[.]").replace('+', "[+]");
    let parts: Vec<String> = name.split('*').map(literal).collect();
    (parts.len() > 1).then(|| format!("^{}$", parts.join("[0-9.]+")))
}

/// The name in a line `NAME - DESCRIPTION`.
fn parse_found_name(line: &str) -> Option<String> {
    line.split_once(" - ").map(|(name, _)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A list of fifteen packages had one name that Debian 12 does not have. apt-get installed none
    /// of the other fourteen, and the tests that need them were left out.
    #[test]
    fn an_unknown_package_does_not_prevent_the_others() {
        let mut installed = Vec::new();
        let mut install = |names: &[&str]| {
            if names.contains(&"unknown") {
                bail!("unable to locate package");
            }
            installed.extend(names.iter().map(|&name| name.to_owned()));
            Ok(())
        };
        let failures = install_each(&["fuse3", "unknown", "fio"], &mut install, &|| Ok(()));
        assert_eq!(installed, ["fuse3", "fio"]);
        assert_eq!(failures, ["unknown: unable to locate package"]);
    }

    #[test]
    fn package_lists_are_updated_once_and_only_if_needed() {
        let updates = Cell::new(0);
        let update = || {
            updates.set(updates.get() + 1);
            Ok(())
        };
        assert!(install_each(&["a", "b"], &mut |_| Ok(()), &update).is_empty());
        assert_eq!(updates.get(), 0);
        let mut after_update = |_: &[&str]| match updates.get() {
            0 => bail!("no lists"),
            _ => Ok(()),
        };
        assert!(install_each(&["a", "b"], &mut after_update, &update).is_empty());
        assert_eq!(updates.get(), 1);
    }

    #[test]
    fn a_star_matches_only_a_version() {
        let pattern = search_pattern("libpython3.*-testsuite").unwrap();
        assert_eq!(pattern, "^libpython3[.][0-9.]+-testsuite$");
        assert_eq!(search_pattern("g++"), None);
        let line = "libpython3.11-testsuite - Testsuite for Python - all of it";
        assert_eq!(parse_found_name(line).as_deref(), Some("libpython3.11-testsuite"));
    }

    /// Uses the package lists of the machine, if it has any.
    #[test]
    fn a_name_in_no_package_list_is_reported() {
        let apt = AptTool::for_empty_machine();
        if !is_there() || apt.check_installable(&["base-files"]).is_err() {
            println!("not here: apt has no package lists");
            return;
        }
        let complaints =
            apt.check_installable(&["tar", "no-such-package-in-any-release", "no-such.*"]);
        let complaints = complaints.unwrap();
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].starts_with("no-such-package-in-any-release: "), "{complaints:?}");
        assert!(complaints[1].contains("is called no-such.*"), "{complaints:?}");
    }
}
