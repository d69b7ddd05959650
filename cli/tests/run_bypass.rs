//! Programs with system calls of their own, and programs that a run cannot serve: they do what they
//! do natively, or fail with a message, and reach no directory outside of the mounts by a relative
//! path.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{TestPlace, compile, from_output};

/// A program that makes, renames and lists files by an instruction whose number is an argument, and
/// in a child that it makes in the same way. With `FIXED`, by one instruction that leaves no room
/// for a jump.
const OWN_CALLS: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#ifdef LARGE
char large[3 << 20] = {1};
#endif
long raw(long number, long a, long b, long c) {
    long value;
#ifdef FIXED
    __asm__ volatile("jmp 1f\n1: syscall\njmp 2f\n2:" : "=a"(value) : "a"(number), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory");
#else
    __asm__ volatile("syscall" : "=a"(value) : "a"(number), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory");
#endif
    return value;
}
#ifndef LIBRARY
int main(int argc, char **argv) {
    if (raw(39, 0, 0, 0) != raw(186, 0, 0, 0)) puts("getpid and gettid differ");
    long fd = raw(2, (long)"made", O_CREAT | O_WRONLY, 0600);
    if (fd < 0) { printf("made: %s\n", strerror(-fd)); return 1; }
    long child = raw(57, 0, 0, 0);
    if (child == 0) { raw(1, fd, (long)"text\n", 5); raw(231, 7, 0, 0); }
    int status = 0;
    raw(61, child, (long)&status, 0);
    raw(3, fd, 0, 0);
    long renamed = raw(82, (long)"made", (long)"renamed", 0);
    printf("child %d, renamed %ld, made %s\n", WEXITSTATUS(status), renamed,
           raw(21, (long)"made", 0, 0) == 0 ? "is there" : "is gone");
}
#endif
"#;

const SEEN: &str = "child 7, renamed 0, made is gone\n";

/// The mounts of the tests: served by each program, and by the run.
fn mounts(place: &TestPlace) -> [String; 3] {
    let source = place.path("src").display().to_string();
    [
        format!("/defuse-test=passthrough:{source}"),
        format!("/defuse-test=passthrough:{source},backing=off"),
        "/defuse-test=memory:".to_owned(),
    ]
}

/// Rust's crate tempfile renamed its files in the directory in which the run was started, or
/// failed, without a message: a call whose number is not a constant was neither replaced nor
/// reported. So were all calls of programs with more than 2 MiB, such as bun.
#[test]
fn calls_whose_number_is_known_at_run_time_are_served_in_every_program() {
    let place = TestPlace::new();
    let Some(small) = compile(&place, "small", OWN_CALLS, &[]) else { return };
    let Some(large) = compile(&place, "large", OWN_CALLS, &["-DLARGE"]) else { return };
    // Without a build id, and without unwind tables.
    let bare = ["-Wl,--build-id=none", "-fno-asynchronous-unwind-tables"];
    let Some(bare) = compile(&place, "bare", OWN_CALLS, &bare) else { return };
    let library = ["-DLIBRARY", "-shared", "-fPIC"];
    let Some(library) = compile(&place, "libown.so", OWN_CALLS, &library) else { return };
    let caller = OWN_CALLS.replace("#ifndef LIBRARY", "#if 1").replace("long raw(", "long unused(");
    let caller = caller.replacen("int main", "long raw(long, long, long, long);\nint main", 1);
    let library = library.display().to_string();
    let Some(caller) = compile(&place, "caller", &caller, &[&library]) else { return };
    for program in [small, large, bare, caller] {
        let program = program.display().to_string();
        for mount in mounts(&place) {
            for (more, shell) in [("", ""), ("", "; true"), ("--dispatch", "; true")] {
                let run = ["run", "-C", "/defuse-test", "--mount", &mount];
                let mut run = place.command(&run);
                if !more.is_empty() {
                    run.arg(more);
                }
                match shell {
                    "" => run.args(["--", &program]),
                    more => run.args(["--", "sh", "-c", &format!("{program}{more}")]),
                };
                let seen = from_output(run.output().unwrap());
                let what = format!("{program} {more} {shell} on {mount}");
                assert_eq!((seen.out.as_str(), seen.err.as_str()), (SEEN, ""), "{what}");
            }
        }
        let left = [place.path("made"), place.path("renamed")];
        assert!(!left.iter().any(|path| path.exists()), "{program}: nothing is made outside");
    }
}

/// If a loader starts a program by name, the program is another file than the file that the kernel
/// executes.
#[test]
fn a_program_that_is_started_by_its_loader_is_looked_at() {
    let place = TestPlace::new();
    let Some(program) = compile(&place, "small", OWN_CALLS, &[]) else { return };
    let loader = "/lib64/ld-linux-x86-64.so.2";
    let script = format!("{loader} {}; true", program.display());
    for mount in mounts(&place) {
        let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--", "sh", "-c", &script];
        let seen = from_output(place.command(&run).output().unwrap());
        assert_eq!((seen.out.as_str(), seen.err.as_str()), (SEEN, ""), "{mount}");
    }
}

/// A program whose calls cannot be replaced made its files in the directory in which the run was
/// started.
#[test]
fn calls_that_cannot_be_replaced_are_told_of_and_reach_no_directory() {
    let place = TestPlace::new();
    let Some(program) = compile(&place, "fixed", OWN_CALLS, &["-DFIXED", "-DLARGE"]) else {
        return;
    };
    let program = program.display().to_string();
    let script = format!("{program}; {program}");
    for mount in mounts(&place) {
        let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--"];
        let seen = from_output(place.command(&run).arg(&program).output().unwrap());
        assert_eq!(seen.code, Some(1), "{} {}", seen.out, seen.err);
        assert!(seen.out.starts_with("made: "), "{}", seen.out);
        let text = format!("{program}: makes system calls without the C library that are not");
        assert_eq!(seen.err.matches(&text).count(), 1, "{}", seen.err);
        assert!(seen.err.contains("/defuse-test. --dispatch"), "{}", seen.err);
        let seen = from_output(place.command(&run).args(["sh", "-c", &script]).output().unwrap());
        assert_eq!((seen.code, seen.err.matches(&text).count()), (Some(1), 1), "{}", seen.err);
        let run = ["run", "--dispatch", "-C", "/defuse-test", "--mount", &mount, "--", &program];
        assert_eq!(place.expect_success(&run), SEEN);
    }
    assert!(!place.path("made").exists() && !place.path("renamed").exists());
}

/// A call that was not served took the descriptor of a directory in a mount for the root directory,
/// and made its files there.
#[test]
fn calls_that_cannot_be_replaced_reach_no_directory_by_a_descriptor() {
    let place = TestPlace::new();
    let main = r#"
int main(int argc, char **argv) {
    int dir = open(".", O_RDONLY | O_DIRECTORY);
    char text[16] = "";
    printf("%d %d %d %d\n", dir >= 0, raw(257, dir, (long)argv[1], O_CREAT | O_WRONLY) >= 0,
           raw(258, dir, (long)argv[1], 0700) == 0, raw(267, dir, (long)argv[1], (long)text) >= 0);
    chdir("/");
    printf("%d\n", raw(81, dir, 0, 0) == 0 && raw(83, (long)argv[1], 0700, 0) == 0);
}"#;
    let at = OWN_CALLS.find("#ifndef LIBRARY").unwrap();
    let source = OWN_CALLS[..at].to_owned() + "#include <unistd.h>\n" + main;
    let Some(program) = compile(&place, "at", &source, &["-DFIXED"]) else { return };
    let name = format!("defuse-made-{}", std::process::id());
    for mount in mounts(&place) {
        let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--"];
        let seen = from_output(place.command(&run).arg(&program).arg(&name).output().unwrap());
        assert_eq!(seen.out, "1 0 0 0\n0\n", "{mount}: {}", seen.err);
    }
    for made in [Path::new("/").join(&name), place.path(&name), place.path("src").join(&name)] {
        assert!(!made.exists(), "{made:?}");
    }
}

/// The kernel looked for the files of setxattrat(2) and its kin elsewhere.
#[test]
fn calls_that_are_newer_than_the_library_are_unknown_in_mounts() {
    let place = TestPlace::new();
    let source = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/syscall.h>
int main(int argc, char **argv) {
    long numbers[] = {463, 464, 465, 466, 468, 469}, words[4] = {0};
    close(open("f", O_CREAT | O_WRONLY, 0600));
    int dir = open(".", O_RDONLY | O_DIRECTORY), unknown = 0;
    for (int i = 0; i < 6; i++) {
        const char *paths[] = {"f", "missing", argv[1], ""};
        for (int j = 0; j < 4; j++) {
            int at = j == 0 || j == 3 ? dir : AT_FDCWD;
            long value = syscall(numbers[i], at, paths[j], j == 3 ? AT_EMPTY_PATH : 0, "user.x", words, 16);
            unknown += value == -1 && errno == ENOSYS;
        }
    }
    printf("%d\n", unknown);
}"#;
    let Some(program) = compile(&place, "newer", source, &[]) else { return };
    let program = program.display().to_string();
    for mount in mounts(&place) {
        let run =
            ["run", "-C", "/defuse-test", "--mount", &mount, "--", &program, "/defuse-test/f"];
        assert_eq!(place.expect_success(&run), "24\n", "{mount}");
    }
}

/// A library that a program loads with dlopen(3) made its files elsewhere, without a message.
#[test]
fn a_library_with_own_calls_that_is_loaded_later_is_told_of() {
    let place = TestPlace::new();
    let library = ["-DLIBRARY", "-shared", "-fPIC"];
    let Some(library) = compile(&place, "libown.so", OWN_CALLS, &library) else { return };
    let options = ["-shared", "-fPIC"];
    let Some(plain) = compile(&place, "libplain.so", "int nothing;", &options) else { return };
    let main = OWN_CALLS.replace("#ifndef LIBRARY", "#if 1").replace("long raw(", "long unused(");
    let main = main.replacen(
        "int main(int argc, char **argv) {",
        "#include <dlfcn.h>\nint main(int argc, char **argv) {\n\
         dlopen(\"libm.so.6\", RTLD_NOW); dlopen(argv[2], RTLD_NOW);\n\
         void *own = dlopen(argv[1], RTLD_NOW);\n\
         long (*raw)(long, long, long, long) = (long (*)(long, long, long, long))dlsym(own, \"raw\");",
        1,
    );
    let Some(program) = compile(&place, "loads", &main, &["-ldl"]) else { return };
    let [program, library, plain] =
        [program, library, plain].map(|path| path.display().to_string());
    for mount in mounts(&place) {
        let run = ["run", "-C", "/defuse-test", "--mount", &mount];
        let words = ["--", &program, &library, &plain];
        let seen = from_output(place.command(&run).args(words).output().unwrap());
        assert_eq!(seen.code, Some(1), "{} {}", seen.out, seen.err);
        assert_eq!(seen.err.lines().count(), 1, "{}", seen.err);
        assert!(seen.err.contains(&format!("{library}: makes system calls")), "{}", seen.err);
        let seen = from_output(place.command(&run).arg("--dispatch").args(words).output().unwrap());
        assert_eq!((seen.out.as_str(), seen.err.as_str()), (SEEN, ""), "{mount}");
    }
    assert!(!place.path("made").exists());
}

/// Their numbers are others: with `--dispatch`, open(2) was taken for fstat(2).
#[test]
fn calls_of_32_bits_are_told_of() {
    let place = TestPlace::new();
    let source = r#"
#include <stdio.h>
int main(void) {
    long pid;
    __asm__ volatile("int $0x80" : "=a"(pid) : "a"(20L) : "memory");
    puts(pid == -38 ? "unknown" : "made");
}"#;
    let Some(program) = compile(&place, "old", source, &[]) else { return };
    let program = program.display().to_string();
    if !std::process::Command::new(&program).output().unwrap().status.success() {
        println!("not here: this kernel has no system calls of 32 bits");
        return;
    }
    for shell in [false, true] {
        let run = |more: &[&str]| {
            let mut run = place.command(&["run", "--mount", "/defuse-test=memory:"]);
            run.args(more).arg("--");
            if shell {
                run.args(["sh", "-c", &format!("{program}; {program}")]);
            } else {
                run.arg(&program);
            }
            let seen = from_output(run.output().unwrap());
            assert_eq!(seen.code, Some(0), "{}", seen.err);
            (seen.out, seen.err)
        };
        let (out, err) = run(&[]);
        assert!(out.starts_with("made\n"), "{out}");
        assert_eq!(err.matches("makes system calls without the C library").count(), 1, "{err}");
        let (out, err) = run(&["--dispatch"]);
        assert!(out.starts_with("unknown\n"), "{out}");
        assert_eq!(err.matches("system calls of 32 bits").count(), 1, "{err}");
    }
}

/// A static program that a program executes in a mount made its files in the directory in which the
/// run was started.
#[test]
fn a_program_that_is_not_served_reaches_no_directory_by_a_relative_path() {
    let place = TestPlace::new();
    let source = r#"
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int main(void) {
    const char *names[] = {"made", "./made", "../made", "../../made", "../../../made"};
    struct stat stat_;
    for (int i = 0; i < 5; i++)
        if (open(names[i], O_CREAT | O_WRONLY, 0600) >= 0 || mkdir(names[i], 0700) == 0
            || symlink("x", names[i]) == 0)
            printf("made %s\n", names[i]);
    if (stat("here", &stat_) == 0 || stat("net", &stat_) == 0) puts("found");
    if (chdir("../..") == 0) puts("left");
    puts("end");
}"#;
    let Some(program) = compile(&place, "static", source, &["-static"]) else { return };
    fs::write(place.path("here"), "").unwrap();
    let program = program.display().to_string();
    // By a script, too, whose interpreter the kernel executes.
    let script = place.path("script");
    fs::write(&script, format!("#!{program}\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    for mount in mounts(&place) {
        for program in [&program, &script.display().to_string()] {
            // The directory is entered by the run, by a program before, and by a descriptor.
            for enter in [
                format!("{program}; true"),
                format!("cd /; cd /defuse-test; {program}; true"),
                format!("cd /; sh -c 'cd /defuse-test; mkdir -p d; cd d; {program}'; true"),
            ] {
                let run =
                    ["run", "-C", "/defuse-test", "--mount", &mount, "--", "sh", "-c", &enter];
                let seen = from_output(place.command(&run).output().unwrap());
                assert_eq!(seen.out, "end\n", "{enter} on {mount}: {}", seen.err);
                assert_eq!(seen.err.matches("is not served").count(), 1, "{}", seen.err);
                assert!(seen.err.contains("in place of /defuse-test"), "{}", seen.err);
            }
        }
    }
    assert!(!place.path("made").exists());
    // Outside of all mounts the directory is the program's own.
    let deep = place.path("a/b/c/d");
    fs::create_dir_all(&deep).unwrap();
    let script = format!("cd /defuse-test && cd {} && {program}", deep.display());
    let run = ["run", "--mount", "/defuse-test=memory:", "--", "sh", "-c", &script];
    let seen = from_output(place.command(&run).output().unwrap());
    assert!(seen.out.starts_with("made made\n"), "{}", seen.out);
    assert!(deep.join("made").exists());
}

/// An ELF file of 32 bits that exits with 3.
fn program_of_32_bits() -> Vec<u8> {
    let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x03\0\x01\0\0\0".to_vec();
    let at = 0x0804_8000u32;
    [at + 84, 52, 0, 0].iter().for_each(|word| file.extend(word.to_le_bytes()));
    [52u16, 32, 1, 0, 0, 0].iter().for_each(|half| file.extend(half.to_le_bytes()));
    [1, 0, at, at, 96, 96, 5, 4096].iter().for_each(|word: &u32| file.extend(word.to_le_bytes()));
    // mov eax, 1; mov bl, 3; int 0x80
    file.extend([0xb8, 1, 0, 0, 0, 0xb3, 3, 0xcd, 0x80, 0, 0, 0]);
    file
}

/// Programs of 32 bits ran on the kernel's files, without a message.
#[test]
fn a_program_of_32_bits_is_refused_or_told_of() {
    let place = TestPlace::new();
    let path = place.path("of32");
    fs::write(&path, program_of_32_bits()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let program = path.display().to_string();
    for more in ["--fork=auto", "--dispatch"] {
        let run = ["run", more, "--mount", "/defuse-test=memory:", "--"];
        place.expect_failure(1, &[&run[..], &[&program]].concat(), "a program of 32 bits");
        let script = format!("{program}; echo $?; cp {program} /defuse-test/p; /defuse-test/p");
        let seen = from_output(place.command(&run).args(["sh", "-c", &script]).output().unwrap());
        assert_eq!(seen.err.matches("a program of 32 bits").count(), 2, "{}", seen.err);
        if seen.out != "3\n" {
            println!("not here: this kernel executes no programs of 32 bits: {}", seen.err);
        }
    }
}

/// With another library in `DEFUSE_PRELOAD_LIBRARY`, programs ran on the kernel's files, and the
/// run ended with 0.
#[test]
fn another_library_is_refused_by_its_path() {
    let place = TestPlace::new();
    let source = "int nothing;";
    let Some(library) = compile(&place, "libother.so", source, &["-shared", "-fPIC"]) else {
        return;
    };
    let text = place.path("text");
    fs::write(&text, "no library").unwrap();
    let of32 = place.path("libof32.so");
    fs::write(&of32, program_of_32_bits()).unwrap();
    for library in [library.as_path(), &text, &of32, Path::new("/bin/true")] {
        let mut run = place.command(&["run", "--mount", "/defuse-test=memory:", "--", "true"]);
        let seen = from_output(run.env("DEFUSE_PRELOAD_LIBRARY", library).output().unwrap());
        assert_eq!(seen.code, Some(1), "{}", seen.err);
        let library = library.canonicalize().unwrap().display().to_string();
        assert!(seen.err.contains(&library), "{}", seen.err);
        assert!(seen.err.contains("DEFUSE_PRELOAD_LIBRARY"), "{}", seen.err);
    }
}

/// A program into which the loader loads no library ended the run with its own code, although it
/// was not served.
#[test]
fn a_run_whose_program_was_not_served_fails() {
    let place = TestPlace::new();
    let source = "int main(void) { return 0; }";
    let Some(program) = compile(&place, "static", source, &["-static"]) else { return };
    // `defuse run` looks at one script.
    let script = |name: &str, interpreter: &Path| {
        let path = place.path(name);
        fs::write(&path, format!("#!{}\n", interpreter.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let outer = script("outer", &script("inner", &program)).display().to_string();
    let run = ["run", "--mount", "/defuse-test=memory:", "--", &outer];
    place.expect_failure(1, &run, "the library was not loaded into it");
}
