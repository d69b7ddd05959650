//! COMPOUND: the requests of a chain, one after the other, and their answers in one.

use std::sync::Arc;

use defuse_fs::{Errno, Ino, Result};
use defuse_probe::clock;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::chain::{self, Link, Received, Told};
use defuse_wire::decode::Listing;
use defuse_wire::op::op_of;
use defuse_wire::reply::CreateOut;
use defuse_wire::request::{Body, Request};
use defuse_wire::vendor::{self, COMPOUND, OPEN_BYTES_MAX, SOCKET_IO_MAX, Step, Steps};
use zerocopy::FromBytes;

use super::{Call, Dispatcher, Done};
use crate::transport::{Answer, Reply};

impl Dispatcher {
    /// Handles the links until one fails. All of them act for the caller of the chain.
    ///
    /// # Errors
    ///
    /// `ENOSYS` for the kernel and for clients that have not agreed on it, `EINVAL` for what is no chain. Errors of links are in the
    /// answer.
    pub(super) fn compound(
        self: &Arc<Self>,
        call: &Call<'_>,
        links: &[u8],
        reply: &mut dyn Reply,
    ) -> Result<Done> {
        if self.is_kernel || !self.negotiated.uses(COMPOUND) {
            return Err(Errno::ENOSYS);
        }
        let links = chain::links(links).ok_or(Errno::EINVAL)?;
        let mut told = Vec::with_capacity(links.len());
        let mut out = Vec::new();
        for received in &links {
            // One message over a socket, or in a lane.
            let most = self.negotiated.max_read.min(SOCKET_IO_MAX);
            let room = most.saturating_sub(out.len());
            match self.handle_link(call, received, &told, room) {
                Ok((body, tells)) => {
                    told.push(tells);
                    chain::add_answer(&mut out, 0, &body);
                }
                Err(errno) => {
                    chain::add_answer(&mut out, -errno.raw(), &[]);
                    break;
                }
            }
        }
        // A client that does not take the answer has ended, and all that it holds is released.
        let _ = reply.send(&[&out]);
        Ok(Done::Sent)
    }

    /// Handles one link, whose answer has at most `room` bytes.
    fn handle_link(
        self: &Arc<Self>,
        call: &Call<'_>,
        received: &Received<'_>,
        told: &[Told],
        room: usize,
    ) -> Result<(Vec<u8>, Told)> {
        let Received { link, opcode, request } = *received;
        let mut request = request.to_vec();
        if link.uses != 0 {
            let of = told.get(link.of as usize).copied().unwrap_or_default();
            if !of.has(link) {
                return Err(Errno::ENOENT);
            }
            let fits_handle = link.uses & Link::FILE == 0 || begins_with_handle(opcode);
            let fits_position = link.uses & Link::POSITION == 0 || lists(opcode);
            if !fits_handle || !fits_position {
                return Err(Errno::EINVAL);
            }
            chain::complete(&mut request, link, of);
        }
        let request = Request::parse(&request, &self.negotiated.decode_options());
        let request = request.map_err(|_| Errno::EINVAL)?;
        let most = most_bytes(&request.body).ok_or(Errno::EOPNOTSUPP)?;
        if most > room {
            return Err(Errno::E2BIG);
        }
        let (ino, started) = (Ino(request.nodeid), clock::now());
        let told_groups = call.told_groups.clone();
        let Call { cx, unique, .. } = *call;
        let call = Call { cx, unique, opcode, ino, started, told_groups, in_chain: true };
        let mut answer = Answer::default();
        let result = self.attempt(&call, &request.body, &mut answer);
        self.recorder.with_cells(|cells| {
            cells.record(op_of(opcode), started.elapsed_ns(), result.is_ok());
            if let Ok(Done::Moved(count)) = &result {
                cells.add_bytes(op_of(opcode), *count as u64);
            }
        });
        let may_be_later = self.may_submit && is_submitted(opcode);
        // The answer of a file system that only takes submissions would come later.
        let refused = |errno| match errno {
            Errno::ENOSYS if may_be_later => Errno::EOPNOTSUPP,
            errno => errno,
        };
        result.map_err(refused)?;
        match answer.errno {
            Some(errno) if errno != 0 => Err(Errno::from_raw(errno)),
            _ => {
                let tells = told_by(&request, &answer.bytes);
                Ok((answer.bytes, tells))
            }
        }
    }
}

