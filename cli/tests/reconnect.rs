//! Clients with `reconnect` of a server that is killed at random points.
//!
//! `DEFUSE_FULL=1` kills it a thousand times.

mod common;
#[path = "common/load.rs"]
mod load;

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{TestPlace, eventually};
use load::{LoadRandom, MountLoad, data};
use rustix::io::Errno;

/// The limit for which calls wait. The servers begin much sooner, but the machine may be busy.
const LIMIT: Duration = Duration::from_secs(50);

fn kill_count() -> u32 {
    if std::env::var_os("DEFUSE_FULL").is_some() { 1000 } else { 20 }
}

/// A server, which can be killed.
struct KillableServer<'a> {
    place: &'a TestPlace,
    command: Vec<String>,
    process: Child,
}

impl<'a> KillableServer<'a> {
    fn start(place: &'a TestPlace, command: Vec<String>) -> KillableServer<'a> {
        let process = KillableServer::spawn(place, &command);
        let socket = place.path("socket");
        eventually("served", || socket.exists());
        KillableServer { place, command, process }
    }

    fn spawn(place: &TestPlace, command: &[String]) -> Child {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        place.command(&words).stderr(Stdio::null()).spawn().unwrap()
    }

    fn kill(&mut self) {
        // SIGKILL.
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.process = KillableServer::spawn(self.place, &self.command);
    }
}

/// The server of a source.
fn make_server_arguments(source: &str) -> Vec<String> {
    ["serve", "--shared", "--foreground", source, "socket"].map(str::to_owned).into()
}

/// Kills a server at random points while two programs use its mount, each in one of the
/// directories.
fn kill_under_load(place: &TestPlace, command: Vec<String>, scheme: &str, dirs: [&str; 2]) {
    let seed = u64::from(std::process::id()) << 20 | u64::from(kill_count());
    println!("seed {seed}");
    let mut server = KillableServer::start(place, command);
    let text = format!("{scheme}:{}", place.path("socket").display());
    let option = format!("reconnect={}", LIMIT.as_secs());
    eventually("mounted", || place.run(&["mount", "-o", &option, &text, "mnt"]).code == Some(0));
    let (ends, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let loads = std::thread::scope(|scope| {
        let (ends, count) = (&ends, &count);
        let programs: Vec<_> = (0..2)
            .map(|number| {
                let dir = place.path("mnt").join(dirs[number]).join(format!("program {number}"));
                MountLoad::start(scope, (dir, seed + number as u64), ends, count)
            })
            .collect();
        let mut random = LoadRandom(seed);
        let mut fails = false;
        for _ in 0..kill_count() {
            std::thread::sleep(Duration::from_micros(random.next() % 200_000));
            server.kill();
            std::thread::sleep(Duration::from_micros(random.next() % 20_000));
            // The next kill comes after something was made durable, or in the start of the server.
            let (before, early) = (count.load(Ordering::Relaxed), random.next().is_multiple_of(8));
            server.start_again();
            let begun = Instant::now();
            while !early && count.load(Ordering::Relaxed) == before && !fails {
                std::thread::sleep(Duration::from_millis(1));
                fails = begun.elapsed() > 2 * LIMIT || programs.iter().any(|one| one.is_finished());
            }
        }
        ends.store(true, Ordering::Relaxed);
        let loads: Vec<_> = programs.into_iter().map(|program| program.join()).collect();
        assert!(!fails, "nothing was made durable after a kill");
        loads.into_iter().map(|load| load.unwrap()).collect::<Vec<_>>()
    });
    for load in &loads {
        assert!(load.longest < 2 * LIMIT, "a call took {:?}", load.longest);
        assert!(!load.durable.is_empty());
        for (seed, len) in &load.durable {
            assert!(fs::read(load.path(*seed)).unwrap() == data(*seed, *len), "{seed:x}");
        }
    }
    let durable: usize = loads.iter().map(|load| load.durable.len()).sum();
    println!("{} kills, {durable} durable files", kill_count());
    place.expect_success(&["umount", "mnt"]);
    server.kill();
}

fn kill_on_uhs(scheme: &str) {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "image", "--size", "1G"]);
    let source = format!("uhs:{}", place.path("image").display());
    kill_under_load(&place, make_server_arguments(&source), scheme, [""; 2]);
    place.expect_success(&["fsck", "image"]);
}

#[test]
fn kills_of_a_server_of_uhs_lose_nothing_durable_and_no_client_waits_longer() {
    kill_on_uhs("shared");
}

#[test]
fn kills_of_a_server_of_a_directory_lose_nothing_durable_over_a_socket() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = format!("passthrough:{}", place.path("src").display());
    kill_under_load(&place, make_server_arguments(&source), "socket", [""; 2]);
}

