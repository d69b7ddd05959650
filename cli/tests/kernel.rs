//! Observing the kernel: stages, traces, limits and the live view, for mounts of defuse and foreign
//! ones.

mod common;
#[path = "common/foreign.rs"]
mod foreign;
#[path = "common/terminal.rs"]
mod terminal;
#[path = "../../trace/tests/trace_format/mod.rs"]
mod trace_format;

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{DefuseOutput, TestPlace, eventually, from_output};
use defuse_probe::{Op, RequestStage, StatsSnapshot};
use foreign::{ForeignServer, has};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use terminal::TestTerminal;

/// True if BPF programs see the same pids as this process. They see the pids of the first PID
/// namespace, pid_namespaces(7), while a container has another one.
fn sees_numbers_of_the_kernel() -> bool {
    // PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h.
    let is_first =
        fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]");
    if !is_first {
        println!("not here: processes have other numbers in this PID namespace than in the kernel");
    }
    is_first
}

/// A snapshot of the kernel's counters during `work`. Prints the reason and returns `None` if BPF
/// is not permitted, or if pids differ.
fn stages_of(place: &TestPlace, work: impl FnOnce()) -> Option<StatsSnapshot> {
    if !sees_numbers_of_the_kernel() {
        return None;
    }
    let arguments = ["stat", "mnt", "--stages", "--json"];
    let mut stat = place.command(&arguments);
    let stat = stat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stat = wait_until_attached(stat);
    work();
    let seen = interrupt_and_wait(&mut stat);
    assert_eq!(seen.code, Some(0), "{}", seen.err);
    let value: Value = serde_json::from_str(&seen.out).unwrap();
    if seen.out.contains("by tracefs") {
        println!("not here: BPF is not permitted: {}", value["notes"]);
        return None;
    }
    Some(serde_json::from_value(value).unwrap())
}

/// Waits until a command has attached its programs, which its file descriptors show.
fn wait_until_attached(mut child: Child) -> Child {
    let pid = child.id();
    eventually("it looks into the kernel", || {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        let targets = fds.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        let targets: Vec<String> =
            targets.map(|target| target.to_string_lossy().into_owned()).collect();
        let links = targets.iter().filter(|target| target.contains("bpf_link")).count();
        let pipe = targets.iter().any(|target| target.ends_with("trace_pipe"));
        (links >= 4 || pipe) && catches_interrupts(pid)
    });
    // The table of daemons is filled after the programs are attached.
    std::thread::sleep(Duration::from_millis(100));
    child
}

/// True if the process handles SIGINT, which would end it otherwise.
fn catches_interrupts(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & 1 << (Signal::INT.as_raw() - 1) != 0)
}

/// Interrupts a command and returns its output.
fn interrupt_and_wait(child: &mut Child) -> DefuseOutput {
    let _ = kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT);
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    DefuseOutput { code: child.wait().unwrap().code(), out, err }
}

/// The total latency of a stage.
fn sum(snapshot: &StatsSnapshot, stage: RequestStage, op: Op) -> f64 {
    snapshot.get_stage(stage, op).map_or(0.0, |stats| stats.latency.sum_ns as f64)
}

/// Asserts that the stages add up to the total within 5 %, and that the reading of few requests was
/// missed.
fn assert_adds_up(snapshot: &StatsSnapshot, op: Op, least: u64) {
    let total = snapshot.get_stage(RequestStage::Total, op).unwrap_or_else(|| panic!("no {op}"));
    assert!(total.latency.count >= least, "{op}: {} requests", total.latency.count);
    let parts = [
        RequestStage::Background,
        RequestStage::Pending,
        RequestStage::Processing,
        RequestStage::Unsplit,
    ];
    let parts: f64 = parts.iter().map(|stage| sum(snapshot, *stage, op)).sum();
    let ratio = parts / total.latency.sum_ns as f64;
    assert!((0.95..1.05).contains(&ratio), "{op}: stages are {ratio} of the total");
    let unsplit =
        snapshot.get_stage(RequestStage::Unsplit, op).map_or(0, |stats| stats.latency.count);
    let share = unsplit as f64 / total.latency.count as f64;
    assert!(share < 0.05, "{op}: {share} of the requests were read not observed");
}

