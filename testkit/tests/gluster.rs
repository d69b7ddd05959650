//! A GlusterFS volume through the kernel mount and the in-process client: the POSIX cases,
//! programs, two clients at once, and crashes. One set of servers serves all parts, which run one
//! after another.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::{
    Caller, Completion, Context, Errno, File, FileKind, FileSystem, Ino, Io, IoOp, Name, NewNode,
    NoNotify, OpenArgs, OpenFlags, Origin, ReadSink, ReleaseArgs, RenameFlags, SetAttr,
    SliceSource, WriteArgs, WriteBuf, WriteSource,
};
use defuse_testkit::gluster::{GlusterServers, HOST, ROOM, unavailable_reason};
use defuse_testkit::mounted::{self, ServedMount, program};
use defuse_testkit::posix;
use defuse_testkit::suites::{self, ConformanceSuite, exclusions, exercise};

/// The only test with servers, because the POSIX cases must be alone in their process.
#[test]
fn a_volume_keeps_the_promises_of_a_file_system() {
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    let others = mounted::scratch().unwrap();
    let others = ServedMount::new("memory:".as_ref(), others.path(), &[]).unwrap();
    let servers = time_run("start", || GlusterServers::start().unwrap());
    servers_keep_no_mount_of_others(&servers, &others);
    for volume in ["dist", "repl"] {
        let place = mounted::scratch().unwrap();
        let mount = mount(&servers, volume, place.path());
        time_run(&format!("posix cases on {volume}"), || posix_cases(mount.path(), volume));
        match volume {
            "dist" => {
                time_run("git", || git_keeps_a_repository(mount.path()));
                time_run("appends", || appends_follow_the_writes_before_them(mount.path()));
            }
            _ => time_run("sqlite3", || sqlite_commits(mount.path())),
        }
        time_run("exercisers", || random_operations_match_their_model(mount.path(), volume));
        time_run("last write", || the_last_write_survives_an_unmount(mount));
        let mount = self::mount(&servers, volume, place.path());
        the_last_write_is_there(mount.path());
        time_run("kill", || {
            a_killed_daemon_frees_its_locks_and_keeps_synced_data(&servers, mount, volume)
        });
    }
    time_run("unmount", || an_unmount_takes_a_fraction_of_the_end_of_libgfapi(&servers));
    time_run("two clients", || two_clients_see_each_other(&servers));
    time_run("set-user-id", || a_write_for_another_user_drops_set_user_id(&servers));
    time_run("parts", || the_part_of_a_file_follows_from_its_name(&servers));
    time_run("refused", || a_change_of_names_that_a_kernel_refuses_leaves_them_alone(&servers));
    time_run("close", || a_file_that_is_closed_answers_its_writes_in_flight(&servers));
    time_run("kept answers", || changes_are_seen_although_answers_are_kept(&servers));
    time_run("listings", || a_listing_brings_answers_that_are_kept(&servers));
    time_run("several frontends", || answers_are_kept_for_several_frontends(&servers));
    time_run("run", || a_program_of_a_run_sees_what_its_children_change(&servers));
    time_run("volume file", || a_volume_file_is_mounted_unless_others_may_write_it(&servers));
    time_run("messages", || messages_have_a_place_whatever_the_standard_error_is(&servers));
    time_run("computed", || a_file_tells_its_bricks_and_its_identity(&servers));
    time_run("errors", || errors_say_what_to_do(&servers));
}

/// The suites of others, with servers of their own, are run with `DEFUSE_FULL=1`, also by
/// GlusterFS's own client. The suites without a mount need a program that starts itself again, and
/// have the step `gluster-run` of xtask.
#[test]
fn suites_of_others_fail_on_volumes_only_for_known_reasons() {
    if std::env::var_os("DEFUSE_FULL").is_none() {
        return;
    }
    if let Some(reason) = mounted::unavailable_reason().or_else(unavailable_reason) {
        println!("skipped: {reason}");
        return;
    }
    // The other test has the POSIX cases on our mounts.
    let is_apart =
        |suite, name: &str| suite == ConformanceSuite::Posix && !name.starts_with("native-");
    for (_, suite) in ConformanceSuite::ALL {
        if let Err(error) = suite.install() {
            println!("skipped: {}: {error:#}", suite.name());
            continue;
        }
        let mounts = suites::VOLUMES.iter().filter(|it| !it.name.starts_with("run-"));
        let mounts = mounts.filter(|it| suite.runs_on(it) && !is_apart(suite, it.name));
        let mounts: Vec<_> = mounts.collect();
        for row in suites::run(suite, &mounts, true, &mut |row| println!("{row}")).unwrap() {
            assert!(row.unexpected.is_empty(), "{row}\n{:#?}", row.unexpected);
            assert!(
                row.list_outdated().is_empty(),
                "{row}\nthese pass: {:#?}",
                row.list_outdated()
            );
        }
    }
}

fn time_run<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = run();
    println!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
    result
}

/// A test that ended a mount waited for the end of the servers of another one.
fn servers_keep_no_mount_of_others(servers: &GlusterServers, mount: &ServedMount) {
    let mounts =
        servers.command_within("cat".as_ref()).arg("/proc/self/mountinfo").output().unwrap();
    let place = mount.path().to_str().unwrap();
    let has_it = |mounts: &str| mounts.lines().any(|line| line.contains(place));
    assert!(has_it(&fs::read_to_string("/proc/self/mountinfo").unwrap()));
    assert!(mounts.status.success() && !has_it(&String::from_utf8_lossy(&mounts.stdout)));
}

fn mount(servers: &GlusterServers, volume: &str, place: &Path) -> ServedMount {
    let inside = servers.network_prefix();
    let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
    let source = format!("gluster://{HOST}/{volume}");
    ServedMount::mount_under(&inside, source.as_ref(), place, &[]).unwrap()
}

