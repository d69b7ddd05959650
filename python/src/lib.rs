//! `defuse_fs._core`, the compiled module of the Python package `defuse-fs`.
//!
//! It has the calls of the in-process client for Python (open files, names, attributes, listings,
//! mounts), and serves file systems that are classes in Python: in this process, as a kernel mount,
//! and on a socket. The package in `defuse_fs/` adds what needs no Rust: `open` with the buffers of
//! `io`, the file system for fsspec, and the end at the exit of the interpreter.
//!
//! The GIL is released during every call. A failed call raises `OSError` with the error number and
//! the path. Data goes directly between the buffers of Python and the file system.
//!
//! It passes no calls to the kernel: a path outside of all mounts fails with `EXDEV`.

#![deny(unsafe_code)]

mod attributes;
mod buffers;
mod errors;
mod files;
mod listings;
mod mounts;
mod names;
mod paths;
mod program;
mod servers;
mod sources;
mod state;
mod whole_files;
mod xattrs;

use pyo3::prelude::*;

/// The module, as Python imports it.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::attributes::{access, chmod, chown, lstat, stat, statvfs, truncate, umask, utime};
    #[pymodule_export]
    use crate::files::OpenedFile;
    #[pymodule_export]
    use crate::listings::{listdir, scan};
    #[pymodule_export]
    use crate::mounts::{mount, mounts, statistics, sync, unmount};
    #[pymodule_export]
    use crate::names::{
        chdir, getcwd, link, mkdir, mknod, readlink, realpath, rename, rmdir, symlink, unlink,
    };
    #[pymodule_export]
    use crate::servers::ProgramServer;
    #[pymodule_export]
    use crate::state::{after_fork, kinds};
    #[pymodule_export]
    use crate::whole_files::{copy_file, read_file, write_file};
    #[pymodule_export]
    use crate::xattrs::{getxattr, listxattr, removexattr, setxattr};
}
