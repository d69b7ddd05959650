//! Every method of the contract: with the numbers of the present connection, and made again if its
//! answer is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::{
    AccessMask, Attr, Caps, Context, CopyRange, DirBuf, DirItem, DirSink, Entry, Errno, Fallocate,
    Fh, Figure, File, FileSystem, Ino, InterruptCheck, IoctlArgs, IoctlReply, Lock, LockOwner,
    LockRequest, LockType, LockWait, Name, NewNode, Notify, OpenArgs, OpenFlags, OpenReply, Origin,
    PollHandle, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SetXattrFlags,
    SliceSource, StatFs, Whence, WriteArgs, WriteBuf, Xattr, XattrName,
};

use super::attempt::CallAttempt;
use super::link::PART_PAUSE;
use super::table::NamePlace;
use super::{ReconnectingClient, RepeatRule};
use crate::lock;
use RepeatRule::{Again, IfMissing, Never};

impl FileSystem for ReconnectingClient {
    fn caps(&self) -> Caps {
        self.caps.clone()
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        self.link.attach(origin, notify);
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.link.detach(origin);
        let present = self.link.present();
        if present.is_dead() { Ok(()) } else { present.fs().detach(origin) }
    }

    fn figures(&self) -> Vec<Figure> {
        vec![Figure::count("reconnected", self.reconnect_count()).since_start()]
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.call(cx, Again, |at| {
            let dir = at.ino(parent)?;
            let entry = at.server()?.lookup(cx, dir, name)?;
            Ok(at.learn(Some((parent, name)), entry))
        })
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            let entry = at.server()?.lookup_parent(cx, inner)?;
            Ok(at.learn(None, entry))
        })
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        let returned = self.table().forget(ino, lookups);
        self.give_back(&returned);
    }

    fn mknod(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |at, dir| {
            at.make_name(dir, name, |server| server.mknod(cx, dir, name, node))
        })
    }

    fn mkdir(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |at, dir| {
            at.make_name(dir, name, |server| server.mkdir(cx, dir, name, node))
        })
    }

    fn symlink(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        target: &[u8],
        node: &NewNode<'_>,
    ) -> Result<Entry> {
        self.make(cx, parent, name, |at, dir| {
            at.make_name(dir, name, |server| server.symlink(cx, dir, name, target, node))
        })
    }

    fn link(&self, cx: &Context<'_>, ino: Ino, parent: Ino, name: Name<'_>) -> Result<Entry> {
        self.make(cx, parent, name, |at, dir| {
            let inner = at.ino(ino)?;
            at.make_name(dir, name, |server| server.link(cx, inner, dir, name))
        })
    }

    fn unlink(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, parent, name, |at, dir| at.server()?.unlink(cx, dir, name))
    }

    fn rmdir(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, parent, name, |at, dir| at.server()?.rmdir(cx, dir, name))
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        self.call(cx, Never, |at| {
            let dirs = (at.ino(from.0)?, at.ino(to.0)?);
            at.server()?.rename(cx, (dirs.0, from.1), (dirs.1, to.1), flags)?;
            let exchanged = flags.has(RenameFlags::EXCHANGE);
            self.table().record_rename(
                &make_place(from.0, from.1),
                &make_place(to.0, to.1),
                exchanged,
            );
            at.record_change(from.0);
            at.record_change(to.0);
            Ok(())
        })
    }

    fn readlink(&self, cx: &Context<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.readlink(cx, inner)
        })
    }

    fn getattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>) -> Result<Attr> {
        self.call(cx, Again, |at| {
            let (inner, fh) = at.ino_and_file(ino, fh)?;
            Ok(self.map_attr(at.server()?.getattr(cx, inner, fh)?))
        })
    }

    fn setattr(&self, cx: &Context<'_>, ino: Ino, fh: Option<Fh>, set: &SetAttr) -> Result<Attr> {
        self.call(cx, Again, |at| {
            let (inner, fh) = at.ino_and_file(ino, fh)?;
            let attr = at.server()?.setattr(cx, inner, fh, set)?;
            at.record_change(ino);
            Ok(self.map_attr(attr))
        })
    }

    fn access(&self, cx: &Context<'_>, ino: Ino, mask: AccessMask) -> Result<()> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.access(cx, inner, mask)
        })
    }

    fn setxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        let repeat = if flags.create || flags.replace { Never } else { Again };
        self.call(cx, repeat, |at| {
            let inner = at.ino(ino)?;
            at.server()?.setxattr(cx, inner, name, value, flags)?;
            at.record_change(ino);
            Ok(())
        })
    }

    fn getxattr(
        &self,
        cx: &Context<'_>,
        ino: Ino,
        name: XattrName<'_>,
        room: usize,
    ) -> Result<Xattr> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.getxattr(cx, inner, name, room)
        })
    }

    fn listxattr(&self, cx: &Context<'_>, ino: Ino, room: usize) -> Result<Xattr> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.listxattr(cx, inner, room)
        })
    }

    fn removexattr(&self, cx: &Context<'_>, ino: Ino, name: XattrName<'_>) -> Result<()> {
        self.call(cx, Never, |at| {
            let inner = at.ino(ino)?;
            at.server()?.removexattr(cx, inner, name)?;
            at.record_change(ino);
            Ok(())
        })
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            let opened = at.server()?.open(cx, inner, args)?;
            if let Err(errno) = at.remember_birth(ino, inner) {
                at.close(File { ino: inner, fh: opened.fh }, false);
                return Err(errno);
            }
            if args.flags.has(OpenFlags::TRUNC) {
                at.record_change(ino);
            }
            Ok(at.record_open(ino, (args.flags, false), opened))
        })
    }

    fn create(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        self.call(cx, IfMissing, |at| {
            let dir = at.ino(parent)?;
            let make = |server: &dyn FileSystem| server.create(cx, dir, name, node, args);
            let (entry, opened) = at.make_name(dir, name, make)?;
            let known = at.learn(Some((parent, name)), entry);
            at.record_change(parent);
            at.record_change(known.ino);
            // If the server has just ended, the file is found again without its birth.
            let _ = at.remember_birth(known.ino, entry.ino);
            Ok((known, at.record_open(known.ino, (args.flags, false), opened)))
        })
    }

    fn tmpfile(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        node: &NewNode<'_>,
        args: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        // A file whose reply is lost has ended with its server.
        self.call(cx, Again, |at| {
            let dir = at.ino(parent)?;
            let (entry, opened) = at.server()?.tmpfile(cx, dir, node, args)?;
            let known = at.learn(None, entry);
            Ok((known, at.record_open(known.ino, (args.flags, false), opened)))
        })
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let begun = out.filled_len();
        self.call(cx, Again, |at| {
            let inner = at.file(file)?;
            let done = (out.filled_len() - begun) as u64;
            let offset = args.offset.checked_add(done).ok_or(Errno::EOVERFLOW)?;
            at.server()?.read(cx, inner, ReadArgs { offset, ..args }, out)?;
            // A short read may mean the end of the file, or the end of the server.
            if out.remaining() > 0 && at.is_lost() { Err(Errno::ENOTCONN) } else { Ok(()) }
        })
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut bytes = vec![0; data.remaining()];
        let len = data.take(&mut bytes)?;
        let repeat = if args.flags.has(OpenFlags::APPEND) { Never } else { Again };
        self.call(cx, repeat, |at| {
            let inner = at.file(file)?;
            let mut source = SliceSource::new(&bytes[..len]);
            let count = at.server()?.write(cx, inner, args, &mut WriteBuf::new(&mut source))?;
            at.record_change(file.ino);
            Ok(count)
        })
    }

    /// Waits for no server: changes that the last server has not made durable are lost, and there
    /// is nothing to flush. While a server is being parted from, changes become durable, or calls
    /// go on: the outcome is known soon.
    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        loop {
            let present = self.link.present();
            present.check_for_end();
            let is_dead = present.is_dead();
            if is_dead && !present.has_ended() {
                // The thread that parts from the server waits until no call uses it.
                drop(present);
                std::thread::sleep(PART_PAUSE);
                continue;
            }
            let epoch = present.epoch + u64::from(is_dead);
            let inner = self.table().begin_flush(file, epoch)?;
            let Some((inner, no_flush)) = inner.filter(|_| !is_dead) else { return Ok(()) };
            if no_flush && !self.has_locked.load(Ordering::Relaxed) {
                return Ok(());
            }
            match present.fs().flush(cx, inner, owner) {
                Err(Errno::ENOTCONN) if present.is_dead() => {}
                outcome => return outcome,
            }
        }
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        self.close(file, |server, inner| server.release(cx, inner, args))
    }

    fn fsync(&self, cx: &Context<'_>, file: File, datasync: bool) -> Result<()> {
        self.sync(cx, file, |at, inner| at.server()?.fsync(cx, inner, datasync))
    }

    fn fallocate(&self, cx: &Context<'_>, file: File, range: Fallocate) -> Result<()> {
        let moves = range.mode & (Fallocate::COLLAPSE_RANGE | Fallocate::INSERT_RANGE) != 0;
        self.call(cx, if moves { Never } else { Again }, |at| {
            let inner = at.file(file)?;
            at.server()?.fallocate(cx, inner, range)?;
            at.record_change(file.ino);
            Ok(())
        })
    }

    fn lseek(&self, cx: &Context<'_>, file: File, offset: u64, whence: Whence) -> Result<u64> {
        self.call(cx, Again, |at| {
            let inner = at.file(file)?;
            at.server()?.lseek(cx, inner, offset, whence)
        })
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        // Within one file, a second copy could read the data that the first one has written.
        let repeat = if copy.src.ino == copy.dst.ino { Never } else { Again };
        self.call(cx, repeat, |at| {
            let (src, dst) = (at.file(copy.src)?, at.file(copy.dst)?);
            let count = at.server()?.copy_file_range(cx, &CopyRange { src, dst, ..*copy })?;
            at.record_change(copy.dst.ino);
            Ok(count)
        })
    }

    fn ioctl(&self, cx: &Context<'_>, file: File, args: &IoctlArgs<'_>) -> Result<IoctlReply> {
        self.call(cx, Never, |at| {
            let inner = at.file(file)?;
            let reply = at.server()?.ioctl(cx, inner, args)?;
            at.record_change(file.ino);
            Ok(reply)
        })
    }

    fn poll(
        &self,
        cx: &Context<'_>,
        file: File,
        events: u32,
        wake: Option<PollHandle>,
    ) -> Result<u32> {
        self.call(cx, Again, |at| {
            let inner = at.file(file)?;
            let ready = at.server()?.poll(cx, inner, events, wake)?;
            if let Some(handle) = wake {
                self.table().record_poll(handle);
            }
            Ok(ready)
        })
    }

    fn bmap(&self, cx: &Context<'_>, ino: Ino, block_size: u32, index: u64) -> Result<u64> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.bmap(cx, inner, block_size, index)
        })
    }

    fn getlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.call(cx, Again, |at| {
            let inner = at.file_for_lock(file)?;
            at.server()?.getlk(cx, inner, request)
        })
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        self.has_locked.store(true, Ordering::Relaxed);
        // A lock whose answer is lost has ended with its server.
        self.call(cx, Again, |at| {
            let inner = at.file_for_lock(file)?;
            at.server()?.setlk(cx, inner, request)?;
            if request.lock.typ != LockType::Unlock {
                self.table().record_lock(file.fh, at.epoch());
            }
            Ok(())
        })
    }

    fn setlkw(&self, wait: LockWait) {
        self.has_locked.store(true, Ordering::Relaxed);
        let (file, request) = (wait.file(), wait.request());
        let found = wait.with_context(|cx| {
            self.call(cx, Again, |at| {
                let inner = at.file_for_lock(file)?;
                at.server().map(|_| (inner, at.connection()))
            })
        });
        let (inner, connected) = match found {
            Ok(found) => found,
            Err(errno) => return wait.finish(Err(errno)),
        };
        // The wait does not keep the connection: it may have to end first.
        let (table, life, epoch) =
            (Arc::clone(&self.table), connected.connection_life(), connected.epoch);
        let interrupt = Arc::clone(wait.interrupt());
        let wait = wait.map_file(|_| inner).map_answer(|answer| {
            Box::new(move |result: Result<()>| {
                if result.is_ok() && request.lock.typ != LockType::Unlock {
                    lock(&table).record_lock(file.fh, epoch);
                }
                let lost = match result {
                    Err(Errno::ENOTCONN | Errno::EIO) => life.is_over(),
                    // A server that ends in order interrupts waiting calls.
                    Err(Errno::EINTR) => !interrupt.is_interrupted(),
                    _ => false,
                };
                answer(if lost { Err(Errno::ENOLCK) } else { result });
            })
        });
        connected.fs().setlkw(wait);
    }

    fn opendir(&self, cx: &Context<'_>, ino: Ino, flags: OpenFlags) -> Result<OpenReply> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            let opened = at.server()?.opendir(cx, inner, flags)?;
            Ok(at.record_open(ino, (flags, true), opened))
        })
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        self.call(cx, Again, |at| {
            let inner = at.file(dir)?;
            let mut listing = RenumberedListing { at, dir: dir.ino, out };
            at.server()?.readdir(cx, inner, from, &mut DirBuf::new(&mut listing))
        })
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        self.close(dir, |server, inner| server.releasedir(cx, inner))
    }

    fn fsyncdir(&self, cx: &Context<'_>, dir: File, datasync: bool) -> Result<()> {
        self.sync(cx, dir, |at, inner| at.server()?.fsyncdir(cx, inner, datasync))
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        self.call(cx, Again, |at| {
            let inner = at.ino(ino)?;
            at.server()?.statfs(cx, inner)
        })
    }

    fn syncfs(&self, cx: &Context<'_>) -> Result<()> {
        self.call(cx, Again, |at| {
            self.table().begin_syncfs(at.epoch())?;
            at.server()?.syncfs(cx)
        })
    }
}

