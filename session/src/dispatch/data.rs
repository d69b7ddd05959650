//! READ and WRITE.

use std::os::fd::AsFd;
use std::sync::Arc;

use defuse_fs::{
    Errno, Fh, File, FileSystem, IoOp, LockOwner, OpenFlags, ReadArgs, ReadBuf, Result, WriteArgs,
    WriteBuf,
};

use super::{Dispatcher, HandlerOutcome, RequestCall, pod, send_success};
use crate::transport::dev::MemorySource;
use crate::transport::{DeferredKind, RequestReply};
use defuse_wire::request::{PackedRecords, RequestBody, RequestPayload};
use defuse_wire::{abi, convert, vendor};

impl Dispatcher {
    pub(super) fn read(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::ReadIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let len = args.size as usize;
        if len > self.negotiated.max_read {
            return Err(Errno::EINVAL);
        }
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        // The kernel names the owner for a read that fills no pages (fuse_direct_io of
        // fs/fuse/file.c).
        let owned = args.read_flags & abi::FUSE_READ_LOCKOWNER != 0;
        if let Some(pages) = self.pages.as_ref().filter(|_| !owned) {
            pages.fill(call.ino);
        }
        let args = ReadArgs {
            offset: args.offset,
            flags: convert::open_flags(args.flags),
            lock_owner: owned.then_some(LockOwner(args.lock_owner)),
        };
        if !self.submits_call(call) {
            let mut out = ReadBuf::new(reply.data(len), len);
            let result = self.fs.read(&call.cx, file, args, &mut out);
            let filled = out.filled_len();
            if !self.must_submit_data(call, &result) {
                result?;
                let _ = reply.send_data();
                return Ok(HandlerOutcome::Moved(filled));
            }
        }
        let deferred = reply.defer(DeferredKind::Read(len));
        self.submit(call, IoOp::Read { file, args, len }, deferred);
        Ok(HandlerOutcome::Deferred)
    }

    pub(super) fn write(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::WriteIn,
        data: &RequestPayload<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let has = |flag| args.write_flags & flag != 0;
        let args = WriteArgs {
            offset: args.offset,
            flags: convert::open_flags(args.flags),
            lock_owner: has(abi::FUSE_WRITE_LOCKOWNER).then_some(LockOwner(args.lock_owner)),
            kill_suidgid: has(abi::FUSE_WRITE_KILL_SUIDGID),
            from_cache: has(abi::FUSE_WRITE_CACHE),
        };
        let is_direct = args.lock_owner.is_some() && !args.from_cache;
        if let Some(pages) = self.pages.as_ref().filter(|_| !is_direct) {
            pages.fill(call.ino);
        }
        if !self.submits_call(call) {
            let count = match data {
                RequestPayload::Memory(bytes) => {
                    let mut source = MemorySource::new(bytes);
                    self.write_from(call, file, args, &mut WriteBuf::new(&mut source))
                }
                RequestPayload::Pipe(_) => {
                    self.write_from(call, file, args, &mut WriteBuf::new(reply.write_source()))
                }
            };
            if !self.must_submit_data(call, &count) {
                if is_direct && self.has_pages(call.ino) {
                    let deferred = reply.defer(DeferredKind::Plain);
                    self.answer_without_pages(call, (args.offset, data.len()), count, deferred);
                    return Ok(HandlerOutcome::Deferred);
                }
                let count = count?;
                pod(reply, &write_out(count))?;
                return Ok(HandlerOutcome::Moved(count));
            }
        }
        let len = data.len();
        let body = match data {
            RequestPayload::Pipe(_) if reply.is_stable() => DeferredKind::WriteInPlace,
            // The data has to outlive this request's buffer, so it is copied.
            _ => DeferredKind::Write(take_data(data, reply)?),
        };
        let deferred = reply.defer(body);
        self.submit(call, IoOp::Write { file, args, len }, deferred);
        Ok(HandlerOutcome::Deferred)
    }

