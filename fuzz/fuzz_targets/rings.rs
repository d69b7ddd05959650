//! Feeds arbitrary contents of lanes to the server's end, and arbitrary completions to the
//! client's: no panic, and nothing that is taken exceeds its room. Each step of the input writes a
//! word, changes a message, takes a request, answers one, or polls.

#![no_main]

use defuse_ring::layout::{LANES, number_in};
use defuse_ring::{ClientLane, LaneServer, MappedMemory, PeerMemory};
use libfuzzer_sys::fuzz_target;

/// The words of lane 0 and of the header, and its first entries (ring/SPEC.md).
const WORDS: [usize; 10] = [64, 128, 192, 4096, 4224, 4352, 4480, 4608, 5120, 6144];

fn number(message: &[u8]) -> u64 {
    u64::from_ne_bytes(message[8..16].try_into().unwrap())
}

fuzz_target!(|input: &[u8]| {
    let (memory, fd) = MappedMemory::new().unwrap();
    let server = LaneServer::new(memory);
    let client = MappedMemory::from_fd(fd).unwrap();
    let mut lane = ClientLane::new(0);
    let mut room = [0; 512];
    for step in input.chunks_exact(6) {
        let value = u32::from_le_bytes([step[2], step[3], step[4], step[5]]);
        let at = usize::from(step[1]);
        match step[0] % 5 {
            0 => client.store(WORDS[at % WORDS.len()] + 4 * (at / 64), value),
            1 => {
                let number = number_in(at % (LANES + 1), u64::from(value));
                client.write(8192 + 8, &number.to_ne_bytes());
            }
            2 => match server.take(&mut room, number, |_, len| len) {
                Ok(taken) => assert!(taken.is_none_or(|arrived| arrived.len <= 512)),
                Err(_) => return,
            },
            3 => {
                let number = number_in(0, u64::from(value));
                if server.answer(0, number, &[&room[..at]], &[0; 16]).is_err() {
                    return;
                }
            }
            _ => {
                let number = lane.next_number();
                let _ = lane.submit(&client, number, &[&room[..40]], 0);
                if let Ok(Some(answer)) = lane.poll(&client) {
                    assert!(answer.len <= ClientLane::longest());
                }
            }
        }
    }
});
