//! Default ACLs, and copies between mounts.

use super::common::TestPlace;
use super::{compare, compare_with, finish, is_there, run_on_passthrough};

/// Programs with different umasks that create files, directories, fifos and unnamed files, while
/// other threads do the same and fork. The default ACL replaces the umask.
const SCRIPT: &str = r#"
import os, socket, subprocess, struct, threading
def acl(*entries):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", t, p, i) for t, p, i in entries)
NONE = 0xffffffff
lists = {"plain": None,
         "short": acl((1, 7, NONE), (4, 7, NONE), (32, 7, NONE)),
         "long": acl((1, 7, NONE), (2, 7, 5000), (4, 5, NONE), (16, 7, NONE), (32, 0, NONE))}
def make(at):
    os.close(os.open(at + "/f", os.O_CREAT | os.O_RDWR, 0o666))
    os.mkdir(at + "/d", 0o777)
    os.mkfifo(at + "/p", 0o666)
    os.symlink("f", at + "/l")
    # Sockets get the mode of their descriptor, without the umask and also below an ACL.
    for mode in 0o777, 0o700, 0o755:
        with socket.socket(socket.AF_UNIX) as named:
            os.fchmod(named.fileno(), mode)
            named.bind(at + "/s%o" % mode)
    named = os.open(at, os.O_TMPFILE | os.O_RDWR, 0o666)
    said = [oct(os.fstat(named).st_mode)]
    os.close(named)
    for name in sorted(os.listdir(at)):
        said.append(name + oct(os.lstat(at + "/" + name).st_mode))
    return said
for name, value in lists.items():
    os.mkdir(name)
    if value: os.setxattr(name, "system.posix_acl_default", value)
    for umask in (0, 0o22, 0o77):
        os.umask(umask)
        at = "%s/%o" % (name, umask)
        os.mkdir(at)
        if value: os.setxattr(at, "system.posix_acl_default", value)
        else: assert "system.posix_acl_default" not in os.listxattr(at)
        print(name, oct(umask), make(at), oct(os.umask(umask)))
        def many(which):
            for i in range(50): os.close(os.open("%s/%d.%d" % (at, which, i), os.O_CREAT | os.O_RDWR, 0o666))
        threads = [threading.Thread(target=many, args=(i,)) for i in range(3)]
        for thread in threads: thread.start()
        for _ in range(5): subprocess.run(["true"], check=True)
        for thread in threads: thread.join()
    os.umask(0o22)
"#;

/// The umask was applied in addition to the ACL, so that files were not shared with the group. It
/// was not applied to sockets below an ACL.
#[test]
fn a_default_acl_replaces_the_umask_in_a_run() {
    let script = format!("python3 -c '{SCRIPT}'");
    run_on_passthrough("lists", &["python3"], &script);
    compare("lists", &["python3"], "memory:", &script);
    let dispatch = ["--dispatch"];
    compare_with(&dispatch, "lists", &["python3"], "passthrough:SRC,backing=off", &script);
}

/// The kernel copies between two mounts of one kind. A run refused to, if it serves one of them.
#[test]
fn ranges_are_copied_between_mounts_and_not_to_other_kinds_of_file_system() {
    if !is_there("python3") {
        println!("skipped: python3 is not installed");
        return;
    }
    let place = TestPlace::new();
    let script = r#"
import errno, os
for source, target in (("/dt-a", "/dt-b"), ("/dt-b", "/dt-a"), ("/dt-a", "/dev/shm"), ("/dev/shm", "/dt-b")):
    name = "/defuse-copy-%d" % os.getpid()
    with open(source + name, "w+b") as a, open(target + name, "w+b") as b:
        a.write(bytes(range(256)) * 2000); a.flush(); a.seek(100)
        try:
            whole = os.copy_file_range(a.fileno(), b.fileno(), 400000, offset_dst=10)
            while whole < 400000:
                whole += os.copy_file_range(a.fileno(), b.fileno(), 400000 - whole, offset_dst=10 + whole)
            b.seek(10)
            print(whole, a.tell() - 100 == whole, b.read() == (bytes(range(256)) * 2000)[100:400100])
        except OSError as error: print(errno.errorcode[error.errno])
    os.unlink(source + name); os.unlink(target + name)
"#;
    let backed = "/dt-a=passthrough:src";
    for served in ["memory:", "passthrough:mnt,backing=off"] {
        let other = format!("/dt-b={served}");
        let run = ["run", "--mount", backed, "--mount", &other, "--", "python3", "-c", script];
        let seen = finish(place.command(&run));
        let copied = "400000 True True\n";
        assert_eq!(seen.out, format!("{copied}{copied}EXDEV\nEXDEV\n"), "{served}: {}", seen.err);
    }
}
