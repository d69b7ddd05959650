"""What every version of Python must pass, without a package beside this one: `python plain.py`."""

import errno
import io
import os
import sys

import defuse_fs


def raises(kind, number, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except kind as error:
        assert number is None or error.errno == number, error
        return error
    raise AssertionError(f"{call} raised nothing")


def buffers():
    with defuse_fs.open("plain:/data", "wb", buffering=0) as file:
        assert file.write(memoryview(b"0123456789")[2:8]) == 6
        assert file.write(bytearray(b"ab")) == 2
        raises(TypeError, None, file.write, "text")
        raises(BufferError, None, file.write, memoryview(b"0123456789")[::2])
    with defuse_fs.open("plain:/data", "rb", buffering=0) as file:
        room = bytearray(4)
        assert file.readinto(room) == 4 and room == b"2345"
        assert file.read(3) == b"67a" and file.read() == b"b" and file.read(1) == b""
        raises((TypeError, BufferError), None, file.readinto, b"constant")
        assert file.opened.pread(2, 1) == b"34" and file.opened.preadinto(room, 6) == 2 and room == b"ab45"
        assert file.seek(-3, os.SEEK_END) == 5 and file.tell() == 5
        raises(io.UnsupportedOperation, None, file.write, b"x")
        raises(io.UnsupportedOperation, None, file.fileno)
    raises(ValueError, None, file.read)


def text_and_lines():
    with defuse_fs.open("plain:/text", "x", encoding="utf-8", newline="") as file:
        file.write("één\ntwo\r\nthree")
    with defuse_fs.open("plain:/text", encoding="utf-8") as file:
        assert list(file) == ["één\n", "two\n", "three"]
    with defuse_fs.open("plain:/text", "r+b") as file:
        assert file.readline() == "één\n".encode()
        file.seek(0, os.SEEK_END)
        file.write(b"!")
    with defuse_fs.open("plain:/text", "ab") as file:
        assert file.tell() == 17
        file.write(b"?")
    assert defuse_fs.read_file("plain:/text", -2) == b"!?"


def errors():
    error = raises(FileNotFoundError, errno.ENOENT, defuse_fs.open, "plain:/none")
    assert error.filename == "plain:/none" and str(error) == "[Errno 2] No such file or directory: 'plain:/none'"
    raises(FileExistsError, errno.EEXIST, defuse_fs.open, "plain:/text", "x")
    raises(IsADirectoryError, errno.EISDIR, defuse_fs.open, "plain:/")
    raises(NotADirectoryError, errno.ENOTDIR, defuse_fs.listdir, b"plain:/text")
    error = raises(FileNotFoundError, errno.ENOENT, defuse_fs.rename, "plain:/none", "plain:/other")
    assert (error.filename, error.filename2) == ("plain:/none", "plain:/other")
    raises(OSError, errno.EXDEV, defuse_fs.stat, "/etc/passwd")
    raises(ValueError, None, defuse_fs.stat, "plain:/\0")
    raises(TypeError, None, defuse_fs.stat, 3)
    raises(OSError, errno.EINVAL, defuse_fs.mount, "other:", "nothing:")
    raises(OSError, errno.EBUSY, defuse_fs.mount, "plain:", "memory:")


class Words:
    """A file system in Python."""

    def __init__(self):
        self.words = {"/a": b"first", "/b": b"second"}

    def getattr(self, path, fh):
        if path == "/":
            return {"st_mode": 0o040755}
        if path not in self.words:
            raise FileNotFoundError(path)
        return {"st_mode": 0o100644, "st_size": len(self.words[path])}

    def readdir(self, path, fh):
        return [".", "..", "a", ("b", {"st_mode": 0o100644}, 0)]

    def read(self, path, size, offset, fh):
        return self.words[path][offset : offset + size]


def programs():
    defuse_fs.mount("words:", Words())
    assert sorted(defuse_fs.listdir("words:")) == ["a", "b"]
    assert defuse_fs.read_file("words:/b") == b"second"
    raises(FileNotFoundError, errno.ENOENT, defuse_fs.stat, "words:/c")
    raises(PermissionError, errno.EPERM, defuse_fs.unlink, "words:/a")
    defuse_fs.unmount("words:")


defuse_fs.mount("plain:", "memory:,size=16M")
for part in (buffers, text_and_lines, errors, programs):
    part()
assert sorted(defuse_fs.listdir("plain:/")) == ["data", "text"]
defuse_fs.unmount("plain:")
print("passed", sys.version.split()[0])
