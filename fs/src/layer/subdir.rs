//! A layer that presents a directory as the root.

use std::sync::Arc;

use crate::layer::MapInos;
use crate::notify::RenumberedNotify;
use crate::{
    Caller, Context, CopyRange, Entry, Errno, FileKind, FileSystem, Ino, Name, Notify, Origin,
    Result, Shortcuts, delegate,
};

/// A directory of the inner file system as the root. `..` does not leave it. A directory that
/// another client moves out of this directory remains accessible to callers that know its number,
/// as for a process in chroot(2). This layer is not a security boundary.
#[derive(Debug)]
pub struct SubdirLayer<F: FileSystem> {
    inner: F,
    base: Ino,
}

impl<F: FileSystem> SubdirLayer<F> {
    /// Resolves `path` (components from the root) in `inner` as `caller`, without following
    /// symbolic links. Fails with the errors of lookup, with `ENOTDIR` if the path leads to another
    /// file, and with `EINVAL` for a component that is not a name.
    pub fn new<'p>(
        inner: F,
        caller: Caller,
        path: impl IntoIterator<Item = &'p [u8]>,
    ) -> Result<Self> {
        let cx = Context::new(caller);
        // Created first, so that dropping it returns the lookup of the directory reached so far.
        let mut subdir = SubdirLayer { inner, base: Ino::ROOT };
        for component in path {
            let entry = subdir.inner.lookup(&cx, subdir.base, Name::new(component)?)?;
            subdir.give_back();
            subdir.base = entry.ino;
            if entry.attr.kind != FileKind::Directory {
                return Err(Errno::ENOTDIR);
            }
        }
        Ok(subdir)
    }

    /// The inner file system.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// Translates a number of this layer to a number of the inner file system.
    fn map<T: MapInos>(&self, argument: T) -> T {
        argument.map_inos(|ino| if ino == Ino::ROOT { self.base } else { ino })
    }

    fn give_back(&self) {
        if self.base != Ino::ROOT {
            self.inner.forget(self.base, 1);
        }
    }
}

impl<F: FileSystem> Drop for SubdirLayer<F> {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl<F: FileSystem> FileSystem for SubdirLayer<F> {
    delegate!(map inner, except attach, forget, lookup_parent, copy_file_range);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        let base = self.base;
        let map = move |ino| outer(base, ino);
        self.inner.attach(origin, Arc::new(RenumberedNotify::new(notify, map)));
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        // The root is never forgotten. The lookup of the inner directory belongs to this layer.
        if ino != Ino::ROOT {
            self.inner.forget(ino, lookups);
        }
    }

    fn lookup_parent(&self, cx: &Context<'_>, ino: Ino) -> Result<Entry> {
        let top = ino == Ino::ROOT || ino == self.base;
        let found = if top { None } else { Some(self.inner.lookup_parent(cx, ino)?) };
        match found {
            Some(entry) if entry.ino != self.base => Ok(entry),
            reached => {
                if let Some(entry) = reached {
                    self.inner.forget(entry.ino, 1);
                }
                let attr = self.inner.getattr(cx, self.base, None)?;
                let (generation, valid_for) = (0, attr.valid_for);
                Ok(Entry { ino: Ino::ROOT, generation, attr, valid_for })
            }
        }
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.inner.copy_file_range(cx, &self.map(*copy))
    }
}

impl<F: FileSystem> Shortcuts for SubdirLayer<F> {
    delegate!(map inner, only resolve, peek);
}

/// The number in the layer of an inode of the inner file system. The frontend does not know the
/// inner file system's root.
fn outer(base: Ino, ino: Ino) -> Option<Ino> {
    match ino {
        ino if ino == base => Some(Ino::ROOT),
        Ino::ROOT => None,
        other => Some(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::testing::{self, cx, name};
    use crate::{NoNotify, OpenFlags};

    fn components(path: &str) -> impl Iterator<Item = &[u8]> {
        path.split('/').filter(|part| !part.is_empty()).map(str::as_bytes)
    }

    #[test]
    fn a_directory_is_the_root_and_dot_dot_stays_inside() {
        let tree = testing::tree();
        {
            let dir = components("/dir");
            let layer = SubdirLayer::new(&*tree, Caller::default(), dir).unwrap();
            assert_eq!(layer.lookup(&cx(), Ino::ROOT, name("dir")).err(), Some(Errno::ENOENT));
            let file = layer.lookup(&cx(), Ino::ROOT, name("file")).unwrap().ino;
            assert_eq!(testing::read(&layer, file), Ok(b"text".to_vec()));
            let sub = layer.mkdir(&cx(), Ino::ROOT, name("sub"), &testing::node()).unwrap().ino;
            for inside in [sub, Ino::ROOT] {
                assert_eq!(layer.lookup_parent(&cx(), inside).unwrap().ino, Ino::ROOT);
            }
            layer.opendir(&cx(), Ino::ROOT, OpenFlags(0)).unwrap();
            layer.forget(file, 1);
            layer.forget(sub, 1);
        }
        assert_eq!(tree.nodes(), 1, "the layer gives back what it looked up");
    }

    #[test]
    fn a_path_must_lead_to_a_directory() {
        let tree = testing::tree();
        let subdir = |path| SubdirLayer::new(&*tree, Caller::default(), components(path)).err();
        assert_eq!(subdir("/dir/file"), Some(Errno::ENOTDIR));
        assert_eq!(subdir("/dir/none"), Some(Errno::ENOENT));
        assert_eq!(subdir("/dir/.."), Some(Errno::EINVAL));
        assert_eq!(subdir("/"), None);
        assert_eq!(tree.nodes(), 1);
    }

    #[test]
    fn notifications_use_the_numbers_of_the_layer() {
        let map = |ino| outer(Ino(7), ino);
        let inside = RenumberedNotify::new(Arc::new(NoNotify), map);
        assert_eq!(map(Ino(7)), Some(Ino::ROOT));
        assert_eq!(map(Ino(8)), Some(Ino(8)));
        assert_eq!(inside.invalidate_inode(Ino::ROOT, None), Err(Errno::ENOENT));
    }
}
