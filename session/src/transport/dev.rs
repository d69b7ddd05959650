//! The transport over /dev/fuse: read(2) and write(2) with buffers that are used again and again,
//! or splice(2) for large data.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use defuse_fs::{Errno, ReadSink, Result, WriteSource};
use defuse_probe::clock;
use rustix::fs::{Mode, OFlags};
use zerocopy::IntoBytes;

use super::splice::MessagePipe;
use super::{
    AlignedBuf, COPIED_MOST, DeferredKind, DeferredReply, ReceiveOutcome, ReplyPort,
    RequestMessage, RequestPort, RequestReply, RequestSource, SharedData, WorkerChannel, errno,
};
use defuse_wire::abi::{self, OutHeader};
use defuse_wire::reply::HEADER_LEN;
use defuse_wire::request::WRITE_LEAD;

/// The maximum length of a reply that is assembled within one page.
const SHORT: usize = 4096;
/// The maximum length of a deferred reply, unless it is data.
const SHORT_DEFERRED: usize = HEADER_LEN + 64;

/// The lengths from which data passes through a pipe instead of a buffer, in bytes; `usize::MAX`
/// for never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpliceLimits {
    /// Replies to READ of at least so much are spliced from the file to the device.
    pub read_min: usize,
    /// After a WRITE of at least so many bytes, the next request is spliced from the device. (The
    /// next request is unknown before it is received, but large writes arrive in rows.)
    pub write_min: usize,
}

impl SpliceLimits {
    /// Always copy.
    pub const NEVER: SpliceLimits = SpliceLimits { read_min: usize::MAX, write_min: usize::MAX };

    /// The configuration of Stackfs: READ replies of more than two pages, WRITE requests of more
    /// than one ("To FUSE or Not to FUSE", section 2.3).
    pub const STACKFS: SpliceLimits = SpliceLimits { read_min: 2 * 4096 + 1, write_min: 4096 + 1 };

    /// The lengths from which splicing was faster than copying in measurements on current machines:
    /// from 128 KiB.
    pub const MEASURED: SpliceLimits = SpliceLimits { read_min: 128 * 1024, write_min: 128 * 1024 };

    fn is_any(self) -> bool {
        self != Self::NEVER
    }
}

/// A channel's second way to the device, which never blocks.
///
/// Waking a thread that sleeps on another processor costs an interrupt and an exit from idle, on
/// virtual machines several times the cost of a short request. A worker that expects the next
/// request at once therefore polls for a while before it sleeps.
struct SpinPort {
    /// A clone of the device with `O_NONBLOCK`.
    port: Arc<dyn RequestPort>,
    limit_ns: u64,
    /// The expected benefit of polling: raised by a request within the limit, lowered by a later
    /// one. At 0 the worker does not poll.
    hope: u32,
}

/// Number of late requests after which polling stops, until a request arrives early.
const HOPE: u32 = 8;

/// Sizes that hold for every channel of a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelLimits {
    /// Most bytes in one WRITE.
    pub(crate) max_write: usize,
    /// Most bytes in one reply.
    pub(crate) max_read: usize,
    pub(crate) splice: SpliceLimits,
}

/// /dev/fuse, as the source of the requests of a mount.
pub(crate) struct DeviceSource {
    device: Arc<OwnedFd>,
}

impl DeviceSource {
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        DeviceSource { device }
    }

    fn make_shared_port(&self) -> Arc<dyn RequestPort> {
        Arc::new(DevicePort { fd: Arc::clone(&self.device) })
    }
}

impl RequestSource for DeviceSource {
    /// With a clone of the device, a worker need not take the lock of a common queue.
    fn port(&self, own: bool) -> Arc<dyn RequestPort> {
        match own.then(|| clone_device(&self.device, OFlags::empty())) {
            Some(Ok(fd)) => Arc::new(DevicePort { fd: Arc::new(fd) }),
            Some(Err(errno)) => {
                log::debug!("/dev/fuse could not be cloned ({errno}); workers share it");
                self.make_shared_port()
            }
            None => self.make_shared_port(),
        }
    }

