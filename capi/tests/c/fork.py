"""A child of os.fork() of a program with a mount, by ctypes: `fork.py LIBRARY SOURCE served|private|refused`, as fork.c."""
import ctypes, errno, os, signal, sys

library = ctypes.CDLL(sys.argv[1], use_errno=True)
source, rights = sys.argv[2].encode(), sys.argv[3]


def call(name, *arguments):
    function = getattr(library, "defuse_" + name)
    function.restype = ctypes.c_ssize_t if name in ("read", "write") else ctypes.c_int
    result = function(*arguments)
    return result if result >= 0 else -ctypes.get_errno()


def put(path, text):
    fd = call("open", path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    if fd < 0:
        return fd
    written = call("write", fd, text, ctypes.c_size_t(len(text)))
    synced = call("fsync", fd)
    closed = call("close", fd)
    return min(written, synced, closed)


def get(path):
    fd = call("open", path, os.O_RDONLY, 0)
    if fd < 0:
        return fd
    buffer = ctypes.create_string_buffer(64)
    count = call("read", fd, buffer, ctypes.c_size_t(63))
    call("close", fd)
    return buffer.raw[:count]


assert call("mount", b"m:", source) == 0
assert put(b"m:/kept", b"kept") == 0
child = os.fork()
if child == 0:
    signal.alarm(60)
    refused = rights == "refused"
    expected = (-errno.ENOTCONN, -errno.ENOTCONN) if refused else (0, b"kept")
    found = (put(b"m:/child", b"of the child"), get(b"m:/kept"))
    if found != expected:
        print(found, file=sys.stderr)
    # With the exit handlers of the library, and what Python has of them.
    sys.exit(0 if found == expected else 1)
assert os.waitpid(child, 0)[1] == 0
expected = b"of the child" if rights == "served" else -errno.ENOENT
assert get(b"m:/child") == expected, get(b"m:/child")
assert put(b"m:/kept", b"later") == 0 and get(b"m:/kept") == b"later"
assert call("unmount", b"m:", 0) == 0
print("passed")
