"""Files, names and attributes, compared with what os and io do on a directory of the kernel."""

import errno
import io
import os
import stat
import threading
import time

import pytest

import defuse_fs
from conftest import VOLUMES, unique


class Kernel:
    """os with the names of defuse_fs, where they differ."""

    open = staticmethod(io.open)
    exists = staticmethod(os.path.exists)
    isdir = staticmethod(os.path.isdir)

    @staticmethod
    def copy_file(src, dst):
        with io.open(src, "rb") as source, io.open(dst, "wb") as target:
            return target.write(source.read())

    def __getattr__(self, name):
        return getattr(os, name)


def outcome(call, *arguments, **more):
    """The result of a call as both sides must have it."""
    try:
        return call(*arguments, **more)
    except OSError as error:
        return type(error), error.errno
    except (ValueError, TypeError, OverflowError) as error:
        return type(error)


def story(calls, at):
    """Many calls, with their outcomes."""

    def mode(path):
        found = calls.lstat(path)
        return found.st_mode, found.st_nlink if not stat.S_ISDIR(found.st_mode) else None, found.st_size if stat.S_ISREG(found.st_mode) else None

    def write(path, how, data):
        with calls.open(path, how) as file:
            return file.write(data)

    def read(path, how="rb"):
        with calls.open(path, how) as file:
            return file.read()

    def names(path):
        with calls.scandir(path) as entries:
            return sorted((entry.name, entry.is_dir(), entry.is_file(), entry.is_symlink(), entry.stat().st_size if entry.is_file() else 0) for entry in entries)

    yield "mkdir", outcome(calls.mkdir, at + "/d", 0o750), mode(at + "/d")
    yield "mkdir again", outcome(calls.mkdir, at + "/d")
    yield "makedirs", outcome(calls.makedirs, at + "/d/e/f"), outcome(calls.makedirs, at + "/d/e/f"), outcome(calls.makedirs, at + "/d/e/f", exist_ok=True)
    yield "write", outcome(write, at + "/d/file", "wb", b"x" * 10000), mode(at + "/d/file"), read(at + "/d/file")
    yield "append", outcome(write, at + "/d/file", "ab", b"end"), len(read(at + "/d/file"))
    yield "exclusive", outcome(write, at + "/d/file", "xb", b""), outcome(write, at + "/d/new", "xb", b"new")
    yield "text", outcome(write, at + "/d/text", "w", "a\nb"), outcome(read, at + "/d/text", "r")
    yield "modes", [outcome(calls.open, at + "/d/text", how) for how in ("", "rw", "rr", "q", "b", "rbt")]
    yield "link", outcome(calls.link, at + "/d/file", at + "/d/hard"), mode(at + "/d/hard")
    yield "symlink", outcome(calls.symlink, "file", at + "/d/soft"), outcome(calls.readlink, at + "/d/soft"), mode(at + "/d/soft")
    yield "dangling", outcome(calls.symlink, "gone", at + "/d/dangling"), outcome(calls.stat, at + "/d/dangling"), calls.exists(at + "/d/dangling")
    yield "scandir", names(at + "/d")
    yield "listdir", sorted(calls.listdir(at + "/d")), sorted(calls.listdir(os.fsencode(at) + b"/d")), outcome(calls.listdir, at + "/d/file")
    yield "rename", outcome(calls.rename, at + "/d/new", at + "/d/text"), outcome(calls.rename, at + "/gone", at + "/d"), read(at + "/d/text")
    yield "rename of directories", outcome(calls.rename, at + "/d/e", at + "/d/text"), outcome(calls.rename, at + "/d/text", at + "/d/e")
    yield "truncate", outcome(calls.truncate, at + "/d/text", 1), read(at + "/d/text"), outcome(calls.truncate, at + "/d/text", -1), outcome(calls.truncate, at + "/d", 1)
    yield "chmod", outcome(calls.chmod, at + "/d/text", 0o601), mode(at + "/d/text")
    yield "utime", outcome(calls.utime, at + "/d/text", (1, 2.5)), calls.stat(at + "/d/text").st_mtime_ns, calls.stat(at + "/d/text").st_atime
    yield "utime in nanoseconds", outcome(calls.utime, at + "/d/text", ns=(3, 10**18 + 7)), calls.stat(at + "/d/text").st_mtime_ns
    yield "utime of both", outcome(calls.utime, at + "/d/text", (1, 2), ns=(3, 4))
    yield "access", calls.access(at + "/d/text", os.R_OK), calls.access(at + "/gone", os.F_OK)
    yield "chown", outcome(calls.chown, at + "/d/text", os.getuid(), -1), outcome(calls.chown, at + "/d/text", -2, -1), outcome(calls.chown, at + "/d/text", 2**32, -1)
    yield "copy", outcome(calls.copy_file, at + "/d/file", at + "/d/copy"), read(at + "/d/copy") == read(at + "/d/file")
    yield "mkfifo", outcome(calls.mkfifo, at + "/d/fifo"), stat.S_ISFIFO(mode(at + "/d/fifo")[0])
    yield "walk", sorted((path[len(at) :], sorted(dirs), sorted(files)) for path, dirs, files in calls.walk(at))
    yield "walk upwards", [path[len(at) :] for path, _, _ in calls.walk(at, topdown=False)]
    yield "rmdir", outcome(calls.rmdir, at + "/d"), outcome(calls.rmdir, at + "/d/e/f"), outcome(calls.rmdir, at + "/d/file")
    yield "unlink", outcome(calls.unlink, at + "/d/hard"), outcome(calls.unlink, at + "/d/hard"), outcome(calls.unlink, at + "/d"), mode(at + "/d/file")
    yield "types", outcome(calls.mkdir, "a\0b"), outcome(calls.stat, None)
    name = os.fsdecode(b"/\xff\xfe")
    yield "names of bytes", outcome(write, at + name, "wb", b"1"), sorted(calls.listdir(os.fsencode(at)))


