//! The threads that serve a session, and how many there are.
//!
//! A worker receives a request, handles it, answers, and receives again. With one caller at a time
//! one worker is best: its caches stay warm and no other thread wakes up. More workers are needed
//! in two cases, and each is recognized where it costs nothing:
//!
//! - *Backlog*: requests arrive faster than they are handled. A worker notices it, because its next
//!   request is there without waiting. Another worker helps up to twice the number of processors;
//!   beyond that it would only take turns with the others.
//! - *Blocking*: handlers sleep (disk, network, a slow backend) while requests wait. The watchdog
//!   ([`watchdog`]) checks every few milliseconds while there is work, and adds a worker whenever
//!   all are busy and the device has something to read, up to the maximum.
//!
//! If a file system names parts that fail independently, [`bulkhead`] keeps threads for the parts
//! that answer. [`fair`] keeps threads for other users if calls of one user wait for something.
//!
//! [`policy`] has two other policies, for comparison, from a paper on multithreaded FUSE for
//! GlusterFS.
//!
//! FORGET, BATCH_FORGET and INTERRUPT never count as work: the thread that receives them handles
//! them at once. A worker that keeps finding others idle parks itself, and ends after some seconds
//! of rest. Workers beyond a maximum that was lowered end after their request.

pub(crate) mod bulkhead;
pub(crate) mod fair;
pub(crate) mod inflight;
pub(crate) mod policy;
pub(crate) mod pool;
mod pressure;
pub(crate) mod ring;
pub(crate) mod serve;
pub(crate) mod set_aside;
pub(crate) mod signal;
pub(crate) mod stuck;
pub(crate) mod watchdog;
