//! Attacks on `defuse run`, by unrelated users, and by programs of the run that have become another
//! user.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{TestPlace, eventually};

/// An interpreter that users other than root may execute.
const PYTHON: &str = "/usr/bin/python3";
const STRANGER: &[&str] = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// True if a test can act as another user. Otherwise prints the reason.
fn can_attack() -> bool {
    let found = Command::new("sh").args(["-c", "command -v setpriv"]).output();
    let tools = found.is_ok_and(|output| output.status.success()) && Path::new(PYTHON).exists();
    let can = tools && rustix::process::geteuid().is_root();
    if !can {
        println!("skipped: needs root, setpriv and {PYTHON}");
    }
    can
}

/// Runs a Python script as another user, and returns its output.
fn as_stranger(script: &str, arguments: &[&str]) -> String {
    let words = [STRANGER, &[PYTHON, "-c", script], arguments].concat();
    let output = Command::new(words[0]).args(&words[1..]).current_dir("/").output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).trim().to_owned()
}

/// A run of a shell, which executes one line at a time.
struct ShellRun {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl ShellRun {
    fn start(place: &TestPlace, mount: &str) -> ShellRun {
        let mut run = place.command(&["run", "--mount", mount, "--", "sh"]);
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
        ShellRun { child, stdin, stdout: BufReader::new(stdout) }
    }

