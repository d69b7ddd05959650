//! The operations, and the generation of random ones.

use proptest::collection::vec;
use proptest::prelude::*;

/// One step. Inodes, handles and names are selected by number, modulo their count, so that every
/// step of a shrunk sequence is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ModelOp {
    Lookup { dir: usize, name: u8 },
    LookupParent { dir: usize },
    Mknod { dir: usize, name: u8, kind: SpecialKind, perm: u16, umask: u16 },
    Mkdir { dir: usize, name: u8, perm: u16 },
    Symlink { dir: usize, name: u8, length: u16 },
    Link { node: usize, dir: usize, name: u8 },
    Unlink { dir: usize, name: u8 },
    Rmdir { dir: usize, name: u8 },
    Rename { from: usize, old: u8, to: usize, new: u8, flags: u8 },
    Create { dir: usize, name: u8, perm: u16, truncate: bool },
    Tmpfile { dir: usize, exclusive: bool },
    Open { node: usize, truncate: bool },
    Close { handle: usize },
    Forget { node: usize },
    Readlink { node: usize },
    Chmod { node: usize, perm: u16 },
    Chown { node: usize, uid: u8, gid: u8 },
    Truncate { node: usize, size: u32 },
    Write { handle: usize, offset: u32, length: u16, byte: u8, append: bool },
    Read { handle: usize, offset: u32, length: u16 },
    Fallocate { handle: usize, mode: u8, offset: u32, length: u32 },
    Copy { from: usize, to: usize, src: u32, dst: u32, length: u16 },
    Seek { handle: usize, offset: u32, hole: bool },
    Readdir { dir: usize },
    SetXattr { node: usize, name: u8, length: u8, flags: u8 },
    GetXattr { node: usize, name: u8 },
    RemoveXattr { node: usize, name: u8 },
}

/// The type of node that [`ModelOp::Mknod`] creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SpecialKind {
    Regular,
    Fifo,
    Socket,
    Device,
}

/// Offsets in few pages, often at or near their boundaries, where errors are likely.
fn offset() -> impl Strategy<Value = u32> + Clone {
    prop_oneof![
        0..5000u32,
        (0..6u32, 0..3u32).prop_map(|(page, by)| (page * 4096 + by).saturating_sub(1)),
        (0..6u32).prop_map(|page| page * 4096),
    ]
}

fn kind() -> impl Strategy<Value = SpecialKind> {
    use SpecialKind::*;
    prop_oneof![4 => Just(Regular), 1 => Just(Fifo), 1 => Just(Socket), 1 => Just(Device)]
}

/// Up to 60 steps.
pub(crate) fn sequence() -> impl Strategy<Value = Vec<ModelOp>> {
    vec(prop_oneof![7 => names(), 6 => bytes(), 3 => attributes()], 1..60)
}

fn names() -> impl Strategy<Value = ModelOp> {
    // Few names and few directories, so that operations collide.
    let (dir, node, name, perm) = (0..8usize, 0..8usize, 0..6u8, 0..0o10000u16);
    let place = (dir.clone(), name.clone());
    prop_oneof![
        1 => place.clone().prop_map(|(dir, name)| ModelOp::Lookup { dir, name }),
        1 => dir.clone().prop_map(|dir| ModelOp::LookupParent { dir }),
        1 => (place.clone(), kind(), perm.clone(), 0..0o1000u16).prop_map(
            |((dir, name), kind, perm, umask)| ModelOp::Mknod { dir, name, kind, perm, umask }
        ),
        2 => (place.clone(), perm.clone())
            .prop_map(|((dir, name), perm)| ModelOp::Mkdir { dir, name, perm }),
        1 => (place.clone(), 1..4096u16)
            .prop_map(|((dir, name), length)| ModelOp::Symlink { dir, name, length }),
        1 => (node.clone(), place.clone())
            .prop_map(|(node, (dir, name))| ModelOp::Link { node, dir, name }),
        1 => place.clone().prop_map(|(dir, name)| ModelOp::Unlink { dir, name }),
        1 => place.clone().prop_map(|(dir, name)| ModelOp::Rmdir { dir, name }),
        3 => (place.clone(), place.clone(), prop_oneof![3 => Just(0u8), 2 => 0..9u8])
            .prop_map(|((from, old), (to, new), flags)| ModelOp::Rename {
                from, old, to, new, flags
            }),
        2 => (place, perm, any::<bool>())
            .prop_map(|((dir, name), perm, truncate)| ModelOp::Create {
                dir, name, perm, truncate
            }),
        1 => (dir.clone(), any::<bool>())
            .prop_map(|(dir, exclusive)| ModelOp::Tmpfile { dir, exclusive }),
        1 => node.clone().prop_map(|node| ModelOp::Forget { node }),
        1 => node.prop_map(|node| ModelOp::Readlink { node }),
        1 => dir.prop_map(|dir| ModelOp::Readdir { dir }),
    ]
}

fn bytes() -> impl Strategy<Value = ModelOp> {
    let (handle, node, length) = (0..4usize, 0..8usize, 0..9000u16);
    prop_oneof![
        2 => (node.clone(), any::<bool>())
            .prop_map(|(node, truncate)| ModelOp::Open { node, truncate }),
        1 => handle.clone().prop_map(|handle| ModelOp::Close { handle }),
        1 => (node, offset()).prop_map(|(node, size)| ModelOp::Truncate { node, size }),
        5 => (handle.clone(), offset(), length.clone(), 1..255u8, any::<bool>()).prop_map(
            |(handle, offset, length, byte, append)| ModelOp::Write {
                handle, offset, length, byte, append
            }
        ),
        3 => (handle.clone(), offset(), length.clone())
            .prop_map(|(handle, offset, length)| ModelOp::Read { handle, offset, length }),
        2 => (handle.clone(), 0..8u8, offset(), offset()).prop_map(
            |(handle, mode, offset, length)| ModelOp::Fallocate { handle, mode, offset, length }
        ),
        1 => (handle.clone(), handle.clone(), offset(), offset(), length).prop_map(
            |(from, to, src, dst, length)| ModelOp::Copy { from, to, src, dst, length }
        ),
        1 => (handle, offset(), any::<bool>())
            .prop_map(|(handle, offset, hole)| ModelOp::Seek { handle, offset, hole }),
    ]
}

fn attributes() -> impl Strategy<Value = ModelOp> {
    let (node, name) = (0..8usize, 0..3u8);
    prop_oneof![
        1 => (node.clone(), 0..0o10000u16).prop_map(|(node, perm)| ModelOp::Chmod { node, perm }),
        1 => (node.clone(), 0..3u8, 0..3u8)
            .prop_map(|(node, uid, gid)| ModelOp::Chown { node, uid, gid }),
        2 => (node.clone(), name.clone(), any::<u8>(), 0..4u8).prop_map(
            |(node, name, length, flags)| ModelOp::SetXattr { node, name, length, flags }
        ),
        1 => (node.clone(), name.clone()).prop_map(|(node, name)| ModelOp::GetXattr { node, name }),
        1 => (node, name).prop_map(|(node, name)| ModelOp::RemoveXattr { node, name }),
    ]
}
