//! Several requests in one message, to servers that take them: a path is resolved and opened, and a
//! file is created, written and closed.

use std::sync::atomic::Ordering;

use defuse_fs::{
    CREATE_WITH, Caller, Context, Entry, Errno, File, FileKind, FileSystem, Ino, Name, NewNode,
    NormalPath, OpenArgs, OpenFlags, OpenOutcome, OpenReply, PathResolution, Result, Versions,
    fill_new,
};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::chain::{self, ChainLink, CompoundIn, RequestChain};
use defuse_wire::decode;
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::{COMPOUND, OPEN_WANTS_BYTES, RESOLVE};

use super::files::{found_or, ioctl_out, may_precede_lookup};
use super::fs::owner;
use super::{RemoteClient, RemoteShared};

/// Room for the inodes on the way of a path, in bytes: more are resolved by a request of their own.
const STEPS: usize = 32 << 10;
/// The maximum length of the data in a creation, in bytes.
const DATA: usize = 96 << 10;
/// Room for the inode of one name, in bytes.
const ONE_STEP: usize = 1024;
/// The flags of a file that is created with its contents.
const FLAGS: u32 = CREATE_WITH.flags.0;

/// The inode and the file of the first link.
const OF_FIRST: ChainLink = ChainLink { uses: ChainLink::INODE | ChainLink::FILE, of: 0 };

impl RemoteShared {
    pub(super) fn takes_chains(&self) -> bool {
        self.agreement.uses(COMPOUND)
    }

    /// Sends a chain that begins at `ino`. `decode` gets the replies to its first links, at least
    /// one, the last of which may be an error.
    pub(super) fn request_chain<T>(
        &self,
        cx: &Context<'_>,
        (caller, ino): (Caller, Ino),
        (links, count): (&RequestChain, usize),
        decode: impl FnOnce(&[(i32, &[u8])]) -> Result<T>,
    ) -> Result<T> {
        let request = self.chain_request((caller, ino), links);
        self.request(cx, request, |body| decode_chain(body, count, decode))
    }

    /// The message with a chain that begins at `ino`.
    pub(super) fn chain_request(
        &self,
        (caller, ino): (Caller, Ino),
        links: &RequestChain,
    ) -> EncodedRequest {
        let head = CompoundIn { len: links.as_bytes().len() as u32, reserved: 0 };
        EncodedRequest::for_caller(Opcode::Compound, caller, ino)
            .with(&head)
            .with_bytes(links.as_bytes())
    }

