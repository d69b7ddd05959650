//! `defuse fuse`: programs of libfuse 2 and 3, of our own and of Debian, with the libraries of this
//! program.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{TestPlace, compile, eventually};
use rustix::process::{Pid, Signal, kill_process};

const DIRECTORY: &str = include_str!("libfuse/directory.c");
const INODES: &str = include_str!("libfuse/inodes.c");
const SESSIONS: &str = include_str!("libfuse/sessions.c");

/// The symbols that Debian's packages of 2.9.9 and 3.14.0 list, but those without a version.
const SYMBOLS: [(&str, &str); 2] = [
    ("libfuse.so.2", include_str!("libfuse/symbols2.txt")),
    ("libfuse3.so.3", include_str!("libfuse/symbols3.txt")),
];

/// The directory of the libraries, from a program that `defuse fuse` starts.
fn libraries(place: &TestPlace) -> PathBuf {
    let found = place.run(&["fuse", "--", "sh", "-c", "echo $LD_LIBRARY_PATH"]);
    assert_eq!(found.code, Some(0), "{}", found.err);
    assert!(found.err.contains("names no libfuse"), "{}", found.err);
    PathBuf::from(found.out.trim().split(':').next().unwrap())
}

/// A program for libfuse 2 or 3.
fn program_of(place: &TestPlace, name: &str, source: &str, version: u8) -> Option<PathBuf> {
    let library = if version == 2 { "libfuse.so.2" } else { "libfuse3.so.3" };
    let search = format!("-L{}", libraries(place).display());
    let two = if version == 2 { "-DTWO" } else { "-UTWO" };
    let options = [two, &search, &format!("-l:{library}"), "-lpthread"];
    compile(place, &format!("{name}{version}"), source, &options)
}

/// A program over a directory, for libfuse 2 or 3.
fn directory_program(place: &TestPlace, version: u8) -> Option<PathBuf> {
    program_of(place, "directory", DIRECTORY, version)
}

/// Starts the program of the interface of inodes, with these variables.
fn start_inodes(place: &TestPlace, program: &Path, variables: &[(&str, &str)]) -> Child {
    let mut command = place.command(&["fuse", "--", program.to_str().unwrap(), "mnt"]);
    let command = command.envs(variables.iter().copied()).stdout(Stdio::piped());
    let child = command.stderr(Stdio::null()).spawn().unwrap();
    eventually("mounted", || is_mounted(&place.path("mnt")));
    child
}

