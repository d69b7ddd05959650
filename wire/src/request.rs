//! Decodes requests, without I/O and without allocation.
//!
//! A request is a header, the opcode's structure, and names or data. On `/dev/fuse` they are
//! contiguous ([`DecodedRequest::parse`]); in an io_uring entry the three are separate
//! ([`DecodedRequest::parse_split`]); with splice the data of a WRITE is still in a pipe
//! ([`DecodeOptions::payload_in_pipe`]).
//!
//! Names are passed as the kernel sent them, without their NUL. They are validated when they are
//! converted to a [`Name`](defuse_fs::Name).

mod error;
mod ext;
mod reader;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
#[cfg(test)]
mod tests;

pub use error::{DecodeError, DecodeProblem};
pub use ext::{RequestExtensions, SecurityContext, SecurityContexts};
pub use reader::PackedRecords;

use crate::abi::{self, InHeader, Opcode};
use crate::chain::CompoundIn;
use reader::ArgumentReader;
use zerocopy::FromBytes;

/// The negotiated options, and the location of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeOptions {
    /// [`abi::FUSE_SETXATTR_EXT`] was negotiated.
    pub setxattr_ext: bool,
    /// The buffer may end where the data of a WRITE or NOTIFY_REPLY begins.
    pub payload_in_pipe: bool,
}

/// One decoded request, borrowing names and data from the buffer.
#[derive(Clone, Copy, Debug)]
pub struct DecodedRequest<'a> {
    /// The number for the reply, as received (also of a request sent again).
    pub unique: u64,
    /// The operation.
    pub opcode: Opcode,
    /// The inode, or the directory if the body has a name.
    pub nodeid: u64,
    /// The caller's user id; [`abi::FUSE_INVALID_UIDGID`] if it is not mapped on an idmapped mount.
    pub uid: u32,
    /// The caller's group id, or [`abi::FUSE_INVALID_UIDGID`].
    pub gid: u32,
    /// The caller's thread id in the server's pid namespace; 0 for the
    /// kernel's own requests.
    pub pid: u32,
    /// All supplementary groups of the caller, as sent by a client in the kernel's place.
    pub caller_groups: Option<PackedRecords<'a, u32>>,
    /// The arguments.
    pub body: RequestBody<'a>,
}

/// Bytes of a WRITE before its data.
pub const WRITE_LEAD: usize = size_of::<InHeader>() + size_of::<abi::WriteIn>();

/// The data of a WRITE or NOTIFY_REPLY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPayload<'a> {
    /// In memory.
    Memory(&'a [u8]),
    /// This many bytes, still in the transport's pipe.
    Pipe(usize),
}

impl RequestPayload<'_> {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        match self {
            RequestPayload::Memory(data) => data.len(),
            RequestPayload::Pipe(len) => *len,
        }
    }

    /// True if there is no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The arguments of each opcode. `args` is the kernel's structure.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each variant is the opcode of its name, documented there")]
