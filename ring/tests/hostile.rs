//! A client that writes anything into the memory: the server takes valid requests or ends the
//! connection, and never touches anything outside of the lane.

use defuse_ring::layout::{BYTES, LANES, LANES_OF_BLOCK, arena_of, number_in};
use defuse_ring::{
    ClientLane, LaneServer, LaneServerCounts, MappedMemory, PeerMemory, ProtocolViolation,
};

const FIRST: usize = 4096;
const SUBMISSIONS: usize = FIRST + 1024;
const ARENA_AT: usize = FIRST + 4096;
const ARENA: u32 = arena_of(0) as u32;

struct LaneFixture {
    server: LaneServer<MappedMemory>,
    client: MappedMemory,
}

impl LaneFixture {
    fn new() -> LaneFixture {
        let (memory, fd) = MappedMemory::new().unwrap();
        let server = LaneServer::new(memory);
        LaneFixture { server, client: MappedMemory::from_fd(fd).unwrap() }
    }

    /// Submits an entry of these words to lane 0, with a request of `number`.
    fn submit(&self, entry: [u32; 4], number: u64) -> Result<bool, ProtocolViolation> {
        let taken = self.client.load(FIRST + 128);
        let slot = (taken % 32) as usize;
        let bytes: Vec<u8> = entry.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.client.write(SUBMISSIONS + slot * 16, &bytes);
        self.client.write(ARENA_AT + 8, &number.to_ne_bytes());
        self.client.store(192, 1);
        self.client.store(FIRST, taken + 1);
        self.take().map(|taken| taken.is_some())
    }

    fn take(&self) -> Result<Option<usize>, ProtocolViolation> {
        let mut room = [0; 4096];
        let number = |message: &[u8]| u64::from_ne_bytes(message[8..16].try_into().unwrap());
        self.server
            .take(&mut room, number, |_, len| len)
            .map(|taken| taken.map(|arrived| arrived.len))
    }
}

#[test]
fn counters_that_jump_end_the_connection() {
    for jump in [33, 1000, u32::MAX, 1 << 31] {
        let world = LaneFixture::new();
        world.client.store(192, u32::MAX);
        world.client.store(FIRST, jump);
        assert_eq!(world.take(), Err(ProtocolViolation("more submissions than entries")));
    }
    let world = LaneFixture::new();
    assert_eq!(world.submit([0, 48, 0, 4096], number_in(0, 2)), Ok(true));
    world.client.store(FIRST, 0);
    assert!(world.take().is_err(), "backwards");
}

/// The words of lanes that there is no memory for are not read.
#[test]
fn a_client_that_claims_all_lanes_is_looked_for_in_those_that_it_has() {
    let world = LaneFixture::new();
    world.client.store(192, u32::MAX);
    assert_eq!(world.take(), Ok(None));
    assert_eq!(world.server.answer(LANES - 1, number_in(LANES - 1, 2), &[], &[0; 16]), Ok(false));
    world.client.add_block(world.server.add_block().unwrap()).unwrap();
    let mut lane = ClientLane::new(2 * LANES_OF_BLOCK - 1);
    let number = lane.next_number();
    let message = [&[0; 8][..], &number.to_ne_bytes(), &[0; 32]].concat();
    lane.submit(&world.client, number, &[&message], 0).unwrap();
    assert_eq!(world.take(), Ok(Some(48)));
    assert_eq!(world.server.answer(31, number, &[&[7; 20]], &[0; 16]), Ok(true));
    assert_eq!(lane.poll(&world.client).unwrap().unwrap().len, 20);
    world.client.store(BYTES + 4096, 77);
    assert_eq!(world.take(), Err(ProtocolViolation("more submissions than entries")));
}

#[test]
fn a_submission_outside_of_the_arena_ends_the_connection() {
    let entries = [
        [ARENA, 48, 0, 64],
        [ARENA - 47, 48, 0, 64],
        [u32::MAX, 48, 0, 64],
        [0, u32::MAX, 0, 64],
        [u32::MAX - 20, 48, 0, 64],
        [0, 48, ARENA - 63, 64],
        [0, 48, u32::MAX, u32::MAX],
        [0, 48, 0, 15],
        [0, 39, 0, 64],
        [0, 4097, 0, 64],
    ];
    for entry in entries {
        assert!(LaneFixture::new().submit(entry, number_in(0, 2)).is_err(), "{entry:?}");
    }
}

#[test]
fn a_number_of_another_lane_or_of_an_open_request_ends_the_connection() {
    let entry = [0, 48, 4096, 4096];
    for number in [0, 2, number_in(1, 2), number_in(LANES - 1, 2), u64::MAX] {
        assert!(LaneFixture::new().submit(entry, number).is_err(), "{number:#x}");
    }
    let world = LaneFixture::new();
    assert_eq!(world.submit(entry, number_in(0, 2)), Ok(true));
    assert!(world.submit(entry, number_in(0, 2)).is_err(), "twice at once");
}

