"""Processes: fork(2), the exit of the interpreter, signals."""

import errno
import os
import signal
import subprocess
import sys

import pytest

import defuse_fs
from conftest import python, unique


def in_child(work):
    """Run work in a child of fork(2), and return what it wrote to a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.write(writer, repr(work()).encode())
        except OSError as error:
            os.write(writer, f"errno {error.errno}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.parametrize("rights", ["private", "served", "refused", "cached"])
def test_a_child_may_do_what_the_table_says(rights, tmp_path, request):
    (tmp_path / "below").mkdir()
    source = {
        "private": lambda: "memory:",
        "served": lambda: f"passthrough:{tmp_path}/below",
        "refused": lambda: request.getfixturevalue("image"),
        "cached": lambda: request.getfixturevalue("shared"),
    }[rights]()
    target = unique()
    defuse_fs.mount(target, source)
    defuse_fs.write_file(target + "/kept", b"kept")
    write = in_child(lambda: defuse_fs.write_file(target + "/child", b"of the child"))
    read = in_child(lambda: defuse_fs.read_file(target + "/kept"))
    assert write == ("None" if rights in ("private", "served") else f"errno {errno.ENOTCONN}")
    assert read == ("b'kept'" if rights in ("private", "served") else f"errno {errno.ENOTCONN}")
    assert defuse_fs.exists(target + "/child") == (rights == "served")
    defuse_fs.write_file(target + "/kept", b"later")
    assert defuse_fs.read_file(target + "/kept") == b"later"
    defuse_fs.unmount(target)


def test_buffers_are_written_and_an_image_is_clean_after_the_exit(defuse, image):
    code = """
import sys, defuse_fs
defuse_fs.mount("u:", sys.argv[1])
kept = defuse_fs.open("u:/binary", "wb")
kept.write(b"never closed")
text = defuse_fs.open("u:/text", "w")
text.write("nor this")
class Cycle: pass
cycle = Cycle()
cycle.itself, cycle.file = cycle, defuse_fs.open("u:/cycle", "wb")
cycle.file.write(b"in a cycle")
del cycle
"""
    done = python(code, image)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    subprocess.run([defuse, "fsck", image.partition(":")[2]], check=True, stdout=subprocess.DEVNULL)
    target = unique()
    defuse_fs.mount(target, image)
    assert defuse_fs.read_file(target + "/binary") == b"never closed"
    assert defuse_fs.read_file(target + "/text") == b"nor this"
    assert defuse_fs.read_file(target + "/cycle") == b"in a cycle"
    defuse_fs.unmount(target)


def test_the_exit_waits_for_no_thread_that_reads(image):
    code = """
import sys, threading, time, defuse_fs
defuse_fs.mount("u:", sys.argv[1])
defuse_fs.write_file("u:/file", bytes(1 << 20))
def read():
    while True:
        defuse_fs.read_file("u:/file")
for _ in range(3):
    threading.Thread(target=read, daemon=True).start()
time.sleep(0.2)
"""
    done = python(code, image)
    assert done.returncode == 0, done.stderr


def test_a_child_and_its_parent_both_end(tmp_path):
    code = """
import os, sys, defuse_fs
defuse_fs.mount("p:", "passthrough:" + sys.argv[1])
defuse_fs.write_file("p:/a", b"1")
child = os.fork()
if child == 0:
    defuse_fs.write_file("p:/b", b"2")
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert defuse_fs.read_file("p:/b") == b"2"
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_a_call_between_pieces(mem):
    """The handler of a signal runs although the main thread is in calls all the time."""
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            defuse_fs.exists(mem + "/none")
