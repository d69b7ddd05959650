//! Programs of a run in user namespaces: they see the ids of their namespace, and the server the
//! ids of the run's.

mod common;

use std::fs;
use std::os::unix::fs::chown;
use std::process::{Command, Stdio};

use common::{PROGRAM, TestPlace};

/// A command as the user 1000 without further groups.
fn as_user() -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid",
        "1000",
        "--regid",
        "1000",
        "--clear-groups",
        "env",
        "HOME=/nonexistent",
    ]);
    command.stdin(Stdio::null());
    command
}

/// The script natively and in a run on `memory:`, by a user, whose directory is private.
fn compare(script: &str) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    if !as_user().args(["unshare", "-Ur", "true"]).status().unwrap().success() {
        println!("not here: users of this system may not make user namespaces");
        return;
    }
    let place = TestPlace::new();
    fs::set_permissions(place.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let native = place.path("src");
    chown(&native, Some(1000), Some(1000)).unwrap();
    let see = |mut command: Command| {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace("/defuse-test", "DIR");
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let mut plain = as_user();
    plain.args(["sh", "-c", script]).current_dir(&native);
    let (code, out, err) = see(plain);
    let native = native.display().to_string();
    let expected = (code, out.replace(&native, "DIR"), err.replace(&native, "DIR"));
    for more in ["--fork=auto", "--dispatch"] {
        let mut run = as_user();
        run.arg(PROGRAM).args([
            "run",
            more,
            "-C",
            "/defuse-test",
            "--mount",
            "/defuse-test=memory:",
        ]);
        run.args(["--", "sh", "-c", script]);
        run.envs(place.library_for_all_users().map(|library| ("DEFUSE_PRELOAD_LIBRARY", library)));
        assert_eq!(see(run), expected, "{more}");
    }
}

/// Every call failed with `EPERM`, also getcwd(2): the server received requests of the user 0.
#[test]
fn a_program_in_a_new_user_namespace_is_its_user() {
    compare(
        "umask 022; echo x > f; mkdir d; chmod 600 f
        unshare -Ur sh -c 'id -u; pwd; cat f; echo y > g; stat -c \"%u %g %a\" f g d; mkdir d/e; mv g d/e; chown 0:0 f
            chown 5 f 2>&1; test -O f && echo own; chmod 640 f; (cd d/e; pwd; cat g); ln -s f l; stat -Lc %u l; rm l
            sh -c \"exec sh -c \\\"cat f; stat -c %u f\\\"\"; exec 3< f; cat <&3'
        stat -c '%n %u %g %a' f d d/e d/e/g",
    );
}

/// The ids of a namespace without maps are the overflow ids, and files still belong to the user.
#[test]
fn a_program_whose_ids_are_not_mapped_is_still_its_user() {
    compare(
        "umask 022; echo x > f; chmod 600 f
        unshare -U sh -c 'id -u; cat f; stat -c %u f; echo y > g; sh -c \"cat g; stat -c %u:%g g\"'
        unshare -U --map-user=77 --map-group=78 sh -c 'id -u; id -g; cat f; stat -c %u:%g f; touch h; stat -c %u:%g h'
        stat -c '%n %u %g' f g h",
    );
}

/// The maps are written by the process itself, after it has looked.
#[test]
fn a_program_that_maps_its_own_ids_sees_them_at_once() {
    compare(
        r#"echo x > f; chmod 600 f; cat > own.py <<'END'
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0
print(os.stat("f").st_uid == 65534, open("f").read())
for name, text in (("setgroups", "deny"), ("uid_map", "7 1000 1"), ("gid_map", "8 1000 1")):
    open("/proc/self/" + name, "w").write(text)
print(os.stat("f").st_uid, os.stat("f").st_gid, os.getuid(), open("f").read())
if os.fork() == 0:
    open("made", "w").write("y")
    print(os.stat("made").st_uid, flush=True)
    os._exit(0)
os.wait()
END
python3 own.py; stat -c '%n %u %g' made"#,
    );
}