    /// Resolves a path like [`resolve`](RemoteShared::resolve), and opens the inode at its end if a
    /// request is needed.
    pub(super) fn resolve_to_open(
        &self,
        cx: &Context<'_>,
        from: Ino,
        path: NormalPath<'_>,
        args: OpenArgs,
    ) -> Result<(PathResolution, Option<OpenReply>)> {
        if !self.takes_chains() || self.lacks(Opcode::Open) {
            return Ok((self.resolve(cx, from, path)?, None));
        }
        let ask = |versions: &dyn Versions, dir, rest: NormalPath<'_>| {
            self.request_resolve_and_open(cx, versions, (dir, rest), args)
        };
        self.resolve_by((from, path), ask, |versions, dir, found| {
            self.open_from_ahead(cx, versions, (dir, found), args)
        })
    }

    fn request_resolve_and_open(
        &self,
        cx: &Context<'_>,
        versions: &dyn Versions,
        (dir, path): (Ino, NormalPath<'_>),
        args: OpenArgs,
    ) -> Result<(PathResolution, Option<OpenReply>)> {
        let before = self.paths.begin_request(versions);
        let wants_bytes = before.all.is_some() && self.whole.wants(args.flags);
        let room = STEPS.min(self.agreement.max_received());
        let ioctl = abi::IoctlIn {
            cmd: RESOLVE,
            in_size: path.as_bytes().len() as u32,
            out_size: room as u32,
            ..abi::IoctlIn::default()
        };
        let open_flags = if wants_bytes { OPEN_WANTS_BYTES } else { 0 };
        let open = abi::OpenIn { flags: args.flags.0, open_flags };
        let mut links = RequestChain::default();
        let mut resolve = EncodedRequest::new(Opcode::Ioctl, cx, dir).with(&ioctl);
        links.add(ChainLink::default(), &[resolve.finish(path.as_bytes().len()), path.as_bytes()]);
        let mut opening = EncodedRequest::new(Opcode::Open, cx, Ino(0)).with(&open);
        links.add(ChainLink { uses: ChainLink::INODE, of: 0 }, &[opening.finish(0)]);
        let (output, opened) =
            self.request_chain(cx, (cx.caller, dir), (&links, 2), |answers| {
                let (error, body) = answers[0];
                if error != 0 {
                    return Err(Errno::from_raw(-error));
                }
                let answer = ioctl_out(body, room)?;
                if answer.result != 0 {
                    return Err(Errno::EIO);
                }
                // An open that has failed fails again, when it is tried alone.
                let opened = answers.get(1).filter(|(error, _)| *error == 0);
                let opened =
                    opened.map(|(_, body)| decode::open_out_with_bytes(body)).transpose()?;
                let owned = |of: decode::OpenBytes<'_>| (of.bytes.to_vec(), of.read_is_due);
                let opened = opened.map(|(opened, bytes)| (opened, bytes.map(owned)));
                Ok((answer.output, opened))
            })?;
        let resolved = self.record_path(cx, (versions, before), (dir, path), &output);
        let Some((opened, bytes)) = opened else { return Ok((resolved?.0, None)) };
        let resolved = resolved
            .inspect(|(_, dir)| self.opened_ahead.record_open_by_path(*dir))
            .map(|known| known.0);
        match resolved {
            Ok(PathResolution::Inode { ino, attr, .. }) if attr.kind == FileKind::Regular => {
                let file = File { ino, fh: opened.fh };
                // The bytes are of this version if nothing has changed meanwhile.
                if let Some((bytes, read_is_due)) = bytes
                    && let Some(version) = versions.attributes(ino)
                    && versions.all() == before.all
                {
                    let bytes = decode::OpenBytes { bytes: &bytes, read_is_due };
                    self.keep_whole((version, args.flags), file, bytes);
                }
                Ok((resolved?, Some(opened)))
            }
            // An inode that cannot be opened this way.
            Ok(PathResolution::Inode { ino, .. }) => {
                self.release_new(cx, File { ino, fh: opened.fh }, args.flags);
                Ok((resolved?, None))
            }
            // The server has opened something and does not report the inode.
            Ok(_) => Err(Errno::EIO),
            Err(errno) => Err(errno),
        }
    }
}

