//! The space that names, symbolic links and extended attributes use of the limit on bytes.
//!
//! Each is smaller than a page. Their bytes are added up, and every whole page of the sum counts as
//! one page in use. Otherwise 2000 inodes could hold a gigabyte of attributes in a file system of
//! one megabyte.

use std::sync::{Arc, Mutex};

use defuse_fs::Result;

use crate::pages::{PAGE, PagePool};
use crate::sync::lock;

/// The sum of all charged bytes, and the pages charged for it.
pub(crate) struct SmallObjects {
    bytes: Mutex<u64>,
    pool: Arc<PagePool>,
}

impl SmallObjects {
    pub fn new(pool: Arc<PagePool>) -> Self {
        SmallObjects { bytes: Mutex::new(0), pool }
    }

    /// Charges `to` bytes instead of `from`. Fails with `ENOSPC`, and then changes nothing.
    fn change(&self, from: u64, to: u64) -> Result<()> {
        let mut bytes = lock(&self.bytes);
        let sum = bytes.saturating_sub(from).saturating_add(to);
        let (before, after) = (*bytes / PAGE as u64, sum / PAGE as u64);
        if after > before {
            self.pool.reserve(after - before)?;
        } else {
            self.pool.quota.give_back(before - after);
        }
        *bytes = sum;
        Ok(())
    }
}

/// The bytes charged for one object, until it is dropped.
pub(crate) struct SpaceCharge {
    small: Arc<SmallObjects>,
    bytes: u64,
}

impl SpaceCharge {
    /// A charge of 0 bytes.
    pub fn new(small: &Arc<SmallObjects>) -> Self {
        SpaceCharge { small: Arc::clone(small), bytes: 0 }
    }

    /// Charges `bytes` instead of the previous number. Fails with `ENOSPC`, and then changes
    /// nothing. A decrease never fails.
    pub fn set(&mut self, bytes: usize) -> Result<()> {
        let bytes = bytes as u64;
        if bytes != self.bytes {
            self.small.change(self.bytes, bytes)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// The bytes charged.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }
}

impl Drop for SpaceCharge {
    fn drop(&mut self) {
        let _ = self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::Errno;

    use super::*;

    #[test]
    fn bytes_of_many_objects_fill_pages_together() {
        let pool = Arc::new(PagePool::new(Some(1), 0));
        let small = Arc::new(SmallObjects::new(Arc::clone(&pool)));
        let mut charges: Vec<SpaceCharge> = (0..4).map(|_| SpaceCharge::new(&small)).collect();
        for charge in &mut charges {
            charge.set(1500).unwrap();
        }
        assert_eq!(pool.quota.used_count(), 1);
        assert_eq!(charges[0].set(1500 + 2193), Err(Errno::ENOSPC));
        assert_eq!(charges[0].bytes(), 1500, "what fails changes nothing");
        charges[0].set(1500 + 2191).unwrap();
        charges.truncate(1);
        assert_eq!(pool.quota.used_count(), 0);
    }
}
