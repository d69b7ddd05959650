//! The kind of source `uhs`.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::FileSystem;
use defuse_fs::source::Value::{Flag, Seconds, Size};
use defuse_fs::source::{About, Description, Opt, Rest, Result, Sharing};

use crate::format::BLOCK;
use crate::{Options, image};

/// `uhs:IMAGE`.
pub static KIND: Description<Options> = Description {
    about: About {
        name: "uhs",
        form: "uhs:IMAGE",
        help: "files on a raw device, crash-safe; IMAGE is a file or a block device (defuse mkfs)",
        rest: Rest::Path,
        sharing: Sharing::NeedsServer,
        rings: true,
        network: false,
    },
    options: OPTIONS,
    defaults: |frontend| Options { read_only: frontend.read_only, ..Options::default() },
    open,
    images: Some(&image::ImageFiles),
};

/// The smallest cache: 1 MiB. A write of that size must fit.
const SMALLEST_CACHE: u64 = 1 << 20;

#[rustfmt::skip]
const OPTIONS: &[Opt<Options>] = &[
    Opt::new("cache", Size(SMALLEST_CACHE, 1 << 40, set_cache),
        "memory for the data of files (default 256M); an eighth of it may wait for the device"),
    Opt::new("commit", Seconds(|o, time| o.commit = (time > Duration::ZERO).then_some(time)),
        "changes are durable after this time at the latest; 0: only after a sync (default 1)"),
    Opt::new("discard", Flag(|o| o.discard = true),
        "the device is told which blocks are free, once that is durable"),
];

fn set_cache(options: &mut Options, bytes: u64) {
    options.cache_pages = (bytes / BLOCK as u64) as usize;
    options.dirty_pages = options.cache_pages / 8;
}

fn open(image: &OsStr, options: Options) -> Result<Arc<dyn FileSystem>> {
    Ok(Arc::new(image::open(Path::new(image), options)?))
}

#[cfg(test)]
mod tests {
    use defuse_fs::source::Frontend;

    use super::*;

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&Frontend::default(), options);
        let set = of(&["cache=8M", "commit=0.5"]).unwrap();
        let commit = Some(Duration::from_millis(500));
        assert_eq!(
            set,
            Options {
                read_only: false,
                cache_pages: 2048,
                dirty_pages: 256,
                commit,
                discard: false
            }
        );
        assert_eq!(of(&["commit=0"]).unwrap().commit, None);
        assert!(of(&["cache=4K"]).unwrap_err().to_string().contains("from 1048576"));
    }
}
