"""A file in memory, by pyfuse3 or llfuse: MODULE MOUNTPOINT WORKERS."""

import errno
import importlib
import stat
import sys

fuse = importlib.import_module(sys.argv[1])
DATA = bytearray(b"content")


def attributes(inode):
    entry = fuse.EntryAttributes()
    if inode == fuse.ROOT_INODE:
        entry.st_mode = stat.S_IFDIR | 0o755
    elif inode == 2:
        entry.st_mode = stat.S_IFREG | 0o644
        entry.st_size = len(DATA)
    else:
        raise fuse.FUSEError(errno.ENOENT)
    entry.st_ino = inode
    return entry


def looked_up(parent, name):
    if parent != fuse.ROOT_INODE or name != b"file":
        raise fuse.FUSEError(errno.ENOENT)
    return attributes(2)


def written(offset, data):
    DATA[offset:offset + len(data)] = data
    return len(data)


class TwoOperations(fuse.Operations):
    def getattr(self, inode, ctx=None):
        return attributes(inode)

    def lookup(self, parent, name, ctx=None):
        return looked_up(parent, name)

    def opendir(self, inode, ctx):
        return inode

    def readdir(self, handle, offset):
        if offset == 0:
            yield (b"file", attributes(2), 1)

    def open(self, inode, flags, ctx):
        return inode

    def read(self, handle, offset, size):
        return bytes(DATA[offset:offset + size])

    def write(self, handle, offset, data):
        return written(offset, data)


class ThreeOperations(fuse.Operations):
    async def getattr(self, inode, ctx=None):
        return attributes(inode)

    async def lookup(self, parent, name, ctx=None):
        return looked_up(parent, name)

    async def opendir(self, inode, ctx):
        return inode

    async def readdir(self, handle, start, token):
        if start == 0:
            fuse.readdir_reply(token, b"file", attributes(2), 1)

    async def open(self, inode, flags, ctx):
        return fuse.FileInfo(fh=inode)

    async def read(self, handle, offset, size):
        return bytes(DATA[offset:offset + size])

    async def write(self, handle, offset, data):
        return written(offset, data)


is_three = sys.argv[1] == "pyfuse3"
fuse.init(ThreeOperations() if is_three else TwoOperations(), sys.argv[2], set(fuse.default_options))
try:
    if is_three:
        import trio

        trio.run(fuse.main)
    else:
        fuse.main(workers=int(sys.argv[3]))
finally:
    fuse.close()
