//! A mount of one configuration, created by running the mounting program, as a user would.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use defuse_measure::{caches, command};
use defuse_probe::StatsSnapshot;
use rustix::mount::UnmountFlags;

use crate::options::{ConfigKind, StudyConfig};
use crate::process::{ChildProcess, ProcessStart};

/// Time limit for mounting.
const MOUNT_PATIENCE: Duration = Duration::from_secs(15);
/// Time limit for a daemon to write back after the unmount.
const END_PATIENCE: Duration = Duration::from_secs(120);

/// The paths of a mount.
#[derive(Debug)]
pub struct MountPaths<'a> {
    /// The served directory.
    pub source: &'a Path,
    /// The mount point, which is created if it does not exist.
    pub mountpoint: &'a Path,
    /// The path of this program.
    pub program: &'a Path,
    /// Directory for logs and sockets.
    pub work: &'a Path,
    /// The control groups of the daemon.
    pub groups: &'a [PathBuf],
}

/// A mount. Dropping it unmounts and stops the daemon.
#[derive(Debug)]
pub struct StudyMount {
    mountpoint: PathBuf,
    work: PathBuf,
    program: PathBuf,
    daemon: ChildProcess,
    ours: bool,
    is_mounted: bool,
}

impl StudyMount {
    /// Mounts. Returns `None` for the native directory, which needs no mount.
    pub fn start(config: &StudyConfig, place: &MountPaths<'_>) -> Result<Option<StudyMount>> {
        let Some(words) = command_line(config, place) else { return Ok(None) };
        fs::create_dir_all(place.mountpoint)?;
        let log = place.work.join(format!("{}.log", config.name));
        let runtime = place.work.join("run");
        // Daemons refuse a directory that others can write to.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&runtime)?;
        let start = ProcessStart {
            name: &config.name,
            words: &words,
            groups: place.groups,
            log: &log,
            output: None,
            env: &[("DEFUSE_RUNTIME_DIR", runtime.into_os_string())],
            dir: None,
        };
        let mut mount = StudyMount {
            mountpoint: place.mountpoint.to_owned(),
            work: place.work.to_owned(),
            program: place.program.to_owned(),
            daemon: ChildProcess::start(&start)?,
            ours: matches!(config.kind, ConfigKind::Defuse(_)),
            is_mounted: false,
        };
        mount.wait_until_mounted()?;
        Ok(Some(mount))
    }

    fn wait_until_mounted(&mut self) -> Result<()> {
        let end = Instant::now() + MOUNT_PATIENCE;
        while Instant::now() < end {
            if let Some(connection) = connection(&self.mountpoint) {
                self.is_mounted = true;
                // The control socket of defuse appears shortly after the mount.
                let socket = self.work.join(format!("run/{connection}.sock"));
                if !self.ours || socket.exists() {
                    return Ok(());
                }
            }
            match self.daemon.exit_status() {
                // A program that daemonizes may exit just after it has mounted.
                Some(status) if status.success() && connection(&self.mountpoint).is_some() => {
                    continue;
                }
                Some(status) => bail!(
                    "it ended with {status} and mounted nothing; its output: {}",
                    self.daemon.log_tail()
                ),
                None => sleep(Duration::from_millis(2)),
            }
        }
        bail!(
            "nothing was mounted within {MOUNT_PATIENCE:?}; its output: {}",
            self.daemon.log_tail()
        )
    }

    /// The number of the connection, as in `/sys/fs/fuse/connections`.
    pub fn connection(&self) -> Option<u32> {
        connection(&self.mountpoint)
    }

    /// The id of the started process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// The statistics of the daemon; `None` for other programs. Waits for the requests that the
    /// last close causes.
    pub fn snapshot(&self) -> Result<Option<StatsSnapshot>> {
        if !self.ours {
            return Ok(None);
        }
        caches::settle(&[self.pid()]);
        let runtime = format!("DEFUSE_RUNTIME_DIR={}", self.work.join("run").display());
        let words = [
            runtime.into(),
            self.program.clone().into_os_string(),
            "stat".into(),
            "--json".into(),
            self.mountpoint.clone().into_os_string(),
        ];
        let text =
            command::output("env", &words).context("the daemon's statistics cannot be read")?;
        Ok(Some(serde_json::from_str(&text).context("the daemon's statistics are invalid")?))
    }

