//! Programs that a mount has: the kernel executes them by a descriptor, and they know their names and paths all the same.

mod common;

use std::fs;
use std::process::Command;

use common::{Place, compile, said};

/// Prints what a program can know of itself, and starts itself.
const KNOWS: &str = r#"
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char path[PATH_MAX] = "", name[32] = "", other[PATH_MAX] = "", resolved[PATH_MAX] = "";
    readlink("/proc/self/exe", path, sizeof path - 1);
    snprintf(other, sizeof other, "/proc/%d/exe", getpid());
    printf("%s %d", path, realpath(other, resolved) && strcmp(resolved, path) == 0);
    FILE *comm = fopen("/proc/self/comm", "r");
    fscanf(comm, "%31s", name);
    printf(" %s %s %s %d\n", name, (char *)getauxval(AT_EXECFN), argv[0], getenv("DEFUSE_PRELOAD_NAME") != 0);
    fflush(stdout);
    if (argc > 1) return 0;
    if (fork() == 0) { execl("/proc/self/exe", "again", "last", (char *)0); _exit(9); }
    int status;
    wait(&status);
    return WEXITSTATUS(status);
}"#;

/// perl, node and Rust programs could not start themselves: `/proc/self/exe` led to a memory that was gone. pgrep(1) and
/// killall(1) did not find them.
#[test]
fn a_program_of_a_mount_knows_its_path_and_its_name() {
    let place = Place::new();
    let Some(program) = compile(&place, "knows", KNOWS, &[]) else { return };
    let Some(fixed) = compile(&place, "fixed", KNOWS, &["-static"]) else { return };
    let source = place.path("src").display().to_string();
    let all = [
        ("memory:".to_owned(), &program, "--fork=auto"),
        (format!("passthrough:{source}"), &program, "--fork=auto"),
        (format!("passthrough:{source},backing=off"), &program, "--fork=auto"),
        ("memory:".to_owned(), &program, "--dispatch"),
        ("memory:".to_owned(), &fixed, "--dispatch"),
    ];
    for (source, program, more) in all {
        let mount = format!("/defuse-test={source}");
        let script = format!(
            "mkdir -p d; cp {} d/program; ln -sf d/program link; ./d/program; d/../d/program; ./link; \
             (exec -a other /defuse-test/d/program)",
            program.display()
        );
        let run =
            ["run", more, "-C", "/defuse-test", "--mount", &mount, "--", "bash", "-c", &script];
        let path = "/defuse-test/d/program";
        let line = |name: &str, execfn: &str, argv: &str| {
            format!("{path} 1 {name} {execfn} {argv} 0\n{path} 1 program {path} again 0\n")
        };
        let expected = [
            line("program", "./d/program", "./d/program"),
            line("program", "d/../d/program", "d/../d/program"),
            line("link", "./link", "./link"),
            line("program", path, "other"),
        ];
        assert_eq!(place.ok(&run), expected.concat(), "{mount} {more}");
    }
}

/// With `vm.memfd_noexec`, programs of served mounts could not be executed.
#[test]
fn a_program_of_a_mount_is_executed_where_memory_is_not_executable_by_default() {
    const SETTING: &str = "/proc/sys/vm/memfd_noexec";
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can make a PID name space");
        return;
    }
    if !fs::exists(SETTING).unwrap() {
        println!("not here: this kernel has no vm.memfd_noexec (Linux 6.3)");
        return;
    }
    let place = Place::new();
    let Some(fixed) = compile(&place, "fixed", KNOWS, &["-static"]) else { return };
    let run = |setting: &str, more: &str, program: &str| {
        let script = format!("cp {program} program; ./program /dev/null");
        // The setting is that of the PID name space.
        let script = format!(
            "echo {setting} > {SETTING} && exec {} run {more} -C /defuse-test --mount \
             /defuse-test=memory: -- sh -c '{script}'",
            common::PROGRAM
        );
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", &script]);
        said(command.output().unwrap())
    };
    let fixed = fixed.display().to_string();
    for (more, program) in [("", "/bin/cat"), ("--dispatch", "/bin/cat"), ("--dispatch", &fixed)] {
        for setting in ["0", "1"] {
            let seen = run(setting, more, program);
            assert_eq!((seen.code, seen.err.as_str()), (Some(0), ""), "{setting} {more} {program}");
        }
        let seen = run("2", more, program);
        assert_eq!(seen.code, Some(126), "{more} {program}: {}", seen.err);
        assert!(seen.err.contains("vm.memfd_noexec=1"), "{}", seen.err);
    }
}
