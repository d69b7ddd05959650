//! Transports: the arrival of requests and the delivery of replies. A session's workers each own a
//! [`WorkerChannel`]; dispatch sees only the request and a [`RequestReply`], so that the device
//! ([`dev`]) and rings ([`uring`]) are interchangeable without a change above.

mod answer;
mod buffer;
pub(crate) mod dev;
mod splice;
pub(crate) mod uring;

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use defuse_fs::{Errno, ReadSink, Result, WriteSource};

pub use answer::RequestAnswer;
pub(crate) use buffer::AlignedBuf;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use defuse_wire::request::{DecodeError, DecodeOptions, DecodedRequest};

/// The bytes of a request, in the layout of its transport.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestMessage<'a> {
    /// All parts in sequence, as the device delivers them.
    Whole(&'a [u8]),
    /// Header, the opcode's structure and everything else, each in a buffer of its own, as a ring
    /// delivers them.
    Split { header: &'a [u8], op: &'a [u8], payload: &'a [u8] },
}

impl<'a> RequestMessage<'a> {
    pub(crate) fn parse(
        &self,
        options: &DecodeOptions,
    ) -> std::result::Result<DecodedRequest<'a>, DecodeError> {
        match self {
            RequestMessage::Whole(bytes) => DecodedRequest::parse(bytes, options),
            RequestMessage::Split { header, op, payload } => {
                DecodedRequest::parse_split(header, op, payload, options)
            }
        }
    }
}

/// The way to the client from any thread, at any time: for notifications and deferred replies.
pub trait ReplyPort: Send + Sync {
    /// Sends a whole message; its header is in the first part. It does not wait for a client that
    /// reads nothing, because the thread may serve others.
    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()>;
}

/// Longer data is not received or sent with its message where the client shares memory for it.
pub const COPIED_MOST: usize = 32 * 1024;

/// Large data that lies in memory which the client shares, beside the bytes of requests and
/// replies. The client may change it at any time.
pub trait SharedData: Send + Sync {
    /// The bytes of the request `unique` that were not received with it: the data of a WRITE.
    fn unreceived_len(&self, unique: u64) -> usize;

    /// Copies data of a request, starting at the byte `from`.
    ///
    /// # Errors
    ///
    /// `EIO` if there are fewer bytes.
    fn copy(&self, unique: u64, from: usize, out: &mut [u8]) -> Result<()>;

