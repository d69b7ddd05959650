//! The properties of a modelled controller.

use defuse_block::model::SsdParameters;

/// The properties of a modelled controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelProperties {
    /// The largest transfer: 2 to this power pages. 0 is no limit.
    pub mdts: u8,
    /// Pairs of I/O queues.
    pub queues: u16,
    /// Entries of a queue.
    pub entries: u16,
    /// The controller has Write Zeroes.
    pub writes_zeroes: bool,
    /// The controller takes scatter gather lists.
    pub sgl: bool,
    /// The controller reaches the memory of callers. Otherwise all data is copied.
    pub maps: bool,
    /// The controller has interrupts.
    pub interrupts: bool,
    /// The controller has Compare.
    pub compares: bool,
    /// Queues can have priorities.
    pub priorities: bool,
    /// Commands of I/O queues that the controller works on at a time. It takes the next one by the
    /// arbitration that its driver chose.
    pub slots: usize,
    /// The range of the random times of commands, in microseconds: the order of completions differs
    /// from the order of commands. It has no meaning with `parts`.
    pub latency_us: (u64, u64),
    /// The SSD behind the controller. Its parts determine the time of each command (see the
    /// [module](crate::model)). It takes commands while both `slots` and the limits of the SSD
    /// allow it. [`ControllerModel::with`](super::ControllerModel::with) panics if it lacks dies,
    /// channels, pages, commands or a buffer.
    pub parts: Option<SsdParameters>,
    /// Blocks that an aligned write replaces atomically, less one (NAWUPF), and the boundary
    /// (NABSPF).
    pub atomic: (u16, u16),
}

impl Default for ModelProperties {
    fn default() -> Self {
        ModelProperties {
            mdts: 5,
            queues: 64,
            entries: 1024,
            writes_zeroes: true,
            sgl: false,
            maps: true,
            interrupts: true,
            compares: true,
            priorities: false,
            slots: usize::MAX,
            latency_us: (5, 50),
            parts: None,
            atomic: (0, 0),
        }
    }
}
