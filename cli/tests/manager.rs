//! `defuse manager`: several file systems in one tree, for other processes.

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use common::{TestPlace, TestTmpfs, eventually, from_output};
use rustix::mount::MountFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A place with a configuration for images, each at the path with its name.
struct ManagerPlace {
    place: TestPlace,
}

impl ManagerPlace {
    fn start_with_images(images: &[&str], options: &str) -> ManagerPlace {
        let place = TestPlace::new();
        let mut config = format!("socket = {:?}\n", place.path("socket"));
        for image in images {
            place.expect_success(&["mkfs", "uhs", image, "--size", "64M"]);
            let source = format!("uhs:{}", place.path(image).display());
            config +=
                &format!("[[device]]\npath = \"/disks/{image}\"\nsource = {source:?}\n{options}\n");
        }
        fs::write(place.path("manager.toml"), config).unwrap();
        ManagerPlace { place }
    }

    fn servers(&self) -> Vec<serde_json::Value> {
        let socket = self.place.path("socket").display().to_string();
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&self.place.expect_success(&["list", "--json"])).unwrap();
        all.into_iter().filter(|line| line["socket"] == socket.as_str()).collect()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.servers()[0]["pid"].as_u64().unwrap() as i32).unwrap()
    }

    /// Runs a shell with the tree at /x. Returns what it prints, and its exit code.
    fn shell(&self, script: &str) -> (String, Option<i32>) {
        let mount = format!("/x=shared:{}", self.place.path("socket").display());
        let said = self.place.run(&["run", "--mount", &mount, "--", "sh", "-c", script]);
        (said.out + &said.err, said.code)
    }

    /// Ends the background process.
    fn end(&self) {
        let pid = self.pid();
        kill_process(pid, Signal::TERM).unwrap();
        let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        eventually("the end of the manager", || !process.exists());
        assert!(self.servers().is_empty());
    }

    /// The manager in the foreground, when it is ready.
    fn foreground(&self) -> Child {
        let mut command = self.place.command(&["manager", "--foreground", "manager.toml"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the manager", || !self.servers().is_empty());
        child
    }
}

#[test]
fn a_manager_shows_each_image_as_a_directory_and_an_end_loses_nothing() {
    let managed = ManagerPlace::start_with_images(&["one", "two"], "options = [\"commit=0\"]");
    let place = &managed.place;
    place.expect_success(&["manager", "manager.toml"]);
    let (out, code) = managed.shell("cd /x/disks && echo 1 >one/a && echo 2 >two/a && cat */a");
    assert_eq!((out.as_str(), code), ("1\n2\n", Some(0)));
    // The images are two file systems, and the directories above them belong to neither.
    let (out, code) = managed.shell("ln /x/disks/one/a /x/disks/two/b");
    assert!(code == Some(1) && out.to_lowercase().contains("cross-device"), "{out}");
    let (out, code) = managed.shell("mkdir /x/disks/three");
    assert!(code == Some(1) && out.contains("Read-only file system"), "{out}");
    let (out, code) = managed.shell("mv /x/disks/one/a /x/disks/two/moved; ls /x /x/disks/*");
    let expected = "/x:\ndisks\n\n/x/disks/one:\n\n/x/disks/two:\na\nmoved\n";
    assert_eq!((out.as_str(), code), (expected, Some(0)));

    let [server] = &managed.servers()[..] else { panic!("{:?}", managed.servers()) };
    let source = format!("uhs:{}", place.path("two").display());
    let two = serde_json::json!({ "path": "/disks/two", "source": source });
    assert_eq!(server["devices"][1], two);
    let table = place.expect_success(&["list"]);
    assert!(table.lines().any(|line| line.contains("  /disks/two") && line.contains(&source)));

    managed.end();
    for image in ["one", "two"] {
        place.expect_success(&["fsck", image]);
    }
    // Changes without a sync are there.
    place.expect_success(&["manager", "manager.toml"]);
    assert_eq!(managed.shell("cat /x/disks/two/moved /x/disks/two/a").0, "1\n2\n");
    managed.end();
}

#[test]
fn a_manager_that_cannot_open_a_device_names_file_line_and_key_and_serves_nothing() {
    let managed = ManagerPlace::start_with_images(&["one", "two"], "");
    let place = &managed.place;
    fs::remove_file(place.path("two")).unwrap();
    let line = format!("{}:8: source: cannot open", place.path("manager.toml").display());
    place.expect_failure(1, &["manager", "manager.toml"], &line);
    assert!(managed.servers().is_empty() && !place.path("socket").exists());
    // The first image was given back.
    place.expect_success(&["fsck", "one"]);

    fs::write(place.path("manager.toml"), "socket = 's'\npaths = 1\n").unwrap();
    place.expect_failure(
        2,
        &["manager", "--check", "manager.toml"],
        "manager.toml:2: paths: unknown field",
    );
    place.expect_failure(1, &["manager", "none.toml"], "cannot read the configuration");
}

/// The threads of a process with this name, and the processors that each may use.
fn processors_of(pid: Pid, thread: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    let statuses =
        tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let name = format!("Name:\t{thread}\n");
    let of_thread = statuses.filter(|status| status.starts_with(&name));
    let mut allowed: Vec<String> = of_thread
        .map(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.unwrap().trim().to_owned()
        })
        .collect();
    allowed.sort_unstable();
    allowed
}

