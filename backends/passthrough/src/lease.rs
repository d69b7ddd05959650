//! A fact that is assumed for a limited time.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Decides if a fact is still assumed. Every inode has one, so it is small: it counts sixteenths of
/// a second since the first use, which is enough for eight years.
#[derive(Default)]
pub(crate) struct Lease {
    /// The end of the lease, or 0.
    until: AtomicU32,
}

impl Lease {
    /// Assumes the fact for `time` from now, in whole sixteenths of a second.
    pub(crate) fn hold_for(&self, time: Duration) {
        let ticks = u32::try_from(time.as_millis() * 16 / 1000).unwrap_or(u32::MAX);
        self.until.store(now().saturating_add(ticks), Ordering::Release);
    }

    /// Ends the lease.
    pub(crate) fn end(&self) {
        self.until.store(0, Ordering::Release);
    }

    /// True while the fact is assumed.
    pub(crate) fn holds(&self) -> bool {
        let until = self.until.load(Ordering::Acquire);
        until != 0 && now() < until
    }
}

fn now() -> u32 {
    u32::try_from(START.elapsed().as_millis() * 16 / 1000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_holds_for_its_time_and_no_longer() {
        let lease = Lease::default();
        assert!(!lease.holds());
        lease.hold_for(Duration::ZERO);
        assert!(!lease.holds());
        lease.hold_for(Duration::from_secs(3600));
        assert!(lease.holds());
        lease.end();
        assert!(!lease.holds());
        lease.hold_for(Duration::from_millis(70));
        std::thread::sleep(Duration::from_millis(140));
        assert!(!lease.holds());
    }
}