    fn port_without_waiting(&self) -> Result<Arc<dyn RequestPort>> {
        let fd = clone_device(&self.device, OFlags::NONBLOCK)?;
        Ok(Arc::new(DevicePort { fd: Arc::new(fd) }))
    }
}

/// Another device file of the same connection (`FUSE_DEV_IOC_CLONE`).
fn clone_device(device: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | flags;
    let clone = rustix::fs::open("/dev/fuse", flags, Mode::empty()).map_err(errno)?;
    let original = device.as_fd().as_raw_fd();
    // SAFETY: for this request number the kernel reads one 32-bit number, which `original` is.
    let rc = unsafe {
        let request = libc::c_ulong::from(abi::FUSE_DEV_IOC_CLONE);
        libc::ioctl(clone.as_raw_fd(), request, &original)
    };
    if rc == 0 { Ok(clone) } else { Err(std::io::Error::last_os_error().into()) }
}

/// An open /dev/fuse, or a clone for one worker. The flags of the descriptor decide whether a read
/// waits.
struct DevicePort {
    fd: Arc<OwnedFd>,
}

impl ReplyPort for DevicePort {
    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        rustix::io::writev(&self.fd, parts).map(drop).map_err(errno)
    }
}

impl RequestPort for DevicePort {
    fn receive(&self, room: &mut [u8]) -> Result<usize> {
        rustix::io::read(&self.fd, room).map_err(errno)
    }