/// Cases with many names, which take half of the time and differ little between the kinds of
/// volumes.
const MANY_NAMES: [&str; 5] = [
    "dirs::many_entries_are_each_listed_once",
    "dirs::lasting_names_are_listed_once_while_others_come_and_go",
    "dirs::removing_while_listing_empties_the_directory",
    "names::many_files_come_and_go",
    "names::a_tree_of_depth_can_be_made_and_walked",
];

fn posix_cases(dir: &Path, volume: &str) {
    let is_full = std::env::var_os("DEFUSE_FULL").is_some();
    let config = format!("gluster-{volume}");
    let left_out =
        |case: &str| match exclusions::hang_reason(ConformanceSuite::Posix, &config, case) {
            Some(reason) => Some(reason),
            None if is_full || volume == "dist" || !MANY_NAMES.contains(&case) => None,
            None => Some("it runs on the distributed volume"),
        };
    let report = posix::run_except(dir, "", &left_out);
    let failed = report.failed_cases();
    let is_new =
        |case: &&&str| exclusions::reason(ConformanceSuite::Posix, &config, case).is_none();
    let unexpected: Vec<_> = failed.iter().filter(is_new).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}\n{report}");
    let outdated = exclusions::list_outdated(ConformanceSuite::Posix, &config, &failed);
    assert!(outdated.is_empty(), "these pass: {outdated:?}");
    let (passed, _, skipped) = report.counts();
    assert!(passed >= 170, "only {passed} passed and {skipped} skipped");
}

/// `conformance --configs 'gluster-*'` makes longer sequences.
fn random_operations_match_their_model(dir: &Path, volume: &str) {
    let place = dir.join("exercise");
    fs::create_dir(&place).unwrap();
    let (what, count) = if volume == "dist" { ("tree", "300") } else { ("file", "600") };
    let words = [what, "1", count, place.to_str().unwrap()].map(str::to_owned);
    exercise::run_inside(&words).unwrap();
    fs::remove_dir_all(&place).unwrap();
}

fn shell(dir: &Path, script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir).output().unwrap();
    let (said, errors) = (&output.stdout, &output.stderr);
    let text = String::from_utf8_lossy(said).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(errors));
    text
}

fn git_keeps_a_repository(dir: &Path) {
    let script = "export HOME=$PWD; git init -q r; cd r
        git config user.email a@b; git config user.name a
        for i in 1 2 3 4 5 6 7 8; do mkdir d$i; echo $i >d$i/f; done
        git add .; git commit -qm one; echo x >>d1/f; git rm -q d2/f; git commit -qam two
        git gc -q; git fsck --strict; git checkout -q HEAD~1; cat d1/f d2/f; git status --porcelain";
    assert_eq!(shell(dir, script), "1\n2\n");
}

/// GlusterFS's client acknowledges writes early, and sends an append without waiting for them: a
/// few of a hundred appends were at a wrong place.
fn appends_follow_the_writes_before_them(dir: &Path) {
    for number in 0..300 {
        let path = dir.join(format!("append-{number}"));
        let file = fs::File::create_new(&path).unwrap();
        let mut end = fs::File::options().append(true).open(&path).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        end.write_all(b" one").unwrap();
        file.write_all_at(b" two", 9).unwrap();
        end.write_all(b" three").unwrap();
        let text = String::from_utf8(fs::read(&path).unwrap()).unwrap();
        assert_eq!(text, "start one two three", "after {number} files");
    }
}

fn sqlite_commits(dir: &Path) {
    let script = "sqlite3 db 'create table t(a); insert into t select value from generate_series(1, 1000);'
        sqlite3 db 'begin; delete from t where a > 500; commit; pragma integrity_check; select count(*) from t'";
    assert_eq!(shell(dir, script), "ok\n500\n");
}

fn the_last_write_survives_an_unmount(mount: ServedMount) {
    let bytes = vec![7; 16 << 20];
    fs::write(mount.path().join("last"), &bytes).unwrap();
    mount.end().unwrap();
}

/// The promise is a second after the last write. Other work shares the machine, so that the measure
/// is libgfapi's own end, which runs meanwhile in this process and takes nine seconds: a daemon
/// that waited for it would take as long.
fn an_unmount_takes_a_fraction_of_the_end_of_libgfapi(servers: &GlusterServers) {
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions { in_application: true, ..Default::default() };
    let fs = defuse_gluster::Gluster::connect(&format!("//{HOST}/dist"), &options).unwrap();
    let is_ending = || {
        let threads = fs::read_dir("/proc/self/task").unwrap();
        let mut names =
            threads.filter_map(|it| fs::read_to_string(it.unwrap().path().join("comm")).ok());
        names.any(|name| name.trim_end() == "gluster-end")
    };
    assert!(!is_ending(), "another volume ends");
    let own = Instant::now();
    drop(fs);
    let unmount = |_| {
        let place = mounted::scratch().unwrap();
        let mount = mount(servers, "dist", place.path());
        fs::write(mount.path().join("last"), vec![7; 1 << 20]).unwrap();
        let begun = Instant::now();
        mount.end().unwrap();
        begun.elapsed()
    };
    let all = [0, 1, 2].map(unmount);
    let shortest = all.iter().min().unwrap();
    wait_until("the own end of libgfapi", || !is_ending());
    let own = own.elapsed();
    println!("unmounts after a write: {all:?}; the own end of libgfapi: {own:?}");
    assert!(*shortest < own / 9, "unmounts take {all:?}, the own end of libgfapi {own:?}");
}

fn the_last_write_is_there(dir: &Path) {
    let read = fs::read(dir.join("last")).unwrap();
    assert!(read.len() == 16 << 20 && read.iter().all(|&byte| byte == 7));
}

