//! Checks the requirements before the start, and removes the remains of killed studies.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::command;
use rustix::mount::UnmountFlags;

use crate::cell::GROUP_PREFIX;
use crate::cgroup::{self, CgroupHierarchies};
use crate::options::{ConfigKind, DeviceChoice, StudyOptions};
use crate::sizes::StudyEstimate;

/// Prefix of the directory of a study, before the process id.
const WORK_PREFIX: &str = "defuse-study-";
const MIB: u64 = 1 << 20;

/// Refuses options that cannot work. Nothing has been created by then.
pub fn check_options(
    options: &StudyOptions,
    estimate: &StudyEstimate,
    hierarchies: &CgroupHierarchies,
) -> Result<()> {
    can_make_and_mount()?;
    ensure!(
        !options.rows.is_empty() && !options.configs.is_empty(),
        "nothing to measure: name rows and configurations"
    );
    ensure!(options.runs != Some(0), "--runs 0 measures nothing: write 1 or more");
    for config in &options.configs {
        if let ConfigKind::Command(words) = &config.kind {
            let program = &words[0];
            ensure!(
                find(program),
                "--config {}: {program} is missing: install it, or name it with its path",
                config.name
            );
        }
    }
    if let DeviceChoice::Emulated(media) = options.device {
        ensure!(
            hierarchies.throttle_version().is_some(),
            "an emulated {} needs the block control group (blkio or io), which is missing: use --device none",
            media.name()
        );
    }
    space(&options.work, estimate.image_bytes, "--work")?;
    fs::create_dir_all(&options.out).with_context(|| {
        format!("cannot create {}: name another with --out", options.out.display())
    })?;
    space(&options.out, 64 * MIB, "--out")
}

/// Checks that a directory has enough space.
pub fn space(dir: &Path, bytes: u64, option: &str) -> Result<()> {
    let stat = rustix::fs::statvfs(dir).with_context(|| {
        format!("{} cannot be used: name another directory with {option}", dir.display())
    })?;
    let free = stat.f_bavail * stat.f_frsize;
    if free < bytes {
        bail!(
            "{} has {} MiB free, and {} MiB are needed: name another directory with {option}, or use a smaller --scale",
            dir.display(),
            free / MIB,
            bytes.div_ceil(MIB)
        );
    }
    Ok(())
}

/// Checks the requirements for creating and mounting file systems.
pub fn can_make_and_mount() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "root is needed to make file systems, mount them, and drop caches: run it with sudo"
    );
    for (program, package) in [("mkfs.ext4", "e2fsprogs"), ("losetup", "mount"), ("mount", "mount")]
    {
        ensure!(find(program), "{program} is missing: install the package {package}");
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        ensure!(
            crate::cell::can_open(Path::new(device)),
            "{device} cannot be opened: load the kernel module ({})",
            if device.contains("fuse") { "modprobe fuse" } else { "modprobe loop" }
        );
    }
    Ok(())
}

/// True if a program exists, by its path or in `PATH`. The sbin directories are always searched.
fn find(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(extra).any(|dir| dir.join(program).is_file())
}

/// Type of the file system of a directory, such as `ext4`.
pub fn file_system_of(dir: &Path) -> String {
    let words = ["-n".as_ref(), "-o".as_ref(), "FSTYPE".as_ref(), "-T".as_ref(), dir.as_os_str()];
    let shown = command::output("findmnt", &words).unwrap_or_default();
    // findmnt prints one line for each mount there; the last is on top.
    shown.lines().last().map_or_else(|| "unknown".into(), |line| line.trim().to_owned())
}

/// Removes the remains of a study whose process was killed: mounts, image, control groups. Returns
/// their paths.
pub fn clear_left_behind(work: &Path, hierarchies: &CgroupHierarchies) -> Vec<PathBuf> {
    let mut removed = cgroup::find_left_groups(hierarchies, GROUP_PREFIX, is_alive);
    for folder in &removed {
        cgroup::remove(folder);
    }
    removed.extend(clear_directories(work, WORK_PREFIX));
    removed
}

/// Removes directories whose name is `prefix` and the id of a process that is gone, including
/// mounts in them. Returns their paths.
pub fn clear_directories(work: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(work).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(prefix).and_then(|rest| rest.parse().ok());
        if pid.is_some_and(|pid| !is_alive(pid)) {
            for mountpoint in mounts_below(&entry.path()) {
                let _ = rustix::mount::unmount(mountpoint, UnmountFlags::DETACH);
            }
            if fs::remove_dir_all(entry.path()).is_ok() {
                removed.push(entry.path());
            }
        }
    }
    removed
}

/// The mounts below a directory, the latest first.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(|point| PathBuf::from(point.replace("\\040", " ")));
    let mut points: Vec<PathBuf> = points.filter(|point| point.starts_with(&dir)).collect();
    points.reverse();
    points
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The directory of this study, removed when dropped.
#[derive(Debug)]
pub struct StudyDirectory(PathBuf);

impl StudyDirectory {
    /// Creates the directory.
    pub fn create(parent: &Path) -> Result<StudyDirectory> {
        StudyDirectory::create_named(parent, WORK_PREFIX)
    }

    /// Creates a directory whose name is `prefix` and the id of this process.
    pub fn create_named(parent: &Path, prefix: &str) -> Result<StudyDirectory> {
        let dir = parent.join(format!("{prefix}{}", std::process::id()));
        fs::create_dir(&dir).with_context(|| {
            format!("cannot create {}: name another directory with --work", dir.display())
        })?;
        Ok(StudyDirectory(dir))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for StudyDirectory {
    fn drop(&mut self) {
        // If a mount could not be removed, do not delete files: they would be the user's.
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        if table.contains(&*self.0.to_string_lossy()) {
            eprintln!(
                "{} still has a mount below it and is not removed: see mount(8)",
                self.0.display()
            );
        } else if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{} could not be removed: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_names_the_directory_and_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let error = space(dir.path(), u64::MAX, "--work").unwrap_err().to_string();
        assert!(
            error.contains(&*dir.path().to_string_lossy()) && error.contains("--work"),
            "{error}"
        );
        assert!(space(dir.path(), 1, "--work").is_ok());
        assert!(
            space(Path::new("/no/such"), 1, "--work").unwrap_err().to_string().contains("--work")
        );
    }

    #[test]
    fn only_directories_of_ended_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // Process ids are below this number.
        let dead = dir.path().join(format!("{WORK_PREFIX}99999999"));
        let alive = dir.path().join(format!("{WORK_PREFIX}{}", std::process::id()));
        for place in [&dead, &alive] {
            fs::create_dir_all(place.join("run")).unwrap();
        }
        assert_eq!(
            clear_left_behind(dir.path(), &CgroupHierarchies::default()),
            std::slice::from_ref(&dead)
        );
        assert!(!dead.exists() && alive.exists());
    }

    #[test]
    fn programs_are_found() {
        assert!(
            find("sh")
                && find("/bin/sh")
                && !find("no-such-program")
                && !find("/bin/no-such-program")
        );
    }
}
