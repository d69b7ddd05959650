//! COMPOUND: the requests of a chain, one after the other, and their answers in one.

use std::sync::Arc;

use defuse_fs::{Errno, Ino, Result};
use defuse_probe::clock;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::chain::{self, ChainLink, LinkValues, ReceivedLink};
use defuse_wire::decode::ListingEntries;
use defuse_wire::op::op_of;
use defuse_wire::reply::CreateOut;
use defuse_wire::request::{DecodedRequest, RequestBody};
use defuse_wire::vendor::{
    self, COMPOUND, OPEN_BYTES_MAX, ResolveHead, ResolveStep, SOCKET_IO_MAX,
};
use zerocopy::FromBytes;

use super::{Dispatcher, HandlerOutcome, RequestCall};
use crate::transport::{RequestAnswer, RequestReply};

impl Dispatcher {
    /// Handles the links until one fails. All of them act for the caller of the chain.
    ///
    /// # Errors
    ///
    /// `ENOSYS` for the kernel and for clients that have not agreed on it, `EINVAL` for an invalid
    /// chain. Errors of links are in the reply.
    pub(super) fn compound(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        links: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        if self.is_kernel || !self.negotiated.uses(COMPOUND) {
            return Err(Errno::ENOSYS);
        }
        let links = chain::links(links).ok_or(Errno::EINVAL)?;
        let mut values = Vec::with_capacity(links.len());
        let mut out = Vec::new();
        for received in &links {
            // One message over a socket, or in a lane.
            let most = self.negotiated.max_read.min(SOCKET_IO_MAX);
            let room = most.saturating_sub(out.len());
            match self.handle_link(call, received, &values, room) {
                Ok((body, tells)) => {
                    values.push(tells);
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
        Ok(HandlerOutcome::Sent)
    }

    /// Handles one link, whose answer has at most `room` bytes.
    fn handle_link(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        received: &ReceivedLink<'_>,
        values: &[LinkValues],
        room: usize,
    ) -> Result<(Vec<u8>, LinkValues)> {
        let ReceivedLink { link, opcode, request } = *received;
        let mut request = request.to_vec();
        if link.uses != 0 {
            let of = values.get(link.of as usize).copied().unwrap_or_default();
            if !of.has(link) {
                return Err(Errno::ENOENT);
            }
            let fits_handle = link.uses & ChainLink::FILE == 0 || begins_with_handle(opcode);
            let fits_position = link.uses & ChainLink::POSITION == 0 || lists(opcode);
            if !fits_handle || !fits_position {
                return Err(Errno::EINVAL);
            }
            chain::complete(&mut request, link, of);
        }
        let request = DecodedRequest::parse(&request, &self.negotiated.decode_options());
        let request = request.map_err(|_| Errno::EINVAL)?;
        let most = most_bytes(&request.body).ok_or(Errno::EOPNOTSUPP)?;
        if most > room {
            return Err(Errno::E2BIG);
        }
        let (ino, started) = (Ino(request.nodeid), clock::now());
        let sent_groups = call.sent_groups.clone();
        let RequestCall { cx, unique, .. } = *call;
        let call = RequestCall { cx, unique, opcode, ino, started, sent_groups, in_chain: true };
        let mut answer = RequestAnswer::default();
        let result = self.attempt(&call, &request.body, &mut answer);
        self.recorder.with_cells(|cells| {
            cells.record(op_of(opcode), started.elapsed_ns(), result.is_ok());
            if let Ok(HandlerOutcome::Moved(count)) = &result {
                cells.add_bytes(op_of(opcode), *count as u64);
            }
        });
        let may_be_later = self.may_submit && is_submitted(opcode);
        // The reply of a file system that only takes submissions would be deferred.
        let refused = |errno| match errno {
            Errno::ENOSYS if may_be_later => Errno::EOPNOTSUPP,
            errno => errno,
        };
        result.map_err(refused)?;
        match answer.errno {
            Some(errno) if errno != 0 => Err(Errno::from_raw(errno)),
            _ => {
                let tells = read_link_values(&request, &answer.bytes);
                Ok((answer.bytes, tells))
            }
        }
    }
}

/// The maximum length of the reply to a request that may be a link. `None` for other requests:
/// without a reply, with a later reply, or with a descriptor in the reply.
fn most_bytes(body: &RequestBody<'_>) -> Option<usize> {
    /// More than any structure.
    const STRUCTURES: usize = 1024;
    Some(match body {
        RequestBody::Read(args) | RequestBody::Readdir(args) | RequestBody::Readdirplus(args) => {
            args.size as usize
        }
        RequestBody::Ioctl { args, .. } => STRUCTURES + args.out_size as usize,
        RequestBody::Getxattr { args, .. } | RequestBody::Listxattr(args) => {
            STRUCTURES + args.size as usize
        }
        RequestBody::Open(args) if args.open_flags & vendor::OPEN_WANTS_BYTES != 0 => {
            STRUCTURES + OPEN_BYTES_MAX
        }
        RequestBody::Readlink => 4096,
        RequestBody::Lookup { .. }
        | RequestBody::Getattr(_)
        | RequestBody::Statx(_)
        | RequestBody::Setattr(_)
        | RequestBody::Symlink { .. }
        | RequestBody::Mknod { .. }
        | RequestBody::Mkdir { .. }
        | RequestBody::Unlink { .. }
        | RequestBody::Rmdir { .. }
        | RequestBody::Rename { .. }
        | RequestBody::Rename2 { .. }
        | RequestBody::Link { .. }
        | RequestBody::Open(_)
        | RequestBody::Create { .. }
        | RequestBody::Tmpfile { .. }
        | RequestBody::Write { .. }
        | RequestBody::Release(_)
        | RequestBody::Fsync(_)
        | RequestBody::Flush(_)
        | RequestBody::Setxattr { .. }
        | RequestBody::Removexattr { .. }
        | RequestBody::Opendir(_)
        | RequestBody::Releasedir(_)
        | RequestBody::Fsyncdir(_)
        | RequestBody::Access(_)
        | RequestBody::Fallocate(_)
        | RequestBody::Lseek(_) => STRUCTURES,
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

fn read_link_values(request: &DecodedRequest<'_>, body: &[u8]) -> LinkValues {
    use Opcode::*;
    let of_request = LinkValues { inode: Some(request.nodeid), ..LinkValues::default() };
    let inode_of = |entry: &abi::EntryOut| (entry.nodeid != 0).then_some(entry.nodeid);
    match request.opcode {
        Lookup | Mknod | Mkdir | Symlink | Link => {
            let entry = abi::EntryOut::read_from_prefix(body).ok();
            LinkValues {
                inode: entry.and_then(|(entry, _)| inode_of(&entry)),
                ..LinkValues::default()
            }
        }
        Create | Tmpfile => match CreateOut::read_from_prefix(body) {
            Ok((out, _)) => LinkValues {
                inode: inode_of(&out.entry),
                handle: Some(out.open.fh),
                ..LinkValues::default()
            },
            Err(_) => LinkValues::default(),
        },
        Open | Opendir => {
            let open = abi::OpenOut::read_from_prefix(body).ok();
            LinkValues { handle: open.map(|(open, _)| open.fh), ..of_request }
        }
        Readdir => {
            let handle = match &request.body {
                RequestBody::Readdir(args) => Some(args.fh),
                _ => None,
            };
            let last = ListingEntries::new(body, false).last();
            let position = last.and_then(Result::ok).map(|listed| listed.next);
            LinkValues { handle, position, ..of_request }
        }
        Ioctl => LinkValues { inode: end_of_path(body), ..LinkValues::default() },
        _ => LinkValues::default(),
    }
}

/// The inode at the end of a path, from the answer to [`vendor::RESOLVE`].
fn end_of_path(body: &[u8]) -> Option<u64> {
    let (_, output) = abi::IoctlOut::read_from_prefix(body).ok()?;
    let (steps, all) = ResolveHead::read_from_prefix(output).ok()?;
    let (_, last) = ResolveStep::read_from_suffix(all).ok()?;
    let is_whole =
        steps.end == ResolveHead::FOUND && all.len().is_multiple_of(size_of::<ResolveStep>());
    is_whole.then_some(last.ino)
}