#[test]
fn each_device_has_one_thread_for_its_io_on_a_processor_of_its_node() {
    let managed = ManagerPlace::start_with_images(&["one", "two"], "");
    let place = &managed.place;
    // A machine with two nodes of one processor each; the disk with the images is at the second.
    let last = std::thread::available_parallelism().unwrap().get() - 1;
    let device = fs::metadata(place.path("one")).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let disk = format!("dev/block/{major}:{minor}/numa_node");
    let node = "devices/system/node";
    for (path, text) in [
        (format!("{node}/online"), "0-1".to_owned()),
        (format!("{node}/node0/cpulist"), "0".to_owned()),
        (format!("{node}/node1/cpulist"), last.to_string()),
        (disk, "1".to_owned()),
    ] {
        let path = place.path("sys").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let config = fs::read_to_string(place.path("manager.toml")).unwrap();
    let config = format!("sysfs = {:?}\n{config}", place.path("sys"));
    fs::write(place.path("manager.toml"), config).unwrap();
    place.expect_success(&["manager", "manager.toml", "--log-file", "log"]);
    assert_eq!(processors_of(managed.pid(), "defuse-io"), [last.to_string(), last.to_string()]);
    let log = fs::read_to_string(place.path("log")).unwrap();
    let shown = format!("one: one thread does its I/O, on processor {last} of node 1");
    assert!(log.contains(&shown), "{log}");
    // This machine has fewer nodes than it reports. The files are there anyway.
    let script = "cd /x/disks && seq 100000 >one/a && sync && cp one/a two/b && cmp one/a two/b && echo same";
    assert_eq!(managed.shell(script), ("same\n".to_owned(), Some(0)));
    managed.end();
    place.expect_success(&["fsck", "two"]);
}

/// The figures of the file systems of a manager were nowhere to be seen.
#[test]
fn a_manager_tells_of_each_device_by_its_path() {
    let managed = ManagerPlace::start_with_images(&["one"], "");
    let place = &managed.place;
    let config = fs::read_to_string(place.path("manager.toml")).unwrap();
    let memory = "[[device]]\npath = \"/scratch\"\nsource = \"memory:\"\n";
    fs::write(place.path("manager.toml"), config + memory).unwrap();
    place.expect_success(&["manager", "manager.toml"]);
    let requested = || -> Value {
        serde_json::from_str(&place.expect_success(&["stat", "socket", "--json"])).unwrap()
    };
    let figure = |answer: &Value, device: usize, name: &str| -> u64 {
        let figures = answer["devices"][device]["figures"].as_array().unwrap();
        let found = figures.iter().find(|figure| figure["name"] == name);
        found.unwrap_or_else(|| panic!("{name}: {answer}"))["value"].as_u64().unwrap()
    };
    let before = requested();
    let paths = [0, 1].map(|device| before["devices"][device]["path"].as_str().unwrap().to_owned());
    assert_eq!(paths, ["/disks/one", "/scratch"]);
    assert_eq!(before["devices"][1]["source"], "memory:");
    let script = "seq 9999 >/x/disks/one/a && sync && echo hello >/x/scratch/b";
    let (out, code) = managed.shell(script);
    assert_eq!(code, Some(0), "{out}");
    let after = requested();
    assert!(figure(&after, 0, "device_writes") > figure(&before, 0, "device_writes"));
    assert_eq!((figure(&before, 1, "inodes"), figure(&after, 1, "inodes")), (1, 2));
    assert_eq!([0, 1].map(|device| figure(&after, device, "pages_files")), [0, 0]);
    // The limit applies to all devices together.
    let figures = after["figures"].as_array().unwrap();
    let names: Vec<_> = figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["versions_changes", "pages_limit"]);

    let text = place.expect_success(&["stat"]);
    let source = format!("/disks/one  uhs:{}", place.path("one").display());
    let at = |wanted: &str| text.lines().position(|line| line == wanted);
    assert!(at(&source) < at("/scratch  memory:") && at(&source).is_some(), "{text}");
    let metrics = place.expect_success(&["stat", "--prometheus"]);
    let socket = place.path("socket").display().to_string();
    for (name, device) in [
        ("groups_total", "/disks/one"),
        ("inodes", "/disks/one"),
        ("inodes", "/scratch"),
        ("space_used_bytes", "/scratch"),
    ] {
        let begin = format!("defuse_fs_{name}{{socket=\"{socket}\",device=\"{device}\"}} ");
        assert_eq!(metrics.lines().filter(|line| line.starts_with(&begin)).count(), 1, "{begin}");
    }
    assert_eq!(metrics.lines().filter(|line| *line == "# TYPE defuse_fs_inodes gauge").count(), 1);
    // Every line is a comment, or a name with labels and a number.
    for line in metrics.lines().filter(|line| !line.starts_with("# ")) {
        let (name, rest) = line.split_once('{').unwrap();
        let value = rest.rsplit_once("} ").unwrap().1;
        assert!(name.starts_with("defuse_") && value.parse::<f64>().is_ok(), "{line}");
    }
    managed.end();
    assert_eq!(fs::read_dir(place.path("run")).unwrap().count(), 0);
}