    /// SETUPMAPPING: the answer has a descriptor of the memory that all mappings of the file share.
    pub(super) fn setupmapping(
        &self,
        call: &RequestCall<'_>,
        args: &abi::SetupmappingIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let memory = self.memory.as_ref().ok_or(Errno::ENOSYS)?;
        let file = File { ino: call.ino, fh: Fh(args.fh) };
        let writes = args.flags & abi::FUSE_SETUPMAPPING_FLAG_WRITE != 0;
        let fd = match args.flags {
            flags if flags & vendor::PAGES != 0 => memory.pages(&call.cx, file)?,
            flags if flags & vendor::VERSIONS != 0 => memory.versions()?,
            flags if flags & vendor::TOLD_NAMES != 0 => memory.name_memory()?,
            _ => memory.map(&call.cx, file, (args.foffset, args.len), writes)?,
        };
        // If the client has ended, so does the mapping.
        let _ = reply.send_descriptor(fd.as_fd());
        Ok(HandlerOutcome::Sent)
    }

    /// REMOVEMAPPING: as many mappings as there are items have ended.
    pub(super) fn removemapping(
        &self,
        call: &RequestCall<'_>,
        items: PackedRecords<'_, abi::RemovemappingOne>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let memory = self.memory.as_ref().ok_or(Errno::ENOSYS)?;
        for _ in items {
            memory.unmap(&call.cx, call.ino)?;
        }
        send_success(Ok(()), reply)
    }

    /// Writes. Where a reply must not be a short count, the rest of a short write is tried until an
    /// error occurs, which is then returned. Otherwise fsync(2) would succeed although a part of
    /// the data is lost.
    fn write_from(
        &self,
        call: &RequestCall<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut done = self.fs.write(&call.cx, file, args, data)?;
        while self.must_write_all(&args) && data.remaining() > 0 {
            let before = data.remaining();
            let rest = WriteArgs { offset: args.offset + done as u64, ..args };
            done += self.fs.write(&call.cx, file, rest, data)?;
            if data.remaining() >= before {
                return Err(if args.from_cache { Errno::EIO } else { Errno::ENOSPC });
            }
        }
        Ok(done)
    }

    /// True for a write whose reply must not be a short count. The kernel's write-back takes it for
    /// all bytes, and an asynchronous direct write fails with `EIO` then (`fuse_get_res_by_io()` of
    /// the kernel's fs/fuse/file.c), which programs take for a failed device. What a request does
    /// not say is if a direct write is asynchronous.
    pub(super) fn must_write_all(&self, args: &WriteArgs) -> bool {
        let may_be_async = self.pages.is_some() && args.flags.has(OpenFlags::DIRECT);
        args.from_cache || may_be_async && args.lock_owner.is_some()
    }
}

pub(super) fn write_out(count: usize) -> abi::WriteOut {
    abi::WriteOut { size: count as u32, padding: 0 }
}

/// A copy of a whole request, of which `bytes` has all but data in the transport's pipe.
pub(crate) fn copy_whole(
    bytes: &[u8],
    body: &RequestBody<'_>,
    reply: &mut dyn RequestReply,
) -> Result<Vec<u8>> {
    let mut copy = bytes.to_vec();
    if let RequestBody::Write { data: data @ RequestPayload::Pipe(_), .. } = body {
        copy.extend_from_slice(&take_data(data, reply)?);
    }
    Ok(copy)
}

/// The data of a request, wherever it is.
pub(super) fn take_data(
    data: &RequestPayload<'_>,
    reply: &mut dyn RequestReply,
) -> Result<Vec<u8>> {
    match data {
        RequestPayload::Memory(bytes) => Ok(bytes.to_vec()),
        RequestPayload::Pipe(len) => {
            let mut bytes = vec![0; *len];
            let count = reply.write_source().take(&mut bytes)?;
            bytes.truncate(count);
            Ok(bytes)
        }
    }
}
