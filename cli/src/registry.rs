//! The registry of mounts: one file for each daemon, in `/run/defuse` for root and in a private
//! directory for other users.
//!
//! A file has the number and the start time of its process, and is valid only while both are right.
//! So the file of a killed daemon does no harm.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use defuse_fuse::mount::{MountEntry, fuse_mounts};
use serde::{Deserialize, Serialize};

use crate::error::{CommandFailure, Result};
use crate::paths;

/// Overrides the directory, for tests and to separate daemons.
pub const DIR_VARIABLE: &str = "DEFUSE_RUNTIME_DIR";
const SYSTEM_DIR: &str = "/run/defuse";

/// A mount and its daemon. Paths are for display only, because they may not be UTF-8; the number of
/// the connection identifies a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistryEntry {
    /// The number of the FUSE connection, as in `/sys/fs/fuse/connections`.
    pub connection: u32,
    /// The process of the daemon.
    pub pid: u32,
    /// The start of the daemon, in clock ticks since boot. It distinguishes the daemon from a later
    /// process with the same number.
    pub pid_start: u64,
    /// The source.
    pub source: String,
    /// The mount point at the start.
    pub mountpoint: String,
    /// The type in `/proc/mounts`.
    pub fstype: String,
    /// The time of mounting, in seconds since 1970 UTC.
    pub since_unix: u64,
    /// The version of the daemon.
    pub version: String,
    /// The options as given.
    pub options: Vec<String>,
    /// The failure at the end of the mount, for `defuse umount`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The state of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RegistrationState {
    /// Mounted, and its daemon runs.
    Serving,
    /// The daemon runs, but the mount is detached, or in another namespace. Files are still open.
    Detached,
    /// Mounted, but the daemon has ended.
    Dead,
    /// Neither mounted nor served.
    Gone,
}

/// An entry with its state.
#[derive(Clone, Debug)]
pub struct RegisteredMount {
    /// The entry.
    pub entry: RegistryEntry,
    /// The state.
    pub state: RegistrationState,
    /// The path of the entry.
    pub file: PathBuf,
    /// The present mount point.
    pub mounted: Option<PathBuf>,
}

impl RegistryEntry {
    /// The entry of this process.
    pub fn for_this_process(connection: u32, source: String, mountpoint: &Path) -> RegistryEntry {
        let pid = std::process::id();
        RegistryEntry {
            connection,
            pid,
            pid_start: own_start(),
            source,
            mountpoint: mountpoint.to_string_lossy().into_owned(),
            fstype: String::new(),
            since_unix: now_unix(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            options: Vec::new(),
            failure: None,
        }
    }

    /// True while the daemon runs.
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.pid_start)
    }

    fn is_of(&self, other: &RegistryEntry) -> bool {
        (self.pid, self.pid_start) == (other.pid, other.pid_start)
    }

    fn is_mount(&self, mount: &MountEntry) -> bool {
        mount.connection() == self.connection && mount.fstype == self.fstype
    }
}

impl RegisteredMount {
    /// The control socket beside the entry.
    pub fn socket(&self) -> PathBuf {
        socket_beside(&self.file)
    }

    /// Removes the entry and its socket, unless they belong to a later daemon.
    pub fn remove(&self) {
        if read(&self.file).is_some_and(|entry| entry == self.entry) {
            // The file may be gone.
            let _ = fs::remove_file(&self.file);
            let _ = fs::remove_file(self.socket());
        }
    }

    /// Records the failure at the end of the mount, and removes the socket. Removes the entry if it
    /// cannot be written.
    pub fn leave_failure(&self, failure: &str) {
        let entry = RegistryEntry { failure: Some(failure.to_owned()), ..self.entry.clone() };
        let written = serde_json::to_vec_pretty(&entry)
            .map_err(std::io::Error::from)
            .and_then(|text| paths::write_atomically(&self.file, &text));
        match written {
            Ok(()) => drop(fs::remove_file(self.socket())),
            Err(_) => self.remove(),
        }
    }

