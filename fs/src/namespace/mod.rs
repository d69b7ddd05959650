//! Several file systems in one tree.
//!
//! A [`Namespace`] shows each file system as a directory at its path. The directories above them
//! are its own, and cannot be changed. A name is never moved or linked from one file system to
//! another (`EXDEV`), as between mounts.
//!
//! The number of an inode has the number of its file system in its highest 8 bits, and below it the
//! number that the file system gave. So nothing is remembered for an inode, and no number means two
//! of them.

mod fs;
#[cfg(test)]
mod tests;
mod tree;

use std::fmt;
use std::sync::Arc;

use crate::layer::LockingLayer;
use crate::{Attr, Caller, Entry, Errno, FileSystem, Ino, LockSupport, Result};

use tree::NamespaceTree;

/// Bits of a number that name the file system. 0 stands for the directories of the namespace.
const BITS: u32 = 8;
/// The other bits.
const REST: u32 = u64::BITS - BITS;

/// One of the file systems of a [`Namespace`].
pub struct NamespaceMember {
    /// The names from the root to it, with single slashes between them and none at the ends.
    pub path: String,
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// Others may change it without the namespace, which stays [exclusive](crate::Caps::exclusive)
    /// for its other file systems. Nothing of this one may be cached: it answers no whole paths,
    /// and [`is_apart`](Namespace::is_apart) informs frontends.
    pub apart: bool,
}

/// The reason why paths make no namespace. The numbers are indices of the members, from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceError {
    /// This path is not of the form that [`NamespaceMember::path`] has.
    Path(usize),
    /// The first path equals the second one, or lies below it.
    Below(usize, usize),
    /// More file systems than numbers.
    TooMany,
}

/// Several file systems in one tree.
pub struct Namespace {
    tree: NamespaceTree,
    members: Vec<NamespaceMember>,
}

/// The place of an inode.
enum NamespacePlace<'a> {
    /// A directory of the namespace, by its number.
    Here(usize),
    /// The inode of a file system.
    There(MemberRef<'a>, Ino),
}

/// One of the members.
#[derive(Clone, Copy)]
struct MemberRef<'a> {
    fs: &'a dyn FileSystem,
    index: usize,
    apart: bool,
}

impl Namespace {
    /// The most file systems.
    pub const MOST: usize = (1 << BITS) - 1;

    /// Checks the paths of members: see [`NamespaceError`].
    ///
    /// # Errors
    ///
    /// The first that does not fit.
    pub fn check<'a>(
        paths: impl IntoIterator<Item = &'a str>,
    ) -> std::result::Result<(), NamespaceError> {
        NamespaceTree::new(paths, Caller::default()).map(drop)
    }

    /// The namespace of `members`. Its own directories belong to `owner`. File systems without
    /// locks get a keeper of locks, as the frontend calls them through one file system that has
    /// them.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`check`](Namespace::check).
    pub fn new(
        members: Vec<NamespaceMember>,
        owner: Caller,
    ) -> std::result::Result<Namespace, NamespaceError> {
        let tree = NamespaceTree::new(members.iter().map(|member| &*member.path), owner)?;
        let members = members.into_iter().map(|NamespaceMember { path, fs, apart }| {
            let fs = match fs.caps().locks {
                LockSupport::Frontend => Arc::new(LockingLayer::new(fs)),
                LockSupport::Either | LockSupport::FileSystem => fs,
            };
            NamespaceMember { path, fs, apart }
        });
        Ok(Namespace { tree, members: members.collect() })
    }

    /// The file systems, in the order in which they were given.
    pub fn members(&self) -> &[NamespaceMember] {
        &self.members
    }

    /// The file system that has `ino`, by its number, and the number that `ino` has there. `None`
    /// for directories of the namespace, and for numbers that it never gave.
    pub fn member_of(&self, ino: Ino) -> Option<(usize, Ino)> {
        Namespace::split(ino, self.members.len())
    }

    /// Returns the result of [`member_of`](Namespace::member_of), for a namespace of so many file
    /// systems.
    pub fn split(ino: Ino, members: usize) -> Option<(usize, Ino)> {
        let index = ((ino.0 >> REST) as usize).checked_sub(1)?;
        (index < members).then_some((index, Ino(ino.0 & (u64::MAX >> BITS))))
    }

    /// True for an inode of a file system that [others may change](NamespaceMember::apart).
    pub fn is_apart(&self, ino: Ino) -> bool {
        self.member_of(ino).is_some_and(|(index, _)| self.members[index].apart)
    }

    fn place(&self, ino: Ino) -> Result<NamespacePlace<'_>> {
        match self.member_of(ino) {
            Some((index, inner)) => Ok(NamespacePlace::There(self.member(index), inner)),
            None => self.tree.find(ino).map(NamespacePlace::Here).ok_or(Errno::ESTALE),
        }
    }

    fn member(&self, index: usize) -> MemberRef<'_> {
        let NamespaceMember { fs, apart, .. } = &self.members[index];
        MemberRef { fs: &**fs, index, apart: *apart }
    }

    /// The inode in a file system; `refusal` for a directory of the namespace.
    fn resolve_inode(&self, ino: Ino, refusal: Errno) -> Result<(MemberRef<'_>, Ino)> {
        match self.place(ino)? {
            NamespacePlace::There(at, inner) => Ok((at, inner)),
            NamespacePlace::Here(_) => Err(refusal),
        }
    }
}

impl MemberRef<'_> {
    /// The number that the namespace gives an inode.
    fn ino(self, inner: Ino) -> Option<Ino> {
        outer(self.index, inner)
    }

    /// The entry that the namespace gives. Fails with `EOVERFLOW` for an inode whose number is too
    /// large.
    fn entry(self, entry: Entry) -> Result<Entry> {
        let Some(ino) = self.ino(entry.ino) else {
            self.fs.forget(entry.ino, 1);
            return Err(Errno::EOVERFLOW);
        };
        Ok(Entry { ino, attr: self.attr(entry.attr), ..entry })
    }

    /// Attributes with a number for programs that no other file system of the namespace uses,
    /// unless its own are very large.
    fn attr(self, attr: Attr) -> Attr {
        Attr { st_ino: self.st_ino(attr.st_ino), ..attr }
    }

    fn st_ino(self, st_ino: u64) -> u64 {
        // A process that has a file system apart must not name the files of other members.
        let st_ino = if self.apart { st_ino & (u64::MAX >> BITS) } else { st_ino };
        st_ino ^ ((self.index as u64 + 1) << REST)
    }
}

fn outer(index: usize, inner: Ino) -> Option<Ino> {
    (inner.0 >> REST == 0).then_some(Ino((index as u64 + 1) << REST | inner.0))
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.members.iter().map(|member| &member.path)).finish()
    }
}
