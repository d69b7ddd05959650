//! Positions in the memory, as `ring/SPEC.md` states them. All numbers are in the byte order of the
//! machine.

/// The first word of the memory: "defuseR1".
pub const MAGIC: u64 = u64::from_le_bytes(*b"defuseR1");
/// The version of the format.
pub const VERSION: u32 = 5;

/// Number of lanes of a block. A connection begins with one block.
pub const LANES_OF_BLOCK: usize = 16;
/// The maximum number of blocks of a connection.
pub const MOST_BLOCKS: usize = 8;
/// The maximum number of lanes of a connection.
pub const LANES: usize = MOST_BLOCKS * LANES_OF_BLOCK;
/// Number of entries of each ring. A power of two.
pub const ENTRIES: u32 = 32;
/// Bytes of a lane's arena: a request and a reply with 128 KiB of data each.
pub const ARENA: usize = 2 * 132 * 1024;
/// The lanes of a block, from its first one, whose arena has room for [`LARGE`] bytes more.
pub const LARGE_LANES: usize = 4;
/// Bytes for a request or a reply with 1 MiB of data.
pub const LARGE: usize = 1024 * 1024 + PAGE;
/// Bytes of a block. Blocks follow each other.
pub const BYTES: usize = PAGE + LANES_OF_BLOCK * LANE + LARGE_LANES * LARGE;

/// Bytes of the message on the socket that wakes a thread of the server, the *bell*.
pub const BELL: usize = 1;
/// Bytes of the message on the socket that requests a further block of lanes.
pub const MORE: usize = 2;

/// The shortest request and the shortest reply, in bytes: the headers of the protocol.
pub const SHORTEST: (usize, usize) = (40, 16);

pub(crate) const PAGE: usize = 4096;
pub(crate) const LANE: usize = PAGE + ARENA;

/// `u64`: [`MAGIC`].
pub(crate) const AT_MAGIC: usize = 0;
/// `u32`: [`VERSION`].
pub(crate) const AT_VERSION: usize = 8;
// The following words are in the first block, and concern all lanes.
/// `u32`, written by the server: its threads that sleep, and need a bell for the next submission.
pub(crate) const AT_SLEEPERS: usize = 64;
/// `u32`, written by the server: notifications that it has sent.
pub(crate) const AT_NOTICES: usize = 128;
/// `u32`, written by the client: the lanes from 0 that it has used, of all blocks.
pub(crate) const AT_USED: usize = 192;

/// Three `u64`, written by the client: its counts for observers of the server, in the order of
/// [`ClientCounter`].
pub(crate) const AT_TALLIES: usize = 256;

/// A number that a client counts for observers of the server. The server relies on none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCounter {
    /// Messages that woke the server.
    Bells,
    /// Sleeps of a thread that waited for a reply.
    Sleeps,
    /// Reads from cached pages, without a request.
    PageReads,
}

/// Positions within a lane. Processors fetch cache lines in pairs, so that words of different
/// owners lie in different pairs.
pub(crate) mod lane {
    /// `u32`, client: submissions so far.
    pub const SUBMITTED: usize = 0;
    /// `u32`, server: submissions that it has taken.
    pub const TAKEN: usize = 128;
    /// `u32`, server: completions so far.
    pub const COMPLETED: usize = 256;
    /// `u32`, client: completions that it has taken.
    pub const SEEN: usize = 384;
    /// `u32`: 1 (client) while the client sleeps on this word, and 0 (server) to wake it.
    pub const WAITS: usize = 512;
    /// Submissions, 16 bytes each, client.
    pub const SUBMISSIONS: usize = 1024;
    /// Completions, 16 bytes each, server.
    pub const COMPLETIONS: usize = 2048;
    /// The arena. Both write to it: the server only where a submission makes room for a reply.
    pub const ARENA: usize = super::PAGE;
}

/// Bytes of a submission and of a completion.
pub(crate) const ENTRY: usize = 16;

/// True if the other side has not taken [`ENTRIES`] of `put` entries of a ring. `taken` is its
/// counter when it was last read. Reading it again takes as long as a cache miss, and the old value
/// usually suffices.
pub(crate) fn is_full(put: u32, taken: &mut u32, look: impl FnOnce() -> u32) -> bool {
    let left = |taken: u32| put.wrapping_sub(taken);
    if left(*taken) >= ENTRIES {
        *taken = look();
    }
    left(*taken) >= ENTRIES
}

// Nothing overlaps, and pages hold whole parts.
const _: () = {
    let rings = ENTRIES as usize * ENTRY;
    assert!(ENTRIES.is_power_of_two());
    assert!(AT_TALLIES + 3 * 8 <= PAGE);
    assert!(lane::WAITS + 4 <= lane::SUBMISSIONS);
    assert!(lane::SUBMISSIONS + rings <= lane::COMPLETIONS);
    assert!(lane::COMPLETIONS + rings <= lane::ARENA);
    assert!(lane::ARENA + ARENA <= LANE);
    assert!(LANE.is_multiple_of(PAGE) && LARGE.is_multiple_of(PAGE) && BYTES.is_multiple_of(PAGE));
    assert!(lane_at(LANES - 1) + lane::ARENA + arena_of(LANES - 1) == MOST_BLOCKS * BYTES);
    assert!((LANES as u64) < 1 << (64 - LANE_SHIFT));
};

/// The first byte of a lane.
pub(crate) const fn lane_at(lane: usize) -> usize {
    assert!(lane < LANES, "there is no such lane");
    let (block, place) = (lane / LANES_OF_BLOCK, lane % LANES_OF_BLOCK);
    let large = if place < LARGE_LANES { place } else { LARGE_LANES };
    block * BYTES + PAGE + place * LANE + large * LARGE
}

/// True if the lane's arena has room for large data.
pub const fn is_large(lane: usize) -> bool {
    lane % LANES_OF_BLOCK < LARGE_LANES
}

/// Bytes of the arena of a lane.
pub const fn arena_of(lane: usize) -> usize {
    if is_large(lane) { ARENA + LARGE } else { ARENA }
}

/// The bits of a request's number that name its lane.
const LANE_SHIFT: u32 = 48;

/// The number of a request that goes through `lane`.
pub const fn number_in(lane: usize, count: u64) -> u64 {
    (lane as u64 + 1) << LANE_SHIFT | count & ((1 << LANE_SHIFT) - 1)
}

/// Returns the lane in a request's number; `None` for a request that goes through the socket.
pub const fn lane_of(number: u64) -> Option<usize> {
    match number >> LANE_SHIFT {
        0 => None,
        lane if lane as usize <= LANES => Some(lane as usize - 1),
        _ => None,
    }
}

/// True if the number names a lane that does not exist.
pub const fn is_stray(number: u64) -> bool {
    number >> LANE_SHIFT > LANES as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_its_lane_and_no_other() {
        for lane in 0..LANES {
            assert_eq!(lane_of(number_in(lane, u64::MAX)), Some(lane));
        }
        assert_eq!((lane_of(77), lane_of(u64::MAX), is_stray(u64::MAX)), (None, None, true));
        assert!(!is_stray(number_in(LANES - 1, 5)) && is_stray(number_in(LANES, 5)));
    }

    #[test]
    fn no_lane_overlaps_the_next() {
        let end = |index| lane_at(index) + lane::ARENA + arena_of(index);
        let ends = (0..LANES).map(|index| (lane_at(index), end(index)));
        assert!(ends.clone().zip(ends.skip(1)).all(|((_, end), (next, _))| end <= next));
    }
}