pub enum RequestBody<'a> {
    Lookup { name: &'a [u8] },
    Forget(abi::ForgetIn),
    Getattr(abi::GetattrIn),
    Setattr(abi::SetattrIn),
    Readlink,
    Symlink { name: &'a [u8], target: &'a [u8], ext: RequestExtensions<'a> },
    Mknod { args: abi::MknodIn, name: &'a [u8], ext: RequestExtensions<'a> },
    Mkdir { args: abi::MkdirIn, name: &'a [u8], ext: RequestExtensions<'a> },
    Unlink { name: &'a [u8] },
    Rmdir { name: &'a [u8] },
    Rename { args: abi::RenameIn, name: &'a [u8], newname: &'a [u8] },
    Link { args: abi::LinkIn, name: &'a [u8] },
    Open(abi::OpenIn),
    Read(abi::ReadIn),
    Write { args: abi::WriteIn, data: RequestPayload<'a> },
    Statfs,
    Release(abi::ReleaseIn),
    Fsync(abi::FsyncIn),
    Setxattr { args: abi::SetxattrIn, name: &'a [u8], value: &'a [u8] },
    Getxattr { args: abi::GetxattrIn, name: &'a [u8] },
    Listxattr(abi::GetxattrIn),
    Removexattr { name: &'a [u8] },
    Flush(abi::FlushIn),
    Init(abi::InitIn),
    Opendir(abi::OpenIn),
    Readdir(abi::ReadIn),
    Releasedir(abi::ReleaseIn),
    Fsyncdir(abi::FsyncIn),
    Getlk(abi::LkIn),
    Setlk(abi::LkIn),
    Setlkw(abi::LkIn),
    Access(abi::AccessIn),
    Create { args: abi::CreateIn, name: &'a [u8], ext: RequestExtensions<'a> },
    Interrupt(abi::InterruptIn),
    Bmap(abi::BmapIn),
    Destroy,
    Ioctl { args: abi::IoctlIn, data: &'a [u8] },
    Poll(abi::PollIn),
    NotifyReply { args: abi::NotifyRetrieveIn, data: RequestPayload<'a> },
    BatchForget(PackedRecords<'a, abi::ForgetOne>),
    Fallocate(abi::FallocateIn),
    Readdirplus(abi::ReadIn),
    Rename2 { args: abi::Rename2In, name: &'a [u8], newname: &'a [u8] },
    Lseek(abi::LseekIn),
    CopyFileRange(abi::CopyFileRangeIn),
    Setupmapping(abi::SetupmappingIn),
    Removemapping(PackedRecords<'a, abi::RemovemappingOne>),
    Syncfs(abi::SyncfsIn),
    Tmpfile { args: abi::CreateIn, name: &'a [u8], ext: RequestExtensions<'a> },
    Statx(abi::StatxIn),
    CopyFileRange64(abi::CopyFileRangeIn),
    Compound { chain: &'a [u8] },
    CuseInit(abi::CuseInitIn),
}

/// Decodes the header of the request at the start of `buf`, for a transport that needs the length
/// first.
pub fn peek(buf: &[u8]) -> Result<InHeader, DecodeError> {
    let truncated = DecodeProblem::Truncated { need: size_of::<InHeader>(), have: buf.len() };
    match InHeader::read_from_prefix(buf) {
        Ok((header, _)) => Ok(header),
        Err(_) => Err(DecodeError { opcode: None, unique: None, problem: truncated }),
    }
}

impl<'a> DecodedRequest<'a> {
    /// Decodes the result of one `read(2)` of `/dev/fuse`. The length in the header must equal the
    /// length of the buffer, plus the data in the pipe if any.
    pub fn parse(
        buf: &'a [u8],
        options: &DecodeOptions,
    ) -> Result<DecodedRequest<'a>, DecodeError> {
        let header = peek(buf)?;
        let args = &buf[size_of::<InHeader>()..];
        let in_pipe = (header.len as usize).checked_sub(buf.len());
        match in_pipe {
            Some(0) => {}
            Some(_) if options.payload_in_pipe => {}
            _ => {
                let problem =
                    DecodeProblem::Length { header: header.len as usize, read: buf.len() };
                return Err(DecodeError::new(&header, problem));
            }
        }
        let pipe = in_pipe.unwrap_or(0);
        Self::decode(&header, ArgumentReader::contiguous(args, pipe), options)
    }

    /// Decodes an io_uring entry: `header` and `op` are the two halves of [`abi::UringReqHeader`],
    /// and `payload` is its buffer, cut to `payload_sz`.
    ///
    /// `op` may be longer than the opcode's structure; the header's length determines the part that
    /// is used.
    pub fn parse_split(
        header: &[u8],
        op: &'a [u8],
        payload: &'a [u8],
        options: &DecodeOptions,
    ) -> Result<DecodedRequest<'a>, DecodeError> {
        let header = peek(header)?;
        let op_len = (header.len as usize).checked_sub(size_of::<InHeader>() + payload.len());
        let Some(op) = op_len.and_then(|len| op.get(..len)) else {
            let read = size_of::<InHeader>() + op.len() + payload.len();
            let problem = DecodeProblem::Length { header: header.len as usize, read };
            return Err(DecodeError::new(&header, problem));
        };
        Self::decode(&header, ArgumentReader::split(op, payload), options)
    }

    /// True if the kernel sent this request before, to a server that has ended
    /// ([`abi::NotifyCode::Resend`]). It may have been executed already.
    pub fn is_resend(&self) -> bool {
        self.unique & abi::FUSE_UNIQUE_RESEND != 0
    }

    fn decode(
        header: &InHeader,
        reader: ArgumentReader<'a>,
        options: &DecodeOptions,
    ) -> Result<DecodedRequest<'a>, DecodeError> {
        let fail = |problem| DecodeError::new(header, problem);
        let opcode = Opcode::from_u32(header.opcode).ok_or(fail(DecodeProblem::UnknownOpcode))?;
        let (body, caller_groups) = body(opcode, header, reader, options).map_err(fail)?;
        let InHeader { unique, nodeid, uid, gid, pid, .. } = *header;
        Ok(DecodedRequest { unique, opcode, nodeid, uid, gid, pid, caller_groups, body })
    }
}

/// Decodes the arguments, with one arm for each opcode, in numeric order.
fn body<'a>(
    opcode: Opcode,
    header: &InHeader,
    mut r: ArgumentReader<'a>,
    options: &DecodeOptions,
) -> Result<(RequestBody<'a>, Option<PackedRecords<'a, u32>>), DecodeProblem> {
    // Extensions are always the last argument, and are cut off first.
    let ext = r.extensions(header.total_extlen)?;
    let body = match opcode {
        Opcode::Lookup => RequestBody::Lookup { name: r.name()? },
        Opcode::Forget => RequestBody::Forget(r.read_fixed()?),
        Opcode::Getattr => RequestBody::Getattr(r.read_fixed()?),
        Opcode::Setattr => RequestBody::Setattr(r.read_fixed()?),
        Opcode::Readlink => RequestBody::Readlink,
        Opcode::Symlink => RequestBody::Symlink { name: r.name()?, target: r.name()?, ext },
        Opcode::Mknod => RequestBody::Mknod { args: r.read_fixed()?, name: r.name()?, ext },
        Opcode::Mkdir => RequestBody::Mkdir { args: r.read_fixed()?, name: r.name()?, ext },
        Opcode::Unlink => RequestBody::Unlink { name: r.name()? },
        Opcode::Rmdir => RequestBody::Rmdir { name: r.name()? },
        Opcode::Rename => {
            RequestBody::Rename { args: r.read_fixed()?, name: r.name()?, newname: r.name()? }
        }
        Opcode::Link => RequestBody::Link { args: r.read_fixed()?, name: r.name()? },
        Opcode::Open => RequestBody::Open(r.read_fixed()?),
        Opcode::Read => RequestBody::Read(r.read_fixed()?),
        Opcode::Write => {
            let args: abi::WriteIn = r.read_fixed()?;
            RequestBody::Write { args, data: r.payload(args.size)? }
        }
        Opcode::Statfs => RequestBody::Statfs,
        Opcode::Release => RequestBody::Release(r.read_fixed()?),
        Opcode::Fsync => RequestBody::Fsync(r.read_fixed()?),
        Opcode::Setxattr => setxattr(&mut r, options)?,
        Opcode::Getxattr => RequestBody::Getxattr { args: r.read_fixed()?, name: r.name()? },
        Opcode::Listxattr => RequestBody::Listxattr(r.read_fixed()?),
        Opcode::Removexattr => RequestBody::Removexattr { name: r.name()? },
        Opcode::Flush => RequestBody::Flush(r.read_fixed()?),
        Opcode::Init => RequestBody::Init(r.read_growing(abi::INIT_IN_SIZE_7_35)?),
        Opcode::Opendir => RequestBody::Opendir(r.read_fixed()?),
        Opcode::Readdir => RequestBody::Readdir(r.read_fixed()?),
        Opcode::Releasedir => RequestBody::Releasedir(r.read_fixed()?),
        Opcode::Fsyncdir => RequestBody::Fsyncdir(r.read_fixed()?),
        Opcode::Getlk => RequestBody::Getlk(r.read_fixed()?),
        Opcode::Setlk => RequestBody::Setlk(r.read_fixed()?),
        Opcode::Setlkw => RequestBody::Setlkw(r.read_fixed()?),
        Opcode::Access => RequestBody::Access(r.read_fixed()?),
        Opcode::Create => RequestBody::Create { args: r.read_fixed()?, name: r.name()?, ext },
        Opcode::Interrupt => RequestBody::Interrupt(r.read_fixed()?),
        Opcode::Bmap => RequestBody::Bmap(r.read_fixed()?),
        Opcode::Destroy => RequestBody::Destroy,
        Opcode::Ioctl => {
            let args: abi::IoctlIn = r.read_fixed()?;
            RequestBody::Ioctl { args, data: r.data(args.in_size)? }
        }
        Opcode::Poll => RequestBody::Poll(r.read_fixed()?),
        Opcode::NotifyReply => {
            let args: abi::NotifyRetrieveIn = r.read_fixed()?;
            RequestBody::NotifyReply { args, data: r.payload(args.size)? }
        }
        Opcode::BatchForget => {
            let args: abi::BatchForgetIn = r.read_fixed()?;
            RequestBody::BatchForget(r.records(args.count)?)
        }
        Opcode::Fallocate => RequestBody::Fallocate(r.read_fixed()?),
        Opcode::Readdirplus => RequestBody::Readdirplus(r.read_fixed()?),
        Opcode::Rename2 => {
            RequestBody::Rename2 { args: r.read_fixed()?, name: r.name()?, newname: r.name()? }
        }
        Opcode::Lseek => RequestBody::Lseek(r.read_fixed()?),
        Opcode::CopyFileRange => RequestBody::CopyFileRange(r.read_fixed()?),
        Opcode::Setupmapping => RequestBody::Setupmapping(r.read_fixed()?),
        Opcode::Removemapping => {
            let args: abi::RemovemappingIn = r.read_fixed()?;
            RequestBody::Removemapping(r.records(args.count)?)
        }
        Opcode::Syncfs => RequestBody::Syncfs(r.read_fixed()?),
        Opcode::Tmpfile => RequestBody::Tmpfile { args: r.read_fixed()?, name: r.name()?, ext },
        Opcode::Statx => RequestBody::Statx(r.read_fixed()?),
        Opcode::CopyFileRange64 => RequestBody::CopyFileRange64(r.read_fixed()?),
        Opcode::Compound => {
            let args: CompoundIn = r.read_fixed()?;
            RequestBody::Compound { chain: r.data(args.len)? }
        }
        Opcode::CuseInit => RequestBody::CuseInit(r.read_fixed()?),
    };
    r.finish()?;
    Ok((body, ext.caller_groups))
}

/// Decodes SETXATTR, whose structure has one of two negotiated sizes.
fn setxattr<'a>(
    r: &mut ArgumentReader<'a>,
    options: &DecodeOptions,
) -> Result<RequestBody<'a>, DecodeProblem> {
    let args: abi::SetxattrIn = match options.setxattr_ext {
        true => r.read_fixed()?,
        false => r.prefix(abi::FUSE_COMPAT_SETXATTR_IN_SIZE)?,
    };
    Ok(RequestBody::Setxattr { args, name: r.name()?, value: r.data(args.size)? })
}
