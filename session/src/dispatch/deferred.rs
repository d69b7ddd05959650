//! Deferred requests, which are answered later: how an INTERRUPT finds them, and how they are
//! answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{
    Completion, Errno, File, Ino, InterruptToken, Io, IoOp, LockRequest, LockWait, Notify,
    ReadSink, Result, SupplementaryGroups, WriteSource,
};
use defuse_probe::clock::ClockMoment;
use zerocopy::IntoBytes;

use super::data::write_out;
use super::{Dispatcher, RequestCall};
use crate::transport::DeferredReply;
use crate::user_share::CountGuard;
use defuse_wire::abi::Opcode;
use defuse_wire::op::op_of;

/// The interrupts of requests that no worker holds, by request.
#[derive(Default)]
pub(super) struct DeferredTable {
    shards: [Mutex<HashMap<u64, Arc<InterruptToken>>>; 8],
    /// The session is over. Set before the shards are searched for the last time.
    over: AtomicBool,
}

impl DeferredTable {
    /// Returns the token of a request that begins. The token is interrupted if the session is over:
    /// its client is gone, and a lock that is granted later would have no owner.
    fn insert(&self, unique: u64) -> Arc<InterruptToken> {
        let token = Arc::new(InterruptToken::default());
        self.shard(unique).insert(unique, Arc::clone(&token));
        if self.over.load(Ordering::SeqCst) {
            token.trip();
        }
        token
    }

    fn remove(&self, unique: u64) {
        self.shard(unique).remove(&unique);
    }

    pub(super) fn get(&self, unique: u64) -> Option<Arc<InterruptToken>> {
        self.shard(unique).get(&unique).cloned()
    }

    /// Interrupts all present and future requests.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        let lock = |shard: &'_ Mutex<HashMap<_, _>>| {
            let shard = shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            shard.values().cloned().collect::<Vec<Arc<InterruptToken>>>()
        };
        self.shards.iter().flat_map(lock).for_each(|token| token.trip());
    }

    fn shard(&self, unique: u64) -> MutexGuard<'_, HashMap<u64, Arc<InterruptToken>>> {
        // Requests are numbered in steps of two; the lowest bit marks an INTERRUPT.
        let shard = &self.shards[(unique >> 1) as usize % self.shards.len()];
        shard.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Bytes of the submitted operations of a client. With more, its operations hold workers, whose
/// number is limited. The kernel limits its own requests.
const IN_FLIGHT: usize = 16 << 20;

/// Bytes that an operation takes in addition to its data.
const BESIDE: usize = 64 << 10;

/// Bytes of submitted operations that were not finished.
#[derive(Default)]
pub(super) struct BytesInFlight(AtomicUsize);

