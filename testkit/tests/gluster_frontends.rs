//! A GlusterFS volume behind each frontend: how its source names servers and a directory, which
//! messages operators receive, and the state after programs of a run were killed. All parts share
//! the servers, and run one after another.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_direct::{
    CallError, ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart,
    WorkDir,
};
use defuse_fs::{Caller, Context, Errno, FileKind, FileSystem, Ino, Name, NewNode};
use defuse_gluster::{Gluster, GlusterOptions, ManagementTransport};
use defuse_testkit::gluster::{GlusterServers, HOST, ROOM, unavailable_reason};
use defuse_testkit::mounted::{self, ServedMount, program};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// An address of this machine where no server listens.
const DEAD: &str = "127.1.1.9";

#[test]
fn a_volume_is_served_by_every_frontend_and_named_in_every_way() {
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    let servers = GlusterServers::start().unwrap();
    let place = VolumePlace { servers: &servers, dir: mounted::scratch().unwrap() };
    time_run("notes", || statistics_say_why_answers_are_kept_for_a_short_time(&place));
    time_run("killed programs", || a_killed_program_of_a_run_leaves_no_lock(&place));
    time_run("killed writer", || a_killed_writer_leaves_whole_files(&place));
    time_run("sub-directory", || a_sub_directory_is_all_that_is_seen(&place));
    time_run("fail-over", || the_next_server_is_asked_if_the_first_one_is_dead(&place));
    time_run("port", || a_wrong_port_is_named_and_the_right_one_works(&place));
    time_run("unix", || the_socket_of_this_machine_reaches_its_volumes(&place));
    time_run("served", || a_served_volume_has_clients_by_socket_and_by_shared_memory(&place));
    time_run("unnamed", || an_unnamed_file_is_refused_and_leaves_nothing(&place));
}

fn time_run(what: &str, run: impl FnOnce()) {
    let begun = Instant::now();
    run();
    println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
}

/// The servers, and a directory for one run of the test.
struct VolumePlace<'a> {
    servers: &'a GlusterServers,
    dir: TempDir,
}

impl VolumePlace<'_> {
    /// The program `defuse` in the network of the servers.
    fn defuse(&self, words: &[&str]) -> Command {
        let mut command = self.servers.command(program().unwrap());
        command.args(words).env("DEFUSE_RUNTIME_DIR", self.dir.path().join("run"));
        command
    }

    /// The output of the program `defuse`, or its errors if it fails.
    fn run_program(&self, words: &[&str]) -> Result<String, String> {
        read_output(self.defuse(words).output().unwrap())
    }

    fn mount(&self, source: &str, options: &[&str]) -> anyhow::Result<ServedMount> {
        let inside = self.servers.network_prefix();
        let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
        ServedMount::mount_under(&inside, source.as_ref(), self.dir.path(), options)
    }

    /// The output of a script in a run with a source at `/defuse-volume`.
    fn run(&self, source: &str, script: &str) -> Result<String, String> {
        let mount = format!("/defuse-volume={source}");
        self.run_program(&["run", "--mount", &mount, "--", "sh", "-ec", script])
    }
}

fn read_output(output: Output) -> Result<String, String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn source(volume: &str) -> String {
    format!("gluster://{HOST}/{volume}")
}

const NOTE: &str = "names and attributes are kept for 1s: `gluster volume set dist features.cache-invalidation on` \
                    would allow it";

