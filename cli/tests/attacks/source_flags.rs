//! Sources that may not grant set-user-id, devices or execution.

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::MountFlags;

use super::common::{TestPlace, TestTmpfs, eventually};
use super::users::{self, NOBODY, print_for_nobody};

const MODE: &CStr = c"mode=755";

fn open_to_all(place: &TestPlace) {
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
}

/// The flags of the mount in mountinfo.
fn flags(place: &TestPlace) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mnt = place.path("mnt");
    let line = text.lines().find(|line| line.split(' ').nth(4) == mnt.to_str()).unwrap();
    line.split(' ').nth(5).unwrap().split(',').map(str::to_owned).collect()
}

fn has(place: &TestPlace, wanted: &[&str]) -> bool {
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
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    let (program, null) = (place.path("mnt/id"), place.path("mnt/null"));
    for (options, uid, opens) in [("allow_other", NOBODY, false), ("allow_other,suid,dev", 0, true)]
    {
        place.expect_success(&["mount", "memory:", "mnt", "-o", options]);
        set_user_id_program(&program);
        let device = makedev(1, 3);
        mknodat(CWD, &null, FileType::CharacterDevice, Mode::RUSR, device).unwrap();
        assert_eq!(print_for_nobody(&program, &["-u"]), uid.to_string(), "{options}");
        assert_eq!(fs::OpenOptions::new().read(true).open(&null).is_ok(), opens, "{options}");
        place.expect_success(&["umount", "mnt"]);
    }
}

// A set-user-id program on a medium that its administrator had mounted nosuid ran as root through a
// mount of defuse.
#[test]
fn a_mount_inherits_the_restrictions_of_its_source() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    let denied = MountFlags::NOSUID | MountFlags::NODEV;
    let source = TestTmpfs::mount_on(place.path("src"), denied, MODE);
    set_user_id_program(&place.path("src/id"));
    let said = place.run(&["mount", "passthrough:src", "mnt", "-o", "allow_other,suid,dev"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(
        said.err.contains("mounted with nosuid") && said.err.contains("mounted with nodev"),
        "{}",
        said.err
    );
    assert!(has(&place, &["nosuid", "nodev"]) && !has(&place, &["noexec"]));
    assert_eq!(print_for_nobody(place.path("mnt/id"), &["-u"]), NOBODY.to_string());
    place.expect_success(&["umount", "mnt"]);
    drop(source);

    let _source = TestTmpfs::mount_on(place.path("src"), MountFlags::NOEXEC, MODE);
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
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    fs::create_dir(place.path("src/medium")).unwrap();
    let _medium = TestTmpfs::mount_on(place.path("src/medium"), MountFlags::NOSUID, MODE);
    set_user_id_program(&place.path("src/medium/id"));
    let program = place.path("mnt/medium/id");
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "allow_other,suid"]);
    let error = fs::metadata(&program).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    place.expect_success(&["umount", "mnt"]);
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "allow_other"]);
    assert_eq!(print_for_nobody(&program, &["-u"]), NOBODY.to_string());
}

// A server can report any mode and owner: a program served by another user's socket ran as root.
#[test]
fn a_mount_of_a_socket_never_has_set_user_id_or_devices() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    let mut serve = place.command(&["serve", "--foreground", "memory:", "socket"]);
    let mut server = serve.spawn().unwrap();
    eventually("served", || place.path("socket").exists());
    let said = place.run(&["mount", "socket:socket", "mnt", "-o", "allow_other,suid,dev"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("nosuid") && said.err.contains("nodev"), "{}", said.err);
    let program = place.path("mnt/id");
    set_user_id_program(&program);
    let printed = print_for_nobody(&program, &["-u"]);
    let flagged = has(&place, &["nosuid", "nodev"]);
    place.expect_success(&["umount", "mnt"]);
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(flagged && printed == NOBODY.to_string(), "{printed}");
}

/// A file system at `path` without access lists.
fn mount_without_lists(path: &Path) {
    let flags = MountFlags::empty();
    rustix::mount::mount("none", path, c"ramfs", flags, Some(c"mode=755")).unwrap();
}

