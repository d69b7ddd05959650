//! The worker pool under a checker that tries interleavings of its threads: workers that receive
//! from a queue, handlers that block until another request is handled, a watchdog, and the end of
//! the session at any moment.
//!
//! `cargo test -p defuse-session --features shuttle --test shuttle`

use std::collections::VecDeque;
use std::time::Duration;

use defuse_session::checked::{PoolGrowth, PoolLimits, WakeReason, WorkerPool};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

/// The kernel's side: a queue of requests, and the end of the connection.
#[derive(Default)]
struct FakeDevice {
    state: Mutex<DeviceState>,
    changed: Condvar,
}

#[derive(Default)]
struct DeviceState {
    queue: VecDeque<FakeRequest>,
    handled: usize,
    unmounted: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum FakeRequest {
    /// Is done at once.
    Quick,
    /// Done when so many requests have been handled.
    Until(usize),
}

impl FakeDevice {
    fn receive(&self) -> Option<FakeRequest> {
        let mut state = self.state.lock().unwrap();
        loop {
            if state.unmounted {
                return None;
            }
            if let Some(request) = state.queue.pop_front() {
                return Some(request);
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    fn handle(&self, request: FakeRequest) {
        let mut state = self.state.lock().unwrap();
        if let FakeRequest::Until(count) = request {
            while state.handled < count && !state.unmounted {
                state = self.changed.wait(state).unwrap();
            }
        }
        state.handled += 1;
        self.changed.notify_all();
    }

    fn unmount(&self) {
        self.state.lock().unwrap().unmounted = true;
        self.changed.notify_all();
    }
}

fn worker(pool: &Arc<WorkerPool>, device: &Arc<FakeDevice>) {
    pool.arrive();
    loop {
        if pool.is_exiting() {
            return pool.exit();
        }
        match device.receive() {
            None => {
                pool.shut_down();
                continue;
            }
            Some(request) => {
                if pool.begin() && pool.backlog_may_grow() {
                    add(pool, device);
                }
                device.handle(request);
                if pool.end() == 0 {
                    continue;
                }
            }
        }
        match pool.park(Duration::from_secs(1)) {
            WakeReason::Work => {}
            WakeReason::Retire | WakeReason::Exit => return,
        }
    }
}

fn add(pool: &Arc<WorkerPool>, device: &Arc<FakeDevice>) -> bool {
    match pool.grow() {
        PoolGrowth::AtLimit => false,
        PoolGrowth::Unparked => true,
        PoolGrowth::Spawn => {
            let (pool, device) = (Arc::clone(pool), Arc::clone(device));
            thread::spawn(move || worker(&pool, &device));
            true
        }
    }
}

fn check(requests: &'static [FakeRequest], limits: PoolLimits) {
    let run = move || {
        let pool = Arc::new(WorkerPool::new(limits));
        let device = Arc::new(FakeDevice::default());
        add(&pool, &device);
        let feeder = {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                for &request in requests {
                    device.state.lock().unwrap().queue.push_back(request);
                    device.changed.notify_all();
                    thread::yield_now();
                }
            })
        };
        // The watchdog, until everything is handled: like the real one it only ever adds.
        loop {
            let state = device.state.lock().unwrap();
            let (handled, pending) = (state.handled, !state.queue.is_empty());
            drop(state);
            let counts = pool.counts();
            assert!(counts.live <= limits.max, "{counts:?}");
            if handled == requests.len() {
                break;
            }
            if pending && pool.idle_workers() == 0 {
                add(&pool, &device);
            }
            thread::yield_now();
        }
        feeder.join().unwrap();
        device.unmount();
        pool.shut_down();
        while pool.counts().live > 0 {
            thread::yield_now();
        }
        let counts = pool.counts();
        assert_eq!((counts.idle, counts.parked, pool.active_workers()), (0, 0, 0), "{counts:?}");
        assert_eq!(pool.grow(), PoolGrowth::AtLimit, "nobody is started after the end");
    };
    let runs = std::env::var("SHUTTLE_RUNS").ok().and_then(|runs| runs.parse().ok());
    shuttle::check_random(run, runs.unwrap_or(2_000));
    shuttle::check_pct(run, runs.unwrap_or(2_000), 3);
}

#[test]
fn every_request_is_handled_and_every_worker_ends() {
    check(&[FakeRequest::Quick; 6], PoolLimits { max: 3, parallel: 2 });
}

#[test]
fn a_handler_that_waits_for_later_requests_is_helped() {
    const REQUESTS: &[FakeRequest] =
        &[FakeRequest::Until(2), FakeRequest::Until(1), FakeRequest::Quick, FakeRequest::Quick];
    check(REQUESTS, PoolLimits { max: 3, parallel: 1 });
}

#[test]
fn one_worker_handles_everything_in_turn() {
    check(&[FakeRequest::Quick; 4], PoolLimits { max: 1, parallel: 8 });
}
