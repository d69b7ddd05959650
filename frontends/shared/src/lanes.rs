//! Lanes beside the messages of a client's socket, as the source of a session's requests.

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::{Errno, Result};
use defuse_ring::layout::ClientCounter;
use defuse_ring::layout::{BELL, BYTES, LANES_OF_BLOCK, MORE, VERSION, lane_of};
use defuse_ring::{LaneServer, LaneServerCounts, MappedMemory, ProtocolViolation};
use defuse_session::{
    COPIED_MOST, ReplyPort, RequestPort, RequestSource, ServerLaneCounts, SharedData,
    TransportUpgrade,
};
use defuse_wire::abi::{InHeader, Opcode, OutHeader};
use defuse_wire::reply::HEADER_LEN;
use defuse_wire::request::WRITE_LEAD;
use defuse_wire::vendor::{LaneOffer, OFFER};
use zerocopy::IntoBytes;

/// The number of requests in a row from lanes after which the socket is checked.
const ROW: u32 = 64;
/// The number of checks of the lanes before a thread that does not wait lets others run: less than
/// a microsecond, which is longer than a client with a processor needs for its next request.
const LOOKS: u32 = 12;
/// One of so many turns without a request also looks at the socket.
const TURNS: u32 = 4;

/// Limits of the memory for lanes. A block of lanes has nine megabytes of addresses; unused pages
/// take no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// Maximum number of blocks of all connections. Each connection has one, and further ones use
    /// messages. A connection with more threads than lanes gets more blocks while half of them are
    /// free.
    pub blocks: usize,
    /// Maximum number of blocks of the connections of a user.
    pub blocks_of_user: usize,
}

impl Default for LaneLimits {
    fn default() -> Self {
        LaneLimits { blocks: 256, blocks_of_user: 64 }
    }
}

/// Offers lanes to the clients of a server.
#[derive(Clone, Debug, Default)]
pub struct LaneOffers {
    limits: LaneLimits,
    users: Arc<Mutex<HashMap<u32, usize>>>,
}

impl LaneOffers {
    /// Offers lanes within these limits.
    pub fn new(limits: LaneLimits) -> Self {
        LaneOffers { limits, users: Arc::default() }
    }

    /// Counts a block of `uid`, which may have this part of the limits; `None` beyond it.
    fn admit(&self, uid: u32, part: usize) -> Option<BlockReservation> {
        let mut users = lock(&self.users);
        let all: usize = users.values().sum();
        let own = users.get(&uid).copied().unwrap_or(0);
        let LaneLimits { blocks, blocks_of_user } = self.limits;
        if all >= blocks / part || own >= blocks_of_user / part {
            return None;
        }
        users.insert(uid, own + 1);
        assert!(own < blocks_of_user && all < blocks, "a block beyond the limits");
        Some(BlockReservation { uid, users: Arc::clone(&self.users) })
    }
}

impl TransportUpgrade for LaneOffers {
    fn upgrade(
        &self,
        uid: u32,
        messages: Arc<dyn RequestSource>,
    ) -> Result<Arc<dyn RequestSource>> {
        let port = messages.port(false);
        let Some(place) = self.admit(uid, 1) else {
            offer(&*port, None)?;
            return Ok(messages);
        };
        let (memory, fd) = MappedMemory::new().map_err(errno)?;
        offer(&*port, Some(fd.as_fd()))?;
        let lane_server = LaneServer::new(memory);
        let blocks =
            LaneBlocks { lane_server, uid, offers: self.clone(), places: Mutex::new(vec![place]) };
        Ok(Arc::new(LaneSource { messages, blocks: Arc::new(blocks) }))
    }
}

/// Offers a block of lanes, or reports that there is none.
fn offer(port: &dyn RequestPort, block: Option<BorrowedFd<'_>>) -> Result<()> {
    let (lanes, bytes) = block.map_or((0, 0), |_| (LANES_OF_BLOCK as u32, BYTES as u64));
    let offer = LaneOffer { version: VERSION, lanes, bytes };
    let len = HEADER_LEN + size_of::<LaneOffer>();
    let header = OutHeader { len: len as u32, error: OFFER, unique: 0 };
    let message = [header.as_bytes(), offer.as_bytes()].concat();
    match block {
        Some(fd) => port.send_with(&message, fd),
        None => port.send_whole(&message),
    }
}

