//! Sources that may not grant set-user-id, devices or execution.

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::MountFlags;

use super::common::{Place, Tmpfs, eventually};
use super::users::{NOBODY, printed_for_nobody};

const MODE: &CStr = c"mode=755";

fn open_to_all(place: &Place) {
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
}

/// The flags of the mount in mountinfo.
fn flags(place: &Place) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mnt = place.path("mnt");
    let line = text.lines().find(|line| line.split(' ').nth(4) == mnt.to_str()).unwrap();
    line.split(' ').nth(5).unwrap().split(',').map(str::to_owned).collect()
}

fn has(place: &Place, wanted: &[&str]) -> bool {
    let flags = flags(place);
    wanted.iter().all(|wanted| flags.iter().any(|flag| flag == wanted))
}

/// Not copied by this process: another test that forks meanwhile would inherit the copy open for
/// writing, and executing it would fail (ETXTBSY).
fn set_user_id_program(path: &Path) {
    let mut install = Command::new("install");
    assert!(install.args(["-m", "4755", "/usr/bin/id"]).arg(path).status().unwrap().success());
}

// A mount by root honoured set-user-id and devices by default, for every source.
#[test]
fn set_user_id_and_devices_have_no_effect_unless_requested() {
    let Some(place) = Place::to_mount() else { return };
    open_to_all(&place);
    let (program, null) = (place.path("mnt/id"), place.path("mnt/null"));
    for (options, uid, opens) in [("allow_other", NOBODY, false), ("allow_other,suid,dev", 0, true)]
    {
        place.ok(&["mount", "memory:", "mnt", "-o", options]);
        set_user_id_program(&program);
        let device = makedev(1, 3);
        mknodat(CWD, &null, FileType::CharacterDevice, Mode::RUSR, device).unwrap();
        assert_eq!(printed_for_nobody(&program, &["-u"]), uid.to_string(), "{options}");
        assert_eq!(fs::OpenOptions::new().read(true).open(&null).is_ok(), opens, "{options}");
        place.ok(&["umount", "mnt"]);
    }
}

// A set-user-id program on a medium that its administrator had mounted nosuid ran as root through a
// mount of defuse.
#[test]
fn a_mount_inherits_the_restrictions_of_its_source() {
    let Some(place) = Place::to_mount() else { return };
    open_to_all(&place);
    let denied = MountFlags::NOSUID | MountFlags::NODEV;
    let source = Tmpfs::on(place.path("src"), denied, MODE);
    set_user_id_program(&place.path("src/id"));
    let said = place.run(&["mount", "passthrough:src", "mnt", "-o", "allow_other,suid,dev"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.err.contains("mounted with nosuid") && said.err.contains("mounted with nodev"),
        "{}",
        said.err
    );
    assert!(has(&place, &["nosuid", "nodev"]) && !has(&place, &["noexec"]));
    assert_eq!(printed_for_nobody(place.path("mnt/id"), &["-u"]), NOBODY.to_string());
    place.ok(&["umount", "mnt"]);
    drop(source);

    let _source = Tmpfs::on(place.path("src"), MountFlags::NOEXEC, MODE);
    let said = place.run(&["mount", "passthrough:src", "mnt", "-o", "suid,dev"]);
    assert!(
        said.err.contains("mounted with noexec") && said.err.lines().count() == 1,
        "{}",
        said.err
    );
    assert!(has(&place, &["noexec"]) && !has(&place, &["nosuid"]) && !has(&place, &["nodev"]));
}

// A medium mounted below the source has flags of its own, but the mount has one set of flags.
#[test]
fn a_file_system_below_the_source_that_denies_set_user_id_is_not_served_with_it() {
    let Some(place) = Place::to_mount() else { return };
    open_to_all(&place);
    fs::create_dir(place.path("src/medium")).unwrap();
    let _medium = Tmpfs::on(place.path("src/medium"), MountFlags::NOSUID, MODE);
    set_user_id_program(&place.path("src/medium/id"));
    let program = place.path("mnt/medium/id");
    place.ok(&["mount", "passthrough:src", "mnt", "-o", "allow_other,suid"]);
    let error = fs::metadata(&program).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    place.ok(&["umount", "mnt"]);
    place.ok(&["mount", "passthrough:src", "mnt", "-o", "allow_other"]);
    assert_eq!(printed_for_nobody(&program, &["-u"]), NOBODY.to_string());
}

// A server can report any mode and owner: a program served by another user's socket ran as root.
#[test]
fn a_mount_of_a_socket_never_has_set_user_id_or_devices() {
    let Some(place) = Place::to_mount() else { return };
    open_to_all(&place);
    let mut serve = place.command(&["serve", "--foreground", "memory:", "socket"]);
    let mut server = serve.spawn().unwrap();
    eventually("served", || place.path("socket").exists());
    let said = place.run(&["mount", "socket:socket", "mnt", "-o", "allow_other,suid,dev"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("nosuid") && said.err.contains("nodev"), "{}", said.err);
    let program = place.path("mnt/id");
    set_user_id_program(&program);
    let printed = printed_for_nobody(&program, &["-u"]);
    let flagged = has(&place, &["nosuid", "nodev"]);
    place.ok(&["umount", "mnt"]);
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(flagged && printed == NOBODY.to_string(), "{printed}");
}
