"""The end: files are flushed and mounts removed at the exit of the interpreter. Further what a child of fork(2) must know."""

import atexit
import os
import sys
import weakref

from . import _core

_files = weakref.WeakSet()
_servers = weakref.WeakSet()


def remember(file):
    """Let a file be flushed at the exit, before its file system ends."""
    _files.add(file)
    return file


def remember_server(server):
    """Let a server be stopped at the exit."""
    _servers.add(server)
    return server


def register():
    """Let the process end in order."""
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_in_child)


def _in_child():
    _core.after_fork()
    # The threads that serve are the parent's.
    _servers.clear()


def _finish():
    for file in list(_files):
        if not file.closed:
            _quietly(file.flush, file)
    for server in list(_servers):
        _quietly(lambda server=server: server.stop(lazy=True), server)
    # Later mounts may be on earlier ones. Files that are still open keep theirs.
    for target, _source, _users in reversed(_core.mounts()):
        _quietly(lambda target=target: _core.unmount(target, lazy=True), target)


def _quietly(call, what):
    try:
        call()
    except Exception as error:
        print(f"defuse_fs: {what} at exit: {error}", file=sys.stderr)
