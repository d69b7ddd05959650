//! A namespace as a block device.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use defuse_block::{
    BlockDevice, BlockingQueue, DeviceClock, DeviceProperties, DeviceQueue, Errno, MemoryRegion,
    QueuePriority, QueuePurpose, Result,
};

use crate::ControllerTransport;
use crate::controller::{AdminFailure, ControllerEvent, NvmeController};
use crate::options::{NamespaceParameters, NvmeError, NvmeOptions};
use crate::queue::{LIST, MAX_DEPTH, NvmeQueue, QueueParameters, RegionAddresses};
use crate::spec::{ControllerFacts, ErrorEntry, NamespaceFacts, PAGE, SmartLog, u32_at};

/// Blocks of a range of a command at most.
const MAX_BLOCKS: u64 = 1 << 16;

/// Bytes of the erase unit, if the device does not report it.
const ERASE_UNIT: u32 = 2 << 20;

/// An open namespace of a controller.
pub struct NvmeDevice {
    controller: Arc<NvmeController>,
    facts: ControllerFacts,
    space: Arc<NamespaceParameters>,
    copy_all: bool,
    /// Regions that the controller reaches, with their addresses.
    regions: Mutex<Vec<(Arc<MemoryRegion>, u64)>>,
}

impl NvmeDevice {
    /// Resets and enables the controller behind `transport`, and opens a namespace.
    ///
    /// # Errors
    ///
    /// See [`NvmeError`].
    pub fn open(
        transport: impl ControllerTransport + 'static,
        options: &NvmeOptions,
    ) -> Result<Self, NvmeError> {
        NvmeDevice::open_shared(Arc::new(transport), options)
    }

    /// Opens a namespace as [`open`](NvmeDevice::open) does, on a transport that has other owners,
    /// too.
    ///
    /// # Errors
    ///
    /// See [`NvmeError`].
    pub fn open_shared(
        transport: Arc<dyn ControllerTransport>,
        options: &NvmeOptions,
    ) -> Result<Self, NvmeError> {
        let opened = NvmeDevice::open_on(Arc::clone(&transport), options);
        opened.map_err(|error| error.explain_limit(&*transport))
    }

    fn open_on(
        transport: Arc<dyn ControllerTransport>,
        options: &NvmeOptions,
    ) -> Result<Self, NvmeError> {
        let name = transport.name();
        let failed = |action| {
            let name = name.clone();
            move |failure| NvmeError::Command { name, action, failure }
        };
        let numa_node = transport.numa_node();
        let controller = NvmeController::open(transport, options)?;
        let facts = controller.controller_facts().map_err(failed("identify the controller"))?;
        let id = options.namespace;
        let bytes = controller.identify(0, id).map_err(failed("identify the namespace"))?;
        let namespace = NamespaceFacts::parse(id, &bytes).map_err(|why| NvmeError::Namespace {
            name: name.clone(),
            id,
            why,
        })?;
        // These are the limits of single commands. Not every version of NVMe has this structure.
        let limits = controller.identify(6, id).unwrap_or_else(|_| vec![0; PAGE]);
        controller.watch_events(facts.events);
        let mut space = space(&name, &facts, &namespace, &limits, options);
        space.facts.max_queues = u32::from(controller.granted_queue_pairs());
        space.facts.max_depth = MAX_DEPTH.min(controller.capabilities.max_entries() - 1);
        space.facts.numa_node = numa_node;
        Ok(NvmeDevice {
            controller: Arc::new(controller),
            facts,
            space: Arc::new(space),
            copy_all: options.copy_all,
            regions: Mutex::default(),
        })
    }

    /// The facts about the controller.
    pub fn controller_facts(&self) -> &ControllerFacts {
        &self.facts
    }

    /// The SMART log page.
    ///
    /// # Errors
    ///
    /// See [`NvmeError`].
    pub fn smart(&self) -> Result<SmartLog, NvmeError> {
        self.controller
            .smart()
            .map_err(|failure| self.wrap_failure("read the SMART log of", failure))
    }

    /// Entries of the error log, the newest first.
    ///
    /// # Errors
    ///
    /// See [`NvmeError`].
    pub fn errors(&self) -> Result<Vec<ErrorEntry>, NvmeError> {
        let entries = self.controller.errors(self.facts.error_entries);
        entries.map_err(|failure| self.wrap_failure("read the error log of", failure))
    }

    /// Takes the asynchronous events since the last call, the last 64 at most.
    pub fn events(&self) -> Vec<ControllerEvent> {
        self.controller.events()
    }

    /// The number of resets within the last ten minutes.
    pub fn count_resets(&self) -> usize {
        self.controller.count_resets()
    }

    /// True where queues have priorities ([`queue_with`](BlockDevice::queue_with)).
    pub fn has_priorities(&self) -> bool {
        self.controller.capabilities.has_priorities()
    }

