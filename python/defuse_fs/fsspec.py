"""defuse:// for fsspec, and so for pandas, pyarrow, zarr, dask and datasets."""

import datetime
import errno
import io
import itertools
import os
import stat
import threading
import weakref

from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike, stringify_path

from . import _core, _exit, _trees
from ._files import RawFile

_numbers = itertools.count(1)


class _GivenMount:
    """A mount that is not of this module."""

    def __init__(self, target):
        self.target = target

    def renew(self):
        return False


class _SourceMount:
    """The mount of a source, which all instances for it share, whatever their other parameters: zarr and others add some."""

    all = {}
    lock = threading.RLock()

    def __init__(self, key):
        self.key, self.users = key, 0
        self._mount()

    def _mount(self):
        self.process, self.target = os.getpid(), f"fsspec-{os.getpid()}-{next(_numbers)}:"
        _core.mount(self.target, *self.key)

    @classmethod
    def hold(cls, source, options):
        """Return the mount of a source, which is made unless it is there."""
        with cls.lock:
            key = source, options
            if key not in cls.all:
                cls.all[key] = cls(key)
            cls.all[key].users += 1
            return cls.all[key]

    def release(self):
        """Unmount after the last user."""
        with self.lock:
            self.users -= 1
            if self.users > 0 or self.process != os.getpid():
                return
            self.all.pop(self.key, None)
        try:
            _core.unmount(self.target, lazy=True)
        except OSError as error:
            # At the exit it is unmounted already.
            if error.errno != errno.EINVAL:
                raise

    def renew(self):
        """Mount the source again if this process is a child of the one that did. Returns False if it is not."""
        with self.lock:
            if self.process == os.getpid():
                return False
            self._mount()
            return True


os.register_at_fork(after_in_child=lambda: setattr(_SourceMount, "lock", threading.RLock()))