    fn send_whole(&self, message: &[u8]) -> Result<()> {
        rustix::io::write(&self.fd, message).map(drop).map_err(errno)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One worker's end of the device.
pub(crate) struct PortChannel {
    port: Arc<dyn RequestPort>,
    request: AlignedBuf,
    capacity: usize,
    len: usize,
    in_pipe: bool,
    large_write: bool,
    spin: Option<SpinPort>,
    reply: PortReply,
}

impl PortChannel {
    pub(crate) fn new(port: Arc<dyn RequestPort>, limits: ChannelLimits) -> Self {
        // The kernel refuses a read with less room than one WRITE of the size that was agreed.
        let data = (limits.max_write + 4096).max(abi::FUSE_MIN_READ_BUFFER);
        let pipe_size = limits.max_write.max(limits.max_read);
        let pipe = limits.splice.is_any().then(|| MessagePipe::new(pipe_size)).and_then(Result::ok);
        let mut splice = if pipe.is_some() { limits.splice } else { SpliceLimits::NEVER };
        // The size of a request is not known before it is received, and a request that does not fit
        // into the pipe would be lost.
        if pipe.as_ref().is_none_or(|pipe| pipe.capacity() < limits.max_write) {
            splice.write_min = usize::MAX;
        }
        PortChannel {
            request: AlignedBuf::new_dirty(WRITE_LEAD, data),
            capacity: WRITE_LEAD + data,
            len: 0,
            in_pipe: false,
            large_write: false,
            spin: None,
            reply: PortReply {
                port: Arc::clone(&port),
                later: false,
                unique: 0,
                short: AlignedBuf::new(0, SHORT),
                buf: AlignedBuf::new_dirty(HEADER_LEN, limits.max_read.max(4096)),
                filled: 0,
                spliced: false,
                splice,
                pipe,
                left: RemainingData::default(),
                placed: false,
            },
            port,
        }
    }

    /// Looks for requests through `port`, which does not block, for up to `limit_ns` before
    /// sleeping.
    pub(crate) fn spin_through(&mut self, port: Arc<dyn RequestPort>, limit_ns: u64) {
        self.spin = Some(SpinPort { port, limit_ns, hope: HOPE });
    }

    /// True while polling for requests pays.
    pub(crate) fn should_poll(&self) -> bool {
        self.spin.as_ref().is_some_and(|spin| spin.hope > 0)
    }

    /// Returns the value of [`RequestPort::has_more`].
    pub(crate) fn has_more(&self) -> Option<bool> {
        self.port.has_more()
    }

    /// Receives a request. Polls first if `spin` is set, which means that no other worker would
    /// take the request.
    fn receive_plain(&mut self, spin: bool) -> Result<usize> {
        let room = self.request.message_mut(self.capacity);
        let Some(spinning) = self.spin.as_mut().filter(|_| spin) else {
            self.reply.port = Arc::clone(&self.port);
            return self.port.receive(room);
        };
        let begun = clock::now();
        while spinning.hope > 0 && begun.elapsed_ns() < spinning.limit_ns {
            match spinning.port.receive(room) {
                // Other threads that can run on this processor go first.
                Err(Errno::EAGAIN) => std::thread::yield_now(),
                other => {
                    spinning.hope = HOPE;
                    // The kernel takes a reply only through the device that delivered the request.
                    self.reply.port = Arc::clone(&spinning.port);
                    return other;
                }
            }
        }
        self.reply.port = Arc::clone(&self.port);
        let received = self.port.receive(room);
        let early = begun.elapsed_ns() < spinning.limit_ns;
        spinning.hope = if early { HOPE } else { spinning.hope.saturating_sub(1) };
        received
    }

    /// Takes a request into the pipe, and copies it into the buffer, except for the data of a
    /// WRITE.
    fn receive_spliced(&mut self) -> Result<usize> {
        self.reply.port = Arc::clone(&self.port);
        let pipe = self.reply.pipe.as_mut().ok_or(Errno::EINVAL)?;
        let total = pipe.fill(self.port.fd(), None, self.capacity)?;
        let lead = pipe.pull(self.request.message_mut(WRITE_LEAD.min(total)))?;
        let header =
            defuse_wire::request::peek(self.request.message(lead)).map_err(|_| Errno::EIO)?;
        let is_write = header.opcode == abi::Opcode::Write as u32;
        if is_write && total - lead >= self.reply.splice.write_min {
            return Ok(lead);
        }
        let rest = &mut self.request.message_mut(total)[lead..];
        pipe.pull(rest)?;
        Ok(total)
    }

    /// The way to answer the request `unique`, which another channel received through `port`.
    pub(crate) fn reply_through(
        &mut self,
        port: &Arc<dyn RequestPort>,
        unique: u64,
    ) -> &mut dyn RequestReply {
        self.reply.port = Arc::clone(port);
        self.reply.unique = unique;
        self.reply.left = RemainingData::default();
        &mut self.reply
    }

    /// Returns the port that delivered the received request.
    pub(crate) fn reply_port(&self) -> Arc<dyn RequestPort> {
        Arc::clone(&self.reply.port)
    }

    /// Records the received request for its reply, and if the next one is likely to be a large
    /// write.
    fn note(&mut self, len: usize) -> Result<()> {
        let header =
            defuse_wire::request::peek(self.request.message(len)).map_err(|_| Errno::EIO)?;
        let data = (header.len as usize).saturating_sub(WRITE_LEAD);
        self.large_write =
            header.opcode == abi::Opcode::Write as u32 && data >= self.reply.splice.write_min;
        self.reply.unique = header.unique;
        self.reply.left = RemainingData::default();
        let rest = (header.len as usize).saturating_sub(len);
        if rest > 0
            && let Some(places) = self.reply.port.places()
            && places.unreceived_len(header.unique) == rest
        {
            self.reply.left.len = rest;
        }
        Ok(())
    }
}

impl WorkerChannel for PortChannel {
    fn receive(&mut self, spin: bool) -> Result<ReceiveOutcome> {
        if let Some(pipe) = &mut self.reply.pipe
            && pipe.clear().is_err()
        {
            self.reply.pipe = None;
            self.reply.splice = SpliceLimits::NEVER;
        }
        let received = if self.large_write && self.reply.pipe.is_some() {
            self.receive_spliced()
        } else {
            self.receive_plain(spin)
        };
        match received {
            Ok(len) => {
                self.len = len;
                self.note(len)?;
                let piped = self.reply.pipe.as_ref().is_some_and(|pipe| pipe.level() > 0);
                self.in_pipe = piped || self.reply.left.len > 0;
                Ok(ReceiveOutcome::Request)
            }
            // ENOENT: the request was interrupted before it could be read.
            Err(Errno::EINTR | Errno::EAGAIN | Errno::ENOENT) => Ok(ReceiveOutcome::Nothing),
            Err(Errno::ENODEV | Errno::ECONNABORTED) => Ok(ReceiveOutcome::Unmounted),
            Err(errno) => Err(errno),
        }
    }

    fn exchange(&mut self) -> (RequestMessage<'_>, &mut dyn RequestReply) {
        (RequestMessage::Whole(self.request.message(self.len)), &mut self.reply)
    }

    fn payload_in_pipe(&self) -> bool {
        self.in_pipe
    }
}

struct PortReply {
    port: Arc<dyn RequestPort>,
    /// A thread that must not wait for the client sends the reply.
    later: bool,
    unique: u64,
    /// Header and body of short answers, within one page: the kernel pins every page that it copies
    /// from, which costs more than the copy.
    short: AlignedBuf,
    /// The header before a page, the data from there on.
    buf: AlignedBuf,
    /// Bytes of data in the buffer, or behind the header in the pipe.
    filled: usize,
    /// The data is in the pipe, behind its header.
    spliced: bool,
    splice: SpliceLimits,
    pipe: Option<MessagePipe>,
    /// The data of the request that is in the memory of the port.
    left: RemainingData,
    /// The data goes into the memory of the port.
    placed: bool,
}

/// Data of a WRITE that is in the memory of the port.
#[derive(Clone, Copy, Default)]
struct RemainingData {
    len: usize,
    taken: usize,
}

impl RemainingData {
    fn remaining(self) -> usize {
        self.len - self.taken
    }
}

impl PortReply {
    fn places(&self) -> Result<&dyn SharedData> {
        self.port.places().ok_or(Errno::EIO)
    }

    /// Takes data from the memory of the port.
    fn take_left(&mut self, out: &mut [u8]) -> Result<usize> {
        let len = out.len().min(self.left.remaining());
        self.places()?.copy(self.unique, self.left.taken, &mut out[..len])?;
        self.left.taken += len;
        Ok(len)
    }

    /// Places up to `len` bytes of a file.
    fn place_file(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let places = self.places()?;
        let placed = read_full(len, |done| {
            let part = (HEADER_LEN + self.filled + done, len - done);
            places.read_from(self.unique, part, (fd, offset + done as u64))
        });
        match placed {
            // Direct I/O, and the place is not aligned.
            Err(Errno::EINVAL) => {
                let mut room = AlignedBuf::new(0, len);
                let count = pread_full(fd, offset, room.data_mut(len))?;
                self.put(room.data_mut(count)).map(|()| count)
            }
            placed => {
                self.filled += placed.unwrap_or(0);
                placed
            }
        }
    }

    /// Writes up to `len` bytes that are in the memory of the port into a file, by one call: a
    /// write at the end of a file must not be torn.
    fn write_left(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let part = (self.left.taken, len.min(self.left.remaining()));
        let written = match self.places()?.write_to(self.unique, part, (fd, offset)) {
            // Direct I/O, and the place is not aligned.
            Err(Errno::EINVAL) => {
                let mut room = AlignedBuf::new(0, part.1);
                self.places()?.copy(self.unique, part.0, room.data_mut(part.1))?;
                rustix::io::pwrite(fd, room.data_mut(part.1), offset).map_err(errno)?
            }
            written => written?,
        };
        self.left.taken += written;
        Ok(written)
    }

    fn header(&self, body: usize, error: i32) -> OutHeader {
        OutHeader { len: (HEADER_LEN + body) as u32, error, unique: self.unique }
    }

    /// Sends a short answer with one write.
    fn send_short(&mut self, body: &[&[u8]], len: usize, error: i32) -> Result<()> {
        let header = self.header(len, error);
        let message = self.short.message_mut(HEADER_LEN + len);
        let (head, rest) = message.split_at_mut(HEADER_LEN);
        head.copy_from_slice(header.as_bytes());
        put_parts(rest, body);
        pass(&*self.port, self.later, message)
    }

    /// Sends the header and the first `len` bytes of the buffer's data with one write.
    fn send_buf(&mut self, len: usize) -> Result<()> {
        let header = self.header(len, 0);
        let message = self.buf.message_mut(HEADER_LEN + len);
        message[..HEADER_LEN].copy_from_slice(header.as_bytes());
        pass(&*self.port, self.later, message)
    }

    /// Splices up to `len` bytes of `fd` behind a header for `len` bytes. If the file ends earlier,
    /// the header is wrong, and all of the pipe is copied back into the buffer.
    fn fill_pipe(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let header = self.header(len, 0);
        let Some(pipe) = &mut self.pipe else { return Err(Errno::EINVAL) };
        pipe.push(header.as_bytes())?;
        let mut done = 0;
        while done < len {
            match pipe.fill(fd, Some(offset + done as u64), len - done) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(errno) if done == 0 => {
                    pipe.clear()?;
                    return Err(errno);
                }
                Err(_) => break,
            }
        }
        if done == len {
            self.spliced = true;
        } else {
            pipe.pull(self.buf.message_mut(HEADER_LEN + done))?;
        }
        self.filled = done;
        Ok(done)
    }

    fn fill_buf(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let room = &mut self.buf.data_mut(self.filled + len)[self.filled..];
        let done = pread_full(fd, offset, room)?;
        self.filled += done;
        Ok(done)
    }
}

impl RequestReply for PortReply {
    fn send(&mut self, body: &[&[u8]]) -> Result<()> {
        let len: usize = body.iter().map(|part| part.len()).sum();
        if HEADER_LEN + len <= SHORT {
            return self.send_short(body, len, 0);
        }
        put_parts(self.room(len), body);
        self.send_buf(len)
    }