/// The lanes of a connection.
struct LaneBlocks {
    lane_server: LaneServer<MappedMemory>,
    uid: u32,
    offers: LaneOffers,
    places: Mutex<Vec<BlockReservation>>,
}

impl LaneBlocks {
    /// Adds a further block, unless most of the memory for lanes is in use.
    fn add(&self) -> Option<OwnedFd> {
        let place = self.offers.admit(self.uid, 2)?;
        let added = self.lane_server.add_block();
        let fd = added.inspect_err(|error| log::debug!("no further lanes: {error}")).ok()?;
        lock(&self.places).push(place);
        Some(fd)
    }
}

/// A counted block.
#[derive(Debug)]
struct BlockReservation {
    uid: u32,
    users: Arc<Mutex<HashMap<u32, usize>>>,
}

impl Drop for BlockReservation {
    fn drop(&mut self) {
        let mut users = lock(&self.users);
        let own = users.get_mut(&self.uid).expect("the user of a counted block is known");
        assert!(*own > 0, "user {} gives back a block that was not counted", self.uid);
        *own -= 1;
        if *own == 0 {
            users.remove(&self.uid);
        }
    }
}

struct LaneSource {
    messages: Arc<dyn RequestSource>,
    blocks: Arc<LaneBlocks>,
}

impl LaneSource {
    fn with(&self, messages: Arc<dyn RequestPort>, waits: bool) -> Result<Arc<dyn RequestPort>> {
        let now = self.messages.port_without_waiting()?;
        let blocks = Arc::clone(&self.blocks);
        Ok(Arc::new(LanePort {
            messages,
            now,
            blocks,
            waits,
            row: AtomicU32::new(0),
            turn: AtomicU32::new(0),
        }))
    }
}

impl RequestSource for LaneSource {
    fn port(&self, own: bool) -> Arc<dyn RequestPort> {
        let messages = self.messages.port(own);
        self.with(Arc::clone(&messages), true).unwrap_or(messages)
    }

    fn port_without_waiting(&self) -> Result<Arc<dyn RequestPort>> {
        self.with(self.messages.port_without_waiting()?, false)
    }

    fn lanes(&self) -> Option<ServerLaneCounts> {
        let LaneServerCounts { lanes, taken, open } = self.blocks.lane_server.snapshot_counts();
        let counter_of = |which| self.blocks.lane_server.read_client_counter(which);
        Some(ServerLaneCounts {
            used: lanes,
            requests: taken,
            unanswered: open,
            bells: counter_of(ClientCounter::Bells),
            sleeps: counter_of(ClientCounter::Sleeps),
            page_reads: counter_of(ClientCounter::PageReads),
        })
    }
}

struct LanePort {
    messages: Arc<dyn RequestPort>,
    /// The socket, whose `receive` never waits.
    now: Arc<dyn RequestPort>,
    blocks: Arc<LaneBlocks>,
    waits: bool,
    /// Requests in a row from lanes.
    row: AtomicU32,
    /// Turns without a request.
    turn: AtomicU32,
}

impl LanePort {
    fn server(&self) -> &LaneServer<MappedMemory> {
        &self.blocks.lane_server
    }

    /// The next request of any lane.
    fn take(&self, room: &mut [u8]) -> Result<Option<usize>> {
        let taken = self.server().take(room, number_of_request, count_copied);
        let Some(arrived) = taken.map_err(|why| self.end(why))? else { return Ok(None) };
        self.row.fetch_add(1, Ordering::Relaxed);
        // The header has the length of the message in the lane.
        if arrived.copied < arrived.len && length_of_request(room) != arrived.len {
            return Err(self.end(ProtocolViolation("a message has an impossible length")));
        }
        Ok(Some(arrived.copied))
    }

    /// Answers a request that came through a lane.
    fn answer(&self, lane: usize, number: u64, parts: &[&[u8]], placed: usize) -> Result<()> {
        let error = -Errno::EIO.raw();
        let refusal = OutHeader { len: HEADER_LEN as u32, error, unique: number };
        let refusal = refusal.as_bytes();
        let answered = self.server().answer_placed((lane, number), parts, placed, refusal);
        match answered.map_err(|why| self.end(why))? {
            true => Ok(()),
            // The session undoes everything that the reply granted.
            false => Err(Errno::EIO),
        }
    }

