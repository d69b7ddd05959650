//! The commands of the units of systemd, as a service manager starts them: configuration,
//! readiness, end.

mod common;

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, Stdio};
use std::time::Duration;

use common::TestPlace;
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

/// A process of a unit, which is killed where a test fails.
struct UnitProcess(Child);

impl UnitProcess {
    /// Starts a command with the variable by which it tells that it is ready.
    fn start(place: &TestPlace, arguments: &[&str], manager: &str) -> UnitProcess {
        let mut command = place.command(arguments);
        command.env("NOTIFY_SOCKET", manager).stdout(Stdio::null());
        UnitProcess(command.spawn().unwrap())
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for UnitProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn receive_notice(socket: &UnixDatagram) -> String {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut text = [0; 64];
    let length = socket.recv(&mut text).unwrap();
    String::from_utf8(text[..length].to_vec()).unwrap()
}

#[test]
fn a_service_manager_learns_that_a_mount_of_a_configuration_is_ready() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let config = format!(
        "source = \"passthrough:{}\"\nmountpoint = {:?}\noptions = [\"ro\", \"sandbox=namespace\"]\n",
        place.path("src").display(),
        place.path("mnt")
    );
    fs::write(place.path("a.toml"), config).unwrap();
    fs::write(place.path("src/file"), "hello").unwrap();
    let socket = UnixDatagram::bind(place.path("notify")).unwrap();
    let manager = place.path("notify").display().to_string();
    let child =
        UnitProcess::start(&place, &["mount", "--foreground", "--config", "a.toml"], &manager);
    assert_eq!(receive_notice(&socket), "READY=1\n");
    assert_eq!(fs::read(place.path("mnt/file")).unwrap(), b"hello");
    assert!(fs::write(place.path("mnt/other"), "").is_err(), "the option has no effect");
    child.end();
    assert!(!place.is_mounted());
}

#[test]
fn a_mount_of_a_configuration_goes_to_the_background() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let config = format!("source = 'memory:'\nmountpoint = {:?}\n", place.path("mnt"));
    fs::write(place.path("a.toml"), config).unwrap();
    place.expect_success(&["mount", "--config", "a.toml", "-o", "size=1M"]);
    assert!(fs::write(place.path("mnt/large"), vec![0; 2 << 20]).is_err());
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn a_service_manager_learns_that_a_manager_is_ready() {
    let place = TestPlace::new();
    let config = format!(
        "socket = {:?}\n[[device]]\npath = '/a'\nsource = 'memory:'\n",
        place.path("socket")
    );
    fs::write(place.path("manager.toml"), config).unwrap();
    let name = format!("defuse-units-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let socket = UnixDatagram::bind_addr(&address).unwrap();
    let child = UnitProcess::start(
        &place,
        &["manager", "--foreground", "manager.toml"],
        &format!("@{name}"),
    );
    assert_eq!(receive_notice(&socket), "READY=1\n");
    place.expect_success(&["stat", "socket"]);
    child.end();
}

#[test]
fn a_mount_that_fails_is_not_ready_and_names_the_place_of_the_mistake() {
    let place = TestPlace::new();
    fs::write(place.path("a.toml"), "source = 'memory:'\nmountpoint = '/m'\nspeed = 7\n").unwrap();
    let socket = UnixDatagram::bind(place.path("notify")).unwrap();
    let manager = place.path("notify").display().to_string();
    let mut child =
        UnitProcess::start(&place, &["mount", "--foreground", "--config", "a.toml"], &manager);
    assert_eq!(child.0.wait().unwrap().code(), Some(2));
    socket.set_nonblocking(true).unwrap();
    assert!(socket.recv(&mut [0; 64]).is_err());
    place.expect_failure(2, &["mount", "--config", "a.toml"], "a.toml:3: speed: unknown field");
    place.expect_failure(1, &["mount", "--config", "no.toml"], "cannot read the configuration");
    place.expect_failure(1, &["mount", "--config", "no.toml"], "`defuse mount --help` shows");
}
