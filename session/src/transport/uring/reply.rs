//! Requests and answers of one entry, each where it belongs.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::{Errno, ReadSink, Result, WriteSource};

use super::{FinishedAnswers, UringEntry};
use crate::transport::dev::{MemorySource, pread_full, put_parts};
use crate::transport::{DeferredKind, DeferredReply, RequestMessage, RequestReply};
use defuse_wire::abi::{FUSE_URING_OP_IN_OUT_SZ, InHeader, Opcode};

/// A request in a worker's hands, and the answer to it. Used again for the next.
pub(crate) struct UringExchange {
    /// The entry of a WRITE, whose data is used where it lies; the answer is put in later.
    lent: Option<UringEntry>,
    /// The copy of any other request, whose place the answer takes.
    copy: CopiedRequest,
    reply: UringReply,
}

struct CopiedRequest {
    header: [u8; size_of::<InHeader>()],
    op: [u8; FUSE_URING_OP_IN_OUT_SZ],
    payload: Vec<u8>,
}

impl UringExchange {
    pub(crate) fn new(answers: Arc<FinishedAnswers>) -> Self {
        UringExchange {
            lent: None,
            copy: CopiedRequest {
                header: [0; size_of::<InHeader>()],
                op: [0; FUSE_URING_OP_IN_OUT_SZ],
                payload: Vec::new(),
            },
            reply: UringReply::new(None, answers),
        }
    }

    /// A request has come in `entry`.
    pub(crate) fn begin(&mut self, entry: UringEntry) {
        self.reply.answer = None;
        self.reply.late = None;
        self.reply.filled = 0;
        let is_write = entry.request().opcode == Opcode::Write as u32;
        // A WRITE that is answered later takes its entry along, so its data is copied too.
        if is_write && !self.reply.answers.keeps_entries() {
            self.lent = Some(entry);
            return;
        }
        if let RequestMessage::Split { header, op, payload } = entry.message() {
            self.copy.header.copy_from_slice(header);
            self.copy.op.copy_from_slice(op);
            self.copy.payload.clear();
            self.copy.payload.extend_from_slice(payload);
        }
        self.reply.entry = Some(entry);
    }

    /// The request, and the way to answer it.
    pub(crate) fn parts(&mut self) -> (RequestMessage<'_>, &mut dyn RequestReply) {
        let CopiedRequest { header, op, payload } = &self.copy;
        let copied = RequestMessage::Split { header, op, payload };
        (self.lent.as_ref().map_or(copied, UringEntry::message), &mut self.reply)
    }

    /// Returns the entry with the reply in it, or `None` if the reply is deferred. The kernel needs
    /// every entry back, so a request without a reply is refused with an error; a NOTIFY_REPLY is
    /// itself a reply.
    pub(crate) fn finish(&mut self) -> Option<UringEntry> {
        let lent = self.lent.take();
        if let Some(late) = self.reply.late.take() {
            if let Some(entry) = lent {
                late.give(entry, &self.reply.answers);
            }
            return None;
        }
        let aside = lent.is_some();
        let mut entry = lent.or_else(|| self.reply.entry.take())?;
        let answer = self.reply.answer.take().unwrap_or_else(|| {
            let is_reply = entry.request().opcode == Opcode::NotifyReply as u32;
            EntryAnswer { errno: if is_reply { 0 } else { Errno::EIO.raw() }, len: 0 }
        });
        if aside {
            entry.payload_mut(answer.len).copy_from_slice(&self.reply.aside[..answer.len]);
        }
        entry.answer(answer.errno, answer.len);
        Some(entry)
    }
}

struct EntryAnswer {
    /// A positive error number, or 0.
    errno: i32,
    /// Bytes of body.
    len: usize,
}

/// Writes an answer into the payload of the entry, or aside while the request's data is there.
struct UringReply {
    entry: Option<UringEntry>,
    aside: Vec<u8>,
    /// Bytes of data in the body.
    filled: usize,
    answer: Option<EntryAnswer>,
    /// The reply is deferred, and its entry is still lent to the request.
    late: Option<Arc<LateAnswer>>,
    answers: Arc<FinishedAnswers>,
}

/// An answer and its entry, of which either may come first.
#[derive(Default)]
struct LateAnswer(Mutex<LateParts>);

#[derive(Default)]
struct LateParts {
    entry: Option<UringEntry>,
    /// Error number or 0, and body.
    answer: Option<(i32, Vec<u8>)>,
}

impl LateParts {
    /// Hands the answer over if both parts are there.
    fn send(&mut self, answers: &FinishedAnswers) -> Result<()> {
        let Some((errno, body)) = self.answer.take_if(|_| self.entry.is_some()) else {
            return Ok(());
        };
        let Some(mut entry) = self.entry.take() else { return Ok(()) };
        entry.payload_mut(body.len()).copy_from_slice(&body);
        entry.answer(errno, body.len());
        answers.hand_over(entry)
    }
}

impl LateAnswer {
    /// The handler of the request has returned, so that nothing uses the data in the entry.
    fn give(&self, entry: UringEntry, answers: &FinishedAnswers) {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.entry = Some(entry);
        let _ = parts.send(answers);
    }

