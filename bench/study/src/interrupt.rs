//! Handles Ctrl-C: the running cell is ended in order, and the results are kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Set when a signal requests the end.
#[derive(Debug, Clone, Default)]
pub struct InterruptFlag(Arc<AtomicBool>);

impl InterruptFlag {
    /// Handles SIGINT, SIGTERM and SIGHUP from now on. None of them ends this process any more,
    /// even if repeated, because mounts must be unmounted first, which takes seconds.
    pub fn catch() -> Result<InterruptFlag> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, flag.clone())?;
        }
        Ok(InterruptFlag(flag))
    }

    /// Requests the end.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True if the end was requested.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