class DefuseFileSystem(AbstractFileSystem):
    """The files of a source, as fsspec sees them. Paths begin at the root of the source: defuse://directory/file.

    Parameters
    ----------
    source: str or object
        A source as on the command line, with options after commas ("uhs:/data/image,ro"), or a file system in Python. It is mounted
        in this process once, until the last instance for it is gone.
    options: str
        Further options, separated by commas.
    mount: str
        The target of a mount that this process has already, such as "mem:", in place of a source.
    auto_mkdir: bool
        Create missing directories of a file that is written, as object stores have none. The default.
    """

    protocol = "defuse"
    root_marker = "/"

    def __init__(self, source=None, options="", mount=None, auto_mkdir=True, **kwargs):
        super().__init__(**kwargs)
        if (source is None) == (mount is None):
            raise ValueError("defuse:// needs the option source, as memory: or uhs:IMAGE, or the option mount, of defuse_fs.mount()")
        self.source, self.auto_mkdir = source, auto_mkdir
        if mount is not None:
            self._mount = _GivenMount(mount)
            return
        self._mount = _SourceMount.hold(source, options)
        self._finalizer = weakref.finalize(self, self._mount.release)
        # At the exit, open files are flushed before mounts are removed.
        self._finalizer.atexit = False

    def close(self):
        """Unmount the source, unless other instances use it. Open files keep it until they are closed."""
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None:
            finalizer()

    @property
    def _target(self):
        return self._mount.target

    @property
    def fsid(self):
        return f"defuse_{self.source if self.source is not None else self._target}"

    def _call(self, call, *arguments, **more):
        """Make a call. A child of fork(2) to which the connection of its parent is refused gets one of its own."""
        try:
            return call(*arguments, **more)
        except OSError as error:
            before = self._target
            if error.errno != errno.ENOTCONN or not self._mount.renew():
                raise
        arguments = [self._moved(argument, before) for argument in arguments]
        return call(*arguments, **more)

    def _moved(self, argument, before):
        if isinstance(argument, str) and argument.startswith(before):
            return self._target + argument[len(before) :]
        return argument

    def _real(self, path):
        return self._target + self._strip_protocol(path)

    @classmethod
    def _strip_protocol(cls, path):
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        for prefix in ("defuse://", "defuse:"):
            if path.startswith(prefix):
                path = path[len(prefix) :]
                break
        return "/" + path.strip("/")

    @classmethod
    def _parent(cls, path):
        return cls._strip_protocol(path).rpartition("/")[0] or "/"

    def unstrip_protocol(self, name):
        return "defuse:/" + self._strip_protocol(name)

    def _with_parents(self, path, call, *arguments, source=None):
        """Make a call that creates `path`, and with auto_mkdir again after its directories were created. `source` must exist."""
        try:
            return self._call(call, *arguments)
        except FileNotFoundError:
            if not self.auto_mkdir or source is not None and not self.lexists(source):
                raise
        self.makedirs(self._parent(path), exist_ok=True)
        return self._call(call, *arguments)

    # Directories and names.

    def mkdir(self, path, create_parents=True, **kwargs):
        if create_parents:
            self.makedirs(self._parent(path), exist_ok=True)
        self._call(_core.mkdir, self._real(path))

    def makedirs(self, path, exist_ok=False):
        if self._strip_protocol(path) == "/":
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return
        self._call(_trees.makedirs, self._real(path), exist_ok=exist_ok)

    def rmdir(self, path):
        self._call(_core.rmdir, self._real(path))

    def rm_file(self, path):
        self._call(_core.unlink, self._real(path))

    _rm = rm_file

    def rm(self, path, recursive=False, maxdepth=None):
        for one in path if isinstance(path, list) else [path]:
            if maxdepth is not None or "*" in stringify_path(one):
                super().rm(one, recursive, maxdepth)
                continue
            real = self._real(one)
            if not stat.S_ISDIR(self._call(_core.lstat, real).st_mode):
                self._call(_core.unlink, real)
            elif not recursive:
                raise ValueError("Cannot delete directory, set recursive=True")
            elif self._strip_protocol(one) == "/":
                for name in self._call(_core.listdir, real):
                    self.rm("/" + name, recursive=True)
            else:
                self._call(_trees.rmtree, real)

    def mv(self, path1, path2, recursive=False, maxdepth=None, **kwargs):
        if isinstance(path1, list) or isinstance(path2, list) or "*" in stringify_path(path1) or maxdepth is not None:
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
            return
        source, target = self._real(path1), self._real(path2)
        if self.isdir(path2):
            target = target.rstrip("/") + "/" + source.rpartition("/")[2]
        self._with_parents(target[len(self._target) :], _core.rename, source, target, source=path1)

    def link(self, src, dst, **kwargs):
        self._with_parents(dst, _core.link, self._real(src), self._real(dst), source=src)

    def symlink(self, src, dst, **kwargs):
        """Create a link dst that leads to the path src of this source."""
        text = os.path.relpath(self._strip_protocol(src), self._parent(dst))
        self._with_parents(dst, _core.symlink, text, self._real(dst))

    def islink(self, path):
        return self._call(_trees.islink, self._real(path))

    def lexists(self, path, **kwargs):
        return self._call(_trees.lexists, self._real(path))

    def chmod(self, path, mode):
        self._call(_core.chmod, self._real(path), mode)

    # Attributes and listings.

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        real = self._target + path
        return self._about(path, self._call(_core.lstat, real))

    def _about(self, path, found):
        is_link = stat.S_ISLNK(found.st_mode)
        about = {"name": path, "islink": is_link}
        if is_link:
            real = self._target + path
            about["destination"] = _core.readlink(real)
            try:
                found = _core.stat(real)
            except OSError:
                pass
        kinds = {stat.S_IFDIR: "directory", stat.S_IFREG: "file"}
        about["type"] = kinds.get(stat.S_IFMT(found.st_mode), "other")
        about["size"] = found.st_size if about["type"] != "directory" else 0
        about["created"] = found.st_ctime
        for name in ("mode", "uid", "gid", "mtime", "ino", "nlink"):
            about[name] = getattr(found, "st_" + name)
        return about

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        try:
            entries = self._call(_core.scan, self._target + path, detail)
        except NotADirectoryError:
            about = self.info(path)
            return [about] if detail else [path]
        prefix = "/" if path == "/" else path + "/"
        if not detail:
            return [prefix + entry[0] for entry in entries]
        return [self._about(prefix + entry[0], entry[3]) for entry in entries]

    def _mode_of(self, path):
        try:
            return self._call(_core.stat, self._real(path)).st_mode
        except (OSError, ValueError):
            return 0

    def exists(self, path, **kwargs):
        return self._mode_of(path) != 0

    def isdir(self, path):
        return stat.S_ISDIR(self._mode_of(path))

    def isfile(self, path):
        return stat.S_ISREG(self._mode_of(path))

    def created(self, path):
        return self._time(self._call(_core.stat, self._real(path)).st_ctime)

    def modified(self, path):
        return self._time(self._call(_core.stat, self._real(path)).st_mtime)

    @staticmethod
    def _time(seconds):
        return datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)

    # Data.

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        path = self._strip_protocol(path)
        if autocommit or "r" in mode or "+" in mode or "a" in mode:
            return self._opened(path, path, mode)
        # A transaction: the file gets its name at the commit.
        hidden = f"{path}.{os.getpid()}-{next(_numbers)}.partial"
        return self._opened(path, hidden, mode.replace("x", "w"), "x" in mode)

    def _opened(self, path, at, mode, is_new=False):
        real = self._target + at
        raw = self._call(RawFile, real, mode) if "r" in mode else self._with_parents(at, RawFile, real, mode)
        kind = _DefuseRandom if "+" in mode else _DefuseReader if "r" in mode else _DefuseWriter
        file = kind(raw)
        file.fs, file.path, file._partial, file._is_new = self, path, at if at != path else None, is_new
        return _exit.remember(file) if kind is not _DefuseReader else file

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._call(_core.read_file, self._real(path), start, end)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if self._intrans:
            super().pipe_file(path, value, mode=mode, **kwargs)
        else:
            self._with_parents(path, _core.write_file, self._real(path), value, mode == "create")

    def cp_file(self, path1, path2, **kwargs):
        source, target = self._real(path1), self._real(path2)
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
        else:
            self._with_parents(path2, _core.copy_file, source, target, source=path1)

    def get_file(self, rpath, lpath, callback=None, outfile=None, **kwargs):
        if self.isdir(rpath):
            if not isfilelike(lpath):
                os.makedirs(lpath, exist_ok=True)
            return
        with self.open(rpath, "rb") as source:
            if outfile is not None or isfilelike(lpath):
                _copy(source, outfile if outfile is not None else lpath, callback)
                return
            parent = os.path.dirname(lpath)
            if parent:
                os.makedirs(parent, exist_ok=True)
            with io.open(lpath, "wb", buffering=0) as target:
                _copy(source, target, callback)

    def put_file(self, lpath, rpath, callback=None, mode="overwrite", **kwargs):
        if os.path.isdir(lpath):
            self.makedirs(rpath, exist_ok=True)
            return
        with io.open(lpath, "rb", buffering=0) as source:
            with self.open(rpath, "xb" if mode == "create" else "wb") as target:
                _copy(source, target, callback)

    def touch(self, path, truncate=True, **kwargs):
        real = self._real(path)
        if truncate or not self.exists(path):
            self._with_parents(path, _core.write_file, real, b"")
        else:
            self._call(_core.utime, real)

    def sign(self, path, expiration=100, **kwargs):
        raise NotImplementedError("the files of a source have no address")