fn a_killed_daemon_frees_its_locks_and_keeps_synced_data(
    servers: &GlusterServers,
    mut first: ServedMount,
    volume: &str,
) {
    let file = fs::File::create(first.path().join("locked")).unwrap();
    file.write_all_at(b"synced", 0).unwrap();
    file.sync_all().unwrap();
    let record = |file: &fs::File| {
        let how = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::fcntl_lock(file, how)
    };
    record(&file).unwrap();
    let place = mounted::scratch().unwrap();
    let second = mount(servers, volume, place.path());
    let path = second.path().join("locked");
    let again = fs::File::options().read(true).write(true).open(&path).unwrap();
    assert!(record(&again).is_err(), "another client has the lock");
    first.kill().unwrap();
    let begun = Instant::now();
    while record(&again).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the lock of a dead client");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(fs::read(&path).unwrap(), b"synced");
    drop(again);
    fs::remove_file(&path).unwrap();
    second.end().unwrap();
}

/// The in-process client and a kernel mount of the same volume.
fn two_clients_see_each_other(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let mount = mount(servers, "repl", place.path());
    servers.enter().unwrap();
    let source = format!("//{HOST},{HOST}/repl");
    let valid = Duration::ZERO;
    let fs = defuse_gluster::Gluster::connect(
        &source,
        &defuse_gluster::GlusterOptions {
            valid_for: valid,
            in_application: true,
            ..Default::default()
        },
    );
    let client = Arc::new(DirectClient::new(defuse_direct::ClientOptions::default()));
    client.mount(b"g:", Arc::new(fs.unwrap()), &ClientMountArgs::default()).unwrap();
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));

    let flags = (libc::O_RDWR | libc::O_CREAT) as u32;
    let how = OpenHow { flags, mode: 0o600, ..OpenHow::default() };
    let file = client.open(&task, WalkStart::Cwd, b"g:/shared", how).unwrap();
    // Close-to-open consistency: the other client opens after the write, also of a small file.
    for round in 0..40_u8 {
        let len = if round < 20 { 40 } else { 70_000 };
        assert_eq!(client.pwrite(&task, &file, &vec![round; len], 0).unwrap(), len);
        client.fsync(&task, &file, false).unwrap();
        let seen = fs::File::open(mount.path().join("shared")).unwrap();
        let mut read = [0; 4];
        seen.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, [round; 4]);
    }
    file.close(&task).unwrap();
    drop(file);
    fs::rename(mount.path().join("shared"), mount.path().join("moved")).unwrap();
    let plain = OpenHow { flags: 0, ..OpenHow::default() };
    assert!(client.open(&task, WalkStart::Cwd, b"g:/shared", plain).is_err());
    let file = client.open(&task, WalkStart::Cwd, b"g:/moved", plain).unwrap();
    fs::remove_file(mount.path().join("moved")).unwrap();
    let mut read = [0; 4];
    assert_eq!(client.pread(&task, &file, &mut read, 100).unwrap(), 4);
    file.close(&task).unwrap();
    drop(file);
    client.unmount(b"g:", false).unwrap();
    mount.end().unwrap();
}

/// A write by another user left set-user-id, except on a kernel mount, where the kernel requests
/// the new mode first.
fn a_write_for_another_user_drops_set_user_id(servers: &GlusterServers) {
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions { in_application: true, ..Default::default() };
    let fs = defuse_gluster::Gluster::connect(&format!("//{HOST}/dist"), &options).unwrap();
    let [root, other] = [0, 4321].map(|id| Context::new(Caller { uid: id, gid: id, pid: 0 }));
    let node = NewNode::new(FileKind::Regular, 0o777, root.caller);
    let name = Name::new(b"set-user-id").unwrap();
    let flags = OpenFlags(OpenFlags::RDWR);
    let args = OpenArgs { flags, kill_suidgid: false };
    let (entry, opened) = fs.create(&root, Ino::ROOT, name, &node, args).unwrap();
    let own = File { ino: entry.ino, fh: opened.fh };
    let ino = entry.ino;
    let file = File { ino, fh: fs.open(&other, ino, args).unwrap().fh };
    let write = |cx: &Context<'_>, file, kill_suidgid| {
        let args = WriteArgs { flags, kill_suidgid, ..WriteArgs::default() };
        fs.write(cx, file, args, &mut WriteBuf::new(&mut SliceSource::new(b"x"))).unwrap();
    };
    let submit = |_: &Context<'_>, file, kill_suidgid| {
        let (send, answer) = std::sync::mpsc::channel();
        let args = WriteArgs { flags, kill_suidgid, ..WriteArgs::default() };
        let done = Box::new(ByteWrite { source: SliceSource::new(b"x"), send });
        let op = IoOp::Write { file, args, len: 1 };
        fs.submit(Io::new(op, other.caller, 1, Arc::default(), done));
        answer.recv().unwrap().unwrap();
    };
    for way in [&write as &WriteMethod<'_>, &submit] {
        // The second time, the file was seen without the bits before.
        for _ in 0..2 {
            let set = SetAttr { perm: Some(0o6777), ..SetAttr::default() };
            assert_eq!(fs.setattr(&root, ino, None, &set).unwrap().perm, 0o6777);
            write(&root, own, false);
            assert_eq!(fs.getattr(&root, ino, None).unwrap().perm, 0o6777, "root's write");
            way(&other, file, true);
            assert_eq!(fs.getattr(&root, ino, None).unwrap().perm, 0o777);
            way(&other, file, true);
        }
    }
    for file in [own, file] {
        fs.release(&root, file, ReleaseArgs::default()).unwrap();
    }
    fs.unlink(&root, Ino::ROOT, name).unwrap();
}

/// The names in a directory of a brick.
fn list_brick(servers: &GlusterServers, brick: &str, dir: &str) -> HashSet<Vec<u8>> {
    let mut list = servers.command_within("ls".as_ref());
    let listed = list.arg("-A").arg(format!("{ROOM}/bricks/{brick}/{dir}")).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    listed.stdout.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect()
}

