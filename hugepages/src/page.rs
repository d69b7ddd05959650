//! Pages that a program owns.

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::PAGE;
use crate::blocks::{AllocatedPage, PageBlocks, TOGETHER};
use crate::mapping::supply;

static BLOCKS: Mutex<PageBlocks> = Mutex::new(PageBlocks::new());

fn blocks() -> MutexGuard<'static, PageBlocks> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A page of 4 KiB, in a block of 2 MiB which all pages of the process share. The kernel supplies
/// some pages together, so that few are waited for. A block goes back to the kernel when none of
/// its pages is used.
#[derive(Debug)]
pub struct SmallPage(NonNull<[u8; PAGE]>);

// SAFETY: a page belongs to its owner alone, and no thread owns it.
unsafe impl Send for SmallPage {}
// SAFETY: as for Send; through a shared reference it is only read.
unsafe impl Sync for SmallPage {}

impl SmallPage {
    /// A page of zeros. `None` if the kernel has no memory.
    pub fn zeroed() -> Option<SmallPage> {
        let AllocatedPage { start, is_fresh, is_first } = blocks().take()?;
        let mut page = SmallPage(start.cast());
        if is_first {
            // SAFETY: [`TOGETHER`] pages of the block begin here, and it stays as long as this page
            // is taken.
            unsafe { supply(start, TOGETHER * PAGE) };
        }
        if !is_fresh {
            page.fill(0);
        }
        Some(page)
    }
}

impl Deref for SmallPage {
    type Target = [u8; PAGE];

    fn deref(&self) -> &[u8; PAGE] {
        // SAFETY: the page belongs to `self` from `take` to `give`, within a mapping that lives as
        // long; the kernel has initialized all its bytes with zeros.
        unsafe { self.0.as_ref() }
    }
}

impl DerefMut for SmallPage {
    fn deref_mut(&mut self) -> &mut [u8; PAGE] {
        // SAFETY: as for `deref`, and `self` is borrowed exclusively.
        unsafe { self.0.as_mut() }
    }
}

impl Drop for SmallPage {
    fn drop(&mut self) {
        let unused = blocks().give(self.0.cast());
        // Unmapped without the lock.
        drop(unused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_keep_their_bytes_and_begin_as_zeros() {
        let write = |seed: u8| {
            let mut pages: Vec<SmallPage> =
                (0..2000).map(|_| SmallPage::zeroed().unwrap()).collect();
            for (number, page) in pages.iter_mut().enumerate() {
                assert!(page.iter().all(|byte| *byte == 0));
                page.fill(number as u8 ^ seed);
            }
            for (number, page) in pages.iter().enumerate() {
                assert!(page.as_ptr().addr().is_multiple_of(PAGE));
                assert!(page.iter().all(|byte| *byte == number as u8 ^ seed));
            }
        };
        let other = std::thread::spawn(move || (1..20).for_each(write));
        (0..20).for_each(write);
        other.join().unwrap();
    }
}