/// Random reads of 4 KiB that bypass the page cache, so that each is a request. Returns fio's mean
/// latency in nanoseconds, and the number of reads.
fn fio(place: &TestPlace) -> (f64, u64) {
    let file = format!("--filename={}", place.path("mnt/data").display());
    let fixed = [
        "--name=reads",
        "--rw=randread",
        "--bs=4k",
        "--direct=1",
        "--size=4m",
        "--ioengine=psync",
        "--loops=4",
        "--output-format=json",
    ];
    let output = Command::new("fio").args(fixed).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let json: Value = serde_json::from_str(&text[text.find('{').unwrap()..]).unwrap();
    let read = &json["jobs"][0]["read"];
    (read["clat_ns"]["mean"].as_f64().unwrap(), read["total_ios"].as_u64().unwrap())
}

fn stages_agree_with_fio(place: &TestPlace) {
    fs::write(place.path("src/data"), vec![7; 4 << 20]).unwrap();
    let mut seen = (0.0, 0);
    let Some(snapshot) = stages_of(place, || seen = fio(place)) else { return };
    let (fio_ns, count) = seen;
    assert_adds_up(&snapshot, Op::READ, count);
    let reads = &snapshot.get_stage(RequestStage::Total, Op::READ).unwrap();
    assert_eq!((reads.latency.count, reads.bytes), (count, count * 4096));
    // fio also measures the system call, and waking the caller.
    let ratio = reads.latency.mean_ns() as f64 / fio_ns;
    println!("the kernel's total is {ratio:.3} of fio's latency");
    assert!((0.3..1.05).contains(&ratio), "the kernel's total is {ratio} of fio's latency");
}

#[test]
fn the_stages_of_bindfs_under_fio_add_up_and_agree_with_fio() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !has("fio") {
        return;
    }
    let Some(_mount) = ForeignServer::bindfs(&place) else { return };
    stages_agree_with_fio(&place);
}

#[test]
fn the_stages_of_sshfs_under_fio_add_up_and_agree_with_fio() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !has("fio") {
        return;
    }
    let Some(_mount) = ForeignServer::sshfs(&place) else { return };
    stages_agree_with_fio(&place);
}

#[test]
fn the_stages_of_a_mount_of_defuse_are_shown_with_its_own_times() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    // Splicing is another way to receive a request.
    for options in ["splice,no_passthrough", "no_splice,no_passthrough"] {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        let work = || {
            for number in 0..100 {
                let path = place.path("mnt").join(number.to_string());
                fs::write(&path, vec![1; 200_000]).unwrap();
                fs::remove_file(&path).unwrap();
            }
        };
        let snapshot = stages_of(&place, work);
        place.expect_success(&["umount", "mnt"]);
        let Some(snapshot) = snapshot else { return };
        for op in [Op::LOOKUP, Op::CREATE, Op::WRITE, Op::UNLINK, Op::RELEASE] {
            assert_adds_up(&snapshot, op, 100);
            let user = snapshot.get(op).unwrap();
            assert!(user.latency.count >= 100, "{op}: the daemon counted, too");
        }
        // Here only requests without a waiting caller use the background queue.
        assert!(snapshot.get_stage(RequestStage::Background, Op::RELEASE).is_some());
        assert!(snapshot.get_stage(RequestStage::Background, Op::CREATE).is_none());
    }
}

#[test]
fn without_bpf_the_time_from_sending_to_the_end_is_seen() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let arguments = ["stat", "mnt", "--stages", "--via", "tracefs", "--json"];
    let mut stat = place.command(&arguments);
    let stat = stat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stat = wait_until_attached(stat);
    let pid = stat.id();
    for number in 0..50 {
        fs::create_dir(place.path("mnt").join(number.to_string())).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    let seen = interrupt_and_wait(&mut stat);
    assert_eq!(seen.code, Some(0), "{}", seen.err);
    let snapshot: StatsSnapshot = serde_json::from_str(&seen.out).unwrap();
    let made = snapshot.get_stage(RequestStage::Total, Op::MKDIR).unwrap();
    assert_eq!((made.latency.count, made.latency.errors), (50, 0));
    assert!(snapshot.get_stage(RequestStage::Pending, Op::MKDIR).is_none());
    let left = Path::new("/sys/kernel/tracing/instances").join(format!("defuse-{pid}"));
    assert!(!left.exists(), "{} is left", left.display());
}

