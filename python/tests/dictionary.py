"""A file system in Python with all methods, which keeps its files in a dictionary."""

import errno
import stat
import threading
import time


class DictionaryFileSystem:
    timeout = 0

    def __init__(self):
        self.lock = threading.RLock()
        self.files = {"/": self.node(stat.S_IFDIR | 0o755)}
        self.opened = []

    @staticmethod
    def node(mode, data=b""):
        now = time.time()
        return {"st_mode": mode, "data": bytearray(data), "st_mtime": now, "st_atime": now, "xattrs": {}}

    def find(self, path):
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def add(self, path, node):
        with self.lock:
            if path in self.files:
                raise FileExistsError(path)
            self.files[path] = node

    def below(self, path):
        prefix = path.rstrip("/") + "/"
        return [name for name in list(self.files) if name.startswith(prefix) and name != "/"]

    def getattr(self, path, fh):
        node = self.find(path)
        return {**node, "st_size": len(node["data"])}

    def readdir(self, path, fh):
        with self.lock:
            prefix = len(path.rstrip("/")) + 1
            names = [name[prefix:] for name in self.below(path)]
            return [(name, self.files[path.rstrip("/") + "/" + name]["st_mode"]) for name in names if "/" not in name]

    def create(self, path, mode):
        self.add(path, self.node(stat.S_IFREG | mode))
        return self.open(path, 0)

    def open(self, path, flags):
        handle = ["open", path]
        self.opened.append(handle)
        return handle

    def release(self, path, fh):
        self.opened.remove(fh)

    def read(self, path, size, offset, fh):
        assert fh[0] == "open"
        return memoryview(bytes(self.find(path)["data"][offset : offset + size]))

    def write(self, path, data, offset, fh):
        node = self.find(path)
        with self.lock:
            file = node["data"]
            file.extend(bytes(max(offset - len(file), 0)))
            file[offset : offset + len(data)] = data
            node["st_mtime"] = time.time()
        return len(data)

    def truncate(self, path, length, fh):
        node = self.find(path)
        with self.lock:
            node["data"] = node["data"][:length].ljust(length, b"\0")

    def mkdir(self, path, mode):
        self.add(path, self.node(stat.S_IFDIR | mode))

    def mknod(self, path, mode, device):
        self.add(path, self.node(mode))

    def symlink(self, path, text):
        self.add(path, self.node(stat.S_IFLNK | 0o777, text.encode()))

    def readlink(self, path):
        return self.find(path)["data"].decode()

    def link(self, path, existing):
        self.add(path, self.find(existing))

    def unlink(self, path):
        self.find(path)
        del self.files[path]

    def rmdir(self, path):
        with self.lock:
            if self.below(path):
                raise OSError(errno.ENOTEMPTY, path)
            del self.files[path]

    def rename(self, old, new):
        with self.lock:
            if new in self.files and self.below(new):
                raise OSError(errno.ENOTEMPTY, new)
            for name in [old, *self.below(old)]:
                self.files[new + name[len(old) :]] = self.files.pop(name)

    def chmod(self, path, mode):
        node = self.find(path)
        node["st_mode"] = stat.S_IFMT(node["st_mode"]) | mode

    def chown(self, path, uid, gid):
        node = self.find(path)
        node.update({name: value for name, value in (("st_uid", uid), ("st_gid", gid)) if value != -1})

    def utimens(self, path, times):
        node = self.find(path)
        node["st_atime"], node["st_mtime"] = times

    def statfs(self, path):
        return {"f_bsize": 4096, "f_blocks": 1000, "f_bfree": 500, "f_files": len(self.files)}

    def fsync(self, path, datasync, fh):
        pass

    def getxattr(self, path, name):
        try:
            return self.find(path)["xattrs"][name]
        except KeyError:
            raise OSError(errno.ENODATA, name) from None

    def setxattr(self, path, name, value, flags):
        self.find(path)["xattrs"][name] = value

    def listxattr(self, path):
        return self.find(path)["xattrs"]

    def removexattr(self, path, name):
        del self.find(path)["xattrs"][name]
