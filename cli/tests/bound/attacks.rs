//! Applications that do anything with the device of a manager.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_bound::protocol::{ApplicationMessage, FIRST, ManagerChannel, ManagerMessage};
use defuse_fs::{
    Attr, Context, Entry, Errno, Fh, FileSystem, Ino, Name, Notify, Origin, Result, delegate,
};
use defuse_memory::MemoryFileSystem;
use defuse_socket::{ServerOptions, serve_one};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, send, socket_with,
};

use crate::LoadStop;
use crate::common::{PROGRAM, TestPlace, eventually, from_output};
use crate::managed::{BoundManager, LIMIT};

fn connect(managed: &BoundManager) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new(managed.place.path("socket")).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    socket
}

/// Takes /one. Returns the connection, and the socket to serve on.
fn take(managed: &BoundManager) -> (ManagerChannel<OwnedFd>, OwnedFd) {
    let channel = ManagerChannel::new(connect(managed));
    channel.send_request(&ApplicationMessage::Take("/one".to_owned())).unwrap();
    match channel.next_answer(10 * LIMIT).unwrap() {
        Some(ManagerMessage::Granted { socket, .. }) => (channel, socket),
        other => panic!("{other:?}"),
    }
}

/// Serves `fs` in place of the device, until the socket ends.
fn serve(channel: &ManagerChannel<OwnedFd>, socket: OwnedFd, fs: Arc<dyn FileSystem>) {
    // It may fail as it likes.
    std::thread::spawn(move || serve_one(socket, fs, &ServerOptions::default(), || ()).is_ok());
    channel.send_request(&ApplicationMessage::Serving).unwrap();
    assert!(matches!(channel.next_answer(10 * LIMIT), Ok(Some(ManagerMessage::Served))));
}

fn memory() -> Arc<MemoryFileSystem> {
    Arc::new(MemoryFileSystem::new(Default::default()))
}

#[test]
fn an_application_that_breaks_the_rules_is_given_up_and_the_device_comes_back() {
    let managed = BoundManager::new("", "bind = []");
    assert_eq!(managed.shell("echo right >/x/one/a; cat /x/one/a"), "right\n");
    let deeds: [(&str, &dyn Fn()); 8] = [
        ("ends without a word", &|| drop(take(&managed))),
        ("says nothing", &|| {
            let (_channel, _socket) = take(&managed);
            std::thread::sleep(LIMIT / 2);
        }),
        ("says something else", &|| {
            let (channel, _socket) = take(&managed);
            channel.send_request(&ApplicationMessage::Pong).unwrap();
            assert!(channel.next_answer(10 * LIMIT).is_err(), "the connection has ended");
        }),
        ("serves nothing", &|| {
            let (channel, _socket) = take(&managed);
            channel.send_request(&ApplicationMessage::Serving).unwrap();
            assert!(matches!(channel.next_answer(LIMIT / 2), Ok(None)));
        }),
        ("does not speak FUSE", &|| {
            let (channel, socket) = take(&managed);
            send(&socket, b"HTTP/1.1 200 OK", SendFlags::empty()).unwrap();
            channel.send_request(&ApplicationMessage::Serving).unwrap();
            assert!(channel.next_answer(10 * LIMIT).is_err(), "the connection has ended");
        }),
        ("gives signs of life that nobody asked for", &|| {
            let (channel, socket) = take(&managed);
            serve(&channel, socket, memory());
            while channel.send_request(&ApplicationMessage::Pong).is_ok() {}
            eventually("the end", || channel.next_answer(LIMIT).is_err());
        }),
        ("gives no sign of life", &|| {
            let (channel, socket) = take(&managed);
            serve(&channel, socket, memory());
            eventually("the end", || channel.next_answer(LIMIT).is_err());
        }),
        ("sends no message of the conversation", &|| {
            let (socket, channel) = (connect(&managed), ManagerChannel::new(connect(&managed)));
            send(&socket, &[FIRST, b"steal\0/one"].concat(), SendFlags::empty()).unwrap();
            assert!(ManagerChannel::new(&socket).next_answer(10 * LIMIT).is_err());
            channel.send_request(&ApplicationMessage::Keep("/one".to_owned())).unwrap();
            let answer = channel.next_answer(10 * LIMIT);
            assert!(
                matches!(&answer, Ok(Some(ManagerMessage::Refused { errno: Errno::EBUSY, .. }))),
                "the manager has it: {answer:?}"
            );
        }),
    ];
    for (deed, act) in deeds {
        println!("{deed}");
        act();
        managed.await_holder("manager");
        assert_eq!(managed.shell("cat /x/one/a"), "right\n", "{deed}: {}", managed.log());
    }
}

/// A file system whose files have the number of another one, and which notifies of changes without
/// end.
struct HostileFileSystem {
    inner: Arc<MemoryFileSystem>,
    st_ino: u64,
    notifiers: Mutex<Vec<Arc<dyn Notify>>>,
}

