"""Random combinations of modes, owners, groups, access lists and operations, in the working directory.

Usage: permissions.py SEED COUNT. Root makes a directory with a file for each combination; one process
that is a user with supplementary groups does to each what the seed says; root looks at what is left.
One line a combination is printed: what was tried, how it went, and what is there afterwards. Two file
systems that are alike print the same.
"""

import errno
import os
import random
import stat
import struct
import sys

USER, GROUP, EXTRA, OTHER = 4001, 4002, 4003, 4004
UIDS, GIDS = [0, USER, OTHER], [0, GROUP, EXTRA, OTHER]
DIRS = [0o777, 0o755, 0o1777, 0o700, 0o2777, 0o770, 0o3777, 0o775, 0o711, 0o733]
FILES = [0o644, 0o666, 0o600, 0o660, 0o4755, 0o6755, 0o4777, 0o6777, 0o2755, 0o2766, 0o2666, 0o6766,
         0o664, 0o000, 0o060, 0o006, 0o755, 0o777]
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


def acl(entries):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def some_acl(rng):
    none, perm = 0xFFFFFFFF, lambda: rng.randrange(8)
    entries = [(1, perm(), none)]
    entries += [(2, perm(), rng.choice([USER, OTHER]))] if rng.random() < 0.6 else []
    entries.append((4, perm(), none))
    entries += [(8, perm(), rng.choice([GROUP, EXTRA, OTHER]))] if rng.random() < 0.6 else []
    entries += [(0x10, perm(), none), (0x20, perm(), none)]
    return acl(entries)


def write(flags, then):
    def run(path, rng):
        fd = os.open(path, flags)
        try:
            return then(fd, rng)
        finally:
            os.close(fd)
    return run


def create(flags):
    def run(path, rng):
        mode = rng.choice([0o644, 0o6755, 0o2755, 0o666, 0o4777])
        fd = os.open(path, os.O_CREAT | os.O_RDWR | flags, mode)
        os.close(fd)
    return run


def chown(path, rng):
    uid = rng.choice([-1, -1, USER, OTHER])
    gid = rng.choice([-1, -1, GROUP, EXTRA, OTHER])
    os.chown(path, uid, gid)


def fchown(fd, rng):
    os.fchown(fd, rng.choice([-1, USER]), rng.choice([-1, EXTRA, GROUP]))


def chmod(path, rng):
    os.chmod(path, rng.choice(FILES))


def copy(path, rng):
    fd = os.open(path, os.O_RDWR)
    try:
        os.copy_file_range(fd, fd, 4, 0, 8)
    finally:
        os.close(fd)


def near(path, name):
    return os.path.join(os.path.dirname(path), name)


