//! A container like Docker's, without Docker: name spaces of its own, a root directory that cannot
//! be written, a part of /proc, few devices, few capabilities, limits of memory and of processes,
//! no new privileges, and a filter of system calls.
//!
//! unshare(1) and setpriv(1) do most of the work. The program `contained` of this crate installs
//! the filter, and becomes the program under test.

mod calls;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The capabilities of a container of Docker.
const CAPABILITIES: &str = "+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,\
                            +net_bind_service,+sys_chroot,+kill,+audit_write";

/// The files of /proc and /sys that a container does not see, and the directories that are empty
/// there.
const SETUP: &str = r#"
set -e
for group in $GROUPS_TO_JOIN; do echo 0 > "$group"; done
mount -t proc proc /proc
for file in kcore keys latency_stats timer_list timer_stats sched_debug; do
  if [ -e /proc/$file ]; then mount --bind /dev/null /proc/$file; fi
done
for empty in /proc/acpi /proc/asound /proc/scsi /sys/firmware /sys/devices/virtual/powercap; do
  if [ -d $empty ]; then mount -t tmpfs -o ro,size=0 tmpfs $empty; fi
done
for read in bus fs irq sys sysrq-trigger; do
  if [ -e /proc/$read ]; then mount --bind /proc/$read /proc/$read; mount -o remount,bind,ro /proc/$read; fi
done
mkdir "$WORK/.dev"
mount -t tmpfs -o mode=755,size=64k tmpfs "$WORK/.dev"
for device in null zero full random urandom tty $DEVICES; do
  : > "$WORK/.dev/$device"
  mount --bind /dev/$device "$WORK/.dev/$device"
done
ln -s /proc/self/fd "$WORK/.dev/fd"
mount --rbind "$WORK/.dev" /dev
if [ -n "$SHM" ]; then
  mkdir /dev/shm
  mount -t tmpfs -o nosuid,nodev,noexec,mode=1777,size="$SHM" tmpfs /dev/shm
fi
mount -o remount,ro /dev 2>/dev/null || mount -o remount,bind,ro /dev
mount --bind "$WORK" /mnt
if [ -n "$TMP" ]; then
  mount -t tmpfs -o nosuid,nodev,mode=1777,size="$TMP" tmpfs /tmp
  # The directory of the test may have been below.
  mkdir -p "$WORK"
fi
mount --move /mnt "$WORK"
cd "$WORK"
# All that was mounted before, but for the directory of the test.
mount -o remount,bind,ro /
"#;

/// The differences between containers.
#[derive(Clone, Debug)]
pub struct ContainerSpec {
    /// Size of /dev/shm; without it there is none.
    pub shm: Option<&'static str>,
    /// /tmp can be written.
    pub has_tmp: bool,
    /// In a user namespace of its own, as without root.
    pub is_rootless: bool,
    /// Devices besides those that all have, such as `fuse`.
    pub devices: &'static str,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
}

impl ContainerSpec {
    /// A container as `docker run --read-only` makes it.
    pub const USUAL: ContainerSpec = ContainerSpec {
        shm: Some("64m"),
        has_tmp: true,
        is_rootless: false,
        devices: "",
        memory: None,
        pids: None,
    };

    /// A command that runs `line` by sh(1) in the container. The directory `work` is its working
    /// directory, and all that it can write to. `contained` is the program of this crate.
    ///
    /// # Errors
    ///
    /// Fails without root, and where the control groups of this machine cannot limit what is to be
    /// limited.
    pub fn command(
        &self,
        contained: &Path,
        work: &Path,
        line: &str,
    ) -> Result<(Command, ControlGroups)> {
        ensure!(rustix::process::geteuid().is_root(), "only root makes containers");
        let groups = ControlGroups::make(work, [("memory", self.memory), ("pids", self.pids)])?;
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]);
        unshare.args(["--propagation", "private"]);
        if self.is_rootless {
            unshare.args(["--user", "--map-root-user"]);
        }
        let bounding = format!("--bounding-set=-all,{CAPABILITIES}");
        let inner =
            r#"exec setpriv --no-new-privs --inh-caps=-all "$BOUNDING" "$CONTAINED" sh -c "$LINE""#;
        unshare.args(["sh", "-c", &format!("{SETUP}{inner}")]);
        let joined: Vec<String> =
            groups.0.iter().map(|group| group.join("cgroup.procs").display().to_string()).collect();
        unshare.env("GROUPS_TO_JOIN", joined.join(" ")).env("WORK", work).env("LINE", line);
        unshare.env("BOUNDING", bounding).env("CONTAINED", contained);
        unshare.env("SHM", self.shm.unwrap_or("")).env("DEVICES", self.devices);
        unshare.env("TMP", if self.has_tmp { "64m" } else { "" });
        unshare.env_remove("XDG_RUNTIME_DIR").env("HOME", "/root").env("TMPDIR", work);
        unshare.stdin(Stdio::null());
        Ok((unshare, groups))
    }
}

/// Control groups, which go with the value.
pub struct ControlGroups(Vec<PathBuf>);

impl ControlGroups {
    /// Groups for the limits that are set, by controller.
    fn make(work: &Path, limits: [(&str, Option<u64>); 2]) -> Result<ControlGroups> {
        let name = work.file_name().context("the directory has a name")?;
        let root = Path::new("/sys/fs/cgroup");
        let mut groups = ControlGroups(Vec::new());
        for (controller, limit) in limits {
            let Some(limit) = limit else { continue };
            let first = root.join(controller);
            let (parent, file) = match (first.is_dir(), controller) {
                (true, "memory") => (first, "memory.limit_in_bytes"),
                (true, _) => (first, "pids.max"),
                (false, "memory") => (root.to_owned(), "memory.max"),
                (false, _) => (root.to_owned(), "pids.max"),
            };
            // Usually it is enabled already.
            let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
            let group = parent.join(name);
            if !groups.0.contains(&group) {
                fs::create_dir(&group).with_context(|| format!("{}", group.display()))?;
                groups.0.push(group.clone());
            }
            let file = group.join(file);
            fs::write(&file, limit.to_string()).with_context(|| format!("{}", file.display()))?;
        }
        Ok(groups)
    }
}

impl Drop for ControlGroups {
    fn drop(&mut self) {
        for group in &self.0 {
            // Processes that were killed leave their group a moment after their end.
            for _ in 0..200 {
                if fs::remove_dir(group).is_ok() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }
}

/// Installs the filter, and becomes the program of the arguments. Returns the reason if it cannot.
pub fn become_contained() -> anyhow::Error {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else { return anyhow::anyhow!("no program is named") };
    match calls::refuse() {
        Ok(()) => Command::new(program).args(arguments).exec().into(),
        Err(error) => error,
    }
}
