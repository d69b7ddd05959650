//! A layer that refuses all changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::layer::Method;
use crate::{
    AccessMask, Caps, Context, Entry, Errno, File, FileSystem, Ino, Io, IoOp, Name, NewNode,
    OpenArgs, OpenFlags, OpenReply, ReadArgs, ReadBuf, Result, Shortcuts, delegate,
};

/// The inner file system, read-only. Every change fails with `EROFS`, as does opening for writing
/// or with `O_TRUNC`, and [`access`](FileSystem::access) with the write bit. Locks and ioctl(2) are
/// passed on.
///
/// A read of a file does not update its access time: it has `O_NOATIME`.
///
/// Its [`switch`](ReadOnlyLayer::switch) permits changes, and forbids them again.
#[derive(Clone, Debug)]
pub struct ReadOnlyLayer<F> {
    inner: F,
    writable: Arc<AtomicBool>,
}

impl<F: FileSystem> ReadOnlyLayer<F> {
    /// Wraps `inner`, and refuses changes.
    pub fn new(inner: F) -> Self {
        ReadOnlyLayer { inner, writable: Arc::default() }
    }

    /// The switch; true permits changes. When it is cleared, files remain open for writing, and
    /// writes to them fail with `EROFS`.
    pub fn switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.writable)
    }

    fn is_read_only(&self) -> bool {
        !self.writable.load(Ordering::Acquire)
    }

    /// The flags of an open file, with `O_NOATIME` while changes are refused.
    fn disable_access_time(&self, flags: OpenFlags) -> OpenFlags {
        if self.is_read_only() { OpenFlags(flags.0 | OpenFlags::NOATIME) } else { flags }
    }

    /// The inner file system.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    #[inline]
    fn intercept<T>(
        &self,
        method: Method,
        _: &Context<'_>,
        call: impl FnOnce(&F) -> Result<T>,
    ) -> Result<T> {
        if method.changes() && self.is_read_only() { Err(Errno::EROFS) } else { call(&self.inner) }
    }
}

/// The write bit of access(2), `W_OK`.
const WRITE: u32 = 2;

impl<F: FileSystem> FileSystem for ReadOnlyLayer<F> {
    delegate!(intercept inner, except caps, submit, access, open, create, read);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn caps(&self) -> Caps {
        // The descriptors behind open files may be writable, so that they would bypass this layer.
        Caps { read_only: true, backing_files: false, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        match io.op() {
            IoOp::Write { .. } if self.is_read_only() => io.finish(Err(Errno::EROFS)),
            _ => self.inner.submit(io),
        }
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        if mask.0 & WRITE != 0 && self.is_read_only() {
            return Err(Errno::EROFS);
        }
        self.inner.access(cx, ino, mask)
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        let changes = args.flags.writable() || args.flags.has(OpenFlags::TRUNC);
        if changes && self.is_read_only() {
            return Err(Errno::EROFS);
        }
        let opened = self.inner.open(
            cx,
            ino,
            OpenArgs { flags: self.disable_access_time(args.flags), ..args },
        )?;
        // A writable mapping would remain writable after the switch forbids changes.
        let lower = opened.lower.filter(|_| !args.flags.writable());
        Ok(OpenReply { backing: None, lower, ..opened })
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let args = ReadArgs { flags: self.disable_access_time(args.flags), ..args };
        self.inner.read(cx, file, args, out)
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        if !self.is_read_only() {
            let (entry, opened) = self.inner.create(cx, parent, name, node, args)?;
            return Ok((entry, OpenReply { backing: None, lower: None, ..opened }));
        }
        let entry = self.inner.lookup(cx, parent, name).map_err(|errno| match errno {
            Errno::ENOENT => Errno::EROFS,
            other => other,
        })?;
        self.inner.forget(entry.ino, 1);
        Err(Errno::EEXIST)
    }
}

impl<F: FileSystem> Shortcuts for ReadOnlyLayer<F> {
    delegate!(intercept inner, only resolve, peek);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::testing::{self, cx, name};
    use crate::{RenameFlags, SetAttr};

    #[test]
    fn all_changes_are_refused_and_all_reads_succeed() {
        let layer = ReadOnlyLayer::new(testing::tree());
        assert!(layer.caps().read_only);
        let dir = layer.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let file = layer.lookup(&cx(), dir, name("file")).unwrap().ino;
        let node = testing::node();
        let read_only = Some(Errno::EROFS);
        assert_eq!(layer.mkdir(&cx(), dir, name("new"), &node).err(), read_only);
        assert_eq!(layer.unlink(&cx(), dir, name("file")).err(), read_only);
        assert_eq!(layer.setattr(&cx(), file, None, &SetAttr::default()).err(), read_only);
        let (from, to) = ((dir, name("file")), (dir, name("other")));
        assert_eq!(layer.rename(&cx(), from, to, RenameFlags(0)).err(), read_only);
        assert_eq!(layer.access(&cx(), file, AccessMask(6)).err(), read_only);
        assert_eq!(testing::write(&layer, file, b"x"), Err(Errno::EROFS));
        assert_eq!(testing::read(&layer, file), Ok(b"text".to_vec()));
        assert_eq!(testing::submit_write(&layer, file), Err(Errno::EROFS));
    }

    #[test]
    fn its_switch_permits_and_forbids_changes() {
        let layer = ReadOnlyLayer::new(testing::tree());
        let dir = layer.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let file = layer.lookup(&cx(), dir, name("file")).unwrap().ino;
        layer.switch().store(true, Ordering::Release);
        assert_ne!(testing::write(&layer, file, b"x"), Err(Errno::EROFS));
        assert_ne!(layer.access(&cx(), file, AccessMask(6)), Err(Errno::EROFS));
        layer.switch().store(false, Ordering::Release);
        assert_eq!(testing::write(&layer, file, b"x"), Err(Errno::EROFS));
    }

    #[test]
    fn opening_depends_on_the_access_mode() {
        let layer = ReadOnlyLayer::new(testing::tree());
        let dir = layer.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
        let file = layer.lookup(&cx(), dir, name("file")).unwrap().ino;
        let args = |flags| OpenArgs { flags: OpenFlags(flags), kill_suidgid: false };
        let open = |flags| layer.open(&cx(), file, args(flags)).map(drop);
        assert_eq!(open(0), Ok(()));
        assert_eq!(open(OpenFlags::RDWR), Err(Errno::EROFS));
        assert_eq!(open(OpenFlags::TRUNC), Err(Errno::EROFS));
        let create = |at| {
            let flags = args(OpenFlags::CREAT | OpenFlags::EXCL);
            layer.create(&cx(), dir, name(at), &testing::node(), flags).map(drop)
        };
        assert_eq!(create("file"), Err(Errno::EEXIST));
        assert_eq!(create("none"), Err(Errno::EROFS));
    }
}