    /// Writes a part of the data of a request, its begin and its length, into a file at an offset,
    /// by one pwrite(2). Returns the bytes written.
    ///
    /// # Errors
    ///
    /// The errors of [`copy`](SharedData::copy) and of pwrite(2).
    fn write_to(
        &self,
        unique: u64,
        part: (usize, usize),
        file: (BorrowedFd<'_>, u64),
    ) -> Result<usize>;

    /// Returns the address of the data of a request, starting at the byte `from`. It is valid until
    /// the request is answered.
    fn address_of_data(&self, unique: u64, from: usize) -> Option<NonNull<u8>>;

    /// The address of a part of a reply, its begin and its length, until the request is answered.
    fn address_of_reply(&self, unique: u64, part: (usize, usize)) -> Option<NonNull<u8>>;

    /// Returns the maximum length of the reply to the request, in bytes, with its header.
    fn max_reply_len(&self, unique: u64) -> usize;

    /// Writes data of a reply, starting at the byte `from`.
    ///
    /// # Errors
    ///
    /// `EIO` if there is no room.
    fn place(&self, unique: u64, from: usize, bytes: &[u8]) -> Result<()>;

    /// Fills a part of a reply, its begin and its length, from a file at an offset, by one
    /// pread(2). Returns the bytes read.
    ///
    /// # Errors
    ///
    /// The errors of [`place`](SharedData::place) and of pread(2).
    fn read_from(
        &self,
        unique: u64,
        part: (usize, usize),
        file: (BorrowedFd<'_>, u64),
    ) -> Result<usize>;

    /// Sends a reply of a header and `len` bytes of data, which are in their place.
    ///
    /// # Errors
    ///
    /// The errors of [`ReplyPort::send`].
    fn send_placed(&self, header: &[u8], len: usize) -> Result<()>;
}

/// A descriptor over which requests arrive as whole messages, and answers leave.
pub trait RequestPort: ReplyPort {
    /// Receives one message, and returns its length.
    ///
    /// # Errors
    ///
    /// `EINTR`, `EAGAIN` and `ENOENT` where there is none after all; `ENODEV` where the client has
    /// ended the connection; any other ends the session.
    fn receive(&self, room: &mut [u8]) -> Result<usize>;

    /// Sends one message that lies in one piece, from a worker of the session, which may wait for
    /// the client.
    fn send_whole(&self, message: &[u8]) -> Result<()> {
        self.send(&[IoSlice::new(message)])
    }

    /// Sends one message with a descriptor.
    ///
    /// # Errors
    ///
    /// `ENOSYS` where no descriptor can be sent; nothing is sent then.
    fn send_with(&self, _message: &[u8], _fd: BorrowedFd<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// The descriptor, for poll(2) and splice(2).
    fn fd(&self) -> BorrowedFd<'_>;

    /// True if another request waits, where that can be seen without a system call. Otherwise
    /// `None`, and the time between two requests has to decide.
    fn has_more(&self) -> Option<bool> {
        None
    }

    /// The memory for large data, if the client shares some.
    fn places(&self) -> Option<&dyn SharedData> {
        None
    }

    /// True where a request waits to be received.
    fn is_readable(&self) -> bool {
        let fd = self.fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// The source of the requests of a session.
pub trait RequestSource: Send + Sync {
    /// A port that waits for requests. If it is to be its `own`, no other worker uses its
    /// descriptor, where that is possible.
    fn port(&self, own: bool) -> Arc<dyn RequestPort>;

    /// A port whose [`receive`](RequestPort::receive) is `EAGAIN` while there is no request.
    ///
    /// # Errors
    ///
    /// The errors of the system calls that create the port.
    fn port_without_waiting(&self) -> Result<Arc<dyn RequestPort>>;

    /// Counts of lanes in shared memory. `None` for a line without them.
    fn lanes(&self) -> Option<ServerLaneCounts> {
        None
    }
}

/// Counts of the lanes of one client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerLaneCounts {
    /// Lanes by which a request came.
    pub used: u32,
    /// Requests that came by them.
    pub requests: u64,
    /// The requests that are not answered yet.
    pub unanswered: u64,
    /// Messages by which the client woke the server, as the client reports.
    pub bells: u64,
    /// Sleeps of client threads that waited for a reply, as the client reports.
    pub sleeps: u64,
    /// Client reads from cached pages, which make no request, as the client reports.
    pub page_reads: u64,
}

/// Adds a transport to the messages of a client: requests then arrive by both.
pub trait TransportUpgrade: Send + Sync + std::fmt::Debug {
    /// Returns the connection to a client of the user `uid`, whose socket is `messages`. Called
    /// before INIT.
    ///
    /// # Errors
    ///
    /// The errors of the system calls that create it. The client is then not served.
    fn upgrade(&self, uid: u32, messages: Arc<dyn RequestSource>)
    -> Result<Arc<dyn RequestSource>>;
}

/// The reply to the request that a worker has just received. Exactly one of the sending methods is
/// called for each request that needs a reply. If a sending method fails, the kernel did not take
/// the reply, so everything it granted (a lookup, a handle) has to be undone.
pub(crate) trait RequestReply {
    /// Sends success with `body`, the concatenation of its parts.
    fn send(&mut self, body: &[&[u8]]) -> Result<()>;

    /// Sends the error number `errno` (positive), or success without a body for 0.
    fn send_errno(&mut self, errno: i32) -> Result<()>;

    /// Sends success without a body, and a descriptor: to a client on a socket. `ENOSYS` elsewhere,
    /// and nothing is sent.
    fn send_descriptor(&mut self, _fd: BorrowedFd<'_>) -> Result<()> {
        Err(Errno::ENOSYS)
    }

    /// Room for `len` bytes of a body that [`send_room`](RequestReply::send_room) sends.
    fn room(&mut self, len: usize) -> &mut [u8];

    /// Sends the first `len` bytes of [`room`](RequestReply::room).
    fn send_room(&mut self, len: usize) -> Result<()>;

    /// Returns the sink for the data of a READ of up to `len` bytes.
    fn data(&mut self, len: usize) -> &mut dyn ReadSink;

    /// Sends the bytes that went into [`data`](RequestReply::data).
    fn send_data(&mut self) -> Result<()>;

    /// Returns the data of a WRITE that is not among the request's bytes.
    fn write_source(&mut self) -> &mut dyn WriteSource;

    /// True if that data stays where it is after the worker has received another request.
    fn is_stable(&self) -> bool {
        false
    }

    /// Takes the reply from this thread, so that another one can send it.
    fn defer(&mut self, body: DeferredKind) -> Box<dyn DeferredReply>;
}

/// The contents of a deferred reply.
pub(crate) enum DeferredKind {
    /// Room for the data of a READ of so many bytes.
    Read(usize),
    /// The data of a WRITE. It is owned: the worker's buffer is needed for the next request.
    Write(Vec<u8>),
    /// The data of a WRITE, which [stays](RequestReply::is_stable).
    WriteInPlace,
    /// Nothing.
    Plain,
}

/// The owned form of a [`RequestReply`].
pub(crate) trait DeferredReply: Send {
    /// Returns the sink for the data of a READ.
    fn sink(&mut self) -> &mut dyn ReadSink;
    /// Returns the source of the data of a WRITE.
    fn source(&mut self) -> &mut dyn WriteSource;
    /// Sends the bytes that went into the sink.
    fn send_data(self: Box<Self>) -> Result<()>;
    /// Sends success with `body`.
    fn send(self: Box<Self>, body: &[u8]) -> Result<()>;
    /// Sends the error number `errno` (positive), or success without a body for 0.
    fn send_errno(self: Box<Self>, errno: i32) -> Result<()>;
}

/// The outcome of a worker's wait for a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceiveOutcome {
    /// A request is there.
    Request,
    /// Nothing: a signal, or a request that was taken back. Look around and wait again.
    Nothing,
    /// The kernel has ended the connection.
    Unmounted,
}

/// One worker's end of a transport.
pub(crate) trait WorkerChannel: Send {
    /// Waits for a request. With `spin` it may poll for a while first, because no other worker
    /// waits.
    fn receive(&mut self, spin: bool) -> Result<ReceiveOutcome>;
    /// The request that was received, and the way to answer it. Bytes that the transport keeps
    /// elsewhere (WRITE data in a pipe) are left out.
    fn exchange(&mut self) -> (RequestMessage<'_>, &mut dyn RequestReply);
    /// True once bytes are kept elsewhere for the request that was received.
    fn payload_in_pipe(&self) -> bool;
}

/// The error of a system call, in the contract's type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