/// The most bytes of the answer to a request that may be a link; `None` for others: those that nobody answers, that are answered later, and
/// those with a descriptor.
fn most_bytes(body: &Body<'_>) -> Option<usize> {
    /// More than any structure.
    const STRUCTURES: usize = 1024;
    Some(match body {
        Body::Read(args) | Body::Readdir(args) | Body::Readdirplus(args) => args.size as usize,
        Body::Ioctl { args, .. } => STRUCTURES + args.out_size as usize,
        Body::Getxattr { args, .. } | Body::Listxattr(args) => STRUCTURES + args.size as usize,
        Body::Open(args) if args.open_flags & vendor::OPEN_WANTS_BYTES != 0 => {
            STRUCTURES + OPEN_BYTES_MAX
        }
        Body::Readlink => 4096,
        Body::Lookup { .. }
        | Body::Getattr(_)
        | Body::Statx(_)
        | Body::Setattr(_)
        | Body::Symlink { .. }
        | Body::Mknod { .. }
        | Body::Mkdir { .. }
        | Body::Unlink { .. }
        | Body::Rmdir { .. }
        | Body::Rename { .. }
        | Body::Rename2 { .. }
        | Body::Link { .. }
        | Body::Open(_)
        | Body::Create { .. }
        | Body::Tmpfile { .. }
        | Body::Write { .. }
        | Body::Release(_)
        | Body::Fsync(_)
        | Body::Flush(_)
        | Body::Setxattr { .. }
        | Body::Removexattr { .. }
        | Body::Opendir(_)
        | Body::Releasedir(_)
        | Body::Fsyncdir(_)
        | Body::Access(_)
        | Body::Fallocate(_)
        | Body::Lseek(_) => STRUCTURES,
        _ => return None,
    })
}

/// True for operations that a file system may finish later.
fn is_submitted(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Read | Opcode::Write | Opcode::Fsync | Opcode::Fsyncdir)
}

/// True if the structure of the request begins with a handle.
fn begins_with_handle(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(
        opcode,
        Read | Write
            | Release
            | Fsync
            | Flush
            | Readdir
            | Readdirplus
            | Releasedir
            | Fsyncdir
            | Fallocate
            | Lseek
            | Ioctl
    )
}

fn lists(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::Readdir | Opcode::Readdirplus)
}

fn told_by(request: &Request<'_>, body: &[u8]) -> Told {
    use Opcode::*;
    let of_request = Told { inode: Some(request.nodeid), ..Told::default() };
    let inode_of = |entry: &abi::EntryOut| (entry.nodeid != 0).then_some(entry.nodeid);
    match request.opcode {
        Lookup | Mknod | Mkdir | Symlink | Link => {
            let entry = abi::EntryOut::read_from_prefix(body).ok();
            Told { inode: entry.and_then(|(entry, _)| inode_of(&entry)), ..Told::default() }
        }
        Create | Tmpfile => match CreateOut::read_from_prefix(body) {
            Ok((out, _)) => {
                Told { inode: inode_of(&out.entry), handle: Some(out.open.fh), ..Told::default() }
            }
            Err(_) => Told::default(),
        },
        Open | Opendir => {
            let open = abi::OpenOut::read_from_prefix(body).ok();
            Told { handle: open.map(|(open, _)| open.fh), ..of_request }
        }
        Readdir => {
            let handle = match &request.body {
                Body::Readdir(args) => Some(args.fh),
                _ => None,
            };
            let last = Listing::new(body, false).last();
            let position = last.and_then(Result::ok).map(|listed| listed.next);
            Told { handle, position, ..of_request }
        }
        Ioctl => Told { inode: end_of_path(body), ..Told::default() },
        _ => Told::default(),
    }
}

/// The inode at the end of a path, from the answer to [`vendor::RESOLVE`].
fn end_of_path(body: &[u8]) -> Option<u64> {
    let (_, output) = abi::IoctlOut::read_from_prefix(body).ok()?;
    let (steps, all) = Steps::read_from_prefix(output).ok()?;
    let (_, last) = Step::read_from_suffix(all).ok()?;
    let is_whole = steps.end == Steps::FOUND && all.len().is_multiple_of(size_of::<Step>());
    is_whole.then_some(last.ino)
}