#[test]
fn kills_of_a_manager_lose_nothing_durable_on_its_devices() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let images = ["one", "two"].map(|name| {
        let image = format!("{name}.image");
        place.expect_success(&["mkfs", "uhs", &image, "--size", "512M"]);
        (name, image)
    });
    let device = |(name, image): &(&str, String)| {
        let image = place.path(image);
        format!("[[device]]\npath = \"/{name}\"\nsource = \"uhs:{}\"\n", image.display())
    };
    let devices: String = images.iter().map(device).collect();
    let text = format!("socket = \"{}\"\n{devices}", place.path("socket").display());
    fs::write(place.path("disks.toml"), text).unwrap();
    let command = ["manager", "--foreground", "disks.toml"].map(str::to_owned);
    kill_under_load(&place, command.into(), "shared", ["one", "two"]);
    images.iter().for_each(|(_, image)| drop(place.expect_success(&["fsck", image])));
}

/// Programs of a run reach the server through the run, which waits for the next one.
#[test]
fn a_run_continues_with_the_next_server() {
    let place = TestPlace::new();
    let source = format!("passthrough:{}", place.path("src").display());
    let mut server = KillableServer::start(&place, make_server_arguments(&source));
    let mount =
        format!("/x=shared:{},reconnect={}", place.path("socket").display(), LIMIT.as_secs());
    let script = "echo one >/x/file; exec 5<>/x/file; echo ready >ready; \
                  while [ ! -e killed ]; do sleep 0.01; done; read line <&5; echo $line; cat /x/file; mkdir /x/dir";
    let mut command = place.command(&["run", "--mount", &mount, "--", "sh", "-c", script]);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ready = place.path("ready");
    eventually("ready", || ready.exists());
    server.kill();
    fs::write(place.path("killed"), "").unwrap();
    server.start_again();
    let said = common::from_output(run.wait_with_output().unwrap());
    assert_eq!((said.out.as_str(), said.code), ("one\none\n", Some(0)), "{}", said.err);
    assert!(Path::new(&place.path("src").join("dir")).is_dir());
    server.kill();
}

/// Cached pages and small files are read without a request. A program that only read had the pages
/// of the killed server for ever, also after the next server had other bytes.
#[test]
fn a_program_that_reads_cached_pages_notices_the_end_of_their_server() {
    let python = "/usr/bin/python3";
    if !Path::new(python).exists() {
        println!("skipped: pages of a killed server: python3 is not installed");
        return;
    }
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "image", "--size", "64M"]);
    let source = format!("uhs:{}", place.path("image").display());
    let mut server = KillableServer::start(&place, make_server_arguments(&source));
    let mount = format!("/x=shared:{}", place.path("socket").display());
    let write = |letter: &str| {
        let script = format!(
            "import os\nfor name, count in ('small', 100), ('large', 200000):\n \
             with open('/x/' + name, 'wb') as f: f.write(b'{letter}' * count); f.flush(); os.fsync(f.fileno())"
        );
        place.expect_success(&["run", "--mount", &mount, "--", python, "-c", &script]);
    };
    write("o");
    let script = "
import errno, os, time
files = [os.open('/x/' + name, os.O_RDONLY) for name in ('small', 'large')]
def look():
    for fd in files:
        try: print(os.pread(fd, 1, 50).decode())
        except OSError as error: print(errno.errorcode[error.errno])
for _ in range(50):
    for fd in files: os.pread(fd, 100, 0), os.pread(fd, 4096, 65536)
look()
open('ready', 'w').close()
while not os.path.exists('changed'): time.sleep(0.01)
look()";
    let mut command = place.command(&["run", "--mount", &mount, "--", python, "-c", script]);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ready = place.path("ready");
    eventually("ready", || ready.exists());
    server.kill();
    server.start_again();
    let is_served = || place.run(&["run", "--mount", &mount, "--", "true"]).code == Some(0);
    eventually("served again", is_served);
    write("n");
    fs::write(place.path("changed"), "").unwrap();
    let said = common::from_output(run.wait_with_output().unwrap());
    server.kill();
    assert_eq!(said.out, "o\no\nENOTCONN\nENOTCONN\n", "{}", said.err);
}

/// Another user at the same path gets no request.
#[test]
fn a_server_of_another_user_is_not_used() {
    use std::os::unix::process::CommandExt;
    let Some(place) = TestPlace::new_to_mount() else { return };
    let program = place.install_for_all_users();
    let source = format!("passthrough:{}", place.path("src").display());
    let mut server = KillableServer::start(&place, make_server_arguments(&source));
    let text = format!("socket:{}", place.path("socket").display());
    eventually("mounted", || {
        place.run(&["mount", "-o", "reconnect=1", &text, "mnt"]).code == Some(0)
    });
    server.kill();
    fs::remove_file(place.path("socket")).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    fs::set_permissions(place.path(""), open).unwrap();
    let mut other =
        place.command_of(&program, &["serve", "--admit", "0", "--foreground", "memory:", "socket"]);
    let mut other = other.uid(65534).gid(65534).stderr(Stdio::null()).spawn().unwrap();
    eventually("served by another user", || place.path("socket").exists());
    let refused = fs::write(place.path("mnt").join("secret"), "secret").unwrap_err();
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::NOTCONN));
    other.kill().unwrap();
    other.wait().unwrap();
    server.start_again();
    eventually("the first user's server", || {
        fs::write(place.path("mnt").join("file"), "1").is_ok()
    });
    assert_eq!(fs::read(place.path("src").join("file")).unwrap(), b"1");
    place.expect_success(&["umount", "mnt"]);
    server.kill();
}