/// Only the log contained the reason.
fn statistics_say_why_answers_are_kept_for_a_short_time(place: &VolumePlace<'_>) {
    let stat = |target: &str, form: &[&str]| {
        place.run_program(&[&["stat", target], form].concat()).unwrap()
    };
    let mount = place.mount(&source("dist"), &[]).unwrap();
    let target = mount.path().to_str().unwrap().to_owned();
    let text = stat(&target, &[]);
    assert!(text.ends_with(&format!("\nnote: {NOTE}\n")), "{text}");
    let json = stat(&target, &["--json"]);
    assert!(json.contains(&format!("\"notes\":[\"{NOTE}\"]")), "{json}");
    let metrics = stat(&target, &["--prometheus"]);
    let metric = |line: &str| {
        line.starts_with("defuse_fs_note_info{") && line.ends_with(&format!("note=\"{NOTE}\"}} 1"))
    };
    assert!(metrics.lines().any(metric), "{metrics}");
    mount.end().unwrap();

    // The servers of this volume notify of changes.
    let mount = place.mount(&source("repl"), &[]).unwrap();
    wait_until("nothing is said", || !stat(&target, &[]).contains("note: "));
    mount.end().unwrap();
    let mount = place.mount(&source("repl"), &["-o", "upcalls=0"]).unwrap();
    let text = stat(&target, &[]);
    assert!(text.ends_with("\nnote: names and attributes are kept for 1s: upcalls=0\n"), "{text}");
    mount.end().unwrap();

    let server = ServeProcess::start(place, "dist", &[]);
    let text = stat(server.socket(), &[]);
    assert!(text.contains(&format!("note: {NOTE}\n")), "{text}");
    // Its clients receive no message: it is for the operator of the server.
    let mount = place.mount(&format!("socket:{}", server.socket()), &[]).unwrap();
    let text = stat(&target, &[]);
    assert!(!text.contains("note: "), "{text}");
    mount.end().unwrap();
}