/// The output of such a program at its end, after an orderly unmount.
fn said_at_end(place: &TestPlace, child: Child) -> String {
    assert!(Command::new("umount").arg(place.path("mnt")).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Starts a program in the foreground through `defuse fuse`, and waits for its mount.
fn start(place: &TestPlace, words: &[&str], hard: bool) -> Child {
    let mut command = place.command(&[&["fuse", "--"], words].concat());
    command.env("DIRECTORY", place.path("src")).env("WAIT", place.path("destroyed"));
    if words.contains(&"-s") {
        command.env("ALONE", "1");
    }
    if hard {
        command.env("HARD", "1");
    }
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("mounted", || is_mounted(&place.path("mnt")));
    child
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == path.to_str())
}

/// Ends what a failed test leaves.
struct MountGuard(PathBuf);

impl Drop for MountGuard {
    fn drop(&mut self) {
        if is_mounted(&self.0) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

#[test]
fn the_libraries_have_every_symbol_of_libfuse_with_its_version() {
    let place = TestPlace::new();
    let directory = libraries(&place);
    for (library, expected) in SYMBOLS {
        let mut nm = Command::new("nm");
        nm.args(["-D", "--defined-only", "--with-symbol-versions"]).arg(directory.join(library));
        let Ok(output) = nm.output() else {
            println!("skipped: nm is not there");
            return;
        };
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let found: BTreeSet<String> = text
            .lines()
            .filter_map(|line| line.split(' ').nth(2))
            .filter(|symbol| symbol.contains("@FUSE_") || symbol.contains("@@FUSE_"))
            .filter(|symbol| !symbol.starts_with("FUSE_"))
            .map(|symbol| symbol.replace("@@", "@"))
            .collect();
        let expected: BTreeSet<String> = expected.lines().map(str::to_owned).collect();
        assert!(expected.len() > 150, "{library}");
        assert_eq!(found, expected, "{library}");
    }
}

#[test]
fn a_program_of_either_version_serves_its_directory() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let (mnt, src) = (place.path("mnt"), place.path("src"));
    let _guard = MountGuard(mnt.clone());
    for (version, hard) in [(2, false), (3, false), (3, true)] {
        let Some(program) = directory_program(&place, version) else { return };
        let shown = format!("fuse.directory{version}");
        for threads in [&["-f"][..], &["-f", "-s"]] {
            let words = [&[program.to_str().unwrap()], threads, &["mnt"]].concat();
            let mut child = start(&place, &words, hard);
            let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
            assert!(mounts.lines().any(|line| line.contains(&shown)), "{mounts}");
            use_files(&mnt, &src, hard);
            assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
            assert!(child.wait().unwrap().success());
            // `destroy` got what `init` had returned.
            fs::remove_file(place.path("destroyed")).unwrap();
        }
    }
}

/// Changes files in the mount, and compares them with the directory behind it.
fn use_files(mnt: &Path, src: &Path, hard: bool) {
    let data: Vec<u8> = (0..3_000_001_u32).map(|at| (at ^ (at >> 9)) as u8).collect();
    fs::create_dir(mnt.join("dir")).unwrap();
    fs::write(mnt.join("dir/large"), &data).unwrap();
    assert!(fs::read(src.join("dir/large")).unwrap() == data);
    assert!(fs::read(mnt.join("dir/large")).unwrap() == data);
    fs::write(mnt.join("dir/small"), "text").unwrap();
    symlink("small", mnt.join("dir/link")).unwrap();
    assert_eq!(fs::read_link(src.join("dir/link")).unwrap(), Path::new("small"));
    fs::hard_link(mnt.join("dir/small"), mnt.join("dir/other")).unwrap();
    assert_eq!(fs::metadata(src.join("dir/small")).unwrap().nlink(), 2);
    fs::set_permissions(mnt.join("dir/small"), Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(src.join("dir/small")).unwrap().mode() & 0o7777, 0o640);

    // Types of entries, which the program gives for every other one.
    let kinds: BTreeSet<(String, bool)> = fs::read_dir(mnt.join("dir"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| {
            (entry.file_name().into_string().unwrap(), entry.file_type().unwrap().is_file())
        })
        .collect();
    let expected = [("large", true), ("small", true), ("link", false), ("other", true)];
    assert_eq!(kinds, expected.map(|(name, is_file)| (name.to_owned(), is_file)).into());
    let root = fs::read_dir(mnt).unwrap().next().unwrap().unwrap();
    assert!(root.file_type().unwrap().is_dir());

    // A directory is renamed while a file in it is open and written.
    let open = OpenOptions::new().read(true).write(true).open(mnt.join("dir/small")).unwrap();
    fs::rename(mnt.join("dir"), mnt.join("moved")).unwrap();
    open.write_all_at(b"T", 0).unwrap();
    open.set_len(6).unwrap();
    assert_eq!(fs::read(src.join("moved/small")).unwrap(), b"Text\0\0");
    assert_eq!(open.metadata().unwrap().len(), 6);
    open.set_times(fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH)).unwrap();
    assert_eq!(fs::metadata(src.join("moved/other")).unwrap().mtime(), 0);

    // An open file is removed: it is hidden until it is closed, or removed at once.
    let mut lost =
        File::options().read(true).write(true).create_new(true).open(mnt.join("lost")).unwrap();
    lost.write_all(b"still").unwrap();
    fs::remove_file(mnt.join("lost")).unwrap();
    assert_eq!(fs::metadata(mnt.join("lost")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let left = fs::read_dir(src).unwrap().count();
    assert_eq!(
        left,
        if hard { 1 } else { 2 },
        "{:?}",
        fs::read_dir(src).unwrap().collect::<Vec<_>>()
    );
    let mut text = [0; 5];
    lost.read_exact_at(&mut text, 0).unwrap();
    assert_eq!((&text, lost.metadata().unwrap().len()), (b"still", 5));
    drop((lost, open));
    fs::remove_dir_all(mnt.join("moved")).unwrap();
    eventually("nothing is left", || fs::read_dir(src).unwrap().next().is_none());
    assert_eq!(fs::remove_dir(mnt.join("moved")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn threads_rename_and_write_at_the_same_time() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let (mnt, src) = (place.path("mnt"), place.path("src"));
    let _guard = MountGuard(mnt.clone());
    let Some(program) = directory_program(&place, 3) else { return };
    let mut child = start(&place, &[program.to_str().unwrap(), "-f", "mnt"], false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mnt = &mnt;
            scope.spawn(move || {
                let dir = |round: u32| mnt.join(format!("{thread}-{round}"));
                fs::create_dir(dir(0)).unwrap();
                let file = File::create(dir(0).join("file")).unwrap();
                for round in 0..100 {
                    fs::rename(dir(round), dir(round + 1)).unwrap();
                    file.write_all_at(&round.to_le_bytes(), u64::from(round) * 4).unwrap();
                    assert!(fs::metadata(dir(round + 1).join("file")).unwrap().is_file());
                }
            });
        }
    });
    for thread in 0..4 {
        let data = fs::read(src.join(format!("{thread}-100/file"))).unwrap();
        let expected: Vec<u8> = (0..100_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(data, expected);
    }
    assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_a_program_and_its_mount_with_the_exit_code_of_libfuse() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    for (version, code) in [(2, 0), (3, 8)] {
        let Some(program) = directory_program(&place, version) else { return };
        let mut child = start(&place, &[program.to_str().unwrap(), "-f", "mnt"], false);
        // A file that is open does not keep the mount.
        let open = File::create(mnt.join("open")).unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!(!is_mounted(&mnt));
        assert!(open.metadata().is_err() && place.path("destroyed").exists());
        fs::remove_file(place.path("src/open")).unwrap();
    }
}

#[test]
fn a_program_goes_into_the_background_when_its_mount_is_there() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    for version in [2, 3] {
        let Some(program) = directory_program(&place, version) else { return };
        let mut command =
            place.command(&["fuse", "--", program.to_str().unwrap(), "mnt", "-o", "ro"]);
        command.env("DIRECTORY", place.path("src")).env("WAIT", place.path("destroyed"));
        // The pipe ends only when the process in the background has given it up.
        let said = command.output().unwrap();
        assert!(said.status.success(), "{said:?}");
        assert!(is_mounted(&mnt) && fs::read_dir(&mnt).unwrap().next().is_none());
        let refused = fs::create_dir(mnt.join("x")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
        eventually("its end", || fs::remove_file(place.path("destroyed")).is_ok());
    }
}

#[test]
fn wrong_command_lines_have_the_exit_codes_and_reasons_of_libfuse() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let cases: &[(&[&str], [i32; 2], &str)] = &[
        (&[], [1, 2], "mountpoint"),
        (&["-h"], [1, 0], ""),
        (&["-V"], [1, 0], ""),
        (&["mnt", "-o", "nosuch"], [1, 3], "unknown option(s): `nosuch'"),
        (&["mnt", "-o", "modules=subdir"], [1, 3], "not served by this library"),
        (&["nothere"], [1, 1], "bad mount point `nothere'"),
        (&["mnt", "extra"], [1, 1], "invalid argument `extra'"),
        (&["src/fifo"], [1, 4], "is not a directory"),
        (&["mnt", "-o", "blkdev"], [1, 3], "not served by this library"),
    ];
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, place.path("src/fifo"), fifo, 0o600.into(), 0).unwrap();
    for version in [2, 3] {
        let Some(program) = directory_program(&place, version) else { return };
        for (words, codes, text) in cases {
            let words = [&["fuse", "--", program.to_str().unwrap()], *words].concat();
            let output = place.command(&words).env("DIRECTORY", "/").output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let code = codes[usize::from(version) - 2];
            assert_eq!(output.status.code(), Some(code), "{version} {words:?}: {said}");
            assert!(said.contains(text), "{version} {words:?}: {said}");
        }
    }
    assert!(!is_mounted(&place.path("mnt")));
}

#[test]
fn a_program_of_inodes_serves_its_files_by_each_kind_of_loop() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let data: Vec<u8> = (0..3_000_001_u32).map(|at| (at ^ (at >> 9)) as u8).collect();
    for (version, ways) in [2, 3].into_iter().flat_map(|v| ["one", "many", "own"].map(|w| (v, w))) {
        let Some(program) = program_of(&place, "inodes", INODES, version) else { return };
        for more in [&[("LATE", "1"), ("BUFFERS", "1")][..], &[]] {
            let mut child = start_inodes(&place, &program, &[&[("LOOP", ways)], more].concat());
            fs::write(mnt.join("large"), &data).unwrap();
            fs::write(mnt.join("small"), "text").unwrap();
            let mut reading: Vec<_> =
                (0..4).map(|_| File::open(mnt.join("large")).unwrap()).collect();
            std::thread::scope(|scope| {
                for file in &mut reading {
                    let data = &data;
                    scope.spawn(move || {
                        let mut read = Vec::new();
                        std::io::Read::read_to_end(file, &mut read).unwrap();
                        assert!(read == *data);
                    });
                }
            });
            drop(reading);
            let small = OpenOptions::new().write(true).open(mnt.join("small")).unwrap();
            small.set_len(6).unwrap();
            small.set_permissions(Permissions::from_mode(0o640)).unwrap();
            assert_eq!(small.metadata().unwrap().mode() & 0o7777, 0o640);
            drop(small);
            assert_eq!(fs::read(mnt.join("small")).unwrap(), b"text\0\0");
            let names: BTreeSet<_> =
                fs::read_dir(&mnt).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["large", "small"].map(Into::into).into());
            fs::remove_file(mnt.join("large")).unwrap();
            let gone = fs::read(mnt.join("large")).unwrap_err();
            assert_eq!(gone.kind(), std::io::ErrorKind::NotFound);
            assert!(child.try_wait().unwrap().is_none());
            assert_eq!(said_at_end(&place, child), "0 1 0\n", "{version} {ways}");
        }
    }
}

fn set_attribute(path: &Path, name: &str, value: &str) -> rustix::io::Result<()> {
    rustix::fs::setxattr(path, name, value.as_bytes(), rustix::fs::XattrFlags::empty())
}

fn attribute(path: &Path, name: &str) -> String {
    let mut room = [0; 64];
    let len = rustix::fs::getxattr(path, name, &mut room).unwrap();
    String::from_utf8(room[..len].to_vec()).unwrap()
}

#[test]
fn a_program_of_inodes_tells_the_kernel_of_changes_and_takes_its_pages() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    for version in [2, 3] {
        let Some(program) = program_of(&place, "inodes", INODES, version) else { return };
        let child = start_inodes(&place, &program, &[]);
        let path = mnt.join("file");
        let read = || fs::read_to_string(&path).unwrap();
        fs::write(&path, "before").unwrap();
        assert_eq!(read(), "before");
        set_attribute(&path, "user.hidden", "after!").unwrap();
        set_attribute(&path, "user.inval", "").unwrap();
        assert_eq!(read(), "after!");
        set_attribute(&path, "user.store", "stored").unwrap();
        assert_eq!(read(), "stored");
        set_attribute(&path, "user.retrieve", "").unwrap();
        eventually("pages", || attribute(&path, "user.retrieved") == "1 stored");
        let refused = set_attribute(&path, "user.other", "").unwrap_err();
        assert_eq!(refused, rustix::io::Errno::OPNOTSUPP);
        assert_eq!(said_at_end(&place, child), "0 1 0\n");
    }
}

