"""Set-user-id and set-group-id after each change of a file, by its owner, a member of its group, and others."""
import ctypes, errno, mmap, os, subprocess, sys

OWNER, OTHER, GROUP, FOREIGN = 65001, 65002, 65101, 65102
MODES = 0o6777, 0o6767, 0o2777, 0o2767, 0o4777, 0o2666, 0o6666
libc = ctypes.CDLL(None, use_errno=True)


def store(name):
    with open(name, "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        m[0:1] = b"s"
        m.flush()


def allocate(name, how):
    fd = os.open(name, os.O_WRONLY)
    if libc.fallocate(fd, how, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "fallocate")


def copy(name):
    with open("source", "rb") as f, open(name, "r+b") as to:
        os.copy_file_range(f.fileno(), to.fileno(), 10)


WAYS = {
    "write": lambda name: open(name, "r+b", 0).write(b"w"),
    "append": lambda name: open(name, "ab", 0).write(b"w"),
    "pwrite of nothing": lambda name: os.pwrite(os.open(name, os.O_WRONLY), b"", 0),
    "truncate": lambda name: os.truncate(name, 5),
    "ftruncate": lambda name: os.ftruncate(os.open(name, os.O_WRONLY), 5),
    "open and truncate": lambda name: os.open(name, os.O_WRONLY | os.O_TRUNC),
    "fallocate": lambda name: allocate(name, 0),
    "punch": lambda name: allocate(name, 3),
    "copy": copy,
    "store": store,
    "chown to the same": lambda name: os.chown(name, os.stat(name).st_uid, os.stat(name).st_gid),
    "chgrp": lambda name: os.chown(name, -1, GROUP),
}


def act(who):
    for way, run in WAYS.items():
        for mode in MODES:
            name = f"{who}-{way}-{mode:o}"
            try:
                run(name)
                said = "done"
            except OSError as error:
                said = errno.errorcode[error.errno]
            print(f"{who} {way} {mode:o}: {said} {os.stat(name).st_mode & 0o7777:o}", flush=True)


def main():
    os.chmod(".", 0o777)
    with open("source", "wb") as f:
        f.write(b"s" * 100)
    # User, group and further groups of the process.
    users = {
        "owner in the group": (OWNER, GROUP, ""),
        "owner outside": (OWNER, FOREIGN, ""),
        "member": (OTHER, GROUP, ""),
        "member by a further group": (OTHER, FOREIGN, f"{FOREIGN + 1},{GROUP}"),
        "other": (OTHER, FOREIGN, ""),
        "root": (0, 0, ""),
    }
    for who, (uid, gid, groups) in users.items():
        for way in WAYS:
            for mode in MODES:
                name = f"{who}-{way}-{mode:o}"
                with open(name, "wb") as f:
                    f.write(b"x" * 5000)
                os.chown(name, OWNER, GROUP)
                os.chmod(name, mode)
        sys.stdout.flush()
        further = ["--groups", groups] if groups else ["--clear-groups"]
        command = ["setpriv", "--reuid", str(uid), "--regid", str(gid), *further]
        subprocess.run([*command, "/usr/bin/python3", "script.py", who], check=True)


act(sys.argv[1]) if len(sys.argv) > 1 else main()
