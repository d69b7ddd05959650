//! `defuse serve` as other processes see it.

mod common;

use std::fs;

use common::{Place, eventually};
use rustix::process::{Pid, Signal, kill_process};

/// `defuse list` knew only mounts, and nothing showed which process serves a socket.
#[test]
fn a_server_is_listed_with_its_socket_while_it_runs_and_its_process_names_both() {
    let place = Place::new();
    let socket = place.path("socket").display().to_string();
    let servers = || {
        let all = serde_json::from_str::<Vec<serde_json::Value>>(&place.ok(&["list", "--json"]));
        let mut all = all.unwrap();
        all.retain(|line| line["socket"] == socket.as_str());
        all
    };
    assert!(servers().is_empty());
    for signal in [Signal::TERM, Signal::KILL] {
        // It goes to the background, and is listed when it comes back.
        place.ok(&["serve", "memory:", "socket", "-o", "size=1M", "--shared", "--cache=2M"]);
        let [server] = &servers()[..] else { panic!("{:?}", servers()) };
        assert_eq!(server["source"], "memory:");
        let table = place.ok(&["list"]);
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