/// Requests about files of a lost brick hold only a part of the threads of a mount. The brick
/// follows from name and directory, without a request for the file, and stays the same when the
/// file gets another name.
fn the_part_of_a_file_follows_from_its_name(servers: &GlusterServers) {
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions { in_application: true, ..Default::default() };
    let fs = defuse_gluster::Gluster::connect(&format!("//{HOST}/dist"), &options).unwrap();
    fs.attach(Origin::new(), Arc::new(NoNotify));
    let root = Context::new(Caller { uid: 0, gid: 0, pid: 0 });
    let dir = Name::new(b"parts").unwrap();
    let node = NewNode::new(FileKind::Directory, 0o777, root.caller);
    let dir = fs.mkdir(&root, Ino::ROOT, dir, &node).unwrap().ino;
    let mut random = fastrand::Rng::with_seed(12);
    let kinds = ["n", "\u{e9}", "\u{4e2d}", "."];
    let name = |number: usize| {
        let mut name = format!("{number}");
        let most = if number.is_multiple_of(8) { 250 } else { 36 };
        let len = random.usize(1..most);
        while name.len() + 3 <= len {
            name.push_str(kinds[random.usize(..kinds.len())]);
        }
        let temporary = [format!(".{name}.Xy12"), format!(".{name}"), format!(".{name}.")];
        temporary.into_iter().nth(number % 6).unwrap_or(name)
    };
    let names: Vec<String> = (0..240).map(name).collect();
    let node = NewNode::new(FileKind::Regular, 0o666, root.caller);
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
    let create = |name: &String| {
        let name = Name::new(name.as_bytes()).unwrap();
        let (entry, opened) = fs.create(&root, dir, name, &node, args).unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        fs.release(&root, file, ReleaseArgs::default()).unwrap();
        entry.ino
    };
    let files: Vec<Ino> = names.iter().map(create).collect();
    let of_name = |name: &str| fs.failure_domain(dir, Name::new(name.as_bytes()).ok());
    let of_dir = fs.failure_domain(dir, None);
    wait_until("the parts are known", || of_name("a") != of_dir);

    let bricks = ["dist1", "dist2"].map(|brick| list_brick(servers, brick, "parts"));
    let place = |name: &str| bricks.iter().position(|brick| brick.contains(name.as_bytes()));
    let mut parts = [None; 2];
    for (name, &ino) in names.iter().zip(&files) {
        let brick = place(name).unwrap();
        let (by_name, by_file) = (of_name(name), fs.failure_domain(ino, None));
        assert_eq!((by_name, by_file), (by_name.or(of_dir), by_name), "{name}");
        assert_eq!(*parts[brick].get_or_insert(by_name), by_name, "{name} in brick {brick}");
    }
    assert!(parts[0].is_some() && parts[1].is_some() && parts[0] != parts[1], "{parts:?}");

    let mut moved = 0;
    for (number, (name, &ino)) in names.iter().zip(&files).take(24).enumerate() {
        let before = fs.failure_domain(ino, None);
        let other = format!("other {number}");
        let [old, new] = [name, &other].map(|name| Name::new(name.as_bytes()).unwrap());
        fs.rename(&root, (dir, old), (dir, new), RenameFlags::default()).unwrap();
        assert_eq!(fs.lookup(&root, dir, new).unwrap().ino, ino);
        assert_eq!(fs.failure_domain(ino, None), before, "{name} is {other} now");
        moved += usize::from(of_name(&other) != before);
    }
    assert!(moved > 4, "names of another part: {moved}");
}

/// Programs of a run lose races that a kernel decides before it sends a request. Renamings of
/// directories to files, and between names of one inode, then left names that were another thing on
/// each brick, and failed with `EIO` and `ESTALE` from that time on.
fn a_change_of_names_that_a_kernel_refuses_leaves_them_alone(servers: &GlusterServers) {
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions { in_application: true, ..Default::default() };
    let fs = defuse_gluster::Gluster::connect(&format!("//{HOST}/dist"), &options).unwrap();
    let root = Context::new(Caller::default());
    // Some are on each brick.
    for number in 0..8 {
        let names = ["dir", "file", "link", "late"].map(|kind| format!("{kind}-{number}"));
        let [dir, file, link, late] =
            names.each_ref().map(|name| Name::new(name.as_bytes()).unwrap());
        let look = |name| fs.lookup(&root, Ino::ROOT, name);
        let new = |kind| NewNode::new(kind, 0o755, root.caller);
        let rename = |from, to| {
            let flags = defuse_fs::RenameFlags::default();
            fs.rename(&root, (Ino::ROOT, from), (Ino::ROOT, to), flags)
        };
        fs.mkdir(&root, Ino::ROOT, dir, &new(FileKind::Directory)).unwrap();
        let ino = fs.mknod(&root, Ino::ROOT, file, &new(FileKind::Regular)).unwrap().ino;

        assert_eq!(rename(dir, file), Err(Errno::ENOTDIR), "{number}");
        assert_eq!(rename(file, dir), Err(Errno::EISDIR), "{number}");
        assert_eq!(look(dir).unwrap().attr.kind, FileKind::Directory, "{number}");
        assert_eq!(look(file).unwrap().attr.kind, FileKind::Regular, "{number}");

        fs.link(&root, ino, Ino::ROOT, link).unwrap();
        assert_eq!(rename(file, link), Ok(()), "{number}");
        assert_eq!([file, link].map(|name| look(name).unwrap().attr.nlink), [2, 2], "{number}");

        [file, link].into_iter().for_each(|name| fs.unlink(&root, Ino::ROOT, name).unwrap());
        let linked = fs.link(&root, ino, Ino::ROOT, late).map(drop);
        assert_eq!(linked, Err(Errno::ESTALE), "{number}");
        fs.mknod(&root, Ino::ROOT, late, &new(FileKind::Regular)).unwrap();
        fs.unlink(&root, Ino::ROOT, late).unwrap();
        fs.rmdir(&root, Ino::ROOT, dir).unwrap();
    }
}

