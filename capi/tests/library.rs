//! The library as installed by `cargo xtask library`: its symbols, and C programs that use it.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use defuse_measure::gluster::{self, GlusterServers};
use defuse_memory::MemoryFileSystem;
use defuse_socket::{ServerOptions, SocketServer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: there is no {program}");
    }
    found
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}{errors}", text(&output));
    text(&output)
}

/// The installation directory, created once; `None` if a requirement is missing.
fn prefix() -> Option<&'static Path> {
    static PREFIX: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "run",
            "--offline",
            "--quiet",
            "--package",
            "xtask",
            "--",
            "library",
            "--debug",
        ]);
        is_there("cc").then(|| {
            run(cargo.arg("--prefix").arg(&prefix).current_dir(root()));
            prefix
        })
    };
    PREFIX.get_or_init(make).as_deref()
}

/// A C program of the crate, compiled as docs/direct.md describes.
fn program(source: &str, options: &[&str]) -> Option<(tempfile::TempDir, Command)> {
    let prefix = prefix()?;
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-g"]).args(options);
    cc.arg("-o").arg(&made).arg(root().join(source));
    let mut config = Command::new("pkg-config");
    config.args(["--cflags", "--libs", "defuse"]);
    let flags = match is_there("pkg-config") {
        true => run(config.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))),
        false => format!("-I{0}/include -L{0}/lib -ldefuse", prefix.display()),
    };
    cc.args(flags.split_whitespace()).arg(format!("-Wl,-rpath,{}/lib", prefix.display()));
    run(cc.arg("-pthread"));
    let mut program = Command::new("timeout");
    program.arg("120").arg(made);
    Some((dir, program))
}

fn list_declared() -> BTreeSet<String> {
    let script = std::fs::read_to_string(root().join("libdefuse.map")).unwrap();
    let names = script.lines().map(|line| line.trim().trim_end_matches(';'));
    names.filter(|name| name.starts_with("defuse_")).map(str::to_owned).collect()
}

#[test]
fn the_library_exports_every_function_with_a_version_and_nothing_else() {
    let Some(prefix) = prefix().filter(|_| is_there("readelf")) else { return };
    let library = prefix.join("lib/libdefuse.so.0");
    let dynamic = run(Command::new("readelf").arg("-dW").arg(&library));
    assert!(dynamic.contains("[libdefuse.so.0]"), "{dynamic}");
    let symbols = run(Command::new("readelf").args(["--dyn-syms", "-W"]).arg(&library));
    let mut exported = BTreeSet::new();
    for line in symbols.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, typ, binding, _, section, name, ..] = words[..] else { continue };
        if section == "UND" || !["GLOBAL", "WEAK"].contains(&binding) || typ == "Bind" {
            continue;
        }
        // The version itself is a symbol, too.
        if name == "DEFUSE_0.1" || name == "DEFUSE_0.1@@DEFUSE_0.1" {
            continue;
        }
        let function = name.strip_suffix("@@DEFUSE_0.1");
        exported.insert(function.unwrap_or_else(|| panic!("{name} has no version")).to_owned());
    }
    assert_eq!(exported, list_declared());
    let versions = run(Command::new("readelf").args(["-V", "-W"]).arg(&library));
    assert!(versions.contains("Name: DEFUSE_0.1"), "{versions}");
}

#[test]
fn every_function_has_an_installed_manual_page() {
    let Some(prefix) = prefix() else { return };
    for function in list_declared() {
        let page = prefix.join(format!("share/man/man3/{function}.3"));
        let text = std::fs::read_to_string(&page).unwrap_or_default();
        let target = text.strip_prefix(".so ").map(|to| prefix.join("share/man").join(to.trim()));
        let is_page = text.contains(".SH NAME") || target.is_some_and(|target| target.exists());
        assert!(is_page, "{}: {text}", page.display());
    }
}

#[test]
fn the_first_example_compiles_and_runs() {
    let Some((_dir, mut program)) = program("examples/hello.c", &[]) else { return };
    assert_eq!(run(&mut program), "hello, world\n");
}

/// The output of a tour, and its statistics.
fn run_tour(command: &mut Command) -> (Vec<String>, Vec<String>) {
    let lines = run(command).lines().map(str::to_owned).collect::<Vec<_>>();
    lines.into_iter().partition(|line| !line.starts_with("statistics"))
}