@pytest.mark.parametrize("source", ["memory:", "passthrough:", "uhs:", *VOLUMES])
def test_calls_have_the_outcomes_of_os(source, tmp_path, request):
    if source == "uhs:":
        source = request.getfixturevalue("image")
    elif source == "passthrough:":
        (tmp_path / "below").mkdir()
        source += str(tmp_path / "below")
    source = VOLUMES.get(source, source)
    target = unique()
    defuse_fs.mount(target, source)
    (tmp_path / "kernel").mkdir()
    # A volume has the files of other tests.
    root = target + "/story"
    defuse_fs.mkdir(root)
    ours, kernels = story(defuse_fs, root), story(Kernel(), str(tmp_path / "kernel"))
    for mine, its in zip(ours, kernels):
        if its[0] == "types":
            assert mine[1] == its[1]
            assert mine[2] is TypeError
            continue
        assert mine == its
    defuse_fs.rmtree(root)
    assert not defuse_fs.exists(root)
    defuse_fs.unmount(target)


def file_story(open_file, path):
    """The calls of one file, with their outcomes."""
    for mode in ("wb", "w+b", "r+b", "rb", "ab", "a+b", "xb", "w", "r", "r+", "a"):
        for buffering in (-1, 0, 1, 16):
            try:
                file = open_file(path, mode, buffering)
            except (OSError, ValueError) as error:
                yield mode, buffering, type(error)
                continue
            data = "0123456789\nabc" if "b" not in mode else b"0123456789\nabc"
            with file:
                yield mode, buffering, "has", file.mode, file.readable(), file.writable(), file.seekable(), file.isatty(), file.tell()
                yield "write", outcome(file.write, data), outcome(file.tell)
                yield "flush", outcome(file.flush)
                yield "seek", outcome(file.seek, 3), outcome(file.read, 4), outcome(file.readline), outcome(file.tell)
                yield "end", outcome(file.seek, 0, 2), outcome(file.read), outcome(file.truncate, 12), outcome(file.tell)
                yield "wrong", outcome(file.seek, -1), outcome(file.seek, 0, 9), outcome(file.fileno) is not None
            yield "closed", file.closed, outcome(file.read), outcome(file.tell), outcome(file.close)


