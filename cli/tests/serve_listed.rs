//! `defuse serve` as other processes see it.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

use common::{TestPlace, eventually};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The client of the tests of the server itself.
#[path = "../../testkit/tests/raw/mod.rs"]
mod raw;

const GETATTR: u32 = 3;

/// The answer of the server at `socket` of a place.
fn query_server(place: &TestPlace) -> Value {
    serde_json::from_str(&place.expect_success(&["stat", "socket", "--json"])).unwrap()
}

/// Ends the server of an answer, and waits for the end.
fn end(answer: &Value, signal: Signal) {
    let pid = answer["pid"].as_u64().unwrap();
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    let process = format!("/proc/{pid}");
    eventually("the end of the server", || !Path::new(&process).exists());
}

/// `defuse list` knew only mounts, and nothing showed which process serves a socket.
#[test]
fn a_server_is_listed_with_its_socket_while_it_runs_and_its_process_names_both() {
    let place = TestPlace::new();
    let socket = place.path("socket").display().to_string();
    let servers = || {
        let all = serde_json::from_str::<Vec<serde_json::Value>>(
            &place.expect_success(&["list", "--json"]),
        );
        let mut all = all.unwrap();
        all.retain(|line| line["socket"] == socket.as_str());
        all
    };
    assert!(servers().is_empty());
    for signal in [Signal::TERM, Signal::KILL] {
        // It goes to the background, and is listed when it comes back.
        place.expect_success(&[
            "serve",
            "memory:",
            "socket",
            "-o",
            "size=1M",
            "--shared",
            "--cache=2M",
        ]);
        let [server] = &servers()[..] else { panic!("{:?}", servers()) };
        assert_eq!(server["source"], "memory:");
        let table = place.expect_success(&["list"]);
        let row = table.lines().find(|line| line.starts_with(&socket)).unwrap();
        assert!(row.contains("memory:") && table.contains("SOCKET"), "{table}");
        let pid = server["pid"].as_u64().unwrap();
        let title = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(title.contains("\0memory:\0") && title.contains(&socket), "{title}");
        assert!(title.contains("\0--shared\0--cache=2097152\0"), "{title}");
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        eventually("the end of the server", || servers().is_empty());
    }
}

/// The program sent messages: the memory that the server had offered belonged to the program
/// before.
#[test]
fn a_program_that_another_one_executes_has_lanes_too() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket", "--shared"]);
    let mount = format!("/x=shared:{}", place.path("socket").display());
    let script = "exec 3>/x/file; exec awk 'BEGIN { while ((getline line < \"/x/file\") >= 0 && n++ < 50) \
                  close(\"/x/file\"); print \"read\"; fflush(); getline line < \"-\" }'";
    let mut program = place.command(&["run", "--mount", &mount, "--", "sh", "-c", script]);
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = program.spawn().unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "read");
    eventually("requests by lanes", || {
        let answer = query_server(&place);
        let [client] = &answer["clients"].as_array().unwrap()[..] else { return false };
        client["lane_requests"].as_u64() >= Some(50)
    });
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
    end(&query_server(&place), Signal::TERM);
}

/// They make no request, so that only the client knows of them.
#[test]
fn reads_from_pages_and_system_calls_of_a_client_are_shown() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket", "--shared"]);
    let mount = format!("/x=shared:{}", place.path("socket").display());
    let script = "import os, sys\n\
                  fd = os.open('/x/file', os.O_RDWR | os.O_CREAT)\n\
                  os.write(fd, bytes(65536))\n\
                  for n in range(600): os.pread(fd, 4096, n % 16 * 4096)\n\
                  print('read', flush=True)\n\
                  sys.stdin.read()";
    let mut program = place.command(&["run", "--mount", &mount, "--", "python3", "-c", script]);
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = program.spawn().unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "read");
    let answer = query_server(&place);
    let clients = answer["clients"].as_array().unwrap();
    let of = |field: &str| clients.iter().map(|it| it[field].as_u64().unwrap()).max().unwrap();
    assert!((500..=600).contains(&of("page_reads")), "{answer}");
    assert!(of("lane_bells") > 0 && of("lane_sleeps") < of("page_reads"), "{answer}");
    let text = place.expect_success(&["stat", "socket"]);
    let reads = format!("  {}  ", of("page_reads"));
    assert!(text.contains("by pages") && text.contains(&reads), "{text}");
    let metrics = place.expect_success(&["stat", "socket", "--prometheus"]);
    assert!(metrics.contains("defuse_client_page_reads_total"), "{metrics}");
    drop(program.stdin.take());
    assert!(program.wait().unwrap().success());
    end(&query_server(&place), Signal::TERM);
}

