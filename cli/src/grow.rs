//! `defuse grow`.

use std::path::PathBuf;

use defuse_fs::source::ImageGrowth;

use crate::error::{Result, print};
use crate::{images, paths};

/// Make the file system in an image larger
///
/// A file becomes longer; a block device has its size, and the file system takes what is there. The
/// image must not be in use. A power failure leaves the old size or the new one, and all files. A
/// file system does not shrink.
#[derive(clap::Args)]
pub struct GrowArgs {
    /// The file or block device
    image: PathBuf,
    /// The new size of the file, such as 2G; without it the size that it has
    #[arg(long, value_name = "SIZE", value_parser = images::size)]
    size: Option<u64>,
    /// Do not allocate the space of the file now
    #[arg(long)]
    sparse: bool,
}

/// Makes it larger.
pub fn run(args: &GrowArgs) -> Result {
    let path = paths::image(&args.image);
    let growth = ImageGrowth { size: args.size, sparse: args.sparse };
    let grown = images::open(&path, true)?.grow(&growth)?;
    let shown = path.display();
    match grown.now == grown.before {
        true => print(&format!("{shown}: has {} bytes already\n", grown.now)),
        false => print(&format!("{shown}: {} bytes, before {}\n", grown.now, grown.before)),
    }
}
