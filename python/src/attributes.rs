//! Attributes, permissions and space.

use defuse_direct::{
    FileDescription, FileStat, NeededAccess, NewOwner, NewTimes, OpenHow, WalkStart,
};
use defuse_fs::{Errno, SetTime, StatFs, Timestamp};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyDict, PyFloat, PyType};

use crate::paths::{FileArgument, PathArgument};
use crate::state::call;

const CWD: WalkStart<'static> = WalkStart::Cwd;

/// The attributes as `os.stat_result`.
pub fn stat_result<'py>(py: Python<'py>, stat: &FileStat) -> PyResult<Bound<'py, PyAny>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let attr = &stat.attr;
    let first = (
        attr.mode(),
        attr.st_ino,
        stat.dev,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.size,
        attr.atime.secs,
        attr.mtime.secs,
        attr.ctime.secs,
    );
    let more = PyDict::new(py);
    for (name, name_ns, time) in [
        ("st_atime", "st_atime_ns", attr.atime),
        ("st_mtime", "st_mtime_ns", attr.mtime),
        ("st_ctime", "st_ctime_ns", attr.ctime),
    ] {
        more.set_item(name, time.secs as f64 + f64::from(time.nanos) * 1e-9)?;
        more.set_item(name_ns, i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos))?;
    }
    more.set_item("st_blksize", attr.blksize)?;
    more.set_item("st_blocks", attr.blocks)?;
    more.set_item("st_rdev", attr.rdev)?;
    TYPE.import(py, "os", "stat_result")?.call1((first, more))
}

fn stat_file(py: Python<'_>, file: &FileArgument<'_>, follow: bool) -> PyResult<FileStat> {
    let target = file.target();
    call(py, file.names(), |state| match target {
        Ok(path) => state.client.stat(&state.task, CWD, path, follow),
        Err(open) => state.client.fstat(&state.task, open),
    })
}

/// Return the attributes of a file, as os.stat(). `path` may be an open file.
#[pyfunction]
#[pyo3(signature = (path, *, follow_symlinks = true))]
pub fn stat<'py>(
    py: Python<'py>,
    path: FileArgument<'py>,
    follow_symlinks: bool,
) -> PyResult<Bound<'py, PyAny>> {
    stat_result(py, &stat_file(py, &path, follow_symlinks)?)
}

/// Return the attributes of a file, or of a symbolic link itself, as os.lstat().
#[pyfunction]
pub fn lstat<'py>(py: Python<'py>, path: FileArgument<'py>) -> PyResult<Bound<'py, PyAny>> {
    stat_result(py, &stat_file(py, &path, false)?)
}

/// Change the permission bits, as os.chmod().
#[pyfunction]
#[pyo3(signature = (path, mode, *, follow_symlinks = true))]
pub fn chmod(
    py: Python<'_>,
    path: FileArgument<'_>,
    mode: u32,
    follow_symlinks: bool,
) -> PyResult<()> {
    let target = path.target();
    call(py, path.names(), |state| match target {
        Ok(path) => state.client.chmod(&state.task, CWD, path, mode, follow_symlinks),
        Err(open) => state.client.fchmod(&state.task, open, mode),
    })
}

/// Change owner and group, as os.chown(). -1 keeps one.
#[pyfunction]
#[pyo3(signature = (path, uid, gid, *, follow_symlinks = true))]
pub fn chown(
    py: Python<'_>,
    path: FileArgument<'_>,
    uid: i64,
    gid: i64,
    follow_symlinks: bool,
) -> PyResult<()> {
    let id = |id: i64| match id {
        -1 => Ok(None),
        _ => u32::try_from(id).map(Some).map_err(|_| PyOverflowError::new_err("not a user id")),
    };
    let owner = NewOwner { uid: id(uid)?, gid: id(gid)? };
    let target = path.target();
    call(py, path.names(), |state| match target {
        Ok(path) => state.client.chown(&state.task, CWD, path, owner, follow_symlinks),
        Err(open) => state.client.fchown(&state.task, open, owner),
    })
}