/// A second reply, a reply after the unmount, one after the end of the session, and none at all.
#[test]
fn replies_that_a_program_of_inodes_must_not_give_are_errors() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let all = [2, 3].into_iter().flat_map(|v| ["one", "many"].map(|w| (v, w)));
    for (version, ways) in all {
        let Some(program) = program_of(&place, "inodes", INODES, version) else { return };
        let child = start_inodes(&place, &program, &[("LOOP", ways)]);
        let path = mnt.join("file");
        fs::write(&path, "text").unwrap();
        set_attribute(&path, "user.twice", "").unwrap();
        // The caller continues at the first reply.
        eventually("the other replies", || attribute(&path, "user.answer") == "-22 -22 1");
        // Without an answer, the call waits until the device is closed.
        let waiting = std::thread::spawn(move || set_attribute(&path, "user.never", ""));
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(!waiting.is_finished());
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        let expected = if version == 2 { "0 1 -22\n" } else { "unmounted 1\n15 1 -22\n" };
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{version} {ways}");
        assert!(waiting.join().unwrap().is_err() && !is_mounted(&mnt));
    }
}

/// A call that a signal ends after a while.
const INTERRUPTED_CALL: &str = "\
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
signal.setitimer(signal.ITIMER_REAL, 0.2)
os.setxattr(sys.argv[1], 'user.slow', b'')
";