@pytest.mark.filterwarnings("ignore:line buffering")
def test_files_are_files_of_io(mem, tmp_path):
    ours = file_story(defuse_fs.open, mem + "/file")
    kernels = file_story(io.open, str(tmp_path / "file"))
    count = 0
    for mine, its in zip(ours, kernels):
        assert mine == its
        count += 1
    assert count > 100


def test_attributes_have_the_types_of_os(mem):
    defuse_fs.write_file(mem + "/file", b"12345")
    found = defuse_fs.stat(mem + "/file")
    assert isinstance(found, os.stat_result) and found[6] == found.st_size == 5
    assert found.st_mtime_ns == int(found.st_mtime_ns) and abs(found.st_mtime - found.st_mtime_ns / 1e9) < 1e-3
    assert found.st_blksize > 0 and found.st_blocks >= 0 and found.st_rdev == 0 and found[8] == int(found.st_mtime)
    with defuse_fs.open(mem + "/file") as file:
        assert defuse_fs.stat(file) == found and defuse_fs.stat(file.buffer.raw) == found
        assert file.buffer.raw.opened.stat() == found
    space = defuse_fs.statvfs(mem)
    assert isinstance(space, os.statvfs_result) and space.f_bavail * space.f_frsize > 0 and space.f_namemax == 255


def test_extended_attributes_are_those_of_os(tmp_path):
    defuse_fs.mount("xattrs:", f"passthrough:{tmp_path}")
    (tmp_path / "file").touch()
    try:
        os.setxattr(tmp_path / "file", "user.a", b"1")
    except OSError:
        pytest.skip("not here: the file system of temporary files has no extended attributes")
    assert defuse_fs.getxattr("xattrs:/file", "user.a") == b"1"
    defuse_fs.setxattr("xattrs:/file", "user.b", bytearray(b"2"), os.XATTR_CREATE)
    with pytest.raises(FileExistsError):
        defuse_fs.setxattr("xattrs:/file", "user.b", b"3", os.XATTR_CREATE)
    assert sorted(defuse_fs.listxattr("xattrs:/file")) == sorted(os.listxattr(tmp_path / "file"))
    defuse_fs.removexattr("xattrs:/file", b"user.a")
    with pytest.raises(OSError) as raised:
        defuse_fs.getxattr("xattrs:/file", "user.a")
    assert raised.value.errno == errno.ENODATA and os.listxattr(tmp_path / "file") == ["user.b"]
    defuse_fs.unmount("xattrs:")


def test_read_only_and_other_options_apply(mem):
    defuse_fs.mount("small:", "memory:,size=1M")
    with pytest.raises(OSError) as raised:
        defuse_fs.write_file("small:/large", bytes(4 << 20))
    assert raised.value.errno == errno.ENOSPC
    defuse_fs.unmount("small:")
    defuse_fs.mount("constant:", "memory:", "ro")
    with pytest.raises(OSError) as raised:
        defuse_fs.mkdir("constant:/d")
    assert raised.value.errno == errno.EROFS
    assert ("constant:", "memory:", 0) in defuse_fs.mounts()
    defuse_fs.unmount("constant:")
    with pytest.raises(OSError, match="known are") as raised:
        defuse_fs.mount("none:", "none:")
    assert raised.value.errno == errno.EINVAL and raised.value.filename == "none:"
    assert any(form.startswith("uhs:") for form, _ in defuse_fs.kinds())


def test_a_mount_with_open_files_is_busy_and_a_lazy_one_keeps_them(mem):
    defuse_fs.mount("busy:", "memory:")
    file = defuse_fs.open("busy:/file", "w+b", buffering=0)
    with pytest.raises(OSError) as raised:
        defuse_fs.unmount("busy:")
    assert raised.value.errno == errno.EBUSY
    defuse_fs.unmount("busy:", lazy=True)
    file.write(b"still there")
    file.seek(0)
    assert file.read() == b"still there"
    file.close()
    with pytest.raises(OSError):
        defuse_fs.stat("busy:/file")


