//! The root of a minimal system: created, entered, and removed.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::release::DebianRelease;
use crate::children::ChildPrograms;
use crate::command;

/// Sets up the namespaces of the system, and enters it.
const ENTER: &str = include_str!("enter.sh");

/// Separate namespaces: their mounts and processes end with the first process.
const NAMESPACES: [&str; 6] =
    ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc"];

/// The certificates that this machine trusts, at Debian's path.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Their path in the root, which has certificates of its own.
const OUR_CERTIFICATES: &str = "/opt/certificates.crt";

/// Creates the directory `root` in `place`, with the essential packages of `release` and what
/// `options` of mmdebstrap(1) add.
pub fn bootstrap(
    children: &ChildPrograms,
    release: &DebianRelease,
    place: &Path,
    options: &[OsString],
) -> Result<PathBuf> {
    let root = place.join("root");
    println!("creating a root of {} in {}", release.name(), root.display());
    let (sources, settings) = (place.join("sources.list"), place.join("apt.conf"));
    fs::write(&sources, release.sources())?;
    fs::write(&settings, release.settings())?;
    let mut make = in_namespaces("mmdebstrap");
    make.args(["--quiet", "--mode=root", "--variant=minbase"]).args(options);
    make.arg(format!("--aptopt={}", settings.display())).arg(release.name());
    children.show(make.arg(&root).arg(sources))?;
    Ok(root)
}

/// A command in namespaces of its own.
fn in_namespaces(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).arg("--").arg(program);
    command
}

/// A system in a directory, which is removed when this value is dropped.
pub struct MinimalRoot {
    place: TempDir,
    toolchain: PathBuf,
    registry: Option<PathBuf>,
}

/// A temporary directory that other users may search, because apt downloads as another user.
pub fn place(parent: &Path) -> Result<TempDir> {
    let place = tempfile::Builder::new().prefix("defuse-fresh-").tempdir_in(parent);
    let place = place.with_context(|| parent.display().to_string())?;
    fs::set_permissions(place.path(), Permissions::from_mode(0o755))?;
    Ok(place)
}

impl MinimalRoot {
    /// Creates a root below `parent` with the essential packages and `packages`, and clones the
    /// project into it.
    pub fn make(
        children: &ChildPrograms,
        release: &DebianRelease,
        parent: &Path,
        packages: &str,
    ) -> Result<MinimalRoot> {
        let root =
            MinimalRoot { place: place(parent)?, toolchain: toolchain()?, registry: registry() };
        let includes = [format!("--include={packages}").into()];
        bootstrap(children, release, root.place.path(), &includes)?;
        root.connect()?;
        let mut clone = Command::new("git");
        clone.args(["clone", "--quiet", "--no-hardlinks"]).arg(command::root());
        children.show(clone.arg(root.dir().join("root/defuse")))?;
        Ok(root)
    }

    /// Runs a command of the project in the root.
    pub fn xtask(&self, children: &ChildPrograms, words: &[&str]) -> Result<()> {
        self.run(children, &[&["cargo", "xtask"], words].concat())
    }

    /// Runs a command in the root, in the directory of the project.
    pub fn run(&self, children: &ChildPrograms, words: &[&str]) -> Result<()> {
        let mut command = in_namespaces("sh");
        command.args(["-c", ENTER, "enter"]).arg(self.dir()).arg(&self.toolchain);
        command.arg(self.registry.clone().unwrap_or_default()).arg(self.path("downloads"));
        command.args(words);
        command.env_clear().envs(self.environment());
        children.show(&mut command)
    }

    /// Removes the root. Dropping does the same but ignores errors.
    pub fn remove(self) -> Result<()> {
        let dir = self.place.path().display().to_string();
        self.place.close().context(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The directory that is the root of the system.
    pub fn dir(&self) -> PathBuf {
        self.path("root")
    }

    /// Sets up network access as on this machine: host names, certificates, and cargo's registry.
    fn connect(&self) -> Result<()> {
        let copy = |from: &Path, to: &str| -> Result<()> {
            let to = self.dir().join(to.trim_start_matches('/'));
            if let (true, Some(parent)) = (from.exists(), to.parent()) {
                fs::create_dir_all(parent)?;
                // A package may have put a link to another place here.
                let _ = fs::remove_file(&to);
                fs::copy(from, &to).with_context(|| from.display().to_string())?;
            }
            Ok(())
        };
        copy(Path::new("/etc/resolv.conf"), "/etc/resolv.conf")?;
        copy(Path::new("/etc/hosts"), "/etc/hosts")?;
        copy(Path::new(CERTIFICATES), OUR_CERTIFICATES)?;
        let config = cargo_home().map(|home| home.join("config.toml"));
        config.map_or(Ok(()), |config| copy(&config, "/root/.cargo/config.toml"))
    }

    /// The environment of a login, the network settings, and `CI`, because no test may be left out
    /// here.
    fn environment(&self) -> Vec<(OsString, OsString)> {
        let path = "/opt/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let own = [("PATH", path), ("HOME", "/root"), ("LANG", "C.UTF-8"), ("CI", "1")];
        let mut all: Vec<(OsString, OsString)> =
            own.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        if self.dir().join(OUR_CERTIFICATES.trim_start_matches('/')).exists() {
            for name in ["SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"] {
                all.push((name.into(), OUR_CERTIFICATES.into()));
            }
        }
        all.extend(
            std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_network)),
        );
        all
    }
}

/// True for a variable with network settings. None of them is a secret.
fn is_of_network(name: &str) -> bool {
    let starts = ["CARGO_HTTP_", "CARGO_NET_", "CARGO_SOURCE_"];
    let proxy = name.to_ascii_lowercase().ends_with("_proxy");
    (proxy || starts.iter().any(|start| name.starts_with(start))) && !name.ends_with("TOKEN")
}

/// The directory of the Rust toolchain.
fn toolchain() -> Result<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut rustc = Command::new(rustc);
    let said = command::output(rustc.args(["--print", "sysroot"]).current_dir(command::root()))?;
    Ok(said.trim().into())
}

fn cargo_home() -> Option<PathBuf> {
    let named = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    named.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")))
}

/// The crates that cargo has downloaded on this machine.
fn registry() -> Option<PathBuf> {
    cargo_home().map(|home| home.join("registry")).filter(|registry| registry.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_variables_are_passed_on_and_secrets_are_not() {
        for name in ["http_proxy", "HTTPS_PROXY", "no_proxy", "CARGO_NET_OFFLINE"] {
            assert!(is_of_network(name), "{name}");
        }
        for name in ["HOME", "CARGO_REGISTRY_TOKEN", "CARGO_HTTP_TOKEN", "SSH_AUTH_SOCK"] {
            assert!(!is_of_network(name), "{name}");
        }
    }

    /// A root has several gigabytes, and users press Ctrl-C.
    #[test]
    fn a_place_is_gone_when_it_is_dropped() {
        let place = place(&std::env::temp_dir()).unwrap();
        let dir = place.path().to_owned();
        assert!(dir.is_dir());
        drop(place);
        assert!(!dir.exists());
    }
}