#[test]
fn the_tours_in_c_and_in_rust_print_the_same() {
    let Some((dir, mut program)) = program("examples/tour.c", &[]) else { return };
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let (shown, statistics) = run_tour(program.arg(&data));
    let expected = [
        "mounted mem:",
        "mounted scratch:",
        "mounted /data",
        "mounted /more",
        "copied 262144 bytes from mem:/one to scratch:/two",
        "copied 262144 bytes from scratch:/two to /data/three",
        "/data has three",
        "read 4 pieces of /more/three at once: the same bytes",
        "done: 4 mounts of 2 types, 2 files copied, 4 reads finished later, 786432 bytes moved",
    ];
    assert_eq!(shown, expected);
    assert!(statistics.len() == 4 && statistics[2].contains("\"bytes\":262144"), "{statistics:?}");
    // With a test, dependencies have the features of `cargo test --workspace`: its build is taken.
    let tour = ["--workspace", "--example", "direct_tour", "--test", "header"];
    run(Command::new(env!("CARGO")).args(["build", "--offline", "--quiet"]).args(tour));
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("debug/examples/direct_tour");
    let again = dir.path().join("again");
    std::fs::create_dir(&again).unwrap();
    let (shown, statistics) = run_tour(Command::new(made).arg(&again));
    assert_eq!(shown, expected);
    assert!(statistics.len() == 4 && statistics[2].contains("262144 bytes"), "{statistics:?}");
}

#[test]
fn the_calls_work_in_c_as_their_manual_pages_say() {
    let Some((dir, mut program)) = program("tests/c/calls.c", &["-D_GNU_SOURCE"]) else { return };
    let below = dir.path().join("below");
    std::fs::create_dir(&below).unwrap();
    assert_eq!(run(program.arg(&below)), "passed\n");
    // Memory that was mapped until the exit.
    assert_eq!(std::fs::read_to_string(below.join("served/left")).unwrap(), "left");
}

/// They vanished without a word at the end of the program.
#[test]
fn stores_that_find_no_space_at_the_end_of_a_program_are_told() {
    let Some((_dir, mut program)) = program("tests/c/lost.c", &["-D_GNU_SOURCE"]) else { return };
    let output = program.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && printed.contains("stores to a mapped file are lost"),
        "{printed}"
    );
}

#[test]
fn asynchronous_operations_work_in_c() {
    let Some((dir, mut program)) = program("tests/c/aio.c", &["-D_GNU_SOURCE"]) else { return };
    assert_eq!(run(program.arg(dir.path())), "passed\n");
}

#[test]
fn many_threads_share_the_library() {
    let Some((dir, mut program)) = program("tests/c/threads.c", &["-D_GNU_SOURCE"]) else { return };
    assert_eq!(run(program.arg(dir.path())), "passed\n");
}

/// A server of `fs` at `socket`, and the thread that runs it.
fn serve(socket: &Path, fs: &Arc<MemoryFileSystem>) -> (Arc<SocketServer>, JoinHandle<bool>) {
    let fs = Arc::clone(fs);
    let server = Arc::new(SocketServer::bind(socket, fs, ServerOptions::default()).unwrap());
    let running = Arc::clone(&server);
    (server, std::thread::spawn(move || running.run()))
}

/// Programs of a run and mounts were tested with `reconnect`, and those in C were not.
#[test]
fn programs_in_c_continue_with_the_next_server() {
    let Some((dir, mut program)) = program("tests/c/reconnect.c", &["-D_GNU_SOURCE"]) else {
        return;
    };
    let socket = dir.path().join("socket");
    let fs = Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()));
    let mut server = Some(serve(&socket, &fs));
    let program = program.arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = program.stderr(Stdio::piped()).spawn().unwrap();
    let mut input = program.stdin.take().unwrap();
    let mut said = Vec::new();
    for line in BufReader::new(program.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        if let Some((server, thread)) = server.take() {
            server.shut_down();
            thread.join().unwrap();
        }
        if line == "restart" {
            server = Some(serve(&socket, &fs));
        }
        // After its last line it reads nothing.
        let _ = input.write_all(b"go on\n");
        said.push(line);
    }
    let ended = program.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said:?} {errors}");
    assert_eq!(said, ["restart", "restart", "end", "restart", "passed"]);
    if let Some((server, thread)) = server {
        server.shut_down();
        thread.join().unwrap();
    }
}

