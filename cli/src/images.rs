//! Images of any kind, and sizes of them.

use std::path::Path;

use defuse_fs::source::{Image, bytes};

use crate::error::{Failure, Result};
use crate::sources::SOURCES;

/// Opens the image of an unmounted file system of any kind.
pub fn open(image: &Path, writes: bool) -> Result<Box<dyn Image>> {
    let mut types = Vec::new();
    for kind in SOURCES.kinds() {
        let Some(images) = kind.images() else { continue };
        if let Some(opened) = images.open(image, writes)? {
            return Ok(opened);
        }
        types.push(kind.about().name);
    }
    let (shown, types) = (image.display(), types.join(" or "));
    Err(Failure::Failed(format!(
        "{shown} has no file system of the type {types}: `file -s` may know it"
    )))
}

/// The value of `--size`.
pub fn size(text: &str) -> std::result::Result<u64, String> {
    bytes(text).ok_or_else(|| "write bytes, or a number with K, M, G or T".to_owned())
}
