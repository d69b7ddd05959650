"""serve(): a file system in Python for other processes."""

import signal
import threading

from . import _core, _exit


class ProgramServer:
    """A file system in Python that other processes use, until stop() or the end of a with block.

    `program` has methods on paths: getattr and readdir, and any of read, write, open, create, release, flush, fsync, truncate, mkdir,
    rmdir, unlink, rename, symlink, readlink, link, chmod, chown, utimens, mknod, statfs, getxattr, setxattr, listxattr and removexattr.
    It is mounted on the directory `mountpoint` by the kernel, or served on the new socket `socket`, for `defuse run` and the source
    `socket:`. `options` are those of a mount (`ro,allow_other`).
    """

    def __init__(self, program, mountpoint=None, *, socket=None, options=""):
        self._server = _core.ProgramServer(program, mountpoint, socket, options)
        _exit.remember_server(self)

    def wait(self):
        """Wait until the file system is unmounted, or stop() was called."""
        self._server.wait()

    def stop(self, lazy=False):
        """Unmount, or close the socket. Raises OSError with EBUSY while a mount is in use, unless it is detached lazily."""
        self._server.stop(lazy)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop(lazy=True)


def serve(program, mountpoint=None, *, socket=None, options=""):
    """Serve a file system in Python until it is unmounted, or until Ctrl-C or SIGTERM."""
    before = None
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with ProgramServer(program, mountpoint, socket=socket, options=options) as server:
            try:
                server.wait()
            except KeyboardInterrupt:
                pass
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
