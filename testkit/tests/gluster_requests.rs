//! The requests that bricks of a GlusterFS volume get for each operation, counted by the servers,
//! by a mount and by GlusterFS's own client. They are a contract: the table in docs/gluster.md has
//! the bounds, and no change may add a request.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use defuse_testkit::gluster::{
    BrickLayout, GlusterServers, HOST, ROOM, VolumeSetup, unavailable_reason,
};
use defuse_testkit::mounted::{self, ServedMount};

/// Number of files of an operation. Requests for the directory count for all of them together.
const FILES: usize = 100;

/// The bounds of a volume: the operation, and the largest number of requests for a file, by a
/// mount. They hold also where a loaded machine takes longer than names and attributes are kept.
type RequestBounds = [(&'static str, f64); 13];

/// A distributed volume with the default options.
const DISTRIBUTED: RequestBounds = [
    ("create", 4.8),
    ("ls -l", 3.4),
    ("ls -l again", 3.4),
    ("stat after ls -l", 1.4),
    ("read cold", 2.8),
    ("read again", 2.8),
    ("read after a second", 2.8),
    ("tar c", 3.6),
    ("chmod", 2.4),
    ("overwrite", 6.5),
    ("rename", 22.8),
    ("delete", 5.5),
    ("rmdir", 16.5),
];

/// A replicated volume with the default options: most changes are requests to both bricks.
const REPLICATED: RequestBounds = [
    ("create", 20.8),
    ("ls -l", 3.4),
    ("ls -l again", 3.4),
    ("stat after ls -l", 2.4),
    ("read cold", 4.0),
    ("read again", 4.0),
    ("read after a second", 4.0),
    ("tar c", 4.4),
    ("chmod", 8.4),
    ("overwrite", 27.5),
    ("rename", 21.4),
    ("delete", 11.0),
    ("rmdir", 15.4),
];

/// Two bricks and an arbiter. With `DEFUSE_FULL=1`, like the following volumes.
const ARBITER: RequestBounds = [
    ("create", 30.5),
    ("ls -l", 4.4),
    ("ls -l again", 4.4),
    ("stat after ls -l", 3.4),
    ("read cold", 5.0),
    ("read again", 5.0),
    ("read after a second", 5.0),
    ("tar c", 5.4),
    ("chmod", 12.5),
    ("overwrite", 40.5),
    ("rename", 32.0),
    ("delete", 16.5),
    ("rmdir", 23.0),
];

/// Files in three parts, with locks that the client keeps for a while.
const DISPERSE: RequestBounds = [
    ("create", 30.5),
    ("ls -l", 17.5),
    ("ls -l again", 17.5),
    ("stat after ls -l", 5.5),
    ("read cold", 17.0),
    ("read again", 17.0),
    ("read after a second", 17.0),
    ("tar c", 17.0),
    ("chmod", 16.5),
    ("overwrite", 36.5),
    ("rename", 27.5),
    ("delete", 13.0),
    ("rmdir", 15.5),
];

/// A distributed volume whose servers tell of changes.
const TOLD: RequestBounds = [
    ("create", 6.8),
    ("ls -l", 3.4),
    ("ls -l again", 3.4),
    ("stat after ls -l", 0.4),
    ("read cold", 2.8),
    ("read again", 2.8),
    ("read after a second", 2.8),
    ("tar c", 4.4),
    ("chmod", 2.4),
    ("overwrite", 6.5),
    ("rename", 22.8),
    ("delete", 5.5),
    ("rmdir", 16.5),
];

#[test]
fn no_operation_asks_bricks_more_often_than_recorded() {
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    let tells = vec![("features.cache-invalidation", "on")];
    let volumes = [
        ("dist", BrickLayout::Distributed, Vec::new(), DISTRIBUTED),
        ("repl", BrickLayout::Replicated, Vec::new(), REPLICATED),
        ("arbiter", BrickLayout::Arbiter, Vec::new(), ARBITER),
        ("disperse", BrickLayout::Disperse, Vec::new(), DISPERSE),
        ("told", BrickLayout::Distributed, tells, TOLD),
    ];
    let is_full = std::env::var_os("DEFUSE_FULL").is_some();
    let volumes = &volumes[..if is_full { volumes.len() } else { 2 }];
    let setup = |(name, layout, options, _): &(&str, _, Vec<_>, _)| VolumeSetup {
        name: (*name).to_owned(),
        layout: *layout,
        options: options.clone(),
    };
    let servers = GlusterServers::with(&volumes.iter().map(setup).collect::<Vec<_>>()).unwrap();
    let failures: Vec<String> = std::thread::scope(|scope| {
        let servers = &servers;
        let start = |(volume, _, _, bounds): &(&'static str, _, _, RequestBounds)| {
            let (volume, bounds) = (*volume, *bounds);
            scope.spawn(move || compare(servers, volume, bounds))
        };
        let threads: Vec<_> = volumes.iter().map(start).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Counts for both clients, prints the table, and returns the operations beyond their bounds.
fn compare(servers: &GlusterServers, volume: &str, bounds: RequestBounds) -> Vec<String> {
    gluster(servers, &["volume", "profile", volume, "start"]);
    let place = mounted::scratch().unwrap();
    let native = || ServedMount::native(servers, (HOST, volume), place.path(), &[]).unwrap();
    let theirs = count_all(servers, volume, (&native, false));
    let source = format!("gluster://{HOST}/{volume}");
    let inside = servers.network_prefix();
    let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
    let ours = || ServedMount::mount_under(&inside, source.as_ref(), place.path(), &[]).unwrap();
    let counted = count_all(servers, volume, (&ours, true));
    let (mut table, mut failures) = (String::new(), Vec::new());
    for ((operation, bound), (native, ours)) in bounds.iter().zip(theirs.iter().zip(&counted)) {
        let [theirs, all] = [native, ours].map(compute_per_file);
        table += &format!("| {operation} | {theirs:.2} | {all:.2} | {bound} | {ours:?}\n");
        assert!(theirs > 0.0 || all > 0.0 || operation.contains("ls"), "nothing was counted");
        if all > *bound {
            failures.push(format!("{volume}: {operation}: {all:.2} of at most {bound}"));
        }
    }
    println!("{volume}: requests for a file: GlusterFS's own client, ours, at most\n{table}");
    failures
}

/// Requests by kind.
type BrickRequests = BTreeMap<String, u64>;

fn compute_per_file(counts: &BrickRequests) -> f64 {
    counts.values().sum::<u64>() as f64 / FILES as f64
}

/// Runs each operation on as many files, in a directory that another client made before, and
/// counts.
fn count_all(
    servers: &GlusterServers,
    volume: &str,
    (fresh, is_ours): (&dyn Fn() -> ServedMount, bool),
) -> Vec<BrickRequests> {
    let mut mount = fresh();
    let top = mount.path().to_owned();
    let dir = top.join("d");
    let file = |number: usize| dir.join(format!("file-{number}"));
    let each = |run: &dyn Fn(&Path)| (0..FILES).for_each(|number| run(&file(number)));
    fs::create_dir(&dir).unwrap();
    // Names of a directory that was changed lately are looked up one by one, but not by GlusterFS's
    // own client.
    let quiet = || std::thread::sleep(Duration::from_millis(if is_ours { 6500 } else { 100 }));
    let later = || std::thread::sleep(Duration::from_millis(1300));
    let ask = || gluster(servers, &["volume", "profile", volume, "info", "incremental"]);
    let mut all = Vec::new();
    let mut count = |run: &dyn Fn()| {
        ask();
        run();
        all.push(parse_counts(&ask()));
    };
    let list = || {
        let entries = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let paths: Vec<_> = entries.collect();
        assert_eq!(paths.len(), FILES);
        for path in &paths {
            fs::symlink_metadata(path).unwrap();
            // As ls(1) does, to show that a file has an access list.
            let _ = rustix::fs::lgetxattr(path, "system.posix_acl_access", &mut [0_u8; 100]);
        }
    };
    let read = |path: &Path| assert_eq!(fs::read(path).unwrap().len(), 4096);
    count(&|| each(&|path| fs::write(path, [7; 4096]).unwrap()));
    quiet();
    count(&list);
    count(&list);
    count(&|| each(&|path| assert!(fs::symlink_metadata(path).unwrap().is_file())));
    mount = mount_again(mount, fresh);
    count(&|| each(&read));
    count(&|| each(&read));
    later();
    count(&|| each(&read));
    mount = mount_again(mount, fresh);
    count(&|| {
        // tar(1) reads nothing if it writes to /dev/null itself.
        let piped = std::process::Command::new("sh")
            .args(["-c", "tar -cf - -C \"$1\" d | cat >/dev/null", "sh"])
            .arg(&top)
            .status();
        assert!(piped.unwrap().success());
    });
    later();
    count(&|| {
        each(&|path| fs::set_permissions(path, fs::Permissions::from_mode(0o640)).unwrap());
    });
    later();
    count(&|| {
        each(&|path| {
            let mut file = fs::File::create(path).unwrap();
            file.write_all(&[8; 4096]).unwrap();
        });
    });
    later();
    count(&|| each(&|path| fs::rename(path, path.with_extension("new")).unwrap()));
    later();
    count(&|| each(&|path| fs::remove_file(path.with_extension("new")).unwrap()));
    let below = |number: usize| dir.join(format!("dir-{number}"));
    (0..FILES).for_each(|number| fs::create_dir(below(number)).unwrap());
    later();
    count(&|| (0..FILES).for_each(|number| fs::remove_dir(below(number)).unwrap()));
    fs::remove_dir(&dir).unwrap();
    drop(mount);
    all
}

/// Another mount at the same place, which knows nothing.
fn mount_again(mount: ServedMount, fresh: &dyn Fn() -> ServedMount) -> ServedMount {
    drop(mount);
    fresh()
}

fn gluster(servers: &GlusterServers, arguments: &[&str]) -> String {
    let mut gluster = servers.command_within("gluster".as_ref());
    let socket = format!("--glusterd-sock={ROOM}/glusterd.socket");
    let output = gluster.args([&socket, "--mode=script"]).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// The counts in the answer of `gluster volume profile`. The kinds without a latency are no
/// requests of a client: they follow from others, or are messages of the servers (`CI_`).
fn parse_counts(said: &str) -> BrickRequests {
    let mut counts = BrickRequests::new();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Share of the time, average, minimum and maximum with units, number of calls, kind.
        if let [share, _, "ns" | "us", _, _, _, _, calls, kind] = words.as_slice()
            && share.parse::<f64>().is_ok()
            && !["FORGET", "RELEASE", "RELEASEDIR", "UPCALL"].contains(kind)
            && !kind.starts_with("CI_")
            && let Ok(calls) = calls.parse::<u64>()
        {
            *counts.entry((*kind).to_owned()).or_default() += calls;
        }
    }
    counts
}