impl HostileFileSystem {
    fn falsify_attr(&self, attr: Attr) -> Attr {
        Attr { st_ino: self.st_ino, ..attr }
    }
}

impl FileSystem for HostileFileSystem {
    delegate!(to inner, except lookup, getattr, attach);

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        let entry = self.inner.lookup(cx, parent, name)?;
        Ok(Entry { attr: self.falsify_attr(entry.attr), ..entry })
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        self.inner.getattr(cx, ino, fh).map(|attr| self.falsify_attr(attr))
    }

    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        self.notifiers.lock().unwrap().push(notify);
    }
}

#[test]
fn a_hostile_application_names_no_file_of_another_device_and_reaches_no_other_client() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = BoundManager::new("", "bind = []");
    let mnt = managed.mount();
    fs::write(mnt.join("two/victim"), "two").unwrap();
    let number = |shown: String| shown.trim().parse::<u64>().unwrap();
    let victim = number(managed.shell("stat -c %i /x/two/victim"));
    assert_eq!(victim >> 56, 2, "the number of a device is in its highest bits");
    let (channel, socket) = take(&managed);
    // With the number of its own device, this becomes the number of the victim.
    let (st_ino, notifiers) = (victim ^ 1 << 56, Mutex::default());
    let evil = Arc::new(HostileFileSystem { inner: memory(), st_ino, notifiers });
    serve(&channel, socket, evil.clone());
    managed.shell("echo a >/x/one/a");
    let lied = number(managed.shell("stat -c %i /x/one/a"));
    assert_eq!((lied >> 56, lied << 8), (1, victim << 8));
    assert_ne!(fs::metadata(mnt.join("one/a")).unwrap().ino(), victim);
    let (ends, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let sent = &sent;
        let notifiers = evil.notifiers.lock().unwrap().clone();
        assert!(!notifiers.is_empty());
        let (channel, ends) = (&channel, &ends);
        scope.spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                for notify in &notifiers {
                    let _ = notify.invalidate_inode(Ino(2), Some((0, 0)));
                    let _ = notify.increment_epoch();
                    sent.fetch_add(2, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        // It gives signs of life, so that it stays.
        scope.spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                if let Ok(Some(ManagerMessage::Ping)) =
                    channel.next_answer(Duration::from_millis(5))
                {
                    let _ = channel.send_request(&ApplicationMessage::Pong);
                }
            }
        });
        let until_the_end = LoadStop(ends);
        let mut notifiers = 0;
        let begun = std::time::Instant::now();
        while begun.elapsed() < LIMIT {
            assert_eq!(fs::read(mnt.join("two/victim")).unwrap(), b"two");
            fs::write(mnt.join("two/other"), "other").unwrap();
            // A thread that waits for an answer receives the notifications of that time. The
            // application may be given up.
            let _ = fs::metadata(mnt.join("one/a"));
            notifiers += 1;
        }
        let sent = sent.load(Ordering::Relaxed);
        assert!(notifiers > 10 && sent > 1000, "{notifiers} {sent}");
        drop(until_the_end);
    });
    drop(channel);
    managed.await_holder("manager");
    assert!(!mnt.join("one/a").exists());
    managed.place.expect_success(&["umount", "mnt"]);
}

#[test]
fn a_manager_of_another_user_is_not_told_of_the_device() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root becomes other users");
        return;
    }
    let place = TestPlace::new();
    fs::set_permissions(place.path(""), PermissionsExt::from_mode(0o1777)).unwrap();
    let program = place.install_for_all_users();
    place.expect_success(&["mkfs", "uhs", "image", "--size", "64M"]);
    fs::set_permissions(place.path("image"), PermissionsExt::from_mode(0o666)).unwrap();
    let (socket, image) = (place.path("socket"), place.path("image"));
    let config = format!(
        "socket = {socket:?}\nadmit = [0]\n[[device]]\npath = \"/one\"\nsource = \"uhs:{}\"\nbind = []\n",
        image.display()
    );
    fs::write(place.path("manager.toml"), config).unwrap();
    let mut manager = place.command_of(&program, &["manager", "--foreground", "manager.toml"]);
    manager.env("DEFUSE_RUNTIME_DIR", place.path("of-other"));
    let mut manager = manager.uid(65534).gid(65534).stderr(Stdio::null()).spawn().unwrap();
    eventually("a manager", || socket.exists());
    let bound = format!("/y=bound:{},device=/one", socket.display());
    let mut command = std::process::Command::new(PROGRAM);
    let said =
        from_output(command.args(["run", "--mount", &bound, "--", "true"]).output().unwrap());
    manager.kill().unwrap();
    manager.wait().unwrap();
    assert!(said.err.contains("untrusted user 65534"), "{}", said.err);
    assert_eq!(said.code, Some(1));
}
