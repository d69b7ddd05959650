//! The root of a system of its own: made, entered, and removed.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::release::Release;
use crate::children::Children;
use crate::command;

/// Makes namespaces the system's, and enters it.
const ENTER: &str = include_str!("enter.sh");

/// Namespaces of its own: what is mounted in them, and what runs in them, ends with the first process.
const NAMESPACES: [&str; 6] =
    ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc"];

/// The certificates that this machine trusts, where Debian has them.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Where they are in the root, which has some of its own.
const OUR_CERTIFICATES: &str = "/opt/certificates.crt";

/// A system in a directory, which is removed when this is dropped.
pub struct Root {
    place: TempDir,
    toolchain: PathBuf,
    registry: Option<PathBuf>,
}

/// A temporary directory that other users may enter: apt downloads as one.
pub fn place(parent: &Path) -> Result<TempDir> {
    let place = tempfile::Builder::new().prefix("defuse-fresh-").tempdir_in(parent);
    let place = place.with_context(|| parent.display().to_string())?;
    fs::set_permissions(place.path(), Permissions::from_mode(0o755))?;
    Ok(place)
}

impl Root {
    /// Makes one below `parent`, with the essential packages and `packages`, and clones the project into it.
    pub fn make(
        children: &Children,
        release: &Release,
        parent: &Path,
        packages: &str,
    ) -> Result<Root> {
        let root = Root { place: place(parent)?, toolchain: toolchain()?, registry: registry() };
        println!("making a root of {} in {}", release.name(), root.dir().display());
        let (sources, settings) = (root.path("sources.list"), root.path("apt.conf"));
        fs::write(&sources, release.sources())?;
        fs::write(&settings, release.settings())?;
        let mut make = root.in_namespaces("mmdebstrap");
        make.args(["--quiet", "--mode=root", "--variant=minbase"]);
        make.arg(format!("--include={packages}"));
        make.arg(format!("--aptopt={}", settings.display())).arg(release.name());
        children.show(make.arg(root.dir()).arg(sources))?;
        root.connect()?;
        let mut clone = Command::new("git");
        clone.args(["clone", "--quiet", "--no-hardlinks"]).arg(command::root());
        children.show(clone.arg(root.dir().join("root/defuse")))?;
        Ok(root)
    }

    /// Runs a command of the project in it.
    pub fn xtask(&self, children: &Children, words: &[&str]) -> Result<()> {
        let mut command = self.in_namespaces("sh");
        command.args(["-c", ENTER, "enter"]).arg(self.dir()).arg(&self.toolchain);
        command.arg(self.registry.clone().unwrap_or_default()).arg(self.path("downloads"));
        command.args(["cargo", "xtask"]).args(words);
        command.env_clear().envs(self.environment());
        children.show(&mut command)
    }

    /// Removes it. Dropping does the same, but tells nobody of a failure.
    pub fn remove(self) -> Result<()> {
        let dir = self.place.path().display().to_string();
        self.place.close().context(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn dir(&self) -> PathBuf {
        self.path("root")
    }

    fn in_namespaces(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(NAMESPACES).arg("--").arg(program);
        command
    }

    /// Gives it the network of this machine: names, certificates, and where cargo finds its registry.
    fn connect(&self) -> Result<()> {
        let copy = |from: &Path, to: &str| -> Result<()> {
            let to = self.dir().join(to.trim_start_matches('/'));
            if let (true, Some(parent)) = (from.exists(), to.parent()) {
                fs::create_dir_all(parent)?;
                // What a package put there may be a link to somewhere else.
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

    /// What a login has, the settings of the network, and `CI`: nothing may be left out here.
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

/// True for a variable that says how to reach the network. None of them is a secret.
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

/// What cargo has downloaded here.
fn registry() -> Option<PathBuf> {
    cargo_home().map(|home| home.join("registry")).filter(|registry| registry.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_s_variables_go_along_and_secrets_do_not() {
        for name in ["http_proxy", "HTTPS_PROXY", "no_proxy", "CARGO_NET_OFFLINE"] {
            assert!(is_of_network(name), "{name}");
        }
        for name in ["HOME", "CARGO_REGISTRY_TOKEN", "CARGO_HTTP_TOKEN", "SSH_AUTH_SOCK"] {
            assert!(!is_of_network(name), "{name}");
        }
    }

    /// A root is some gigabytes, and Ctrl-C is usual.
    #[test]
    fn a_place_is_gone_when_it_is_dropped() {
        let place = place(&std::env::temp_dir()).unwrap();
        let dir = place.path().to_owned();
        assert!(dir.is_dir());
        drop(place);
        assert!(!dir.exists());
    }
}
