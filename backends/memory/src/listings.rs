//! The end of the listing of each open directory.
//!
//! New names are added at the end. A listing could thus continue for as long as another process
//! creates or renames files. It therefore ends at the last name that existed when it began.
//! readdir(3) leaves open whether later names are returned.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::Fh;

use crate::sync::lock;

/// The open directories.
#[derive(Default)]
pub(crate) struct OpenListings {
    /// For each handle, the first position that is not listed.
    ends: Mutex<HashMap<u64, u64>>,
    last: AtomicU64,
}

impl OpenListings {
    pub fn open(&self) -> Fh {
        let fh = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.ends).insert(fh, u64::MAX);
        Fh(fh)
    }

    /// The end of the listing that continues at `from`. `next` is the position of the next new
    /// name. A listing at 0 starts anew, rewinddir(3).
    pub fn end(&self, dir: Fh, from: u64, next: u64) -> u64 {
        match lock(&self.ends).get_mut(&dir.0) {
            Some(end) => {
                if from == 0 {
                    *end = next;
                }
                *end
            }
            None => u64::MAX,
        }
    }

    pub fn close(&self, dir: Fh) {
        lock(&self.ends).remove(&dir.0);
    }
}
