//! A layer that makes changes durable before they are answered.

use crate::layer::Method;
use crate::{Context, FileSystem, Result, Shortcuts, delegate};

/// The inner file system, each change of which is durable when it is answered: the mount options
/// `dirsync` and `sync` of mount(8). The kernel syncs written data itself, but leaves names and
/// attributes to the file system.
///
/// A change that cannot be made durable has happened, and fails with the error of
/// [`FileSystem::syncfs`].
#[derive(Clone, Debug)]
pub struct SynchronousLayer<F> {
    inner: F,
    names_only: bool,
}

impl<F: FileSystem> SynchronousLayer<F> {
    /// Syncs every change of `inner` but writes, or with `names_only` the changes of names only.
    pub fn new(inner: F, names_only: bool) -> Self {
        SynchronousLayer { inner, names_only }
    }

    #[inline]
    fn intercept<T>(
        &self,
        method: Method,
        cx: &Context<'_>,
        call: impl FnOnce(&F) -> Result<T>,
    ) -> Result<T> {
        let answer = call(&self.inner)?;
        let is_change = if self.names_only { method.changes_names() } else { method.changes() };
        if is_change && method != Method::Write {
            self.inner.syncfs(cx)?;
        }
        Ok(answer)
    }
}

impl<F: FileSystem> FileSystem for SynchronousLayer<F> {
    delegate!(intercept inner);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }
}

impl<F: FileSystem> Shortcuts for SynchronousLayer<F> {
    delegate!(intercept inner, only resolve, peek);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::layer::testing::{self, cx, name};
    use crate::{Errno, Ino, RenameFlags, SetAttr};

    struct CountedSyncs<F> {
        inner: F,
        syncs: AtomicUsize,
    }

    impl<F: FileSystem> FileSystem for CountedSyncs<F> {
        delegate!(to inner, except syncfs);

        fn syncfs(&self, _: &Context<'_>) -> Result<()> {
            self.syncs.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn each_change_is_durable_when_it_is_answered() {
        for names_only in [true, false] {
            let counted =
                Arc::new(CountedSyncs { inner: testing::tree(), syncs: AtomicUsize::new(0) });
            let layer = SynchronousLayer::new(Arc::clone(&counted), names_only);
            let syncs = || counted.syncs.swap(0, Ordering::Relaxed);
            let dir = layer.lookup(&cx(), Ino::ROOT, name("dir")).unwrap().ino;
            let file = layer.lookup(&cx(), dir, name("file")).unwrap().ino;
            assert_eq!(layer.getattr(&cx(), file, None).map(|_| syncs()), Ok(0));
            assert_eq!(
                layer.mkdir(&cx(), dir, name("new"), &testing::node()).map(|_| syncs()),
                Ok(1)
            );
            let (from, to) = ((dir, name("new")), (dir, name("other")));
            assert_eq!(layer.rename(&cx(), from, to, RenameFlags(0)).map(|_| syncs()), Ok(1));
            assert_eq!(layer.rmdir(&cx(), dir, name("other")).map(|_| syncs()), Ok(1));
            assert_eq!(layer.rmdir(&cx(), dir, name("other")).err(), Some(Errno::ENOENT));
            assert_eq!(syncs(), 0, "nothing has changed");
            let attributes = usize::from(!names_only);
            let changed = layer.setattr(&cx(), file, None, &SetAttr::default());
            assert_eq!(changed.map(|_| syncs()), Ok(attributes));
            assert_eq!(testing::write(&layer, file, b"x").map(|_| syncs()), Ok(0));
        }
    }
}
