//! A target: a server of the directory, started for the run and stopped after it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::mount::UnmountFlags;

/// Time limit for a daemon to mount, and to exit after the unmount.
const PATIENCE: Duration = Duration::from_secs(10);

/// The role of a target. The verdict compares ours with the better peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetRole {
    /// The directory itself.
    Native,
    /// A competitor.
    Peer,
    /// defuse.
    Ours,
}

/// Describes how to start a target.
#[derive(Debug, Clone)]
pub struct TargetSpec {
    /// Name in the report.
    pub name: String,
    /// The role.
    pub role: TargetRole,
    /// Program and arguments that stay in the foreground; `None` for the native directory.
    /// [`SOURCE`] and [`MOUNT`] are replaced by the directory and the mount point.
    pub command: Option<Vec<OsString>>,
    /// The exact version, for the report.
    pub version: String,
}

/// Placeholder for the served directory, alone or at the end of an argument.
pub const SOURCE: &str = "{source}";
/// Placeholder for the mount point in a command.
pub const MOUNT: &str = "{mount}";

/// A running target. It is unmounted and stopped when dropped, even during a panic.
#[derive(Debug)]
pub struct BenchmarkTarget {
    /// The specification of the target.
    pub spec: TargetSpec,
    /// The path of the served directory on this target.
    pub root: PathBuf,
    daemon: Option<Child>,
}

impl BenchmarkTarget {
    /// Starts `spec` over `source`, mounts it below `work`, and waits until it is mounted.
    pub fn start(spec: TargetSpec, source: &Path, work: &Path) -> Result<Self> {
        let Some(command) = &spec.command else {
            return Ok(Self { spec, root: source.to_owned(), daemon: None });
        };
        let root = work.join(format!("mnt-{}", spec.name));
        fs::create_dir(&root)?;
        let words: Vec<_> = command.iter().map(|word| fill_in(word, source, &root)).collect();
        let log = fs::File::create(work.join(format!("{}.log", spec.name)))?;
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn_in_own_group()
            .with_context(|| format!("{} could not be started", words[0].to_string_lossy()))?;
        let name = spec.name.clone();
        let mut target = Self { spec, root, daemon: Some(child) };
        target.wait_until_mounted().with_context(|| {
            let said = fs::read_to_string(work.join(format!("{name}.log"))).unwrap_or_default();
            format!("target {name} did not mount; its output: {}", said.trim())
        })?;
        Ok(target)
    }

    /// The process id of the daemon, if the target has one.
    pub fn pid(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    fn wait_until_mounted(&mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if is_mounted(&self.root) {
                return Ok(());
            }
            if let Some(status) = self.daemon.as_mut().and_then(|child| child.try_wait().ok()?) {
                bail!("it ended with {status}");
            }
            sleep(Duration::from_millis(10));
        }
        bail!("nothing was mounted on {} in {PATIENCE:?}", self.root.display())
    }
}

impl Drop for BenchmarkTarget {
    fn drop(&mut self) {
        let Some(daemon) = &mut self.daemon else { return };
        // A file that is still being released makes the first attempts fail.
        for _ in 0..50 {
            if rustix::mount::unmount(&self.root, UnmountFlags::empty()).is_ok()
                || !is_mounted(&self.root)
            {
                break;
            }
            sleep(Duration::from_millis(20));
        }
        if is_mounted(&self.root) {
            let _ = rustix::mount::unmount(&self.root, UnmountFlags::DETACH);
        }
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if !matches!(daemon.try_wait(), Ok(None)) {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        eprintln!("{}: still there {PATIENCE:?} after the unmount, killed", self.spec.name);
        let _ = daemon.kill();
        let _ = daemon.wait();
    }
}

/// Starts a daemon in its own process group, so that Ctrl-C reaches only the benchmark, which stops
/// the daemons in order.
trait SpawnInOwnGroup {
    fn spawn_in_own_group(&mut self) -> std::io::Result<Child>;
}

impl SpawnInOwnGroup for Command {
    fn spawn_in_own_group(&mut self) -> std::io::Result<Child> {
        std::os::unix::process::CommandExt::process_group(self, 0).spawn()
    }
}

fn fill_in(word: &OsString, source: &Path, mount: &Path) -> OsString {
    let Some(text) = word.to_str() else { return word.clone() };
    if text == MOUNT {
        return mount.into();
    }
    let Some(before) = text.strip_suffix(SOURCE) else { return word.clone() };
    let mut filled = OsString::from(before);
    filled.push(source);
    filled
}

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mountinfo_has(&table, path)
}

/// True if a mountinfo table has a mount on `path`: its fifth field, in which spaces are octal
/// escapes.
fn mountinfo_has(table: &str, path: &Path) -> bool {
    let wanted = path.to_string_lossy().replace(' ', "\\040");
    table.lines().any(|line| line.split(' ').nth(4) == Some(wanted.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_matched_by_its_mount_point() {
        let table = "36 35 98:0 / /mnt/a\\040b rw - fuse x rw\n37 35 0:1 / /mnt/c rw - ext4 y rw\n";
        assert!(mountinfo_has(table, Path::new("/mnt/a b")));
        assert!(mountinfo_has(table, Path::new("/mnt/c")));
        assert!(!mountinfo_has(table, Path::new("/mnt")));
    }

    #[test]
    fn commands_are_filled_in() {
        let (source, mount) = (Path::new("/s"), Path::new("/m"));
        let fill = |word: &str| fill_in(&word.into(), source, mount);
        assert_eq!(fill("passthrough:{source}"), "passthrough:/s");
        assert_eq!(fill("{mount}"), "/m");
        assert_eq!(fill("--foreground"), "--foreground");
    }
}
