//! Whole paths and directories in one message (`defuse_wire::vendor`).

use std::sync::Arc;
use std::time::Duration;

use defuse_connection::{PathStep, PeerConnection, WalkEnd};
use defuse_fs::{Context, Errno, FileSystem, Ino, IoctlArgs, IoctlReply, NormalPath, Result};
use defuse_wire::convert::CacheTimeouts;
use defuse_wire::vendor::{self, NAMES_MAX, ResolveHead};
use zerocopy::IntoBytes;

/// The maximum length of a path, path_resolution(7).
const PATH_MAX: usize = 4096;

/// The inodes on the way of the path in the arguments.
pub(crate) fn resolve(
    connection: &PeerConnection<Arc<dyn FileSystem>>,
    cx: &Context<'_>,
    from: Ino,
    args: &IoctlArgs<'_>,
) -> Result<IoctlReply> {
    let path = NormalPath::new(args.input).filter(|_| args.input.len() <= PATH_MAX);
    let path = path.ok_or(Errno::EINVAL)?;
    let head = size_of::<ResolveHead>();
    let mut output = vec![0; head];
    let end = connection.walk_steps(cx, from, path, |step| {
        output.extend_from_slice(encode(&step, 0).as_bytes());
    })?;
    let (end, open_to_all) = match end {
        WalkEnd::Found => (ResolveHead::FOUND, false),
        WalkEnd::Missing { open_to_all } => (ResolveHead::MISSING, open_to_all),
        WalkEnd::Walk => (ResolveHead::WALK, false),
    };
    let steps = ResolveHead { end, open_to_all: open_to_all.into() };
    output[..head].copy_from_slice(steps.as_bytes());
    if output.len() > args.output_len {
        // Too many names: the client walks.
        output.truncate(head);
        let walk = ResolveHead { end: ResolveHead::WALK, open_to_all: 0 };
        output.copy_from_slice(walk.as_bytes());
    }
    Ok(IoctlReply { result: 0, output })
}

/// The names of a directory, as many as fit.
pub(crate) fn names(
    connection: &PeerConnection<Arc<dyn FileSystem>>,
    cx: &Context<'_>,
    dir: Ino,
    args: &IoctlArgs<'_>,
) -> Result<IoctlReply> {
    let mut output = Vec::new();
    connection.names(cx, dir, NAMES_MAX, |name, step| {
        let bytes = name.as_bytes();
        let len = bytes.len().next_multiple_of(8);
        if output.len() + size_of::<vendor::ResolveStep>() + len > args.output_len {
            return false;
        }
        output.extend_from_slice(encode(&step, bytes.len()).as_bytes());
        output.extend_from_slice(bytes);
        output.resize(output.len() + len - bytes.len(), 0);
        true
    })?;
    Ok(IoctlReply { result: 0, output })
}

fn encode(step: &PathStep, name_len: usize) -> vendor::ResolveStep {
    let zero = Some(Duration::ZERO);
    let never =
        CacheTimeouts { attr: zero, entry: zero, negative: zero, ..CacheTimeouts::default() };
    vendor::ResolveStep {
        ino: step.ino.0,
        open_to_all: step.open_to_all.into(),
        name_len: name_len as u32,
        attr: never.statx_out(&step.attr),
    }
}
