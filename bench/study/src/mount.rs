//! A mount of one configuration, made by running the program that mounts, as a user would.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use defuse_measure::{caches, command};
use defuse_probe::Snapshot;
use rustix::mount::UnmountFlags;

use crate::options::{Config, Kind};
use crate::process::{Process, Start};

/// How long mounting may take.
const MOUNT_PATIENCE: Duration = Duration::from_secs(15);
/// How long a daemon may write after the unmount.
const END_PATIENCE: Duration = Duration::from_secs(120);

/// Where and how to mount.
#[derive(Debug)]
pub struct Place<'a> {
    /// The directory that is served.
    pub source: &'a Path,
    /// Where it is mounted; is made if it is not there.
    pub mountpoint: &'a Path,
    /// This program.
    pub program: &'a Path,
    /// For logs and sockets.
    pub work: &'a Path,
    /// The control groups of the daemon.
    pub groups: &'a [PathBuf],
}

/// Something mounted; unmounted and ended when dropped.
#[derive(Debug)]
pub struct Mount {
    mountpoint: PathBuf,
    work: PathBuf,
    program: PathBuf,
    daemon: Process,
    ours: bool,
    is_mounted: bool,
}

impl Mount {
    /// Mounts; `None` for the native directory, which needs no mount.
    pub fn start(config: &Config, place: &Place<'_>) -> Result<Option<Mount>> {
        let Some(words) = command_line(config, place) else { return Ok(None) };
        fs::create_dir_all(place.mountpoint)?;
        let log = place.work.join(format!("{}.log", config.name));
        let runtime = place.work.join("run");
        // Daemons trust no directory that others may write.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&runtime)?;
        let start = Start {
            name: &config.name,
            words: &words,
            groups: place.groups,
            log: &log,
            output: None,
            env: &[("DEFUSE_RUNTIME_DIR", runtime.into_os_string())],
            dir: None,
        };
        let mut mount = Mount {
            mountpoint: place.mountpoint.to_owned(),
            work: place.work.to_owned(),
            program: place.program.to_owned(),
            daemon: Process::start(&start)?,
            ours: matches!(config.kind, Kind::Defuse(_)),
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
                // Ours answers questions a moment after it is mounted.
                let socket = self.work.join(format!("run/{connection}.sock"));
                if !self.ours || socket.exists() {
                    return Ok(());
                }
            }
            match self.daemon.ended() {
                // One that goes into the background may mount just before it ends.
                Some(status) if status.success() && connection(&self.mountpoint).is_some() => {
                    continue;
                }
                Some(status) => bail!(
                    "it ended with {status} and mounted nothing; it said: {}",
                    self.daemon.said()
                ),
                None => sleep(Duration::from_millis(2)),
            }
        }
        bail!("nothing was mounted within {MOUNT_PATIENCE:?}; it said: {}", self.daemon.said())
    }

    /// The number of the connection, as in `/sys/fs/fuse/connections`.
    pub fn connection(&self) -> Option<u32> {
        connection(&self.mountpoint)
    }

    /// The process that was started.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// What the daemon has measured; `None` for other people's. What the last close sets off is waited for.
    pub fn snapshot(&self) -> Result<Option<Snapshot>> {
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
            command::output("env", &words).context("the daemon's statistics cannot be had")?;
        Ok(Some(serde_json::from_str(&text).context("the daemon's statistics are not understood")?))
    }

    /// Unmounts, and waits until the daemon has ended.
    pub fn end(mut self) -> Result<()> {
        self.unmount();
        let waited = self.daemon.wait(END_PATIENCE, &Default::default());
        waited
            .map(drop)
            .with_context(|| format!("the daemon on {} stays", self.mountpoint.display()))
    }

    fn unmount(&mut self) {
        if !std::mem::take(&mut self.is_mounted) {
            return;
        }
        // A file that is just being released makes the first attempts fail.
        for _ in 0..100 {
            let outcome = rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty());
            if outcome != Err(rustix::io::Errno::BUSY) {
                break;
            }
            sleep(Duration::from_millis(20));
        }
        if let Some(connection) = connection(&self.mountpoint) {
            // Whoever is stuck in there is freed by the abort.
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

impl Drop for Mount {
    fn drop(&mut self) {
        self.unmount();
        let end = Instant::now() + Duration::from_secs(10);
        while self.daemon.ended().is_none() && Instant::now() < end {
            sleep(Duration::from_millis(10));
        }
    }
}

/// The command that mounts, with its places filled in.
fn command_line(config: &Config, place: &Place<'_>) -> Option<Vec<OsString>> {
    match &config.kind {
        Kind::Native => None,
        Kind::Defuse(arguments) => {
            let mut source = OsString::from("passthrough:");
            source.push(place.source);
            let mut words = vec![place.program.into(), "mount".into(), "--foreground".into()];
            words.extend(arguments.iter().map(OsString::from));
            words.extend(["--".into(), source, place.mountpoint.into()]);
            Some(words)
        }
        Kind::Command(words) => {
            let (source, mountpoint) =
                (place.source.to_string_lossy(), place.mountpoint.to_string_lossy());
            let fill = |word: &String| {
                word.replace("{source}", &source).replace("{mountpoint}", &mountpoint)
            };
            Some(words.iter().map(|word| fill(word).into()).collect())
        }
    }
}

/// The minor number of what is mounted there, which for FUSE is the number of the connection; `None` where nothing is.
fn connection(mountpoint: &Path) -> Option<u32> {
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
    fn other_programs_get_the_directories() {
        let config = Config::custom("x=bindfs -f --opt={source} {mountpoint}").unwrap();
        let place = Place {
            source: Path::new("/s p"),
            mountpoint: Path::new("/m"),
            program: Path::new("/defuse"),
            work: Path::new("/w"),
            groups: &[],
        };
        let words = command_line(&config, &place).unwrap();
        assert_eq!(words, ["bindfs", "-f", "--opt=/s p", "/m"].map(OsString::from));
        let ours = command_line(&Config::named("base").unwrap(), &place).unwrap();
        assert_eq!(ours[..3], ["/defuse", "mount", "--foreground"].map(OsString::from));
        assert_eq!(ours[ours.len() - 2..], ["passthrough:/s p", "/m"].map(OsString::from));
    }
}
