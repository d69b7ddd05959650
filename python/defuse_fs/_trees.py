"""Calls over several calls: listings with types, trees, and tests."""

import errno
import json
import os
import stat as _stat

from . import _core


class DirEntry:
    """An entry of scandir(), as os.DirEntry: its type needs no further call, except for a symbolic link that is followed."""

    __slots__ = ("name", "path", "_kind", "_inode", "_stat", "_lstat")

    def __init__(self, directory, name, kind, inode):
        self.name = name
        self.path = os.path.join(directory, name)
        self._kind, self._inode = kind, inode
        self._stat = self._lstat = None

    def inode(self):
        return self._inode

    def is_symlink(self):
        return self._kind == _stat.S_IFLNK

    def is_dir(self, *, follow_symlinks=True):
        return self._is(_stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks=True):
        return self._is(_stat.S_IFREG, follow_symlinks)

    def is_junction(self):
        return False

    def _is(self, kind, follow_symlinks):
        if not follow_symlinks or self._kind != _stat.S_IFLNK:
            return self._kind == kind
        try:
            return _stat.S_IFMT(self.stat().st_mode) == kind
        except FileNotFoundError:
            return False

    def stat(self, *, follow_symlinks=True):
        if follow_symlinks and self._kind == _stat.S_IFLNK:
            if self._stat is None:
                self._stat = _core.stat(self.path)
            return self._stat
        if self._lstat is None:
            self._lstat = _core.lstat(self.path)
        return self._lstat

    def __fspath__(self):
        return self.path

    def __repr__(self):
        return f"<DirEntry {self.name!r}>"


class _Scan:
    def __init__(self, path):
        path = os.fspath(path)
        self._entries = iter([DirEntry(path, *found[:3]) for found in _core.scan(path)])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._entries = iter(())


def scandir(path):
    """Return an iterator of DirEntry, as os.scandir()."""
    return _Scan(path)


def walk(top, topdown=True, onerror=None, followlinks=False):
    """Yield (directory, names of directories, names of files) for a tree, as os.walk()."""
    top = os.fspath(top)
    try:
        entries = list(scandir(top))
    except OSError as error:
        if onerror is not None:
            onerror(error)
        return
    dirs = [entry.name for entry in entries if entry.is_dir()]
    links = {entry.name for entry in entries if entry.is_symlink()}
    files = [entry.name for entry in entries if not entry.is_dir()]
    if topdown:
        yield top, dirs, files
    for name in dirs:
        if followlinks or name not in links:
            yield from walk(os.path.join(top, name), topdown, onerror, followlinks)
    if not topdown:
        yield top, dirs, files


def makedirs(name, mode=0o777, exist_ok=False):
    """Create a directory and its missing parents, as os.makedirs()."""
    name = os.fspath(name)
    parent, last = os.path.split(name)
    if not last:
        parent, last = os.path.split(parent)
    if parent and last and not exists(parent):
        try:
            makedirs(parent, exist_ok=exist_ok)
        except FileExistsError:
            pass
    try:
        _core.mkdir(name, mode)
    except OSError:
        if not exist_ok or not isdir(name):
            raise


def rmtree(path, ignore_errors=False):
    """Remove a directory and all that is in it. A symbolic link is not followed, and is refused as the path itself."""
    path = os.fspath(path)
    try:
        if islink(path):
            raise OSError(errno.ENOTDIR, "Cannot call rmtree on a symbolic link", path)
        for entry in scandir(path):
            if entry.is_dir(follow_symlinks=False):
                rmtree(entry.path, ignore_errors)
            else:
                _core.unlink(entry.path)
        _core.rmdir(path)
    except OSError:
        if not ignore_errors:
            raise


def mkfifo(path, mode=0o666):
    """Create a fifo, which can be listed and removed, but not opened."""
    _core.mknod(path, mode | _stat.S_IFIFO)


def _mode(path, follow_symlinks=True):
    try:
        return _core.stat(path, follow_symlinks=follow_symlinks).st_mode
    except (OSError, ValueError):
        return 0


def exists(path):
    """True if the path leads to a file, as os.path.exists()."""
    return _mode(path) != 0


def lexists(path):
    """True if the path leads to a file or a symbolic link."""
    return _mode(path, follow_symlinks=False) != 0


def isdir(path):
    """True for a directory."""
    return _stat.S_ISDIR(_mode(path))


def isfile(path):
    """True for a regular file."""
    return _stat.S_ISREG(_mode(path))


def islink(path):
    """True for a symbolic link."""
    return _stat.S_ISLNK(_mode(path, follow_symlinks=False))


def statistics(target):
    """Return the statistics of a mount: calls, errors, bytes and latencies (in nanoseconds) of each operation."""
    return json.loads(_core.statistics(target))