    fn send_errno(&mut self, errno: i32) -> Result<()> {
        self.send_short(&[], 0, -errno)
    }

    fn send_descriptor(&mut self, fd: BorrowedFd<'_>) -> Result<()> {
        let header = self.header(0, 0);
        self.port.send_with(header.as_bytes(), fd)
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        self.buf.data_mut(len)
    }

    fn send_room(&mut self, len: usize) -> Result<()> {
        self.send_buf(len)
    }

    fn data(&mut self, len: usize) -> &mut dyn ReadSink {
        self.filled = 0;
        self.spliced = false;
        let whole = HEADER_LEN + len;
        let fits = |places: &dyn SharedData| places.max_reply_len(self.unique) >= whole;
        self.placed = len > COPIED_MOST && self.port.places().is_some_and(fits);
        self
    }

    fn send_data(&mut self) -> Result<()> {
        if self.placed {
            let header = self.header(self.filled, 0);
            return self.places()?.send_placed(header.as_bytes(), self.filled);
        }
        if !self.spliced {
            return self.send_buf(self.filled);
        }
        let total = HEADER_LEN + self.filled;
        let pipe = self.pipe.as_mut().ok_or(Errno::EIO)?;
        let sent = pipe.drain(self.port.fd(), None, total);
        // Bytes that the device did not take would precede the next message.
        pipe.clear()?;
        sent.map(drop)
    }