#[test]
fn a_signal_of_the_caller_reaches_the_function_of_its_request() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let Some(program) = program_of(&place, "inodes", INODES, 3) else { return };
    // With one thread, the program has returned without an answer.
    for ways in ["one", "many"] {
        let child = start_inodes(&place, &program, &[("LOOP", ways)]);
        let mut waiting = Command::new("python3");
        match waiting.args(["-c", INTERRUPTED_CALL]).arg(&mnt).status() {
            Ok(status) => assert_eq!(status.code(), Some(7)),
            Err(_) => println!("skipped: python3 is not there"),
        }
        assert_eq!(said_at_end(&place, child), "0 1 0\n");
    }
}

/// Operations that the structure does not have are missing, and later ones are left out.
#[test]
fn structures_of_inodes_may_be_shorter_and_longer() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    for version in [2, 3] {
        let Some(program) = program_of(&place, "inodes", INODES, version) else { return };
        // Up to `removexattr`: files are made by mknod(2) and opened.
        for size in ["240", "512"] {
            let child = start_inodes(&place, &program, &[("SIZE", size)]);
            fs::write(mnt.join("file"), "text").unwrap();
            assert_eq!(fs::read_to_string(mnt.join("file")).unwrap(), "text");
            assert_eq!(said_at_end(&place, child), "0 1 0\n");
        }
    }
}

