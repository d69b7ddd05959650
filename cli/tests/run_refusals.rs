//! Programs and calls that `defuse run` refuses or warns of, because it could not serve them.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{TestPlace, compile, from_output};

/// A C library in another namespace of dlmopen(3) is an unpatched copy. It wrote to the kernel's
/// directory of the same name.
#[test]
fn a_library_in_its_own_namespace_is_served_or_refused_with_the_reason() {
    let place = TestPlace::new();
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
    let out = place.expect_success(&[&run[..], &["--", &program, &file]].concat());
    assert!(out.contains("refused: /dlmopen: a C library in a name space of its own"), "{out}");
    assert!(out.contains("--dispatch"), "{out}");
    assert!(!place.path("mnt").join("file").exists(), "nothing is made outside");
    let out = place.expect_success(&[&run[..], &["--dispatch", "--", &program, &file]].concat());
    assert_eq!(out, "1\n1\n");
    assert!(source.join("file").exists() && !place.path("mnt/file").exists());
}

/// A static program that another program executes saw the kernel's files, without a warning.
#[test]
fn a_static_program_that_is_executed_later_causes_one_warning() {
    let place = TestPlace::new();
    let source = "#include <stdio.h>\nint main(void) { puts(\"here\"); }";
    let Some(program) = compile(&place, "static", source, &["-static"]) else { return };
    let program = program.display().to_string();
    let script = format!("{program}; {program}; sh -c '{program}; true'");
    let run = ["run", "--mount", "mem:=memory:"];
    let seen = from_output(place.command(&run).args(["--", "sh", "-c", &script]).output().unwrap());
    assert_eq!((seen.code, seen.out.as_str()), (Some(0), "here\nhere\nhere\n"));
    assert_eq!(seen.err.matches("is not served").count(), 1, "{}", seen.err);
    assert!(seen.err.contains(&program) && seen.err.contains("--dispatch"), "{}", seen.err);
    let with = ["--dispatch", "--", "sh", "-c", &script];
    let seen = from_output(place.command(&run).args(with).output().unwrap());
    assert_eq!((seen.code, seen.err.as_str()), (Some(0), ""));
}

/// Go makes all its calls by itself, from functions without unwind tables.
#[test]
fn a_go_program_that_is_executed_later_causes_a_warning() {
    let place = TestPlace::new();
    let source = r#"
#include <stdio.h>
__attribute__((section(".note.go.buildid"), used)) static const int id = 1;
int main(void) { puts("here"); }"#;
    let Some(program) = compile(&place, "go", source, &[]) else { return };
    let program = program.display().to_string();
    let run = ["run", "--mount", "m:=memory:", "--", "sh", "-c", &format!("{program}; true")];
    let seen = from_output(place.command(&run).output().unwrap());
    assert_eq!((seen.code, seen.out.as_str()), (Some(0), "here\n"));
    assert!(seen.err.contains(&format!("{program}: makes system calls")), "{}", seen.err);
}

/// A program that becomes another user is executed without the library, and no message was printed.
#[test]
fn a_program_that_becomes_another_user_causes_one_warning() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can give a file to another user");
        return;
    }
    let place = TestPlace::new();
    let source = r#"
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("%d %d %d\n", geteuid(), getegid(), access("m:/", 0)); }"#;
    let Some(program) = compile(&place, "setid", source, &[]) else { return };
    let (name, nobody) = (program.display().to_string(), Some(65534));
    let run = ["run", "--mount", "m:=memory:", "--", "sh", "-c", &format!("{name}; {name}")];
    let seen = |owner: Option<u32>, group: Option<u32>, mode: u32| {
        // chown(2) takes the bits away.
        std::os::unix::fs::chown(&program, owner, group).unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let seen = from_output(place.command(&run).output().unwrap());
        assert_eq!(seen.code, Some(0), "{}", seen.err);
        (seen.out, seen.err.matches(": runs with the rights of another user").count())
    };
    // These programs do not change the identity of root.
    assert_eq!(seen(None, None, 0o4755), ("0 0 0\n0 0 0\n".into(), 0));
    assert_eq!(seen(nobody, None, 0o755), ("0 0 0\n0 0 0\n".into(), 0));
    assert_eq!(seen(nobody, None, 0o4755), ("65534 0 -1\n65534 0 -1\n".into(), 1));
    assert_eq!(seen(Some(0), nobody, 0o2755), ("0 65534 -1\n0 65534 -1\n".into(), 1));
    // A group that may not execute it: the bit then stands for mandatory locks.
    assert_eq!(seen(Some(0), nobody, 0o2745), ("0 0 0\n0 0 0\n".into(), 0));
}

/// Capabilities of a file are for users who are not root.
#[test]
fn a_program_with_capabilities_causes_a_warning_for_users_who_gain_them() {
    let place = TestPlace::new();
    let source = r#"
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("%d\n", access("m:/", 0)); }"#;
    let Some(program) = compile(&place, "capable", source, &[]) else { return };
    // struct vfs_cap_data of linux/capability.h: version 2, effective; CAP_NET_RAW, as for ping(8).
    let words = [0x0200_0001u32, 1 << 13, 0, 0, 0].map(u32::to_le_bytes).concat();
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(&program, "security.capability", &words, flags) {
        println!("skipped: no capabilities on files: {error}");
        return;
    }
    let name = program.display().to_string();
    let seen = |user: u32| {
        let script = format!("{name}; {name}");
        let run = ["run", "--mount", "m:=memory:", "--", "setpriv", "--reuid"];
        let user = user.to_string();
        let rest = [&user, "--regid", &user, "--clear-groups", "sh", "-c", &script];
        let mut run = place.command(&run);
        // A user who cannot read the library would leave the run at the shell.
        run.envs(place.library_for_all_users().map(|library| ("DEFUSE_PRELOAD_LIBRARY", library)));
        let seen = from_output(run.args(rest).output().unwrap());
        (seen.out, seen.err.matches(": runs with the rights of another user").count())
    };
    fs::set_permissions(place.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    assert_eq!(seen(0), ("0\n0\n".into(), 0));
    assert_eq!(seen(65534), ("-1\n-1\n".into(), 1));
}

