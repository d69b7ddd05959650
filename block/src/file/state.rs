//! The state that the queues of a device share.

use std::sync::{Arc, Mutex};

use super::access::DeviceAccess;
use super::open::LockedFile;
use super::pool::IoThreadPool;
use crate::{BlockOpKind, DeviceProperties, Errno, MemoryRegion, Result};

/// The state that queues share with their device.
pub(super) struct FileDeviceState {
    pub(super) locked: Arc<LockedFile>,
    pub(super) facts: DeviceProperties,
    /// Addresses of memory for direct I/O are multiples of this.
    pub(super) alignment: usize,
    pub(super) regions: Mutex<Vec<Arc<MemoryRegion>>>,
    /// The error of io_uring_setup(2): all queues use threads.
    pub(super) ringless: Option<Errno>,
    pub(super) pool: IoThreadPool,
}

impl FileDeviceState {
    /// Fails with `EBADF` for a change of a device that is open for reads.
    pub(super) fn refuse(&self, kind: &BlockOpKind) -> Result<()> {
        let reads = matches!(kind, BlockOpKind::Read { .. } | BlockOpKind::Flush);
        if self.locked.access == DeviceAccess::Read && !reads { Err(Errno::BADF) } else { Ok(()) }
    }

    /// True where a write with `fua` must be followed by a sync: the flag of the write would do
    /// nothing.
    pub(super) fn syncs_after(&self, kind: &BlockOpKind) -> bool {
        matches!(kind, BlockOpKind::Write { fua: true, .. }) && !self.facts.fua
    }
}
