//! The table of test steps. A new step is one entry.

use std::process::Child;

use anyhow::{Result, ensure};

use super::quick;
use crate::apt::AptTool;
use crate::packages::RequiredTool;
use crate::parts::RunRecord;
use crate::{apt, bpf, demo, fresh, fuzz, guest, lanes, package, publish, python, rings, runs};

/// When a step runs without being named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSchedule {
    /// Always. Together these decide whether a change lands.
    Always,
    /// With `--full`.
    Full,
    /// With `--quick`.
    Quick,
}

/// The action of a step.
pub enum StepAction {
    /// Cargo, with these arguments, in the root of the project.
    Cargo(&'static [&'static str]),
    /// A function, which records the parts that it leaves out.
    Call(fn(&mut RunRecord) -> Result<()>),
}

/// One step.
pub struct TestStep {
    /// Its name on the command line.
    pub name: &'static str,
    /// A description of what it checks, in one line.
    pub what: &'static str,
    /// When it runs.
    pub when: StepSchedule,
    /// Tools to install first. The step is skipped without a tool that has no `part`.
    pub tools: &'static [RequiredTool],
    /// Environment variables for cargo.
    pub env: &'static [(&'static str, &'static str)],
    /// The action.
    pub run: StepAction,
    /// Begins a build of the step that takes long, in a directory of its own and at the lowest
    /// priority, when the tests of all crates have ended: the steps in between wait for mounts and
    /// timers most of their time.
    pub ahead: Option<fn() -> Result<Child>>,
}

const fn cargo(
    name: &'static str,
    what: &'static str,
    tools: &'static [RequiredTool],
    arguments: &'static [&'static str],
) -> TestStep {
    TestStep {
        name,
        what,
        when: StepSchedule::Always,
        tools,
        env: &[],
        run: StepAction::Cargo(arguments),
        ahead: None,
    }
}

const fn call(
    name: &'static str,
    what: &'static str,
    tools: &'static [RequiredTool],
    call: fn(&mut RunRecord) -> Result<()>,
) -> TestStep {
    TestStep {
        name,
        what,
        when: StepSchedule::Always,
        tools,
        env: &[],
        run: StepAction::Call(call),
        ahead: None,
    }
}

const fn full(
    name: &'static str,
    what: &'static str,
    tools: &'static [RequiredTool],
    action: fn(&mut RunRecord) -> Result<()>,
) -> TestStep {
    TestStep { when: StepSchedule::Full, ..call(name, what, tools, action) }
}