/// The program `defuse`, as the tests of its crate use it.
fn defuse() -> PathBuf {
    // With a test, dependencies have the features of `cargo test --workspace`: its build is taken.
    let built = ["--workspace", "--bin", "defuse", "--test", "header"];
    run(Command::new(env!("CARGO")).args(["build", "--offline", "--quiet"]).args(built));
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("debug/defuse")
}

/// A process that ends with its test.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Devices in a run, a mount and a program in Rust were tested, and those in C were not.
#[test]
fn a_program_in_c_has_a_device_and_others_reach_it_at_its_path() {
    let Some((dir, program)) = program("tests/c/bound.c", &["-D_GNU_SOURCE"]) else { return };
    // Without timeout(1), so that a kill is one of the program.
    let made = program.get_args().last().unwrap().to_owned();
    let (defuse, path) = (defuse(), |name: &str| dir.path().join(name));
    let manager = start_manager(&defuse, dir.path());
    let socket = manager.socket.clone();
    let stat = || Command::new(&defuse).arg("stat").arg(&socket).output().unwrap();
    let shown = |file: &str| run(Command::new(&made).arg(&socket).arg(file));
    let mut program = Command::new(&made);
    program.arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = ChildGuard(program.spawn().unwrap());
    let mut input = program.0.stdin.take().unwrap();
    let holder = format!("process {} of user", program.0.id());
    let mut lines = BufReader::new(program.0.stdout.take().unwrap()).lines();
    for (line, file, is_bound) in
        [("first", "first", true), ("given back", "first", false), ("second", "second", true)]
    {
        assert_eq!(lines.next().unwrap().unwrap(), line);
        assert_eq!(text(&stat()).contains(&holder), is_bound, "{line}: {}", text(&stat()));
        assert_eq!(shown(&format!("/one/{file}")), file, "{line}");
        if line != "second" {
            input.write_all(b"go on\n").unwrap();
        }
    }
    program.0.kill().unwrap();
    program.0.wait().unwrap();
    assert_eq!(shown("/one/second"), "second", "the manager has taken it over");
    drop(manager);
    run(Command::new(&defuse).arg("fsck").arg(path("one")));
}

/// In the child of a program with `uhs:` a write, a create and a close succeeded and were lost, and
/// a sync was a SIGSEGV in the parent's ring, or never ended.
#[test]
fn a_child_of_a_program_in_c_or_python_is_served_or_refused_by_each_file_system() {
    let Some((dir, program)) = program("tests/c/fork.c", &["-D_GNU_SOURCE"]) else { return };
    let defuse = defuse();
    let path = |name: &str| dir.path().join(name);
    let make = |name: &str| {
        run(Command::new(&defuse)
            .args(["mkfs", "uhs", "--force", "--size", "32M"])
            .arg(path(name)));
        format!("uhs:{}", path(name).display())
    };
    let socket = path("socket");
    let fs = Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default()));
    let (server, thread) = serve(&socket, &fs);
    let manager = start_manager(&defuse, dir.path());
    let mut shared = Command::new(&defuse);
    shared.args(["serve", "--foreground", "--shared", "memory:"]).arg(path("shared"));
    let _shared = ChildGuard(shared.stderr(Stdio::null()).spawn().unwrap());
    while !path("shared").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    for (source, rights) in [
        ("memory:".to_owned(), "private"),
        (format!("passthrough:{}", path("").display()), "served"),
        (format!("passthrough:{},backing=off", path("").display()), "served"),
        (make("image"), "refused"),
        (make("image-2") + ",worker", "refused"),
        (make("image-3") + ",separation=learned", "refused"),
        (format!("socket:{}", socket.display()), "refused"),
        (format!("shared:{}", path("shared").display()), "cached"),
        (format!("bound:{},device=/one", manager.socket.display()), "refused"),
    ] {
        let mut in_c = Command::new(program.get_program());
        in_c.args(program.get_args()).arg(&source).arg(rights);
        let output = in_c.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(text(&output), "passed\n", "{source}: {errors}");
        let is_notified = ["uhs:", "bound:"].iter().any(|kind| source.starts_with(kind));
        let lines = errors.lines().filter(|line| line.contains("cannot use it (ENOTCONN)")).count();
        // One for each child.
        assert_eq!(lines, if is_notified { 3 } else { 0 }, "{source}: {errors}");
        for name in ["kept", "d/inner", "d"] {
            let _ = std::fs::remove_file(path(name)).or_else(|_| std::fs::remove_dir(path(name)));
        }
        if let Some(image) = source.strip_prefix("uhs:") {
            let image = image.split(',').next().unwrap();
            run(Command::new(&defuse).arg("fsck").arg(image));
        }
    }
    server.shut_down();
    thread.join().unwrap();
    if !is_there("python3") {
        return;
    }
    let Some(library) = prefix().map(|prefix| prefix.join("lib/libdefuse.so.0")) else { return };
    for (source, rights) in [
        ("memory:".to_owned(), "private"),
        (format!("passthrough:{}", path("").display()), "served"),
        (make("image"), "refused"),
        (format!("bound:{},device=/one", manager.socket.display()), "refused"),
    ] {
        let mut python = Command::new("timeout");
        python.args(["120", "python3"]).arg(root().join("tests/c/fork.py"));
        assert_eq!(run(python.arg(&library).arg(&source).arg(rights)), "passed\n", "{source}");
    }
}

