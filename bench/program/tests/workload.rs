//! The command line of `defuse workload`.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;
#[path = "../../../cli/tests/common/terminal.rs"]
mod terminal;

use std::process::{Command, Output};

use common::{PROGRAM, TestPlace};
use terminal::TestTerminal;

fn defuse(words: &[&str]) -> Output {
    Command::new(PROGRAM).arg("workload").args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_row_runs_at_a_small_scale_and_prints_its_results() {
    let dir = tempfile::tempdir().unwrap();
    // A path with special characters of the language.
    let dir = dir.path().join("a \"b\" $c\\d");
    let dir = dir.to_str().unwrap();
    let row = ["files-cr-32th", "--dir", dir, "--scale", "0.0001"];
    let ran = defuse(&[&row[..], &["--json"]].concat());
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let reports: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(reports[0]["total"]["operations"], 1200);
    assert_eq!(reports[0]["threads"], 32);
    let ran = defuse(&row);
    let shown = text(&ran.stdout);
    assert!(shown.contains("400 files instead of 4000000"), "{shown}");
    assert!(shown.contains("IO Summary: 1200 ops"), "{shown}");
    assert!(ran.stderr.is_empty(), "no progress where nobody looks: {}", text(&ran.stderr));
}

#[test]
fn a_wrong_file_exits_with_2_and_a_failure_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.f");
    let name = file.to_str().unwrap();
    std::fs::write(&file, "set $dir=/tmp\nrum 60\n").unwrap();
    let ran = defuse(&[name]);
    assert_eq!(ran.status.code(), Some(2));
    let wanted = format!("defuse: {name}:2:1: found `rum`; expected a command (did you mean run?)");
    assert_eq!(text(&ran.stderr).trim(), wanted);
    let nowhere = defuse(&["files-cr-1th", "--dir", "/proc/nowhere", "--scale", "0.0001"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/proc/nowhere"), "{}", text(&nowhere.stderr));
    assert_eq!(defuse(&["no-such-workload"]).status.code(), Some(2));
    assert_eq!(defuse(&[]).status.code(), Some(2));
}

#[test]
fn every_workload_and_row_is_listed() {
    let listed = text(&defuse(&["--list"]).stdout);
    for name in ["varmail", "webproxy", "seq-rd-4KB-1th-1f", "web-server"] {
        assert!(listed.contains(name), "{name}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&defuse(&["--list", "--json"]).stdout).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 45);
}

/// A small file server that always does the same work: each thread has a file set of its own, and a
/// fixed number of operations.
const FILE_SERVER: &str = "set $dir=/tmp
set mode quit alldone
define fileset name=one,path=$dir,entries=40,size=6k,dirwidth=5,prealloc=50
define fileset name=logs,path=$dir,entries=1,size=1k,prealloc
define fileset name=none,path=$dir,entries=1
define fileset name=dirs,path=$dir,entries=1,leafdirs=6
define process name=p { thread name=t,memsize=64k {
    flowop makedir name=mk,filesetname=dirs,iters=4
    flowop createfile name=create,filesetname=one,fd=1,indexed=7
    flowop writewholefile name=write,fd=1,iosize=4k
    flowop closefile name=close1,fd=1
    flowop openfile name=open,filesetname=one,fd=1
    flowop appendfilerand name=append,fd=1,iosize=8k
    flowop fsync name=sync,fd=1
    flowop readwholefile name=readall,fd=1,iosize=16k
    flowop read name=readsome,fd=1,iosize=1k,random,iters=20
    flowop write name=writesome,fd=1,iosize=1k,iters=20
    flowop closefile name=close2,fd=1
    flowop deletefile name=delete,filesetname=one,iters=3
    flowop statfile name=stat,filesetname=one,iters=30
    flowop listdir name=list,filesetname=one,iters=5
    flowop appendfile name=log,filesetname=logs,iosize=100,iters=9
    flowop removedir name=rm,filesetname=dirs,iters=2
    flowop statfile name=end,filesetname=none } }
run
";

#[test]
fn a_file_system_in_this_process_does_the_same_work_as_system_calls() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = at("server.f");
    std::fs::write(&file, FILE_SERVER).unwrap();
    let work = |words: &[&str]| {
        let ran = defuse(&[&[file.as_str(), "--json", "--quiet"], words].concat());
        assert!(ran.status.success(), "{words:?}: {}", text(&ran.stderr));
        let reports: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
        let flowops = reports[0]["flowops"].as_array().unwrap();
        let of = |flowop: &serde_json::Value, what: &str| flowop[what].as_u64().unwrap();
        let counts = flowops.iter().map(|flowop| {
            let name = flowop["name"].as_str().unwrap().to_owned();
            assert!(name == "end" || of(flowop, "p99_ns") >= of(flowop, "p50_ns"), "{flowop}");
            (name, of(flowop, "operations"), of(flowop, "bytes"))
        });
        (counts.collect::<Vec<_>>(), files(dir.path()))
    };
    std::fs::create_dir(at("lower")).unwrap();
    let (by_calls, made) = work(&["--dir", &at("native")]);
    assert_eq!(by_calls.len(), 17);
    assert!(by_calls.iter().all(|(name, count, _)| *count > 0 || name == "end"), "{by_calls:?}");
    assert!(made > 10, "{made}");
    let (in_memory, still) = work(&["--direct", "memory:", "--dir", &at("nowhere")]);
    assert_eq!(in_memory, by_calls);
    assert_eq!(still, made, "no file of the kernel has come of it");
    let passthrough = format!("passthrough:{}", at("lower"));
    let (passed, doubled) = work(&["--direct", &passthrough, "--dir", &at("nowhere")]);
    assert_eq!(passed, by_calls);
    assert_eq!(doubled, 2 * made);
}

/// The number of files below the directories `native` and `lower`.
fn files(dir: &std::path::Path) -> usize {
    let count = |entry: std::fs::DirEntry| match entry.file_type().unwrap().is_dir() {
        true => files(&entry.path()),
        false => usize::from(entry.file_name() != "server.f"),
    };
    std::fs::read_dir(dir).unwrap().map(|entry| count(entry.unwrap())).sum()
}

#[test]
fn a_direct_file_system_that_cannot_be_opened_is_an_error() {
    for (words, wanted) in [
        (["--direct", "mem:", "--dir", "/x"], "mem"),
        (["--direct", "memory:,sise=1G", "--dir", "/x"], "sise"),
        (["--direct", "memory:", "--dir", "/"], "other than /"),
        (["--direct", "memory:,ro", "--dir", "/x"], "Read-only"),
        (["--direct", "passthrough:/no/where", "--dir", "/x"], "/no/where"),
    ] {
        let ran = defuse(&[&["files-cr-1th", "--scale", "0.0001"], &words[..]].concat());
        assert!(!ran.status.success(), "{words:?}");
        assert!(text(&ran.stderr).contains(wanted), "{words:?}: {}", text(&ran.stderr));
    }
}

#[test]
fn only_a_terminal_shows_progress_and_it_is_left_clean() {
    let place = TestPlace::new();
    let work = [
        "define fileset name=s,path=$dir,entries=150,size=4k,prealloc",
        "define process name=p { thread name=t { flowop statfile name=st,filesetname=s } }",
    ];
    let file = |name: &str, end: &str| {
        let text =
            format!("set $dir=\"{}\"\n{}\n{end}\n", place.path("src").display(), work.join("\n"));
        std::fs::write(place.path(name), text).unwrap();
    };
    file("timed.f", "echo \"before\"\nrun 1");
    file("open.f", "set mode quit firstdone\nrun");
    // With a time limit the bar fills. After the bar has disappeared, only the result remains.
    let mut terminal = TestTerminal::start(&place, &["workload", "timed.f"]);
    for wanted in ["before", "making s [", "running for", "] 9", "IO Summary: "] {
        terminal.wait_for_text(wanted);
    }
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
    let screen = on_screen(&terminal.shown);
    assert!(screen.starts_with("before"), "{screen}");
    assert!(screen.contains("Flowop ") && !screen.contains("running for"), "{screen}");
    assert!(!screen.contains("making"), "{screen}");
    // Without one there is no bar to fill.
    let mut terminal = TestTerminal::start(&place, &["workload", "open.f", "--timeout", "0.001"]);
    terminal.wait_for_text("IO Summary: ");
    let mut terminal = TestTerminal::start(&place, &["workload", "timed.f", "--quiet"]);
    terminal.wait_for_text("IO Summary: ");
    assert!(!terminal.shown.contains("running") && !terminal.shown.contains("before"));
    // Failures are readable, too.
    std::fs::remove_dir_all(place.path("src")).unwrap();
    std::fs::write(place.path("src"), "in the way").unwrap();
    let mut terminal = TestTerminal::start(&place, &["workload", "timed.f"]);
    terminal.wait_for_text("Not a directory");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(1));
    // If the standard error is not a terminal, nothing is drawn. All tests of this file check that,
    // here with a standard output that is not a terminal either.
    std::fs::remove_file(place.path("src")).unwrap();
    let said = place.run(&["workload", "timed.f"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    assert!(said.out.starts_with("before\nFlowop"), "{}", said.out);
}

/// The text that remains on a screen after lines have been overwritten and erased.
fn on_screen(shown: &str) -> String {
    let mut lines = vec![String::new()];
    for line in shown.split('\n') {
        for piece in line.split('\r') {
            match piece.rsplit_once("\u{1b}[2K") {
                Some((_, rest)) => *lines.last_mut().unwrap() = rest.to_owned(),
                None if piece.is_empty() => {}
                None => *lines.last_mut().unwrap() = piece.to_owned(),
            }
        }
        lines.push(String::new());
    }
    lines.retain(|line| !line.trim().is_empty());
    lines.join("\n")
}

/// The limit was an error of `defuse`, and killed the program that it becomes.
#[test]
fn a_limit_of_file_sizes_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        format!("ulimit -f 8; exec {PROGRAM} workload fileserver --dir . --run 1 --scale 0.001");
    let ran = Command::new("sh").args(["-c", &script]).current_dir(&dir).output().unwrap();
    let said = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{:?}: {said}", ran.status);
    assert!(said.contains("ulimit -f"), "{said}");
}