/// Each open searched for the path of the working directory: a listing and a lookup for each
/// directory up to the mount. Paths with `./` took a lookup for each name.
#[test]
fn a_relative_path_takes_no_more_requests_than_an_absolute_one() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket", "--shared"]);
    let mount = format!("/x=shared:{}", place.path("socket").display());
    let run =
        |script: &str| place.expect_success(&["run", "--mount", &mount, "--", "sh", "-c", script]);
    run(
        "mkdir -p /x/a/b/c && cd /x/a/b/c && for i in 0 1 2 3 4 5 6 7 8 9; do echo $i > file$i; done",
    );
    let requests = |name: &str| {
        let all = query_server(&place);
        let ops = all["ops"].as_array().unwrap().iter();
        let of = ops.filter(|op| op["op"] == name).map(|op| op["count"].as_u64().unwrap());
        of.sum::<u64>()
    };
    let kinds = ["OPENDIR", "READDIR", "LOOKUP", "OPEN"];
    let ten_times = |path: &str| {
        let before = kinds.map(&requests);
        let files = (0..10).map(|nth| format!("{path}{nth} ")).collect::<String>();
        assert_eq!(run(&format!("cd /x/a/b/c && cat {files}")).lines().count(), 10);
        let mut made = kinds.map(&requests);
        made.iter_mut().zip(before).for_each(|(made, before)| *made -= before);
        made
    };
    let absolute = ten_times("/x/a/b/c/file");
    // Some files are opened with others. A worker counts a request after it has answered it.
    assert!(absolute[3] >= 3, "{absolute:?}");
    for path in ["file", "./file", ".//./file", "../c/./file", "/x/./a//b/c/file"] {
        let made = ten_times(path);
        assert_eq!(made[..2], absolute[..2], "{path}");
        // A path with `..` is walked.
        let walked = if path.starts_with("..") { 30 } else { 2 };
        assert!(made[2] <= absolute[2] + walked, "{path}: {made:?} and not {absolute:?}");
    }
    // The path is found when a program needs it.
    let script = "cd /x/a/b && exec 3<c/file7 && cd / && readlink /proc/self/fd/3 && cat <&3";
    assert_eq!(run(script), "/x/a/b/c/file7\n7\n");
    end(&query_server(&place), Signal::TERM);
}

