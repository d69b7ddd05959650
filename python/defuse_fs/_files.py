"""open(), and the raw file below the buffers of io."""

import errno
import io
import os
import warnings

from . import _exit
from ._core import OpenedFile

_KINDS = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND}


def open_flags(mode):
    """Return the flags of os.open() for a mode such as "rb+". Raises ValueError."""
    letters = set(mode)
    kinds = letters & set("rwxa")
    if len(letters) != len(mode) or letters - set("rwxab+"):
        raise ValueError(f"invalid mode: {mode!r}")
    if len(kinds) != 1:
        raise ValueError("must have exactly one of create/read/write/append mode")
    if "+" in letters:
        access = os.O_RDWR
    else:
        access = os.O_RDONLY if "r" in letters else os.O_WRONLY
    return access | _KINDS[kinds.pop()] | os.O_CLOEXEC


class RawFile(io.RawIOBase):
    """An open file of a mount, without a buffer, as io.FileIO is one of the kernel.

    Data goes directly between the buffers of the caller and the file system. `opened` has further calls: pread, preadinto, pwrite,
    fsync, fallocate and stat.
    """

    def __init__(self, path, mode="rb", perm=0o666):
        flags = open_flags(mode)
        opened = OpenedFile(path, flags, perm)
        if opened.is_dir:
            opened.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.opened, self.name = opened, path
        access = flags & os.O_ACCMODE
        self._reads, self._writes = access != os.O_WRONLY, access != os.O_RDONLY
        kind = "x" if "x" in mode else "a" if "a" in mode else "r" if self._reads else "w"
        self.mode = kind + "b" + ("+" if access == os.O_RDWR else "")
        # Without a call of Python between the buffers and the file.
        if self._reads:
            self.readinto = self.opened.readinto
            self.read = self.opened.read
            self.readall = self.opened.readall
        if self._writes:
            self.write = self.opened.write
        self.seek = self.opened.seek
        self.tell = self.opened.tell
        if flags & os.O_APPEND:
            self.seek(0, os.SEEK_END)

    def readable(self):
        self._check_open()
        return self._reads

    def writable(self):
        self._check_open()
        return self._writes

    def seekable(self):
        self._check_open()
        return True

    def readinto(self, buffer):
        self._refuse("reading")

    def read(self, size=-1):
        self._refuse("reading")

    def readall(self):
        self._refuse("reading")

    def write(self, data):
        self._refuse("writing")

    def truncate(self, size=None):
        if not self._writes:
            self._refuse("writing")
        return self.opened.truncate(size)

    def close(self):
        if not self.closed:
            try:
                super().close()
            finally:
                self.opened.close()

    def _check_open(self):
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    def _refuse(self, what):
        self._check_open()
        raise io.UnsupportedOperation(f"File not open for {what}")

    def _dealloc_warn(self, source):
        if not self.closed:
            warnings.warn(f"unclosed file {source!r}", ResourceWarning, stacklevel=2, source=source)

    def __del__(self):
        opened = getattr(self, "opened", None)
        if opened is not None:
            self._dealloc_warn(self)
            self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"name={self.name!r} mode={self.mode!r}"
        return f"<{type(self).__module__}.{type(self).__qualname__} {state}>"

    def __getstate__(self):
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")


def open(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *, perm=0o666):
    """Open a file of a mount, as io.open() opens one of the kernel. `perm` has the permissions of a new file, before the umask."""
    is_text = "b" not in mode
    if "t" in mode and not is_text:
        raise ValueError("can't have text and binary mode at once")
    if not is_text and (encoding, errors, newline) != (None, None, None):
        raise ValueError("binary mode doesn't take an encoding, errors or newline argument")
    if buffering == 0 and is_text:
        raise ValueError("can't have unbuffered text I/O")
    raw = RawFile(file, mode.replace("t", ""), perm)
    if buffering == 0:
        return raw
    try:
        file = buffered(raw, buffering)
        if is_text:
            file = io.TextIOWrapper(file, encoding, errors, newline, line_buffering=buffering == 1)
            file.mode = mode
        return _exit.remember(file)
    except BaseException:
        raw.close()
        raise


def buffered(raw, buffering):
    """Return the buffer of io around a raw file."""
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    if "+" in raw.mode:
        return io.BufferedRandom(raw, size)
    return io.BufferedReader(raw, size) if raw.readable() else io.BufferedWriter(raw, size)


def fsync(file):
    """Make an open file durable, with what its buffers have."""
    _raw(file).fsync()


def fdatasync(file):
    """Make the data of an open file durable, with what its buffers have."""
    _raw(file).fsync(datasync=True)


def _raw(file):
    file.flush()
    while not hasattr(file, "opened"):
        below = getattr(file, "raw", None) or getattr(file, "buffer", None)
        if below is None:
            raise TypeError(f"{file!r} is no file of this package")
        file = below
    return file.opened
