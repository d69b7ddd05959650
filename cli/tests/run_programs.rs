//! Programs in files of a mount: the kernel executes them by a descriptor, but they know their
//! names and paths.

mod common;

use std::fs;
use std::process::Command;

use common::{TestPlace, compile, from_output};

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

/// perl, node and Rust programs could not start themselves: `/proc/self/exe` led to a memory that
/// was gone. pgrep(1) and killall(1) did not find them.
#[test]
fn a_program_of_a_mount_knows_its_path_and_its_name() {
    let place = TestPlace::new();
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
        assert_eq!(place.expect_success(&run), expected.concat(), "{mount} {more}");
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
    let place = TestPlace::new();
    let Some(fixed) = compile(&place, "fixed", KNOWS, &["-static"]) else { return };
    let run = |setting: &str, more: &str, program: &str| {
        let script = format!("cp {program} program; ./program /dev/null");
        // The setting belongs to the PID name space.
        let script = format!(
            "echo {setting} > {SETTING} && exec {} run {more} -C /defuse-test --mount \
             /defuse-test=memory: -- sh -c '{script}'",
            common::PROGRAM
        );
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", &script]);
        from_output(command.output().unwrap())
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

/// A library that replaces functions and, as libsocket_wrapper does, holds a lock over fork(2) that
/// they take, and that rejects the names of objects that it has not seen, as libfakechroot does.
const WRAPPER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static void take(void) { if (pthread_mutex_lock(&lock)) { write(2, "deadlock\n", 9); abort(); } }
static void give(void) { pthread_mutex_unlock(&lock); }
static void renew(void) { lock = (pthread_mutex_t)PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP; }
__attribute__((constructor)) static void begin(void) { pthread_atfork(take, give, renew); }
#define WRAP(type, name, parameters, arguments) \
    type name parameters { \
        type (*next) parameters = (type (*) parameters)dlsym(RTLD_NEXT, #name); \
        take(); \
        type result = next arguments; \
        give(); \
        return result; \
    }
WRAP(int, close, (int fd), (fd))
WRAP(ssize_t, read, (int fd, void *at, size_t len), (fd, at, len))
WRAP(int, dup, (int fd), (fd))
WRAP(int, getsockopt, (int fd, int level, int name, void *at, socklen_t *len), (fd, level, name, at, len))
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
int dl_iterate_phdr(int (*callback)(struct dl_phdr_info *, size_t, void *), void *data) {
    write(2, "objects\n", 8);
    abort();
}
"#;

/// Calls of the library went through the functions of other preloaded libraries: with
/// libsocket_wrapper, the first fork was the end of a program, and with libfakechroot its start.
#[test]
fn other_preloaded_libraries_do_not_see_calls_of_the_library() {
    let place = TestPlace::new();
    let options = ["-shared", "-fPIC", "-pthread", "-ldl"];
    let Some(library) = compile(&place, "libwrapper.so", WRAPPER, &options) else { return };
    let library = library.display();
    let script = format!(
        "echo x > f; LD_PRELOAD={library} sh -c 'cat f & wait; (cat f); cat < f | cat; echo y >> f; sh -c \"cat f\"'"
    );
    let source = place.path("src").display().to_string();
    for source in
        ["memory:", &format!("passthrough:{source}"), &format!("passthrough:{source},backing=off")]
    {
        let mount = format!("/defuse-test={source}");
        let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--", "sh", "-c", &script];
        let seen = from_output(place.command(&run).output().unwrap());
        assert_eq!((seen.out.as_str(), seen.err.as_str()), ("x\nx\nx\nx\ny\n", ""), "{mount}");
    }
}