/// Set the times of access and modification, as os.utime(): `times` in seconds, `ns` in
/// nanoseconds, or the current time.
#[pyfunction]
#[pyo3(signature = (path, times = None, *, ns = None, follow_symlinks = true))]
pub fn utime(
    py: Python<'_>,
    path: FileArgument<'_>,
    times: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ns: Option<(i128, i128)>,
    follow_symlinks: bool,
) -> PyResult<()> {
    let at = |time: Timestamp| Some(SetTime::At(time));
    let new = match (times, ns) {
        (None, None) => NewTimes::NOW,
        (Some((atime, mtime)), None) => {
            NewTimes { atime: at(seconds(&atime)?), mtime: at(seconds(&mtime)?) }
        }
        (None, Some((atime, mtime))) => {
            NewTimes { atime: at(nanoseconds(atime)?), mtime: at(nanoseconds(mtime)?) }
        }
        (Some(_), Some(_)) => {
            return Err(PyValueError::new_err("utime: you may specify either 'times' or 'ns'"));
        }
    };
    let target = path.target();
    call(py, path.names(), |state| match target {
        Ok(path) => state.client.utimens(&state.task, CWD, path, new, follow_symlinks),
        Err(open) => state.client.futimens(&state.task, open, new),
    })
}

/// The time of a number of seconds. Raises `TypeError` for other objects.
pub fn seconds(value: &Bound<'_, PyAny>) -> PyResult<Timestamp> {
    if !value.is_instance_of::<PyFloat>() {
        let secs = value.extract::<i64>().map_err(|_| PyTypeError::new_err("not a time"))?;
        return Ok(Timestamp { secs, nanos: 0 });
    }
    let value: f64 = value.extract()?;
    if !(-9e18..=9e18).contains(&value) {
        return Err(PyValueError::new_err("timestamp out of range"));
    }
    let nanos = ((value - value.floor()) * 1e9) as u32;
    Ok(Timestamp { secs: value.floor() as i64, nanos: nanos.min(999_999_999) })
}

/// The time of a number of nanoseconds. Raises `ValueError`.
pub fn nanoseconds(value: i128) -> PyResult<Timestamp> {
    let secs = i64::try_from(value.div_euclid(1_000_000_000));
    let secs = secs.map_err(|_| PyValueError::new_err("timestamp out of range"))?;
    Ok(Timestamp { secs, nanos: value.rem_euclid(1_000_000_000) as u32 })
}

/// Set the size of a file, as os.truncate().
#[pyfunction]
pub fn truncate(py: Python<'_>, path: FileArgument<'_>, length: i64) -> PyResult<()> {
    let target = path.target();
    call(py, path.names(), |state| match target {
        Ok(path) => state.client.truncate(&state.task, CWD, path, length),
        Err(open) => state.client.ftruncate(&state.task, open, length),
    })
}

/// Return True if the process may access the file in this mode, as os.access().
#[pyfunction]
#[pyo3(signature = (path, mode, *, effective_ids = false, follow_symlinks = true))]
pub fn access(
    py: Python<'_>,
    path: PathArgument<'_>,
    mode: u32,
    effective_ids: bool,
    follow_symlinks: bool,
) -> PyResult<bool> {
    let needed = NeededAccess::from_bits(mode);
    let how = (follow_symlinks, effective_ids);
    let outcome = call(py, path.names(), |state| {
        Ok(state.client.access(&state.task, CWD, &path.bytes, needed, how).is_ok())
    })?;
    Ok(outcome && mode <= 7)
}

/// Return space and inodes of the file system of a file, as os.statvfs().
#[pyfunction]
pub fn statvfs<'py>(py: Python<'py>, path: FileArgument<'py>) -> PyResult<Bound<'py, PyAny>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let target = path.target();
    let (stat, device, read_only) = call(py, path.names(), |state| {
        let space = |file: &FileDescription| {
            let stat: StatFs = state.client.fstatfs(&state.task, file)?;
            Ok((stat, file.mount().device(), file.mount().read_only()))
        };
        match target {
            Ok(path) => {
                let how = OpenHow { flags: libc::O_PATH as u32, ..OpenHow::default() };
                space(&*state.client.open(&state.task, CWD, path, how)?)
            }
            Err(open) => space(open),
        }
    })?;
    let first = (
        stat.bsize,
        stat.frsize,
        stat.blocks,
        stat.blocks_free,
        stat.blocks_available,
        stat.files,
        stat.files_free,
        stat.files_free,
        if read_only { libc::ST_RDONLY } else { 0 },
        stat.name_max,
    );
    let more = PyDict::new(py);
    more.set_item("f_fsid", device)?;
    TYPE.import(py, "os", "statvfs_result")?.call1((first, more))
}

/// Set the file mode creation mask of this package, and return the previous one, as os.umask().
#[pyfunction]
pub fn umask(py: Python<'_>, mask: u32) -> PyResult<u32> {
    call(py, Default::default(), |state| match mask {
        0..=0o777 => Ok(state.task.set_umask(mask)),
        _ => Err(Errno::EINVAL.into()),
    })
}
