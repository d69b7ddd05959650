//! Small files that are opened before the client requests each of them, in one message
//! (`defuse_wire::vendor::OPEN_AHEAD`).

use std::sync::Arc;

use defuse_connection::{PeerConnection, VersionSource, WantedFiles, WholeOpenFile};
use defuse_fs::{Context, Errno, Fh, File, FileSystem, Ino, IoctlArgs, IoctlReply, Result};
use defuse_wire::abi;
use defuse_wire::convert;
use defuse_wire::vendor::{
    AHEAD_MAX, AheadClose, AheadEnd, AheadFile, OPEN_BYTES_MAX, OPEN_FLUSH_ENDS_LOCKS,
    OPEN_HAS_BYTES, OPEN_READ_IS_DUE, OpenAhead,
};
use zerocopy::{FromBytes, IntoBytes};

/// Closes the files in the arguments, and opens files of the directory `dir`, as many as are
/// requested and fit.
pub(crate) fn open(
    connection: &PeerConnection<Arc<dyn FileSystem>>,
    versions: &dyn VersionSource,
    cx: &Context<'_>,
    dir: Ino,
    args: &IoctlArgs<'_>,
) -> Result<IoctlReply> {
    let (head, rest) = OpenAhead::read_from_prefix(args.input).map_err(|_| Errno::EINVAL)?;
    let (closing, left) = rest.as_chunks::<{ size_of::<AheadClose>() }>();
    let most = head.most as usize;
    let is_bounded = closing.len() <= AHEAD_MAX && most <= AHEAD_MAX;
    if !is_bounded || !left.is_empty() || args.output_len < size_of::<AheadEnd>() {
        return Err(Errno::EINVAL);
    }
    let domain_of = |one: &[u8; size_of::<AheadClose>()]| {
        let one: AheadClose = zerocopy::transmute!(*one);
        connection.failure_domain(Ino(one.ino), None)
    };
    // A part of the storage that does not answer delays only requests that name it.
    if closing.iter().any(|one| domain_of(one) != connection.failure_domain(dir, None)) {
        return Err(Errno::EINVAL);
    }
    for one in closing {
        let one: AheadClose = zerocopy::transmute!(*one);
        let file = File { ino: Ino(one.ino), fh: Fh(one.fh) };
        connection.close_ahead(cx, file, (convert::open_flags(one.flags), one.has_read != 0));
    }
    let mut output = vec![0; size_of::<AheadEnd>()];
    if most > 0 {
        let flags = convert::open_flags(head.flags);
        let wanted = WantedFiles { from: head.from, flags, most, most_bytes: OPEN_BYTES_MAX };
        let version = |ino| versions.attributes(ino);
        let next = connection.open_ahead(cx, dir, wanted, version, |file| {
            add(&mut output, args.output_len, &file)
        })?;
        let end = AheadEnd { next: next.unwrap_or(0) };
        output[..size_of::<AheadEnd>()].copy_from_slice(end.as_bytes());
    }
    Ok(IoctlReply { result: 0, output })
}

/// Adds a file to the output, if it fits.
fn add(output: &mut Vec<u8>, room: usize, file: &WholeOpenFile) -> bool {
    let bytes = &file.whole.bytes;
    let len = size_of::<abi::OpenOut>() + bytes.len();
    let padded = size_of::<AheadFile>() + len.next_multiple_of(8);
    if output.len() + padded > room {
        return false;
    }
    let end = output.len() + padded;
    let head = AheadFile { ino: file.ino.0, version: file.version, len: len as u32, reserved: 0 };
    let mut open = convert::open_out(&file.opened);
    let mut set = |flag, on: bool| open.open_flags |= if on { flag } else { 0 };
    set(OPEN_HAS_BYTES, true);
    set(OPEN_READ_IS_DUE, file.whole.read_is_due);
    set(OPEN_FLUSH_ENDS_LOCKS, file.opened.no_flush);
    output.extend_from_slice(head.as_bytes());
    output.extend_from_slice(open.as_bytes());
    output.extend_from_slice(bytes);
    output.resize(end, 0);
    true
}
