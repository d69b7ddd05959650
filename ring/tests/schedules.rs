//! The lanes under a checker that tries interleavings: clients that sleep for their replies, and a
//! server that sleeps for their bells. A wake-up that is lost is a deadlock, which the checker
//! reports.
//!
//! `cargo test -p defuse-ring --test schedules`

use std::collections::HashMap;
use std::time::Duration;

use defuse_ring::layout::{arena_of, lane_of};
use defuse_ring::{ClientLane, LaneServer, PeerMemory};
use shuttle::sync::atomic::{AtomicU32, Ordering};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

/// Memory of two lanes whose words the checker sees.
#[derive(Clone)]
struct ScheduledMemory(Arc<ScheduledWords>);

struct ScheduledWords {
    words: HashMap<usize, AtomicU32>,
    bytes: Mutex<Vec<u8>>,
    sleep: (Mutex<()>, Condvar),
    /// Bells that were not heard.
    bells: (Mutex<usize>, Condvar),
}

const LANES: usize = 2;
const FIRST: usize = 4096;
const LANE: usize = 4096 + arena_of(0);

impl ScheduledMemory {
    fn new() -> ScheduledMemory {
        let of_lane = |lane: usize| [0, 128, 256, 384, 512].map(|at| FIRST + lane * LANE + at);
        let words = [64, 128, 192].into_iter().chain((0..LANES).flat_map(of_lane));
        ScheduledMemory(Arc::new(ScheduledWords {
            words: words.map(|at| (at, AtomicU32::new(0))).collect(),
            bytes: Mutex::new(vec![0; FIRST + LANES * LANE]),
            sleep: (Mutex::new(()), Condvar::new()),
            bells: (Mutex::new(0), Condvar::new()),
        }))
    }

    fn ring(&self) {
        *self.0.bells.0.lock().unwrap() += 1;
        self.0.bells.1.notify_one();
    }

    fn hear(&self) {
        let mut bells = self.0.bells.0.lock().unwrap();
        while *bells == 0 {
            bells = self.0.bells.1.wait(bells).unwrap();
        }
        *bells -= 1;
    }
}

impl PeerMemory for ScheduledMemory {
    fn load(&self, at: usize) -> u32 {
        self.0.words[&at].load(Ordering::SeqCst)
    }
    fn store(&self, at: usize, value: u32) {
        self.0.words[&at].store(value, Ordering::SeqCst);
    }
    fn add(&self, at: usize, value: u32) {
        self.0.words[&at].fetch_add(value, Ordering::SeqCst);
    }
    fn raise(&self, at: usize, value: u32) {
        self.0.words[&at].fetch_max(value, Ordering::SeqCst);
    }
    fn fence_write_read(&self) {}
    fn read(&self, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.0.bytes.lock().unwrap()[at..at + out.len()]);
    }
    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    /// Waits for ever: a timeout must not hide a lost wake-up.
    fn wait(&self, at: usize, value: u32, _: Duration) {
        let held = self.0.sleep.0.lock().unwrap();
        if self.load(at) == value {
            drop(self.0.sleep.1.wait(held).unwrap());
        }
    }
    fn wake(&self, _: usize) {
        let _held = self.0.sleep.0.lock().unwrap();
        self.0.sleep.1.notify_all();
    }
}

fn number(message: &[u8]) -> u64 {
    u64::from_ne_bytes(message[8..16].try_into().unwrap())
}

/// Answers `left` requests with their own bytes.
fn serve(memory: &ScheduledMemory, mut left: usize) {
    let server = LaneServer::new(memory.clone());
    let mut room = [0; 64];
    while left > 0 {
        let mut arrived = server.take(&mut room, number, |_, len| len).unwrap();
        if arrived.is_none() {
            server.fall_asleep();
            arrived = server.take(&mut room, number, |_, len| len).unwrap();
            if arrived.is_none() {
                memory.hear();
            }
            server.wake_up();
        }
        if let Some(arrived) = arrived {
            let message = &room[..arrived.len];
            let unique = number(message);
            assert_eq!(lane_of(unique), Some(arrived.lane));
            assert_eq!(server.answer(arrived.lane, unique, &[message], &[0; 16]), Ok(true));
            left -= 1;
        }
    }
}

fn ask(memory: &ScheduledMemory, index: usize, requests: usize) {
    let mut lane = ClientLane::new(index);
    for round in 0..requests {
        // A request without a waiting thread.
        let later = lane.next_number();
        let mut message = [round as u8; 48];
        message[8..16].copy_from_slice(&later.to_ne_bytes());
        if lane.submit_later(memory, later, &[&message]).unwrap().unwrap() {
            memory.ring();
        }
        let unique = lane.next_number();
        let mut message = [round as u8 + index as u8; 48];
        message[8..16].copy_from_slice(&unique.to_ne_bytes());
        if lane.submit(memory, unique, &[&message], 0).unwrap() {
            memory.ring();
        }
        let answer = loop {
            match lane.poll(memory).unwrap() {
                Some(answer) if answer.number == unique => break answer,
                Some(answer) => assert_eq!(answer.len, 48),
                None => lane.sleep(memory, Duration::MAX),
            }
        };
        let mut reply = [0; 48];
        lane.copy(memory, answer, 0, &mut reply);
        assert_eq!((answer.len, reply), (48, message));
    }
}

#[test]
fn every_request_is_answered_once_and_no_wake_up_is_lost() {
    let run = || {
        let memory = ScheduledMemory::new();
        let clients = (0..LANES).map(|index| {
            let memory = memory.clone();
            thread::spawn(move || ask(&memory, index, 2))
        });
        let clients: Vec<_> = clients.collect();
        serve(&memory, LANES * 4);
        for client in clients {
            client.join().unwrap();
        }
    };
    shuttle::check_random(run, 400);
    shuttle::check_pct(run, 200, 3);
}