#[test]
fn a_client_has_no_more_requests_and_untaken_replies_than_entries() {
    let (world, entry) = (LaneFixture::new(), [0, 48, 4096, 4096]);
    for count in 0..32 {
        assert_eq!(world.submit(entry, number_in(0, 2 * count)), Ok(true));
    }
    assert!(world.submit(entry, number_in(0, 100)).is_err());

    let world = LaneFixture::new();
    let ask = |count: u64| {
        world.submit(entry, number_in(0, count)).unwrap();
        world.server.answer(0, number_in(0, count), &[&[0; 16]], &[0; 16])
    };
    assert!((0..32).all(|count| ask(count) == Ok(true)));
    assert!(ask(32).is_err());
}

#[test]
fn a_reply_goes_only_to_the_room_of_its_own_request_and_a_longer_one_is_refused() {
    let world = LaneFixture::new();
    let number = number_in(0, 2);
    assert_eq!(world.submit([0, 48, 4096, 100], number), Ok(true));
    assert_eq!(world.server.snapshot_counts(), LaneServerCounts { lanes: 1, taken: 1, open: 1 });
    // No open request has this number.
    assert_eq!(world.server.answer(0, number_in(0, 4), &[&[1; 16]], &[9; 16]), Ok(false));
    assert_eq!(world.server.answer(0, number, &[&[1; 60], &[2; 41]], &[9; 16]), Ok(false));
    let mut seen = [0; 200];
    world.client.read(ARENA_AT + 4096, &mut seen);
    assert_eq!((&seen[..16], &seen[16..]), (&[9; 16][..], &[0; 184][..]));
    // The client's claims about its lanes change no count.
    world.client.store(192, u32::MAX);
    world.client.store(FIRST + 128, 77);
    assert_eq!(world.server.snapshot_counts(), LaneServerCounts { lanes: 1, taken: 1, open: 0 });
}

/// The words of a lane and of its entries are any numbers at any time. The server must not panic,
/// and the messages that it takes fit.
#[test]
fn any_words_are_requests_or_violations() {
    let mut random = fastrand::Rng::with_seed(13);
    for _ in 0..300 {
        let world = LaneFixture::new();
        world.client.store(192, random.u32(..20));
        for _ in 0..20 {
            let odd = [0, 1, 40, 48, 4096, ARENA, ARENA - 1, u32::MAX, random.u32(..)];
            let at = [FIRST, FIRST + 128, FIRST + 256, FIRST + 384, FIRST + 512, SUBMISSIONS];
            let at =
                random.choice(at).unwrap() + 4 * random.usize(..4) * usize::from(random.bool());
            world.client.store(at, random.choice(odd).unwrap());
            let number = number_in(random.usize(..3), random.u64(..4));
            world.client.write(ARENA_AT + 8, &number.to_ne_bytes());
            match world.take() {
                Ok(taken) => assert!(taken.is_none_or(|len| len <= 4096)),
                Err(_) => break,
            }
            let _ = world.server.answer(0, number, &[&[0; 60]], &[0; 16]);
        }
    }
}

/// A server that answers without a request, or more often than requested.
#[test]
fn a_client_refuses_completions_that_it_did_not_ask_for() {
    let world = LaneFixture::new();
    let mut lane = ClientLane::new(0);
    world.client.store(FIRST + 256, 2);
    assert!(lane.poll(&world.client).is_err());
    world.client.store(FIRST + 256, 1);
    let number = lane.next_number();
    lane.submit(&world.client, number, &[&[0; 48]], 0).unwrap();
    assert!(lane.poll(&world.client).is_err(), "the entry names no request");
}

fn message(number: u64) -> Vec<u8> {
    [&[0; 8][..], &number.to_ne_bytes(), &[number as u8; 32]].concat()
}

#[test]
fn requests_that_nobody_waits_for_are_answered_in_any_order_and_a_lane_has_few_of_them() {
    let (world, mut lane) = (LaneFixture::new(), ClientLane::new(0));
    let later = |lane: &mut ClientLane| {
        let number = lane.next_number();
        lane.submit_later(&world.client, number, &[&message(number)]).unwrap().map(|_| number)
    };
    let mut numbers: Vec<u64> =
        (0..defuse_ring::LATER).map(|_| later(&mut lane).unwrap()).collect();
    assert_eq!(later(&mut lane), None);
    assert_eq!(lane.submit_later(&world.client, 2, &[&[0; 257]]), Ok(None), "too long");
    let number = lane.next_number();
    lane.submit(&world.client, number, &[&message(number)], 0).unwrap();
    numbers.push(number);
    while world.take().unwrap().is_some() {}
    numbers.rotate_left(5);
    for number in numbers {
        let reply = [number as u8; 24];
        assert_eq!(world.server.answer(0, number, &[&reply], &[0; 16]), Ok(true));
        let answer = lane.poll(&world.client).unwrap().unwrap();
        let mut seen = [0; 24];
        lane.copy(&world.client, answer, 0, &mut seen);
        assert_eq!((answer.number, answer.len, seen), (number, 24, reply));
        assert_eq!(lane.poll(&world.client), Ok(None));
    }
    assert!(later(&mut lane).is_some());
}