impl BytesInFlight {
    fn has_room(&self) -> bool {
        self.0.load(Ordering::Relaxed) < IN_FLIGHT
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn remove(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn bytes_of(op: IoOp) -> usize {
    BESIDE
        + match op {
            IoOp::Read { len, .. } | IoOp::Write { len, .. } => len,
            IoOp::Fsync { .. } | IoOp::Fsyncdir { .. } | IoOp::Syncfs => 0,
        }
}

impl Dispatcher {
    /// True if reads, writes and operations that make them durable are submitted.
    pub(super) fn submits(&self) -> bool {
        self.submits.load(Ordering::Relaxed)
    }

    /// True if this call is submitted when that is possible.
    pub(super) fn submits_call(&self, call: &RequestCall<'_>) -> bool {
        self.submits() && !call.in_chain && (self.is_kernel || self.has_room_in_flight())
    }

    /// True while the client has few submitted operations, and so has its user.
    fn has_room_in_flight(&self) -> bool {
        self.in_flight.has_room()
            && self.share.as_ref().is_none_or(|share| share.queued_bytes.has_room())
    }

    /// Counts bytes of a request that holds no thread, until the result is dropped.
    pub(crate) fn count_queued(&self, bytes: usize) -> Option<CountGuard> {
        self.share.as_ref().map(|share| share.queued_bytes.add(bytes))
    }

    /// True if a call that could have been submitted has failed because the file system only takes
    /// submissions, as [`defuse_fs::Caps::submits`] allows.
    pub(super) fn must_submit<T>(&self, call: &RequestCall<'_>, result: &Result<T>) -> bool {
        self.may_submit && !call.in_chain && matches!(result, Err(Errno::ENOSYS))
    }

    /// Like [`must_submit`](Self::must_submit), for reads and writes: all of them are submitted
    /// then.
    pub(super) fn must_submit_data<T>(&self, call: &RequestCall<'_>, result: &Result<T>) -> bool {
        let must = self.must_submit(call, result);
        if must {
            self.submits.store(true, Ordering::Relaxed);
        }
        must
    }

    /// Submits an operation, to be finished at any time.
    pub(super) fn submit(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        op: IoOp,
        reply: Box<dyn DeferredReply>,
    ) {
        let whole = match op {
            IoOp::Write { args, len, .. } if self.must_write_all(&args) => len,
            _ => 0,
        };
        let is_cached = matches!(op, IoOp::Write { args, .. } if args.from_cache);
        let interrupt = self.begin_deferred(call);
        let bytes = bytes_of(op);
        self.in_flight.add(bytes);
        let mut completion = Box::new(self.completion(call, reply, (whole, bytes)));
        completion.short = if is_cached { Errno::EIO } else { Errno::ENOSPC };
        completion.direct = match op {
            IoOp::Write { args, len, .. } if args.lock_owner.is_some() && !args.from_cache => {
                Some((call.ino, args.offset, len))
            }
            _ => None,
        };
        let io = Io::new(op, call.cx.caller, call.unique, interrupt, completion);
        self.fs.submit(io.with_groups(self.groups_of(call)).from_origin(self.origin));
    }

    /// True if the kernel may have pages of `ino` that a direct write did not drop.
    pub(super) fn has_pages(&self, ino: Ino) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.may_have(ino))
    }

    /// Answers a direct write that has been carried out, after the pages of its range were dropped.
    pub(super) fn answer_without_pages(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        (offset, len): (u64, usize),
        result: Result<usize>,
        reply: Box<dyn DeferredReply>,
    ) {
        self.begin_deferred(call);
        let mut completion = Box::new(self.completion(call, reply, (0, 0)));
        completion.direct = Some((call.ino, offset, len));
        completion.finish(result);
    }

    /// Waits for a lock.
    pub(super) fn wait_for_lock(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        (file, lock): (File, LockRequest),
        reply: Box<dyn DeferredReply>,
    ) {
        let interrupt = self.begin_deferred(call);
        let completion = Box::new(self.completion(call, reply, (0, 0)));
        let answer = move |taken: Result<()>| completion.finish(taken.map(|()| 0));
        let (caller, answer) = (call.cx.caller, Box::new(answer));
        let wait = LockWait::new((file, lock), caller, call.unique, interrupt, answer);
        self.fs.setlkw(wait.with_groups(self.groups_of(call)).from_origin(self.origin));
    }

    fn groups_of(&self, call: &RequestCall<'_>) -> Arc<dyn SupplementaryGroups> {
        Arc::clone(call.sent_groups.as_ref().unwrap_or(&self.groups))
    }

    fn begin_deferred(&self, call: &RequestCall<'_>) -> Arc<InterruptToken> {
        let interrupt = self.deferred.insert(call.unique);
        if call.cx.is_interrupted() {
            interrupt.trip();
        }
        interrupt
    }

    fn completion(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        reply: Box<dyn DeferredReply>,
        (whole, in_flight): (usize, usize),
    ) -> KernelCompletion {
        KernelCompletion {
            whole,
            short: Errno::EIO,
            in_flight,
            _queued: self.count_queued(in_flight),
            direct: None,
            dispatcher: Arc::clone(self),
            reply,
            unique: call.unique,
            opcode: call.opcode,
            started: call.started,
        }
    }
}

/// The kernel's end of an [`Io`].
struct KernelCompletion {
    /// Number of bytes that must all be written, otherwise the reply is an error
    /// ([`Dispatcher::must_write_all`]).
    whole: usize,
    /// That error.
    short: Errno,
    /// Counted in [`BytesInFlight`].
    in_flight: usize,
    /// Bytes counted for the user of the client.
    _queued: Option<CountGuard>,
    /// The range of a direct write, of which the kernel may have pages.
    direct: Option<(Ino, u64, usize)>,
    dispatcher: Arc<Dispatcher>,
    reply: Box<dyn DeferredReply>,
    unique: u64,
    opcode: Opcode,
    started: ClockMoment,
}

impl Completion for KernelCompletion {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self.reply.sink()
    }

    fn source(&mut self) -> &mut dyn WriteSource {
        self.reply.source()
    }

    fn finish(mut self: Box<Self>, result: Result<usize>) {
        // A write that failed may have changed a part.
        if let Some((ino, offset, len)) = self.direct.take()
            && self.dispatcher.has_pages(ino)
        {
            let dispatcher = Arc::clone(&self.dispatcher);
            let job = move || {
                // The kernel may have forgotten the inode, and its pages with it.
                let _ = self.dispatcher.notify.invalidate_inode(ino, Some((offset, len as u64)));
                self.finish(result);
            };
            if let Some(pages) = &dispatcher.pages {
                pages.run(Box::new(job));
            }
            return;
        }
        // Removed from the table first: once the reply is sent, the kernel may use the number
        // again.
        self.dispatcher.deferred.remove(self.unique);
        self.dispatcher.in_flight.remove(self.in_flight);
        let result = match result {
            Ok(count) if count < self.whole => Err(self.short),
            other => other,
        };
        // An error (ENOENT) means that the caller no longer waits. The reply granted nothing, so
        // nothing is undone.
        let _ = match (self.opcode, result) {
            (_, Err(errno)) => self.reply.send_errno(errno.raw()),
            (Opcode::Read, Ok(_)) => self.reply.send_data(),
            (Opcode::Write, Ok(count)) => self.reply.send(write_out(count).as_bytes()),
            (_, Ok(_)) => self.reply.send_errno(0),
        };
        let (op, ns) = (op_of(self.opcode), self.started.elapsed_ns());
        self.dispatcher.recorder.with_cells(|cells| {
            cells.record(op, ns, result.is_ok());
            if let (Opcode::Read | Opcode::Write, Ok(count)) = (self.opcode, result) {
                cells.add_bytes(op, count as u64);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::InterruptCheck;

    use super::*;

    /// A lock granted to such a request would never be released.
    #[test]
    fn a_request_that_begins_after_the_end_of_the_session_is_interrupted() {
        let table = DeferredTable::default();
        let before = table.insert(2);
        assert!(!before.is_interrupted());
        table.end();
        assert!(before.is_interrupted() && table.insert(4).is_interrupted());
    }
}