#[test]
fn a_user_without_permission_to_observe_the_kernel_gets_the_next_step() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !has("setpriv") {
        return;
    }
    place.expect_success(&["mount", "memory:", "mnt"]);
    let program = place.install_for_all_users();
    let connection = place.list()[0]["connection"].to_string();
    for arguments in [["stat", &connection], ["top", "--once"], ["trace", &connection]] {
        let mut command =
            place.command_of(Path::new("setpriv"), &["--reuid=65534", "--clear-groups"]);
        let command = command.arg(&program).args(arguments).current_dir("/");
        let seen = from_output(command.output().unwrap());
        assert_eq!(seen.code, Some(1), "{arguments:?}: {}", seen.out);
        assert!(seen.err.contains("not permitted") && seen.err.contains("as root"), "{}", seen.err);
        assert_eq!(seen.err.lines().count(), 1, "{}", seen.err);
    }
}

#[test]
fn without_capabilities_root_falls_back_or_gets_the_reason() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !has("setpriv") {
        return;
    }
    place.expect_success(&["mount", "memory:", "mnt"]);
    let without = |arguments: &[&str]| {
        let bounds = "--bounding-set=-bpf,-sys_admin,-perfmon";
        let mut command = place.command_of(Path::new("setpriv"), &[bounds]);
        from_output(command.arg(common::PROGRAM).args(arguments).output().unwrap())
    };
    let arguments = ["stat", "mnt", "--stages", "--for", "0.1"];
    let barred = without(&[&arguments[..], &["--via", "bpf"]].concat());
    if barred.err.contains("setpriv") {
        println!("not here: setpriv knows these capabilities not: {}", barred.err);
        return;
    }
    assert_eq!(barred.code, Some(1), "{}", barred.out);
    assert!(
        barred.err.contains("not permitted") && barred.err.contains("CAP_BPF"),
        "{}",
        barred.err
    );
    // tracefs must be mounted already, because the process may not mount.
    let seen = without(&arguments);
    match seen.code {
        Some(0) => assert!(seen.out.contains("by tracefs"), "{}", seen.out),
        _ => assert!(seen.err.contains("not permitted"), "{}", seen.err),
    }
}

/// The events of a trace during `work`.
fn trace_of(place: &TestPlace, arguments: &[&str], work: impl FnOnce()) -> Option<Vec<Value>> {
    let all: Vec<&str> = ["trace", "mnt", "--json"].iter().chain(arguments).copied().collect();
    let mut trace = place.command(&all);
    let trace = trace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut trace = wait_until_attached(trace);
    work();
    std::thread::sleep(Duration::from_millis(100));
    let seen = interrupt_and_wait(&mut trace);
    assert_eq!(seen.code, Some(0), "{}", seen.err);
    if seen.err.contains("by tracefs") {
        println!("not here: BPF is not permitted: {}", seen.err);
        return None;
    }
    Some(seen.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

#[test]
fn a_trace_has_the_name_result_and_stages_of_each_request() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(_mount) = ForeignServer::bindfs(&place) else { return };
    let mnt = place.path("mnt");
    let work = || {
        fs::write(mnt.join("first name"), "hello").unwrap();
        fs::rename(mnt.join("first name"), mnt.join("second")).unwrap();
        assert!(fs::metadata(mnt.join("missing")).is_err());
        fs::remove_file(mnt.join("second")).unwrap();
    };
    let Some(events) = trace_of(&place, &[], work) else { return };
    let find = |op: &str, name: &str| {
        let found = events.iter().find(|event| event["op"] == op && event["name"] == name);
        found.unwrap_or_else(|| panic!("no {op} of {name} in {events:#?}"))
    };
    assert_eq!(find("CREATE", "first name")["result"], "OK");
    assert_eq!(find("WRITE", "first name")["size"], 5);
    if sees_numbers_of_the_kernel() {
        assert_eq!(find("RENAME", "first name -> second")["pid"], std::process::id());
    }
    assert_eq!(find("LOOKUP", "missing")["result"], "ENOENT");
    find("UNLINK", "second");
    for event in &events {
        let ns = |name: &str| event[name].as_u64().unwrap_or(0);
        let parts = ["background_ns", "pending_ns", "processing_ns", "pending_processing_ns"];
        assert_eq!(parts.iter().map(|part| ns(part)).sum::<u64>(), ns("total_ns"), "{event}");
    }
}

#[test]
fn a_trace_applies_its_filters() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(_mount) = ForeignServer::bindfs(&place) else { return };
    let mnt = place.path("mnt");
    let work = || {
        for name in ["one", "two"] {
            fs::write(mnt.join(name), "x").unwrap();
            let _ = fs::metadata(mnt.join(format!("no-{name}")));
            fs::remove_file(mnt.join(name)).unwrap();
        }
    };
    let Some(events) = trace_of(&place, &["--op", "unlink,create"], work) else { return };
    assert_eq!(events.len(), 4);
    let failed = trace_of(&place, &["--errors", "--op", "lookup", "--name", "no-t"], work).unwrap();
    assert!(!failed.is_empty());
    assert!(failed.iter().all(|e| e["name"] == "no-two" && e["result"] == "ENOENT"), "{failed:?}");
    assert!(trace_of(&place, &["--slower-than", "3600"], work).unwrap().is_empty());
    assert!(trace_of(&place, &["--pid", "1"], work).unwrap().is_empty());
    assert_eq!(trace_of(&place, &["--count", "3"], work).unwrap().len(), 3);
}