/// Tools that tests use if installed, and otherwise leave out the parts that need them.
pub const TEST_TOOLS: &[RequiredTool] = &[
    RequiredTool::package_for("e2fsprogs", "mkfs.ext4", "the POSIX cases on ext4"),
    RequiredTool::package_for(
        "xfsprogs",
        "mkfs.xfs",
        "uhs beside xfs on the same device, xfs as a source",
    ),
    RequiredTool::package_for(
        "fuse3",
        "fusermount3",
        "mounts of other users than root, mount.fuse3(8)",
    ),
    RequiredTool::package_for(
        "linux-libc-dev",
        "/usr/include/linux/fuse.h",
        "the ABI against the C header",
    ),
    RequiredTool::package_for("util-linux", "setpriv", "files created by users other than root"),
    RequiredTool::package_for(
        "gcc-multilib",
        "/usr/lib/gcc/x86_64-linux-gnu/*/32",
        "programs of 32 bits",
    ),
    RequiredTool::package_for("chromium", "chromium", "the report of a study in a browser"),
    RequiredTool::package_for("bindfs", "bindfs", "statistics of other FUSE file systems"),
    RequiredTool::package_for(
        "sshfs",
        "sshfs",
        "statistics of sshfs, and FUSE programs over a socket",
    ),
    RequiredTool::package_for("openssh-server", "sshd", "the server of sshfs"),
    RequiredTool::package_for(
        "fio",
        "fio",
        "latencies in the kernel compared with fio, clients of GlusterFS",
    ),
    RequiredTool::package_for(
        "libpython3.*-testsuite",
        "/usr/lib/python3.*/test/test_mmap.py",
        "Python's own tests under defuse run",
    ),
    RequiredTool::package_for("busybox-static", "busybox", "static programs in a run"),
    RequiredTool::package_for("lmdb-utils", "mdb_load", "a database of many writers in a run"),
    RequiredTool::package_for("squashfuse", "squashfuse", "FUSE programs over a socket"),
    RequiredTool::package_for("unionfs-fuse", "unionfs-fuse", "programs of libfuse 2"),
    RequiredTool::package_for("archivemount", "archivemount", "programs of libfuse 2"),
    RequiredTool::package_for("fuse2fs", "fuse2fs", "programs of libfuse 2"),
    RequiredTool::package_for("fuseiso", "fuseiso", "programs of libfuse 2"),
    RequiredTool::package_for("fuse-zip", "fuse-zip", "programs of libfuse 2"),
    RequiredTool::package_for("encfs", "encfs", "programs of libfuse 2"),
    RequiredTool::package_for("zip", "zip", "an archive for fuse-zip"),
    RequiredTool::package_for("fuse-overlayfs", "fuse-overlayfs", "programs of inodes"),
    RequiredTool::package_for("qemu-system-common", "qemu-storage-daemon", "programs of inodes"),
    RequiredTool::package_for(
        "python3-pyfuse3",
        "/usr/lib/python3/dist-packages/pyfuse3*",
        "programs of inodes",
    ),
    RequiredTool::package_for(
        "python3-llfuse",
        "/usr/lib/python3/dist-packages/llfuse*",
        "programs of inodes",
    ),
    RequiredTool::package_for(
        "squashfs-tools",
        "mksquashfs",
        "squashfuse over a socket, squashfs as a source",
    ),
    RequiredTool::package_for("erofs-utils", "mkfs.erofs", "erofs as a source"),
    RequiredTool::package_for("genisoimage", "genisoimage", "iso9660 as a source, fuseiso"),
    RequiredTool::package_for("btrfs-progs", "mkfs.btrfs", "btrfs as a source"),
    RequiredTool::package_for("f2fs-tools", "mkfs.f2fs", "f2fs as a source"),
    RequiredTool::package_for("dosfstools", "mkfs.vfat", "vfat as a source"),
    RequiredTool::package_for("gocryptfs", "gocryptfs", "FUSE programs over a socket"),
    RequiredTool::package_for(
        "libfuse3-dev",
        "/usr/share/doc/libfuse3-dev/examples/hello.c",
        "libfuse's examples over a socket",
    ),
    RequiredTool::package_for("g++", "c++", "the header of libdefuse as C++"),
    RequiredTool::package_for("groff", "groff", "manual pages without warnings"),
    RequiredTool::package_for("binutils", "readelf", "the symbols of libdefuse and their versions"),
    RequiredTool::package_for("pkg-config", "pkg-config", "programs in C by what pkg-config says"),
    RequiredTool::package_for(
        "python3",
        "python3",
        "waiting for locks on a mount (which fails without)",
    ),
    RequiredTool::package_for("golang-go", "go", "Go programs in a run"),
    RequiredTool::package_for("nodejs", "node", "a runtime that prefers rings, in a run"),
    RequiredTool::package_for("git", "git", "git on a mount and in a run"),
    RequiredTool::package_for("sqlite3", "sqlite3", "sqlite3 on a mount and in a run"),
    RequiredTool::package_for(
        "qemu-system-x86",
        "qemu-system-x86_64",
        "the NVMe driver on the controller of QEMU",
    ),
    RequiredTool::package_for("make", "make", "make on a mount and in a run"),
    RequiredTool::package_for("strace", "strace", "the system calls after bind(2)"),
    RequiredTool::package_for("vim", "vim", "an editor in a run"),
    RequiredTool::package_for("rsync", "rsync", "rsync on a mount"),
    RequiredTool::package_for("attr", "setfattr", "rsync with attributes on a mount"),
    RequiredTool::package_for("acl", "setfacl", "rsync with access lists on a mount"),
    RequiredTool::package_for("glusterfs-server", "glusterd", "GlusterFS: the servers"),
    RequiredTool::package_for("glusterfs-cli", "gluster", "GlusterFS: the servers' commands"),
    RequiredTool::package_for(
        "glusterfs-client",
        "glusterfs",
        "GlusterFS: its own client beside ours",
    ),
    RequiredTool::package_for(
        "libglusterfs-dev",
        "/usr/include/glusterfs/glusterfs.h",
        "GlusterFS: a volume without servers",
    ),
    RequiredTool::package_for(
        "libgfapi0",
        "/usr/lib/*/libgfapi.so.0",
        "GlusterFS: the client's library",
    ),
    RequiredTool::package_for("iproute2", "ip", "GlusterFS: the network of its servers"),
    RequiredTool::package_for("dpkg-dev", "dpkg-shlibdeps", "packages of Debian"),
    RequiredTool::package_for("lintian", "lintian", "the rules for packages of Debian"),
    RequiredTool::package_for("rpm", "rpmbuild", "packages for rpm"),
    RequiredTool::package_for("systemd", "systemd-analyze", "the units of systemd"),
];