    fn answer(&self, errno: i32, body: Vec<u8>, answers: &FinishedAnswers) -> Result<()> {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.answer = Some((errno, body));
        parts.send(answers)
    }
}

impl UringReply {
    fn new(entry: Option<UringEntry>, answers: Arc<FinishedAnswers>) -> Self {
        let aside = Vec::new();
        UringReply { entry, aside, filled: 0, answer: None, late: None, answers }
    }

    fn body(&mut self, len: usize) -> &mut [u8] {
        if let Some(entry) = &mut self.entry {
            return entry.payload_mut(len);
        }
        if self.aside.len() < len {
            self.aside.resize(len, 0);
        }
        &mut self.aside[..len]
    }

    fn record_answer(&mut self, errno: i32, len: usize) -> Result<()> {
        self.answer = Some(EntryAnswer { errno, len });
        Ok(())
    }
}

impl RequestReply for UringReply {
    fn send(&mut self, body: &[&[u8]]) -> Result<()> {
        let len = body.iter().map(|part| part.len()).sum();
        put_parts(self.body(len), body);
        self.record_answer(0, len)
    }

    fn send_errno(&mut self, errno: i32) -> Result<()> {
        self.record_answer(errno, 0)
    }

    fn room(&mut self, len: usize) -> &mut [u8] {
        self.body(len)
    }

    fn send_room(&mut self, len: usize) -> Result<()> {
        self.record_answer(0, len)
    }

    fn data(&mut self, _len: usize) -> &mut dyn ReadSink {
        self.filled = 0;
        self
    }

    fn send_data(&mut self) -> Result<()> {
        self.record_answer(0, self.filled)
    }

    fn write_source(&mut self) -> &mut dyn WriteSource {
        self
    }

    fn defer(&mut self, body: DeferredKind) -> Box<dyn DeferredReply> {
        let data = if let DeferredKind::Write(data) = body { data } else { Vec::new() };
        let reply = UringReply::new(self.entry.take(), Arc::clone(&self.answers));
        // The data of a WRITE is used where it lies, and its entry is free when the handler has
        // returned.
        let late = reply.entry.is_none().then(Arc::<LateAnswer>::default);
        self.late = late.clone();
        Box::new(UringDeferred { reply, late, data, taken: 0 })
    }
}

impl ReadSink for UringReply {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let (from, end) = (self.filled, self.filled + bytes.len());
        self.body(end)[from..].copy_from_slice(bytes);
        self.filled = end;
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<()> {
        let (from, end) = (self.filled, self.filled + len);
        self.body(end)[from..].fill(0);
        self.filled = end;
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let from = self.filled;
        let done = pread_full(fd, offset, &mut self.body(from + len)[from..])?;
        self.filled += done;
        Ok(done)
    }

    /// Lends the payload of the ring entry, which the kernel alone shares.
    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        let from = self.filled;
        Some(&mut self.body(from + len)[from..])
    }

    fn advance(&mut self, count: usize) -> Result<()> {
        self.filled += count;
        Ok(())
    }
}

/// Nothing comes through a pipe.
impl WriteSource for UringReply {
    fn remaining(&self) -> usize {
        0
    }

    fn take(&mut self, _out: &mut [u8]) -> Result<usize> {
        Ok(0)
    }

    fn drain_to(&mut self, _fd: BorrowedFd<'_>, _offset: u64, _len: usize) -> Result<usize> {
        Ok(0)
    }
}

/// A deferred reply, with the entry that it goes into.
struct UringDeferred {
    reply: UringReply,
    /// Set if the entry arrives later.
    late: Option<Arc<LateAnswer>>,
    data: Vec<u8>,
    taken: usize,
}

impl UringDeferred {
    fn finish(mut self, errno: i32, len: usize) -> Result<()> {
        if let Some(late) = &self.late {
            let body = self.reply.body(len).to_vec();
            return late.answer(errno, body, &self.reply.answers);
        }
        let mut entry = self.reply.entry.take().ok_or(Errno::EIO)?;
        entry.answer(errno, len);
        self.reply.answers.hand_over(entry)
    }
}

impl DeferredReply for UringDeferred {
    fn sink(&mut self) -> &mut dyn ReadSink {
        &mut self.reply
    }

    fn source(&mut self) -> &mut dyn WriteSource {
        self
    }

    fn send_data(self: Box<Self>) -> Result<()> {
        let filled = self.reply.filled;
        self.finish(0, filled)
    }

    fn send(mut self: Box<Self>, body: &[u8]) -> Result<()> {
        self.reply.body(body.len()).copy_from_slice(body);
        self.finish(0, body.len())
    }

    fn send_errno(self: Box<Self>, errno: i32) -> Result<()> {
        self.finish(errno, 0)
    }
}

impl WriteSource for UringDeferred {
    fn remaining(&self) -> usize {
        self.data.len() - self.taken
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize> {
        let count = MemorySource::new(&self.data[self.taken..]).take(out)?;
        self.taken += count;
        Ok(count)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize> {
        let count = MemorySource::new(&self.data[self.taken..]).drain_to(fd, offset, len)?;
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
