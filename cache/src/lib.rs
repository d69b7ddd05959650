//! Replacement policies for a cache that several processes share.
//!
//! A cache holds *extents*: parts of files, each with a key and a size in bytes. A
//! [`ReplacementPolicy`] is notified of each use, with the number of the process that made it, and
//! decides which extents leave. [`OwnerShares`] is a policy around another one in which no owner
//! displaces others beyond its part of the memory.
//!
//! | policy | extents that leave | cost of a use |
//! |---|---|---|
//! | [`LruPolicy`] | unused for the longest time | O(1) |
//! | [`LfuPolicy`] | used least often since they came | O(log n) |
//! | [`ArcPolicy`] | LRU within two lists, for one use and for more; their lengths adapt | O(1) |
//! | [`S3FifoPolicy`] | not used again while they passed a short queue, then the extents that a CLOCK chooses | O(1) |
//! | [`PlainE`] | with the largest E, as in the paper; sorts all when memory is short | O(1), and O(n log n) for every n/16 evictions |
//! | [`QueueE`] | with the largest E among a few, in the queues of S3-FIFO; learns its parameters | O(1) |
//!
//! This crate holds no data, does no I/O, takes no locks, and knows no file system.
//!
//! # E
//!
//! The formula is taken from the paper on UHSFS, in its section on shared memory ("a replacement
//! algorithm with several users and several factors"). Memory is full, and the files with the
//! largest E are evicted:
//!
//! ```text
//!            α · t_ji
//! E_j = S_j Σ ─────────────        R_ji = M_ji / N
//!          i∈T β · R_ji + γ
//! ```
//!
//! - `S_j` is the size of file j.
//! - `T` is the observed time, and i one of its periods.
//! - `t_ji` is the time for which file j was unused, as seen in period i.
//! - `R_ji` is its correlation: `M_ji` of all `N` processes used file j in period i.
//! - `α` is the weight of recency ("the parameter of LRU"), `β` the weight of the correlation, and
//!   `γ` a small number, so that the divisor of an unused file is more than zero. All are "obtained
//!   from history".
//!
//! The paper prints the formula as a picture, and says in words what its parts are. The text that
//! this project works from has the words only; the formula above is our reading of them.
//!
//! [`PlainE`] computes it literally, with periods that are kept for each extent. `α` is then a
//! factor of every E and decides nothing, and neither does the size of `β` and `γ`, but for their
//! ratio.
//!
//! [`QueueE`] is made for use. It evicts the extents with the largest
//!
//! ```text
//! E_j = S_j · t_j^α / (β · D_j + δ · A_j + γ)
//! ```
//!
//! - *The sum over periods is in the divisor*, and each period counts for half as much after a
//!   half-life. `D_j` counts different processes, `A_j` the periods in which one of them used the
//!   extent again, whose weight is δ. `N` is left out: it is the same for all extents. Many uses by
//!   one process in one period count once, so that a program that goes over its own file ten times
//!   in a row does not displace files that ten programs read.
//! - *`α` is an exponent*, so that history can decide how much recency means. With α = 1 and β = δ
//!   = 0 the order is the order of LRU. With α = 0 it is the order of LFU. With α < 0 the extent
//!   that was used last leaves first, as is best for a loop that is longer than the memory.
//! - *Nothing is sorted.* Extents are in the queues of S3-FIFO: new ones in a tenth of the memory,
//!   and then in a main queue if their E is less than the E of an extent there. E is computed for
//!   the few extents that a hand has reached.
//! - *History decides* by miniature simulations. A sample of all keys, of [bounded](e::SAMPLE)
//!   number, is also passed to small caches without data, one for each of the [choices](e::CHOICES)
//!   of parameters. The choice with the most hits, recent ones first, is in use.
//!
//! An extent takes about 200 bytes, however many processes use it, and so does each of the four
//! keys that are remembered for it after they have left. A process takes nothing.

#![forbid(unsafe_code)]

mod arc;
pub mod e;
mod kind;
mod lfu;
mod lists;
mod lru;
mod policy;
mod s3fifo;
mod shares;

pub use arc::ArcPolicy;
pub use e::{PlainE, QueueE};
pub use kind::PolicyKind;
pub use lfu::LfuPolicy;
pub use lru::LruPolicy;
pub use policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};
pub use s3fifo::S3FifoPolicy;
pub use shares::OwnerShares;
