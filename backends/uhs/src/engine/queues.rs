//! Queues of the device that all threads share ([`SeparatedDevice`]), instead of a queue for each
//! thread.

use std::sync::Arc;

use defuse_block::separation::OperationClass;
use defuse_block::{BlockDevice, SeparatedDevice, SeparationOptions};
use defuse_fs::Figure;

use crate::store::{StoreError, device_error};
use crate::{SeparationMode, UhsOptions};

/// Queues that threads can share: as many as have names for their figures.
pub(crate) const MOST_QUEUES: u64 = NAMES.len() as u64;

/// Queues that threads share, unless the options have another number.
const QUEUES: u32 = 4;

/// Operations in flight of each.
const DEPTH: u32 = 32;

/// The names of the figures of a queue.
struct QueueFigureNames {
    in_flight: &'static str,
    /// In the order of [`Class::ALL`].
    costs: [&'static str; OperationClass::ALL.len()],
}

macro_rules! names {
    ($($number:literal)*) => { [$(QueueFigureNames {
        in_flight: concat!("queue_", $number, "_in_flight"),
        costs: [
            concat!("queue_", $number, "_small_read"),
            concat!("queue_", $number, "_large_read"),
            concat!("queue_", $number, "_small_write"),
            concat!("queue_", $number, "_large_write"),
            concat!("queue_", $number, "_behind"),
            concat!("queue_", $number, "_reclaim"),
        ],
    }),*] };
}

const NAMES: [QueueFigureNames; 8] = names!(1 2 3 4 5 6 7 8);

const WAITING: [&str; OperationClass::ALL.len()] = [
    "queues_waiting_small_reads",
    "queues_waiting_large_reads",
    "queues_waiting_small_writes",
    "queues_waiting_large_writes",
    "queues_waiting_behind",
    "queues_waiting_reclaim",
];

/// The device with the queues that the options want. `None`: threads have their own.
pub(super) fn share(
    device: &Arc<dyn BlockDevice>,
    options: &UhsOptions,
) -> Result<Option<Arc<SeparatedDevice>>, StoreError> {
    let Some(mode) = options.separation else { return Ok(None) };
    let count = options.queues.unwrap_or(QUEUES).clamp(1, MOST_QUEUES as u32) as usize;
    let open = SeparationOptions::open(mode, count, DEPTH);
    let separation = match mode {
        SeparationMode::Off => open,
        SeparationMode::Static => {
            SeparationOptions { caps: true, ..SeparationOptions::new_divided(count, DEPTH) }
        }
        SeparationMode::Learned => SeparationOptions { caps: true, ..open },
    };
    SeparatedDevice::new(Arc::clone(device), &separation)
        .map(|separated| Some(Arc::new(separated)))
        .map_err(device_error("open the queues that threads share (queues= says how many)"))
}

/// Figures of the queues (docs/statistics.md).
pub(super) fn figures(separated: &SeparatedDevice) -> Vec<Figure> {
    let queues = separated.queues();
    let sum = |of: fn(&defuse_block::separation::QueueState) -> usize| -> u64 {
        queues.iter().map(of).sum::<usize>() as u64
    };
    let mut figures = vec![
        Figure::count("queues", queues.len() as u64),
        Figure::count("queues_depth", sum(|queue| queue.depth)),
        Figure::count("queues_in_flight", sum(|queue| queue.in_flight)),
        Figure::count("queues_waiting_flushes", separated.count_waiting(None) as u64),
    ];
    for (class, name) in OperationClass::ALL.into_iter().zip(WAITING) {
        figures.push(Figure::count(name, separated.count_waiting(Some(class)) as u64));
    }
    for (queue, names) in queues.iter().zip(NAMES) {
        figures.push(Figure::count(names.in_flight, queue.in_flight as u64));
        for (cost, name) in queue.costs.iter().zip(names.costs) {
            if let Some(cost) = cost {
                figures.push(Figure::nanoseconds(name, cost.as_nanos() as u64));
            }
        }
    }
    figures
}
