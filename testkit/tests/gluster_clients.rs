//! Random changes by several clients of a GlusterFS volume beside a model: what one of them does,
//! the others see within the promised time, and their own changes at once.

mod clients;

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clients::{ClientEpisode, ComparedClient, EpisodeCounts};
use defuse_testkit::gluster::{GlusterServers, HOST, unavailable_reason};
use defuse_testkit::mounted::{self, ServedMount, program};
use tempfile::TempDir;

/// The promise: a change by another client is seen within a second, by a message of the servers or
/// because answers are kept for a second (`valid`).
const PROMISE: Duration = Duration::from_secs(1);

/// Episodes at a time.
const LANES: usize = 8;

/// Changes and looks, of which each volume gets half.
const OPERATIONS: u64 = 6_000;
const ALL_OPERATIONS: u64 = 100_000;

#[test]
fn changes_by_other_clients_are_seen_within_a_second() {
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    let servers = GlusterServers::start().unwrap();
    let is_full = std::env::var_os("DEFUSE_FULL").is_some();
    let count = if is_full { ALL_OPERATIONS } else { OPERATIONS };
    // The servers of this volume notify of changes.
    {
        let mounts = [mount(&servers, "repl"), mount(&servers, "repl")];
        let native = native(&servers, "repl");
        let clients = [
            ComparedClient::start_mounted("one", mounts[0].path(), PROMISE),
            ComparedClient::start_mounted("other", mounts[1].path(), PROMISE),
            run(&servers, "repl"),
            ComparedClient::start_mounted("native", native.path(), Duration::ZERO),
        ];
        work("all clients, with messages of the servers", &clients, count / 2);
        work("two mounts, with messages of the servers", &clients[..2], count / 4);
        an_idle_mount_wakes_seldom(mounts[0].mount.as_ref().unwrap());
    }
    // The servers of this volume do not.
    let mounts = [mount(&servers, "dist"), mount(&servers, "dist")];
    let native = native(&servers, "dist");
    let clients = [
        ComparedClient::start_mounted("one", mounts[0].path(), PROMISE),
        ComparedClient::start_mounted("other", mounts[1].path(), PROMISE),
        ComparedClient::start_mounted("native", native.path(), Duration::ZERO),
    ];
    work("all mounts, without messages", &clients, count / 4);
}

/// A distributed volume removes a name where the client's last lookup found the file. The name has
/// led to another file since, on another brick: the client removed the pointer to this file, which
/// was listed from then on, but no lookup found it. GlusterFS's own client loses more than half of
/// these files.
#[test]
fn a_removal_after_a_rename_by_another_client_leaves_nothing_that_no_lookup_finds() {
    const NAMES: usize = 24;
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    let servers = GlusterServers::start().unwrap();
    let mounts = [mount(&servers, "dist"), mount(&servers, "dist")];
    let [here, there] = [0, 1].map(|number: usize| mounts[number].path().join("removals"));
    fs::create_dir(&here).unwrap();
    for number in 0..NAMES {
        let (old, new) = (format!("old-{number}"), format!("new-{number}"));
        fs::write(here.join(&old), "").unwrap();
        fs::write(here.join(&new), "").unwrap();
        // The other mount may have looked at the directory before.
        std::thread::sleep(if number == 0 { 2 * PROMISE } else { Duration::ZERO });
        assert!(fs::metadata(here.join(&new)).unwrap().is_file());
        fs::rename(there.join(&old), there.join(&new)).unwrap();
        // Longer than the mount trusts a lookup for a removal, and shorter than the kernel trusts
        // the name.
        std::thread::sleep(Duration::from_millis(50));
        fs::remove_file(here.join(&new)).unwrap();
    }
    std::thread::sleep(2 * PROMISE);
    let left: Vec<_> = fs::read_dir(&there).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    fs::remove_dir(&there).unwrap();
}