def _copy(source, target, callback, size=1 << 20):
    """Copy all data by a buffer, and tell the callback."""
    buffer = memoryview(bytearray(size))
    if callback is not None:
        callback.set_size(source.seek(0, os.SEEK_END))
        source.seek(0)
    while True:
        count = source.readinto(buffer)
        if not count:
            return
        left = buffer[:count]
        while left:
            left = left[target.write(left) :]
        if callback is not None:
            callback.relative_update(count)


class _DefuseFile:
    """What fsspec expects of a file, beside its data."""

    fs = path = _partial = None
    _is_new = False

    @property
    def size(self):
        return self.raw.opened.stat().st_size

    def commit(self):
        """Give the file of a transaction its name."""
        self.close()
        if self._partial is not None:
            here, there = self.fs._target + self._partial, self.fs._target + self.path
            if self._is_new:
                _core.link(here, there)
                _core.unlink(here)
            else:
                _core.rename(here, there)
            self._partial = None

    def discard(self):
        """Remove the file of a transaction."""
        self.close()
        if self._partial is not None:
            _core.unlink(self.fs._target + self._partial)
            self._partial = None


class _DefuseReader(_DefuseFile, io.BufferedReader):
    pass


class _DefuseWriter(_DefuseFile, io.BufferedWriter):
    pass


class _DefuseRandom(_DefuseFile, io.BufferedRandom):
    pass


__all__ = ["DefuseFileSystem"]