    /// Removes the entry of a mount whose daemon has ended, and returns the failure that the daemon
    /// recorded.
    pub fn take_failure(&self) -> Option<String> {
        let left = read(&self.file).filter(|left| left.is_of(&self.entry));
        let failure = left.as_ref().and_then(|left| left.failure.clone());
        RegisteredMount { entry: left.unwrap_or_else(|| self.entry.clone()), ..self.clone() }
            .remove();
        failure
    }

    /// The present mount point, or the last one.
    pub fn shown_mountpoint(&self) -> String {
        let now = self.mounted.as_ref().map(|path| path.to_string_lossy().into_owned());
        now.unwrap_or_else(|| self.entry.mountpoint.clone())
    }
}

/// Seconds since 1970 UTC.
pub fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The start of a process, in clock ticks since boot (`proc_pid_stat(5)`, field 22); `None` if it
/// has ended.
pub fn process_start(pid: u32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_start(&String::from_utf8_lossy(&stat))
}

/// The start of this process, also where /proc is that of another PID namespace.
pub fn own_start() -> u64 {
    let stat = fs::read("/proc/self/stat").unwrap_or_default();
    parse_start(&String::from_utf8_lossy(&stat)).unwrap_or_default()
}

/// The number here of the process that registered as `pid`, perhaps in a PID namespace below this
/// one, such as that of a container. It is `pid` itself if there is no such process.
pub fn number_here(pid: u32, start: u64) -> u32 {
    if process_start(pid) == Some(start) {
        return pid;
    }
    let is_it = |number: &u32| {
        process_start(*number) == Some(start)
            && fs::read_to_string(format!("/proc/{number}/status"))
                .is_ok_and(|status| innermost_number(&status) == Some(pid))
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.into_iter().find(is_it).unwrap_or(pid)
}

/// The number of a process in its own PID namespace (`proc_pid_status(5)`).
fn innermost_number(status: &str) -> Option<u32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The age of a process; `None` if it has ended.
pub fn process_age(pid: u32) -> Option<Duration> {
    let start = process_start(pid)?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let start =
        Duration::from_secs_f64(start as f64 / rustix::param::clock_ticks_per_second() as f64);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).checked_sub(start).or(Some(Duration::ZERO))
}

fn parse_start(stat: &str) -> Option<u64> {
    // The name of the program is in parentheses, and may contain parentheses.
    let fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let fields: Vec<&str> = fields.take(20).collect();
    let (state, threads, start) = (*fields.first()?, *fields.get(17)?, *fields.get(19)?);
    // A process whose first thread has ended keeps its files until all threads have ended.
    let others = threads.parse::<u32>().is_ok_and(|threads| threads > 1);
    let ended = matches!(state, "Z" | "X") && !others;
    if ended { None } else { start.parse().ok() }
}

/// The path for the entry of a connection of this user. Creates the directory.
pub fn place(connection: u32) -> Result<PathBuf> {
    Ok(ensure_dir()?.join(format!("{connection}.json")))
}

/// The directory in which processes of this user register. Creates it if needed.
pub fn ensure_dir() -> Result<PathBuf> {
    let dir = own_dir()?;
    make_dir(&dir)?;
    Ok(dir)
}

/// The control socket beside an entry.
pub fn socket_beside(file: &Path) -> PathBuf {
    file.with_extension("sock")
}

/// Writes the entry of this process.
pub fn write(entry: &RegistryEntry) -> Result<RegisteredMount> {
    let file = place(entry.connection)?;
    let failed = |error: &dyn std::fmt::Display| {
        CommandFailure::Failed(format!("cannot register the mount in {}: {error}", file.display()))
    };
    let text = serde_json::to_vec_pretty(entry).map_err(|error| failed(&error))?;
    paths::write_atomically(&file, &text).map_err(|error| failed(&error))?;
    let mounted = Some(PathBuf::from(&entry.mountpoint));
    Ok(RegisteredMount { entry: entry.clone(), state: RegistrationState::Serving, file, mounted })
}

