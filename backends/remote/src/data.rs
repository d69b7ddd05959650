//! READ and WRITE, split into messages.

use std::cell::Cell;

use defuse_fs::{
    Context, Errno, File, LockOwner, OpenFlags, ReadArgs, ReadBuf, Result, WriteArgs, WriteBuf,
};

use defuse_ring::ClientLane;

use super::lanes::LaneGuard;
use super::{RemoteShared, lock};
use crate::reply_log::log_decode_error;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::encode::EncodedRequest;
use defuse_wire::reply::HEADER_LEN;
use defuse_wire::request::WRITE_LEAD;

/// Bytes of a READ through shared memory. It is longer with thousands of groups of its caller.
const READ_MOST: usize = 4096;

/// True if a reply had fewer bytes than requested.
struct ShortReply(bool);

impl RemoteShared {
    pub(super) fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        if self.read_whole(file, args, out) || self.read_pages(cx, file, args, out) {
            return Ok(());
        }
        let begun = out.filled_len();
        while out.remaining() > 0 {
            let done = (out.filled_len() - begun) as u64;
            let offset = args.offset.checked_add(done).ok_or(Errno::EOVERFLOW)?;
            let got = self.read_piece(cx, file, ReadArgs { offset, ..args }, out);
            self.paths.record_read(file.ino);
            match got {
                Ok(ShortReply(true)) => break,
                Ok(ShortReply(false)) => {}
                // Data before the error counts. A request for the rest returns the error again.
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Reads as much as one request can.
    fn read_piece(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<ShortReply> {
        self.run_request(cx, Opcode::Read, || {
            let most = out.remaining();
            let (large, small) = (self.agreement.max_read, self.agreement.max_received());
            let (mut held, mut size) = take_lane_for(most, (large, small), |size| {
                self.connection.take_lane(READ_MOST, HEADER_LEN + size)
            })?;
            let request_of = |size: usize| {
                let read = abi::ReadIn {
                    fh: file.fh.0,
                    offset: args.offset,
                    size: size as u32,
                    read_flags: flag_of(args.lock_owner, abi::FUSE_READ_LOCKOWNER),
                    lock_owner: args.lock_owner.map_or(0, |owner| owner.0),
                    flags: args.flags.0,
                    padding: 0,
                };
                self.with_groups(cx, EncodedRequest::new(Opcode::Read, cx, file.ino).with(&read))
            };
            let mut request = request_of(size);
            if request.finish(0).len() > READ_MOST {
                (held, size) = (None, size.min(small));
                request = request_of(size);
            }
            let head = request.finish(0);
            let got = match held {
                Some(held) => self.connection.exchange_data(held, cx, head, size, out)?,
                None => self.connection.request_by_message(cx, head, &[], |body| {
                    let fits = body.len() <= size;
                    let put = if fits { out.put(body) } else { Err(Errno::EIO) };
                    log_decode_error(Opcode::Read, body.len(), put)
                })?,
            };
            Ok(ShortReply(got < size))
        })
    }

    pub(super) fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        // The kernel writes pages of its cache at their places.
        let is_append =
            self.options.appends_at_size && args.flags.has(OpenFlags::APPEND) && !args.from_cache;
        let _appending = is_append.then(|| lock(&self.appends));
        let args = match is_append {
            true => WriteArgs { offset: self.getattr(cx, file.ino, Some(file.fh))?.size, ..args },
            false => args,
        };
        // Taken out of the thread-local, because a listener of notifications may write meanwhile.
        // An ending thread no longer has one.
        let mut piece = PIECE.try_with(Cell::take).unwrap_or_default();
        let written = self.write_pieces(cx, file, args, data, &mut piece);
        let _ = PIECE.try_with(|kept| kept.set(piece));
        written
    }

    fn write_pieces(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
        piece: &mut Vec<u8>,
    ) -> Result<usize> {
        let mut done = 0;
        loop {
            let most = data.remaining();
            let (large, small) = (self.agreement.max_write, self.agreement.max_sent());
            let (held, want) = take_lane_for(most, (large, small), |size| {
                self.connection.take_lane(WRITE_LEAD + size, ClientLane::longest())
            })?;
            let (len, written) = match data.borrow() {
                // Read in one message, without a copy of ours between.
                Some(bytes) if bytes.len() >= want => {
                    let bytes = &bytes[..want];
                    let written = self.write_piece(cx, file, args, done as u64, (bytes, held));
                    if written.is_ok() {
                        data.skip(want)?;
                    }
                    (want, written)
                }
                _ => {
                    if piece.len() < want {
                        piece.resize(want, 0);
                    }
                    let len = data.take(&mut piece[..want])?;
                    let bytes = &piece[..len];
                    (len, self.write_piece(cx, file, args, done as u64, (bytes, held)))
                }
            };
            match written {
                // A program would take the result for a success, or repeat the write for ever.
                Ok(0) if len > 0 && done == 0 => return Err(Errno::EIO),
                Ok(count) => {
                    done += count;
                    if count < len || data.remaining() == 0 {
                        return Ok(done);
                    }
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => return Ok(done),
            }
        }
    }

    fn write_piece(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        done: u64,
        (piece, held): (&[u8], Option<LaneGuard<'_>>),
    ) -> Result<usize> {
        let kills = args.kill_suidgid && self.agreement.uses(abi::FUSE_HANDLE_KILLPRIV_V2);
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let write = abi::WriteIn {
            fh: file.fh.0,
            offset: args.offset.checked_add(done).ok_or(Errno::EFBIG)?,
            size: piece.len() as u32,
            write_flags: flag_of(args.lock_owner, abi::FUSE_WRITE_LOCKOWNER)
                | flag(kills, abi::FUSE_WRITE_KILL_SUIDGID)
                | flag(args.from_cache, abi::FUSE_WRITE_CACHE),
            lock_owner: args.lock_owner.map_or(0, |owner| owner.0),
            flags: args.flags.0,
            padding: 0,
        };
        let mut request = EncodedRequest::new(Opcode::Write, cx, file.ino).with(&write);
        let most = piece.len() as u64;
        let count = self.run_request(cx, Opcode::Write, || {
            let head = request.finish(piece.len());
            let decode = |body: &[u8]| {
                log_decode_error(Opcode::Write, body.len(), decode::write_out(body, most))
            };
            match held {
                Some(held) => self.connection.exchange(held, cx, head, piece, decode),
                None => self.connection.request_by_message(cx, head, piece, decode),
            }
        })?;
        Ok(count as usize)
    }
}

/// Returns a lane for a message with as many of `most` bytes as fit, and their number. Without a
/// lane that takes `large` messages, the number is `small` at most.
fn take_lane_for<'a>(
    most: usize,
    (large, small): (usize, usize),
    held: impl Fn(usize) -> Result<Option<LaneGuard<'a>>>,
) -> Result<(Option<LaneGuard<'a>>, usize)> {
    let size = most.min(large);
    if size > small
        && let Some(held) = held(size)?
    {
        return Ok((Some(held), size));
    }
    let size = size.min(small);
    Ok((held(size)?, size))
}

fn flag_of(owner: Option<LockOwner>, flag: u32) -> u32 {
    if owner.is_some() { flag } else { 0 }
}

thread_local! {
    /// The buffer for the data of a write, one piece at a time.
    static PIECE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}
