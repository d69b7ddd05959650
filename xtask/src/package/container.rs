//! The image in a container without rights: umoci(1) unpacks it, and runc(8) runs it.
//!
//! The container has a root directory that cannot be written, no network, no capability, a user
//! other than root, and the filter of system calls that Podman uses by default, which the package
//! of its settings brings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::image;
use crate::command;

/// The default filter of Podman.
pub const FILTER: &str = "/usr/share/containers/seccomp.json";

/// The programs of docs/containers.md, each with a line that prints one word at its end.
const PROGRAMS: &str = include_str!("../../../testkit/src/container/programs.txt");

/// The packages of Debian that have them; perl and find are essential.
pub const PACKAGES: [&str; 9] =
    ["git", "python3", "sqlite3", "tar", "rsync", "make", "gcc", "libc6-dev", "vim"];

/// Runs the programs on files in memory and on an image of files, in containers of the image
/// `archive`.
pub fn check(archive: &Path) -> Result<()> {
    let place = tempfile::tempdir()?;
    let bundle = OciBundle::unpack(archive, place.path())?;
    let rights = "test ! -e /dev/fuse && grep -c -E '^(CapEff:\\s0+|NoNewPrivs:\\s1|Seccomp:\\s2)$' /proc/self/status";
    bundle.expect(rights, "3").context("the container has rights, and proves nothing")?;
    let mut count = 0;
    for (name, line) in PROGRAMS.lines().filter_map(|line| line.split_once('\t')) {
        let quoted = line.replace('\'', "'\\''");
        let on = |source: &str| format!("defuse run --mount /x={source} -- sh -c '{quoted}'");
        bundle.expect(&on("memory:"), "done").with_context(|| format!("{name} on memory"))?;
        let line = format!("defuse mkfs uhs img --size 32M > made && {}", on("uhs:img"));
        bundle.expect(&line, "done").with_context(|| format!("{name} on an image of files"))?;
        count += 1;
    }
    ensure!(count == 10, "{count} programs of {}", PROGRAMS.lines().count());
    println!("{count} programs work in containers of {}", archive.display());
    Ok(())
}

/// An unpacked image, with the description of its containers.
struct OciBundle {
    dir: PathBuf,
    /// The state of runc.
    state: PathBuf,
}

impl OciBundle {
    /// Unpacks the image in `archive` into the directory `place`.
    fn unpack(archive: &Path, place: &Path) -> Result<OciBundle> {
        let (layout, dir) = (place.join("layout"), place.join("bundle"));
        fs::create_dir(&layout)?;
        let mut unpack = Command::new("tar");
        unpack.arg("--extract").arg("--file").arg(archive).arg("--directory").arg(&layout);
        command::run(&mut unpack)?;
        let name = format!("{}:{}", layout.display(), image::NAME);
        command::run(Command::new("umoci").args(["unpack", "--image", &name]).arg(&dir))?;
        Ok(OciBundle { dir, state: place.join("state") })
    }

    /// Runs `line` by sh(1) in a new container. It must succeed, and its last line be `expected`.
    fn expect(&self, line: &str, expected: &str) -> Result<()> {
        let file = self.dir.join("config.json");
        let config = serde_json::from_str(&fs::read_to_string(&file)?)?;
        let filter = serde_json::from_str(&fs::read_to_string(FILTER)?)?;
        fs::write(&file, restrict(config, &filter, line)?.to_string())?;
        let mut run = Command::new("runc");
        run.arg("--root").arg(&self.state).args(["run", "--bundle"]);
        let output = command::output(run.arg(&self.dir).arg("defuse-package"))?;
        let last = output.lines().last().unwrap_or_default();
        ensure!(last == expected, "`{line}` said: {output}");
        Ok(())
    }
}

/// The description of a container without rights that runs `line`, from that of the image.
fn restrict(mut config: Value, filter: &Value, line: &str) -> Result<Value> {
    let environment =
        config["process"]["env"].as_array().context("the image has no environment")?;
    let mut environment = environment.clone();
    environment.push("HOME=/x".into());
    config["process"] = json!({
        "user": {"uid": 1000, "gid": 1000},
        "args": ["timeout", "120", "sh", "-c", line],
        "cwd": "/tmp",
        "env": environment,
        "capabilities": {},
        "noNewPrivileges": true,
    });
    config["root"]["readonly"] = true.into();
    config["hostname"] = "container".into();
    let tmpfs = |at: &str, options: &[&str]| {
        let options = [options, &["nosuid", "size=67108864"]].concat();
        json!({"destination": at, "type": "tmpfs", "source": "tmpfs", "options": options})
    };
    config["mounts"] = json!([
        {"destination": "/proc", "type": "proc", "source": "proc"},
        tmpfs("/dev", &["mode=755"]),
        tmpfs("/dev/shm", &["mode=1777", "nodev"]),
        tmpfs("/tmp", &["mode=1777", "nodev"]),
    ]);
    let namespaces = ["pid", "ipc", "uts", "mount", "network"];
    config["linux"] = json!({
        "namespaces": namespaces.map(|name| json!({"type": name})),
        "resources": {"devices": [{"allow": false, "access": "rwm"}]},
        "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        "seccomp": seccomp(filter)?,
    });
    Ok(config)
}

/// The rules of a filter that apply to this architecture and to a process without capabilities, in
/// the form of a runtime.
fn seccomp(filter: &Value) -> Result<Value> {
    let rules = filter["syscalls"].as_array().context("the filter has no rules")?;
    let applies = |rule: &&Value| {
        let names = |key: &str| rule["includes"][key].as_array().filter(|names| !names.is_empty());
        names("caps").is_none()
            && names("arches").is_none_or(|names| names.contains(&"amd64".into()))
    };
    let rules: Vec<Value> = rules.iter().filter(applies).map(to_runtime_rule).collect();
    Ok(json!({
        "defaultAction": filter["defaultAction"],
        "defaultErrnoRet": filter["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules,
    }))
}

/// The parts of a rule that a runtime knows.
fn to_runtime_rule(rule: &Value) -> Value {
    let mut known = json!({"names": rule["names"], "action": rule["action"]});
    for key in ["args", "errnoRet"] {
        if !rule[key].is_null() {
            known[key] = rule[key].clone();
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_no_capability_and_the_rules_for_such_processes() {
        let filter = json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "syscalls": [
            {"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [], "includes": {}, "excludes": {}},
            {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1, "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["sync_file_range2"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["ppc64le"]}},
            {"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64"]}},
        ]});
        let image = json!({"process": {"env": ["PATH=/bin"]}, "root": {"path": "rootfs"}});
        let container = restrict(image, &filter, "true").unwrap();
        let rules = json!([
            {"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": []},
            {"names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
            {"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW"},
        ]);
        assert_eq!(container["linux"]["seccomp"]["syscalls"], rules);
        assert_eq!(container["process"]["capabilities"], json!({}));
        assert_eq!(container["process"]["user"]["uid"], 1000);
        assert_eq!(container["root"], json!({"path": "rootfs", "readonly": true}));
    }
}
