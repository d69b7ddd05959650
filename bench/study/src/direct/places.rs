//! The setup of the measurement: file systems, mounts of them, and a worker for each target.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use defuse_measure::command::{self, find_own_program};
use rustix::mount::UnmountFlags;

use super::DirectOptions;
use super::results::{DirectStudyTarget, LowerFileSystem};
use super::workers::WorkerProcess;
use crate::check::StudyDirectory;
use crate::device::StudyDevice;
use crate::mount::{MountPaths, StudyMount};
use crate::options::{ConfigKind, StudyConfig};

/// The lower file system itself.
pub const NATIVE: &str = "native";
/// `defuse mount -o direct_io`.
pub const MOUNT: &str = "mount";
/// passthrough_hp.
pub const LIBFUSE: &str = "libfuse";
/// `defuse run` without options.
pub const DIRECT: &str = "direct";
/// `defuse run` where the client serves every call.
pub const SERVED: &str = "served";
/// `defuse run` with `memory:`.
pub const MEMORY: &str = "memory";
/// The client as a library, on a passthrough.
pub const CLIENT: &str = "client";
/// The client as a library, on a file system that does nothing.
pub const DUMMY: &str = "dummy";

/// Prefix of the directory, before the process id.
pub const WORK_PREFIX: &str = "defuse-bench-direct-";
/// The directory of programs compiled by `defuse-bench`, beside the program.
const PEERS: &str = "peers";
/// The mount under which workers within a run find the files.
const NAME: &str = "direct:";

/// Targets that alternate.
pub type TargetGroup = Vec<TargetWorker>;

/// A target and its worker.
#[derive(Debug)]
pub struct TargetWorker {
    /// Its name.
    pub target: &'static str,
    /// The worker that makes the calls.
    pub worker: WorkerProcess,
    /// The mount whose requests are counted, by its index in [`DirectSetup::mounts`].
    pub mount: Option<usize>,
}

/// The whole setup. Fields are dropped in this order: users before what they use.
#[derive(Debug)]
pub struct DirectSetup {
    /// Targets over tmpfs.
    pub tmpfs: TargetGroup,
    /// Targets over ext4.
    pub ext4: TargetGroup,
    /// tmpfs and `memory:`.
    pub memory: TargetGroup,
    /// The client on a passthrough, and on a file system that does nothing.
    pub client: TargetGroup,
    /// The mounts.
    pub mounts: Vec<StudyMount>,
    device: StudyDevice,
    ram: TmpfsMount,
    _work: StudyDirectory,
}

impl DirectSetup {
    /// Creates, mounts and starts everything.
    pub fn set(options: &DirectOptions, libfuse: Option<&Path>) -> Result<DirectSetup> {
        let work = StudyDirectory::create_named(&options.work, WORK_PREFIX)?;
        let mut device = StudyDevice::create(work.path(), image_bytes(options), 1024)?;
        device.format()?;
        let ram = TmpfsMount::mount(&work.path().join("tmpfs"), ram_bytes(options))?;
        let mut stage = DirectSetup {
            tmpfs: Vec::new(),
            ext4: Vec::new(),
            memory: Vec::new(),
            client: Vec::new(),
            mounts: Vec::new(),
            device,
            ram,
            _work: work,
        };
        stage.start(options, libfuse)?;
        Ok(stage)
    }

    fn start(&mut self, options: &DirectOptions, libfuse: Option<&Path>) -> Result<()> {
        let build = WorkerStarter { program: &options.program, work: self._work.path() };
        for lower in [LowerFileSystem::Tmpfs, LowerFileSystem::Ext4] {
            let data = self.data(lower);
            fs::create_dir(&data)?;
            let mut group = vec![build.native(&data, lower.name())?];
            group.push(build.add_mounted(
                MOUNT,
                &own_configuration(),
                &data,
                lower,
                &mut self.mounts,
            )?);
            if let (LowerFileSystem::Tmpfs, Some(program)) = (lower, libfuse) {
                let config = libfuse_configuration(program);
                group.push(build.add_mounted(LIBFUSE, &config, &data, lower, &mut self.mounts)?);
            }
            group.push(build.start_in_run(DIRECT, lower.name(), &[], &passthrough(&data, ""))?);
            let served = passthrough(&data, ",backing=off");
            group.push(build.start_in_run(SERVED, lower.name(), &[], &served)?);
            *if lower == LowerFileSystem::Tmpfs { &mut self.tmpfs } else { &mut self.ext4 } = group;
        }
        let data = self.data(LowerFileSystem::Tmpfs);
        self.memory = vec![
            build.native(&data, MEMORY)?,
            build.start_in_run(MEMORY, MEMORY, &["--fork", "deny"], OsStr::new("memory:"))?,
        ];
        self.client = vec![
            build.client(CLIENT, &passthrough(&data, ""))?,
            build.client(DUMMY, OsStr::new(DUMMY))?,
        ];
        Ok(())
    }