OPERATIONS = {
    "read": write(os.O_RDONLY, lambda fd, rng: os.read(fd, 4)),
    "open for both": write(os.O_RDWR, lambda fd, rng: None),
    "write": write(os.O_WRONLY, lambda fd, rng: os.write(fd, b"x")),
    "append": write(os.O_WRONLY | os.O_APPEND, lambda fd, rng: os.write(fd, b"x")),
    "write nothing": write(os.O_WRONLY, lambda fd, rng: os.write(fd, b"")),
    "open and truncate": write(os.O_WRONLY | os.O_TRUNC, lambda fd, rng: None),
    "ftruncate": write(os.O_WRONLY, lambda fd, rng: os.ftruncate(fd, 3)),
    "allocate": write(os.O_WRONLY, lambda fd, rng: os.posix_fallocate(fd, 0, 100)),
    "fchmod": write(os.O_RDONLY, lambda fd, rng: os.fchmod(fd, rng.choice(FILES))),
    "fchown": write(os.O_RDONLY, fchown),
    "copy": copy,
    "truncate": lambda path, rng: os.truncate(path, 5),
    "create": create(0),
    "create anew": create(os.O_EXCL),
    "create near": lambda path, rng: create(os.O_EXCL)(near(path, "new"), rng),
    "chmod": chmod,
    "chmod directory": lambda path, rng: os.chmod(os.path.dirname(path), rng.choice(DIRS)),
    "chown": chown,
    "chown directory": lambda path, rng: chown(os.path.dirname(path), rng),
    "touch": lambda path, rng: os.utime(path),
    "set times": lambda path, rng: os.utime(path, (1, 2)),
    "unlink": lambda path, rng: os.unlink(path),
    "rename": lambda path, rng: os.rename(path, near(path, "new")),
    "rename over": lambda path, rng: os.rename(near(path, "own"), path),
    "rename onto own": lambda path, rng: os.rename(path, near(path, "own")),
    "link": lambda path, rng: os.link(path, near(path, "new")),
    "symlink": lambda path, rng: os.symlink("f", near(path, "new")),
    "mkdir": lambda path, rng: os.mkdir(near(path, "new"), rng.choice([0o777, 0o2755, 0o1777])),
    "mkfifo": lambda path, rng: os.mkfifo(near(path, "new"), 0o666),
    "mknod": lambda path, rng: os.mknod(near(path, "new"), stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "set attribute": lambda path, rng: os.setxattr(path, "user.x", b"y"),
    "remove attribute": lambda path, rng: os.removexattr(path, "user.there"),
    "read attribute": lambda path, rng: os.getxattr(path, "user.there"),
    "set capability": lambda path, rng: os.setxattr(path, "security.capability", CAPABILITY),
    "remove capability": lambda path, rng: os.removexattr(path, "security.capability"),
    "set list": lambda path, rng: os.setxattr(path, "system.posix_acl_access", some_acl(rng)),
    "remove list": lambda path, rng: os.removexattr(path, "system.posix_acl_access"),
    "set default": lambda path, rng: os.setxattr(
        os.path.dirname(path), "system.posix_acl_default", some_acl(rng)),
    "access": lambda path, rng: os.access(path, rng.randrange(8)),
    "list": lambda path, rng: sorted(os.listdir(os.path.dirname(path))),
    "stat": lambda path, rng: oct(os.stat(path).st_mode),
}


def generator(seed, number):
    return random.Random(f"{seed}/{number}")


def prepare(seed, number):
    """The directory of one combination; what was made, in words."""
    rng = generator(seed, number)
    directory = f"d{number}"
    path = f"{directory}/f"
    os.mkdir(directory)
    with open(path, "wb") as file:
        file.write(b"0123456789abcdef")
    with open(f"{directory}/own", "wb") as file:
        file.write(b"own")
    os.chown(f"{directory}/own", rng.choice([USER, USER, OTHER]), GROUP)
    os.setxattr(path, "user.there", b"1")
    uid, gid, mode = rng.choice(UIDS), rng.choice(GIDS), rng.choice(FILES)
    os.chown(path, uid, gid)
    os.chmod(path, mode)
    words = f"f {uid}:{gid} {mode:o}"
    if rng.random() < 0.3:
        os.setxattr(path, "system.posix_acl_access", some_acl(rng))
        words += " acl"
    if rng.random() < 0.2:
        os.setxattr(path, "security.capability", CAPABILITY)
        words += " cap"
    uid, gid, mode = rng.choice(UIDS), rng.choice(GIDS), rng.choice(DIRS)
    os.chown(directory, uid, gid)
    os.chmod(directory, mode)
    words += f" in {uid}:{gid} {mode:o}"
    if rng.random() < 0.2:
        os.setxattr(directory, "system.posix_acl_default", some_acl(rng))
        words += " default"
    return words


def act(seed, number):
    """What the user does: how it went, in words."""
    rng = generator(seed, f"act {number}")
    name = rng.choice(sorted(OPERATIONS))
    os.umask(rng.choice([0o022, 0o077, 0]))
    try:
        result = OPERATIONS[name](f"d{number}/f", rng)
    except OSError as error:
        result = errno.errorcode[error.errno]
    return f"{name}: {result}"


def look(path):
    """What is there, for root."""
    found = os.lstat(path)
    words = f"{os.path.basename(path)} {found.st_mode:o} {found.st_uid}:{found.st_gid}"
    if not stat.S_ISDIR(found.st_mode):
        words += f" {found.st_size} {found.st_nlink}"
    if not stat.S_ISLNK(found.st_mode):
        for name in sorted(os.listxattr(path)):
            words += f" {name}={os.getxattr(path, name).hex()}"
    return words


def user_acts(seed, count, out):
    os.setgroups([EXTRA])
    os.setresgid(GROUP, GROUP, GROUP)
    os.setresuid(USER, USER, USER)
    for number in range(count):
        os.write(out, (act(seed, number) + "\n").encode())
    os.close(out)


def main():
    seed, count = sys.argv[1], int(sys.argv[2])
    os.umask(0o022)
    made = [prepare(seed, number) for number in range(count)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        user_acts(seed, count, writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        went = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert status == 0 and len(went) == count, (status, len(went))
    for number in range(count):
        directory = f"d{number}"
        left = [look(directory)]
        left += [look(os.path.join(directory, name)) for name in sorted(os.listdir(directory))]
        print(f"{number} [{made[number]}] {went[number]} -> {'; '.join(left)}")


main()