/// A run whose programs answer lines of words (`file_agent`).
struct AgentRun {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl AgentRun {
    fn start(place: &VolumePlace<'_>, volume: &str, script: &str) -> AgentRun {
        let mount = format!("/defuse-volume={}", source(volume));
        let mut run = place.defuse(&["run", "--mount", &mount, "--", "sh", "-c", script]);
        let mut child = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        AgentRun { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The number of a process, which it prints.
    fn pid(&mut self) -> Pid {
        let line = self.line();
        Pid::from_raw(line.parse().unwrap_or_else(|_| panic!("{line:?} is no number"))).unwrap()
    }

    fn ask(&mut self, words: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{words}").unwrap();
        self.line()
    }
}

impl Drop for AgentRun {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lock(file: &fs::File) -> bool {
    fcntl_lock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// A lock by fcntl(2) ends with the program that holds it, and with the whole run, however they
/// end.
fn a_killed_program_of_a_run_leaves_no_lock(place: &VolumePlace<'_>) {
    let mount = place.mount(&source("repl"), &[]).unwrap();
    let path = mount.path().join("locked");
    fs::write(&path, "text").unwrap();
    let other = fs::File::options().read(true).write(true).open(&path).unwrap();
    let agent = env!("CARGO_BIN_EXE_file_agent");
    let script = format!("sh -c 'echo $$; exec {agent}'; echo $$; exec {agent}");
    let mut run = AgentRun::start(place, "repl", &script);

    // The first program is killed, and the second one goes on in its run.
    let first = run.pid();
    let locked = run.ask("lock a /defuse-volume/locked");
    assert!(locked.starts_with("ok "), "{locked}");
    assert!(!lock(&other), "a program of the run has the lock");
    kill_process(first, Signal::KILL).unwrap();
    wait_until("the lock of a killed program is free", || lock(&other));
    let second = run.pid();
    let refused = run.ask("lock b /defuse-volume/locked");
    assert!(["error 11", "error 13"].contains(&&*refused), "{refused}");
    fcntl_lock(&other, FlockOperation::Unlock).unwrap();
    wait_until("the second program has the lock", || {
        run.ask("lock b /defuse-volume/locked").starts_with("ok ")
    });
    assert!(!lock(&other), "the second program has the lock");

    // The run is killed, which has the connection to the volume.
    run.child.kill().unwrap();
    wait_until("the lock of a killed run is free", || lock(&other));
    let _ = kill_process(second, Signal::KILL);
    assert_eq!(fs::read(&path).unwrap(), b"text");
    drop(other);
    fs::remove_file(&path).unwrap();
    mount.end().unwrap();
}

/// A file that a program writes and gives its name by a renaming is the old or the new one, after
/// SIGKILL at any moment.
fn a_killed_writer_leaves_whole_files(place: &VolumePlace<'_>) {
    let mount = place.mount(&source("repl"), &[]).unwrap();
    let dir = mount.path().join("writer");
    let script = r#"mkdir -p /defuse-volume/writer; cd /defuse-volume/writer; echo $$; i=0
        while :; do i=$((i+1)); echo "$i $i $i" >new; mv new "whole-$((i % 8))"; done"#;
    for round in 0..4 {
        let mut run = AgentRun::start(place, "repl", script);
        let writer = run.pid();
        // The last one of the first eight.
        wait_until("all files are there", || dir.join("whole-0").exists());
        std::thread::sleep(Duration::from_millis(30 * round));
        kill_process(writer, Signal::KILL).unwrap();
        run.child.wait().unwrap();
        for number in 0..8 {
            let path = dir.join(format!("whole-{number}"));
            let text = fs::read_to_string(&path).unwrap();
            let words: Vec<&str> = text.split_whitespace().collect();
            assert!(words.len() == 3 && words.iter().all(|word| *word == words[0]), "{text:?}");
            assert_eq!(words[0].parse::<u32>().unwrap() % 8, number);
        }
        let mut names = Vec::from_iter(fs::read_dir(&dir).unwrap().map(|it| it.unwrap().path()));
        names.retain(|path| !path.file_name().unwrap().as_encoded_bytes().starts_with(b"whole-"));
        assert!(names.iter().all(|path| path.ends_with("new")), "{names:?}");
        fs::remove_dir_all(&dir).unwrap();
    }
    mount.end().unwrap();
}

fn task() -> ClientTask {
    ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()))
}

/// The volume in this process, at `g:`.
fn client(address: &str, options: GlusterOptions) -> Result<(DirectClient, Arc<Gluster>), String> {
    let options = GlusterOptions { in_application: true, submits: false, ..options };
    let volume = Arc::new(Gluster::connect(address, &options)?);
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"g:", volume.clone(), &ClientMountArgs::default()).unwrap();
    Ok((client, volume))
}

/// A directory is named by the path of the source, or by an option.
fn a_sub_directory_is_all_that_is_seen(place: &VolumePlace<'_>) {
    let whole = place.mount(&source("dist"), &[]).unwrap();
    fs::create_dir_all(whole.path().join("above/sub/inner")).unwrap();
    fs::write(whole.path().join("above/secret"), "secret").unwrap();
    fs::write(whole.path().join("above/sub/inner/file"), "seen").unwrap();
    std::os::unix::fs::symlink("../secret", whole.path().join("above/sub/out")).unwrap();
    whole.end().unwrap();

    let by_path = format!("{}/above/sub", source("dist"));
    for (source, options) in
        [(by_path.clone(), vec![]), (source("dist"), vec!["-o", "sub-directory=/above/sub"])]
    {
        let mount = place.mount(&source, &options).unwrap();
        let names = fs::read_dir(mount.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["inner", "out"]);
        assert_eq!(fs::read(mount.path().join("inner/file")).unwrap(), b"seen");
        assert!(fs::read(mount.path().join("out")).is_err(), "a link leads out of the mount");
        mount.end().unwrap();
    }
    // In a program, the client follows `..` and links itself.
    let by_option = format!("{},sub-directory=above/sub", source("dist"));
    for source in [&by_path, &by_option] {
        let script = "cd /defuse-volume; ls; cat inner/file; cd inner; ls ../..; cat ../out || :";
        let text = place.run(source, script).unwrap();
        assert!(text.starts_with("inner\nout\nseen") && !text.contains("secret"), "{text}");
    }
    place.servers.enter().unwrap();
    let sub_directory = Some("above/sub".to_owned());
    let by_option = GlusterOptions { sub_directory, ..GlusterOptions::default() };
    let volume = format!("//{HOST}/dist");
    for (address, options) in [
        (format!("{volume}/above/sub"), GlusterOptions::default()),
        (volume.clone(), by_option.clone()),
    ] {
        let (client, fs) = client(&address, options).unwrap();
        let stat =
            |path: &[u8]| client.stat(&task(), WalkStart::Cwd, path, true).map(|it| it.attr.size);
        assert_eq!(stat(b"g:/inner/file"), Ok(4));
        for path in ["g:/../secret", "g:/inner/../../secret", "g:/secret", "g:/out"] {
            assert!(stat(path.as_bytes()).is_err(), "{path}");
        }
        let cx = Context::new(Caller::default());
        assert_eq!(fs.lookup_parent(&cx, Ino::ROOT).unwrap().ino, Ino::ROOT);
        let inner = fs.lookup(&cx, Ino::ROOT, Name::new(b"inner").unwrap()).unwrap().ino;
        assert_eq!(fs.lookup_parent(&cx, inner).unwrap().ino, Ino::ROOT);
        client.unmount(b"g:", false).unwrap();
    }
    let twice = client(&format!("{volume}/above"), by_option.clone()).err().unwrap();
    assert!(twice.contains("exclude each other"), "{twice}");
    let absent = GlusterOptions { sub_directory: Some("above/absent".to_owned()), ..by_option };
    let absent = client(&volume, absent).err().unwrap();
    assert!(absent.contains("the directory absent: No such file"), "{absent}");
}

fn the_next_server_is_asked_if_the_first_one_is_dead(place: &VolumePlace<'_>) {
    let source = format!("gluster://{DEAD},{HOST}/dist");
    let mount = place.mount(&source, &[]).unwrap();
    fs::write(mount.path().join("by-the-second"), "x").unwrap();
    mount.end().unwrap();
    let escaped = source.replace(',', "\\,");
    let text = place.run(&escaped, "ls /defuse-volume; rm /defuse-volume/by-the-second");
    assert!(text.as_ref().is_ok_and(|text| text.contains("by-the-second")), "{text:?}");
    let all_dead = place.run(&format!("gluster://{DEAD}\\,127.1.1.8/dist"), "ls").unwrap_err();
    for dead in [DEAD, "127.1.1.8"] {
        assert!(all_dead.contains(&format!("{dead} port 24007: ")), "{all_dead}");
    }
}

fn a_wrong_port_is_named_and_the_right_one_works(place: &VolumePlace<'_>) {
    for option in ["port", "volfile-server-port"] {
        let with =
            |port: &str| place.run(&format!("{},{option}={port}", source("dist")), "echo ok");
        assert_eq!(with("24007").as_deref(), Ok("ok\n"), "{option}");
        let wrong = with("24006").unwrap_err();
        assert!(wrong.contains(&format!("{HOST} port 24006: ")), "{wrong}");
    }
}

/// The socket of glusterd has a fixed path, which the servers of the test do not use: it is there
/// in mounts of a process.
fn the_socket_of_this_machine_reaches_its_volumes(place: &VolumePlace<'_>) {
    let script = format!(
        "mount --bind {ROOM} /mnt; mount -t tmpfs run /run; ln -s /mnt/glusterd.socket /run/glusterd.socket
        exec \"$0\" \"$@\""
    );
    let inside = |source: &str| {
        let mut command = place.servers.command_within("unshare".as_ref());
        command.args(["--mount", "sh", "-ec", &script]).arg(program().unwrap());
        command.args(["run", "--mount", &format!("/defuse-volume={source}"), "--", "sh", "-ec"]);
        command.arg("cd /defuse-volume; echo by socket >unix; cat unix; rm unix");
        read_output(command.env("DEFUSE_RUNTIME_DIR", "/run/defuse").output().unwrap())
    };
    assert_eq!(inside("gluster:///dist,transport=unix").as_deref(), Ok("by socket\n"));
    let with_host = inside(&format!("{},transport=unix", source("dist"))).unwrap_err();
    assert!(with_host.contains("write gluster:///dist"), "{with_host}");
    // Without such a socket.
    let elsewhere = place.run("gluster:///dist,transport=unix", "ls").unwrap_err();
    assert!(elsewhere.contains("/var/run/glusterd.socket"), "{elsewhere}");
    assert_eq!(ManagementTransport::default(), ManagementTransport::Tcp);
}

/// `defuse serve` of a volume in the foreground of a child process, ended when dropped.
struct ServeProcess {
    child: Child,
    socket: PathBuf,
}

impl ServeProcess {
    fn start(place: &VolumePlace<'_>, volume: &str, options: &[&str]) -> ServeProcess {
        let socket = place.dir.path().join("socket");
        let mut serve = place.defuse(&["serve", "--foreground"]);
        serve.args(options).arg(source(volume)).arg(&socket).stdin(Stdio::null());
        let server = ServeProcess { child: serve.spawn().unwrap(), socket };
        wait_until("the server is there", || place.run_program(&["stat", server.socket()]).is_ok());
        server
    }