    /// The directory of the files on a lower file system.
    pub fn data(&self, lower: LowerFileSystem) -> PathBuf {
        match lower {
            LowerFileSystem::Tmpfs => self.ram.0.join("data"),
            LowerFileSystem::Ext4 => self.device.mountpoint().join("data"),
        }
    }
}

/// Descriptions of all targets.
pub fn targets(libfuse: Option<&Path>) -> Vec<DirectStudyTarget> {
    let target = |name: &str, how: String| DirectStudyTarget { name: name.to_owned(), how };
    let mut targets = vec![
        target(NATIVE, "the file system itself".into()),
        target(
            MOUNT,
            "defuse mount -o direct_io passthrough:, so that no page cache answers".into(),
        ),
    ];
    targets.extend(libfuse.map(|program| {
        let how = "--nocache, its file opened with O_DIRECT for the same reason";
        target(LIBFUSE, format!("{} {how}", program.display()))
    }));
    targets.extend([
        target(DIRECT, "defuse run --mount direct:=passthrough:, the program unchanged".into()),
        target(SERVED, "the same with backing=off: every call is served by the client".into()),
        target(MEMORY, "defuse run --fork deny --mount direct:=memory:".into()),
        target(CLIENT, "the client as a library, on passthrough over tmpfs".into()),
        target(DUMMY, "the client as a library, on a file system that returns at once".into()),
    ]);
    targets
}

/// Size of the image with ext4.
pub fn image_bytes(options: &DirectOptions) -> u64 {
    8 * options.scale.file_bytes + (64 << 20)
}

/// Size of the files in memory, of which only one is large at a time.
pub fn ram_bytes(options: &DirectOptions) -> u64 {
    options.scale.largest_file() + 10 * options.scale.file_bytes + (16 << 20)
}

/// The path of libfuse's program: from the options, or as compiled by `defuse-bench`.
pub fn find_libfuse(options: &DirectOptions) -> Result<Option<PathBuf>> {
    if let Some(path) = &options.libfuse {
        ensure!(
            path.is_file(),
            "--libfuse {}: there is no such program: name a passthrough_hp",
            path.display()
        );
        return Ok(Some(std::path::absolute(path)?));
    }
    let peers = options.program.parent().map(|dir| dir.join(PEERS));
    let dirs = peers.and_then(|peers| fs::read_dir(peers).ok()).into_iter().flatten().flatten();
    let programs = dirs.map(|dir| dir.path().join("passthrough_hp"));
    Ok(programs.into_iter().find(|program| program.is_file()))
}

/// Starts workers.
struct WorkerStarter<'a> {
    program: &'a Path,
    work: &'a Path,
}