#[test]
fn interfaces_that_are_not_served_fail_with_their_reason() {
    let place = TestPlace::new();
    let search = format!("-L{}", libraries(&place).display());
    let options = [search.as_str(), "-l:libfuse3.so.3"];
    let Some(program) = compile(&place, "sessions", SESSIONS, &options) else { return };
    let said = place.run(&["fuse", "--", program.to_str().unwrap()]);
    assert_eq!((said.code, &said.out[..]), (Some(0), "1 -1 -1 -1\n1 -38 -22\n"));
    assert!(said.err.contains("answered before") && said.err.contains("CUSE"), "{}", said.err);
}

#[test]
fn the_report_has_the_functions_of_a_program_and_says_which_are_served() {
    let place = TestPlace::new();
    let search = format!("-L{}", libraries(&place).display());
    let code = "int fuse_version(void); void cuse_lowlevel_new(void); \
        int main(void) { cuse_lowlevel_new(); return fuse_version(); }";
    let options = [search.as_str(), "-l:libfuse3.so.3"];
    let Some(program) = compile(&place, "program", code, &options) else { return };
    let program = program.to_str().unwrap();
    let json = place.expect_success(&["fuse", "--report", "--json", "--", program]);
    let rows: serde_json::Value = serde_json::from_str(&json).unwrap();
    let row = |at: usize, key: &str| rows[at][key].clone();
    assert_eq!((row(0, "function"), row(0, "served")), ("cuse_lowlevel_new".into(), false.into()));
    assert_eq!((row(1, "function"), row(1, "served")), ("fuse_version".into(), true.into()));
    assert_eq!((row(1, "library"), row(1, "file")), ("libfuse3.so.3".into(), program.into()));
    assert_eq!(rows.as_array().unwrap().len(), 2);
    let table = place.expect_success(&["fuse", "--report", "--", program, "mnt"]);
    assert!(table.contains("cuse_lowlevel_new  no") && table.lines().count() == 3, "{table}");
    let script = place.path("script");
    fs::write(&script, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let words = ["fuse", "--report", "--", script.to_str().unwrap()];
    place.expect_failure(1, &words, "name a program of ELF");
}

#[test]
fn a_program_that_the_libraries_cannot_serve_is_refused_with_the_reason() {
    let place = TestPlace::new();
    place.expect_failure(1, &["fuse", "--", "no-such-program"], "is it installed, and in PATH?");
    if let Some(program) = compile(&place, "static", "int main(void) { return 0; }", &["-static"]) {
        place.expect_failure(1, &["fuse", "--", program.to_str().unwrap()], "is linked statically");
    }
    for (directory, says) in [
        ("/nonexistent", "libfuse.so.2 is not there"),
        ("/tmp/a:b", "can name no directory"),
        ("/tmp/$LIB", "can name no directory"),
    ] {
        let mut command = place.command(&["fuse", "--", "true"]);
        let said = command.env("DEFUSE_LIBFUSE_DIRECTORY", directory).output().unwrap();
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(!said.status.success() && text.contains(says), "{text}");
    }
}

/// The loader looks there before it looks at LD_LIBRARY_PATH, so that the program would use the
/// other library without a word.
#[test]
fn a_program_with_a_path_to_its_own_libfuse_is_refused() {
    let place = TestPlace::new();
    let own = place.path("own");
    fs::create_dir(&own).unwrap();
    fs::copy(libraries(&place).join("libfuse3.so.3"), own.join("libfuse3.so.3")).unwrap();
    let search = format!("-L{}", own.display());
    let code = "int fuse_version(void); int main(void) { return fuse_version() == 0; }";
    for (tags, path, code_of) in [
        ("-Wl,--disable-new-dtags", own.to_str().unwrap(), Some(1)),
        ("-Wl,--disable-new-dtags", "$ORIGIN/own", Some(1)),
        ("-Wl,--disable-new-dtags", "/nonexistent", Some(0)),
        ("-Wl,--enable-new-dtags", "$ORIGIN/own", Some(0)),
    ] {
        let path = format!("-Wl,-rpath,{path}");
        let options = [&search, "-l:libfuse3.so.3", tags, &path];
        let Some(program) = compile(&place, "program", code, &options) else { return };
        let said = place.run(&["fuse", "--", program.to_str().unwrap()]);
        assert_eq!(said.code, code_of, "{tags} {path}: {}", said.err);
        assert_eq!(said.err.contains("DT_RPATH"), code_of == Some(1), "{}", said.err);
    }
}

/// The loader ignores LD_LIBRARY_PATH for such programs, which would use the original library
/// without a word.
#[test]
fn a_program_that_gains_rights_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("not here: only root makes such programs");
    }
    let place = TestPlace::new();
    let program = place.path("program");
    let copied = || fs::copy("/bin/true", &program).unwrap();
    let starts = || place.run(&["fuse", "--", program.to_str().unwrap()]);
    for (owner, group, mode) in [(1, 0, 0o4755), (0, 1, 0o2755), (1, 1, 0o6755)] {
        copied();
        std::os::unix::fs::chown(&program, Some(owner), Some(group)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        let said = starts();
        assert!(
            said.code == Some(1) && said.err.contains("ignores LD_LIBRARY_PATH"),
            "{}",
            said.err
        );
        fs::remove_file(&program).unwrap();
    }
    // Its owner gains nothing by it.
    copied();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    assert_eq!(starts().code, Some(0));
}

