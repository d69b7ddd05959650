//! A larger size for a file system.

use defuse_fs::source::{GrowthResult, ImageGrowth, SourceOpenError, SourceResult};

use super::make::{allocate, check_size, system_error};
use super::{OpenImage, device};
use crate::format::BLOCK;
use crate::{StoreError, store};

/// Enlarges the file system to the size in `growth`, or to the size of its file or device.
pub(super) fn grow(image: &OpenImage, growth: &ImageGrowth) -> SourceResult<GrowthResult> {
    let (path, shown) = (&image.path, image.path.display());
    let unusable = |error: StoreError| image.unusable(&error);
    let superblock = store::superblock(&*image.device).map_err(unusable)?;
    let Some(file) = &image.file else {
        return Err(SourceOpenError::Usage(format!(
            "{shown} is a device whose size does not change"
        )));
    };
    let before = superblock.blocks * BLOCK as u64;
    let bytes = file.bytes().map_err(system_error("examine", path))?;
    let wanted = match growth.size {
        Some(_) if !file.is_regular() => {
            return Err(SourceOpenError::Usage(format!(
                "{shown} is a block device, which has a size: leave out --size"
            )));
        }
        None if file.is_regular() && bytes / BLOCK as u64 <= superblock.blocks => {
            return Err(SourceOpenError::Usage(format!(
                "{shown} has {bytes} bytes, which its file system uses: give a size, such as --size 2G"
            )));
        }
        wanted => wanted.unwrap_or(bytes) / BLOCK as u64 * BLOCK as u64,
    };
    if wanted < before {
        return Err(SourceOpenError::Usage(format!(
            "{shown} has a file system of {before} bytes, which cannot shrink to {wanted}: \
             copy its files to a smaller one"
        )));
    }
    check_size(path, wanted)?;
    if wanted > bytes {
        file.resize(wanted).map_err(system_error("change the size of", path))?;
    }
    if growth.size.is_some() {
        allocate(path, file, wanted, growth.sparse, &*image.watch)?;
        // A file system must not be larger than its file, whatever a power failure leaves.
        file.sync().map_err(system_error("sync", path))?;
    }
    if wanted > before {
        store::grow(&*device(file, path)?, wanted / BLOCK as u64).map_err(unusable)?;
    }
    Ok(GrowthResult { before, now: wanted })
}
