//! An image with an empty file system.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use defuse_block::{BlockDevice, DeviceAccess, DeviceOpenError, Errno, OpenDeviceFile};
use defuse_fs::source::{NewImage, SourceOpenError, SourceResult, WorkWatch};

use super::{
    contents, device, interruption_error, open_driven, open_error, random, refuse_short, with_limit,
};
use crate::Uhs;
use crate::format::superblock::{FEWEST_UNITS, MOST_UNITS};
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Bytes of the smallest image.
const SMALLEST: u64 = FEWEST_UNITS * UNIT_BLOCKS * BLOCK as u64;

/// Bytes of the largest image.
const LARGEST: u64 = MOST_UNITS * UNIT_BLOCKS * BLOCK as u64;

/// Makes a file system in a file or a block device.
pub(super) fn make(image: &Path, new: &NewImage, watch: &dyn WorkWatch) -> SourceResult<()> {
    new.size.map_or(Ok(()), |size| check_size(image, size))?;
    if let Some(device) = open_driven(image, DeviceAccess::ReadWrite)? {
        return fill_device(image, device, new);
    }
    match OpenDeviceFile::open(image, DeviceAccess::ReadWrite) {
        Ok(file) => fill(image, &file, new, watch),
        Err(DeviceOpenError::System { errno: Errno::NOENT, .. }) => create(image, new, watch),
        Err(error) => Err(open_error(error)),
    }
}

/// Fails with the limit if no file system can have so many bytes.
pub(super) fn check_size(image: &Path, bytes: u64) -> SourceResult<()> {
    let shown = image.display();
    let text = match bytes {
        0..SMALLEST => {
            format!("{shown}: {bytes} bytes are too few: the smallest file system has 16M")
        }
        SMALLEST..=LARGEST => return Ok(()),
        _ => format!("{shown}: {bytes} bytes are too many: the largest file system has {LARGEST}"),
    };
    Err(SourceOpenError::Usage(text))
}

/// Makes a file system in a device of a driver.
fn fill_device(image: &Path, device: Arc<dyn BlockDevice>, new: &NewImage) -> SourceResult<()> {
    if new.size.is_some() {
        let shown = image.display();
        return Err(SourceOpenError::Usage(format!(
            "{shown} is a device, which has a size: leave out --size"
        )));
    }
    check_size(image, device.properties().bytes())?;
    refuse_contents(image, &*device, new)?;
    write(image, device, new)
}

/// Makes a file system in a file that is there, or in a block device.
fn fill(
    image: &Path,
    file: &OpenDeviceFile,
    new: &NewImage,
    watch: &dyn WorkWatch,
) -> SourceResult<()> {
    let shown = image.display();
    if !file.is_regular() && new.size.is_some() {
        return Err(SourceOpenError::Usage(format!(
            "{shown} is a block device, which has a size: leave out --size"
        )));
    }
    match file.bytes().map_err(system_error("examine", image))? {
        0 if new.size.is_none() => return Err(missing_size_error(image)),
        0 => {}
        // No device has so few bytes.
        1..SMALLEST_DEVICE if !new.force => return Err(has(image, "data")),
        1..SMALLEST_DEVICE => {}
        _ => refuse_contents(image, &*device(file, image)?, new)?,
    }
    if let Some(size) = new.size {
        // Space that is there already keeps its place.
        file.resize(size).map_err(system_error("change the size of", image))?;
        allocate(image, file, size, new.sparse, watch)?;
    }
    write(image, device(file, image)?, new)
}

/// Bytes of the smallest device.
const SMALLEST_DEVICE: u64 = BLOCK as u64;

fn missing_size_error(image: &Path) -> SourceOpenError {
    let shown = image.display();
    SourceOpenError::Usage(format!("{shown} has no bytes yet: give its size, such as --size 1G"))
}

/// Makes a file system in a new file, which is removed if that fails. The file will contain the
/// files of all users, so that only its owner may open it.
fn create(image: &Path, new: &NewImage, watch: &dyn WorkWatch) -> SourceResult<()> {
    let size = new.size.ok_or_else(|| missing_size_error(image))?;
    let file = OpenDeviceFile::create(image).map_err(|error| match error {
        DeviceOpenError::System { errno, .. } => system_error("create", image)(errno),
        error => open_error(error),
    })?;
    let made = file.resize(size).map_err(system_error("change the size of", image));
    let made = made.and_then(|()| allocate(image, &file, size, new.sparse, watch));
    made.and_then(|()| write(image, device(&file, image)?, new)).inspect_err(|_| {
        if file.is_in_place() {
            let _ = std::fs::remove_file(image);
        }
    })
}

/// Fails if the image has data, unless the user insists.
fn refuse_contents(image: &Path, device: &dyn BlockDevice, new: &NewImage) -> SourceResult<()> {
    let found = contents::detect(device);
    refuse_short(image, found, device)?;
    match found {
        Some(found) if !new.force => Err(has(image, found.name())),
        _ => Ok(()),
    }
}

fn has(image: &Path, found: &str) -> SourceOpenError {
    let shown = image.display();
    SourceOpenError::Failed(format!(
        "{shown} has {found}: nothing was changed; take another file, or add --force to destroy what it has"
    ))
}

/// Bytes that are allocated at a time: the system call cannot be interrupted.
const ALLOCATED: u64 = 256 << 20;

/// Gives a file its space unless it is to be sparse.
pub(super) fn allocate(
    image: &Path,
    file: &OpenDeviceFile,
    bytes: u64,
    sparse: bool,
    watch: &dyn WorkWatch,
) -> SourceResult<()> {
    if sparse {
        return Ok(());
    }
    for start in (0..bytes).step_by(ALLOCATED as usize) {
        if watch.report_progress("allocating MiB", start >> 20, bytes >> 20) {
            return Err(interruption_error(image, "it has no file system, or its former one"));
        }
        allocate_part(image, file, start..bytes.min(start + ALLOCATED))?;
    }
    Ok(())
}

fn allocate_part(image: &Path, file: &OpenDeviceFile, part: Range<u64>) -> SourceResult<()> {
    let bytes = part.end;
    file.allocate(part).map_err(|errno| {
        let shown = image.display();
        let next = match errno {
            Errno::NOSPC => "take a smaller --size, or free space",
            _ => "with --sparse it gets space when it is used",
        };
        SourceOpenError::Failed(format!(
            "cannot allocate {bytes} bytes for {shown}: {errno}; {next}"
        ))
    })
}

fn write(image: &Path, device: Arc<dyn BlockDevice>, new: &NewImage) -> SourceResult<()> {
    let root = (new.root_perm, new.root_uid, new.root_gid);
    Uhs::make(Arc::clone(&device), root, &mut random()).map_err(|error| {
        let (shown, error) = (image.display(), with_limit(&error, &*device));
        SourceOpenError::Failed(format!("cannot make a file system in {shown}: {error}"))
    })
}

/// The error of a system call.
pub(super) fn system_error(
    action: &'static str,
    image: &Path,
) -> impl FnOnce(Errno) -> SourceOpenError {
    move |errno| SourceOpenError::Failed(format!("cannot {action} {}: {errno}", image.display()))
}
