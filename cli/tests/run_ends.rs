//! The ends of programs in a run: by signals, with exit codes, and with the run itself.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use common::{PROGRAM, TestPlace, eventually};
use rustix::process::{Pid, Signal, kill_process};

/// Starts a command with its input and output connected to the test.
fn start(command: &mut Command) -> (Child, BufReader<std::process::ChildStdout>) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

fn line(out: &mut impl BufRead) -> String {
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

const RUN: &[&str] = &["run", "--mount", "mem:=memory:"];

/// The signal ended `defuse run`, and the program continued without it.
#[test]
fn a_signal_to_the_run_reaches_the_program_and_sets_the_exit_code() {
    let place = TestPlace::new();
    let with = |script: &str, signal: Signal| {
        // The test runner may ignore signals, and ignored signals are inherited.
        let mut command = place.command_of("env".as_ref(), &["--default-signal", PROGRAM]);
        let (mut run, mut out) = start(command.args(RUN).args(["--", "sh", "-c", script]));
        assert_eq!(line(&mut out), "up");
        kill_process(Pid::from_child(&run), signal).unwrap();
        let code = run.wait().unwrap().code();
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        (code, rest)
    };
    let signals = [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1];
    for (signal, name) in signals.into_iter().zip(["TERM", "HUP", "INT", "QUIT", "USR1"]) {
        let script =
            format!("trap 'echo got {name}; exit 7' {name}; echo up; while :; do sleep 0.02; done");
        assert_eq!(with(&script, signal), (Some(7), format!("got {name}\n")));
    }
    let seen = with("echo up; exec sleep 600", Signal::TERM);
    assert_eq!(seen, (Some(128 + 15), String::new()));
}

/// A program started by nohup(1) survives its terminal, also in a run.
#[test]
fn an_ignored_signal_stays_ignored() {
    let place = TestPlace::new();
    let script = "trap '' HUP; exec \"$@\"";
    let mut shell = place.command_of("/bin/sh".as_ref(), &["-c", script, "sh", PROGRAM]);
    let inner = "echo up; read line; kill -HUP $$; echo alive";
    let (mut run, mut out) = start(shell.args(RUN).args(["--", "sh", "-c", inner]));
    assert_eq!(line(&mut out), "up");
    kill_process(Pid::from_child(&run), Signal::HUP).unwrap();
    run.stdin.take().unwrap().write_all(b"on\n").unwrap();
    assert_eq!(line(&mut out), "alive");
    assert_eq!(run.wait().unwrap().code(), Some(0));
}

/// The two exit codes were 1, as for every failure of the run itself.
#[test]
fn a_missing_program_exits_with_127_and_an_unexecutable_one_with_126() {
    let place = TestPlace::new();
    fs::write(place.path("src/plain"), "text").unwrap();
    let source = format!("/defuse-test=passthrough:{}", place.path("src").display());
    let plain = place.path("src/plain").display().to_string();
    let cases = [
        ("no-such-program", 127, "in PATH?"),
        ("/no/such/program", 127, "in PATH?"),
        ("/defuse-test/missing", 127, "in PATH?"),
        (plain.as_str(), 126, "executable?"),
        ("/defuse-test/plain", 126, "executable?"),
        ("/tmp", 126, "executable?"),
    ];
    for (program, code, text) in cases {
        place.expect_failure(code, &["run", "--mount", &source, "--", program], text);
    }
}

/// The number of processes that run this command, found by its last argument.
fn count_running(argument: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let commands = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let wanted = format!("\0{argument}\0");
    commands.filter(|command| command.ends_with(wanted.as_bytes())).count()
}

/// A run that is killed leaves its programs behind, with mounts that no process serves.
#[test]
fn programs_end_with_their_run_if_requested() {
    let place = TestPlace::new();
    // In a session of its own, in the background, after a fork without execve(2), and in the
    // foreground.
    let seconds = format!("9{}", std::process::id());
    let script = format!(
        "setsid sleep {seconds} & sleep {seconds} & (while :; do read line; sleep {seconds}; done) & \
         echo up; sleep {seconds}"
    );
    let mut command = place.command(RUN);
    command.args(["--on-death", "end", "--", "sh", "-c", &script]);
    let (mut run, mut out) = start(&mut command);
    assert_eq!(line(&mut out), "up");
    eventually("started", || count_running(&seconds) >= 3);
    kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
    run.wait().unwrap();
    // All processes had the pipe open, the shells included. It ends with the last one.
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    eventually("ended", || count_running(&seconds) == 0);
    // A run that ends normally also ends its background processes.
    let mut command = place.command(RUN);
    let script = format!("sleep {seconds} & echo up");
    let (mut run, mut out) = start(command.args(["--on-death", "end", "--", "sh", "-c", &script]));
    assert_eq!(line(&mut out), "up");
    assert_eq!(run.wait().unwrap().code(), Some(0));
    out.read_to_string(&mut rest).unwrap();
    eventually("ended", || count_running(&seconds) == 0);
}

/// Their calls failed with `ENOTCONN`, without a reason.
#[test]
fn programs_of_a_killed_run_get_the_reason_for_missing_files() {
    let place = TestPlace::new();
    let script = "echo up; read line; read line < mem:/f || echo 'no file'; cat mem:/f; echo $?";
    let mut command = place.command(RUN);
    let (mut run, mut out) = start(command.args(["--", "sh", "-c", script]));
    assert_eq!(line(&mut out), "up");
    let (mut input, mut errors) = (run.stdin.take().unwrap(), run.stderr.take().unwrap());
    kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
    run.wait().unwrap();
    input.write_all(b"on\n").unwrap();
    assert_eq!((line(&mut out), line(&mut out)), ("no file".to_owned(), "1".to_owned()));
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    // The shell, and the program that it has started since.
    assert_eq!(said.matches("mem:: the process that served it has ended").count(), 2, "{said}");
}

/// Each program that was started after the end of the run ended with 125, also one that used no
/// file of a mount.
#[test]
fn programs_of_a_killed_run_start_others() {
    let place = TestPlace::new();
    let kept = place.path("src").display().to_string();
    let (gone, directory) = ("mem:=memory:", format!("/defuse-test=passthrough:{kept}"));
    for working_directory in ["/", "mem:/", "/defuse-test"] {
        let script = "echo up; read line; /bin/true; echo $?; sh -c 'echo in a shell; exit 3'; echo $?; \
            cat mem:/f 2> /dev/null; echo $?; mkdir mem:/d 2> /dev/null; echo $?; ls mem:/ 2> /dev/null; echo $?; \
            echo text > /defuse-test/f; cat /defuse-test/f";
        let run = ["run", "--mount", gone, "--mount", &directory, "-C", working_directory];
        let mut command = place.command(&run);
        let (mut run, mut out) = start(command.args(["--", "sh", "-c", script]));
        assert_eq!(line(&mut out), "up");
        kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
        let mut input = run.stdin.take().unwrap();
        run.wait().unwrap();
        input.write_all(b"on\n").unwrap();
        let mut said = String::new();
        out.read_to_string(&mut said).unwrap();
        assert_eq!(said, "0\nin a shell\n3\n1\n1\n2\ntext\n", "in {working_directory}");
    }
}

/// The standard library opens /dev/null in place of a closed descriptor, and programs got that:
/// `echo` succeeded.
#[test]
fn a_closed_descriptor_stays_closed_in_the_program() {
    let place = TestPlace::new();
    fs::copy("/bin/ls", place.path("src/ls")).unwrap();
    let source = format!("/defuse-test=passthrough:{}", place.path("src").display());
    for program in ["/bin/ls", "/defuse-test/ls"] {
        for closed in [">&-", "<&-", "2>&-", ">&- <&- 2>&-", ">/dev/null"] {
            let see = |start: &str| {
                let script = format!("{start} -d / /proc/self/fd/0 {closed}; echo $?");
                let mut shell = std::process::Command::new("sh");
                let output = shell.args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
                (String::from_utf8_lossy(&output.stdout).into_owned(), output.stderr.is_empty())
            };
            let run = format!("{} run --mount {source} -- {program}", common::PROGRAM);
            assert_eq!(see(&run), see("/bin/ls"), "{program} {closed}");
        }
    }
}