    /// Looks for a request without waiting: `EAGAIN` if there is none.
    fn try_receive(&self, room: &mut [u8]) -> Result<usize> {
        let looks = if self.server().is_used() { LOOKS } else { 1 };
        for _ in 0..looks {
            if let Some(len) = self.take(room)? {
                return Ok(len);
            }
            std::hint::spin_loop();
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if looks > 1 && !turn.is_multiple_of(TURNS) {
            return Err(Errno::EAGAIN);
        }
        self.message_now(room)
    }

    /// Waits for a request. `EAGAIN` if a bell has woken the thread for a request that another
    /// thread has taken.
    fn wait(&self, room: &mut [u8]) -> Result<usize> {
        self.server().fall_asleep();
        let received = match self.take(room) {
            Ok(None) => self.messages.receive(room),
            Ok(Some(len)) => Ok(len),
            Err(errno) => Err(errno),
        };
        self.server().wake_up();
        match self.handle_message(received) {
            Ok(None) => self.take(room)?.ok_or(Errno::EAGAIN),
            Ok(Some(len)) => Ok(len),
            Err(errno) => Err(errno),
        }
    }

    /// A message of the socket.
    fn message_now(&self, room: &mut [u8]) -> Result<usize> {
        self.row.store(0, Ordering::Relaxed);
        self.handle_message(self.now.receive(room))?.ok_or(Errno::EAGAIN)
    }

    /// Handles messages about lanes, and returns the length of other messages.
    fn handle_message(&self, received: Result<usize>) -> Result<Option<usize>> {
        match received? {
            BELL => Ok(None),
            MORE => {
                let block = self.blocks.add();
                offer(&*self.messages, block.as_ref().map(AsFd::as_fd))?;
                self.server().publish_notification();
                Ok(None)
            }
            len => Ok(Some(len)),
        }
    }

    /// Ends the connection with a client that breaks the rules.
    fn end(&self, why: ProtocolViolation) -> Errno {
        log::debug!("a client is disconnected: {why}");
        let _ = rustix::net::shutdown(self.messages.fd(), rustix::net::Shutdown::Both);
        Errno::ENODEV
    }
}

impl ReplyPort for LanePort {
    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        let number = number_of_reply(parts.first().map_or(&[], |part| part));
        if let Some(lane) = lane_of(number) {
            let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
            return self.answer(lane, number, &parts, 0);
        }
        self.messages.send(parts)?;
        if number == 0 {
            self.server().publish_notification();
        }
        Ok(())
    }
}

impl RequestPort for LanePort {
    fn receive(&self, room: &mut [u8]) -> Result<usize> {
        if self.row.load(Ordering::Relaxed) >= ROW {
            // Interrupts and returned lookups arrive here, and the end of the client.
            match self.message_now(room) {
                Err(Errno::EAGAIN) => {}
                other => return other,
            }
        }
        if self.waits { self.wait(room) } else { self.try_receive(room) }
    }

    fn send_whole(&self, message: &[u8]) -> Result<()> {
        match lane_of(number_of_reply(message)) {
            Some(lane) => self.answer(lane, number_of_reply(message), &[message], 0),
            None => self.messages.send_whole(message),
        }
    }

    fn send_with(&self, message: &[u8], fd: BorrowedFd<'_>) -> Result<()> {
        match lane_of(number_of_reply(message)) {
            Some(_) => Err(Errno::ENOSYS),
            None => self.messages.send_with(message, fd),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.messages.fd()
    }

    fn has_more(&self) -> Option<bool> {
        self.server().is_used().then(|| self.server().is_waiting())
    }

    fn places(&self) -> Option<&dyn SharedData> {
        Some(self)
    }

    fn is_readable(&self) -> bool {
        self.server().is_waiting() || self.messages.is_readable()
    }
}

impl SharedData for LanePort {
    fn unreceived_len(&self, unique: u64) -> usize {
        lane_of(unique).map_or(0, |lane| self.server().remaining(lane, unique))
    }

    fn copy(&self, unique: u64, from: usize, out: &mut [u8]) -> Result<()> {
        let copied = lane_of(unique).map(|lane| self.server().copy_left(lane, unique, from, out));
        if copied == Some(true) { Ok(()) } else { Err(Errno::EIO) }
    }

