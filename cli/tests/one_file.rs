//! The program as a single file, without the files that an installation puts beside it.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{PROGRAM, TestPlace, from_output};

const LIBRARY: &str = "libdefuse_preload.so";

/// A user without any right.
const USER: &str = "--reuid=12345 --regid=12345 --clear-groups";

/// A copy of the program alone in a directory which all users can enter.
fn copy_alone(place: &TestPlace) -> PathBuf {
    let (dir, copy) = (place.path("bin"), place.path("bin/defuse"));
    fs::create_dir(&dir).unwrap();
    fs::copy(PROGRAM, &copy).unwrap();
    for path in [place.path(""), dir, copy.clone()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    copy
}

/// Runs a script as root with mounts of its own, and a new tmpfs at /var/cache. `None` for other
/// users.
fn script(place: &TestPlace, text: &str) -> Option<common::DefuseOutput> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root has mounts of its own");
        return None;
    }
    let text = format!("set -e; mount -t tmpfs tmpfs /var/cache; {text}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation=private", "sh", "-c", &text]);
    command.current_dir(place.path("")).env("PROGRAM", copy_alone(place)).env("AS_USER", USER);
    command.env_remove("XDG_CACHE_HOME").env_remove("XDG_RUNTIME_DIR").env_remove("HOME");
    command.env_remove("DEFUSE_PRELOAD_LIBRARY");
    Some(from_output(command.output().unwrap()))
}

fn find_unpacked(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let found = entries.map(|entry| entry.path().join(LIBRARY));
    found.filter(|path| path.exists()).collect()
}

const WORK: &str = "run --mount /m=memory: -- sh -c 'echo in the mount > /m/f; cat /m/f'";

#[test]
fn roots_run_unpacks_the_library_once_and_programs_of_other_users_have_it() {
    let place = TestPlace::new();
    let work = "run --mount /m=memory:,mode=1777 -- sh -c 'id -u; setpriv $AS_USER sh -c \"id -u; echo x > /m/f; cat /m/f\"'";
    let Some(seen) = script(
        &place,
        &format!(
            "umask 077; $PROGRAM {work}; stat -c %i /var/cache/defuse/*/{LIBRARY} > first; $PROGRAM {work}; \
             stat -c %i /var/cache/defuse/*/{LIBRARY} | cmp - first; test ! -e /m"
        ),
    ) else {
        return;
    };
    assert_eq!(
        (seen.code, seen.out.as_str()),
        (Some(0), "0\n12345\nx\n0\n12345\nx\n"),
        "{}",
        seen.err
    );
}

#[test]
fn a_user_has_the_library_in_the_own_cache() {
    let place = TestPlace::new();
    let Some(seen) = script(
        &place,
        &format!(
            "mkdir home; chown 12345 home; export HOME=$PWD/home; setpriv $AS_USER $PROGRAM {WORK}"
        ),
    ) else {
        return;
    };
    assert_eq!((seen.code, seen.out.as_str()), (Some(0), "in the mount\n"), "{}", seen.err);
    assert_eq!(find_unpacked(&place.path("home/.cache/defuse")).len(), 1);
}

/// Kinds of places in which the library cannot be kept: read-only, noexec, of another user, full.
#[test]
fn a_place_that_cannot_have_the_library_is_passed_over() {
    let place = TestPlace::new();
    let Some(seen) = script(
        &place,
        &format!(
            "mkdir cache run
             mount --bind . /mnt; cd /mnt; PROGRAM=/mnt/bin/defuse
             mount -t tmpfs -o noexec,mode=1777 tmpfs cache
             mount -t tmpfs -o size=64k,mode=1777 tmpfs run
             mount -t tmpfs -o mode=1777 tmpfs /tmp
             mkdir /tmp/defuse-12345
             mount -t tmpfs -o mode=1777 tmpfs /dev/shm
             export XDG_CACHE_HOME=$PWD/cache XDG_RUNTIME_DIR=$PWD/run
             setpriv $AS_USER $PROGRAM {WORK}
             ls /dev/shm/defuse-12345
             mount -o remount,noexec /dev/shm
             rm -r /dev/shm/*
             setpriv $AS_USER $PROGRAM {WORK}"
        ),
    ) else {
        return;
    };
    assert!(seen.out.starts_with("in the mount\nlibrary-"), "{}{}", seen.out, seen.err);
    assert_eq!(seen.code, Some(1), "{}", seen.err);
    for part in [
        "cache/defuse: it is mounted with noexec",
        "run/defuse: No space left on device",
        "/tmp/defuse-12345: ",
        "/dev/shm/defuse-12345: it is mounted with noexec",
        "set XDG_CACHE_HOME",
    ] {
        assert!(seen.err.contains(part), "{part}: {}", seen.err);
    }
}

/// A file of another build beside the program would not understand the plan of this one.
#[test]
fn a_library_of_another_build_beside_the_program_is_not_loaded() {
    let place = TestPlace::new();
    let Some(seen) = script(
        &place,
        &format!(
            "mkdir -p lib/defuse; echo other > lib/defuse/{LIBRARY}; mkdir cache; export XDG_CACHE_HOME=$PWD/cache
             $PROGRAM {WORK}; test -e /var/cache/defuse/*/{LIBRARY}"
        ),
    ) else { return };
    assert_eq!((seen.code, seen.out.as_str()), (Some(0), "in the mount\n"), "{}", seen.err);
}