/// libgfapi does not call back if a file is closed while an operation is in flight.
fn a_file_that_is_closed_answers_its_writes_in_flight(servers: &GlusterServers) {
    const WRITES: usize = 64;
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions { in_application: true, ..Default::default() };
    let fs = defuse_gluster::Gluster::connect(&format!("//{HOST}/dist"), &options).unwrap();
    let root = Context::new(Caller { uid: 0, gid: 0, pid: 0 });
    let node = NewNode::new(FileKind::Regular, 0o600, root.caller);
    let name = Name::new(b"closed").unwrap();
    let flags = OpenFlags(OpenFlags::RDWR);
    for _ in 0..20 {
        let args = OpenArgs { flags, kill_suidgid: false };
        let (entry, opened) = fs.create(&root, Ino::ROOT, name, &node, args).unwrap();
        let file = File { ino: entry.ino, fh: opened.fh };
        let (send, answers) = std::sync::mpsc::channel();
        for offset in 0..WRITES as u64 {
            let args = WriteArgs { flags, offset, ..WriteArgs::default() };
            let send = send.clone();
            let done = Box::new(ByteWrite { source: SliceSource::new(b"x"), send });
            let op = IoOp::Write { file, args, len: 1 };
            fs.submit(Io::new(op, root.caller, 1, Arc::default(), done));
        }
        fs.release(&root, file, ReleaseArgs::default()).unwrap();
        for _ in 0..WRITES {
            let answer = answers.recv_timeout(Duration::from_secs(60));
            assert_eq!(answer.expect("an answer"), Ok(1));
        }
        assert_eq!(fs.getattr(&root, entry.ino, None).unwrap().size, WRITES as u64);
        fs.unlink(&root, Ino::ROOT, name).unwrap();
    }
}

/// A function that writes to an open file for a caller, with or without a request to drop
/// set-user-id.
type WriteMethod<'a> = dyn Fn(&Context<'_>, File, bool) + 'a;

/// One byte to write, and the receiver of the result.
struct ByteWrite {
    source: SliceSource<'static>,
    send: std::sync::mpsc::Sender<defuse_fs::Result<usize>>,
}

impl Completion for ByteWrite {
    fn sink(&mut self) -> &mut dyn ReadSink {
        unreachable!("nothing is read")
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        &mut self.source
    }
    fn finish(self: Box<Self>, result: defuse_fs::Result<usize>) {
        self.send.send(result).unwrap();
    }
}

/// The servers of the replicated volume notify of changes, so that answers are kept for minutes.
fn changes_are_seen_although_answers_are_kept(servers: &GlusterServers) {
    let places = [mounted::scratch().unwrap(), mounted::scratch().unwrap()];
    let [here, there] = places.each_ref().map(|place| mount(servers, "repl", place.path()));
    let [from, to] = [&here, &there].map(|mount| mount.path().join("kept"));
    fs::create_dir(&from).unwrap();
    wait_until("names and attributes are kept", || names_and_attributes_are_kept(&here, &from));

    // Each change in a directory of its own, because a directory that another client has changed is
    // watched more closely.
    let new = |dir: &str| {
        let (from, to) = (from.join(dir), to.join(dir));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("f"), "old").unwrap();
        assert_eq!(fs::metadata(from.join("f")).unwrap().len(), 3);
        (from.join("f"), to.join("f"))
    };
    let (known, other) = new("data");
    let open = fs::File::open(&known).unwrap();
    assert_eq!(read(&open), "old");
    fs::write(&other, "longer").unwrap();
    wait_until("data of an open file", || read(&open) == "longer");
    wait_until("the size", || fs::metadata(&known).unwrap().len() == 6);
    drop(open);

    let (known, other) = new("mode");
    let mode = |mode| fs::Permissions::from_mode(mode);
    fs::set_permissions(&other, mode(0o640)).unwrap();
    wait_until("the mode", || fs::metadata(&known).unwrap().permissions().mode() & 0o777 == 0o640);

    let (known, other) = new("removed");
    fs::remove_file(&other).unwrap();
    wait_until("a removal", || !known.exists());

    let (known, other) = new("moved");
    fs::rename(&other, other.with_extension("new")).unwrap();
    wait_until("a new name", || !known.exists() && known.with_extension("new").exists());

    let (known, other) = new("replaced");
    fs::write(other.with_extension("new"), "replacement").unwrap();
    fs::rename(other.with_extension("new"), &other).unwrap();
    wait_until("a replacement", || fs::metadata(&known).unwrap().len() == 11);

    // The server notifies of the file, not of the directory with its first name.
    let (known, _) = new("linked");
    fs::create_dir(from.join("second")).unwrap();
    fs::hard_link(&known, from.join("second/name")).unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    fs::metadata(known.parent().unwrap()).unwrap();
    let before = requests(&here, &["LOOKUP"]);
    fs::metadata(&known).unwrap();
    assert!(requests(&here, &["LOOKUP"]) > before, "the first of two names is still kept");

    // No server reports this change, because the replaced file lives on, and its successor is not
    // known here.
    let (known, other) = new("replaced-while-open");
    let open = fs::File::open(&known).unwrap();
    let elsewhere = to.join("elsewhere");
    fs::write(&elsewhere, "replacement").unwrap();
    fs::rename(&elsewhere, &other).unwrap();
    wait_until("a replacement of an open file", || fs::metadata(&known).unwrap().len() == 11);
    assert_eq!(read(&open), "old");
    drop(open);

    fs::remove_dir_all(&from).unwrap();
    wait_until("the removal of all", || !to.exists());
    here.end().unwrap();
    there.end().unwrap();
}

