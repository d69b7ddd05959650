//! Unmounting: its waits and its messages.

mod common;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{DefuseOutput, PROGRAM, TestPlace, eventually, from_output};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Signal, kill_process};

/// A place with a mounted image, whose changes take a moment to become durable.
fn with_image() -> Option<TestPlace> {
    let place = TestPlace::new_to_mount()?;
    place.expect_success(&["mkfs", "uhs", "img", "--size", "256M"]);
    Some(place)
}

/// True for a process that has ended, whether its parent has taken note of that or not.
fn has_ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| {
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X']))
    })
}

fn write_much(place: &TestPlace, round: usize) {
    let dir = place.path(&format!("mnt/{round}"));
    fs::create_dir(&dir).unwrap();
    for file in 0..20 {
        fs::write(dir.join(file.to_string()), vec![7; 500_000]).unwrap();
    }
}

/// umount(8) returned while the daemon still wrote: a check of the image found it in use.
#[test]
fn the_helper_of_umount_8_waits_until_the_daemon_has_ended() {
    let Some(place) = with_image() else { return };
    let helper = place.path("umount.fuse.defuse");
    symlink(PROGRAM, &helper).unwrap();
    let call =
        |arguments: &[&str]| from_output(place.command_of(&helper, arguments).output().unwrap());
    for round in 0..3 {
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        write_much(&place, round);
        let pid = place.pid();
        let result = call(&["mnt", "-v", "-t", "fuse.defuse"]);
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""));
        assert!(has_ended(pid), "the daemon goes on");
    }
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    let busy = fs::File::open(place.path("mnt")).unwrap();
    assert_eq!(call(&["mnt"]).code, Some(32));
    assert_eq!(call(&["mnt", "-x"]).code, Some(1));
    assert_eq!(call(&["mnt", "-l"]).code, Some(0));
    drop(busy);
}

/// Where a user has no registry, or root looks into none of a user's, the command did not wait.
#[test]
fn an_unmount_waits_for_a_daemon_that_is_registered_elsewhere() {
    let Some(place) = with_image() else { return };
    let elsewhere = |arguments: &[&str]| -> DefuseOutput {
        let mut command = place.command(arguments);
        from_output(command.env("DEFUSE_RUNTIME_DIR", place.path("other")).output().unwrap())
    };
    for round in 0..3 {
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        write_much(&place, round);
        let pid = place.pid();
        // It waited for Ctrl-C, as for a mount of another program.
        let stat = elsewhere(&["stat", "mnt"]);
        assert_eq!(stat.code, Some(1), "{}", stat.out);
        assert!(stat.err.contains(&format!("process {}", pid.as_raw_nonzero())), "{}", stat.err);
        let result = elsewhere(&["umount", "mnt"]);
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""));
        assert!(has_ended(pid), "the daemon goes on");
    }
}

/// The next mount of an image failed at once, although its last daemon was about to end.
#[test]
fn an_image_that_is_being_released_is_waited_for() {
    let Some(place) = with_image() else { return };
    for round in 0..5 {
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        write_much(&place, round);
        // Unmounts like a program that knows nothing of the daemon.
        unmount(place.path("mnt"), UnmountFlags::empty()).unwrap();
    }
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    assert_eq!(fs::read_dir(place.path("mnt")).unwrap().count(), 5);
    place.expect_failure(1, &["mount", "uhs:img", "src"], "in use by process");
    place.expect_success(&["umount", "mnt"]);
}

/// The command waited for a minute, failed, named the wrong path, and advised to kill the daemon.
#[test]
fn an_unmount_says_at_once_where_else_the_file_system_is_mounted() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let (mnt, other) = (place.path("mnt"), place.path("other"));
    fs::create_dir(&other).unwrap();
    place.expect_success(&["mount", "memory:", "mnt"]);
    let pid = place.pid();
    mount_bind(&mnt, &other).unwrap();
    fs::write(mnt.join("file"), "x").unwrap();
    let result = place.run(&["umount", "mnt"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let text = result.err;
    assert!(text.contains(&format!("unmounted {}", mnt.display())), "{text}");
    assert!(text.contains(&format!("defuse umount {}", other.display())), "{text}");
    assert_eq!(fs::read_to_string(other.join("file")).unwrap(), "x");
    place.expect_success(&["umount", "other"]);
    assert!(has_ended(pid), "the daemon goes on");
}

/// umount(8) of a bind mount printed a message and waited for a second, unlike that of any other
/// file system (xfstests 306).
#[test]
fn the_helper_of_umount_8_is_silent_about_other_places_unless_it_is_verbose() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let (mnt, other) = (place.path("mnt"), place.path("other"));
    let helper = place.path("umount.fuse.defuse");
    symlink(PROGRAM, &helper).unwrap();
    fs::create_dir(&other).unwrap();
    place.expect_success(&["mount", "memory:", "mnt"]);
    let pid = place.pid();
    let call =
        |arguments: &[&str]| from_output(place.command_of(&helper, arguments).output().unwrap());
    for (flags, says) in [(&["other"][..], false), (&["other", "-v"], true)] {
        mount_bind(&mnt, &other).unwrap();
        let printed = call(flags);
        assert_eq!(printed.code, Some(0), "{}", printed.err);
        assert_eq!(printed.err.contains("also mounted on"), says, "{}", printed.err);
        assert_eq!(printed.err.is_empty(), !says, "{}", printed.err);
    }
    assert_eq!(call(&["mnt"]).code, Some(0));
    assert!(has_ended(pid), "the daemon goes on");
}