    fn socket(&self) -> &str {
        self.socket.to_str().unwrap()
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Two programs and a mount are clients of one server, which is a client of the volume, and see
/// each other's changes.
fn a_served_volume_has_clients_by_socket_and_by_shared_memory(place: &VolumePlace<'_>) {
    for (kind, options) in [("socket", &[][..]), ("shared", &["--shared"])] {
        let server = ServeProcess::start(place, "repl", options);
        let source = format!("{kind}:{}", server.socket());
        // The second program waits for the file of the first one, and answers.
        let wait = |name: &str| format!("until [ -s {name} ]; do sleep 0.02; done");
        let scripts = [
            format!("echo question >ask; {}; cat answer; chmod 600 answer", wait("answer")),
            format!("{}; cat ask; echo reply >new; mv new answer", wait("ask")),
        ];
        let start = |script: &str| {
            let mount = format!("/defuse-volume={source}");
            let script = format!("cd /defuse-volume; {script}");
            let mut run = place.defuse(&["run", "--mount", &mount, "--", "sh", "-ec", &script]);
            run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ended = scripts.map(|script| start(&script)).map(|it| it.wait_with_output().unwrap());
        assert_eq!(ended.map(read_output), [Ok("reply\n".to_owned()), Ok("question\n".to_owned())]);
        let mount = place.mount(&source, &[]).unwrap();
        assert_eq!(fs::read(mount.path().join("answer")).unwrap(), b"reply\n");
        fs::write(mount.path().join("large"), vec![7; 3 << 20]).unwrap();
        mount.end().unwrap();
        drop(server);
        // The volume has the complete data.
        let direct = place.mount(&self::source("repl"), &[]).unwrap();
        assert_eq!(fs::read(direct.path().join("large")).unwrap(), vec![7; 3 << 20]);
        let mode = fs::metadata(direct.path().join("answer")).unwrap().permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
        for name in ["ask", "answer", "large"] {
            fs::remove_file(direct.path().join(name)).unwrap();
        }
        direct.end().unwrap();
    }
}

/// GlusterFS has no unnamed files.
fn an_unnamed_file_is_refused_and_leaves_nothing(place: &VolumePlace<'_>) {
    for volume in ["dist", "repl"] {
        let mount = place.mount(&source(volume), &[]).unwrap();
        let dir = mount.path().join("unnamed");
        fs::create_dir(&dir).unwrap();
        let mut options = fs::File::options();
        let open = options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        let error = open.open(&dir).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");

        place.servers.enter().unwrap();
        let (client, fs) =
            client(&format!("//{HOST}/{volume}"), GlusterOptions::default()).unwrap();
        let flags = (libc::O_TMPFILE | libc::O_RDWR) as u32;
        let how = OpenHow { flags, mode: 0o600, ..OpenHow::default() };
        let opened = client.open(&task(), WalkStart::Cwd, b"g:/unnamed", how).map(drop);
        assert_eq!(opened, Err(CallError::Errno(Errno::EOPNOTSUPP)));
        let cx = Context::new(Caller::default());
        let at = fs.lookup(&cx, Ino::ROOT, Name::new(b"unnamed").unwrap()).unwrap().ino;
        let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
        let args = defuse_fs::OpenArgs {
            flags: defuse_fs::OpenFlags(defuse_fs::OpenFlags::RDWR),
            kill_suidgid: false,
        };
        assert_eq!(fs.tmpfile(&cx, at, &node, args).map(drop), Err(Errno::EOPNOTSUPP));
        client.unmount(b"g:", false).unwrap();

        // Neither in the volume nor on a brick.
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        for brick in [1, 2] {
            let brick = format!("{ROOM}/bricks/{volume}{brick}/unnamed");
            let mut list = place.servers.command_within("ls".as_ref());
            assert_eq!(read_output(list.args(["-A", &brick]).output().unwrap()).as_deref(), Ok(""));
        }
        fs::remove_dir(&dir).unwrap();
        mount.end().unwrap();
    }
}