/// All files in the directories that this user may see.
pub fn files() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = own_dir().into_iter().collect();
    if std::env::var_os(DIR_VARIABLE).is_none()
        && !dirs.iter().any(|dir| dir == Path::new(SYSTEM_DIR))
    {
        dirs.push(SYSTEM_DIR.into());
    }
    let files = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    files.map(|file| file.path()).collect()
}

/// All entries visible to this user, by mount point. Removes stale ones.
pub fn list_all() -> Vec<RegisteredMount> {
    let files = files().into_iter().filter(|path| is_entry(path));
    let entries: Vec<(RegistryEntry, PathBuf)> =
        files.filter_map(|file| Some((read(&file)?, file))).collect();
    // Read last, because an entry is written after its mount.
    let mounts = fuse_mounts().unwrap_or_default();
    let mut found: Vec<RegisteredMount> =
        entries.into_iter().map(|(entry, file)| judge(entry, file, &mounts)).collect();
    for gone in found.extract_if(.., |found| found.state == RegistrationState::Gone) {
        if let Some(failure) = &gone.entry.failure {
            log::error!("{failure}");
        }
        gone.remove();
    }
    found.sort_by(|a, b| a.entry.mountpoint.cmp(&b.entry.mountpoint));
    found
}

/// The entry whose mount is, or was last, at `path`; the topmost of several.
pub fn find_by_mountpoint(path: &Path) -> Option<RegisteredMount> {
    let mut all = list_all();
    let mounts = fuse_mounts().unwrap_or_default();
    let top = mounts.iter().rfind(|mount| mount.mount_point == path);
    let text = path.to_string_lossy();
    let is_meant = |found: &RegisteredMount| match top {
        Some(mount) => found.entry.is_mount(mount),
        None => found.mounted.is_none() && found.entry.mountpoint == text,
    };
    let at = all.iter().position(is_meant)?;
    Some(all.swap_remove(at))
}

fn judge(entry: RegistryEntry, file: PathBuf, mounts: &[MountEntry]) -> RegisteredMount {
    let mount = mounts.iter().find(|mount| entry.is_mount(mount));
    let state = match (entry.is_alive(), mount.is_some()) {
        (true, true) => RegistrationState::Serving,
        (true, false) => RegistrationState::Detached,
        (false, true) => RegistrationState::Dead,
        (false, false) => RegistrationState::Gone,
    };
    RegisteredMount { entry, state, file, mounted: mount.map(|mount| mount.mount_point.clone()) }
}

fn is_entry(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("");
    let number = !stem.is_empty() && stem.bytes().all(|byte| byte.is_ascii_digit());
    number && path.extension().is_some_and(|extension| extension == "json")
}

fn read(file: &Path) -> Option<RegistryEntry> {
    let mut entry: RegistryEntry = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    entry.pid = number_here(entry.pid, entry.pid_start);
    Some(entry)
}

/// The directory in which daemons of this user register.
fn own_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(DIR_VARIABLE).filter(|dir| !dir.is_empty()) {
        return find_named_dir(Path::new(&dir));
    }
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return Ok(SYSTEM_DIR.into());
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    choose_private_dir(uid.as_raw(), variable("XDG_RUNTIME_DIR"), variable("HOME")).ok_or_else(|| {
        CommandFailure::Failed(format!(
            "no directory belongs to this user alone, to register mounts in: set XDG_RUNTIME_DIR or \
             {DIR_VARIABLE} to one"
        ))
    })
}

/// The directory of [`DIR_VARIABLE`], which may not exist yet. After su(1) or `sudo -E` it belongs
/// to another user: files and sockets would be created and removed in a directory that the other
/// user can exchange for a link.
fn find_named_dir(dir: &Path) -> Result<PathBuf> {
    let failed = |error: std::io::Error| {
        CommandFailure::Failed(format!(
            "{DIR_VARIABLE} names {}, which is not safe: {error}; unset it, or name a directory of this user",
            dir.display()
        ))
    };
    let dir = paths::absolute(dir);
    let mut existing = dir.ancestors().filter(|dir| dir.symlink_metadata().is_ok());
    let existing = existing.next().unwrap_or(Path::new("/"));
    let settled = paths::find_trusted(existing).map_err(failed)?;
    let rest = dir.strip_prefix(existing).unwrap_or(Path::new(""));
    // Joined with nothing, a path would end with a slash.
    let dir = settled.components().chain(rest.components()).collect::<PathBuf>();
    let open_to_all = dir.metadata().is_ok_and(|data| data.mode() & 0o022 != 0);
    if open_to_all {
        return Err(failed(std::io::Error::other("others may write to it")));
    }
    Ok(dir)
}