/// Reads the files that a program of Debian shows, and changes them where that is possible.
fn use_debian_files(mnt: &Path, name: &str) {
    assert_eq!(fs::read_to_string(mnt.join("f")).unwrap(), "hello", "{name}");
    assert_eq!(fs::read_to_string(mnt.join("d/inner")).unwrap(), "inner", "{name}");
    assert!(fs::read(mnt.join("big")).unwrap() == vec![7; 1_500_001], "{name}");
    assert_eq!(fs::read_link(mnt.join("l")).unwrap(), Path::new("f"), "{name}");
    let names: BTreeSet<_> =
        fs::read_dir(mnt).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(["big", "d", "f", "l"].iter().all(|name| names.contains(std::ffi::OsStr::new(name))));
    if !name.starts_with("squashfuse") {
        fs::create_dir(mnt.join("new")).unwrap();
        fs::write(mnt.join("new/x"), "written").unwrap();
        fs::rename(mnt.join("new/x"), mnt.join("new/y")).unwrap();
        assert_eq!(fs::read_to_string(mnt.join("new/y")).unwrap(), "written", "{name}");
        fs::remove_file(mnt.join("new/y")).unwrap();
        fs::remove_dir(mnt.join("new")).unwrap();
    }
}

/// Debian's programs: each over the same files, and what is written through it is in the directory
/// or image behind.
#[test]
fn programs_of_debian_serve_what_they_serve_with_libfuse() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let src = place.path("src");
    fs::create_dir(src.join("d")).unwrap();
    fs::write(src.join("d/inner"), "inner").unwrap();
    fs::write(src.join("f"), "hello").unwrap();
    fs::write(src.join("big"), vec![7; 1_500_001]).unwrap();
    symlink("f", src.join("l")).unwrap();
    let union = format!("{}=RW", src.display());
    let overlay = "lowerdir=src,upperdir=upper,workdir=work".to_owned();
    let programs: &[(&str, &[&str], &[&str])] = &[
        ("bindfs", &[], &["bindfs", "src", "mnt"]),
        ("unionfs-fuse", &[], &["unionfs-fuse", "-o", "cow", &union, "mnt"]),
        (
            "archivemount",
            &["tar", "cf", "a.tar", "-C", "src", "."],
            &["archivemount", "a.tar", "mnt", "-o", "nobackup"],
        ),
        (
            "squashfuse",
            &["mksquashfs", "src", "a.sqfs", "-quiet", "-noappend"],
            &["squashfuse", "a.sqfs", "mnt"],
        ),
        (
            "squashfuse_ll",
            &["mksquashfs", "src", "a.sqfs", "-quiet", "-noappend"],
            &["squashfuse_ll", "a.sqfs", "mnt"],
        ),
        ("fuse-overlayfs", &["mkdir", "upper", "work"], &["fuse-overlayfs", "-o", &overlay, "mnt"]),
        (
            "fuse2fs",
            &["mkfs.ext4", "-q", "-d", "src", "a.ext4", "8M"],
            &["fuse2fs", "a.ext4", "mnt"],
        ),
    ];
    for (name, before, words) in programs {
        let is_there = |program: &str| {
            let path = std::env::var("PATH").unwrap_or_default();
            path.split(':').chain(["/usr/sbin"]).any(|dir| Path::new(dir).join(program).exists())
        };
        if !is_there(name) || before.first().is_some_and(|tool| !is_there(tool)) {
            println!("skipped: {name} is not installed");
            continue;
        }
        if let Some((tool, words)) = before.split_first() {
            let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
            let mut make = place.command_of(Path::new(tool), words);
            assert!(
                make.env("PATH", path).stdout(Stdio::null()).status().unwrap().success(),
                "{name}"
            );
        }
        let said = place.run(&[&["fuse", "--"], *words].concat());
        assert_eq!(said.code, Some(0), "{name}: {}", said.err);
        eventually(name, || is_mounted(&mnt));
        use_debian_files(&mnt, name);
        assert!(Command::new("umount").arg(&mnt).status().unwrap().success(), "{name}");
    }
}

