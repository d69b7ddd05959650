//! The event generator, for flowops that limit a rate.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of events that may accumulate: the events of one second, but at least this.
const LEAST_BACKLOG: f64 = 1.0;

/// Generates events at a rate per second. Taking an event that has not occurred yet waits for it.
pub(super) struct EventGenerator {
    rate: f64,
    state: Mutex<(Instant, f64)>,
}

impl EventGenerator {
    pub fn new(rate: u64) -> Self {
        EventGenerator { rate: rate as f64, state: Mutex::new((Instant::now(), 0.0)) }
    }

    /// Takes `wanted` events, and waits for them until `stopped`.
    pub fn take(&self, wanted: u64, stopped: &dyn Fn() -> bool) {
        let mut missing = wanted as f64;
        while missing > 0.0 && !stopped() {
            let wait = {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                let backlog = self.rate.max(LEAST_BACKLOG);
                state.1 += now.duration_since(state.0).as_secs_f64() * self.rate;
                state.1 = state.1.min(backlog);
                state.0 = now;
                let whole = state.1.floor().min(missing);
                state.1 -= whole;
                missing -= whole;
                (1.0 - state.1.fract()) / self.rate
            };
            if missing > 0.0 {
                thread::sleep(Duration::from_secs_f64(wait.clamp(1e-5, 0.02)));
            }
        }
    }
}
