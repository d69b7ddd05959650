//! The worker pool under a checker that tries interleavings of its threads: workers that receive
//! from a queue, handlers that block until another request is handled, a sentinel, and the end of
//! the session at any moment.
//!
//! `cargo test -p defuse-session --features shuttle --test shuttle`

use std::collections::VecDeque;
use std::time::Duration;

use defuse_session::checked::{Growth, Pool, PoolLimits, Woken};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

/// The kernel's side: a queue of requests, and the end of the connection.
#[derive(Default)]
struct Device {
    state: Mutex<DeviceState>,
    changed: Condvar,
}

#[derive(Default)]
struct DeviceState {
    queue: VecDeque<Request>,
    handled: usize,
    unmounted: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Request {
    /// Is done at once.
    Quick,
    /// Is done when so many requests have been handled.
    Until(usize),
}

impl Device {
    fn receive(&self) -> Option<Request> {
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

    fn handle(&self, request: Request) {
        let mut state = self.state.lock().unwrap();
        if let Request::Until(count) = request {
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

fn worker(pool: &Arc<Pool>, device: &Arc<Device>) {
    pool.arrive();
    loop {
        if pool.exiting() {
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
            Woken::Work => {}
            Woken::Retire | Woken::Exit => return,
        }
    }
}

fn add(pool: &Arc<Pool>, device: &Arc<Device>) -> bool {
    match pool.grow() {
        Growth::AtLimit => false,
        Growth::Unparked => true,
        Growth::Spawn => {
            let (pool, device) = (Arc::clone(pool), Arc::clone(device));
            thread::spawn(move || worker(&pool, &device));
            true
        }
    }
}

fn check(requests: &'static [Request], limits: PoolLimits) {
    let run = move || {
        let pool = Arc::new(Pool::new(limits));
        let device = Arc::new(Device::default());
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
        // The sentinel, until everything is handled: as the real one it only ever adds.
        loop {
            let state = device.state.lock().unwrap();
            let (handled, pending) = (state.handled, !state.queue.is_empty());
            drop(state);
            let counts = pool.counts();
            assert!(counts.live <= limits.max, "{counts:?}");
            if handled == requests.len() {
                break;
            }
            if pending && pool.idle() == 0 {
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
        assert_eq!((counts.idle, counts.parked, pool.active()), (0, 0, 0), "{counts:?}");
        assert_eq!(pool.grow(), Growth::AtLimit, "nobody is started after the end");
    };
    let runs = std::env::var("SHUTTLE_RUNS").ok().and_then(|runs| runs.parse().ok());
    shuttle::check_random(run, runs.unwrap_or(2_000));
    shuttle::check_pct(run, runs.unwrap_or(2_000), 3);
}

#[test]
fn every_request_is_handled_and_every_worker_ends() {
    check(&[Request::Quick; 6], PoolLimits { max: 3, parallel: 2 });
}

#[test]
fn a_handler_that_waits_for_later_requests_is_helped() {
    const REQUESTS: &[Request] =
        &[Request::Until(2), Request::Until(1), Request::Quick, Request::Quick];
    check(REQUESTS, PoolLimits { max: 3, parallel: 1 });
}

#[test]
fn one_worker_handles_everything_in_turn() {
    check(&[Request::Quick; 4], PoolLimits { max: 1, parallel: 8 });
}