    fn write_source(&mut self) -> &mut dyn WriteSource {
        self
    }

    fn is_stable(&self) -> bool {
        self.left.len > 0
    }

    fn defer(&mut self, body: DeferredKind) -> Box<dyn DeferredReply> {
        // Thousands of requests may wait for a lock, so they take no more memory than their reply.
        let mut buf = None;
        let (mut data, mut left, mut placed) = (Vec::new(), RemainingData::default(), false);
        match body {
            DeferredKind::Read(len) => {
                self.data(len);
                placed = self.placed;
                if !placed {
                    buf = Some(AlignedBuf::new_dirty(HEADER_LEN, len));
                }
            }
            DeferredKind::Write(bytes) => data = bytes,
            DeferredKind::WriteInPlace => left = self.left,
            DeferredKind::Plain => {}
        }
        Box::new(PortDeferredReply {
            reply: PortReply {
                port: Arc::clone(&self.port),
                later: true,
                unique: self.unique,
                short: AlignedBuf::new_unaligned(0, SHORT_DEFERRED),
                buf: buf.unwrap_or_else(|| AlignedBuf::new_unaligned(HEADER_LEN, 0)),
                filled: 0,
                spliced: false,
                splice: SpliceLimits::NEVER,
                pipe: None,
                left,
                placed,
            },
            data,
            taken: 0,
        })
    }
}

impl ReadSink for PortReply {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        debug_assert!(!self.spliced, "data after a spliced reply");
        let end = self.filled + bytes.len();
        if self.placed {
            self.places()?.place(self.unique, HEADER_LEN + self.filled, bytes)?;
            self.filled = end;
            return Ok(());
        }
        self.buf.data_mut(end)[self.filled..].copy_from_slice(bytes);
        self.filled = end;
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        if self.placed {
            const ZEROS: [u8; 4096] = [0; 4096];
            let mut rest = len;
            while rest > 0 {
                let part = rest.min(ZEROS.len());
                self.put(&ZEROS[..part])?;
                rest -= part;
            }
            return Ok(());
        }
        let end = self.filled + len;
        self.buf.data_mut(end)[self.filled..].fill(0);
        self.filled = end;
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        if self.placed {
            return self.place_file(fd, offset, len);
        }
        let fits = self.pipe.as_ref().is_some_and(|pipe| len <= pipe.capacity());
        if self.filled == 0 && len >= self.splice.read_min && fits {
            match self.fill_pipe(fd, offset, len) {
                // Files that cannot be spliced (or not at this alignment) can still be read.
                Err(Errno::EINVAL | Errno::EAGAIN) => {}
                other => return other,
            }
        }
        self.fill_buf(fd, offset, len)
    }