    fn write_to(
        &self,
        unique: u64,
        part: (usize, usize),
        file: (BorrowedFd<'_>, u64),
    ) -> Result<usize> {
        let lane = lane_of(unique).ok_or(Errno::EIO)?;
        let written = self.server().write_left((lane, unique), part, file);
        written.ok_or(Errno::EIO)?.map_err(errno)
    }

    fn read_from(
        &self,
        unique: u64,
        part: (usize, usize),
        file: (BorrowedFd<'_>, u64),
    ) -> Result<usize> {
        let lane = lane_of(unique).ok_or(Errno::EIO)?;
        let read = self.server().write_reply_from_file((lane, unique), part, file);
        read.ok_or(Errno::EIO)?.map_err(errno)
    }

    fn address_of_data(&self, unique: u64, from: usize) -> Option<NonNull<u8>> {
        self.server().address_of_left(lane_of(unique)?, unique, from)
    }

    fn address_of_reply(&self, unique: u64, part: (usize, usize)) -> Option<NonNull<u8>> {
        self.server().address_of_room((lane_of(unique)?, unique), part)
    }

    fn max_reply_len(&self, unique: u64) -> usize {
        lane_of(unique).map_or(0, |lane| self.server().reply_capacity(lane, unique))
    }

    fn place(&self, unique: u64, from: usize, bytes: &[u8]) -> Result<()> {
        let placed =
            lane_of(unique).map(|lane| self.server().write_reply(lane, unique, from, bytes));
        if placed == Some(true) { Ok(()) } else { Err(Errno::EIO) }
    }

    fn send_placed(&self, header: &[u8], len: usize) -> Result<()> {
        let number = number_of_reply(header);
        let lane = lane_of(number).ok_or(Errno::EIO)?;
        self.answer(lane, number, &[header], len)
    }
}

/// The bytes that are copied at once out of a lane with a message of `len` bytes, which begins with
/// `head`.
fn count_copied(head: &[u8], len: usize) -> usize {
    let opcode = u32::from_ne_bytes(bytes_at(head, std::mem::offset_of!(InHeader, opcode)));
    let stays = opcode == Opcode::Write as u32 && len > WRITE_LEAD + COPIED_MOST;
    if stays { WRITE_LEAD } else { len }
}

/// Returns the length in the header of a request.
fn length_of_request(message: &[u8]) -> usize {
    u32::from_ne_bytes(bytes_at(message, std::mem::offset_of!(InHeader, len))) as usize
}

/// The number of a request, whose message is not shorter than a header.
fn number_of_request(message: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes_at(message, std::mem::offset_of!(InHeader, unique)))
}

fn number_of_reply(message: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes_at(message, std::mem::offset_of!(OutHeader, unique)))
}

/// The bytes of a field; zeros where the message is too short for it.
fn bytes_at<const N: usize>(message: &[u8], at: usize) -> [u8; N] {
    message.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_no_more_lanes_than_its_share_and_gives_them_back() {
        let lanes = LaneOffers::new(LaneLimits { blocks: 3, blocks_of_user: 2 });
        let held = [lanes.admit(1, 1), lanes.admit(1, 1)];
        assert!(held.iter().all(Option::is_some) && lanes.admit(1, 1).is_none());
        let other = lanes.admit(2, 1);
        assert!(other.is_some() && lanes.admit(2, 1).is_none() && lanes.admit(3, 1).is_none());
        drop(held);
        assert!(lanes.admit(1, 1).is_some() && lock(&lanes.users).len() == 1);
    }

    #[test]
    fn further_lanes_leave_half_of_the_memory_to_other_connections() {
        let lanes = LaneOffers::new(LaneLimits { blocks: 8, blocks_of_user: 4 });
        let held = [lanes.admit(1, 1), lanes.admit(1, 2)];
        assert!(held.iter().all(Option::is_some) && lanes.admit(1, 2).is_none());
        let others = [lanes.admit(2, 1), lanes.admit(3, 1)];
        assert!(others.iter().all(Option::is_some) && lanes.admit(2, 2).is_none());
        assert!(lanes.admit(1, 1).is_some());
    }
}
