//! How programs of a run end: by signals, with exit codes, and with the run itself.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use common::{PROGRAM, Place, eventually};
use rustix::process::{Pid, Signal, kill_process};

/// A command whose input and output are the test's.
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

/// `defuse run` ended by the signal, and its program went on without it.
#[test]
fn a_signal_to_the_run_reaches_the_program_and_the_exit_code_tells() {
    let place = Place::new();
    let with = |script: &str, signal: Signal| {
        // Whoever runs the tests may ignore signals, and what is ignored stays ignored.
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

/// A program started by nohup(1) does not end when the terminal does, also in a run.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let place = Place::new();
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

/// Both were 1, as for every failure of the run's own.
#[test]
fn a_program_that_is_not_there_is_127_and_one_that_cannot_be_executed_126() {
    let place = Place::new();
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
        place.fails(code, &["run", "--mount", &source, "--", program], text);
    }
}

/// The processes that run this command, by the last of its arguments.
fn running(argument: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let commands = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let wanted = format!("\0{argument}\0");
    commands.filter(|command| command.ends_with(wanted.as_bytes())).count()
}

/// A run that is killed leaves its programs behind, which look at mounts that nobody serves any more.
#[test]
fn programs_end_with_their_run_where_that_is_asked_for() {
    let place = Place::new();
    // In a session of its own, in the background, after a fork without execve(2), and in the foreground.
    let seconds = format!("9{}", std::process::id());
    let script = format!(
        "setsid sleep {seconds} & sleep {seconds} & (while :; do read line; sleep {seconds}; done) & \
         echo up; sleep {seconds}"
    );
    let mut command = place.command(RUN);
    command.args(["--on-death", "end", "--", "sh", "-c", &script]);
    let (mut run, mut out) = start(&mut command);
    assert_eq!(line(&mut out), "up");
    eventually("started", || running(&seconds) >= 3);
    kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
    run.wait().unwrap();
    // All of them had the pipe, the shells included: it ends with the last one.
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    eventually("ended", || running(&seconds) == 0);
    // A run that ends by itself ends what it has left in the background, too.
    let mut command = place.command(RUN);
    let script = format!("sleep {seconds} & echo up");
    let (mut run, mut out) = start(command.args(["--on-death", "end", "--", "sh", "-c", &script]));
    assert_eq!(line(&mut out), "up");
    assert_eq!(run.wait().unwrap().code(), Some(0));
    out.read_to_string(&mut rest).unwrap();
    eventually("ended", || running(&seconds) == 0);
}

/// Their calls failed with `ENOTCONN`, and nothing said why.
#[test]
fn programs_of_a_run_that_was_killed_are_told_why_their_files_are_gone() {
    let place = Place::new();
    let script = "echo up; read line; read line < mem:/f || echo 'no file'; cat mem:/f; echo $?";
    let mut command = place.command(RUN);
    let (mut run, mut out) = start(command.args(["--", "sh", "-c", script]));
    assert_eq!(line(&mut out), "up");
    let (mut input, mut errors) = (run.stdin.take().unwrap(), run.stderr.take().unwrap());
    kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
    run.wait().unwrap();
    input.write_all(b"on\n").unwrap();
    assert_eq!((line(&mut out), line(&mut out)), ("no file".to_owned(), "125".to_owned()));
    let mut said = String::new();
    errors.read_to_string(&mut said).unwrap();
    assert!(said.contains("mem:: the process that served it has ended"), "{said}");
    assert!(said.contains("cannot mount mem:: the run that serves it has ended"), "{said}");
}