/// Each reply has a place of its own, and the second one would be read as the reply to another
/// request.
#[test]
fn a_client_refuses_a_second_reply_to_a_request_and_one_that_is_too_long() {
    for (number_at, len) in [(0, 24_u32), (1, 257)] {
        let (world, mut lane) = (LaneFixture::new(), ClientLane::new(0));
        let mut numbers = [0; 3];
        for number in &mut numbers {
            *number = lane.next_number();
            lane.submit_later(&world.client, *number, &[&message(*number)]).unwrap();
        }
        let complete = |count: u32, number: u64, len: u32| {
            let at = FIRST + 2048 + 16 * (count as usize - 1);
            world.client.write(at, &[&number.to_ne_bytes()[..], &len.to_ne_bytes()].concat());
            world.client.store(FIRST + 256, count);
        };
        complete(1, numbers[0], 24);
        assert!(lane.poll(&world.client).unwrap().is_some());
        complete(2, numbers[number_at], len);
        assert!(lane.poll(&world.client).is_err());
    }
}

/// The rest of a long request is read where it lies, and only for a request that waits for its
/// reply.
#[test]
fn long_messages_stay_in_their_lane_and_nothing_beside_them_is_read_or_written() {
    let (world, mut lane) = (LaneFixture::new(), ClientLane::new(0));
    let number = lane.next_number();
    let data: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 3) as u8).collect();
    assert!(
        ClientLane::takes(0, 48 + data.len(), 16) && !ClientLane::takes(5, 48 + data.len(), 16)
    );
    assert!(
        !ClientLane::takes(0, data.len(), data.len())
            && ClientLane::takes(5, 48, ClientLane::longest())
    );
    lane.submit(&world.client, number, &[&message(number), &data], 16).unwrap();
    let mut room = [0; 4096];
    let read = |message: &[u8]| u64::from_ne_bytes(message[8..16].try_into().unwrap());
    let arrived = world.server.take(&mut room, read, |_, _| 48).unwrap().unwrap();
    assert_eq!((arrived.len, arrived.copied), (48 + data.len(), 48));
    assert_eq!(world.server.remaining(0, number), data.len());
    let mut seen = vec![0; data.len()];
    assert!(world.server.copy_left(0, number, 0, &mut seen) && seen == data);
    for (from, len) in [(1, data.len()), (data.len() + 1, 0), (usize::MAX, 2)] {
        assert!(!world.server.copy_left(0, number, from, &mut seen[..len]), "{from} {len}");
    }
    assert!(!world.server.copy_left(1, number, 0, &mut seen[..1]), "of another lane");
    assert_eq!(world.server.answer(0, number, &[&[0; 16]], &[0; 16]), Ok(true));
    assert!(!world.server.copy_left(0, number, 0, &mut seen[..1]), "after the answer");
    lane.poll(&world.client).unwrap().unwrap();

    let number = lane.next_number();
    let most = 16 + data.len();
    lane.submit(&world.client, number, &[&message(number)], most).unwrap();
    world.server.take(&mut room, read, |_, len| len).unwrap().unwrap();
    let space = world.server.reply_capacity(0, number);
    assert!(space >= most && world.server.write_reply(0, number, 16, &data));
    assert!(
        !world.server.write_reply(0, number, space, &[1])
            && !world.server.write_reply(0, number + 2, 0, &[1])
    );
    assert!(!world.server.write_reply(0, number, usize::MAX, &[1; 3]));
    let answered = world.server.answer_placed((0, number), &[&[7; 16]], data.len(), &[0; 16]);
    assert_eq!(answered, Ok(true));
    let answer = lane.poll(&world.client).unwrap().unwrap();
    lane.copy(&world.client, answer, 16, &mut seen);
    assert!(answer.len == most && seen == data);
}

/// A message that does not fit, and one whose end fits at the position that the client names.
#[test]
fn a_message_longer_than_the_room_of_the_server_ends_the_connection() {
    for len in [4097, ARENA] {
        assert!(LaneFixture::new().submit([0, len, 0, 64], number_in(0, 2)).is_err());
        assert!(LaneFixture::new().submit([0, len, 0, 0], number_in(0, 2)).is_err());
    }
}
