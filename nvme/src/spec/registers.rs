//! The registers of a controller, at the start of its first memory range (BAR 0).

use std::time::Duration;

/// Offsets, bits and values of registers.
pub mod register {
    /// Capabilities, 64 bits.
    pub const CAP: u32 = 0x00;
    /// Version.
    pub const VS: u32 = 0x08;
    /// Interrupt mask, set.
    pub const INTMS: u32 = 0x0c;
    /// Configuration.
    pub const CC: u32 = 0x14;
    /// Status.
    pub const CSTS: u32 = 0x1c;
    /// Sizes of the admin queues.
    pub const AQA: u32 = 0x24;
    /// Address of the admin submission queue, 64 bits.
    pub const ASQ: u32 = 0x28;
    /// Address of the admin completion queue, 64 bits.
    pub const ACQ: u32 = 0x30;
    /// The first doorbell.
    pub const DOORBELLS: u32 = 0x1000;

    /// CC: the controller works.
    pub const ENABLE: u32 = 1;
    /// CC: pages of 4 KiB, NVM command set, round robin, entries of 64 and 16 bytes.
    pub const SETTINGS: u32 = 6 << 16 | 4 << 20;
    /// CC: weighted round robin with an urgent class, in place of round robin.
    pub const WEIGHTED: u32 = 1 << 11;
    /// CC: the bits of the shutdown notification.
    pub const SHUTDOWN: u32 = 3 << 14;
    /// CC: normal shutdown.
    pub const SHUTDOWN_NORMAL: u32 = 1 << 14;
    /// CSTS: ready.
    pub const READY: u32 = 1;
    /// CSTS: fatal status.
    pub const FATAL: u32 = 2;
    /// CSTS: the bits of the state of a shutdown.
    pub const SHUTDOWN_STATE: u32 = 3 << 2;
    /// CSTS: the shutdown is complete.
    pub const SHUTDOWN_DONE: u32 = 2 << 2;
    /// The value of registers of a device that is no longer there.
    pub const GONE: u32 = u32::MAX;
}

/// The register CAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerCapabilities(pub u64);

impl ControllerCapabilities {
    /// Entries of a queue at most.
    pub fn max_entries(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// The longest time in which the controller becomes ready, or stops being ready; at least a
    /// second.
    pub fn timeout(self) -> Duration {
        Duration::from_millis(500 * (self.0 >> 24 & 0xff)).max(Duration::from_secs(1))
    }

    /// Bytes from one doorbell to the next.
    pub fn doorbell_stride(self) -> u32 {
        4 << (self.0 >> 32 & 0xf)
    }

    /// True where queues can have priorities (weighted round robin with an urgent class).
    pub fn has_priorities(self) -> bool {
        self.0 >> 17 & 1 == 1
    }

    /// The register CC without its bits that enable or shut down.
    pub fn settings(self) -> u32 {
        register::SETTINGS | if self.has_priorities() { register::WEIGHTED } else { 0 }
    }

    /// True where the NVM command set is there.
    pub fn has_nvm_commands(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// True where pages of 4 KiB are possible.
    pub fn has_small_pages(self) -> bool {
        self.0 >> 48 & 0xf == 0
    }

    /// The offset of the doorbell of a submission queue.
    pub fn submission_doorbell(self, queue: u16) -> u32 {
        register::DOORBELLS + 2 * u32::from(queue) * self.doorbell_stride()
    }

    /// The offset of the doorbell of a completion queue.
    pub fn completion_doorbell(self, queue: u16) -> u32 {
        self.submission_doorbell(queue) + self.doorbell_stride()
    }
}
