//! Ctrl-C and its like: what runs is ended in order, and what was measured is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Whether a signal has asked for the end.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes SIGINT, SIGTERM and SIGHUP from here on. None of them ends this process any more, however often it comes:
    /// what is mounted must be unmounted first, which takes seconds.
    pub fn catch() -> Result<Interrupt> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, flag.clone())?;
        }
        Ok(Interrupt(flag))
    }

    /// Whether it was asked.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
