//! Operations on entries, open files and whole files that take more than one request.

use defuse_fs::{
    Attr, Caller, Context, CopyRange, DirBuf, Entry, Errno, Fh, File, FileKind, FileSystem, Ino,
    IoctlArgs, IoctlReply, Name, NewNode, OpenArgs, OpenFlags, OpenOutcome, OpenReply,
    PathResolution, PollHandle, Result, SetXattrFlags, Xattr, XattrName,
};
use zerocopy::{FromBytes, IntoBytes};

use super::fs::owner;
use super::{RemoteClient, RemoteShared};
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::encode::{self, EncodedRequest};
use defuse_wire::vendor::{OPEN_WANTS_BYTES, RELEASE_HAS_READ};

/// The flags and the user of an open. A file opened in advance serves only opens with equal flags
/// and the same user.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct OpenIdentity {
    pub(super) flags: OpenFlags,
    uid: u32,
    gid: u32,
}

impl OpenIdentity {
    pub(super) fn from_context(cx: &Context<'_>, flags: OpenFlags) -> OpenIdentity {
        OpenIdentity { flags, uid: cx.caller.uid, gid: cx.caller.gid }
    }

    pub(super) fn caller(self) -> Caller {
        Caller { uid: self.uid, gid: self.gid, pid: 0 }
    }
}

impl RemoteShared {
    /// Sends a request whose reply is an entry. Returns the lookup of an invalid reply.
    pub(super) fn request_entry(
        &self,
        cx: &Context<'_>,
        request: EncodedRequest,
        decode: impl FnOnce(&[u8]) -> Result<Entry>,
    ) -> Result<Entry> {
        self.request(cx, request, |body| {
            decode(body).inspect_err(|_| self.give_back(decode::find_granted(body, false).0))
        })
    }

    /// Sends a request that makes `name` in `parent`, for an inode of this kind.
    pub(super) fn request_new_name(
        &self,
        cx: &Context<'_>,
        place: (Ino, Name<'_>),
        request: EncodedRequest,
        kind: Option<FileKind>,
    ) -> Result<Entry> {
        let decode = |body: &[u8]| {
            decode::decode_created_entry(body, kind)
                .inspect_err(|_| self.give_back(decode::find_granted(body, false).0))
        };
        let before = self.paths.begin_change();
        let is_chained = self.resolves_paths() && self.takes_chains();
        if let Some((before, versions)) = before.zip(self.paths.versions.get())
            && is_chained
            && !self.knows_search_of(place.0)
        {
            let (steps, made) = self.resolve_and_request(cx, place, request, decode)?;
            let entry = made?;
            let after = before.after_own_change(&**versions);
            self.keep_resolved_name((&**versions, after), place, (&entry, &steps));
            return Ok(entry);
        }
        let entry = self.request(cx, request, decode)?;
        self.record_new_name(before, place, &entry);
        Ok(entry)
    }

    /// Queues a lookup to be returned, without sending.
    pub(super) fn give_back(&self, ino: Option<Ino>) {
        if let Some(ino) = ino {
            self.forgets.add(ino, 1);
            self.forgets.send_next_at_once();
        }
    }

    pub(super) fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        let (getattr_flags, fh) = fh.map_or((0, 0), |fh| (abi::FUSE_GETATTR_FH, fh.0));
        // STATX also returns the birth time.
        if self.agreement.minor >= 39 && !self.lacks(Opcode::Statx) {
            let sx_mask = 0xfff;
            let args = abi::StatxIn { getattr_flags, fh, sx_mask, ..Default::default() };
            let request = EncodedRequest::new(Opcode::Statx, cx, ino).with(&args);
            match self.request(cx, request, decode::statx_out) {
                Ok(None) | Err(Errno::ENOSYS) => {}
                Ok(Some(attr)) => return Ok(attr),
                Err(errno) => return Err(errno),
            }
        }
        let args = abi::GetattrIn { getattr_flags, dummy: 0, fh };
        self.request(
            cx,
            EncodedRequest::new(Opcode::Getattr, cx, ino).with(&args),
            decode::attr_out,
        )
    }

