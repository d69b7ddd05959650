//! Where the listing of each open directory ends.
//!
//! A name that is added comes last, so a listing would follow for as long as somebody adds names, or
//! renames one to and fro. It ends at the names that were there when it began; what comes later need not
//! be shown, readdir(3).

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::Fh;

use crate::sync::lock;

/// The open directories.
#[derive(Default)]
pub(crate) struct Listings {
    /// By handle, the first position that is not shown.
    ends: Mutex<HashMap<u64, u64>>,
    last: AtomicU64,
}

impl Listings {
    pub fn open(&self) -> Fh {
        let fh = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.ends).insert(fh, u64::MAX);
        Fh(fh)
    }

    /// The end of the listing that goes on at `from`, where a name that is added now gets the position
    /// `next`. It begins anew at 0, rewinddir(3).
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