/// Looks at files again when answers that are kept for a second are old, and counts requests.
fn names_and_attributes_are_kept(mount: &ServedMount, dir: &Path) -> bool {
    let dir = tempfile::tempdir_in(dir).unwrap();
    let look = || {
        for number in 0..40 {
            fs::metadata(dir.path().join(number.to_string())).unwrap();
        }
        (requests(mount, &["LOOKUP"]), requests(mount, &["GETATTR", "STATX"]))
    };
    for number in 0..40 {
        fs::write(dir.path().join(number.to_string()), "x").unwrap();
    }
    look();
    std::thread::sleep(Duration::from_millis(1200));
    let before = look();
    std::thread::sleep(Duration::from_millis(1200));
    let after = look();
    let (names, attributes) = (after.0 - before.0, after.1 - before.1);
    println!("{names} names and {attributes} attributes were asked for again");
    // The attributes of the directories themselves are kept for a second.
    names < 10 && attributes < 20
}

/// The names of a directory with files, which another client has made.
fn list_by_another(dir: &Path) -> Vec<String> {
    fs::create_dir(dir).unwrap();
    let names: Vec<String> = (0..300).map(|number| format!("listed-{number}")).collect();
    names.iter().for_each(|name| fs::write(dir.join(name), "x").unwrap());
    names
}

/// No look at a file after a listing is a request.
fn a_listing_brings_answers_that_are_kept(servers: &GlusterServers) {
    let places = [mounted::scratch().unwrap(), mounted::scratch().unwrap()];
    let there = mount(servers, "repl", places[1].path());
    let names = list_by_another(&there.path().join("many"));
    // This client has not known the directory while the other one has changed it.
    let here = mount(servers, "repl", places[0].path());
    let dir = here.path().join("many");
    let kinds = ["LOOKUP", "GETATTR", "STATX"];
    wait_until("a listing brings answers", || {
        assert_eq!(fs::read_dir(&dir).unwrap().count(), names.len());
        let listed = requests(&here, &kinds);
        std::thread::sleep(Duration::from_millis(1200));
        for name in &names {
            fs::metadata(dir.join(name)).unwrap();
        }
        let requested = requests(&here, &kinds) - listed;
        println!("{requested} requests for {} files after a listing", names.len());
        // The directories are requested once a second.
        requested < 30
    });
    // A server may mix up names that a client is changing.
    fs::write(there.path().join("many/changed"), "x").unwrap();
    wait_until("a listing brings no answers after a change", || {
        // After the message, and after names that were kept before.
        std::thread::sleep(Duration::from_millis(1200));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), names.len() + 1);
        let listed = requests(&here, &["LOOKUP"]);
        names.iter().for_each(|name| assert!(fs::metadata(dir.join(name)).is_ok()));
        let requested = requests(&here, &["LOOKUP"]) - listed;
        println!("{requested} lookups of {} files after a change and a listing", names.len());
        requested >= names.len() as u64
    });
    fs::remove_dir_all(there.path().join("many")).unwrap();
    here.end().unwrap();
    there.end().unwrap();
}