    /// Runs `script` in the shell. Returns the one line that it prints.
    fn tell(&mut self, script: &str) -> String {
        writeln!(self.stdin.as_mut().unwrap(), "{script}").unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Ends the run. Returns its standard error.
    fn end(mut self) -> String {
        drop(self.stdin.take());
        let output = self.child.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// The directory in which a run of root keeps nodes, by the pid of its shell.
fn node_directory(shell: &str) -> String {
    format!("/tmp/.defuse-{:032x}-0", token(shell))
}

/// The random number of a run, which is part of the names of its directories. It is at the end of
/// the plan, which the programs of the run have open.
fn token(shell: &str) -> u128 {
    let fds = fs::read_dir(format!("/proc/{shell}/fd")).unwrap().flatten();
    let plan = fds.map(|entry| entry.path()).find(|path| {
        fs::read_link(path).is_ok_and(|to| to.display().to_string().contains("defuse-plan"))
    });
    let plan = fs::read(plan.unwrap()).unwrap();
    let len = u64::from_le_bytes(plan[8..16].try_into().unwrap()) as usize;
    u128::from_le_bytes(plan[16 + len - 16..16 + len].try_into().unwrap())
}

/// Python: creates a directory with a link to a file of another user, under the name of a fifo's
/// node.
const PLANT: &str = "import os, sys
os.mkdir(sys.argv[1], 0o777)
os.symlink(sys.argv[2], sys.argv[1] + '/' + sys.argv[3])
print('planted')";

/// A shell command that prints the name of the node of `mem:/f`.
const NODE: &str = "printf '%x-%x-0\\n' 0x$(stat -c %D mem:/f) $(stat -c %i mem:/f)";

/// The name of the directory for the nodes of fifos consisted of the run's user and pid. An
/// attacker could create it first, with links under the names of nodes, and have any file written
/// as root: the failure of mkdir(2) was ignored, the failure of mknod(2) was taken for success, and
/// the link was followed.
#[test]
fn planted_directories_and_links_do_not_redirect_a_run() {
    if !can_attack() {
        return;
    }
    let place = TestPlace::new();
    let victim = place.path("victim");
    fs::write(&victim, "untouched").unwrap();
    let victim = victim.to_str().unwrap();
    let mut run = ShellRun::start(&place, "mem:=memory:");
    let (shell, node) = (run.tell("mkfifo mem:/f; echo $$"), run.tell(NODE));
    let planted = format!("/tmp/.defuse-0-{}", run.child.id());
    assert_eq!(as_stranger(PLANT, &[&planted, victim, &node]), "planted");
    let through = run.tell("(echo through > mem:/f) & cat mem:/f");
    let made = node_directory(&shell);
    let mode = fs::symlink_metadata(&made).unwrap().mode() & 0o7777;
    let said = run.end();
    fs::remove_dir_all(&planted).unwrap();
    assert_eq!(fs::read_to_string(victim).unwrap(), "untouched");
    assert_eq!((through.as_str(), said.as_str()), ("through", ""));
    assert_eq!(mode, 0o700, "what the run made is of its user alone");
    assert!(!Path::new(&made).exists(), "nothing is left of a run");
}

/// A program of the run that has become another user knows the random name, and can create the
/// directory first.
#[test]
fn a_program_of_the_run_as_another_user_cannot_plant_nodes_for_root() {
    if !can_attack() {
        return;
    }
    let place = TestPlace::new();
    let victim = place.path("victim");
    fs::write(&victim, "untouched").unwrap();
    let victim = victim.to_str().unwrap();
    let mut run = ShellRun::start(&place, "mem:=memory:");
    let (shell, node) = (run.tell("mkfifo mem:/f; echo $$"), run.tell(NODE));
    let planted = node_directory(&shell);
    assert_eq!(as_stranger(PLANT, &[&planted, victim, &node]), "planted");
    let refused = run.tell("echo no > mem:/f || true; echo refused");
    let said = run.end();
    let _ = fs::remove_dir_all(&planted);
    assert_eq!(fs::read_to_string(victim).unwrap(), "untouched");
    assert_eq!(refused, "refused");
    assert!(said.contains("is not a directory of user 0 alone"), "{said}");
}

/// Python: binds the abstract names that the servers of runs of these processes used, and prints a
/// line. At the end of its standard input it prints the connections.
const BIND: &str = "import select, socket, sys
held = []
for pid in range(int(sys.argv[1]), int(sys.argv[2])):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try: s.bind(chr(0) + 'defuse-run-%d-0' % pid); s.listen(); held.append(s)
    except OSError: pass
print('bound', flush=True)
sys.stdin.read()
for s in select.select(held, [], [], 0)[0]: print('connected')";

/// Starts another user's process that has bound these names, until the end of its standard input.
fn bind(from: u32, to: u32) -> Child {
    let mut bind = Command::new(STRANGER[0]);
    bind.args(&STRANGER[1..]).args([PYTHON, "-c", BIND, &from.to_string(), &to.to_string()]);
    let bind = bind.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut bind = bind.spawn().unwrap();
    let mut bound = [0; 6];
    bind.stdout.as_mut().unwrap().read_exact(&mut bound).unwrap();
    assert_eq!(&bound, b"bound\n");
    bind
}

/// Python: connects to a socket.
const CONNECT: &str = "import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try: s.connect(sys.argv[1]); print('connected')
except OSError as error: print(type(error).__name__)";

/// The server of a run had an abstract name made of its pid. A process that bound the name first
/// made `defuse run` fail. One that bound it after a kill(2) of the run served the files of root's
/// programs, because no client checked the identity of the server.
#[test]
fn no_other_user_can_replace_the_server_of_a_run() {
    if !can_attack() {
        return;
    }
    let place = TestPlace::new();
    let me = std::process::id();
    // The pids of the next processes.
    let before = bind(me, me + 1000);
    let mut run = ShellRun::start(&place, "mem:=memory:");
    let shell = run.tell("echo secret > mem:/file; echo $$");
    let seen = run.tell("cat mem:/file");
    // Another user cannot reach the server through the descriptor of a program, and the server has
    // no name.
    let reached = as_stranger(CONNECT, &[&sockets_of(&shell)[0]]);
    kill_process(Pid::from_child(&run.child), Signal::KILL).unwrap();
    eventually("the end of the run", || run.child.try_wait().unwrap().is_some());
    let after = bind(run.child.id(), run.child.id() + 1);
    let read = run.tell("cat mem:/file > /dev/null 2>&1 && echo read || echo error");
    let served = [before, after].map(|mut held| {
        drop(held.stdin.take());
        held.wait_with_output().unwrap().stdout
    });
    run.end();
    assert_eq!((seen.as_str(), read.as_str()), ("secret", "error"));
    assert_eq!(reached, "PermissionError");
    assert_eq!(served.concat(), b"", "nobody has asked the stranger");
}

/// The sockets through which a program of a run reaches its server, as paths.
fn sockets_of(program: &str) -> Vec<String> {
    let fds = fs::read_dir(format!("/proc/{program}/fd")).unwrap().flatten();
    let is_socket = |path: &Path| {
        fs::read_link(path).is_ok_and(|to| to.display().to_string().ends_with("/socket (deleted)"))
    };
    let paths = fds.map(|entry| entry.path()).filter(|path| is_socket(path));
    paths.map(|path| path.display().to_string()).collect()
}