/// A process with a mount namespace of its own for some seconds: a copy of the present one, but
/// without the mounts of other tests, which it would keep alive.
fn namespace(place: &TestPlace, seconds: &str) -> Option<Child> {
    let script = "while read -r id parent device root at rest; do \
            case $rest in *' - fuse'*) [ \"$at\" = \"$1\" ] || umount -l \"$at\";; esac; \
        done < /proc/self/mountinfo; echo; exec sleep $2";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    unshare.arg(place.path("mnt")).arg(seconds);
    let child = unshare.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = child.ok()?;
    let mut line = [0];
    let begun = std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).is_ok();
    if !begun {
        println!("skipped: unshare(1) makes no mount namespace");
        let _ = child.wait();
    }
    begun.then_some(child)
}

#[test]
fn an_unmount_names_the_namespace_that_has_a_copy_of_the_mount() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let pid = place.pid();
    let Some(mut copy) = namespace(&place, "1000") else { return };
    let result = place.run(&["umount", "mnt"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    assert!(
        result.err.contains(&format!("nsenter --target {} --mount", copy.id())),
        "{}",
        result.err
    );
    // It is not here any more.
    let again = place.run(&["umount", "mnt"]);
    assert_eq!(again.code, Some(1));
    assert!(again.err.contains(&format!("kill {}", pid.as_raw_nonzero())), "{}", again.err);
    copy.kill().unwrap();
    copy.wait().unwrap();
    eventually("the end of the daemon", || has_ended(pid));
}

/// The signal removed one mount, and the copy kept the daemon and its image.
#[test]
fn a_signal_ends_a_daemon_whose_mount_has_a_copy_in_another_namespace() {
    let Some(place) = with_image() else { return };
    for options in ["rw", "sandbox=privileges", "writeback"] {
        place.expect_success(&["mount", "uhs:img", "mnt", "-o", options]);
        let pid = place.pid();
        let Some(mut copy) = namespace(&place, "1000") else { return };
        fs::write(place.path("mnt/file"), options).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        eventually("the end of the daemon", || has_ended(pid));
        copy.kill().unwrap();
        copy.wait().unwrap();
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        assert_eq!(fs::read_to_string(place.path("mnt/file")).unwrap(), options);
        place.expect_success(&["umount", "mnt"]);
    }
}

/// A file system whose only mount is in a namespace that no process can enter by its path.
#[test]
fn a_mount_in_another_namespace_is_named_and_ended_by_a_signal() {
    let Some(place) = with_image() else { return };
    let Some(mut other) = namespace(&place, "1000") else { return };
    let target = other.id().to_string();
    let mut inside = place.command_of(Path::new("nsenter"), &["--target", &target, "--mount"]);
    let mount = place.path("mnt");
    let source = format!("uhs:{}", place.path("img").display());
    let result = inside.arg(PROGRAM).args(["mount", &source]).arg(&mount).output();
    let result = from_output(result.unwrap());
    assert_eq!(result.code, Some(0), "{}", result.err);
    let result = place.run(&["umount", "mnt"]);
    assert_eq!(result.code, Some(1));
    assert!(result.err.contains("is not mounted here"), "{}", result.err);
    let pid = result.err.rsplit_once("kill ").unwrap().1;
    let pid: String = pid.chars().take_while(char::is_ascii_digit).collect();
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    eventually("the end of the daemon", || has_ended(pid));
    place.expect_success(&["fsck", "img"]);
    other.kill().unwrap();
    other.wait().unwrap();
}

/// A process that starts with a mount namespace of its own, such as the daemon of another mount,
/// has copies of all mounts for a moment. The command took one for a mount that stays, and returned
/// before the daemon had ended.
#[test]
fn a_copy_of_the_mount_that_goes_in_a_moment_is_waited_for() {
    let Some(place) = with_image() else { return };
    for round in 0..3 {
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        write_much(&place, round);
        let pid = place.pid();
        let Some(mut copy) = namespace(&place, "0.4") else { return };
        let result = place.run(&["umount", "mnt"]);
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "round {round}");
        assert!(has_ended(pid), "the daemon goes on");
        copy.wait().unwrap();
    }
}

/// A user who gave up waiting, by Ctrl-C or a kill, had the mount a while later.
#[test]
fn a_mount_or_server_is_not_made_if_the_process_that_waits_for_it_ends() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let path = place.path("never");
    let listener = SilentServer::start_silent(&path);
    let source = format!("socket:{}", path.display());
    for arguments in [["mount", &source, "mnt"], ["serve", &source, "sock"]] {
        for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
            let mut first = place.command(&arguments).stderr(Stdio::null()).spawn().unwrap();
            // The daemon opens the source, and waits for its answer.
            let (connection, daemon) = listener.accept();
            assert_ne!(daemon, Pid::from_child(&first));
            kill_process(Pid::from_child(&first), signal).unwrap();
            assert!(!first.wait().unwrap().success());
            eventually("the daemon has ended", || has_ended(daemon));
            drop(connection);
            assert!(!place.is_mounted() && !place.path("sock").exists());
        }
    }
}

/// A server that accepts connections and sends nothing.
struct SilentServer(OwnedFd);

impl SilentServer {
    fn start_silent(path: &Path) -> SilentServer {
        let socket = net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        net::listen(&socket, 8).unwrap();
        SilentServer(socket)
    }

    /// The next connection, and the process that made it.
    fn accept(&self) -> (OwnedFd, Pid) {
        let connection = net::accept(&self.0).unwrap();
        let peer = net::sockopt::socket_peercred(&connection).unwrap();
        (connection, peer.pid)
    }
}
