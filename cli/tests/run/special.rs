//! Fifos and sockets in directories that programs outside of the run have, too.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::{TestPlace, is_there};

/// Serves one connection, and writes one line into the fifo and reads one from it.
const OUTSIDE: &str = r#"
import os, socket, sys
os.chdir(sys.argv[1])
s = socket.socket(socket.AF_UNIX); s.bind("outside"); s.listen()
os.mkfifo("fifo"); os.mkfifo("back")
print("ready", flush=True)
for _ in range(2):
    c, _ = s.accept(); c.sendall(b"hello"); c.close()
with open("fifo", "w") as f: f.write("through\n")
with open("back") as f: print(f.read().strip(), flush=True)
sys.stdin.read()
c = socket.socket(socket.AF_UNIX); c.connect("inside"); print(c.recv(9).decode(), flush=True)
os.chdir("d" * 100); c = socket.socket(socket.AF_UNIX); c.connect("inside"); print(c.recv(9).decode(), flush=True)
"#;

const INSIDE: &str = r#"
import os, socket, sys
def get(name):
    s = socket.socket(socket.AF_UNIX); s.connect(name); return s.recv(9).decode()
os.symlink("outside", "link")
print(get("outside"), get("/defuse-test/link"))
print(open("fifo").read().strip())
with open("back", "w") as f: f.write("and back")
os.mkdir("d" * 100)
serving = []
for name in "inside", "d" * 100 + "/inside":
    s = socket.socket(socket.AF_UNIX)
    os.chdir(os.path.dirname(name) or "."); s.bind("inside"); s.listen(); serving.append(s)
    try: socket.socket(socket.AF_UNIX).bind("inside")
    except OSError as error: print(error.strerror)
print("bound", flush=True)
for s in serving:
    c, _ = s.accept(); c.sendall(b"inner"); c.close()
"#;

/// Each run had nodes of its own for the sockets and fifos of a passthrough: a program outside was
/// refused by a socket that listened, and both ends of a fifo waited for ever.
#[test]
fn programs_inside_and_outside_meet_at_the_sockets_and_fifos_of_a_directory() {
    if !is_there("python3") {
        println!("skipped: special files: python3 is not installed");
        return;
    }
    let configurations: [(&str, &[&str]); 4] =
        [("", &[]), (",backing=off", &[]), ("", &["--fork", "server"]), ("", &["--dispatch"])];
    for (options, run_options) in configurations {
        let place = TestPlace::new();
        let source = place.path("src");
        let mut outside = Command::new("timeout");
        outside.args(["-s", "KILL", "60", "python3", "-c", OUTSIDE]).arg(&source);
        outside.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut outside = outside.spawn().unwrap();
        let mut said = BufReader::new(outside.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert_eq!(said.next().as_deref(), Some("ready"));
        let mount = format!("/defuse-test=passthrough:{}{options}", source.display());
        let mut inside = Command::new("timeout");
        inside.args(["-s", "KILL", "60", super::PROGRAM, "run", "-C", "/defuse-test"]);
        inside.args(["--mount", &mount]).args(run_options).args(["--", "python3", "-c", INSIDE]);
        let mut inside = inside.stdout(Stdio::piped()).spawn().unwrap();
        let mut seen = BufReader::new(inside.stdout.take().unwrap()).lines().map(Result::unwrap);
        let wanted =
            ["hello hello", "through", "Address already in use", "Address already in use", "bound"];
        for wanted in wanted {
            assert_eq!(seen.next().as_deref(), Some(wanted), "{mount} {run_options:?}");
        }
        drop(outside.stdin.take());
        let all: Vec<_> = said.collect();
        assert!(inside.wait().unwrap().success() && outside.wait().is_ok(), "{mount}");
        assert_eq!(all, ["and back", "inner", "inner"], "{mount} {run_options:?}");
    }
}