impl RemoteShared {
    /// Creates a file, and resolves its name before that, by one message: the answer says whether
    /// every user may search the directory, and where the name leads if it is there.
    pub(super) fn resolve_and_create(
        &self,
        cx: &Context<'_>,
        (dir, name): (Ino, Name<'_>),
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        let versions = self.paths.versions.get().ok_or(Errno::ENOSYS)?;
        let before = self.paths.begin_request(&**versions);
        let creation = self.creation(cx, (Opcode::Create, dir, name.as_bytes()), node, args);
        let mut lost = None;
        let answer = self.resolve_and_request(cx, (dir, name), creation, |body| {
            decode::create_out(body).inspect_err(|_| lost = Some(decode::find_granted(body, true)))
        });
        self.return_lost(cx, lost, args.flags);
        let (steps, made) = answer?;
        let after = before.after_own_change(&**versions);
        match made {
            Ok((entry, opened)) => {
                self.keep_resolved_name((&**versions, after), (dir, name), (&entry, &steps));
                Ok(OpenOutcome::Created(entry, opened))
            }
            Err(errno) if may_precede_lookup(errno) => {
                let found =
                    self.record_path(cx, (&**versions, after), (dir, name.into()), &steps)?;
                found_or(OpenOutcome::Found(found.0), errno)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Sends the request to make `name` in `dir` behind one that resolves the name. Returns the
    /// output of the latter, and the result of the former.
    pub(super) fn resolve_and_request<T>(
        &self,
        cx: &Context<'_>,
        (dir, name): (Ino, Name<'_>),
        mut making: EncodedRequest,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<(Vec<u8>, Result<T>)> {
        let mut links = RequestChain::default();
        add_resolve_link(&mut links, cx, (dir, name));
        links.add(ChainLink::default(), &[making.finish(0)]);
        self.request_chain(cx, (making.caller(), dir), (&links, 2), |answers| {
            let (error, body) = answers[0];
            if error != 0 {
                return Err(Errno::from_raw(-error));
            }
            let steps = ioctl_out(body, ONE_STEP)?.output;
            match *answers.get(1).ok_or(Errno::EIO)? {
                (0, body) => Ok((steps, Ok(decode(body)?))),
                (error, _) => Ok((steps, Err(Errno::from_raw(-error)))),
            }
        })
    }

    /// Sends a request that makes `name` in `dir` lead to an inode that was there before, and
    /// resolves the name behind it, so that a later stat(2) needs no request.
    pub(super) fn request_and_resolve<T>(
        &self,
        cx: &Context<'_>,
        (dir, name): (Ino, Name<'_>),
        mut making: EncodedRequest,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let versions = self.paths.versions.get().filter(|_| self.resolves_paths());
        let Some(versions) = versions.filter(|_| self.takes_chains()) else {
            return self.request(cx, making, decode);
        };
        let before = self.paths.begin_request(&**versions);
        let mut links = RequestChain::default();
        links.add(ChainLink::default(), &[making.finish(0)]);
        add_resolve_link(&mut links, cx, (dir, name));
        let (made, steps) =
            self.request_chain(cx, (making.caller(), dir), (&links, 2), |answers| {
                let (error, body) = answers[0];
                if error != 0 {
                    return Err(Errno::from_raw(-error));
                }
                // Without it, a later stat(2) resolves the name.
                let resolved = answers.get(1).filter(|(error, _)| *error == 0);
                let steps = resolved.and_then(|(_, body)| ioctl_out(body, ONE_STEP).ok());
                Ok((decode(body)?, steps))
            })?;
        if let Some(steps) = steps {
            let after = before.after_own_change(&**versions);
            let _ = self.record_path(cx, (&**versions, after), (dir, name.into()), &steps.output);
        }
        Ok(made)
    }
}

/// Adds a link that resolves `name` in `dir`.
fn add_resolve_link(links: &mut RequestChain, cx: &Context<'_>, (dir, name): (Ino, Name<'_>)) {
    let bytes = name.as_bytes();
    let (in_size, out_size) = (bytes.len() as u32, ONE_STEP as u32);
    let ioctl = abi::IoctlIn { cmd: RESOLVE, in_size, out_size, ..abi::IoctlIn::default() };
    let mut resolve = EncodedRequest::new(Opcode::Ioctl, cx, dir).with(&ioctl);
    links.add(ChainLink::default(), &[resolve.finish(bytes.len()), bytes]);
}

/// Passes the answers to the first links of a chain of `count` on, at least one.
pub(super) fn decode_chain<T>(
    body: &[u8],
    count: usize,
    decode: impl FnOnce(&[(i32, &[u8])]) -> Result<T>,
) -> Result<T> {
    let answers = chain::split_reply(body, count).filter(|answers| !answers.is_empty());
    decode(&answers.ok_or(Errno::EIO)?)
}

impl RemoteClient {
    /// Creates a file with these contents, and closes it, by one message. `None` if this takes
    /// several messages.
    pub(super) fn create_chained(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        data: &[u8],
    ) -> Option<Result<Entry>> {
        let shared = &self.shared;
        let is_short = data.len() <= DATA.min(shared.agreement.max_sent());
        if !shared.takes_chains() || shared.lacks(Opcode::Create) || !is_short {
            return None;
        }
        let flushes = !shared.lacks(Opcode::Flush);
        let caller = owner(cx, node);
        let mut links = RequestChain::default();
        let mut count = 0;
        let mut add = |link, parts: &[&[u8]]| {
            links.add(link, parts);
            count += 1;
        };
        let created = (Opcode::Create, parent, name.as_bytes());
        let mut creation = shared.creation(cx, created, node, CREATE_WITH);
        add(ChainLink::default(), &[creation.finish(0)]);
        if !data.is_empty() {
            let size = data.len() as u32;
            let write = abi::WriteIn { size, flags: FLAGS, ..abi::WriteIn::default() };
            let mut write = EncodedRequest::for_caller(Opcode::Write, caller, Ino(0)).with(&write);
            add(OF_FIRST, &[write.finish(data.len()), data]);
        }
        if flushes {
            let flush = abi::FlushIn::default();
            let mut flush = EncodedRequest::for_caller(Opcode::Flush, caller, Ino(0)).with(&flush);
            add(OF_FIRST, &[flush.finish(0)]);
        }
        let release = abi::ReleaseIn { flags: FLAGS, ..abi::ReleaseIn::default() };
        let mut release =
            EncodedRequest::for_caller(Opcode::Release, caller, Ino(0)).with(&release);
        add(OF_FIRST, &[release.finish(0)]);
        let made = shared.request_chain(cx, (caller, parent), (&links, count), |answers| {
            let (error, body) = answers[0];
            if error != 0 {
                return Err(Errno::from_raw(-error));
            }
            let (entry, opened) = decode::create_out(body)?;
            let mut written = 0;
            if !data.is_empty()
                && let Some((0, body)) = answers.get(1)
            {
                written = decode::decode_whole::<abi::WriteOut>(body)?.size as usize;
            }
            let failed = answers.last().filter(|(error, _)| *error != 0);
            let error = failed.map(|(error, _)| Errno::from_raw(-error));
            let is_closed = answers.len() == count && error.is_none();
            Ok(ChainedCreate { entry, opened, written: written.min(data.len()), error, is_closed })
        });
        Some(made.and_then(|made| self.finish_creation(cx, made, data)))
    }

    /// Completes a creation whose chain has stopped early, or has written a part.
    fn finish_creation(&self, cx: &Context<'_>, made: ChainedCreate, data: &[u8]) -> Result<Entry> {
        let ChainedCreate { entry, opened, written, error, mut is_closed } = made;
        let mut file = File { ino: entry.ino, fh: opened.fh };
        let lacks_flush = error == Some(Errno::ENOSYS) && written == data.len();
        if lacks_flush {
            self.shared.missing.fetch_or(1 << Opcode::Flush as u32, Ordering::Relaxed);
        }
        let result = match error {
            Some(errno) if !lacks_flush && errno != Errno::EOPNOTSUPP => Err(errno),
            _ if written == data.len() && (is_closed || lacks_flush) => Ok(()),
            _ => {
                let open = OpenArgs { flags: OpenFlags(OpenFlags::WRONLY), kill_suidgid: false };
                let opened = if is_closed { self.open(cx, entry.ino, open) } else { Ok(opened) };
                opened.and_then(|opened| {
                    file.fh = opened.fh;
                    is_closed = false;
                    fill_new(self, cx, (file, opened.no_flush), data, written)
                })
            }
        };
        if !is_closed {
            self.shared.release_new(cx, file, CREATE_WITH.flags);
        }
        result.inspect_err(|_| self.forget(entry.ino, 1)).map_err(|errno| match errno {
            // ENOSYS would mean that the file is not created yet.
            Errno::ENOSYS => Errno::EOPNOTSUPP,
            other => other,
        })?;
        Ok(entry)
    }
}

/// The state of a creation after its chain.
struct ChainedCreate {
    entry: Entry,
    opened: OpenReply,
    written: usize,
    /// The error with which the chain has stopped.
    error: Option<Errno>,
    is_closed: bool,
}
