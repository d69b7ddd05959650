//! The processors of this process.

use std::num::NonZero;
use std::sync::OnceLock;

/// The number of processors that this process may use, at least 1, as at the first call: a query
/// takes fifteen system calls where a control group limits processors. 2 if the system does not
/// report the number.
pub fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(2, NonZero::get))
}