#[test]
fn cached_pages_count_for_the_device_of_their_file() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = ManagerPlace::start_with_images(&["one", "two"], "");
    let place = &managed.place;
    place.expect_success(&["manager", "manager.toml"]);
    let source = format!("shared:{}", place.path("socket").display());
    place.expect_success(&["mount", &source, "mnt"]);
    let file = place.path("mnt/disks/two/file");
    fs::write(&file, vec![7; 64 * 4096]).unwrap();
    // Past the kernel's cache, and often enough that the client requests the pages of the file.
    let open = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&file).unwrap();
    let read_all = || {
        let mut room = [0; 4096];
        (0..64).for_each(|page| open.read_exact_at(&mut room, page * 4096).unwrap());
    };
    read_all();
    let answer: Value =
        serde_json::from_str(&place.expect_success(&["stat", "socket", "--json"])).unwrap();
    let filled = |device: usize| {
        let figures = answer["devices"][device]["figures"].as_array().unwrap();
        let figure = |name: &str| figures.iter().find(|figure| figure["name"] == name).unwrap();
        ["pages_filled", "pages_requests"].map(|name| figure(name)["value"].as_u64().unwrap())
    };
    let [bytes, requests] = filled(1);
    // The first reads made the client request pages, and the data that it read then was not there
    // before.
    assert!((32 * 4096..=64 * 4096).contains(&bytes) && (32..=64).contains(&requests), "{answer}");
    assert_eq!(filled(0), [0, 0]);
    // Reads from pages make no request: the client alone knows of them.
    read_all();
    let own: Value =
        serde_json::from_str(&place.expect_success(&["stat", "mnt", "--json"])).unwrap();
    let figures = own["figures"].as_array().unwrap();
    let reads = figures.iter().find(|figure| figure["name"] == "page_reads").unwrap();
    assert!(reads["value"].as_u64() >= Some(32), "{own}");
    drop(open);
    place.expect_success(&["umount", "mnt"]);
    managed.end();
}

