//! Replacement of the inode numbers in the arguments of a call.

use crate::{
    AccessMask, CopyRange, DirBuf, Fallocate, Fh, File, Ino, Io, IoctlArgs, LockOwner, LockRequest,
    LockWait, Name, NewNode, NormalPath, Notify, OpenArgs, OpenFlags, Origin, PollHandle, ReadArgs,
    ReadBuf, ReleaseArgs, RenameFlags, SetAttr, SetXattrFlags, Whence, WriteArgs, WriteBuf,
    XattrName,
};

/// An argument of a method of the contract, which may contain inode numbers. Used by `delegate!(map
/// ..)`.
pub trait MapInos: Sized {
    /// Replaces every inode number in the argument by the result of `map`.
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self;
}

impl MapInos for Ino {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        map(self)
    }
}

impl MapInos for File {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        File { ino: map(self.ino), ..self }
    }
}

impl MapInos for (Ino, Name<'_>) {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        (map(self.0), self.1)
    }
}

impl MapInos for Io {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        self.map_file(|file| file.map_inos(map))
    }
}

impl MapInos for LockWait {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        self.map_file(|file| file.map_inos(map))
    }
}

/// Types without inode numbers. A reference to a [`CopyRange`] has two but cannot be replaced:
/// layers that map implement `copy_file_range` themselves.
macro_rules! no_inos {
    ($($ty:ty,)*) => {
        $(impl MapInos for $ty {
            fn map_inos(self, _: impl Fn(Ino) -> Ino) -> Self {
                self
            }
        })*
    };
}

no_inos! {
    Name<'_>, NormalPath<'_>, XattrName<'_>, &NewNode<'_>, &SetAttr, &[u8], &LockRequest,
    &IoctlArgs<'_>,
    &mut ReadBuf<'_>, &mut WriteBuf<'_>, &mut DirBuf<'_>, RenameFlags, AccessMask, SetXattrFlags,
    OpenArgs, OpenFlags, ReadArgs, WriteArgs, LockOwner, ReleaseArgs, Fallocate, Whence,
    Option<Fh>, Option<Name<'_>>, Option<PollHandle>, Origin, usize, u64, u32, bool,
    std::sync::Arc<dyn Notify>,
}

impl MapInos for CopyRange {
    fn map_inos(self, map: impl Fn(Ino) -> Ino) -> Self {
        CopyRange { src: self.src.map_inos(&map), dst: self.dst.map_inos(&map), ..self }
    }
}