/// Nothing showed who used a server, and what each client held.
#[test]
fn a_server_tells_of_each_client_and_of_none_after_its_end() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket", "--shared"]);
    let mount = format!("/x=shared:{}", place.path("socket").display());
    let script = "exec 3>/x/file; echo ready; read end; echo hello >&3; echo wrote; read end";
    let mut program = place.command(&["run", "--mount", &mount, "--", "sh", "-c", script]);
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = program.spawn().unwrap();
    let mut input = program.stdin.take().unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let uid = rustix::process::geteuid().as_raw();
    let plain = raw::connect_and_init(&place.path("socket"), uid);
    // The offer of lanes, the answer to INIT, and that to a request that fails.
    for number in [4, 6] {
        send(&plain, &raw::request(GETATTR, number, 77, uid, &[0; 16]), SendFlags::empty())
            .unwrap();
    }
    for _ in 0..4 {
        recv(&plain, &mut [0; 4096][..], RecvFlags::empty()).unwrap();
    }

    let shell = |answer: &Value| {
        let clients = answer["clients"].as_array().unwrap();
        let found = clients.iter().find(|client| client["program"] == "sh").cloned();
        found.unwrap_or_default()
    };
    // A worker counts a request after it has answered it.
    eventually("two clients with requests", || {
        let answer = query_server(&place);
        let errors = |client: &&Value| client["errors"] == 2;
        let plain = answer["clients"].as_array().unwrap().iter().find(errors).cloned();
        plain.is_some_and(|plain| plain["lanes"] == 0) && shell(&answer)["open_files"] == 1
    });
    let before = query_server(&place);
    let [one, other] = &before["clients"].as_array().unwrap()[..] else { panic!("{before}") };
    let plain_row = if one["program"] == "sh" { other } else { one };
    assert_eq!(plain_row["pid"], std::process::id());
    assert_eq!((&plain_row["requests"], &plain_row["uid"]), (&2.into(), &uid.into()));
    let sh = shell(&before);
    assert!(sh["lanes"].as_u64() >= Some(1) && sh["lane_requests"].as_u64() >= Some(1), "{sh}");
    let figures = before["figures"].as_array().unwrap();
    let figure = |name: &str| figures.iter().find(|figure| figure["name"] == name).unwrap();
    assert_eq!(figure("pages_limit")["unit"], "bytes");
    assert!(figure("versions_changes")["value"].as_u64() >= Some(1));
    assert!(figure("space_limit")["value"].as_u64() > Some(0));
    assert_eq!(
        (&before["devices"], &before["clients_left_out"]),
        (&Value::Array(vec![]), &0.into())
    );

    // Its row shows its work.
    writeln!(input, "go").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "wrote");
    let requests = |client: &Value| client["requests"].as_u64().unwrap_or_default();
    eventually("more requests of the shell", || {
        requests(&shell(&query_server(&place))) > requests(&sh)
    });

    // The only daemon needs no name, and its table has a row for each client.
    let text = place.expect_success(&["stat"]);
    let head = text.lines().position(|line| line.trim_start().starts_with("client  ")).unwrap();
    let rows: Vec<&str> = text.lines().skip(head + 1).take(2).collect();
    assert!(rows.iter().any(|row| row.contains(" sh ")), "{text}");
    let own = format!(" {} ", std::process::id());
    assert!(rows.iter().any(|row| row.contains(&own)), "{text}");
    let metrics = place.expect_success(&["stat", "socket", "--prometheus"]);
    let pid = std::process::id();
    let labels = |line: &&str| line.contains(&format!("pid=\"{pid}\"")) && line.ends_with(" 2");
    let of_client =
        metrics.lines().filter(|line| line.starts_with("defuse_client_requests_total{"));
    assert_eq!(of_client.filter(labels).count(), 1, "{metrics}");

    // Another one makes the name necessary.
    place.expect_success(&["serve", "memory:", "second"]);
    place.expect_failure(2, &["stat"], "several mounts or servers: name one of");
    let second: Value =
        serde_json::from_str(&place.expect_success(&["stat", "second", "--json"])).unwrap();
    end(&second, Signal::TERM);

    // Ended clients count in the sum.
    drop((plain, input));
    program.wait().unwrap();
    eventually("no clients", || query_server(&place)["clients"] == Value::Array(Vec::new()));
    let sum = |answer: &Value| -> u64 {
        let ops = answer["ops"].as_array().unwrap().iter();
        ops.map(|op| op["count"].as_u64().unwrap()).sum()
    };
    let after = query_server(&place);
    assert!(sum(&after) >= sum(&before) && after["gauges"]["connections"] == 0, "{after}");

    for option in ["--stages", "--negotiated"] {
        place.expect_failure(
            2,
            &["stat", "socket", option],
            &format!("there is no {option} of it, because"),
        );
    }
    // Watching ends with the server, and is no failure then.
    let mut watch = place.command(&["stat", "socket", "--watch", "0.05", "--json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut periods = BufReader::new(watch.stdout.take().unwrap()).lines();
    let period: Value = serde_json::from_str(&periods.next().unwrap().unwrap()).unwrap();
    assert_eq!((sum(&period), &period["socket"]), (0, &after["socket"]));
    end(&after, Signal::TERM);
    assert!(watch.wait().unwrap().success());
    assert_eq!(fs::read_dir(place.path("run")).unwrap().count(), 0);
    place.expect_failure(1, &["stat", "socket"], "nor the socket of a server");
    place.expect_failure(1, &["stat"], "nothing is mounted or served");
}

/// Only mounts were shown.
#[test]
fn top_shows_servers_with_their_operations_and_clients() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket"]);
    let socket = place.path("socket").display().to_string();
    let mount = format!("/x=socket:{socket}");
    let script = "while [ ! -e end ]; do echo hello >/x/file; read line </x/file; done";
    let mut program =
        place.command(&["run", "--mount", &mount, "--", "sh", "-c", script]).spawn().unwrap();
    // A period without requests is possible while other programs use the processors.
    let (mut row, mut text) = (Value::Null, String::new());
    eventually("a busy server", || {
        let all: Value = serde_json::from_str(
            &place.expect_success(&["top", "--once", "--json", "--every", "0.2"]),
        )
        .unwrap();
        let servers = all["servers"].as_array().unwrap();
        row = servers.iter().find(|row| row["socket"] == socket.as_str()).unwrap().clone();
        text = place.expect_success(&["top", "--once", "--every", "0.2"]);
        let has = |op: &str| row["ops"].as_array().unwrap().iter().any(|one| one["op"] == op);
        has("WRITE") && has("OPEN") && text.contains("WRITE")
    });
    let answer = query_server(&place);
    assert_eq!((&row["source"], &row["pid"]), (&"memory:".into(), &answer["pid"]));
    let [client] = &row["clients"].as_array().unwrap()[..] else { panic!("{row}") };
    assert_eq!(client["program"], "sh");
    let requests = client["requests"].as_u64().unwrap();
    assert!(
        (1..answer["clients"][0]["requests"].as_u64().unwrap()).contains(&requests),
        "{client}"
    );
    assert!(row["per_second"].as_f64() > Some(0.0) && row["threads"].as_u64() > Some(0), "{row}");
    let line = text.lines().find(|line| line.contains(&socket)).unwrap();
    assert!(line.ends_with(&format!("{socket} (memory:)")), "{text}");
    assert!(text.lines().any(|line| line.contains(" sh ")), "{text}");
    // One that does not answer is named, and holds up nothing.
    let pid = Pid::from_raw(answer["pid"].as_u64().unwrap() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let text = place.run(&["top", "--once", "--every", "0.1"]);
    kill_process(pid, Signal::CONT).unwrap();
    let said = text.out + &text.err;
    assert!(said.contains(&format!("the server of {socket} (pid")), "{said}");
    fs::write(place.path("end"), "").unwrap();
    assert!(program.wait().unwrap().success());
    end(&answer, Signal::TERM);
}

/// A user who may not trace the kernel could not see even servers of its own.
#[test]
fn top_shows_servers_where_the_kernel_cannot_be_traced() {
    let place = TestPlace::new();
    if !rustix::process::geteuid().is_root() {
        place.expect_success(&["serve", "memory:", "socket"]);
        let text = place.expect_success(&["top", "--once", "--every", "0.1"]);
        assert!(text.contains("(memory:)") && text.contains("connections are not shown"), "{text}");
        end(&query_server(&place), Signal::TERM);
        return;
    }
    let program = place.install_for_all_users();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    fs::set_permissions(place.path(""), open).unwrap();
    let run = |arguments: &[&str]| {
        use std::os::unix::process::CommandExt;
        let output = place.command_of(&program, arguments).uid(65534).gid(65534).output();
        let said = common::from_output(output.unwrap());
        assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
        said.out
    };
    run(&["serve", "memory:", "socket"]);
    let text = run(&["top", "--once", "--every", "0.1"]);
    assert!(text.contains("(memory:)") && text.contains("connections are not shown"), "{text}");
    assert!(text.contains("not permitted"), "{text}");
    // Root does not look into a directory of another user.
    let answer = run(&["stat", "socket", "--json"]);
    end(&serde_json::from_str(&answer).unwrap(), Signal::TERM);
}

/// The server's count of requests of this operation, from all clients.
fn requests(place: &TestPlace, op: &str) -> u64 {
    let answer = query_server(place);
    let ops = answer["ops"].as_array().unwrap();
    ops.iter().find(|one| one["op"] == op).map_or(0, |one| one["count"].as_u64().unwrap())
}

/// Each close(2) waited for a request, also of files that were only read.
#[test]
fn a_file_is_closed_without_a_request_unless_a_lock_may_have_to_end() {
    for source in ["memory:", "passthrough:src"] {
        let place = TestPlace::new();
        place.expect_success(&["serve", source, "socket", "--shared"]);
        let mount = format!("/x=shared:{}", place.path("socket").display());
        let run = |script: &str| {
            place.expect_success(&["run", "--mount", &mount, "--", "sh", "-c", script])
        };
        run(
            "echo hello >/x/file; for i in 1 2 3 4 5 6 7 8; do read line </x/file; done; cat /x/file >/x/copy",
        );
        // Some opens are taken from files that were opened with others.
        assert!(requests(&place, "OPEN") + requests(&place, "CREATE") >= 4, "{source}");
        assert_eq!(requests(&place, "FLUSH"), 0, "{source}");
        if std::process::Command::new("flock").arg("--version").output().is_err() {
            println!("skipped: there is no flock");
            return;
        }
        // The shell, which has taken no lock, closes the file that another process has locked: no
        // process finds the lock once close(2) has returned.
        let script = "for i in 1 2 3 4 5 6 7 8 9 10; do exec 9>/x/lock; flock 9; exec 9>&-; flock -n /x/lock echo free; done";
        assert_eq!(run(script), "free\n".repeat(10), "{source}");
        assert!(requests(&place, "FLUSH") >= 20, "{source}: {}", requests(&place, "FLUSH"));
        end(&query_server(&place), Signal::TERM);
    }
}

/// A server that is killed leaves its entry and its control socket behind.
#[test]
fn control_sockets_of_killed_servers_are_removed() {
    let place = TestPlace::new();
    place.expect_success(&["serve", "memory:", "socket"]);
    let left = || {
        let files = fs::read_dir(place.path("run")).unwrap();
        let mut names: Vec<_> =
            files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let answer = query_server(&place);
    let pid = answer["pid"].as_u64().unwrap();
    assert_eq!(left(), [format!("serve-{pid}.json"), format!("serve-{pid}.sock")]);
    end(&answer, Signal::KILL);
    assert_eq!(left().len(), 2);
    place.expect_failure(
        1,
        &["stat", "socket"],
        "is a socket, and no server of defuse that you may see",
    );
    assert!(left().is_empty(), "{:?}", left());
    // The server was killed before it wrote its entry. Another file of the directory stays.
    fs::write(place.path(&format!("run/serve-{pid}.sock")), "").unwrap();
    fs::write(place.path("run/serve-x.sock"), "").unwrap();
    place.expect_success(&["list"]);
    assert_eq!(left(), ["serve-x.sock"]);
}