/// qemu receives the messages by itself, and mounts on a regular file.
#[test]
fn qemu_exports_an_image_as_a_file() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let (image, file) = (place.path("image"), place.path("file"));
    let data: Vec<u8> = (0..1_u32 << 20).map(|at| (at ^ (at >> 9)) as u8).collect();
    fs::write(&image, &data).unwrap();
    fs::write(&file, "").unwrap();
    let _guard = MountGuard(file.clone());
    let node = format!("node-name=f,driver=file,filename={}", image.display());
    let export = format!("type=fuse,id=e,node-name=f,mountpoint={},writable=on", file.display());
    let words = ["fuse", "--", "qemu-storage-daemon", "--blockdev", &node, "--export", &export];
    let child = place.command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let is_there = Command::new("qemu-storage-daemon").arg("--version").output().is_ok();
    if !is_there {
        assert!(!child.wait().unwrap().success());
        return println!("skipped: qemu-storage-daemon is not installed");
    }
    eventually("mounted", || is_mounted(&file));
    assert!(fs::read(&file).unwrap() == data);
    let open = OpenOptions::new().write(true).open(&file).unwrap();
    open.write_all_at(b"written", 70_000).unwrap();
    open.sync_all().unwrap();
    drop(open);
    assert_eq!(&fs::read(&image).unwrap()[70_000..70_007], b"written");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!is_mounted(&file));
}