#[test]
fn a_timeline_for_perfetto_is_complete_and_well_formed() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(_mount) = ForeignServer::bindfs(&place) else { return };
    for via in ["bpf", "tracefs"] {
        let mut trace =
            place.command(&["trace", "mnt", "--via", via, "--perfetto", "timeline.json"]);
        let trace = trace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut trace = wait_until_attached(trace);
        // Several threads make requests overlap, and data causes readahead.
        std::thread::scope(|scope| {
            for name in ["one", "two", "three"] {
                let file = place.path("mnt").join(format!("{name}-{via}"));
                scope.spawn(move || {
                    for _ in 0..20 {
                        fs::write(&file, vec![7; 300 << 10]).unwrap();
                        assert_eq!(fs::read(&file).unwrap().len(), 300 << 10);
                    }
                });
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        let ended = interrupt_and_wait(&mut trace);
        if ended.code != Some(0) {
            println!("not here: {via} is not permitted here: {}", ended.err);
            continue;
        }
        let text = fs::read_to_string(place.path("timeline.json")).unwrap();
        let slices = trace_format::check(&text);
        assert!(slices > 60, "{via}: {slices}");
        assert!(text.contains("\"CREATE\""), "{via}");
    }
}

#[test]
fn a_breakdown_without_requests_gives_the_reason() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    place.expect_failure(
        1,
        &["breakdown", "mnt", "--op", "create", "--", "true"],
        "no CREATE ended",
    );
    let failing = ["breakdown", "mnt", "--op", "create", "--", "sh", "-c", "exit 3"];
    place.expect_failure(1, &failing, "the command ended with exit status: 3; no CREATE ended");
    for (op, expected) in
        [("reed", "did you mean read?"), ("LOKUP", "did you mean lookup?"), ("xyz", "such as read")]
    {
        let said = place.run(&["breakdown", "mnt", "--op", op, "--", "true"]);
        assert!(said.code == Some(2) && said.err.contains(expected), "{}", said.err);
    }
}

#[test]
fn a_breakdown_runs_a_command_and_adds_up() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(_mount) = ForeignServer::bindfs(&place) else { return };
    let script = "for i in 1 2 3 4 5; do rm -f mnt/$i; : > mnt/$i; done";
    let base = ["breakdown", "mnt", "--op", "create"];
    let run = |more: &[&str]| place.run(&[&base[..], more].concat());
    let expected = run(&["--json", "--", "sh", "-c", script]);
    assert_eq!(expected.code, Some(0), "{}", expected.err);
    let found: Value = serde_json::from_str(&expected.out).unwrap();
    assert_eq!(found["count"], 5);
    let shares = found["shares"].as_array().unwrap();
    let whole: f64 = shares.iter().map(|share| share["percent"].as_f64().unwrap()).sum();
    assert!((99.9..100.1).contains(&whole), "{found}");
    let text = run(&["--", "sh", "-c", script]);
    assert!(text.out.contains("total") && text.out.contains("100.00%"), "{}", text.out);
    assert_eq!(run(&["--", "false"]).code, Some(1));
    assert_eq!(run(&["--", "/no/such/program"]).code, Some(1));
    assert_eq!(run(&["--for", "0.1"]).code, Some(1), "nothing happened");
}