    pub(super) fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let args = abi::SetxattrIn {
            size: value.len() as u32,
            // XATTR_CREATE and XATTR_REPLACE.
            flags: u32::from(flags.create) | u32::from(flags.replace) << 1,
            setxattr_flags: u32::from(flags.clear_sgid) * abi::FUSE_SETXATTR_ACL_KILL_SGID,
            padding: 0,
        };
        let extended = self.agreement.uses(abi::FUSE_SETXATTR_EXT);
        let len = if extended { size_of_val(&args) } else { abi::FUSE_COMPAT_SETXATTR_IN_SIZE };
        let request = EncodedRequest::new(Opcode::Setxattr, cx, ino)
            .with_bytes(&args.as_bytes()[..len])
            .with_text(name.as_bytes());
        self.request_with_data(cx, request, value, decode::check_empty)
    }

    /// GETXATTR with a `name`, LISTXATTR without.
    pub(super) fn xattr(
        &self,
        cx: &Context<'_>,
        request: EncodedRequest,
        name: Option<&[u8]>,
        room: usize,
    ) -> Result<Xattr> {
        // XATTR_SIZE_MAX and XATTR_LIST_MAX limit all values.
        let room = room.min(1 << 16);
        let request = request.with(&abi::GetxattrIn { size: room as u32, padding: 0 });
        let request = match name {
            Some(name) => request.with_text(name),
            None => request,
        };
        self.request(cx, request, |body| match room {
            0 => Ok(Xattr::Size(decode::decode_whole::<abi::GetxattrOut>(body)?.size.min(1 << 16))),
            _ if body.len() > room => Err(Errno::EIO),
            _ => Ok(Xattr::Value(body.to_vec())),
        })
    }

    pub(super) fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let killed = args.kill_suidgid && self.agreement.uses(abi::FUSE_HANDLE_KILLPRIV_V2);
        let open_flags = if killed { abi::FUSE_OPEN_KILL_SUIDGID } else { 0 };
        let Some(version) = self.version_for_open(ino, args.flags) else {
            let args = abi::OpenIn { flags: args.flags.0, open_flags };
            let request = EncodedRequest::new(Opcode::Open, cx, ino).with(&args);
            return self.decode_open(cx, request, decode::open_out);
        };
        let open_flags = open_flags | OPEN_WANTS_BYTES;
        let open = abi::OpenIn { flags: args.flags.0, open_flags };
        let request = EncodedRequest::new(Opcode::Open, cx, ino).with(&open);
        self.decode_open(cx, request, |body| {
            let (opened, bytes) = decode::open_out_with_bytes(body)?;
            if let Some(bytes) = bytes {
                self.keep_whole((version, args.flags), File { ino, fh: opened.fh }, bytes);
            }
            Ok(opened)
        })
    }

    /// Without OPEN, all open files have the handle 0, and are not released.
    pub(super) fn decode_open(
        &self,
        cx: &Context<'_>,
        request: EncodedRequest,
        decode: impl FnOnce(&[u8]) -> Result<OpenReply>,
    ) -> Result<OpenReply> {
        match self.request(cx, request, decode) {
            Err(Errno::ENOSYS) => Ok(OpenReply::default()),
            other => other,
        }
    }

    /// CREATE or TMPFILE, of a name in a directory.
    pub(super) fn create(
        &self,
        cx: &Context<'_>,
        (opcode, parent, name): (Opcode, Ino, &[u8]),
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let request = self.creation(cx, (opcode, parent, name), node, args);
        let mut lost = None;
        let made = self.request(cx, request, |body| {
            decode::create_out(body).inspect_err(|_| lost = Some(decode::find_granted(body, true)))
        });
        self.return_lost(cx, lost, args.flags);
        made
    }

    /// Closes and returns what a reply to a creation has granted that was invalid otherwise.
    pub(super) fn return_lost(
        &self,
        cx: &Context<'_>,
        lost: Option<(Option<Ino>, Option<Fh>)>,
        flags: OpenFlags,
    ) {
        let Some((ino, fh)) = lost else { return };
        if let (Some(ino), Some(fh)) = (ino, fh) {
            self.release_new(cx, File { ino, fh }, flags);
        }
        self.give_back(ino);
    }

    /// The request of [`create`](Self::create).
    pub(super) fn creation(
        &self,
        cx: &Context<'_>,
        (opcode, parent, name): (Opcode, Ino, &[u8]),
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> EncodedRequest {
        let flags = self.agreement.flags;
        let killed = args.kill_suidgid && flags & abi::FUSE_HANDLE_KILLPRIV_V2 != 0;
        let create = abi::CreateIn {
            flags: args.flags.0,
            mode: encode::mode_of(node, flags),
            umask: node.umask,
            open_flags: if killed { abi::FUSE_OPEN_KILL_SUIDGID } else { 0 },
        };
        EncodedRequest::for_caller(opcode, owner(cx, node), parent)
            .with(&create)
            .with_text(name)
            .with_extensions(node, flags)
    }

    /// Closes a file that the caller never gets.
    pub(super) fn release_new(&self, cx: &Context<'_>, file: File, flags: OpenFlags) {
        let args = abi::ReleaseIn { fh: file.fh.0, flags: flags.0, ..abi::ReleaseIn::default() };
        let _ = self.release(cx, (Opcode::Release, Opcode::Open), file.ino, &args);
    }

    /// Sends RELEASE or RELEASEDIR. No caller waits for the reply; the next receiving thread takes
    /// it.
    pub(super) fn release(
        &self,
        cx: &Context<'_>,
        (opcode, opened_by): (Opcode, Opcode),
        ino: Ino,
        args: &abi::ReleaseIn,
    ) -> Result<()> {
        if self.lacks(opened_by) {
            return Ok(());
        }
        self.pages.remove(Fh(args.fh));
        let file = File { ino, fh: Fh(args.fh) };
        let version = self.whole.version(file.fh);
        let was_read = self.whole.remove_closed(file.fh);
        if args.release_flags == 0 {
            if let Some(are_many) = self.opened_ahead.record_close(file, (args.flags, was_read)) {
                // An open file that has changed may have been removed, and exists as long as it is
                // open.
                let versions = self.paths.versions.get();
                let now = versions.and_then(|versions| versions.attributes(ino));
                if are_many || version.is_none() || version != now {
                    self.send_closing();
                }
                return Ok(());
            }
        } else {
            self.opened_ahead.record_release(Fh(args.fh));
        }
        let flag = if was_read { RELEASE_HAS_READ } else { 0 };
        let args = abi::ReleaseIn { release_flags: args.release_flags | flag, ..*args };
        let request = EncodedRequest::new(opcode, cx, ino).with(&args);
        // A caller that looks at the access time afterwards must see that the file was read.
        if !self.forgets.is_urgent() && !was_read {
            return self.send_release(ino, request);
        }
        // The lookup that is returned next must not wait for the answer.
        match self.request(cx, request, decode::check_empty) {
            Err(Errno::ENOTCONN) => Err(Errno::ENOTCONN),
            _ => Ok(()),
        }
    }

    pub(super) fn fsync(
        &self,
        cx: &Context<'_>,
        opcode: Opcode,
        file: File,
        datasync: bool,
    ) -> Result<()> {
        let fsync_flags = if datasync { abi::FUSE_FSYNC_FDATASYNC } else { 0 };
        let args = abi::FsyncIn { fh: file.fh.0, fsync_flags, padding: 0 };
        self.request(cx, EncodedRequest::new(opcode, cx, file.ino).with(&args), decode::check_empty)
    }

    pub(super) fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let args = |len| abi::CopyFileRangeIn {
            fh_in: copy.src.fh.0,
            off_in: copy.src_offset,
            nodeid_out: copy.dst.ino.0,
            fh_out: copy.dst.fh.0,
            off_out: copy.dst_offset,
            len,
            flags: copy.flags,
        };
        if self.agreement.minor >= 45 && !self.lacks(Opcode::CopyFileRange64) {
            let request = EncodedRequest::new(Opcode::CopyFileRange64, cx, copy.src.ino);
            let copied = self.request(cx, request.with(&args(copy.length)), |body| {
                let count = decode::decode_whole::<abi::CopyFileRangeOut>(body)?.bytes_copied;
                if count > copy.length { Err(Errno::EIO) } else { Ok(count) }
            });
            if copied != Err(Errno::ENOSYS) {
                return copied;
            }
        }
        // The reply has 32 bits for the count. Rounded to whole pages, as by the kernel.
        let len = copy.length.min(u64::from(u32::MAX) & !0xfff);
        let request = EncodedRequest::new(Opcode::CopyFileRange, cx, copy.src.ino).with(&args(len));
        self.request(cx, request, |body| decode::write_out(body, len))
    }

    pub(super) fn ioctl(
        &self,
        cx: &Context<'_>,
        file: File,
        args: &IoctlArgs<'_>,
    ) -> Result<IoctlReply> {
        if args.dir && !self.agreement.uses(abi::FUSE_HAS_IOCTL_DIR) {
            return Err(Errno::ENOTTY);
        }
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let compat = abi::FUSE_IOCTL_COMPAT | abi::FUSE_IOCTL_32BIT;
        let room = args.output_len.min(self.agreement.max_received());
        let ioctl = abi::IoctlIn {
            fh: file.fh.0,
            flags: flag(args.dir, abi::FUSE_IOCTL_DIR) | flag(args.compat32, compat),
            cmd: args.cmd,
            arg: args.arg,
            in_size: args.input.len() as u32,
            out_size: room as u32,
        };
        let request = EncodedRequest::new(Opcode::Ioctl, cx, file.ino).with(&ioctl);
        let reply = self.request_with_data(cx, request, args.input, |body| ioctl_out(body, room));
        reply.map_err(|errno| if errno == Errno::ENOSYS { Errno::ENOTTY } else { errno })
    }
}

