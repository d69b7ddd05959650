//! Warnings that another user can cause at any rate: a few are written, and the rest are counted.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The number of warnings that are written in each period of [`TIME`].
const MOST: u32 = 20;
const TIME: Duration = Duration::from_secs(60);

/// One kind of warning, written to the log at a limited rate.
pub struct WarningLimiter(Mutex<WarningLimiterState>);

struct WarningLimiterState {
    since: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Default for WarningLimiter {
    fn default() -> Self {
        WarningLimiter::new()
    }
}

impl WarningLimiter {
    /// A kind of warning of which none was written yet.
    pub const fn new() -> WarningLimiter {
        WarningLimiter(Mutex::new(WarningLimiterState { since: None, written: 0, left_out: 0 }))
    }

    /// Writes `text` to the log, unless too many were written lately.
    pub fn warn(&self, text: impl FnOnce() -> String) {
        match self.admit(Instant::now()) {
            None => {}
            Some(0) => log::warn!("{}", text()),
            Some(left_out) => log::warn!("{} ({left_out} warnings before it left out)", text()),
        }
    }

    /// The number of warnings left out before this one; `None` where this one is left out, too.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now.duration_since(since) >= TIME) {
            (state.since, state.written) = (Some(now), 0);
        }
        if state.written >= MOST {
            state.left_out += 1;
            return None;
        }
        state.written += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Strangers who connected over and over wrote 16 MB into the log of a server in six seconds.
    #[test]
    fn a_flood_of_warnings_is_counted_and_not_written() {
        let (limited, now) = (WarningLimiter::new(), Instant::now());
        let written = (0..100_000).filter(|_| limited.admit(now).is_some()).count();
        assert_eq!(written, MOST as usize);
        assert_eq!(limited.admit(now + TIME), Some(100_000 - u64::from(MOST)));
        assert_eq!(limited.admit(now + TIME), Some(0));
    }
}
