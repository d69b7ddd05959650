//! An image with an empty file system.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use defuse_block::{Access, Device};
use defuse_fs::source::{Error, NewImage, Result};
use rustix::fs::FallocateFlags;

use super::{contents, device, random};
use crate::Uhs;
use crate::format::superblock::FEWEST_UNITS;
use crate::format::{BLOCK, UNIT_BLOCKS};

/// Bytes of the smallest image.
const SMALLEST: u64 = FEWEST_UNITS * UNIT_BLOCKS * BLOCK as u64;

/// Makes a file system in a file or a block device.
pub(super) fn make(image: &Path, new: &NewImage) -> Result<()> {
    let shown = image.display();
    if let Some(size) = new.size.filter(|size| *size < SMALLEST) {
        return Err(Error::Usage(format!(
            "{shown}: {size} bytes are too few: the smallest file system has 16M"
        )));
    }
    match std::fs::metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(image, new),
        Err(error) => Err(Error::Failed(format!("cannot examine {shown}: {error}"))),
        Ok(meta) if meta.file_type().is_block_device() && new.size.is_some() => Err(Error::Usage(
            format!("{shown} is a block device, which has a size: leave out --size"),
        )),
        Ok(meta) if meta.is_file() && meta.len() == 0 && new.size.is_none() => {
            Err(needs_size(image))
        }
        Ok(meta) => {
            match meta.is_file() && meta.len() < BLOCK as u64 {
                // No device has so few bytes.
                true if meta.len() > 0 && !new.force => return Err(has(image, "data")),
                true => {}
                false => refuse_contents(image, new)?,
            }
            if let Some(size) = new.size {
                let file = OpenOptions::new().write(true).open(image);
                resize(image, &file.map_err(failed("open", image))?, size, new.sparse)?;
            }
            write(image, new)
        }
    }
}

fn needs_size(image: &Path) -> Error {
    let shown = image.display();
    Error::Usage(format!("{shown} has no bytes yet: give its size, such as --size 1G"))
}

/// Makes a file system in a new file, which is removed if that fails. It has the files of all users, so that
/// only its owner may open it.
fn create(image: &Path, new: &NewImage) -> Result<()> {
    let size = new.size.ok_or_else(|| needs_size(image))?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(image);
    let file = file.map_err(failed("create", image))?;
    let made = resize(image, &file, size, new.sparse).and_then(|()| write(image, new));
    made.inspect_err(|_| {
        let _ = std::fs::remove_file(image);
    })
}

/// Fails if the image has data, unless the user insists.
fn refuse_contents(image: &Path, new: &NewImage) -> Result<()> {
    // Also for one that is to be overwritten: it must not be in use.
    let device = device(image, Access::ReadWrite)?;
    match contents::of(&*device) {
        Some(found) if !new.force => Err(has(image, found.name())),
        _ => Ok(()),
    }
}

fn has(image: &Path, found: &str) -> Error {
    let shown = image.display();
    Error::Failed(format!(
        "{shown} has {found}: nothing was changed; take another file, or add --force to destroy what it has"
    ))
}

/// Gives a file its size, and its space unless it is to be sparse.
fn resize(image: &Path, file: &File, size: u64, sparse: bool) -> Result<()> {
    file.set_len(size).map_err(failed("change the size of", image))?;
    if sparse {
        return Ok(());
    }
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size).map_err(|errno| {
        let shown = image.display();
        let next = match errno {
            rustix::io::Errno::NOSPC => "take a smaller --size, or free space",
            _ => "with --sparse it gets space when it is used",
        };
        Error::Failed(format!("cannot allocate {size} bytes for {shown}: {errno}; {next}"))
    })
}

fn write(image: &Path, new: &NewImage) -> Result<()> {
    let device: Arc<dyn Device> = device(image, Access::ReadWrite)?;
    let root = (new.root_perm, new.root_uid, new.root_gid);
    Uhs::make(device, root, &mut random()).map_err(|error| {
        let shown = image.display();
        Error::Failed(format!("cannot make a file system in {shown}: {error}"))
    })
}

fn failed(action: &'static str, image: &Path) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::Failed(format!("cannot {action} {}: {error}", image.display()))
}
