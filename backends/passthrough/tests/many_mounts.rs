//! A daemon meets more file systems below its source in its life than its table has places.
//!
//! The places of mounts that had gone were never used again: after 1,024 mounts every lookup on a
//! new one failed with ENFILE.

mod common;

use std::fs;
use std::path::Path;

use common::*;
use defuse_fs::*;
use defuse_passthrough::{FileHandles, PassthroughOptions};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// More than the table has places.
const MOUNTS: usize = 1100;

/// Mounts a tmpfs with the file `file`, which contains `text`. False without permission.
fn mount_with(at: &Path, text: &str) -> bool {
    if mount("none", at, "tmpfs", MountFlags::empty(), Some(c"size=64k")).is_err() {
        eprintln!("skipped: no permission to mount");
        return false;
    }
    fs::write(at.join("file"), text).unwrap();
    true
}

fn detach(at: &Path) {
    unmount(at, UnmountFlags::DETACH).unwrap();
}

fn read(served: &ServedDirectory, ino: Ino) -> Result<Vec<u8>> {
    let file = served.open(ino, 0)?;
    let text = served.read(file, 0, 100);
    served.release(file);
    text
}

/// Looks `text` and the file in it up, reads that file, and returns both inodes.
fn look(served: &ServedDirectory, text: &str) -> Result<[Ino; 2]> {
    let root = served.lookup(text)?.ino;
    let file = served.fs.lookup(&own_context(), root, name("file"))?.ino;
    Ok([root, file])
}

fn options(file_handles: FileHandles) -> PassthroughOptions {
    PassthroughOptions { file_handles, ..PassthroughOptions::default() }
}

#[test]
fn any_number_of_file_systems_is_mounted_and_unmounted_below_the_source() {
    if !is_root() {
        return;
    }
    for (file_handles, forgets) in
        [(FileHandles::Auto, true), (FileHandles::Auto, false), (FileHandles::Off, true)]
    {
        let served = ServedDirectory::new(Path::new("/dev/shm"), options(file_handles));
        let at = served.path("below");
        fs::create_dir(&at).unwrap();
        let mut known = Vec::new();
        for number in 0..MOUNTS {
            let text = number.to_string();
            if !mount_with(&at, &text) {
                return;
            }
            let inodes = look(&served, "below").unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(read(&served, inodes[1]).unwrap(), text.as_bytes());
            detach(&at);
            if forgets {
                inodes.iter().for_each(|ino| served.fs.forget(*ino, 1));
            } else {
                known.push((inodes[1], text));
            }
        }
        // A number of before leads to no file of another mount.
        assert!(mount_with(&at, "last"));
        let last = look(&served, "below").unwrap();
        for (ino, text) in &known {
            let found = read(&served, *ino);
            assert!(found.is_err() || found == Ok(text.clone().into_bytes()), "{text}: {found:?}");
        }
        assert_eq!(read(&served, last[1]).unwrap(), b"last");
        detach(&at);
        fs::remove_dir(&at).unwrap();
    }
}

/// Mounts that stay, at places of their own: those that nobody uses make room, and are met again
/// later.
#[test]
fn unused_file_systems_make_room_for_others_and_are_met_again() {
    if !is_root() {
        return;
    }
    let served = ServedDirectory::new(Path::new("/dev/shm"), options(FileHandles::Auto));
    let below = |number: usize| format!("m{number}");
    let mut mounted = Vec::new();
    let mut outcome = Ok(());
    for number in 0..MOUNTS {
        let at = served.path(&below(number));
        fs::create_dir(&at).unwrap();
        if !mount_with(&at, &below(number)) {
            break;
        }
        mounted.push(at);
        match look(&served, &below(number)) {
            Ok(inodes) if number > 9 => inodes.iter().for_each(|ino| served.fs.forget(*ino, 1)),
            Ok(_) => {}
            Err(error) => outcome = Err((number, error)),
        }
    }
    let numbers: Vec<_> = mounted.iter().map(|at| fs::metadata(at.join("file")).unwrap()).collect();
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert_eq!(outcome, Ok(()));
        for number in 0..numbers.len() {
            let inodes = look(&served, &below(number)).unwrap();
            assert_eq!(read(&served, inodes[1]).unwrap(), below(number).as_bytes());
            inodes.iter().for_each(|ino| served.fs.forget(*ino, 1));
        }
    }));
    mounted.iter().for_each(|at| detach(at));
    checked.unwrap();
}

/// As many mounts as there are places are in use at once: a further one is refused, and served when
/// another one has gone.
#[test]
fn a_file_system_beyond_the_table_is_refused_until_another_one_has_gone() {
    if !is_root() {
        return;
    }
    let served = ServedDirectory::new(Path::new("/dev/shm"), options(FileHandles::Auto));
    let below = |number: usize| format!("m{number}");
    let mut mounted = Vec::new();
    let mut found = Vec::new();
    for number in 0..MOUNTS {
        let at = served.path(&below(number));
        fs::create_dir(&at).unwrap();
        if !mount_with(&at, &below(number)) {
            break;
        }
        mounted.push(at);
        found.push(look(&served, &below(number)));
    }
    let refused = found.iter().position(|found| found.is_err());
    if let Some(at) = mounted.first() {
        detach(at);
    }
    // Searches for a free place take a tenth of the time at most.
    let look_patiently = |number: usize| {
        let looks = (0..1000).map(|_| {
            let found = look(&served, &below(number));
            if found.is_err() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            found
        });
        looks.into_iter().find(|found| found.is_ok()).unwrap_or(Err(Errno::ENFILE))
    };
    let again = refused.map(look_patiently);
    let read = again.map(|inodes| inodes.and_then(|inodes| read(&served, inodes[1])));
    mounted.iter().skip(1).for_each(|at| detach(at));
    if mounted.len() == MOUNTS {
        assert_eq!(refused, Some(1023));
        assert_eq!(found[1023], Err(Errno::ENFILE));
        assert_eq!(read, Some(Ok(b"m1023".to_vec())));
    }
}