#[test]
fn knobs_are_shown_changed_and_refused() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let read = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let values = read(place.expect_success(&[
        "tune",
        "mnt",
        "max_background=77",
        "congestion_threshold=33",
        "--json",
    ]));
    assert_eq!(
        (values["max_background"].as_u64(), values["waiting"].as_u64()),
        (Some(77), Some(0))
    );
    let connection = values["connection"].to_string();
    assert_eq!(read(place.expect_success(&["tune", &connection, "--json"])), values);
    assert!(place.expect_success(&["tune", "mnt"]).contains("congestion_threshold      33"));
    for wrong in ["max_background=0", "max_background=x", "other=1", "workers=0", "workers=1025"] {
        assert_eq!(place.run(&["tune", "mnt", wrong]).code, Some(2), "{wrong}");
    }
    place.expect_failure(1, &["tune", "src"], "neither the mount point");
    place.expect_failure(2, &["tune", "mnt", "--abort"], "--yes");
    fs::metadata(place.path("mnt")).unwrap();
    place.expect_success(&["tune", "mnt", "--abort", "--yes"]);
    assert!(fs::read_dir(place.path("mnt")).is_err());
}

#[test]
fn prometheus_output_covers_daemon_and_kernel() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    fs::write(place.path("mnt/file"), "x").unwrap();
    let text = place.expect_success(&["stat", "mnt", "--prometheus"]);
    assert!(text.contains("op=\"CREATE\",stage=\"user\",le=\"+Inf\"} 1\n"), "{text}");
    let text = place.expect_success(&["stat", "mnt", "--stages", "--for", "0.1", "--prometheus"]);
    assert!(text.starts_with("# HELP defuse_request_seconds "), "{text}");
}

#[test]
fn top_prints_every_connection_for_scripts() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let text = place.expect_success(&["top", "--once", "--every", "0.2"]);
    let mnt = place.path("mnt");
    assert!(text.lines().any(|line| line.ends_with(mnt.to_str().unwrap())), "{text}");
    let all: Value =
        serde_json::from_str(&place.expect_success(&["top", "--once", "--json"])).unwrap();
    let rows = all["connections"].as_array().unwrap();
    let row = rows.iter().find(|row| row["mount"] == mnt.to_str().unwrap()).unwrap();
    assert_eq!((row["daemon"].as_str(), row["congested"].as_bool()), (Some("defuse"), Some(false)));
    place.expect_failure(2, &["top"], "no terminal");
}

/// The sequence with which full-screen programs leave the screen.
const LEAVES: &str = "\u{1b}[?1049l";

#[test]
fn top_is_recorded_without_a_terminal() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let arguments = ["top", "--cast", "top.cast", "--every", "0.2", "--for", "1"];
    place.expect_success(&arguments);
    let recorded = std::fs::read_to_string(place.path("top.cast")).unwrap();
    let mut lines = recorded.lines();
    assert!(lines.next().unwrap().contains("\"version\":2"), "{recorded}");
    let screen: String = lines.collect();
    // Words are drawn one by one.
    assert!(screen.contains("connections:") && screen.contains("/mnt"), "{recorded}");
    place.expect_failure(1, &arguments, "File exists");
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn top_draws_reacts_to_keys_and_restores_the_terminal() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let mut terminal = TestTerminal::start(&place, &["top", "--every", "0.2", "--sort", "name"]);
    terminal.wait_for_text("connections:");
    terminal.types(b"\r");
    terminal.wait_for_text("PROCESSING");
    terminal.types(b"q");
    terminal.wait_for_text(LEAVES);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
    // A signal restores the terminal, too.
    let mut terminal = TestTerminal::start(&place, &["top"]);
    terminal.wait_for_text("connections:");
    terminal.shown.clear();
    kill_process(Pid::from_raw(terminal.child.id() as i32).unwrap(), Signal::TERM).unwrap();
    terminal.wait_for_text(LEAVES);
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}
