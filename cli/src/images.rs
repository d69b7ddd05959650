//! Images of any kind, sizes of them, and the progress of work on them.

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::source::{SourceImage, WorkWatch, bytes};
use defuse_shared::PagedOptions;
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{CommandFailure, Result};
use crate::sources::SOURCES;

/// Opens the image of an unmounted file system of any kind.
pub fn open(image: &Path, writes: bool) -> Result<Box<dyn SourceImage>> {
    let watch: Arc<dyn WorkWatch> = Arc::new(ImageProgress::new()?);
    let mut types = Vec::new();
    for kind in SOURCES.kinds() {
        let Some(images) = kind.images() else { continue };
        if let Some(opened) = images.open(image, writes, Arc::clone(&watch))? {
            return Ok(opened);
        }
        types.push(kind.facts().name);
    }
    let (shown, types) = (image.display(), types.join(" or "));
    Err(CommandFailure::Failed(format!(
        "{shown} has no file system of the type {types}: `file -s` may know it"
    )))
}

/// The value of `--size`.
pub fn size(text: &str) -> std::result::Result<u64, String> {
    bytes(text).ok_or_else(|| "write bytes, or a number with K, M, G or T".to_owned())
}

/// The value of `--cache`, and of `cache` of a manager.
pub fn cache_size(text: &str) -> std::result::Result<u64, String> {
    let bytes = size(text)?;
    if bytes < PagedOptions::LEAST {
        return Err("the least is 1M: without --shared there is no cache".to_owned());
    }
    Ok(bytes)
}

/// Shows on a terminal how far work is, and ends it after Ctrl-C, SIGTERM or SIGHUP. A second
/// signal kills the program, as work looks for the first only at its next step.
pub struct ImageProgress {
    /// `None` without a terminal.
    bar: Option<ProgressBar>,
    interrupted: Arc<AtomicBool>,
}

impl ImageProgress {
    /// Catches these signals from now on.
    pub fn new() -> Result<ImageProgress> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // In this order, so that the first signal does not find the flag set.
            flag::register_conditional_default(signal, Arc::clone(&interrupted))
                .and_then(|_| flag::register(signal, Arc::clone(&interrupted)))
                .map_err(|error| {
                    CommandFailure::Failed(format!("cannot catch signals: {error}"))
                })?;
        }
        let bar = || {
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}") {
                bar.set_style(style);
            }
            bar
        };
        Ok(ImageProgress { bar: stderr().is_terminal().then(bar), interrupted })
    }
}

impl WorkWatch for ImageProgress {
    fn report_progress(&self, step: &'static str, done: u64, all: u64) -> bool {
        if let Some(bar) = &self.bar {
            bar.set_message(step);
            bar.set_length(all);
            bar.set_position(done);
        }
        self.interrupted.load(Ordering::Relaxed)
    }
}

impl Drop for ImageProgress {
    fn drop(&mut self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