/// A manager with one device, `/one`, that applications may have.
struct ManagedDevice {
    socket: PathBuf,
    _manager: ChildGuard,
}

fn start_manager(defuse: &Path, dir: &Path) -> ManagedDevice {
    let path = |name: &str| dir.join(name);
    run(Command::new(defuse).args(["mkfs", "uhs", "--size", "64M"]).arg(path("one")));
    let (socket, source) = (path("managed"), format!("uhs:{}", path("one").display()));
    let config = format!(
        "socket = {socket:?}\n[[device]]\npath = \"/one\"\nsource = {source:?}\nbind = []\n"
    );
    std::fs::write(path("config"), config).unwrap();
    let mut manager = Command::new(defuse);
    manager.args(["manager", "--foreground"]).arg(path("config")).stderr(Stdio::null());
    let manager = ChildGuard(manager.spawn().unwrap());
    let stat = || Command::new(defuse).arg("stat").arg(&socket).output().unwrap();
    let begin = Instant::now();
    while !stat().status.success() {
        assert!(begin.elapsed() < Duration::from_secs(60), "there is no manager");
        std::thread::sleep(Duration::from_millis(50));
    }
    ManagedDevice { socket, _manager: manager }
}

#[test]
fn a_program_in_c_writes_and_reads_files_of_a_volume_and_its_child_is_refused() {
    if let Some(reason) = gluster::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    let forks = program("tests/c/fork.c", &["-D_GNU_SOURCE"]);
    let Some((_dir, program)) = program("tests/c/volume.c", &["-D_GNU_SOURCE"]) else { return };
    let Some((_other, forks)) = forks else { return };
    let servers = GlusterServers::start().unwrap();
    for volume in gluster::VOLUMES {
        let mut inside = servers.command(Path::new(program.get_program()));
        inside.args(program.get_args());
        inside.arg(format!("gluster://{}/{volume}", gluster::HOST));
        assert_eq!(run(&mut inside), "passed\n", "{volume}");
    }
    let mut inside = servers.command(Path::new(forks.get_program()));
    inside.args(forks.get_args());
    inside.arg(format!("gluster://{}/{}", gluster::HOST, gluster::VOLUMES[0])).arg("refused");
    assert_eq!(run(&mut inside), "passed\n", "in a child");
}

#[test]
fn every_function_is_called_by_a_program_in_c() {
    let mut sources = String::new();
    for dir in ["tests/c", "examples"] {
        for file in std::fs::read_dir(root().join(dir)).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "c") {
                sources.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let called = |name: &&String| sources.contains(&format!("{name}("));
    let missing: Vec<_> = list_declared().into_iter().filter(|name| !called(&name)).collect();
    assert!(missing.is_empty(), "no program calls {missing:?}");
}