/// Tools of the step with memcheck, which needs all of them.
const MEMCHECK_TOOLS: &[RequiredTool] = &[
    RequiredTool::package("valgrind", "valgrind"),
    RequiredTool::package("glusterfs-server", "glusterd"),
    RequiredTool::package("glusterfs-cli", "gluster"),
    RequiredTool::package("libgfapi0", "/usr/lib/*/libgfapi.so.0"),
    RequiredTool::package("iproute2", "ip"),
    RequiredTool::package("util-linux", "nsenter"),
];

/// Tools of the step with programs on volumes without a mount, which needs all of them.
const VOLUME_TOOLS: &[RequiredTool] = &[
    RequiredTool::package("glusterfs-server", "glusterd"),
    RequiredTool::package("glusterfs-cli", "gluster"),
    RequiredTool::package("libgfapi0", "/usr/lib/*/libgfapi.so.0"),
    RequiredTool::package("iproute2", "ip"),
    RequiredTool::package("util-linux", "nsenter"),
    RequiredTool::package("e2fsprogs", "mkfs.ext4"),
];

/// All steps, quick ones first.
pub const STEPS: &[TestStep] = &[
    cargo(
        "fmt",
        "the code is formatted",
        &[RequiredTool::component("rustfmt", "rustfmt")],
        &["fmt", "--all", "--check"],
    ),
    cargo(
        "structure",
        "crates, files and documents follow the structure rules",
        &[],
        &["test", "--package", "xtask", "--test", "structure"],
    ),
    cargo(
        "clippy",
        "no warnings",
        &[RequiredTool::component("clippy", "cargo-clippy")],
        &["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"],
    ),
    call(
        "packages",
        "every package in the tables is available in this release",
        &[],
        check_packages,
    ),
    TestStep {
        env: &[("RUSTDOCFLAGS", "-Dwarnings")],
        ..cargo("doc", "documentation without warnings", &[], &["doc", "--workspace", "--no-deps"])
    },
    TestStep {
        when: StepSchedule::Quick,
        ..call(
            "quick",
            "the tests of the changed crates, and the shortest of their dependents",
            &[],
            quick::test,
        )
    },
    call("test", "the tests of all crates", TEST_TOOLS, lanes::test),
    call("publish", "the crates for authors can be published", &[], |_| publish::check()),
    full("publish-build", "each crate for authors is built from its package", &[], |_| {
        publish::build()
    }),
    call("rings", "the tests that mount, over io_uring", TEST_TOOLS, rings::test),
    call(
        "run",
        "the POSIX suites and the exercisers on programs without a mount",
        TEST_TOOLS,
        runs::test,
    ),
    call(
        "python",
        "the wheel for Python, with fsspec, pandas, pyarrow and zarr, in every Python of this machine",
        python::TOOLS,
        python::test,
    ),
    cargo(
        "shuttle",
        "the worker pool under the schedules of shuttle",
        &[],
        // All of the workspace, so that dependencies have the features that they have in step
        // `test`.
        &["test", "--workspace", "--features", "defuse-session/shuttle", "--test", "shuttle"],
    ),
    TestStep {
        ahead: Some(fuzz::build_ahead),
        ..call("fuzz", "12 s of every fuzz target", fuzz::TOOLS, |_| fuzz::run_all(12))
    },
    full("fuzz-long", "ten minutes of every fuzz target", fuzz::TOOLS, |_| fuzz::run_all(600)),
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "run-suites",
            "Python's tests and fio under defuse run, all of them",
            TEST_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "run_suites"],
        )
    },
    TestStep {
        when: StepSchedule::Full,
        // The POSIX cases must be alone in their process.
        env: &[("DEFUSE_FULL", "1"), ("RUST_TEST_THREADS", "1")],
        ..cargo(
            "gluster-suites",
            "pjdfstest, fsx, git, sqlite3, tar, rsync, make and all POSIX cases on mounts of GlusterFS, and on its own client",
            TEST_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "gluster"],
        )
    },
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "gluster-faults",
            "faults of the servers of GlusterFS, also the long ones",
            TEST_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "gluster_faults"],
        )
    },
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "gluster-requests",
            "requests to bricks of GlusterFS for each operation, also where the servers tell of changes",
            TEST_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "gluster_requests"],
        )
    },
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "gluster-clients",
            "100,000 random operations by several clients of GlusterFS beside a model",
            TEST_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "gluster_clients"],
        )
    },
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "kills",
            "10,000 kills of clients, a thousand each of servers, a manager, and an application with a device",
            TEST_TOOLS,
            &[
                "test",
                "--package",
                "defuse-testkit",
                "--package",
                "defuse",
                "--test",
                "kills",
                "--test",
                "uhs_clients_crash",
                "--test",
                "reconnect",
                "--test",
                "bound",
            ],
        )
    },
    full(
        "nvme-guest",
        "the NVMe driver by vfio-pci in a guest: faults, power cuts, other file systems beside it",
        guest::TOOLS,
        guest::check,
    ),
    TestStep {
        when: StepSchedule::Full,
        env: &[("DEFUSE_FULL", "1")],
        ..cargo(
            "gluster-memory",
            "the client of GlusterFS under memcheck of valgrind",
            MEMCHECK_TOOLS,
            &["test", "--package", "defuse-testkit", "--test", "gluster_memory"],
        )
    },
    full(
        "clients",
        "the POSIX suites by two and eight clients of one server at once",
        TEST_TOOLS,
        runs::clients,
    ),
    full(
        "gluster-run",
        "the POSIX suites and the exercisers on programs without a mount, on GlusterFS",
        VOLUME_TOOLS,
        runs::gluster,
    ),
    full("bpf", "the BPF program matches its source", bpf::TOOLS, |_| bpf::check()),
    full("fresh", "both commands of the README on a minimal Debian", fresh::TOOLS, |_| {
        fresh::check()
    }),
    full(
        "package",
        "packages of a build for users: installed, used and removed on minimal Debians",
        package::TOOLS,
        |_| package::check(),
    ),
    full("demo", "real programs in every profile of a mount", demo::TOOLS, |_| demo::check()),
];

/// The Debian packages of all steps, each once.
pub fn list_packages() -> Vec<&'static str> {
    let tools = STEPS.iter().flat_map(|step| step.tools);
    let mut names: Vec<&str> = tools.filter_map(RequiredTool::debian).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Looks up every package of the tables with apt, as if none were installed.
fn check_packages(parts: &mut RunRecord) -> Result<()> {
    if !apt::is_there() {
        parts.record_missing_part("there is no apt to ask for packages");
        return Ok(());
    }
    let (apt, mut names) = (AptTool::for_empty_machine(), list_packages());
    names.push(guest::KERNEL);
    let mut requested = apt.check_installable(&names);
    if requested.is_err() {
        // A new machine has no package lists.
        AptTool::for_this_machine().update()?;
        requested = apt.check_installable(&names);
    }
    let complaints = requested?;
    ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
    println!("{} packages can be installed", names.len());
    Ok(())
}