    /// Lends the buffer of the reply. Bytes in a pipe have no memory, and nothing comes after them.
    /// The memory of a client is not lent.
    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.spliced || self.placed {
            return None;
        }
        let end = self.filled + len;
        Some(&mut self.buf.data_mut(end)[self.filled..])
    }

    fn lend_shared(&mut self, len: usize) -> Option<NonNull<u8>> {
        let part = (HEADER_LEN + self.filled, len);
        self.placed.then(|| self.places().ok()?.address_of_reply(self.unique, part))?
    }

    fn advance(&mut self, count: usize) -> Result<()> {
        if self.placed {
            let room = self.places()?.max_reply_len(self.unique);
            if count > room.saturating_sub(HEADER_LEN + self.filled) {
                return Err(Errno::EINVAL);
            }
        }
        self.filled += if self.spliced { return Err(Errno::EINVAL) } else { count };
        Ok(())
    }
}

impl WriteSource for PortReply {
    fn remaining(&self) -> usize {
        match self.left.len {
            0 => self.pipe.as_ref().map_or(0, MessagePipe::level),
            _ => self.left.remaining(),
        }
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        if self.left.len > 0 {
            return self.take_left(out);
        }
        self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.pull(out))
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        if self.left.len > 0 {
            return self.write_left(fd, offset, len);
        }
        let Some(pipe) = &mut self.pipe else { return Ok(0) };
        match pipe.drain(fd, Some(offset), len.min(pipe.level())) {
            Err(Errno::EINVAL) => {}
            other => return other,
        }
        // O_APPEND and direct I/O refuse a splice. The reply of a WRITE needs no data, so its
        // buffer is free to carry the bytes over.
        let want = len.min(pipe.level()).min(1 << 16);
        let mut room = AlignedBuf::new(0, want);
        let count = pipe.pull(room.data_mut(want))?;
        pwrite_full(fd, offset, &room.data_mut(count)[..count])
    }

    fn borrow_shared(&mut self) -> Option<NonNull<u8>> {
        let from = self.left.taken;
        (self.left.len > 0).then(|| self.places().ok()?.address_of_data(self.unique, from))?
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        let fits = count <= self.left.remaining();
        self.left.taken += if fits { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

struct PortDeferredReply {
    reply: PortReply,
    data: Vec<u8>,
    taken: usize,
}

impl DeferredReply for PortDeferredReply {
    fn sink(&mut self) -> &mut dyn ReadSink {
        &mut self.reply
    }

    fn source(&mut self) -> &mut dyn WriteSource {
        if self.reply.is_stable() { &mut self.reply } else { self }
    }

    fn send_data(mut self: Box<Self>) -> Result<()> {
        self.reply.send_data()
    }

    fn send(mut self: Box<Self>, body: &[u8]) -> Result<()> {
        self.reply.send(&[body])
    }

    fn send_errno(mut self: Box<Self>, errno: i32) -> Result<()> {
        self.reply.send_errno(errno)
    }
}

/// A connection that ends leaves its memory to the next one.
impl Drop for PortChannel {
    fn drop(&mut self) {
        self.request.recycle();
        self.reply.buf.recycle();
    }
}

impl Drop for PortDeferredReply {
    fn drop(&mut self) {
        self.reply.buf.recycle();
    }
}

impl WriteSource for PortDeferredReply {
    fn remaining(&self) -> usize {
        self.data.len() - self.taken
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut rest = MemorySource::new(&self.data[self.taken..]);
        let count = rest.take(out)?;
        self.taken += count;
        Ok(count)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let mut rest = MemorySource::new(&self.data[self.taken..]);
        let count = rest.drain_to(fd, offset, len)?;
        self.taken += count;
        Ok(count)
    }

    fn borrow(&mut self) -> Option<&[u8]> {
        Some(&self.data[self.taken..])
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        let fits = count <= self.data.len() - self.taken;
        self.taken += if fits { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

fn pass(port: &dyn RequestPort, later: bool, message: &[u8]) -> Result<()> {
    if later { port.send(&[IoSlice::new(message)]) } else { port.send_whole(message) }
}

/// Copies the parts into `room` one after the other.
pub(super) fn put_parts(mut room: &mut [u8], parts: &[&[u8]]) {
    for part in parts {
        let (head, rest) = room.split_at_mut(part.len());
        head.copy_from_slice(part);
        room = rest;
    }
}

/// The data of a WRITE that came with the request.
pub(crate) struct MemorySource<'a> {
    rest: &'a [u8],
}

impl<'a> MemorySource<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        MemorySource { rest: bytes }
    }
}

impl WriteSource for MemorySource<'_> {
    fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let len = out.len().min(self.rest.len());
        let (head, rest) = self.rest.split_at(len);
        out[..len].copy_from_slice(head);
        self.rest = rest;
        Ok(len)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let len = len.min(self.rest.len());
        let count = rustix::io::pwrite(fd, &self.rest[..len], offset).map_err(errno)?;
        self.rest = &self.rest[count..];
        Ok(count)
    }

    fn borrow(&mut self) -> Option<&[u8]> {
        Some(self.rest)
    }

    fn skip(&mut self, count: usize) -> Result<()> {
        self.rest = self.rest.get(count..).ok_or(Errno::EINVAL)?;
        Ok(())
    }
}

/// Reads until `room` is full or the file ends, like [`read_full`].
pub(super) fn pread_full(fd: BorrowedFd<'_>, offset: u64, room: &mut [u8]) -> Result<usize> {
    read_full(room.len(), |done| {
        rustix::io::pread(fd, &mut room[done..], offset + done as u64).map_err(errno)
    })
}

/// Reads `len` bytes, or to the end of the file. `read` reads the bytes after the number of bytes
/// that it gets. An error after some bytes ends the read there; the caller meets the error again
/// when it reads the rest. A file rarely ends on a page, so a short count that is not whole pages
/// is taken for the end without another call.
fn read_full(len: usize, mut read: impl FnMut(usize) -> Result<usize>) -> Result<usize> {
    let mut done = 0;
    while done < len {
        match read(done) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
        if !done.is_multiple_of(4096) {
            break;
        }
    }
    Ok(done)
}

fn pwrite_full(fd: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(fd, &bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if done == 0 => return Err(errno(error)),
            Err(_) => break,
        }
    }
    Ok(done)
}
