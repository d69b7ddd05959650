//! Names, attributes and directories.

use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{
    DirBuf, DirItem, DirSink, Entry, Errno, Fh, File, FileKind, Ino, Name, NewNode, RenameFlags,
    Result, SetXattrFlags, Xattr, XattrName,
};
use zerocopy::{FromBytes, IntoBytes};

use super::privileges;
use super::{Dispatcher, HandlerOutcome, RequestCall, pod, send_success};
use crate::transport::RequestReply;
use defuse_wire::abi;
use defuse_wire::convert;
use defuse_wire::reply::DirEncoder;
use defuse_wire::request::RequestExtensions;

/// The names of access lists, acl(5).
const ACCESS_LISTS: &[u8] = b"system.posix_acl_";

impl Dispatcher {
    pub(super) fn lookup(
        &self,
        call: &RequestCall<'_>,
        name: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // Only NFS export looks up `.` and `..`, and only in directories.
        let found = match name {
            b".." => self.fs.lookup_parent(&call.cx, call.ino),
            b"." => Err(Errno::ESTALE),
            name => self.fs.lookup(&call.cx, call.ino, Name::new(name)?),
        };
        match found {
            Ok(entry) => self.send_entry(&entry, reply),
            Err(Errno::ENOENT) => {
                let valid = match self.may_cache_missing {
                    true => self.fs.negative_lifetime(self.origin),
                    false => Duration::ZERO,
                };
                if self.timeouts.negative.unwrap_or(valid).is_zero() {
                    return Err(Errno::ENOENT);
                }
                pod(reply, &self.timeouts.encode_negative(valid))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Sends `entry`, or undoes its lookup.
    fn send_entry(&self, entry: &Entry, reply: &mut dyn RequestReply) -> Result<HandlerOutcome> {
        let out = self.entry_out(entry);
        if reply.send(&[out.as_bytes()]).is_err() {
            self.give_back(entry.ino, 1);
        }
        Ok(HandlerOutcome::Sent)
    }

    pub(super) fn getattr(
        &self,
        call: &RequestCall<'_>,
        args: &abi::GetattrIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let fh = (args.getattr_flags & abi::FUSE_GETATTR_FH != 0).then_some(Fh(args.fh));
        let attr = self.fs.getattr(&call.cx, call.ino, fh)?;
        pod(reply, &self.timeouts_of(call.ino).attr_out(&attr))
    }

    /// `ENOSYS` if there are no birth times: the kernel then sends no STATX any more, and answers
    /// statx(2) with the attributes of a lookup or of a listing.
    pub(super) fn statx(
        &self,
        call: &RequestCall<'_>,
        args: &abi::StatxIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        if !self.birth_times {
            return Err(Errno::ENOSYS);
        }
        let fh = (args.getattr_flags & abi::FUSE_GETATTR_FH != 0).then_some(Fh(args.fh));
        let attr = self.fs.getattr(&call.cx, call.ino, fh)?;
        pod(reply, &self.timeouts_of(call.ino).statx_out(&attr))
    }

    pub(super) fn setattr(
        &self,
        call: &RequestCall<'_>,
        args: &abi::SetattrIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // A client over a socket may name a wrong process.
        let clears = self.negotiated.uses(abi::FUSE_HANDLE_KILLPRIV_V2);
        if self.is_kernel && clears && privileges::is_clear_request(args) {
            let is_written = !privileges::is_chown(args) && self.writers.has_any(call.ino);
            let attr = privileges::clear(&*self.fs, &call.cx, call.ino, is_written)?;
            return pod(reply, &convert::attr_for_now(&attr));
        }
        let fh = (args.valid & abi::FATTR_FH != 0).then_some(Fh(args.fh));
        let attr = self.fs.setattr(&call.cx, call.ino, fh, &convert::set_attr(args))?;
        pod(reply, &self.timeouts_of(call.ino).attr_out(&attr))
    }

    pub(super) fn readlink(
        &self,
        call: &RequestCall<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let target = self.fs.readlink(&call.cx, call.ino)?;
        let _ = reply.send(&[&target]);
        Ok(HandlerOutcome::Sent)
    }

    pub(super) fn symlink(
        &self,
        call: &RequestCall<'_>,
        name: &[u8],
        target: &[u8],
        ext: &RequestExtensions<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let node = new_node(call, FileKind::Symlink, 0o777, 0, ext)?;
        let entry = self.fs.symlink(&call.cx, call.ino, Name::new(name)?, target, &node)?;
        self.send_entry(&entry, reply)
    }

    pub(super) fn mknod(
        &self,
        call: &RequestCall<'_>,
        args: &abi::MknodIn,
        name: &[u8],
        ext: &RequestExtensions<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let kind = convert::node_kind(args.mode)?;
        let node = NewNode {
            rdev: convert::library_dev(args.rdev),
            ..new_node(call, kind, args.mode, args.umask, ext)?
        };
        let entry = self.fs.mknod(&call.cx, call.ino, Name::new(name)?, &node)?;
        self.send_entry(&entry, reply)
    }

    pub(super) fn mkdir(
        &self,
        call: &RequestCall<'_>,
        args: &abi::MkdirIn,
        name: &[u8],
        ext: &RequestExtensions<'_>,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let node = new_node(call, FileKind::Directory, args.mode, args.umask, ext)?;
        let entry = self.fs.mkdir(&call.cx, call.ino, Name::new(name)?, &node)?;
        self.send_entry(&entry, reply)
    }

    pub(super) fn rename(
        &self,
        call: &RequestCall<'_>,
        (newdir, flags): (u64, u32),
        name: &[u8],
        newname: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let from = (call.ino, Name::new(name)?);
        let to = (Ino(newdir), Name::new(newname)?);
        send_success(self.fs.rename(&call.cx, from, to, RenameFlags(flags)), reply)
    }

    pub(super) fn link(
        &self,
        call: &RequestCall<'_>,
        args: &abi::LinkIn,
        name: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let entry = self.fs.link(&call.cx, Ino(args.oldnodeid), call.ino, Name::new(name)?)?;
        self.send_entry(&entry, reply)
    }

    pub(super) fn setxattr(
        &self,
        call: &RequestCall<'_>,
        args: &abi::SetxattrIn,
        name: &[u8],
        value: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        // XATTR_CREATE and XATTR_REPLACE of setxattr(2).
        let flags = SetXattrFlags {
            create: args.flags & 1 != 0,
            replace: args.flags & 2 != 0,
            clear_sgid: args.setxattr_flags & abi::FUSE_SETXATTR_ACL_KILL_SGID != 0,
        };
        send_success(
            self.fs.setxattr(&call.cx, call.ino, self.xattr_name(name)?, value, flags),
            reply,
        )
    }

    pub(super) fn getxattr(
        &self,
        call: &RequestCall<'_>,
        args: &abi::GetxattrIn,
        name: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let room = args.size as usize;
        let found = self.fs.getxattr(&call.cx, call.ino, self.xattr_name(name)?, room);
        let found = found.map_err(|errno| match errno {
            // A part of the tree has no access lists. Otherwise the kernel would refuse all access
            // there, or request no list any more.
            Errno::EOPNOTSUPP | Errno::ENOSYS
                if self.has_acls && name.starts_with(ACCESS_LISTS) =>
            {
                Errno::ENODATA
            }
            other => other,
        });
        send_xattr(found?, room, reply)
    }

    /// Refuses ACLs that would not be enforced: a caller that sets an ACL must not rely on it.
    fn xattr_name<'a>(&self, name: &'a [u8]) -> Result<XattrName<'a>> {
        if self.acls_ignored && name.starts_with(ACCESS_LISTS) {
            return Err(Errno::EOPNOTSUPP);
        }
        XattrName::new(name)
    }

    pub(super) fn listxattr(
        &self,
        call: &RequestCall<'_>,
        args: &abi::GetxattrIn,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let room = args.size as usize;
        send_xattr(self.fs.listxattr(&call.cx, call.ino, room)?, room, reply)
    }

    pub(super) fn removexattr(
        &self,
        call: &RequestCall<'_>,
        name: &[u8],
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        if name == b"security.capability" && self.is_kernel {
            let is_written = self.writers.has_any(call.ino);
            privileges::may_lose_capabilities(&*self.fs, &call.cx, call.ino, is_written)?;
        }
        send_success(self.fs.removexattr(&call.cx, call.ino, self.xattr_name(name)?), reply)
    }

    pub(super) fn readdir(
        self: &Arc<Self>,
        call: &RequestCall<'_>,
        args: &abi::ReadIn,
        plus: bool,
        reply: &mut dyn RequestReply,
    ) -> Result<HandlerOutcome> {
        let size = (args.size as usize).min(self.negotiated.max_read);
        let dir = File { ino: call.ino, fh: Fh(args.fh) };
        let encoder = DirEncoder::new(reply.room(size));
        let mut sink = KernelDir { encoder, plus, dispatcher: self };
        let listed = self.fs.readdir(&call.cx, dir, args.offset, &mut DirBuf::new(&mut sink));
        let len = sink.encoder.len();
        // Entries before the error have been looked up and are worth sending; the next request
        // meets the error again.
        if let Err(errno) = listed
            && len == 0
        {
            return Err(errno);
        }
        if reply.send_room(len).is_err() && plus {
            self.forget_entries(&reply.room(len)[..len]);
        }
        Ok(HandlerOutcome::Sent)
    }

    /// Undoes the lookups of a READDIRPLUS reply that was not delivered.
    fn forget_entries(&self, mut bytes: &[u8]) {
        while let Ok((entry, _)) = abi::Direntplus::read_from_prefix(bytes) {
            if entry.entry_out.nodeid != 0 {
                self.give_back(Ino(entry.entry_out.nodeid), 1);
            }
            let len = size_of::<abi::Direntplus>() + entry.dirent.namelen as usize;
            bytes = bytes.get(abi::rec_align(len)..).unwrap_or_default();
        }
    }
}

/// Returns the node of a creation request.
pub(super) fn new_node<'a>(
    call: &RequestCall<'_>,
    kind: FileKind,
    mode: u32,
    umask: u32,
    ext: &RequestExtensions<'a>,
) -> Result<NewNode<'a>> {
    let security = match ext.security_contexts().next() {
        Some(context) if !context.name.is_empty() => {
            Some((XattrName::new(context.name)?, context.value))
        }
        _ => None,
    };
    Ok(NewNode {
        umask: umask & 0o777,
        supplementary_gid: ext.groups().next(),
        security,
        ..NewNode::new(kind, mode & 0o7777, call.cx.caller)
    })
}

