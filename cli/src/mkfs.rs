//! `defuse mkfs`.

use std::path::PathBuf;

use defuse_fs::source::{ImageOperations, NewImage};
use rustix::process::{getegid, geteuid};

use crate::completions;
use crate::error::{CommandFailure, Result};
use crate::sources::SOURCES;
use crate::{images, paths};

/// Make an empty file system in an image
///
/// The image is a file, which is created for its owner alone if it does not exist, or a block
/// device. The root directory belongs to the caller. An image with data is refused.
#[derive(clap::Args)]
pub struct MkfsArgs {
    /// The type of the file system, such as uhs
    #[arg(value_name = "TYPE", add = completions::image_kinds())]
    kind: String,
    /// The file or block device
    image: PathBuf,
    /// The size of the file, such as 64M or 1G; a block device has its own
    #[arg(long, value_name = "SIZE", value_parser = images::size)]
    size: Option<u64>,
    /// Do not allocate the space of the file now
    #[arg(long)]
    sparse: bool,
    /// Destroy the data that the image has
    #[arg(long)]
    force: bool,
}

/// Makes it.
pub fn run(args: &MkfsArgs) -> Result {
    let new = NewImage {
        size: args.size,
        sparse: args.sparse,
        force: args.force,
        root_perm: 0o755,
        root_uid: geteuid().as_raw(),
        root_gid: getegid().as_raw(),
    };
    let watch = images::ImageProgress::new()?;
    Ok(kind(&args.kind)?.make(&paths::image(&args.image), &new, &watch)?)
}

/// The operations on images of the type `name`.
fn kind(name: &str) -> Result<&'static dyn ImageOperations> {
    let named = SOURCES.kinds().find(|kind| kind.facts().name == name);
    named.and_then(|kind| kind.images()).ok_or_else(|| {
        let known = SOURCES.kinds().filter(|kind| kind.images().is_some());
        let known: Vec<_> = known.map(|kind| kind.facts().name).collect();
        CommandFailure::Usage(format!(
            "no images have the type {name:?}: known are {}",
            known.join(", ")
        ))
    })
}
