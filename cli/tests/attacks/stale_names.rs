//! Permission checks by the kernel on cached names that the source has replaced.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};

use super::common::TestPlace;
use super::users::{NOBODY, as_user, print_for_nobody};

/// Makes directories of `place` accessible and writable for every user.
fn share(place: &TestPlace, mode: u32) {
    for (name, mode) in [("", 0o755), ("src", mode)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// A user looks up a missing name, and the kernel caches its absence. Then root creates a private
/// file of that name in the source. The user's `open(O_CREAT)` reached the file system as CREATE,
/// which opened the file with the permissions of the daemon; the kernel checks no permissions of a
/// file that it takes for new. In a race this worked without `negative_timeout`, too.
#[test]
fn creating_a_file_never_opens_the_file_of_another_user() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    share(&place, 0o777);
    for options in ["", ",no_passthrough", ",writeback"] {
        let options = format!("allow_other,negative_timeout=60{options}");
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", &options]);
        for name in ["secret", "own"] {
            let seen = as_user(NOBODY, &[], || fs::metadata(place.path("mnt").join(name)));
            assert_eq!(seen.unwrap_err().kind(), ErrorKind::NotFound);
            fs::write(place.path("src").join(name), name).unwrap();
            let private = fs::Permissions::from_mode(0o600);
            fs::set_permissions(place.path("src").join(name), private).unwrap();
        }
        chown(place.path("src/own"), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut create = OpenOptions::new();
        create.read(true).write(true).create(true).mode(0o666);
        for truncate in [false, true] {
            create.truncate(truncate);
            let open = |name| as_user(NOBODY, &[], || create.open(place.path("mnt").join(name)));
            assert_eq!(open("secret").unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(fs::read(place.path("src/secret")).unwrap(), b"secret");
            // The user's own file is opened, although the kernel took it for absent.
            open("own").unwrap();
            let left = if truncate { "" } else { "own" };
            let path = place.path("mnt/own");
            assert_eq!(print_for_nobody("cat", &[path.to_str().unwrap()]), left);
        }
        place.expect_success(&["umount", "mnt"]);
        for name in ["secret", "own"] {
            fs::remove_file(place.path("src").join(name)).unwrap();
        }
    }
}

/// A user's file in a directory like /tmp is replaced by one of root in the source. The kernel
/// still takes the name for the user's file, and permits its removal or renaming. The daemon, as
/// root, then removed root's file.
#[test]
fn a_sticky_directory_protects_a_file_that_replaced_the_users_own() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    share(&place, 0o1777);
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "allow_other,timeout=60"]);
    let own =
        |name: &str, directory: bool| {
            let path = place.path("mnt").join(name);
            as_user(NOBODY, &[], || {
                if directory { fs::create_dir(path) } else { fs::write(path, "own") }
            })
            .unwrap();
        };
    for (name, directory) in [("unlink", false), ("from", false), ("to", false), ("rmdir", true)] {
        own(name, directory);
        let path = place.path("src").join(name);
        if directory {
            fs::remove_dir(&path).unwrap();
            fs::create_dir(&path).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
            fs::write(&path, "root's").unwrap();
        }
    }
    own("mover", false);
    let at = |name: &str| place.path("mnt").join(name);
    let attempts: [(&str, &(dyn Fn() -> std::io::Result<()> + Sync)); 4] = [
        ("unlink", &|| fs::remove_file(at("unlink"))),
        ("rmdir", &|| fs::remove_dir(at("rmdir"))),
        ("from", &|| fs::rename(at("from"), at("moved"))),
        ("to", &|| fs::rename(at("mover"), at("to"))),
    ];
    for (name, attempt) in attempts {
        let result = as_user(NOBODY, &[], attempt);
        assert_eq!(result.unwrap_err().kind(), ErrorKind::PermissionDenied, "{name}");
        let path = place.path("src").join(name);
        assert_eq!(fs::metadata(&path).unwrap().uid(), 0, "{name}");
    }
    // The user's own file can be removed, and root may remove all.
    as_user(NOBODY, &[], || fs::remove_file(at("mover"))).unwrap();
    own("other", false);
    fs::rename(at("other"), at("unlink")).unwrap();
    place.expect_success(&["umount", "mnt"]);
}

/// Root takes a user's program over by chown(1) in the source. The kernel still takes the user for
/// the owner, and the daemon made the program a set-user-id program of root.
#[test]
fn a_former_owner_cannot_make_a_set_user_id_program() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    share(&place, 0o777);
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "allow_other,timeout=60"]);
    let program = place.path("mnt/program");
    let chmod = |mode| {
        as_user(NOBODY, &[], || fs::set_permissions(&program, fs::Permissions::from_mode(mode)))
    };
    as_user(NOBODY, &[], || fs::write(&program, "#!/bin/sh")).unwrap();
    chmod(0o4755).unwrap();
    chmod(0o755).unwrap();
    chown(place.path("src/program"), Some(0), Some(0)).unwrap();
    for mode in [0o4755, 0o2755, 0o6755] {
        assert_eq!(chmod(mode).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    assert_eq!(fs::metadata(place.path("src/program")).unwrap().mode() & 0o7777, 0o755);
    place.expect_success(&["umount", "mnt"]);
}

/// The user has the file open from before root took it by chown(1) in the source. fchmod(2) and the
/// like look nothing up, so that the kernel checked the owner that it had cached, however old that
/// was, and the daemon did it with its own rights.
#[test]
fn a_former_owner_changes_no_file_by_a_descriptor() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    share(&place, 0o777);
    for options in ["allow_other", "allow_other,timeout=0"] {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        let (mounted, below) = (place.path("mnt/file"), place.path("src/file"));
        as_user(NOBODY, &[], || fs::write(&mounted, "x")).unwrap();
        let file = as_user(NOBODY, &[], || fs::File::open(&mounted)).unwrap();
        chown(&below, Some(0), Some(0)).unwrap();
        fs::set_permissions(&below, fs::Permissions::from_mode(0o755)).unwrap();
        let open_to_all = || file.set_permissions(fs::Permissions::from_mode(0o777));
        let attempts: [(&str, &(dyn Fn() -> std::io::Result<()> + Sync)); 3] = [
            ("mode", &open_to_all),
            ("group", &|| std::os::unix::fs::fchown(&file, None, Some(NOBODY))),
            ("times", &|| file.set_modified(std::time::UNIX_EPOCH)),
        ];
        for (name, attempt) in attempts {
            let result = as_user(NOBODY, &[], attempt);
            assert_eq!(result.unwrap_err().kind(), ErrorKind::PermissionDenied, "{name} {options}");
        }
        let meta = fs::metadata(&below).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o755, 0), "{options}");
        // A user with the capability may, which the daemon learns from its keeper.
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let status = std::process::Command::new("setpriv")
            .args(user)
            .args(["--inh-caps=+fowner", "--ambient-caps=+fowner", "chmod", "700"])
            .arg(&mounted)
            .status();
        assert!(status.unwrap().success(), "{options}");
        assert_eq!(fs::metadata(&below).unwrap().mode() & 0o7777, 0o700, "{options}");
        drop(file);
        fs::remove_file(&below).unwrap();
        place.expect_success(&["umount", "mnt"]);
    }
}
