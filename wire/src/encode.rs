//! Encodes requests as the kernel does. Source: `fs/fuse/dir.c`, `file.c`, `inode.c`.

use defuse_fs::{
    Caller, Context, File, Ino, LockKind, LockRequest, LockType, Name, NewNode, SetAttr, SetTime,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::{self, InHeader, Opcode, rec_align};
use crate::convert::kernel_dev;
use crate::vendor;

/// A request without the data of a WRITE, under construction.
pub struct EncodedRequest {
    /// The operation.
    pub opcode: Opcode,
    bytes: Vec<u8>,
}

impl EncodedRequest {
    /// A request for `ino` on behalf of the caller of `cx`.
    pub fn new(opcode: Opcode, cx: &Context<'_>, ino: Ino) -> Self {
        EncodedRequest::for_caller(opcode, cx.caller, ino)
    }

    /// A request for `ino` on behalf of `caller`.
    pub fn for_caller(opcode: Opcode, caller: Caller, ino: Ino) -> Self {
        let header = InHeader {
            opcode: opcode as u32,
            nodeid: ino.0,
            uid: caller.uid,
            gid: caller.gid,
            pid: caller.pid,
            ..InHeader::default()
        };
        let mut bytes = Vec::with_capacity(192);
        bytes.extend_from_slice(header.as_bytes());
        EncodedRequest { opcode, bytes }
    }

    /// The caller that the header names.
    pub fn caller(&self) -> Caller {
        let header = InHeader::read_from_prefix(&self.bytes);
        header.map_or_else(
            |_| Caller::default(),
            |(InHeader { uid, gid, pid, .. }, _)| Caller { uid, gid, pid },
        )
    }

    /// Appends a structure.
    pub fn with<T: IntoBytes + Immutable>(self, args: &T) -> Self {
        self.with_bytes(args.as_bytes())
    }

    /// Appends bytes.
    pub fn with_bytes(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends text and its NUL.
    pub fn with_text(self, text: &[u8]) -> Self {
        self.with_bytes(text).with_bytes(&[0])
    }

    /// Appends a name and its NUL.
    pub fn with_name(self, name: Name<'_>) -> Self {
        self.with_text(name.as_bytes())
    }

    /// Appends the extensions of a creation that the negotiated `flags` permit (`get_create_ext` in
    /// `fs/fuse/dir.c`).
    pub fn with_extensions(mut self, node: &NewNode<'_>, flags: u64) -> Self {
        let begun = self.bytes.len();
        if flags & abi::FUSE_SECURITY_CTX != 0 {
            let (count, content) = match node.security {
                Some((name, value)) => {
                    let mut content = Vec::new();
                    let head = abi::Secctx { size: value.len() as u32, padding: 0 };
                    content.extend_from_slice(head.as_bytes());
                    content.extend_from_slice(name.as_bytes());
                    content.push(0);
                    content.extend_from_slice(value);
                    content.resize(rec_align(content.len()), 0);
                    (1, content)
                }
                None => (0, Vec::new()),
            };
            self.extension(count, &content);
        }
        if flags & abi::FUSE_CREATE_SUPP_GROUP != 0
            && let Some(gid) = node.supplementary_gid
        {
            let groups = [1, gid];
            self.extension(abi::FUSE_EXT_GROUPS, groups.as_bytes());
        }
        self.add_extension_length(begun);
        self
    }

    /// Appends the supplementary groups of the caller ([`vendor::EXT_CALLER_GROUPS`]). The request
    /// has no data.
    pub fn with_caller_groups(mut self, groups: &[u32]) -> Self {
        let begun = self.bytes.len();
        let content = [&[groups.len() as u32], groups].concat();
        self.extension(vendor::EXT_CALLER_GROUPS, content.as_bytes());
        self.add_extension_length(begun);
        self
    }

    /// Adds the length of the extensions since `begun` to the length in the header.
    fn add_extension_length(&mut self, begun: usize) {
        let at = std::mem::offset_of!(InHeader, total_extlen);
        let before = u16::from_ne_bytes([self.bytes[at], self.bytes[at + 1]]);
        let units = before + ((self.bytes.len() - begun) / 8) as u16;
        self.bytes[at..at + 2].copy_from_slice(&units.to_ne_bytes());
    }

    fn extension(&mut self, type_: u32, content: &[u8]) {
        let size = rec_align(size_of::<abi::ExtHeader>() + content.len());
        let end = self.bytes.len() + size;
        let head = abi::ExtHeader { size: size as u32, type_ };
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(content);
        self.bytes.resize(end, 0);
    }

    /// Sets the length, including `data_len` bytes that follow. The caller sets the unique number.
    pub fn finish(&mut self, data_len: usize) -> &mut [u8] {
        let len = (self.bytes.len() + data_len) as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        &mut self.bytes
    }
}

/// The arguments of SETATTR.
pub fn setattr_in(fh: Option<u64>, set: &SetAttr) -> abi::SetattrIn {
    let mut args = abi::SetattrIn::default();
    if let Some(fh) = fh {
        (args.fh, args.valid) = (fh, abi::FATTR_FH);
    }
    if let Some(perm) = set.perm {
        args.mode = perm;
        args.valid |= abi::FATTR_MODE;
    }
    if let Some(uid) = set.uid {
        args.uid = uid;
        args.valid |= abi::FATTR_UID;
    }
    if let Some(gid) = set.gid {
        args.gid = gid;
        args.valid |= abi::FATTR_GID;
    }
    if let Some(size) = set.size {
        args.size = size;
        args.valid |= abi::FATTR_SIZE;
    }
    match set.atime {
        Some(SetTime::Now) => args.valid |= abi::FATTR_ATIME | abi::FATTR_ATIME_NOW,
        Some(SetTime::At(time)) => {
            (args.atime, args.atimensec) = (time.secs as u64, time.nanos);
            args.valid |= abi::FATTR_ATIME;
        }
        None => {}
    }
    match set.mtime {
        Some(SetTime::Now) => args.valid |= abi::FATTR_MTIME | abi::FATTR_MTIME_NOW,
        Some(SetTime::At(time)) => {
            (args.mtime, args.mtimensec) = (time.secs as u64, time.nanos);
            args.valid |= abi::FATTR_MTIME;
        }
        None => {}
    }
    if let Some(time) = set.ctime {
        (args.ctime, args.ctimensec) = (time.secs as u64, time.nanos);
        args.valid |= abi::FATTR_CTIME;
    }
    if set.kill_suidgid {
        args.valid |= abi::FATTR_KILL_SUIDGID;
    }
    args
}

/// The mode of a new node: type and permissions. The umask is applied unless the server does that
/// (`DONT_MASK`).
pub fn mode_of(node: &NewNode<'_>, flags: u64) -> u32 {
    let masked = flags & abi::FUSE_DONT_MASK == 0;
    let perm = if masked { node.perm & !node.umask } else { node.perm };
    node.kind.mode_bits() | (perm & 0o7777)
}

/// The arguments of MKNOD.
pub fn mknod_in(node: &NewNode<'_>, flags: u64) -> abi::MknodIn {
    let (mode, rdev) = (mode_of(node, flags), kernel_dev(node.rdev));
    abi::MknodIn { mode, rdev, umask: node.umask, padding: 0 }
}

/// The arguments of GETLK, SETLK and SETLKW. The opcode determines whether to wait.
pub fn lk_in(file: File, request: &LockRequest) -> abi::LkIn {
    let flock = request.kind == LockKind::Flock;
    abi::LkIn {
        fh: file.fh.0,
        owner: request.owner.0,
        lk: abi::FileLock {
            start: request.lock.start,
            end: request.lock.end,
            type_: match request.lock.typ {
                LockType::Read => 0,
                LockType::Write => 1,
                LockType::Unlock => 2,
            },
            pid: request.lock.pid,
        },
        lk_flags: if flock { abi::FUSE_LK_FLOCK } else { 0 },
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::{FileKind, Timestamp, XattrName};

    use super::*;
    use crate::convert;
    use crate::request::{DecodeOptions, DecodedRequest as Decoded, RequestBody};

    fn decode(bytes: &[u8]) -> Decoded<'_> {
        let options = DecodeOptions { setxattr_ext: true, payload_in_pipe: false };
        Decoded::parse(bytes, &options).unwrap()
    }

    #[test]
    fn encoded_requests_round_trip() {
        let caller = Caller { uid: 5, gid: 6, pid: 7 };
        let node = NewNode {
            umask: 0o22,
            rdev: 0x0103,
            supplementary_gid: Some(44),
            security: Some((XattrName::new(b"security.x").unwrap(), b"value")),
            ..NewNode::new(FileKind::CharDevice, 0o666, caller)
        };
        let flags = abi::FUSE_SECURITY_CTX | abi::FUSE_CREATE_SUPP_GROUP | abi::FUSE_DONT_MASK;
        let mut request = EncodedRequest::for_caller(Opcode::Mknod, caller, Ino(9))
            .with(&mknod_in(&node, flags))
            .with_name(Name::new(b"device").unwrap())
            .with_extensions(&node, flags)
            .with_caller_groups(&[45, 46, 47]);
        let decoded = decode(request.finish(0));
        let groups: Vec<u32> = decoded.caller_groups.unwrap().collect();
        assert_eq!(groups, [45, 46, 47]);
        assert_eq!((decoded.nodeid, decoded.uid, decoded.gid, decoded.pid), (9, 5, 6, 7));
        let RequestBody::Mknod { args, name, ext } = decoded.body else { panic!("{decoded:?}") };
        assert_eq!((args.mode, args.umask, name), (0o020666, 0o22, &b"device"[..]));
        assert_eq!(convert::library_dev(args.rdev), 0x0103);
        assert_eq!(ext.groups().collect::<Vec<_>>(), [44]);
        let context = ext.security_contexts().next().unwrap();
        assert_eq!((context.name, context.value), (&b"security.x"[..], &b"value"[..]));
    }

    #[test]
    fn the_umask_is_applied_unless_the_server_does() {
        let node =
            NewNode { umask: 0o22, ..NewNode::new(FileKind::Directory, 0o777, Caller::default()) };
        assert_eq!(mode_of(&node, 0), 0o040755);
        assert_eq!(mode_of(&node, abi::FUSE_DONT_MASK), 0o040777);
    }

    #[test]
    fn setattr_round_trips() {
        let time = Timestamp { secs: -5, nanos: 7 };
        let set = SetAttr {
            perm: Some(0o640),
            uid: None,
            gid: Some(3),
            size: Some(1 << 40),
            atime: Some(SetTime::Now),
            mtime: Some(SetTime::At(time)),
            ctime: Some(time),
            kill_suidgid: true,
            unanswered: false,
        };
        assert_eq!(convert::set_attr(&setattr_in(Some(4), &set)), set);
        assert_eq!(convert::set_attr(&setattr_in(None, &SetAttr::default())), SetAttr::default());
        assert_eq!(setattr_in(Some(4), &set).fh, 4);
    }
}