def test_data_is_neither_copied_nor_mixed_for_buffers_of_any_type(mem):
    numpy = pytest.importorskip("numpy")
    numbers = numpy.arange(1 << 16, dtype="<f8").reshape(256, 256)
    with defuse_fs.open(mem + "/numbers", "w+b", buffering=0) as file:
        assert file.write(numbers) == numbers.nbytes
        back = numpy.empty_like(numbers)
        file.seek(0)
        assert file.readinto(back) == numbers.nbytes and (back == numbers).all()
        # Columns are no bytes without gaps.
        with pytest.raises((ValueError, BufferError)):
            file.readinto(back[:, :3])
        with pytest.raises((ValueError, BufferError)):
            file.write(numbers[:, :3])
    numpy.save(mem_file := defuse_fs.open(mem + "/numbers.npy", "wb"), numbers)
    mem_file.close()
    with defuse_fs.open(mem + "/numbers.npy", "rb") as file:
        assert (numpy.load(file) == numbers).all()


def test_a_file_that_grows_is_read_to_its_end(mem):
    writer = defuse_fs.open(mem + "/log", "wb", buffering=0)
    writer.write(b"a" * 1000)
    reader = defuse_fs.open(mem + "/log", "rb", buffering=0)
    reader.seek(500)
    assert reader.read() == b"a" * 500
    writer.write(b"b" * 100_000)
    assert reader.read() == b"b" * 100_000 and reader.read() == b""
    if os.path.exists("/proc/self/status"):
        defuse_fs.mount("proc:", "passthrough:/proc/self")
        # Its size is 0.
        assert defuse_fs.open("proc:/status", "rb", buffering=0).read().startswith(b"Name:")
        defuse_fs.unmount("proc:", lazy=True)


def test_the_interpreter_runs_during_calls(mem):
    """A file system in Python waits in a thread of its own for another thread, which only runs if the call has released the GIL."""
    entered, leave = threading.Event(), threading.Event()

    class Waiting:
        def getattr(self, path, fh):
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755}
            return {"st_mode": stat.S_IFREG | 0o644, "st_size": 5}

        def readdir(self, path, fh):
            return ["file"]

        def read(self, path, size, offset, fh):
            entered.set()
            assert leave.wait(60)
            return b"12345"[offset : offset + size]

    defuse_fs.mount("waiting:", Waiting())
    results = []
    readers = [threading.Thread(target=lambda: results.append(defuse_fs.read_file("waiting:/file"))) for _ in range(4)]
    for reader in readers:
        reader.start()
    assert entered.wait(60)
    leave.set()
    for reader in readers:
        reader.join()
    assert results == [b"12345"] * 4
    defuse_fs.unmount("waiting:")


def test_threads_read_and_write_at_once(mem):
    def work(number):
        for round in range(50):
            data = bytes([number, round]) * 5000
            with defuse_fs.open(f"{mem}/{number}", "w+b") as file:
                file.write(data)
                file.seek(0)
                assert file.read() == data
            assert defuse_fs.read_file(f"{mem}/{number}", 0, 2) == data[:2]
        done.append(number)

    done = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))
    calls = defuse_fs.statistics(mem)
    assert calls["ops"] if isinstance(calls, dict) else calls


def test_a_file_that_is_not_closed_is_named(mem):
    with pytest.warns(ResourceWarning, match="unclosed file"):
        file = defuse_fs.open(mem + "/file", "wb")
        file.write(b"data")
        del file
    assert defuse_fs.read_file(mem + "/file") == b"data"


def test_fsync_takes_what_buffers_have(mem):
    with defuse_fs.open(mem + "/file", "w") as file:
        file.write("data")
        assert defuse_fs.read_file(mem + "/file") == b""
        defuse_fs.fsync(file)
        assert defuse_fs.read_file(mem + "/file") == b"data"
        defuse_fs.fdatasync(file)
    defuse_fs.sync()
