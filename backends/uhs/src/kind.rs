//! The kind of source `uhs`.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::FileSystem;
use defuse_fs::source::OptionValue::{Choice, Flag, Number, Seconds, Size};
use defuse_fs::source::{
    ChoiceWord, FileAccess, SourceDescription, SourceFacts, SourceOpenError, SourceOption,
    SourceRest, SourceResult, SourceSharing,
};

use crate::engine::MOST_QUEUES;
use crate::format::BLOCK;
use crate::{SeparationMode, UhsOptions, image};

/// `uhs:IMAGE`.
pub static KIND: SourceDescription<UhsOptions> = SourceDescription {
    about: SourceFacts {
        name: "uhs",
        form: "uhs:IMAGE",
        help: "files on a raw device, crash-safe; IMAGE is a file or a block device (defuse mkfs)",
        rest: SourceRest::Path,
        sharing: SourceSharing::NeedsServer,
        rings: true,
        network: false,
        files: FileAccess::None,
    },
    options: OPTIONS,
    defaults: |frontend| UhsOptions {
        read_only: frontend.read_only,
        access_times: frontend.access_times,
        writeback: frontend.writeback,
        ..UhsOptions::default()
    },
    open,
    images: Some(&image::ImageFiles),
};

/// The smallest cache: 1 MiB. A write of that size must fit.
const SMALLEST_CACHE: u64 = 1 << 20;

#[rustfmt::skip]
const OPTIONS: &[SourceOption<UhsOptions>] = &[
    SourceOption::new("cache", Size(SMALLEST_CACHE, 1 << 40, set_cache),
        "memory for data of files (default 256M, a quarter at most); an eighth may wait for the device"),
    SourceOption::new("index", Size(1 << 16, u64::MAX, |o, bytes| o.index = bytes),
        "memory for names and attributes (default half of the machine's or control group's)"),
    SourceOption::new("commit", Seconds(|o, time| o.commit = (time > Duration::ZERO).then_some(time)),
        "changes are durable after this time at the latest; 0: only after a sync (default 1)"),
    SourceOption::new("discard", Flag(|o| o.discard = true),
        "free blocks are discarded on the device, once they are durably free"),
    SourceOption::new("separation", Choice(SEPARATIONS),
        "threads share queues of the device, which take turns or are divided by what operations are"),
    SourceOption::new("queues", Number(1, MOST_QUEUES, |o, count| o.queues = Some(count as u32)),
        "how many queues they share (default 4); only with separation="),
    SourceOption::new("worker", Flag(|o| o.worker = true),
        "one thread does all I/O, on a processor of the device's NUMA node"),
];

const SEPARATIONS: &[ChoiceWord<UhsOptions>] = &[
    ("off", |o| o.separation = Some(SeparationMode::Off)),
    ("static", |o| o.separation = Some(SeparationMode::Static)),
    ("learned", |o| o.separation = Some(SeparationMode::Learned)),
];

fn set_cache(options: &mut UhsOptions, bytes: u64) {
    options.cache_pages = (bytes / BLOCK as u64) as usize;
    options.dirty_pages = options.cache_pages / 8;
}

fn open(image: &OsStr, options: UhsOptions) -> SourceResult<Arc<dyn FileSystem>> {
    if options.queues.is_some() && options.separation.is_none() {
        let text = "queues= needs separation=: otherwise every thread has queues of its own";
        return Err(SourceOpenError::Usage(text.to_owned()));
    }
    Ok(Arc::new(image::open(Path::new(image), options)?))
}

#[cfg(test)]
mod tests {
    use defuse_fs::source::FrontendProperties;

    use super::*;

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&FrontendProperties::default(), options);
        let set = of(&["cache=8M", "commit=0.5", "index=3M"]).unwrap();
        let commit = Some(Duration::from_millis(500));
        assert_eq!(
            set,
            UhsOptions {
                read_only: false,
                cache_pages: 2048,
                dirty_pages: 256,
                index: 3 << 20,
                commit,
                ..UhsOptions::default()
            }
        );
        assert!(!set.worker && of(&["worker"]).unwrap().worker);
        assert_eq!(of(&["commit=0"]).unwrap().commit, None);
        let set = of(&["separation=learned", "queues=3"]).unwrap();
        assert_eq!((set.separation, set.queues), (Some(SeparationMode::Learned), Some(3)));
        assert_eq!(of(&["separation=off"]).unwrap().separation, Some(SeparationMode::Off));
        assert!(of(&["separation=on"]).unwrap_err().to_string().contains("off|static|learned"));
        assert!(of(&["separation=off", "queues=9"]).unwrap_err().to_string().contains("8"));
        let alone = open(OsStr::new("/nowhere"), of(&["queues=2"]).unwrap()).err().unwrap();
        assert!(
            matches!(&alone, SourceOpenError::Usage(text) if text.contains("separation=")),
            "{alone}"
        );
        assert!(of(&["cache=4K"]).unwrap_err().to_string().contains("from 1048576"));
    }
}