/// Packages of Python for libfuse 3 (its own loop) and 2, with one and several workers.
#[test]
fn file_systems_in_python_are_served() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let script = place.path("inodes.py");
    fs::write(&script, include_str!("libfuse/inodes.py")).unwrap();
    for (module, workers) in [("pyfuse3", "1"), ("llfuse", "1"), ("llfuse", "4")] {
        // The interpreter of the system has the packages of the system.
        let mut check = Command::new("/usr/bin/python3");
        if !check
            .args(["-c", &format!("import {module}")])
            .output()
            .is_ok_and(|o| o.status.success())
        {
            println!("skipped: {module} is not installed");
            continue;
        }
        let script = script.to_str().unwrap();
        let words = ["fuse", "--", "/usr/bin/python3", script, module, "mnt", workers];
        let mut command = place.command(&words);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        eventually(module, || is_mounted(&mnt));
        let file = mnt.join("file");
        eventually("its content", || fs::read(&file).is_ok_and(|data| data == b"content"));
        let open = OpenOptions::new().write(true).open(&file).unwrap();
        open.write_all_at(b"changed and longer", 0).unwrap();
        drop(open);
        assert_eq!(fs::read(&file).unwrap(), b"changed and longer");
        assert_eq!(fs::read_dir(&mnt).unwrap().count(), 1);
        assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
        assert!(child.wait().unwrap().success(), "{module}");
    }
}

/// The examples of libfuse that have no partner program, compiled with Debian's headers.
#[test]
fn examples_of_libfuse_on_inodes_work() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mnt = place.path("mnt");
    let _guard = MountGuard(mnt.clone());
    let examples = Path::new("/usr/share/doc/libfuse3-dev/examples");
    if !examples.is_dir() {
        return println!("skipped: the examples of libfuse3-dev are not installed");
    }
    let include = format!("-I{}", examples.display());
    let example = |name: &str| {
        let code = fs::read_to_string(examples.join(name).with_extension("c")).unwrap();
        let options =
            ["-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3", &include, "-lfuse3", "-lpthread"];
        compile(&place, name, &code, &options)
    };
    let run = |program: &Path, words: &[&str], look: &dyn Fn()| {
        let words = [&["fuse", "--", program.to_str().unwrap(), "-f"], words, &["mnt"]].concat();
        let mut command = place.command(&words);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        eventually("mounted", || is_mounted(&mnt));
        look();
        assert!(Command::new("umount").arg(&mnt).status().unwrap().success());
        assert!(child.wait().unwrap().success(), "{words:?}");
    };
    let Some(hello) = example("hello_ll") else { return };
    for words in [&[][..], &["-s"], &["-o", "clone_fd"]] {
        run(&hello, words, &|| {
            assert_eq!(fs::read(mnt.join("hello")).unwrap(), b"Hello World!\n");
        });
    }
    let Some(passthrough) = example("passthrough_ll") else { return };
    let src = place.path("src");
    let source = format!("source={}", src.display());
    for cache in ["cache=never", "cache=auto", "cache=always,writeback"] {
        run(&passthrough, &["-o", &format!("{source},{cache}")], &|| {
            let data = vec![7; 3_000_001];
            fs::create_dir(mnt.join("dir")).unwrap();
            fs::write(mnt.join("dir/large"), &data).unwrap();
            assert!(fs::read(mnt.join("dir/large")).unwrap() == data);
            fs::rename(mnt.join("dir/large"), mnt.join("moved")).unwrap();
            symlink("moved", mnt.join("link")).unwrap();
            assert_eq!(fs::metadata(mnt.join("link")).unwrap().len(), 3_000_001);
            let names: BTreeSet<_> =
                fs::read_dir(&mnt).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["dir", "link", "moved"].map(Into::into).into());
            fs::remove_dir(mnt.join("dir")).unwrap();
            fs::remove_file(mnt.join("link")).unwrap();
            fs::remove_file(mnt.join("moved")).unwrap();
            assert!(fs::read_dir(&src).unwrap().next().is_none());
        });
    }
}
