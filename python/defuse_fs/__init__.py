"""File systems in this process, without a mount: memory, directories, images, volumes, servers, and classes in Python.

A file system is mounted on a name with a colon, or on an absolute path; other processes do not see it, and it ends with the process:

    defuse_fs.mount("mem:", "memory:,size=1G")
    with defuse_fs.open("mem:/hello", "w") as file:
        file.write("hello")

The functions are those of os and io, with their arguments and exceptions. A path that leads out of all mounts raises OSError with
EXDEV. serve() shows a file system that is written in Python to other processes; defuse_fs.fsspec is for fsspec, as defuse://.
"""

from . import _exit
from ._core import (
    access,
    chdir,
    chmod,
    chown,
    copy_file,
    getcwd,
    getxattr,
    kinds,
    link,
    listdir,
    listxattr,
    lstat,
    mkdir,
    mknod,
    mount,
    mounts,
    read_file,
    readlink,
    realpath,
    removexattr,
    rename,
    rmdir,
    setxattr,
    stat,
    statvfs,
    symlink,
    sync,
    truncate,
    umask,
    unlink,
    unmount,
    utime,
    write_file,
)
from ._files import RawFile, fdatasync, fsync, open
from ._serve import ProgramServer, serve
from ._trees import (
    DirEntry,
    exists,
    isdir,
    isfile,
    islink,
    lexists,
    makedirs,
    mkfifo,
    rmtree,
    scandir,
    statistics,
    walk,
)

remove = unlink
replace = rename

__all__ = [
    "DirEntry", "ProgramServer", "RawFile", "access", "chdir", "chmod", "chown", "copy_file", "exists", "fdatasync", "fsync", "getcwd",
    "getxattr", "isdir", "isfile", "islink", "kinds", "lexists", "link", "listdir", "listxattr", "lstat", "makedirs", "mkdir", "mkfifo",
    "mknod", "mount", "mounts", "open", "read_file", "readlink", "realpath", "remove", "removexattr", "rename", "replace", "rmdir",
    "rmtree", "scandir", "serve", "setxattr", "stat", "statistics", "statvfs", "symlink", "sync", "truncate", "umask", "unlink",
    "unmount", "utime", "walk", "write_file",
]

_exit.register()