    /// Compares the blocks from `block` on with `data`, a whole number of blocks, in the
    /// controller: none of them is transferred to memory. True where they are equal. It takes a
    /// queue for the time of the call.
    ///
    /// # Errors
    ///
    /// [`NvmeError::System`] with `EOPNOTSUPP` if the controller has no Compare command, `EINVAL`
    /// outside of the namespace, and the errors of reads.
    pub fn compare(&self, block: u64, data: &[u8]) -> Result<bool, NvmeError> {
        let failed = |errno| {
            let name = self.space.facts.name.clone();
            let error = NvmeError::System { name, action: "compare blocks", errno };
            error.explain_limit(&*self.controller.transport)
        };
        if !self.facts.compares {
            return Err(failed(Errno::OPNOTSUPP));
        }
        let compares = QueueParameters { compares: true, ..QueueParameters::default() };
        let queue = self.queue_of(1, compares).map_err(failed)?;
        let mut line = BlockingQueue::wrap(queue, &self.space.facts);
        match line.write(block, data) {
            Ok(()) => Ok(true),
            Err(Errno::ILSEQ) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    fn queue_of(&self, depth: u32, use_: QueueParameters) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.space.facts.max_depth) as u16;
        let known = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let regions =
            RegionAddresses(known.iter().map(|(region, bus)| (region.id(), *bus)).collect());
        drop(known);
        let number = self.controller.take_number().ok_or(Errno::BUSY)?;
        let queue = NvmeQueue::new(&self.controller, &self.space, regions, (number, depth), use_)?;
        Ok(Box::new(queue))
    }

    fn wrap_failure(&self, action: &'static str, failure: AdminFailure) -> NvmeError {
        let transport = &*self.controller.transport;
        NvmeError::Command { name: transport.name(), action, failure }.explain_limit(transport)
    }
}

/// The facts about a namespace and its limits, from the answers of the controller.
fn space(
    name: &str,
    controller: &ControllerFacts,
    namespace: &NamespaceFacts,
    limits: &[u8],
    options: &NvmeOptions,
) -> NamespaceParameters {
    let block_size = namespace.format.block_size;
    let page = PAGE as u64;
    // A list of one page, the limit of the controller, and the number of blocks in a command.
    let pages = u64::from(controller.max_pages.unwrap_or(u32::MAX)).min(LIST as u64);
    let max_transfer = (pages * page).min(MAX_BLOCKS * u64::from(block_size));
    let of_transfer = max_transfer / u64::from(block_size);
    let zeroes_shift = u32::from(limits[1]);
    let max_zeroes = match zeroes_shift {
        0 => of_transfer,
        shift => page.checked_shl(shift).unwrap_or(u64::MAX) / u64::from(block_size),
    };
    let discard_limit = u32_at(limits, 4);
    let max_discard = if discard_limit == 0 { u32::MAX } else { discard_limit };
    let erase_unit = match namespace.deallocate_blocks {
        0 => ERASE_UNIT,
        blocks => blocks.saturating_mul(block_size).max(ERASE_UNIT),
    };
    let facts = DeviceProperties {
        name: format!("{name}, namespace {}", namespace.id),
        block_size,
        blocks: namespace.blocks,
        atomic_write: namespace.atomic_blocks.saturating_mul(block_size),
        volatile_cache: controller.volatile_cache,
        fua: true,
        discard: controller.deallocates,
        max_transfer: max_transfer.max(u64::from(block_size)) as u32,
        max_segments: LIST,
        max_queues: 1,
        max_depth: 1,
        erase_unit,
        numa_node: None,
    };
    NamespaceParameters {
        id: namespace.id,
        facts,
        sgl: controller.sgl,
        writes_zeroes: controller.writes_zeroes,
        max_zeroes: max_zeroes.clamp(1, MAX_BLOCKS),
        max_discard: u64::from(max_discard),
        timeout: options.timeout,
    }
}

impl BlockDevice for NvmeDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.space.facts
    }

    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if self.copy_all || regions.iter().any(|(known, _)| known.id() == region.id()) {
            return Ok(());
        }
        if let Some(bus) = self.controller.transport.map(region)? {
            regions.push((Arc::clone(region), bus));
        }
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue_with(QueuePriority::Medium, depth)
    }

    fn queue_for(&self, purpose: QueuePurpose, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let priority = match purpose {
            QueuePurpose::Caller => QueuePriority::Medium,
            QueuePurpose::Behind | QueuePurpose::Reclaim => QueuePriority::Low,
        };
        self.queue_with(priority, depth)
    }

    fn queue_with(&self, priority: QueuePriority, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue_of(depth, QueueParameters { priority, compares: false })
    }

    fn shortage(&self) -> Option<String> {
        self.controller.transport.shortage()
    }

    fn clock(&self) -> Arc<dyn DeviceClock> {
        self.controller.transport.clock()
    }
}

impl fmt::Debug for NvmeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvme").field("facts", &self.space.facts).finish_non_exhaustive()
    }
}