/// All clients waited for the lock of a process that was stopped, until it was killed.
#[test]
fn a_stopped_process_loses_the_lock_for_which_others_wait_and_its_next_call_fails_once() {
    let managed = ManagerPlace::start_with_images(&["one"], "");
    let place = &managed.place;
    let config = fs::read_to_string(place.path("manager.toml")).unwrap();
    fs::write(place.path("manager.toml"), format!("dead-after = 1\n{config}")).unwrap();
    place.expect_success(&["manager", "manager.toml", "--log-file", "log"]);
    let mount = format!("/x=shared:{}", place.path("socket").display());
    // The lock is taken by a program that has ended, and held by the shell, which writes by itself.
    let script = "cd /x/disks/one; exec 9>held; flock 9; echo $$ >pid; kill -STOP $$; \
                  echo a >&9 && echo fine || echo failed; echo b >&9 && echo fine";
    let mut holder = place.command(&["run", "--mount", &mount, "--", "bash", "-c", script]);
    let holder = holder.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("a stopped holder", || {
        let (pid, _) = managed.shell("cat /x/disks/one/pid 2>/dev/null");
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        stat.contains(") T ")
    });
    let pid: i32 = managed.shell("cat /x/disks/one/pid").0.trim().parse().unwrap();
    let (out, code) = managed.shell("flock /x/disks/one/held echo mine");
    assert_eq!((out.as_str(), code), ("mine\n", Some(0)));
    let shown: Value = serde_json::from_str(&place.expect_success(&["stat", "--json"])).unwrap();
    assert_eq!(shown["gauges"]["locks_lost"], 1, "{shown}");
    let lost = |client: &&Value| client["locks_lost"] == 1 && client["locks"] == 0;
    assert!(shown["clients"].as_array().unwrap().iter().any(|client| lost(&client)), "{shown}");
    let log = fs::read_to_string(place.path("log")).unwrap();
    let shown = format!("process {pid} (bash)");
    let line = log.lines().find(|line| line.contains(&shown)).unwrap_or_else(|| panic!("{log}"));
    assert!(line.contains("lost its lock on /disks/one/held"), "{line}");
    kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
    let said = from_output(holder.wait_with_output().unwrap());
    assert_eq!(said.out, "failed\nfine\n", "{}", said.err);
    managed.end();
}

/// The end of a manager that lost changes looked like any other, if its exit code were 0.
#[test]
fn a_manager_that_cannot_make_all_changes_durable_fails_and_names_the_image() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root may mount a small tmpfs");
        return;
    }
    let managed = ManagerPlace::start_with_images(&["good"], "");
    let place = &managed.place;
    let small = TestTmpfs::mount_on(place.path("small"), MountFlags::empty(), c"size=24M");
    let image: PathBuf = small.path().join("image");
    let text = image.to_str().unwrap();
    place.expect_success(&["mkfs", "uhs", text, "--size", "64M", "--sparse"]);
    let device = format!(
        "[[device]]\npath = \"/full\"\nsource = \"uhs:{text}\"\noptions = [\"commit=0\"]\n"
    );
    let config = fs::read_to_string(place.path("manager.toml")).unwrap() + &device;
    fs::write(place.path("manager.toml"), config).unwrap();
    let child = managed.foreground();
    // There is room in the image, and none below it.
    let (out, code) =
        managed.shell("echo kept >/x/disks/good/a && head -c 30000000 /dev/zero >/x/full/lost");
    assert_eq!(code, Some(0), "{out}");
    let fill = fs::write(small.path().join("fill"), vec![1; 24 << 20]);
    assert!(fill.is_err(), "the tmpfs is larger than it should be");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let said = from_output(child.wait_with_output().unwrap());
    assert_eq!(said.code, Some(1), "{}", said.err);
    let last = said.err.lines().last().unwrap_or_default();
    assert!(last.contains(text) && last.contains("could be made durable"), "{last}");
    // The other image is complete.
    place.expect_success(&["fsck", "good"]);
}