/// A directory in `runtime`, in the usual place of a runtime directory, or in `home`. Never in a
/// place such as /tmp, where another user could create it first, nor below a directory that another
/// user could exchange.
fn choose_private_dir(
    uid: u32,
    runtime: Option<PathBuf>,
    home: Option<PathBuf>,
) -> Option<PathBuf> {
    let own = |dir: PathBuf| {
        let dir = dir.is_absolute().then(|| paths::find_private(&dir).ok())??;
        dir.metadata().is_ok_and(|data| data.uid() == uid).then_some(dir)
    };
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    let runtime = runtime.into_iter().chain([usual]).find_map(own);
    let of_home = || home.and_then(own).map(|home| home.join(".local/state/defuse"));
    runtime.map(|dir| dir.join("defuse")).or_else(of_home)
}

/// All users can list the directory of root, but cannot use the control sockets in it.
fn make_dir(dir: &Path) -> Result {
    let mode = if dir == Path::new(SYSTEM_DIR) { 0o755 } else { 0o700 };
    DirBuilder::new().recursive(true).mode(mode).create(dir).map_err(|error| {
        CommandFailure::Failed(format!(
            "cannot create {}: {error}: name another directory in {DIR_VARIABLE}",
            dir.display()
        ))
    })
}

/// An age, in the largest two units.
pub fn describe_age(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min"),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_start_of_a_process_is_found_after_any_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 0 0 0 2 3 0 0 20 0 1 0 4711 9 9";
        assert_eq!(parse_start(stat), Some(4711));
        let zombie = stat.replace(") S", ") Z");
        assert_eq!(parse_start(&zombie), None);
        assert_eq!(parse_start(&zombie.replace("20 0 1 0", "20 0 3 0")), Some(4711));
        assert_eq!(parse_start("nonsense"), None);
        assert!(process_start(std::process::id()).is_some());
        assert_eq!(process_start(u32::MAX), None);
    }

    #[test]
    fn a_process_of_another_pid_namespace_is_found_by_its_number_there() {
        assert_eq!(innermost_number("Name:\tx\nNSpid:\t4711\t12\t1\nNSpgid:\t1\n"), Some(1));
        assert_eq!(innermost_number("Name:\tx\n"), None);
        let own = std::process::id();
        assert_eq!(number_here(own, own_start()), own);
        assert_eq!(number_here(own, own_start() + 1), own, "no such process");
    }

    #[test]
    fn an_entry_is_valid_while_its_process_and_its_mount_exist() {
        let mut entry = RegistryEntry::for_this_process(7, "memory:".into(), Path::new("/m"));
        entry.fstype = "fuse.defuse".into();
        let line = b"1 2 0:7 / /elsewhere rw - fuse.defuse memory: rw\n";
        let mounts = defuse_fuse::mount::parse_mountinfo(line);
        let judged = |entry: &RegistryEntry, mounts: &[MountEntry]| {
            judge(entry.clone(), PathBuf::from("/x/7.json"), mounts)
        };
        assert_eq!(judged(&entry, &mounts).state, RegistrationState::Serving);
        assert_eq!(judged(&entry, &mounts).shown_mountpoint(), "/elsewhere");
        assert_eq!(judged(&entry, &[]).state, RegistrationState::Detached);
        entry.pid_start += 1;
        assert_eq!(judged(&entry, &mounts).state, RegistrationState::Dead);
        assert_eq!(judged(&entry, &[]).state, RegistrationState::Gone);
        entry.fstype = "fuse.sshfs".into();
        assert_eq!(judged(&entry, &mounts).state, RegistrationState::Gone);
    }

    #[test]
    fn the_command_that_unmounts_reports_the_failure_once() {
        let place = tempfile::tempdir().unwrap();
        let entry = RegistryEntry::for_this_process(7, "memory:".into(), Path::new("/m"));
        let file = place.path().join("7.json");
        let found =
            RegisteredMount { entry, state: RegistrationState::Serving, file, mounted: None };
        let begin = || fs::write(&found.file, serde_json::to_vec(&found.entry).unwrap()).unwrap();
        begin();
        found.leave_failure("lost");
        assert_eq!(found.take_failure().as_deref(), Some("lost"));
        assert!(!found.file.exists());
        assert_eq!(found.take_failure(), None);
        // The entry of a later daemon with the same number is neither reported nor removed.
        let mut later = found.clone();
        later.entry.pid_start += 1;
        begin();
        later.leave_failure("later");
        assert_eq!((found.take_failure(), found.file.exists()), (None, true));
    }

    #[test]
    fn only_numbered_files_are_entries() {
        assert!(is_entry(Path::new("/run/defuse/12.json")));
        for other in ["12.sock", ".12.json.3", "x.json", "12"] {
            assert!(!is_entry(&Path::new("/run/defuse").join(other)), "{other}");
        }
    }

    /// Root registered in a directory of the user from whose environment the variable came.
    #[test]
    fn a_directory_of_the_environment_that_others_can_exchange_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().canonicalize().unwrap();
        let put_at = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(find_named_dir(&dir.join("new/one")).unwrap(), dir.join("new/one"));
        assert_eq!(find_named_dir(&dir).unwrap(), dir);
        for mode in [0o777, 0o1777] {
            put_at(mode);
            let error = find_named_dir(&dir).unwrap_err().to_string();
            assert!(error.contains(DIR_VARIABLE) && error.contains("unset it"), "{error}");
        }
        assert!(find_named_dir(&dir.join("new")).is_ok(), "nobody else can remove it from there");
        put_at(0o777);
        assert!(find_named_dir(&dir.join("new")).is_err());
        put_at(0o700);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir, Some(12345), None).unwrap();
            assert!(find_named_dir(&dir).is_err() && find_named_dir(&dir.join("new")).is_err());
        }
    }

    // Without XDG_RUNTIME_DIR, mounts were registered in /tmp/defuse-UID, which every other user
    // could make first: then the owner of the name could register nothing.
    #[test]
    fn users_register_where_no_other_user_can_create_the_directory() {
        let place = tempfile::tempdir().unwrap();
        let (dir, uid) = (place.path().to_path_buf(), rustix::process::geteuid().as_raw());
        let put_at = |mode| fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        let (nobody, open) = (u32::MAX - 1, PathBuf::from("/tmp"));
        let home = || Some(dir.clone());
        put_at(0o700);
        assert_eq!(choose_private_dir(uid, home(), None), Some(dir.join("defuse")));
        assert_eq!(choose_private_dir(nobody, home(), home()), None, "of another user");
        assert_eq!(choose_private_dir(nobody, Some(open.clone()), Some(open)), None, "of everyone");
        if !Path::new(&format!("/run/user/{uid}")).exists() {
            let state = dir.join(".local/state/defuse");
            assert_eq!(choose_private_dir(uid, None, home()), Some(state.clone()));
            make_dir(&state).unwrap();
            assert_eq!(fs::metadata(&state).unwrap().mode() & 0o777, 0o700);
        }
        put_at(0o777);
        assert_ne!(
            choose_private_dir(uid, home(), None),
            Some(dir.join("defuse")),
            "others may write"
        );
        let inner = dir.join("inner");
        fs::create_dir(&inner).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o700)).unwrap();
        assert_ne!(
            choose_private_dir(uid, Some(inner.clone()), None),
            Some(inner.join("defuse")),
            "others may exchange it"
        );
        assert_eq!(choose_private_dir(uid, Some("relative".into()), Some("".into())), None);
    }
}