/// Frontends of one client, as of a run: answers are kept below them, and each sees the changes of
/// the others at once.
fn answers_are_kept_for_several_frontends(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let there = mount(servers, "repl", place.path());
    let names = list_by_another(&there.path().join("kept-here"));
    servers.enter().unwrap();
    let options = defuse_gluster::GlusterOptions {
        valid_for: Duration::ZERO,
        in_application: true,
        submits: false,
        keeps_here: true,
        ..Default::default()
    };
    let volume = defuse_gluster::Gluster::connect(&format!("//{HOST}/repl"), &options).unwrap();
    let volume: Arc<dyn FileSystem> = Arc::new(volume);
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    let clients = [(); 2].map(|()| {
        let client = Arc::new(DirectClient::new(defuse_direct::ClientOptions::default()));
        client.mount(b"g:", Arc::clone(&volume), &ClientMountArgs::default()).unwrap();
        client
    });
    let path = |name: &str| format!("g:/kept-here/{name}").into_bytes();
    let stat =
        |client: &DirectClient, name: &str| client.stat(&task, WalkStart::Cwd, &path(name), true);
    let given = || {
        let figures = volume.figures();
        figures.iter().find(|figure| figure.name == "answers_given").unwrap().value
    };

    wait_until("attributes of listed files are answers", || {
        let how = OpenHow { flags: libc::O_DIRECTORY as u32, ..OpenHow::default() };
        let dir = clients[0].open(&task, WalkStart::Cwd, b"g:/kept-here", how).unwrap();
        let before = given();
        assert_eq!(clients[0].read_dir(&task, &dir).unwrap().len(), names.len() + 2);
        names.iter().for_each(|name| assert_eq!(stat(&clients[1], name).unwrap().attr.size, 1));
        let given = given() - before;
        println!("{given} answers for {} files", names.len());
        given as usize >= names.len()
    });

    // Each sees what the other has changed.
    let how = OpenHow { flags: libc::O_WRONLY as u32, ..OpenHow::default() };
    for (number, name) in names.iter().take(60).enumerate() {
        let [one, other] = [&clients[number % 2], &clients[(number + 1) % 2]];
        stat(one, name).unwrap();
        let new = format!("{name}.new");
        match number % 6 {
            0 => one.unlink(&task, WalkStart::Cwd, &path(name)).unwrap(),
            1 => one.chmod(&task, WalkStart::Cwd, &path(name), 0o600, true).unwrap(),
            2 => {
                let file = one.open(&task, WalkStart::Cwd, &path(name), how).unwrap();
                assert_eq!(one.pwrite(&task, &file, b"longer", 0).unwrap(), 6);
            }
            3 => one
                .link(&task, (WalkStart::Cwd, &path(name)), (WalkStart::Cwd, &path(&new)), false)
                .unwrap(),
            4 => one.truncate(&task, WalkStart::Cwd, &path(name), 9).unwrap(),
            _ => {
                let (from, to) = (path(name), path(&new));
                let flags = defuse_fs::RenameFlags::default();
                one.rename(&task, (WalkStart::Cwd, &from), (WalkStart::Cwd, &to), flags).unwrap();
            }
        }
        let seen = stat(other, name).map(|stat| stat.attr);
        match number % 6 {
            0 => assert!(seen.is_err()),
            1 => assert_eq!(seen.unwrap().perm, 0o600),
            2 => assert_eq!(seen.unwrap().size, 6),
            3 => assert_eq!((seen.unwrap().nlink, stat(other, &new).unwrap().attr.nlink), (2, 2)),
            4 => assert_eq!(seen.unwrap().size, 9),
            _ => assert!(seen.is_err() && stat(other, &new).is_ok()),
        }
    }

    // Another client's changes are seen soon.
    let there_dir = there.path().join("kept-here");
    let [written, gone] = [&names[100], &names[101]];
    stat(&clients[0], written).unwrap();
    fs::write(there_dir.join(written), "12345").unwrap();
    wait_until("the size", || stat(&clients[0], written).unwrap().attr.size == 5);
    fs::remove_file(there_dir.join(gone)).unwrap();
    wait_until("a removal", || stat(&clients[0], gone).is_err());

    // The absence of an attribute is kept, until another client gives the file one.
    let [requested, capable] = [&names[102], &names[103]];
    let value = |client: &DirectClient, name: &str, attribute: &[u8]| {
        client.getxattr(&task, (WalkStart::Cwd, &path(name), true), attribute, 100).map(drop)
    };
    for attribute in [&b"system.posix_acl_default"[..], b"system.posix_acl_access"] {
        stat(&clients[0], requested).unwrap();
        value(&clients[0], requested, attribute).unwrap_err();
        wait_until("its lack is kept", || {
            let before = given();
            value(&clients[1], requested, attribute).unwrap_err();
            // One of them is the name.
            given() - before >= 2
        });
    }
    const CAPABILITY: &[u8] = b"security.capability";
    stat(&clients[0], capable).unwrap();
    value(&clients[0], capable, CAPABILITY).unwrap_err();
    let some = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(there_dir.join(capable), "security.capability", &some, flags).unwrap();
    wait_until("a capability", || value(&clients[1], capable, CAPABILITY).is_ok());

    // A name is not kept for a user who may not search the directory.
    clients[0].chmod(&task, WalkStart::Cwd, b"g:/kept-here", 0o700, true).unwrap();
    let user =
        ClientTask::new(TaskCredentials::user(4321, 4321, &[]), WorkDir::Outside(b"/".to_vec()));
    let name = Name::new(names[200].as_bytes()).unwrap();
    stat(&clients[0], &names[200]).unwrap();
    assert!(clients[1].stat(&user, WalkStart::Cwd, &path(&names[200]), true).is_err());
    let [root, other] = [0, 4321].map(|id| Context::new(Caller { uid: id, gid: id, pid: 0 }));
    let dir = volume.lookup(&root, Ino::ROOT, Name::new(b"kept-here").unwrap()).unwrap().ino;
    assert!(volume.lookup(&root, dir, name).is_ok() && volume.lookup(&other, dir, name).is_err());

    clients.iter().for_each(|client| client.unmount(b"g:", false).unwrap());
    fs::remove_dir_all(there_dir).unwrap();
    there.end().unwrap();
}

/// Programs of a run saw names for up to a second after their children had renamed them.
fn a_program_of_a_run_sees_what_its_children_change(servers: &GlusterServers) {
    const SCRIPT: &str = r#"
        mkdir /run-gluster/d; cd /run-gluster/d
        for i in 1 2 3 4 5 6 7 8 9 10; do
            echo x >a$i; ls -l >/dev/null; [ -s a$i ]
            mv a$i b$i; [ ! -e a$i ]; [ -e b$i ]
            echo yy >>b$i; chmod 600 b$i; [ "$(stat -c %s:%a b$i)" = 5:600 ]
            cp b$i c; mv c b$i; [ ! -e c ]
            rm b$i; [ ! -e b$i ]
        done
        cd ..; rmdir d; echo all seen"#;
    let place = mounted::scratch().unwrap();
    let mut run = servers.command(program().unwrap());
    run.args([
        "run",
        "--mount",
        &format!("/run-gluster=gluster://{HOST}/repl"),
        "--",
        "sh",
        "-ec",
        SCRIPT,
    ]);
    let output = run.env("DEFUSE_RUNTIME_DIR", place.path().join("run")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all seen\n", "{errors}");
}

/// Number of requests of these kinds so far.
fn requests(mount: &ServedMount, kinds: &[&str]) -> u64 {
    let mut stat = Command::new(program().unwrap());
    let place = mount.path().parent().unwrap();
    stat.args(["stat", "--json"]).arg(mount.path()).env("DEFUSE_RUNTIME_DIR", place.join("run"));
    let said = String::from_utf8(stat.output().unwrap().stdout).unwrap();
    assert!(said.contains("\"ops\""), "{said}");
    let count = |kind: &&str| -> u64 {
        let of_kind = said.split("{\"op\":").filter(|op| op.starts_with(&format!("\"{kind}\"")));
        let counts = of_kind.filter_map(|op| op.split_once("\"count\":")?.1.split(',').next());
        counts.map(|count| count.parse::<u64>().unwrap()).max().unwrap_or(0)
    };
    kinds.iter().map(count).sum()
}

fn read(file: &fs::File) -> String {
    let mut bytes = [0; 100];
    let len = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..len].to_vec()).unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{what}: after {} ms", begun.elapsed().as_millis());
}

