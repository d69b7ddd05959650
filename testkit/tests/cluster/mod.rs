//! A volume on three servers with its mounts.

mod load;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use defuse_testkit::cluster::GlusterCluster;
use defuse_testkit::mounted::ServedMount;

pub use load::{CallerThreads, LONG, WriterLoad, WriterResult};

/// Seconds without an answer after which GlusterFS gives up a connection.
pub const PING: &str = "4";

/// A time after which something hangs. GlusterFS's own limits are below, but the machine may be
/// loaded.
pub const HANGS: Duration = Duration::from_secs(40);

pub fn time_run<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = run();
    println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    result
}

/// Waits until `is` is true.
pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < 3 * HANGS, "not within {:?}: {what}", 3 * HANGS);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Mounts a volume by this program. The third server has no bricks, and never fails.
pub fn mount(cluster: &GlusterCluster, volume: &str, place: &Path) -> ServedMount {
    let inside = cluster.servers().network_prefix();
    let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
    let source = format!("gluster://{}/{volume}", cluster.host(3));
    ServedMount::mount_under(&inside, source.as_ref(), place, &[]).unwrap()
}

/// Mounts a volume by GlusterFS's own client.
pub fn native(cluster: &GlusterCluster, volume: &str, place: &Path) -> ServedMount {
    ServedMount::native(cluster.servers(), (&cluster.host(3), volume), place, &[]).unwrap()
}

/// Resident memory of a process in KiB.
pub fn memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// Time on processors of a process, in clock ticks.
pub fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = &stat[stat.rfind(')').unwrap() + 2..];
    let fields = after_name.split(' ').skip(11).take(2);
    fields.map(|field| field.parse::<u64>().unwrap()).sum()
}

/// Waits until no file of a replicated volume has to be healed, and its two bricks are equal.
pub fn wait_for_heal(cluster: &GlusterCluster, volume: &str) {
    heal_until(cluster, volume, "both bricks have everything", || {
        let info = cluster.gluster(3, &["volume", "heal", volume, "info"]).unwrap_or_default();
        info.matches("Number of entries: 0").count() == 2
    });
    let [one, two] = [1, 2].map(|server| files(&cluster.brick(server, volume)));
    assert!(!one.is_empty());
    for (name, data) in &one {
        assert!(two.get(name) == Some(data), "{name} differs between bricks");
    }
    assert_eq!(one.len(), two.len());
}

/// Has a replicated volume healed until `is` is true.
pub fn heal_until(
    cluster: &GlusterCluster,
    volume: &str,
    what: &str,
    mut is: impl FnMut() -> bool,
) {
    let mut answer = None::<Instant>;
    wait_until(what, || {
        // A healer that has looked too early sleeps for minutes.
        if answer.is_none_or(|at| at.elapsed() > Duration::from_secs(5)) {
            let _ = cluster.gluster(3, &["volume", "heal", volume]);
            answer = Some(Instant::now());
        }
        is()
    });
}

/// The files of a brick, without those by which GlusterFS controls itself.
fn files(brick: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(brick).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.map(|path| (name(&path), fs::read(&path).unwrap())).collect()
}