/// The formats of a run carry versions: a library of another build took what it found for its own.
#[test]
fn a_run_of_another_version_is_refused_with_both_versions() {
    use defuse_preload_plan::{InheritedDescriptors, LIBRARY, ProgramPlan, VARIABLE, layout};
    use std::io::Write;
    use std::os::fd::AsRawFd;

    let file = |bytes: &[u8]| {
        let flags = rustix::fs::MemfdFlags::empty();
        let mut file = fs::File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.write_all(bytes).unwrap();
        file
    };
    let memory = |version: u32| {
        let file = file(&version.to_le_bytes());
        file.set_len(layout::LEN as u64).unwrap();
        file
    };
    let plan = layout::with_head(&ProgramPlan::default().encode());
    let other_plan = [b"defuse99", &plan[8..]].concat();
    let library = PathBuf::from(env!("CARGO_BIN_EXE_defuse"));
    let library = library.parent().unwrap().join("deps").join(LIBRARY);
    let begin = |memory: &fs::File, plan: &fs::File, version: &str| {
        let inherited = InheritedDescriptors {
            memory: memory.as_raw_fd(),
            plan: plan.as_raw_fd(),
            ..InheritedDescriptors::default()
        };
        let text = inherited.to_string();
        let text = format!("{version}{}", &text[text.find(':').unwrap()..]);
        let mut command = Command::new("true");
        command.env("LD_PRELOAD", &library).env(VARIABLE, text);
        let seen = from_output(command.output().unwrap());
        (seen.code, seen.err)
    };
    let (right, own) = (memory(layout::VERSION), file(&plan));
    assert_eq!(begin(&right, &own, "3"), (Some(0), String::new()));
    for (seen, what) in [
        (
            begin(&right, &own, "7"),
            "the execution state of this run has version 7, and the library reads version 3",
        ),
        (
            begin(&right, &file(&other_plan), "3"),
            "the plan of this run has version 99, and the library reads version 5",
        ),
        (
            begin(&memory(3), &own, "3"),
            "the shared memory of this run has version 3, and the library reads version 1",
        ),
    ] {
        assert_eq!(seen.0, Some(125), "{}", seen.1);
        assert!(seen.1.contains(what), "{}", seen.1);
    }
}

/// A process that shares the memory of its parent and runs beside it got `ENOTCONN` from served
/// mounts, without a reason.
#[test]
fn a_process_that_shares_memory_is_refused_where_a_mount_is_served() {
    let place = TestPlace::new();
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
        from_output(place.command(&["run", "--mount", mount, "--", &program]).output().unwrap())
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
    let place = TestPlace::new();
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
        let seen = from_output(command.args(more).args(["--", &program]).output().unwrap());
        assert_eq!((seen.code, seen.out.as_str()), (Some(0), "0\n0\n"), "{}", seen.err);
        assert_eq!(seen.err.matches("filters its system calls").count(), 1, "{}", seen.err);
    }
}

/// The variable may be one of another user, whose library would run with the rights of this one.
#[test]
fn a_library_that_others_can_write_is_not_loaded() {
    use std::os::unix::fs::{PermissionsExt, chown};

    let place = TestPlace::new();
    let built = PathBuf::from(env!("CARGO_BIN_EXE_defuse"));
    let built = built.parent().unwrap().join("deps").join("libdefuse_preload.so");
    let (dir, allow) = (place.path("libraries"), |path: &std::path::Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    });
    fs::create_dir(&dir).unwrap();
    let library = dir.join("libdefuse_preload.so");
    fs::copy(&built, &library).unwrap();
    allow(&dir, 0o755);
    allow(&library, 0o755);
    let run = || {
        let mut command = place.command(&["run", "--mount", "/x=memory:", "--", "ls", "/x"]);
        from_output(command.env("DEFUSE_PRELOAD_LIBRARY", &library).output().unwrap())
    };
    let refusal = |what: &str| {
        let seen = run();
        assert_ne!(seen.code, Some(0), "{what}");
        assert!(seen.err.contains("another user could"), "{what}: {}", seen.err);
        assert!(seen.err.contains("unset the variable"), "{what}: {}", seen.err);
    };
    assert_eq!(run().code, Some(0), "{}", run().err);
    allow(&library, 0o777);
    refusal("a library that all can write");
    allow(&library, 0o755);
    allow(&dir, 0o777);
    refusal("a directory in which all can exchange it");
    allow(&dir, 0o755);
    if rustix::process::geteuid().is_root() {
        chown(&library, Some(65534), None).unwrap();
        refusal("a library of another user");
        chown(&library, Some(0), None).unwrap();
    }
    assert_eq!(run().code, Some(0), "{}", run().err);
}
