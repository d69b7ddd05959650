"""File systems in Python, served in this process, by the kernel and on a socket."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

import defuse_fs
from conftest import ROOT, unique, wait_for
from dictionary import DictionaryFileSystem
from test_files import Kernel, story

needs_kernel = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="skipped: only root mounts, on /dev/fuse"
)


@pytest.fixture
def mountpoint(tmp_path):
    path = tmp_path / "mount"
    path.mkdir()
    yield path
    subprocess.run(["umount", "--lazy", path], stderr=subprocess.DEVNULL)


def test_a_file_system_in_python_behaves_as_one_of_the_kernel(tmp_path):
    """Hard links have no common count in it, and times are floating point numbers."""
    program, target = DictionaryFileSystem(), unique()
    defuse_fs.mount(target, program)
    (tmp_path / "kernel").mkdir()
    ours, kernels = story(defuse_fs, target), story(Kernel(), str(tmp_path / "kernel"))
    for mine, its in zip(ours, kernels):
        if its[0] not in ("link", "unlink", "utime in nanoseconds", "types", "chown", "access"):
            assert mine == its
    defuse_fs.setxattr(target + "/d/file", "user.a", b"1")
    assert defuse_fs.listxattr(target + "/d/file") == ["user.a"] and defuse_fs.getxattr(target + "/d/file", "user.a") == b"1"
    assert defuse_fs.statvfs(target).f_blocks == 1000
    assert program.opened == []
    defuse_fs.unmount(target)


@needs_kernel
def test_the_kernel_mounts_a_file_system_in_python(mountpoint, tmp_path):
    program = DictionaryFileSystem()
    with defuse_fs.ProgramServer(program, mountpoint) as server:
        assert "fuse.defuse" in open("/proc/self/mountinfo").read()
        # Other processes: a mistake would not stop this interpreter.
        script = """
set -e
cd "$1"
mkdir d; echo one > d/file; cat d/file; echo two >> d/file; mv d/file d/moved; ln -s moved d/link; cat d/link
chmod 600 d/moved; stat -c '%a %s %F' d/moved; truncate -s 2 d/moved; wc -c < d/moved
dd if=/dev/urandom of=random bs=64k count=20 2> /dev/null; cp random copy; cmp random copy; ls; rm -r d copy random; ls
touch -d @5 last; stat -c %Y last
"""
        done = subprocess.run(["sh", "-c", script, "sh", mountpoint], capture_output=True, text=True, timeout=120)
        assert done.stderr == ""
        assert done.stdout.split("\n") == ["one", "one", "two", "600 8 regular file", "2", "copy", "d", "random", "5", ""]
        with pytest.raises(OSError) as raised:
            defuse_fs.ProgramServer(program, mountpoint / "none")
        assert raised.value.errno == errno.ENOENT
        server.stop()
        server.wait()
    assert not os.path.ismount(mountpoint)


@needs_kernel
def test_a_mount_that_is_in_use_is_busy(mountpoint):
    server = defuse_fs.ProgramServer(DictionaryFileSystem(), mountpoint)
    user = subprocess.Popen(["sleep", "100"], cwd=mountpoint)
    try:
        with pytest.raises(OSError) as raised:
            server.stop()
        assert raised.value.errno == errno.EBUSY
    finally:
        user.kill()
        user.wait()
    server.stop()


@needs_kernel
@pytest.mark.parametrize("end", ["umount", "SIGINT", "SIGTERM"])
def test_the_example_serves_until_it_is_ended(end, mountpoint):
    example = subprocess.Popen([sys.executable, ROOT / "python/examples/hello.py", mountpoint], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: os.path.ismount(mountpoint))
    file = mountpoint / "hello"
    done = subprocess.run(["sh", "-c", 'cat "$1"; echo again > "$1"; cat "$1"; echo more >> "$1"; cat "$1"', "sh", file], capture_output=True, text=True)
    assert done.stdout == "Hello, world!\nagain\nagain\nmore\n"
    if end == "umount":
        subprocess.run(["umount", mountpoint], check=True)
    else:
        example.send_signal(getattr(signal, end))
    assert (example.wait(60), example.stderr.read()) == (0, "")
    assert not os.path.ismount(mountpoint)


def test_a_run_uses_a_file_system_in_python(defuse, tmp_path):
    socket = tmp_path / "socket"
    with defuse_fs.ProgramServer(DictionaryFileSystem(), socket=socket):
        script = "echo one > /py/file; cat /py/file; mkdir /py/d; ls /py"
        done = subprocess.run([defuse, "run", "--mount", f"/py=socket:{socket}", "--", "sh", "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.stderr) == ("one\nd\nfile\n", "")
        target = unique()
        defuse_fs.mount(target, f"socket:{socket}")
        assert defuse_fs.read_file(target + "/file") == b"one\n"
        defuse_fs.unmount(target)
    assert not socket.exists()


def test_an_exception_that_is_no_answer_is_shown(monkeypatch):
    class Broken:
        def getattr(self, path, fh):
            if path == "/":
                return os.stat("/")
            return 1 / 0

        def readdir(self, path, fh):
            return ["a/b"]

    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: shown.append(it.exc_type))
    defuse_fs.mount("broken:", Broken())
    for call in (lambda: defuse_fs.stat("broken:/x"), lambda: defuse_fs.listdir("broken:")):
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.EIO
    assert shown == [ZeroDivisionError, TypeError]
    defuse_fs.unmount("broken:")
    with pytest.raises(TypeError, match="needs the method getattr"):
        defuse_fs.mount("none:", object())
    with pytest.raises(OSError, match="only ro, rw"):
        defuse_fs.mount("none:", Broken(), "size=3")


def test_a_write_is_what_its_method_says():
    class Partial(DictionaryFileSystem):
        taken = 3

        def write(self, path, data, offset, fh):
            super().write(path, data[: self.taken], offset, fh)
            return self.taken

    program, target = Partial(), unique()
    defuse_fs.mount(target, program)
    with defuse_fs.open(target + "/file", "wb", buffering=0) as file:
        assert file.write(b"12345") == 3
        defuse_fs.write_file(target + "/other", b"1234567")
        assert defuse_fs.read_file(target + "/other") == b"1234567"
        program.taken = 0
        with pytest.raises(OSError) as raised:
            file.write(b"67")
        assert raised.value.errno == errno.EIO
        program.taken = 100
        assert file.write(b"67") == 2
    defuse_fs.unmount(target)


def test_many_threads_use_one_file_system_in_python():
    target, program = unique(), DictionaryFileSystem()
    defuse_fs.mount(target, program)
    wrong = []

    def work(number):
        try:
            for round in range(30):
                path = f"{target}/{number}-{round % 3}"
                defuse_fs.write_file(path, bytes([number]) * 1000)
                assert defuse_fs.read_file(path) == bytes([number]) * 1000
                defuse_fs.rename(path, path + "-new")
                defuse_fs.unlink(path + "-new")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and program.opened == [] and list(program.files) == ["/"]
    defuse_fs.unmount(target)