/// Decodes the reply to an IOCTL with `room` bytes for output.
pub(super) fn ioctl_out(body: &[u8], room: usize) -> Result<IoctlReply> {
    let (out, output) = abi::IoctlOut::read_from_prefix(body).map_err(|_| Errno::EIO)?;
    // Retry is for drivers that may access the caller's memory.
    if out.flags & abi::FUSE_IOCTL_RETRY != 0 || output.len() > room {
        return Err(Errno::EIO);
    }
    if out.result < 0 {
        return Err(Errno::from_raw(out.result.saturating_neg()));
    }
    Ok(IoctlReply { result: out.result, output: output.to_vec() })
}

impl RemoteClient {
    /// CREATE, or MKNOD and OPEN if the server does not support it.
    pub(super) fn create_or_make(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        let what = (Opcode::Create, parent, name.as_bytes());
        let before = self.shared.paths.begin_change();
        match self.shared.create(cx, what, node, args) {
            Err(Errno::ENOSYS) => StepwiseCreate(self).create(cx, parent, name, node, args),
            made => made.inspect(|(entry, _)| {
                self.shared.record_new_name(before, (parent, name), entry);
            }),
        }
    }

    /// Creates a file like [`create_or_make`](Self::create_or_make), unless its name is known to be
    /// there. An unknown name is most often free.
    pub(super) fn create_unless_known(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<OpenOutcome> {
        let shared = &self.shared;
        let flags = OpenFlags(args.flags.difference(OpenFlags::TRUNC).0 | OpenFlags::EXCL);
        let args = OpenArgs { flags, ..args };
        if !shared.resolves_paths() || shared.lacks(Opcode::Create) {
            return Err(Errno::ENOSYS);
        }
        let is_there = || shared.resolve(cx, parent, name.into()).map(OpenOutcome::Found);
        if shared.paths.knows_inode_of(parent, name.as_bytes()) {
            return is_there();
        }
        if shared.takes_chains() && !shared.knows_search_of(parent) {
            return shared.resolve_and_create(cx, (parent, name), node, args);
        }
        match self.create_or_make(cx, parent, name, node, args) {
            Ok((entry, opened)) => Ok(OpenOutcome::Created(entry, opened)),
            Err(errno) if may_precede_lookup(errno) => {
                is_there().and_then(|found| found_or(found, errno))
            }
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn poll_file(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        let args = abi::PollIn {
            fh: file.fh.0,
            kh: wake.map_or(0, |handle| handle.0),
            flags: if wake.is_some() { abi::FUSE_POLL_SCHEDULE_NOTIFY } else { 0 },
            events,
        };
        let request = EncodedRequest::new(Opcode::Poll, cx, file.ino).with(&args);
        let polled = self
            .shared
            .request(cx, request, |body| Ok(decode::decode_whole::<abi::PollOut>(body)?.revents));
        if wake.is_some() && polled.is_ok() {
            self.listen();
        }
        polled
    }
}

/// The result of a creation that has failed, where the name led to `found` before or afterwards.
pub(super) fn found_or(found: OpenOutcome, errno: Errno) -> Result<OpenOutcome> {
    match found {
        // After EEXIST another client may have removed the name.
        OpenOutcome::Found(PathResolution::Missing { .. }) if errno != Errno::EEXIST => Err(errno),
        found => Ok(found),
    }
}

/// True for an error of CREATE that says nothing against an open of the file, if there is one: its
/// name is there, or the server has refused the creation before it looked for the name.
pub(super) fn may_precede_lookup(errno: Errno) -> bool {
    let of_rights = [Errno::EEXIST, Errno::EACCES, Errno::EPERM, Errno::EROFS];
    let of_limits = [Errno::ENOSPC, Errno::EDQUOT, Errno::ENFILE, Errno::EMLINK];
    of_rights.contains(&errno) || of_limits.contains(&errno)
}

/// The file system without CREATE, for the default implementation of the contract.
struct StepwiseCreate<'a>(&'a RemoteClient);

impl FileSystem for StepwiseCreate<'_> {
    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.0.lookup(cx, parent, name)
    }
    fn forget(&self, ino: Ino, lookups: u64) {
        self.0.forget(ino, lookups);
    }
    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.0.mknod(cx, parent, name, node)
    }
    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        self.0.getattr(cx, ino, fh)
    }
    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let truncate = args.flags.has(OpenFlags::TRUNC);
        if !truncate || self.0.caps().open_truncates {
            return self.0.open(cx, ino, args);
        }
        // A server that does not truncate in OPEN gets a SETATTR.
        let flags = args.flags.difference(OpenFlags::TRUNC);
        let opened = self.0.open(cx, ino, OpenArgs { flags, ..args })?;
        let kill_suidgid = args.kill_suidgid;
        let set = defuse_fs::SetAttr { size: Some(0), kill_suidgid, ..Default::default() };
        match self.0.setattr(cx, ino, Some(opened.fh), &set) {
            Ok(_) => Ok(opened),
            Err(errno) => {
                let file = File { ino, fh: opened.fh };
                let release = defuse_fs::ReleaseArgs::from_flags(flags);
                let _ = self.0.release(cx, file, release);
                Err(errno)
            }
        }
    }
    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        self.0.readdir(cx, dir, from, out)
    }
}