/// Runs episodes with this number of operations. `DEFUSE_SEED` is the seed of the first one.
fn work(what: &str, clients: &[ComparedClient], operations: u64) {
    let named = std::env::var("DEFUSE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = AtomicU64::new(named.unwrap_or_else(|| fastrand::u64(..1 << 40)));
    let (begun, counts, failed) =
        (Instant::now(), EpisodeCounts::default(), AtomicBool::new(false));
    println!("{what}: the first seed is {}", seed.load(Ordering::Relaxed));
    let errors = Mutex::new(Vec::new());
    let done = || {
        let all = counts.changes.load(Ordering::Relaxed) + counts.looks.load(Ordering::Relaxed);
        all >= operations || failed.load(Ordering::Relaxed)
    };
    let lane = || {
        while !done() {
            let seed = seed.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = ClientEpisode::run(clients, &counts, seed) {
                failed.store(true, Ordering::Relaxed);
                errors.lock().unwrap().push(error);
            }
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
    println!("  {counts:?} in {:.1} s", begun.elapsed().as_secs_f64());
    let errors = errors.into_inner().unwrap();
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    let [refused, changes, moved, looks] =
        [&counts.refused, &counts.changes, &counts.moved, &counts.looks]
            .map(|it| it.load(Ordering::Relaxed));
    assert!(moved <= 1 + looks / 500, "{moved} of {looks} looks led to a directory that was moved");
    assert!(refused <= 1 + changes / 500, "the servers refused {refused} of {changes} changes");
}

/// A mount polls libgfapi for messages of the servers, because its callback is expensive. It polled
/// 25 times a second for ever.
fn an_idle_mount_wakes_seldom(mount: &ServedMount) {
    const SECONDS: u64 = 2;
    let wakes = || -> u64 {
        let threads = fs::read_dir(format!("/proc/{}/task", mount.pid())).unwrap();
        let status =
            threads.filter_map(|it| fs::read_to_string(it.unwrap().path().join("status")).ok());
        let ours = status.filter(|status| status.starts_with("Name:\tgluster-"));
        let count = |status: String| -> u64 {
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        ours.map(count).sum()
    };
    // Until it is idle.
    std::thread::sleep(Duration::from_secs(4));
    let before = wakes();
    std::thread::sleep(Duration::from_secs(SECONDS));
    let count = wakes() - before;
    println!("  an idle mount has woken {count} times in {SECONDS} s");
    // Two questions a second, and looks at the connections, which wait for locks now and then.
    assert!((1..10 * SECONDS).contains(&count), "{count} times");
}

/// A mount in a directory of its own.
struct PlacedMount {
    mount: Option<ServedMount>,
    _place: TempDir,
}

impl PlacedMount {
    fn path(&self) -> &Path {
        self.mount.as_ref().unwrap().path()
    }
}

impl Drop for PlacedMount {
    fn drop(&mut self) {
        self.mount.take().unwrap().end().unwrap();
    }
}

fn mount(servers: &GlusterServers, volume: &str) -> PlacedMount {
    let place = mounted::scratch().unwrap();
    let inside = servers.network_prefix();
    let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
    let source = format!("gluster://{HOST}/{volume}");
    let mount = ServedMount::mount_under(&inside, source.as_ref(), place.path(), &[]).unwrap();
    PlacedMount { mount: Some(mount), _place: place }
}

/// A program under `defuse run`.
fn run(servers: &GlusterServers, volume: &str) -> ComparedClient {
    const DIR: &str = "/defuse-clients";
    let mut command = servers.command(program().unwrap());
    let mount = format!("{DIR}=gluster://{HOST}/{volume}");
    command.args(["run", "--mount", &mount, "--", env!("CARGO_BIN_EXE_file_agent")]);
    ComparedClient::program("run", Path::new(DIR), PROMISE, command)
}

/// A mount by GlusterFS's own client, which keeps nothing, as a witness of what the servers have.
/// Like ours, it closes files when the servers have the data.
fn native(servers: &GlusterServers, volume: &str) -> PlacedMount {
    const OPTIONS: [&str; 9] = [
        "--attribute-timeout=0",
        "--entry-timeout=0",
        "--direct-io-mode=enable",
        "--xlator-option=*-write-behind.flush-behind=off",
        "--xlator-option=*-open-behind.pass-through=on",
        "--xlator-option=*-read-ahead.pass-through=on",
        "--xlator-option=*-quick-read.max-file-size=0",
        "--xlator-option=*-io-cache.cache-timeout=0",
        "--xlator-option=*-md-cache.md-cache-timeout=0",
    ];
    let place = mounted::scratch().unwrap();
    let mount = ServedMount::native(servers, (HOST, volume), place.path(), &OPTIONS).unwrap();
    PlacedMount { mount: Some(mount), _place: place }
}
