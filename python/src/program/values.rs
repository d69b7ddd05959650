//! Attributes and entries as a file system in Python returns them.

use std::time::Duration;

use defuse_fs::path::PathDirEntry;
use defuse_fs::{Attr, FileKind, SetTime, StatFs, Timestamp};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyTuple};

use crate::attributes::{nanoseconds, seconds};
use crate::paths::encode_name;

/// The values of attributes that a file system leaves out.
pub struct AttrDefaults {
    uid: u32,
    gid: u32,
    time: Timestamp,
}

/// The value `name` of a dictionary, or of an object such as `os.stat_result`.
fn field<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    match object.cast::<PyDict>() {
        Ok(dict) => dict.get_item(name),
        Err(_) => object.getattr_opt(name),
    }
}

fn number<T>(object: &Bound<'_, PyAny>, name: &str, default: T) -> PyResult<T>
where
    T: for<'a, 'py> FromPyObject<'a, 'py, Error = PyErr>,
{
    match field(object, name)? {
        Some(value) => value.extract(),
        None => Ok(default),
    }
}

impl AttrDefaults {
    /// The user and group of this process, and the present time.
    pub fn of_this_process() -> Self {
        let path = std::path::Path::new("/proc/self");
        let own = std::fs::metadata(path).ok();
        use std::os::unix::fs::MetadataExt;
        AttrDefaults {
            uid: own.as_ref().map_or(0, MetadataExt::uid),
            gid: own.as_ref().map_or(0, MetadataExt::gid),
            time: Timestamp::now(),
        }
    }

    /// The attributes that `getattr` returned. Raises `ValueError` for a mode without a type.
    pub fn attr(&self, found: &Bound<'_, PyAny>, valid_for: Duration) -> PyResult<Attr> {
        let mode = field(found, "st_mode")?;
        let mode: u32 = mode.ok_or_else(|| PyValueError::new_err("no st_mode"))?.extract()?;
        let kind = FileKind::from_mode(mode)
            .ok_or_else(|| PyValueError::new_err("st_mode has no file type, as stat.S_IFREG"))?;
        let links = if kind == FileKind::Directory { 2 } else { 1 };
        let size: u64 = number(found, "st_size", 0)?;
        let mtime = self.time_of(found, "st_mtime", self.time)?;
        Ok(Attr {
            st_ino: number(found, "st_ino", 0)?,
            kind,
            perm: mode & 0o7777,
            nlink: number(found, "st_nlink", links)?,
            uid: number(found, "st_uid", self.uid)?,
            gid: number(found, "st_gid", self.gid)?,
            rdev: number(found, "st_rdev", 0)?,
            size,
            blocks: number(found, "st_blocks", size.div_ceil(512))?,
            blksize: number(found, "st_blksize", 4096)?,
            atime: self.time_of(found, "st_atime", mtime)?,
            mtime,
            ctime: self.time_of(found, "st_ctime", mtime)?,
            btime: None,
            valid_for,
        })
    }

    /// A time in nanoseconds (`st_mtime_ns`) or seconds (`st_mtime`).
    fn time_of(
        &self,
        found: &Bound<'_, PyAny>,
        name: &str,
        default: Timestamp,
    ) -> PyResult<Timestamp> {
        if let Some(value) = field(found, &format!("{name}_ns"))? {
            return nanoseconds(value.extract()?);
        }
        match field(found, name)? {
            Some(value) => seconds(&value),
            None => Ok(default),
        }
    }
}

/// An entry that `readdir` returned: a name, or a tuple that begins with a name and attributes.
/// Without attributes, `kind_of` is called with the name.
pub fn entry(
    item: &Bound<'_, PyAny>,
    kind_of: impl FnOnce(&[u8]) -> defuse_fs::Result<FileKind>,
) -> PyResult<Option<PathDirEntry>> {
    let Ok(tuple) = item.cast::<PyTuple>() else {
        return make_entry(encode_name(item)?, None, kind_of);
    };
    let name = encode_name(&tuple.get_item(0)?)?;
    let about = tuple.get_item(1).ok().filter(|about| !about.is_none());
    let mode: Option<u32> = match about {
        None => None,
        Some(about) => match about.extract::<u32>() {
            Ok(mode) => Some(mode),
            Err(_) => field(&about, "st_mode")?.map(|mode| mode.extract()).transpose()?,
        },
    };
    make_entry(name, mode.and_then(FileKind::from_mode), kind_of)
}

fn make_entry(
    name: Vec<u8>,
    kind: Option<FileKind>,
    kind_of: impl FnOnce(&[u8]) -> defuse_fs::Result<FileKind>,
) -> PyResult<Option<PathDirEntry>> {
    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
        return Err(PyTypeError::new_err("readdir returned what is no file name"));
    }
    // The adapter has its own.
    if matches!(&name[..], b"." | b"..") {
        return Ok(None);
    }
    let kind = match kind {
        Some(kind) => kind,
        // It was removed meanwhile, or cannot be examined: any type is right.
        None => kind_of(&name).unwrap_or(FileKind::Regular),
    };
    Ok(Some(PathDirEntry { name, kind, st_ino: 0 }))
}

/// Space and inodes that `statfs` returned: a dictionary, or an object such as `os.statvfs_result`.
pub fn space(found: &Bound<'_, PyAny>) -> PyResult<StatFs> {
    let bsize = number(found, "f_bsize", 4096)?;
    let blocks_free = number(found, "f_bfree", 0)?;
    Ok(StatFs {
        blocks: number(found, "f_blocks", 0)?,
        blocks_free,
        blocks_available: number(found, "f_bavail", blocks_free)?,
        files: number(found, "f_files", 0)?,
        files_free: number(found, "f_ffree", 0)?,
        bsize,
        frsize: number(found, "f_frsize", bsize)?,
        name_max: number(found, "f_namemax", 255)?,
    })
}

/// The seconds of a time that is set, as `utimens` gets them. A time that stays is `kept`.
pub fn seconds_of(time: Option<SetTime>, kept: Timestamp) -> f64 {
    let time = match time {
        None => kept,
        Some(SetTime::Now) => Timestamp::now(),
        Some(SetTime::At(time)) => time,
    };
    time.secs as f64 + f64::from(time.nanos) * 1e-9
}
