//! Connections for the next programs of processes.

use std::os::fd::BorrowedFd;
use std::path::Path;

use defuse_fs::{Caller, Context, Errno, Fh, Ino, LockOwner, OpenFlags, Result};
use defuse_wire::abi::{IoctlIn, Opcode};
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::{
    ConnectionNumber, ConnectionNumbers, TAKE_OVER, TAKE_OVER_MAX, TakeOver,
};
use zerocopy::IntoBytes;

use crate::connection::ClientConnection;
use crate::files::ioctl_out;
use crate::init::{self, ServerAgreement};
use crate::sys::peer_user;
use crate::{RemoteClient, RemoteError, RemoteOptions, connect_socket, new_number};

/// An inode that an executed program inherits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeHandover {
    /// The inode.
    pub ino: Ino,
    /// An open file or directory of the inode.
    pub open: Option<OpenFileHandover>,
}

/// An open file or directory that an executed program inherits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFileHandover {
    /// Its handle.
    pub fh: Fh,
    /// The flags of open(2). The next program gets no further access.
    pub flags: OpenFlags,
    /// The owner of the open file's own locks.
    pub owner: LockOwner,
    /// Keep the record locks of the process on the file.
    pub process_locks: bool,
}

/// The connection of the next program, which [`RemoteClient::prepare_exec`] creates.
pub struct HandoverClient {
    /// The connection. It has only rights of its own.
    pub client: RemoteClient,
    /// The result for each handed-over inode: `ESTALE` or `EBADF` if the other connection does not
    /// have the inode or the handle.
    pub taken: Vec<Result<()>>,
}

impl HandoverClient {
    /// Connects to the same server as the socket of the connection `predecessor`, or to a server of
    /// the same user, which has no more rights. The introduction and the objects to take over are
    /// one message after the other, for which this waits once.
    pub(crate) fn connect(
        (socket, predecessor): (BorrowedFd<'_>, ConnectionNumber),
        path: &Path,
        options: RemoteOptions,
        handovers: &[InodeHandover],
    ) -> std::result::Result<HandoverClient, RemoteError> {
        let user = peer_user(socket).map_err(RemoteError::Socket)?;
        let names =
            ConnectionNumbers { predecessor, own: new_number().map_err(RemoteError::Socket)? };
        let socket = connect_socket(path, options.descriptors_from, None, |uid| uid == user)?;
        ClientConnection::prepare(&socket).map_err(RemoteError::Socket)?;
        let (connection, notices) = RemoteClient::connection(socket, options);

        let settle = TakeOver { flags: TakeOver::SETTLE, ..TakeOver::default() };
        let all: Vec<TakeOver> = handovers.iter().map(take_over).chain([settle]).collect();
        let (part, more) = all.split_at(all.len().min(TAKE_OVER_MAX));
        let (cx, patience) = (Context::new(Caller::default()), options.init_patience());
        let (mut hello, mut first) = (init::request(names), request(part.len()));
        let data = part.as_bytes();
        let (agreement, taken) = connection
            .request_pair(
                patience,
                &cx,
                (hello.finish(0), init::answer),
                (first.finish(data.len()), data, |body| results(body, part.len())),
            )
            .map_err(RemoteError::Init)?;
        let mut taken = taken.map_err(RemoteError::Heir)?;
        for part in more.chunks(TAKE_OVER_MAX) {
            let (mut request, data) = (request(part.len()), part.as_bytes());
            let decode = |body: &[u8]| results(body, part.len());
            let more = connection.request(&cx, request.finish(data.len()), data, decode);
            taken.extend(more.map_err(RemoteError::Heir)?);
        }
        // The last one, by which the rights of the other connection have ended.
        taken.pop().unwrap_or(Err(Errno::EIO)).map_err(RemoteError::Heir)?;
        let agreement = ServerAgreement::from_init_reply(&agreement)?;
        let client =
            RemoteClient::with((connection, notices), agreement, options, Some(path), names);
        Ok(HandoverClient { client, taken })
    }
}

fn take_over(handover: &InodeHandover) -> TakeOver {
    let what = TakeOver { ino: handover.ino.0, ..TakeOver::default() };
    let Some(OpenFileHandover { fh, flags, owner, process_locks }) = handover.open else {
        return what;
    };
    let locks = if process_locks { TakeOver::PROCESS_LOCKS } else { 0 };
    let (open_flags, flags) = (flags.0.into(), TakeOver::OPEN | locks);
    TakeOver { fh: fh.0, owner: owner.0, open_flags, flags, ..what }
}

/// The request [`TAKE_OVER`] for `count` handed-over objects.
fn request(count: usize) -> EncodedRequest {
    let ioctl = IoctlIn {
        cmd: TAKE_OVER,
        in_size: (count * size_of::<TakeOver>()) as u32,
        out_size: (count * size_of::<i32>()) as u32,
        ..IoctlIn::default()
    };
    EncodedRequest::new(Opcode::Ioctl, &Context::new(Caller::default()), Ino::ROOT).with(&ioctl)
}

/// The results in an answer to [`TAKE_OVER`].
fn results(body: &[u8], count: usize) -> Result<Vec<Result<()>>> {
    let output = ioctl_out(body, count * size_of::<i32>())?.output;
    let (errors, rest) = output.as_chunks();
    if errors.len() != count || !rest.is_empty() {
        return Err(Errno::EIO);
    }
    let result = |error: &[u8; 4]| match i32::from_ne_bytes(*error) {
        0 => Ok(()),
        error => Err(Errno::from_raw(error)),
    };
    Ok(errors.iter().map(result).collect())
}
