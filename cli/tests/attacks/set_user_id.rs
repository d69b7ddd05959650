//! Set-user-id programs on mounts.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, copy_file_range, fallocate, ftruncate};

use super::common::TestPlace;
use super::users::{NOBODY, as_user, print_for_nobody};

/// An operation that changes a file's data.
type DataChange = (&'static str, fn(&Path));

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Every operation that changes data.
const CHANGES: &[DataChange] = &[
    ("write", |path| open(path).write_at(b"x", 1 << 20).map(drop).unwrap()),
    ("append", |path| {
        OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap();
    }),
    ("direct write", |path| {
        let file = OpenOptions::new().write(true).custom_flags(0o40000).open(path);
        // O_DIRECT needs aligned memory.
        let page = Box::new(AlignedPage([7; 4096]));
        file.unwrap().write_at(&page.0, 1 << 20).map(drop).unwrap();
    }),
    ("truncate", |path| ftruncate(open(path), 1 << 21).unwrap()),
    ("allocate", |path| {
        fallocate(open(path), FallocateFlags::empty(), 0, 1 << 21).unwrap();
    }),
    ("punch a hole", |path| {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(open(path), mode, 1 << 20, 4096).unwrap();
    }),
    ("copy_file_range", |path| {
        let file = open(path);
        copy_file_range(&file, Some(&mut 0), &file, Some(&mut (1 << 20)), 100).unwrap();
    }),
];

#[repr(align(4096))]
struct AlignedPage([u8; 4096]);

/// All kinds of mounts on which the kernel caches attributes.
const MOUNTS: &[(&str, &str)] = &[
    ("memory:", "no_io_uring"),
    ("passthrough:src", "no_io_uring"),
    ("passthrough:src", "no_passthrough"),
    ("passthrough:src", "writeback"),
    ("passthrough:src", "direct_io"),
    ("passthrough:src", "exclusive,timeout=3600"),
    ("uhs:img", "no_io_uring"),
];

/// Installs a set-user-id copy of id(1), which prints its user, executable by everyone.
fn install(path: &Path) {
    let _ = fs::remove_file(path);
    // Not copied by this process: another test that forks meanwhile would inherit the copy open for
    // writing, and executing it would fail (ETXTBSY).
    let mut install = Command::new("install");
    assert!(install.args(["-m", "6777", "/usr/bin/id"]).arg(path).status().unwrap().success());
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

// An unprivileged user wrote to a set-user-id program that everyone may write. The file system
// cleared the bit, but the kernel checked the cached mode, for a second or a day, and the user's
// code ran as root.
#[test]
fn a_change_of_its_data_clears_the_set_user_id_of_a_program_at_once() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(place.path("src"), fs::Permissions::from_mode(0o777)).unwrap();
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    let program = place.path("mnt/id");
    for (source, options) in MOUNTS {
        place.expect_success(&["mount", source, "mnt", "-o", "allow_other,suid", "-o", options]);
        for (what, change) in CHANGES {
            let shown = format!("{source} {options}: {what}");
            install(&program);
            assert_eq!(print_for_nobody(&program, &["-u"]), "0", "{shown}: without an attack");
            assert_eq!(mode(&program), 0o6777, "{shown}");
            as_user(NOBODY, &[], || change(&program));
            assert_eq!(print_for_nobody(&program, &["-u"]), NOBODY.to_string(), "{shown}");
            assert_eq!(mode(&program), 0o777, "{shown}");
        }
        place.expect_success(&["umount", "mnt"]);
    }
}

// The write itself clears the bits, but until the next GETATTR the kernel would have executed the
// file by the old mode. Before the write the kernel requests a mode without the bits, by a SETATTR
// in which no field is valid. That SETATTR did nothing.
#[test]
fn the_kernel_learns_of_the_mode_without_set_user_id_before_the_data_changes() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let (program, lower) = (place.path("mnt/id"), place.path("src/id"));
    place.expect_success(&[
        "mount",
        "passthrough:src",
        "mnt",
        "-o",
        "allow_other,suid,no_passthrough",
    ]);
    install(&program);
    let file = open(&program);
    as_user(NOBODY, &[], || {
        // The offset is too large for the source. The write fails there before it clears anything.
        let _ = file.write_at(b"x", i64::MAX as u64 - 1);
    });
    assert_eq!(mode(&lower), 0o777);
    drop(file);
    place.expect_success(&["umount", "mnt"]);
}

// A chown(2) that changes nothing clears set-user-id on the owner's file, and is refused to others.
// On a mount it did nothing, and succeeded.
#[test]
fn another_user_cannot_clear_set_user_id_by_an_empty_chown() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let chown = |path: &Path| std::os::unix::fs::chown(path, None, None);
    for source in ["memory:", "passthrough:src"] {
        place.expect_success(&["mount", source, "mnt", "-o", "allow_other"]);
        let program = place.path("mnt/id");
        install(&program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
        let _ = as_user(NOBODY, &[], || chown(&program));
        assert_eq!(mode(&program), 0o6755, "{source}");
        std::os::unix::fs::chown(&program, Some(NOBODY), None).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
        as_user(NOBODY, &[], || chown(&program)).unwrap();
        assert_eq!(mode(&program), 0o755, "{source}");
        place.expect_success(&["umount", "mnt"]);
    }
}
