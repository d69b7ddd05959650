//! READ and WRITE, split into messages.

use std::cell::Cell;

use defuse_fs::{Context, Errno, File, LockOwner, ReadArgs, ReadBuf, Result, WriteArgs, WriteBuf};

use super::Shared;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::encode::Request;

impl Shared {
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
        let begun = out.filled();
        while out.remaining() > 0 {
            let size = out.remaining().min(self.agreement.max_read);
            let done = (out.filled() - begun) as u64;
            let offset = args.offset.checked_add(done).ok_or(Errno::EOVERFLOW)?;
            let read = abi::ReadIn {
                fh: file.fh.0,
                offset,
                size: size as u32,
                read_flags: flag_of(args.lock_owner, abi::FUSE_READ_LOCKOWNER),
                lock_owner: args.lock_owner.map_or(0, |owner| owner.0),
                flags: args.flags.0,
                padding: 0,
            };
            let request = Request::new(Opcode::Read, cx, file.ino).with(&read);
            let got = self.ask(cx, request, |body| {
                if body.len() > size {
                    return Err(Errno::EIO);
                }
                out.put(body)
            });
            self.paths.was_read(file.ino);
            match got {
                Ok(got) if got < size => break,
                Ok(_) => {}
                // Data before the error counts. A request for the rest returns the error again.
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    pub(super) fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
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
            let want = data.remaining().min(self.agreement.max_write);
            if piece.len() < want {
                piece.resize(want, 0);
            }
            let len = data.take(&mut piece[..want])?;
            match self.write_piece(cx, file, args, done as u64, &piece[..len]) {
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
        piece: &[u8],
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
        let request = Request::new(Opcode::Write, cx, file.ino).with(&write);
        let most = piece.len() as u64;
        let count = self.ask_with(cx, request, piece, |body| decode::write_out(body, most))?;
        Ok(count as usize)
    }
}

fn flag_of(owner: Option<LockOwner>, flag: u32) -> u32 {
    if owner.is_some() { flag } else { 0 }
}

thread_local! {
    /// The buffer for the data of a write, one piece at a time.
    static PIECE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}
