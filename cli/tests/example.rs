//! The example backend, which only the program links: `defuse mount`, `serve` and `run` open it by
//! its name.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use common::{TestPlace, eventually};

#[test]
fn a_backend_that_one_line_registers_is_mounted_by_its_name() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    assert!(place.expect_success(&["help", "options"]).contains("files=N"));
    place.expect_failure(2, &["mount", "example:", "mnt", "-o", "files=0"], "a number from 1 to");
    place.expect_failure(
        2,
        &["mount", "memory:", "mnt", "-o", "files=9"],
        "for sources of type example",
    );
    place.expect_success(&["mount", "example:", "mnt", "-o", "files=3"]);
    let (one, two) = (place.path("mnt/one"), place.path("mnt/two"));

    fs::write(&one, "first\n").unwrap();
    OpenOptions::new().append(true).open(&one).unwrap().write_all(b"second\n").unwrap();
    assert_eq!(fs::read_to_string(&one).unwrap(), "first\nsecond\n");
    fs::set_permissions(&one, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&one).unwrap().mode() & 0o7777, 0o640);

    let file = File::create_new(&two).unwrap();
    file.write_all_at(b"x", 5000).unwrap();
    file.set_len(5002).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(place.path("mnt")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["one", "two"]);
    assert_eq!(fs::write(place.path("mnt/three"), "").unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(file.write_all_at(b"x", 1 << 20).unwrap_err().kind(), ErrorKind::FileTooLarge);

    // An open file without a name keeps its bytes.
    let mut open = File::open(&two).unwrap();
    fs::remove_file(&two).unwrap();
    assert_eq!(fs::metadata(&two).unwrap_err().kind(), ErrorKind::NotFound);
    let mut bytes = Vec::new();
    open.seek(SeekFrom::Start(4999)).unwrap();
    open.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [0, b'x', 0]);
    drop((open, file));
    // The kernel forgets the inode some time after the last close.
    eventually("room for a file", || fs::write(place.path("mnt/three"), "").is_ok());
    place.expect_success(&["umount", "mnt"]);
}

/// The library that a run loads into programs does not link this backend, so the run serves it,
/// whatever becomes of a fork.
#[test]
fn a_source_that_the_preloaded_library_does_not_link_is_served_by_the_run() {
    let place = TestPlace::new();
    for fork in ["auto", "deny", "share"] {
        let script =
            "echo first > /x/file && cat /x/file && (echo second >> /x/file) && wc -l /x/file";
        let run = ["run", "--fork", fork, "--mount", "/x=example:,files=2"];
        let out = place.expect_success(&[&run[..], &["--", "bash", "-c", script]].concat());
        assert_eq!(out, "first\n2 /x/file\n", "{fork}");
    }
    place.expect_failure(
        2,
        &["run", "--mount", "/x=example:,size=1", "--", "true"],
        "known are ro, rw, files",
    );
}
