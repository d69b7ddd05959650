//! A directory for one test. The program runs in it, and everything is unmounted at the end.

// Every test program uses another part of this module.
#![allow(dead_code)]

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};

/// The built program: `defuse`, and `defuse-study` for the tests of its package.
pub const PROGRAM: &str =
    match (option_env!("CARGO_BIN_EXE_defuse"), option_env!("CARGO_BIN_EXE_defuse-study")) {
        (Some(program), _) | (None, Some(program)) => program,
        (None, None) => panic!("cargo names no program"),
    };

/// Compiles a C program. Prints the reason and returns `None` if there is no compiler, or if
/// linking fails.
pub fn compile(place: &TestPlace, name: &str, source: &str, options: &[&str]) -> Option<PathBuf> {
    let (code, program) = (place.path(&format!("{name}.c")), place.path(name));
    fs::write(&code, source).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&code).args(options);
    match cc.output() {
        Ok(output) if output.status.success() => Some(program),
        _ => {
            println!("skipped: cc {} is not there or does not link", options.join(" "));
            None
        }
    }
}

/// A directory with a mount point `mnt`, a source `src` and a registry of its own.
pub struct TestPlace {
    dir: tempfile::TempDir,
}

/// A tmpfs, unmounted when dropped.
pub struct TestTmpfs(PathBuf);

impl TestTmpfs {
    /// Mounts it on `path`, which is created if it does not exist.
    pub fn mount_on(path: PathBuf, flags: MountFlags, options: &CStr) -> TestTmpfs {
        fs::create_dir_all(&path).unwrap();
        mount("tmpfs", &path, "tmpfs", flags, options).unwrap();
        TestTmpfs(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TestTmpfs {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// The outcome of running the program.
pub struct DefuseOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl TestPlace {
    /// Creates a place; prints the reason and returns `None` if nothing can be mounted.
    pub fn new_to_mount() -> Option<TestPlace> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root may mount");
            return None;
        }
        if fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
            println!("skipped: there is no /dev/fuse");
            return None;
        }
        Some(TestPlace::new())
    }

    /// Creates a place for tests that do not mount.
    pub fn new() -> TestPlace {
        let dir = tempfile::Builder::new().prefix("defuse-cli-").tempdir().unwrap();
        for name in ["mnt", "src"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        TestPlace { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    /// A command that runs the program in this place.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_of(Path::new(PROGRAM), arguments)
    }

    pub fn command_of(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("DEFUSE_RUNTIME_DIR", self.path("run"));
        command
    }

    /// Runs the program to its end.
    pub fn run(&self, arguments: &[&str]) -> DefuseOutput {
        from_output(self.command(arguments).output().unwrap())
    }

    /// Runs the program, which must succeed. Returns its output.
    pub fn expect_success(&self, arguments: &[&str]) -> String {
        let said = self.run(arguments);
        assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
        said.out
    }

    /// Runs the program, which must fail with `code` and print `text`.
    pub fn expect_failure(&self, code: i32, arguments: &[&str], text: &str) {
        let said = self.run(arguments);
        assert_eq!(said.code, Some(code), "{arguments:?}: {}", said.err);
        assert!(said.err.contains(text), "{arguments:?}: {}", said.err);
        let error = said.err.strip_prefix("defuse: ").unwrap_or("");
        assert!(error.lines().count() == 1 && !error.contains("panicked"), "{}", said.err);
    }

    /// Starts the program in the foreground, and waits until it has mounted.
    pub fn foreground(&self, arguments: &[&str]) -> Child {
        let child = self.command(arguments).stderr(Stdio::null()).spawn().unwrap();
        // The mount is visible before it is registered.
        eventually("mounted", || self.list().iter().any(|row| row["state"] == "serving"));
        child
    }

    /// The mounts of this place's registry.
    pub fn list(&self) -> Vec<serde_json::Value> {
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&self.expect_success(&["list", "--json"])).unwrap();
        let here = self.dir.path().canonicalize().unwrap();
        let is_here = |row: &serde_json::Value| {
            row["mountpoint"].as_str().is_some_and(|path| Path::new(path).starts_with(&here))
        };
        all.into_iter().filter(is_here).collect()
    }

    /// The daemon of the only mount here.
    pub fn pid(&self) -> Pid {
        let pid = self.list()[0]["pid"].as_i64().unwrap();
        Pid::from_raw(pid as i32).unwrap()
    }

    /// Installs the program where all users may run it. They may not reach the build directory.
    pub fn install_for_all_users(&self) -> PathBuf {
        let program = self.path("defuse");
        // Not copied by this process: another test that forks meanwhile would inherit the copy open
        // for writing, and executing it would fail (ETXTBSY).
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755", PROGRAM]).arg(&program).status().unwrap().success());
        program
    }

    /// The library of `defuse run` at a place that all users can read. It is copied if they cannot
    /// reach the build directory, as below root's home.
    pub fn library_for_all_users(&self) -> Option<PathBuf> {
        let folder = Path::new(PROGRAM).parent().unwrap();
        let is_open = |dir: &Path| fs::metadata(dir).unwrap().permissions().mode() & 0o001 != 0;
        if folder.ancestors().all(is_open) {
            return None;
        }
        let copy = self.path(LIBRARY);
        fs::copy(find_built_library(), &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(self.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        Some(copy)
    }

    /// Signals the daemon of the only mount here.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub fn is_mounted(&self) -> bool {
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .contains(self.path("mnt").to_str().unwrap())
    }
}

impl Drop for TestPlace {
    fn drop(&mut self) {
        // Twice, in case of stacked mounts.
        for _ in 0..2 {
            if self.is_mounted() {
                let _ = self.command(&["umount", "--lazy", "mnt"]).output();
            }
        }
    }
}

const LIBRARY: &str = "libdefuse_preload.so";

/// The library of `defuse run` that was built with the program, for a copy of the program.
pub fn find_built_library() -> PathBuf {
    let folder = Path::new(PROGRAM).parent().unwrap();
    // A build of tests leaves it in `deps` alone.
    let mut places = [folder.join("deps").join(LIBRARY), folder.join(LIBRARY)].into_iter();
    places.find(|library| library.exists()).unwrap()
}

pub fn from_output(output: Output) -> DefuseOutput {
    DefuseOutput {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Waits up to a minute until `happened` returns true.
pub fn eventually(what: &str, happened: impl FnMut() -> bool) {
    eventually_or(|| what.to_owned(), happened);
}

/// Waits as [`eventually`] does; `what` describes the state at the end of the minute.
pub fn eventually_or(what: impl Fn() -> String, mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not {} after a minute", what());
        std::thread::sleep(Duration::from_millis(5));
    }
}