/// Denies everything on `path` to the user [`NOBODY`], by an access list whose mask the mode shows
/// as rights of a group.
fn deny_to_nobody(path: &Path) {
    let list = Command::new("setfacl").args(["-m", "u:65534:---,m:rwx"]).arg(path).status();
    assert!(list.unwrap().success());
}

// The support for access lists was checked at the root of the source alone: lists of a file system
// below a source without them were ignored, and so were all lists with the profiles of Stackfs and
// with no_xattr.
#[test]
fn access_lists_are_obeyed_in_every_part_of_the_tree_and_with_all_options() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    mount_without_lists(&place.path("src"));
    struct UnmountOnDrop(std::path::PathBuf);
    impl Drop for UnmountOnDrop {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let _source = UnmountOnDrop(place.path("src"));
    fs::create_dir(place.path("src/below")).unwrap();
    let _below = TestTmpfs::mount_on(place.path("src/below"), MountFlags::empty(), MODE);
    fs::create_dir(place.path("src/below/dir")).unwrap();
    for name in ["src/below/file", "src/below/open", "src/below/dir/inside", "src/plain"] {
        fs::write(place.path(name), name).unwrap();
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(0o666)).unwrap();
    }
    deny_to_nobody(&place.path("src/below/file"));
    deny_to_nobody(&place.path("src/below/dir"));
    for source in ["passthrough:src", "passthrough:src/below"] {
        for options in [
            &["-o", "allow_other"] as &[&str],
            &["-o", "allow_other,no_xattr"],
            &["-o", "allow_other,no_passthrough"],
            &["--profile", "base", "-o", "allow_other"],
            &["--profile", "opt", "-o", "allow_other"],
        ] {
            place.expect_success(&[&["mount", source, "mnt"], options].concat());
            let below = if source.ends_with("below") { "mnt" } else { "mnt/below" };
            let read = |name: &str| {
                let path = place.path(below).join(name);
                users::as_user(NOBODY, &[], || fs::read(&path).map_err(|error| error.kind()))
            };
            let denied = Err(std::io::ErrorKind::PermissionDenied);
            for name in ["file", "dir/inside"] {
                assert_eq!(read(name), denied, "{source} {options:?}: {name}");
            }
            assert_eq!(read("open"), Ok(b"src/below/open".to_vec()), "{source} {options:?}");
            if below != "mnt" {
                assert_eq!(read("../plain"), Ok(b"src/plain".to_vec()), "{options:?}");
            }
            place.expect_success(&["umount", "mnt"]);
        }
    }
    let refused = ["mount", "passthrough:src", "mnt", "-o", "allow_other,no_posix_acl"];
    place.expect_failure(2, &refused, "exclude each other");
}

// A program on a file system that is mounted noexec below the source was executed.
#[test]
fn a_program_is_not_executed_on_a_file_system_below_the_source_that_denies_it() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    open_to_all(&place);
    for (name, flags) in [("denies", MountFlags::NOEXEC), ("permits", MountFlags::empty())] {
        fs::create_dir(place.path("src").join(name)).unwrap();
        let below = place.path("src").join(name);
        std::mem::forget(TestTmpfs::mount_on(below.clone(), MountFlags::empty(), MODE));
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755", "/usr/bin/id"]).arg(&below).status().unwrap().success());
        fs::write(below.join("script"), "#!/bin/sh\necho executed\n").unwrap();
        fs::set_permissions(below.join("script"), fs::Permissions::from_mode(0o755)).unwrap();
        rustix::mount::mount_remount(&below, flags, "").unwrap();
    }
    for options in ["allow_other", "allow_other,no_passthrough", "handles=off"] {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        for program in ["id", "script"] {
            let denied = Command::new(place.path("mnt/denies").join(program)).output();
            let error = denied.map(|_| ()).map_err(|error| error.kind());
            assert_eq!(error, Err(std::io::ErrorKind::PermissionDenied), "{program}, {options}");
            let permitted = Command::new(place.path("mnt/permits").join(program)).output();
            assert!(permitted.unwrap().status.success(), "{program}, {options}");
        }
        assert!(fs::read(place.path("mnt/denies/script")).is_ok(), "it can be read");
        place.expect_success(&["umount", "mnt"]);
    }
    for name in ["src/denies", "src/permits"] {
        rustix::mount::unmount(place.path(name), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}
