//! Pages that threads are reading from the device, so that no other thread reads them meanwhile.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::FileContent;

/// The fetches of a file that have begun. Fetches that have ended are removed when the next one
/// begins.
#[derive(Default)]
pub(super) struct FetchList(Vec<(Range<u64>, Arc<PageFetch>)>);

/// A page fetch. Other threads that need its pages wait for its end.
#[derive(Default)]
pub(crate) struct PageFetch {
    ended: Mutex<bool>,
    end: Condvar,
}

impl PageFetch {
    /// Waits for the end. The pages are in memory then, unless the fetch failed or the pages were
    /// dropped.
    pub(crate) fn wait(&self) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self.end.wait(ended).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn has_ended(&self) -> bool {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The guard of the thread that fetches. Dropping it ends the fetch, also after an error.
pub(crate) struct FetchGuard(Arc<PageFetch>);

impl Drop for FetchGuard {
    fn drop(&mut self) {
        *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.end.notify_all();
    }
}

impl FileContent {
    /// Begins a fetch of pages that are [missing](FileContent::find_missing) and that no other
    /// thread fetches.
    pub(crate) fn begin_fetch(&mut self, pages: &[(u64, u64)]) -> FetchGuard {
        let fetch = Arc::new(PageFetch::default());
        self.fetches.0.retain(|(_, fetch)| !fetch.has_ended());
        let runs = pages.chunk_by(|a, b| a.0 + 1 == b.0);
        let runs = runs.map(|run| (run[0].0..run[run.len() - 1].0 + 1, Arc::clone(&fetch)));
        self.fetches.0.extend(runs);
        FetchGuard(fetch)
    }

    /// Takes out the pages that another thread fetches. Returns one of its fetches.
    pub(crate) fn take_fetched_by_others(
        &self,
        pages: &mut Vec<(u64, u64)>,
    ) -> Option<Arc<PageFetch>> {
        let mut theirs = None;
        for (range, fetch) in self.fetches.0.iter().filter(|(_, fetch)| !fetch.has_ended()) {
            let before = pages.len();
            pages.retain(|(page, _)| !range.contains(page));
            if pages.len() < before {
                theirs = Some(Arc::clone(fetch));
            }
        }
        theirs
    }
}
