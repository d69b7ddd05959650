//! Programs and calls that `defuse run` refuses or warns of, because it could not serve them.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{Place, said};

/// Compiles a C program. Prints the reason and returns `None` if there is no compiler, or if
/// linking fails.
fn compile(place: &Place, name: &str, source: &str, options: &[&str]) -> Option<PathBuf> {
    let (code, program) = (place.path(&format!("{name}.c")), place.path(name));
    fs::write(&code, source).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&code).args(options);
    match cc.output() {
        Ok(output) if output.status.success() => Some(program),
        _ => {
            println!("skipped: cc {} is not there or does not link", options.join(" "));
            None
        }
    }
}

/// A C library in another namespace of dlmopen(3) is an unpatched copy. It wrote to the kernel's
/// directory of the same name.
#[test]
fn a_library_in_its_own_namespace_is_served_or_refused_with_the_reason() {
    let place = Place::new();
    let source = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <fcntl.h>
#include <unistd.h>
int main(int argc, char **argv) {
    void *own = dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW);
    if (!own) { printf("refused: %s\n", dlerror()); return 0; }
    int (*its_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(own, "open");
    printf("%d\n", its_open(argv[1], O_CREAT | O_WRONLY, 0600) >= 0);
    void *same = dlmopen(LM_ID_BASE, "libm.so.6", RTLD_NOW);
    printf("%d\n", same != 0);
}"#;
    let Some(program) = compile(&place, "spaces", source, &["-ldl"]) else { return };
    let (program, source) = (program.display().to_string(), place.path("src"));
    // The kernel has a directory at the path of the mount.
    let mount = format!("{}=passthrough:{}", place.path("mnt").display(), source.display());
    let (file, run) = (place.path("mnt/file"), ["run", "--mount", &mount]);
    let file = file.display().to_string();
    let out = place.ok(&[&run[..], &["--", &program, &file]].concat());
    assert!(out.contains("refused: /dlmopen: a C library in a name space of its own"), "{out}");
    assert!(out.contains("--dispatch"), "{out}");
    assert!(!place.path("mnt").join("file").exists(), "nothing is made outside");
    let out = place.ok(&[&run[..], &["--dispatch", "--", &program, &file]].concat());
    assert_eq!(out, "1\n1\n");
    assert!(source.join("file").exists() && !place.path("mnt/file").exists());
}

/// A static program that another program executes saw the kernel's files, without a warning.
#[test]
fn a_static_program_that_is_executed_later_causes_one_warning() {
    let place = Place::new();
    let source = "#include <stdio.h>\nint main(void) { puts(\"here\"); }";
    let Some(program) = compile(&place, "static", source, &["-static"]) else { return };
    let program = program.display().to_string();
    let script = format!("{program}; {program}; sh -c '{program}; true'");
    let run = ["run", "--mount", "mem:=memory:"];
    let seen = said(place.command(&run).args(["--", "sh", "-c", &script]).output().unwrap());
    assert_eq!((seen.code, seen.out.as_str()), (Some(0), "here\nhere\nhere\n"));
    assert_eq!(seen.err.matches("is not served").count(), 1, "{}", seen.err);
    assert!(seen.err.contains(&program) && seen.err.contains("--dispatch"), "{}", seen.err);
    let with = ["--dispatch", "--", "sh", "-c", &script];
    let seen = said(place.command(&run).args(with).output().unwrap());
    assert_eq!((seen.code, seen.err.as_str()), (Some(0), ""));
}

/// A process that shares the memory of its parent and runs beside it got `ENOTCONN` from served
/// mounts, without a reason.
#[test]
fn a_process_that_shares_memory_is_refused_where_a_mount_is_served() {
    let place = Place::new();
    let source = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
static char stack[65536];
static int child(void *nothing) { return 7; }
int main(void) {
    int pid = clone(child, stack + sizeof stack, CLONE_VM | SIGCHLD, 0), status = 0;
    if (pid < 0) { printf("%d\n", errno); return 0; }
    waitpid(pid, &status, 0);
    printf("child %d\n", WEXITSTATUS(status));
}"#;
    let Some(program) = compile(&place, "sharing", source, &[]) else { return };
    let program = program.display().to_string();
    let source = format!("/d=passthrough:{}", place.path("src").display());
    let run = |mount: &str| {
        said(place.command(&["run", "--mount", mount, "--", &program]).output().unwrap())
    };
    let seen = run("mem:=memory:");
    assert_eq!(seen.out, "1\n", "EPERM");
    assert!(seen.err.contains("clone: a process that shares the memory"), "{}", seen.err);
    let seen = run(&source);
    assert_eq!((seen.out.as_str(), seen.err.as_str()), ("child 7\n", ""));
}

/// A seccomp filter does not see the calls that are served without a system call.
#[test]
fn a_program_that_filters_its_system_calls_causes_a_warning() {
    let place = Place::new();
    let source = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/prctl.h>
int main(void) {
    struct sock_filter all[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_fprog filter = { 1, all };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    printf("%d\n", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
    printf("%d\n", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
}"#;
    let Some(program) = compile(&place, "filters", source, &[]) else { return };
    let program = program.display().to_string();
    for more in [&[][..], &["--dispatch"]] {
        let mut command = place.command(&["run", "--mount", "mem:=memory:"]);
        let seen = said(command.args(more).args(["--", &program]).output().unwrap());
        assert_eq!((seen.code, seen.out.as_str()), (Some(0), "0\n0\n"), "{}", seen.err);
        assert_eq!(seen.err.matches("filters its system calls").count(), 1, "{}", seen.err);
    }
}
