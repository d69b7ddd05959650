"""A file system in Python: `hello.py DIRECTORY` mounts it until it is unmounted."""

import stat
import sys

import defuse_fs


class HelloFileSystem:
    def __init__(self):
        self.files = {"/hello": bytearray(b"Hello, world!\n")}

    def getattr(self, path, fh):
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755}
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"st_mode": stat.S_IFREG | 0o644, "st_size": len(self.files[path])}

    def readdir(self, path, fh):
        return [name[1:] for name in self.files]

    def read(self, path, size, offset, fh):
        return self.files[path][offset : offset + size]

    def write(self, path, data, offset, fh):
        file = self.files[path]
        file.extend(bytes(max(offset - len(file), 0)))
        file[offset : offset + len(data)] = data

    def truncate(self, path, length, fh):
        self.files[path] = self.files[path][:length].ljust(length, b"\0")


if __name__ == "__main__":
    defuse_fs.serve(HelloFileSystem(), sys.argv[1])