fn send_xattr(found: Xattr, room: usize, reply: &mut dyn RequestReply) -> Result<HandlerOutcome> {
    match found {
        Xattr::Size(size) => pod(reply, &abi::GetxattrOut { size, padding: 0 }),
        // The file system returned a value although only its size was requested.
        Xattr::Value(value) if room == 0 => {
            pod(reply, &abi::GetxattrOut { size: value.len() as u32, padding: 0 })
        }
        Xattr::Value(value) if value.len() > room => Err(Errno::ERANGE),
        Xattr::Value(value) => {
            let _ = reply.send(&[&value]);
            Ok(HandlerOutcome::Sent)
        }
    }
}

/// Directory entries on their way into the reply.
struct KernelDir<'a> {
    encoder: DirEncoder<'a>,
    plus: bool,
    dispatcher: &'a Dispatcher,
}

impl DirSink for KernelDir<'_> {
    fn wants_entries(&self) -> bool {
        self.plus
    }

    fn fits(&self, name_len: usize) -> bool {
        self.encoder.fits(name_len, self.plus)
    }

    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        let pushed = if self.plus {
            // Without an entry the node id is 0: the kernel takes the name and the type only.
            let mut out = abi::EntryOut::default();
            (out.attr.ino, out.attr.mode) = (item.ino, item.kind.mode_bits());
            let out = entry.map_or(out, |entry| self.dispatcher.entry_out(entry));
            self.encoder.push_plus(item.name, item.next, &out)
        } else {
            let kind = u32::from(item.kind.d_type());
            self.encoder.push(item.name, item.ino, item.next, kind)
        };
        debug_assert!(pushed.is_ok(), "an entry that fits was refused");
    }
}
