//! Set-user-id programs on mounts.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, copy_file_range, fallocate, ftruncate};

use super::common::Place;
use super::users::{NOBODY, as_user, printed_for_nobody};

/// A change of a file's data.
type Change = (&'static str, fn(&Path));

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Every way to change data.
const CHANGES: &[Change] = &[
    ("write", |path| open(path).write_at(b"x", 1 << 20).map(drop).unwrap()),
    ("append", |path| {
        OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap();
    }),
    ("direct write", |path| {
        let file = OpenOptions::new().write(true).custom_flags(0o40000).open(path);
        // Aligned memory, which O_DIRECT wants.
        let page = Box::new(Page([7; 4096]));
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
struct Page([u8; 4096]);

/// Mounts of every kind on which the kernel keeps attributes.
const MOUNTS: &[(&str, &str)] = &[
    ("memory:", "no_io_uring"),
    ("passthrough:src", "no_io_uring"),
    ("passthrough:src", "no_passthrough"),
    ("passthrough:src", "writeback"),
    ("passthrough:src", "direct_io"),
    ("passthrough:src", "exclusive,timeout=3600"),
];

/// A copy of id(1), which tells as whom it runs, for everyone to execute with the rights of root.
fn install(path: &Path) {
    let _ = fs::remove_file(path);
    // Not copied by this process: another test that forks meanwhile would keep the copy open for writing,
    // and it could not be run (ETXTBSY).
    let mut install = Command::new("install");
    assert!(install.args(["-m", "6777", "/usr/bin/id"]).arg(path).status().unwrap().success());
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

// An unprivileged user wrote to a set-user-id program that everyone may write. The file system
// cleared the bit, but the kernel executed by the mode that it had cached, for a second or for a
// day, and what the user had written ran as root.
#[test]
fn a_change_of_its_data_ends_the_set_user_id_of_a_program_at_once() {
    let Some(place) = Place::to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(place.path("src"), fs::Permissions::from_mode(0o777)).unwrap();
    let program = place.path("mnt/id");
    for (source, options) in MOUNTS {
        place.ok(&["mount", source, "mnt", "-o", "allow_other,suid", "-o", options]);
        for (what, change) in CHANGES {
            let shown = format!("{source} {options}: {what}");
            install(&program);
            assert_eq!(printed_for_nobody(&program, &["-u"]), "0", "{shown}: without an attack");
            assert_eq!(mode(&program), 0o6777, "{shown}");
            as_user(NOBODY, &[], || change(&program));
            assert_eq!(printed_for_nobody(&program, &["-u"]), NOBODY.to_string(), "{shown}");
            assert_eq!(mode(&program), 0o777, "{shown}");
        }
        place.ok(&["umount", "mnt"]);
    }
}

// The write itself clears the bits, so that between it and the next question for attributes the
// kernel would still have executed by the old mode. It asks for a mode without the bits first, with
// a SETATTR in which nothing is valid, which did nothing.
#[test]
fn the_kernel_learns_of_the_mode_without_set_user_id_before_the_data_changes() {
    let Some(place) = Place::to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let (program, lower) = (place.path("mnt/id"), place.path("src/id"));
    place.ok(&["mount", "passthrough:src", "mnt", "-o", "allow_other,suid,no_passthrough"]);
    install(&program);
    let file = open(&program);
    as_user(NOBODY, &[], || {
        // The source has no file so large: the write fails there before it clears anything.
        let _ = file.write_at(b"x", i64::MAX as u64 - 1);
    });
    assert_eq!(mode(&lower), 0o777);
    drop(file);
    place.ok(&["umount", "mnt"]);
}

// chown(2) that changes nothing takes set-user-id away from the owner's file, and is refused to
// others: on a mount it did nothing, and succeeded.
#[test]
fn a_stranger_cannot_take_set_user_id_away_by_a_chown_of_nothing() {
    let Some(place) = Place::to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let chown = |path: &Path| std::os::unix::fs::chown(path, None, None);
    for source in ["memory:", "passthrough:src"] {
        place.ok(&["mount", source, "mnt", "-o", "allow_other"]);
        let program = place.path("mnt/id");
        install(&program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
        let _ = as_user(NOBODY, &[], || chown(&program));
        assert_eq!(mode(&program), 0o6755, "{source}");
        std::os::unix::fs::chown(&program, Some(NOBODY), None).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)).unwrap();
        as_user(NOBODY, &[], || chown(&program)).unwrap();
        assert_eq!(mode(&program), 0o755, "{source}");
        place.ok(&["umount", "mnt"]);
    }
}