/// The file that glusterd gives to clients.
fn a_volume_file_is_mounted_unless_others_may_write_it(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let file = place.path().join("dist.vol");
    let spec = "/var/lib/glusterd/vols/dist/dist.tcp-fuse.vol";
    let spec = servers.command_within("cat".as_ref()).arg(spec).output().unwrap();
    assert!(spec.status.success(), "{}", String::from_utf8_lossy(&spec.stderr));
    fs::write(&file, &spec.stdout).unwrap();
    let source = format!("gluster:{}", file.display());
    let inside = servers.network_prefix();
    let inside: Vec<&str> = inside.iter().map(String::as_str).collect();
    let mount = || ServedMount::mount_under(&inside, source.as_ref(), place.path(), &[]);
    let mode = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    mode(0o666);
    let error = format!("{:#}", mount().map(drop).unwrap_err());
    assert!(error.contains("dist.vol: its mode 666 lets others write"), "{error}");
    mode(0o600);
    let mount = mount().unwrap();
    fs::write(mount.path().join("by-file"), "x").unwrap();
    fs::remove_file(mount.path().join("by-file")).unwrap();
    mount.end().unwrap();
}

/// libgfapi opened the standard error by its name: no volume opened under systemd, whose journal is
/// a socket, and for a user other than the owner of the standard error.
fn messages_have_a_place_whatever_the_standard_error_is(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let at = format!("/run-gluster=gluster://{HOST}/dist,log-level=info");
    let run = |arguments: &[&str], error: std::process::Stdio| {
        let mut run = servers.command(arguments[0].as_ref());
        run.args(&arguments[1..]).args(["run", "--mount", &at, "--", "ls", "/run-gluster"]);
        run.env("DEFUSE_RUNTIME_DIR", place.path().join("run")).stderr(error);
        run.output().unwrap()
    };
    let program = program().unwrap();
    let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    let said = std::thread::spawn(move || std::io::read_to_string(here).unwrap());
    let output = run(&[program.to_str().unwrap()], std::os::fd::OwnedFd::from(there).into());
    let said = said.join().unwrap();
    assert!(output.status.success() && said.contains("0-gfapi"), "{said}");
    // A file of root that the user can write by the descriptor only.
    let log = fs::File::create(place.path().join("of-root")).unwrap();
    let pair = |id: &str| [format!("--reuid={id}"), format!("--regid={id}")];
    let [user, group] = pair("61234");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let other = ["setpriv", &user, &group, "--clear-groups", program.to_str().unwrap()];
    let output = run(&other, log.into());
    let said = fs::read_to_string(place.path().join("of-root")).unwrap();
    assert!(output.status.success() && said.contains("0-gfapi"), "{said}");
    // A daemon in the background has no standard error: its error and its log have the messages.
    let target = place.path().join("background");
    fs::create_dir(&target).unwrap();
    let mount = |volume: &str, options: &[&str]| {
        let mut mount = servers.command(program);
        mount.args(["mount", &format!("gluster://{HOST}/{volume}")]).arg(&target).args(options);
        mount.env("DEFUSE_RUNTIME_DIR", place.path().join("run")).output().unwrap()
    };
    let failed = mount("absent", &["-o", "log-level=error"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(said.contains("libgfapi: [") && said.contains("0-gfapi: failed"), "{said}");
    let log = place.path().join("background.log");
    let done = mount("dist", &["-o", "log-level=info", "--log-file", log.to_str().unwrap()]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let said = fs::read_to_string(&log).unwrap();
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(said.contains("] libgfapi: [") && said.contains("0-gfapi"), "{said}");
}

/// Attributes that GlusterFS computes, by which administrators and geo-replication find a file.
fn a_file_tells_its_bricks_and_its_identity(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let mount = mount(servers, "dist", place.path());
    let file = mount.path().join("told");
    fs::write(&file, "x").unwrap();
    let value = |name: &str| {
        let mut room = [0; 1000];
        let len = rustix::fs::getxattr(&file, name, &mut room).unwrap();
        String::from_utf8(room[..len].to_vec()).unwrap()
    };
    for name in ["trusted.glusterfs.pathinfo", "glusterfs.pathinfo"] {
        let shown = value(name);
        assert!(shown.contains(":/run/gluster/bricks/dist") && shown.contains("/told>"), "{shown}");
    }
    let identity = value("glusterfs.gfid.string");
    let link = format!(".glusterfs/{}/{}/{identity}", &identity[..2], &identity[2..4]);
    let has = |brick: &str| {
        let path = format!("{ROOM}/bricks/{brick}/{link}");
        servers.command_within("test".as_ref()).args(["-e", &path]).status().unwrap().success()
    };
    assert!(has("dist1") || has("dist2"), "{identity}");
    let flags = rustix::fs::XattrFlags::empty();
    assert!(rustix::fs::setxattr(&file, "glusterfs.gfid.string", b"x", flags).is_err());
    fs::remove_file(&file).unwrap();
    mount.end().unwrap();
}

fn errors_say_what_to_do(servers: &GlusterServers) {
    let place = mounted::scratch().unwrap();
    let target = place.path().join("mnt");
    fs::create_dir(&target).unwrap();
    let said = |source: &str| {
        let begun = Instant::now();
        let mut mount = servers.command(program().unwrap());
        let output = mount.args(["mount", source]).arg(&target).output().unwrap();
        assert!(!output.status.success(), "{source} is mounted");
        assert!(begun.elapsed() < Duration::from_secs(60), "{source}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let volume = said(&format!("gluster://{HOST}/absent"));
    assert!(
        volume.contains("volume absent of 127.1.1.1") && volume.contains("gluster volume info")
    );
    let server = said("gluster://127.1.1.9/dist");
    assert!(server.contains("127.1.1.9 port 24007: ") && server.contains("start glusterd there"));
    let directory = said(&format!("gluster://{HOST}/dist/no/such"));
    assert!(directory.contains("the directory no: No such file"), "{directory}");
    let form = said("gluster:dist");
    assert!(form.contains("write gluster://HOST[,HOST...]/VOLUME[/DIR]"), "{form}");
}