impl ReconnectingClient {
    /// Creates a name.
    fn make(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        make: impl Fn(&CallAttempt<'_>, Ino) -> Result<Entry>,
    ) -> Result<Entry> {
        self.call(cx, IfMissing, |at| {
            let entry = make(at, at.ino(parent)?)?;
            at.record_change(parent);
            Ok(at.learn(Some((parent, name)), entry))
        })
    }

    /// Removes a name.
    fn remove(
        &self,
        cx: &Context<'_>,
        parent: Ino,
        name: Name<'_>,
        remove: impl Fn(&CallAttempt<'_>, Ino) -> Result<()>,
    ) -> Result<()> {
        self.call(cx, Never, |at| {
            remove(at, at.ino(parent)?)?;
            self.table().record_removal(&make_place(parent, name));
            at.record_change(parent);
            Ok(())
        })
    }

    /// Makes the changes of an open file or directory durable, unless a server has ended with some
    /// of them.
    fn sync(
        &self,
        cx: &Context<'_>,
        file: File,
        sync: impl Fn(&CallAttempt<'_>, File) -> Result<()>,
    ) -> Result<()> {
        self.call(cx, Again, |at| {
            let inner = at.file(file)?;
            let count = self.table().begin_sync(file, at.epoch()).inspect_err(|_| {
                log::error!("changes of a file may be lost with a server: fsync fails once");
            })?;
            sync(at, inner)?;
            self.table().record_sync(file.ino, count);
            Ok(())
        })
    }

    fn close(
        &self,
        file: File,
        close: impl FnOnce(&dyn FileSystem, File) -> Result<()>,
    ) -> Result<()> {
        let closed = self.table().remove_open_file(file.fh);
        let Some(closed) = closed else { return Err(Errno::EBADF) };
        let present = self.link.present();
        if closed.epoch == present.epoch && !present.is_dead() {
            let _ = close(present.fs(), closed.file);
        }
        self.give_back(&closed.returned);
        Ok(())
    }
}

fn make_place(dir: Ino, name: Name<'_>) -> NamePlace {
    NamePlace { dir, name: name.as_bytes().into() }
}

/// Gives the entries of a listing the numbers of the frontend.
struct RenumberedListing<'a, 'b> {
    at: &'a CallAttempt<'a>,
    dir: Ino,
    out: &'a mut DirBuf<'b>,
}

impl DirSink for RenumberedListing<'_, '_> {
    fn wants_entries(&self) -> bool {
        self.out.wants_entries()
    }

    fn fits(&self, name_len: usize) -> bool {
        self.out.fits(name_len)
    }

    fn add(&mut self, item: DirItem<'_>, entry: Option<&Entry>) {
        let name = Name::new(item.name).ok();
        let known = entry.map(|entry| self.at.learn(name.map(|name| (self.dir, name)), *entry));
        self.out.push_with(item, || known);
    }
}
