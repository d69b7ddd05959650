//! A file system that belongs to one process, and its use by a child of fork(2).
//!
//! The child has a copy of the memory and none of the threads. With the ring of a device it would
//! write into the parent's ring, without a thread it would wait for ever, and changes in its memory
//! would be lost. So its calls fail with `ENOTCONN`, like calls on a connection of its parent, and
//! one line on the standard error reports this. Closing, forgetting and unmounting concern the
//! child's copy only.

use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use defuse_fs::layer::Method;
use defuse_fs::{
    Context, Errno, FailureDomain, Figure, File, FileSystem, Ino, Io, Lifecycle, LockOwner,
    LockWait, Name, Notify, Origin, ReleaseArgs, Result, Shortcuts, delegate,
};
use defuse_process::ProcessOwner;

/// The inner file system in the process that made this layer, and `ENOTCONN` in its children.
pub(crate) struct OwnedFileSystem {
    inner: OwnedInner,
    owner: ProcessOwner,
    source: String,
    /// True if this child has written the line.
    is_reported: AtomicBool,
}

/// The file system; `None` only while it is dropped.
struct OwnedInner(Option<Arc<dyn FileSystem>>);

impl Deref for OwnedInner {
    type Target = dyn FileSystem;
    fn deref(&self) -> &(dyn FileSystem + 'static) {
        match &self.0 {
            Some(fs) => &**fs,
            None => unreachable!("a file system is there until it is dropped"),
        }
    }
}

impl OwnedFileSystem {
    pub(crate) fn new(fs: Arc<dyn FileSystem>, owner: ProcessOwner, source: String) -> Self {
        OwnedFileSystem {
            inner: OwnedInner(Some(fs)),
            owner,
            source,
            is_reported: AtomicBool::new(false),
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.owner.is_here() {
            return Ok(());
        }
        self.report_foreign_process();
        Err(Errno::ENOTCONN)
    }

    #[cold]
    fn report_foreign_process(&self) {
        if self.is_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let (source, owner, child) = (&self.source, self.owner.id(), std::process::id());
        let text = format!(
            "defuse: {source} belongs to process {owner}, and its child {child} cannot use it (ENOTCONN): open it \
             after fork(2), or let both use a server (defuse serve)\n"
        );
        // Written without the library's lock, which another thread of the parent may have held.
        let _ = rustix::io::write(std::io::stderr().as_fd(), text.as_bytes());
    }

    fn intercept<T>(
        &self,
        _: Method,
        _: &Context<'_>,
        call: impl FnOnce(&(dyn FileSystem + 'static)) -> Result<T>,
    ) -> Result<T> {
        self.check_process()?;
        call(&*self.inner)
    }
}

impl FileSystem for OwnedFileSystem {
    delegate!(intercept inner, except negative_lifetime, attach, detach, figures, notes, forget,
        failure_domain,
        lifecycle, submit, setlkw, flush, release, releasedir);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn negative_lifetime(&self, origin: Origin) -> Duration {
        match self.owner.is_here() {
            true => self.inner.negative_lifetime(origin),
            false => Duration::ZERO,
        }
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        if self.owner.is_here() {
            self.inner.attach(origin, notify);
        }
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        if self.owner.is_here() { self.inner.detach(origin) } else { Ok(()) }
    }

    fn figures(&self) -> Vec<Figure> {
        if self.owner.is_here() { self.inner.figures() } else { Vec::new() }
    }

    fn notes(&self) -> Vec<String> {
        if self.owner.is_here() { self.inner.notes() } else { Vec::new() }
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        if self.owner.is_here() {
            self.inner.forget(ino, lookups);
        }
    }

    fn failure_domain(&self, ino: Ino, name: Option<Name<'_>>) -> Option<FailureDomain> {
        if self.owner.is_here() { self.inner.failure_domain(ino, name) } else { None }
    }

    fn lifecycle(&self) -> Option<&dyn Lifecycle> {
        if self.owner.is_here() { self.inner.lifecycle() } else { None }
    }

    fn submit(&self, io: Io) {
        match self.check_process() {
            Ok(()) => self.inner.submit(io),
            Err(errno) => io.finish(Err(errno)),
        }
    }

    fn setlkw(&self, wait: LockWait) {
        match self.check_process() {
            Ok(()) => self.inner.setlkw(wait),
            Err(errno) => wait.finish(Err(errno)),
        }
    }

    /// The child has no data to write: its writes have failed.
    fn flush(&self, cx: &Context<'_>, file: File, owner: LockOwner) -> Result<()> {
        if self.owner.is_here() { self.inner.flush(cx, file, owner) } else { Ok(()) }
    }

    fn release(&self, cx: &Context<'_>, file: File, args: ReleaseArgs) -> Result<()> {
        if self.owner.is_here() { self.inner.release(cx, file, args) } else { Ok(()) }
    }

    fn releasedir(&self, cx: &Context<'_>, dir: File) -> Result<()> {
        if self.owner.is_here() { self.inner.releasedir(cx, dir) } else { Ok(()) }
    }
}

impl Shortcuts for OwnedFileSystem {
    delegate!(intercept inner, only resolve, peek);
}

impl Drop for OwnedFileSystem {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // Its end would wait for threads of the parent.
            std::mem::forget(self.inner.0.take());
        }
    }
}