impl WorkerStarter<'_> {
    fn member(
        &self,
        target: &'static str,
        name: &str,
        words: Vec<OsString>,
        mount: Option<usize>,
    ) -> Result<TargetWorker> {
        let worker = WorkerProcess::start(&format!("{target}-{name}"), &words, self.work)?;
        Ok(TargetWorker { target, worker, mount })
    }

    fn worker(&self, file: &Path, more: &[&str]) -> Result<Vec<OsString>> {
        let own = find_own_program()?.into_os_string();
        let mut words = vec![own, "bench-worker".into(), "--file".into(), file.into()];
        words.extend(more.iter().map(OsString::from));
        Ok(words)
    }

    fn native(&self, data: &Path, name: &str) -> Result<TargetWorker> {
        let words = self.worker(&data.join(format!("{NATIVE}-{name}")), &[])?;
        self.member(NATIVE, name, words, None)
    }

    fn add_mounted(
        &self,
        target: &'static str,
        config: &StudyConfig,
        data: &Path,
        lower: LowerFileSystem,
        mounts: &mut Vec<StudyMount>,
    ) -> Result<TargetWorker> {
        let mountpoint = self.work.join(format!("{target}-{}", lower.name()));
        let place = MountPaths {
            source: data,
            mountpoint: &mountpoint,
            program: self.program,
            work: self.work,
            groups: &[],
        };
        let mount = StudyMount::start(config, &place)
            .with_context(|| format!("{target} on {}", lower.name()))?;
        let mount = mount.context("nothing was mounted")?;
        let pid = mount.pid().to_string();
        mounts.push(mount);
        let mut more = vec!["--server", &pid];
        if target == LIBFUSE {
            more.push("--o-direct");
        }
        let words = self.worker(&mountpoint.join(target), &more)?;
        self.member(target, lower.name(), words, Some(mounts.len() - 1))
    }

    /// A worker within a run. Its parent is the run, which must stay idle.
    fn start_in_run(
        &self,
        target: &'static str,
        name: &str,
        how: &[&str],
        source: &OsStr,
    ) -> Result<TargetWorker> {
        let mut mount = OsString::from(format!("{NAME}="));
        mount.push(source);
        let mut words: Vec<OsString> = vec![self.program.into(), "run".into()];
        words.extend(how.iter().map(OsString::from));
        words.extend(["--mount".into(), mount, "--".into()]);
        let file = PathBuf::from(format!("{NAME}/{target}"));
        words.extend(self.worker(&file, &["--server-is-parent"])?);
        self.member(target, name, words, None)
    }

    fn client(&self, target: &'static str, source: &OsStr) -> Result<TargetWorker> {
        let mut words = self.worker(Path::new(&format!("/{target}")), &[])?;
        words.extend(["--client".into(), source.into()]);
        self.member(target, "library", words, None)
    }
}

fn own_configuration() -> StudyConfig {
    let words = ["-o", "direct_io"].map(str::to_owned).to_vec();
    StudyConfig { name: MOUNT.into(), kind: ConfigKind::Defuse(words) }
}

fn libfuse_configuration(program: &Path) -> StudyConfig {
    let words =
        [&*program.to_string_lossy(), "--foreground", "--nocache", "{source}", "{mountpoint}"];
    StudyConfig {
        name: LIBFUSE.into(),
        kind: ConfigKind::Command(words.map(str::to_owned).to_vec()),
    }
}

/// A source with options. Commas in a directory name are escaped.
fn passthrough(data: &Path, options: &str) -> OsString {
    let dir = data.to_string_lossy().replace('\\', "\\\\").replace(',', "\\,");
    format!("passthrough:{dir}{options}").into()
}

/// A new tmpfs; unmounted when dropped.
#[derive(Debug)]
struct TmpfsMount(PathBuf);

impl TmpfsMount {
    fn mount(dir: &Path, bytes: u64) -> Result<TmpfsMount> {
        fs::create_dir(dir)?;
        let size = format!("size={bytes}");
        let dir_text = dir.to_string_lossy();
        command::output("mount", &["-t", "tmpfs", "-o", &size, "defuse-bench", &dir_text])?;
        Ok(TmpfsMount(dir.to_owned()))
    }
}

impl Drop for TmpfsMount {
    fn drop(&mut self) {
        if rustix::mount::unmount(&self.0, UnmountFlags::empty()).is_err() {
            let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_a_directory_name_are_escaped() {
        assert_eq!(
            passthrough(Path::new("/a,b"), ",backing=off"),
            "passthrough:/a\\,b,backing=off"
        );
    }

    #[test]
    fn a_given_libfuse_program_must_exist() {
        let options = DirectOptions {
            scale: super::super::DirectScale::tiny(),
            rounds: 1,
            work: "/tmp".into(),
            libfuse: Some("/no/such/passthrough_hp".into()),
            program: "/no/such/defuse".into(),
        };
        let error = find_libfuse(&options).unwrap_err().to_string();
        assert!(
            error.contains("/no/such/passthrough_hp") && error.contains("--libfuse"),
            "{error}"
        );
        assert_eq!(find_libfuse(&DirectOptions { libfuse: None, ..options }).unwrap(), None);
    }
}