    /// Unmounts, and waits until the daemon has exited.
    pub fn end(mut self) -> Result<()> {
        self.unmount();
        let waited = self.daemon.wait(END_PATIENCE, &Default::default());
        waited
            .map(drop)
            .with_context(|| format!("the daemon on {} does not exit", self.mountpoint.display()))
    }

    fn unmount(&mut self) {
        if !std::mem::take(&mut self.is_mounted) {
            return;
        }
        // A file that is still being released makes the first attempts fail.
        for _ in 0..100 {
            let outcome = rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty());
            if outcome != Err(rustix::io::Errno::BUSY) {
                break;
            }
            sleep(Duration::from_millis(20));
        }
        if let Some(connection) = connection(&self.mountpoint) {
            // The abort releases processes that wait for the mount.
            let _ = fs::write(format!("/sys/fs/fuse/connections/{connection}/abort"), "1");
            if rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH).is_err() {
                let _ = command::output(
                    "fusermount3",
                    &["-u".as_ref(), "-z".as_ref(), self.mountpoint.as_os_str()],
                );
            }
        }
    }
}

impl Drop for StudyMount {
    fn drop(&mut self) {
        self.unmount();
        let end = Instant::now() + Duration::from_secs(10);
        while self.daemon.exit_status().is_none() && Instant::now() < end {
            sleep(Duration::from_millis(10));
        }
    }
}

/// The command for mounting, with its paths filled in.
fn command_line(config: &StudyConfig, place: &MountPaths<'_>) -> Option<Vec<OsString>> {
    match &config.kind {
        ConfigKind::Native => None,
        ConfigKind::Defuse(arguments) => {
            let mut source = OsString::from("passthrough:");
            source.push(place.source);
            let mut words = vec![place.program.into(), "mount".into(), "--foreground".into()];
            words.extend(arguments.iter().map(OsString::from));
            words.extend(["--".into(), source, place.mountpoint.into()]);
            Some(words)
        }
        ConfigKind::Command(words) => {
            let (source, mountpoint) =
                (place.source.to_string_lossy(), place.mountpoint.to_string_lossy());
            let fill = |word: &String| {
                word.replace("{source}", &source).replace("{mountpoint}", &mountpoint)
            };
            Some(words.iter().map(|word| fill(word).into()).collect())
        }
    }
}

/// The device minor of the mount, which for FUSE is the connection number; `None` if nothing is
/// mounted.
pub(crate) fn connection(mountpoint: &Path) -> Option<u32> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    connection_in(&table, mountpoint)
}

fn connection_in(table: &str, mountpoint: &Path) -> Option<u32> {
    let wanted = mountpoint.to_string_lossy().replace('\\', "\\134").replace(' ', "\\040");
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == Some(wanted.as_str()))?;
    line.split(' ').nth(2)?.split_once(':')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_is_the_minor_number_of_the_topmost_mount() {
        let table =
            "36 35 0:41 / /m\\040x rw - fuse.a x rw\n37 35 0:42 / /m\\040x rw - fuse.b y rw\n";
        assert_eq!(connection_in(table, Path::new("/m x")), Some(42));
        assert_eq!(connection_in(table, Path::new("/m")), None);
    }

    #[test]
    fn other_programs_get_the_directories_as_arguments() {
        let config = StudyConfig::custom("x=bindfs -f --opt={source} {mountpoint}").unwrap();
        let place = MountPaths {
            source: Path::new("/s p"),
            mountpoint: Path::new("/m"),
            program: Path::new("/defuse"),
            work: Path::new("/w"),
            groups: &[],
        };
        let words = command_line(&config, &place).unwrap();
        assert_eq!(words, ["bindfs", "-f", "--opt=/s p", "/m"].map(OsString::from));
        let ours = command_line(&StudyConfig::from_name("base").unwrap(), &place).unwrap();
        assert_eq!(ours[..3], ["/defuse", "mount", "--foreground"].map(OsString::from));
        assert_eq!(ours[ours.len() - 2..], ["passthrough:/s p", "/m"].map(OsString::from));
    }
}
