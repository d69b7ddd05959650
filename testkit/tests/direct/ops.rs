//! The calls, and the generation of random ones.

use proptest::collection::vec;
use proptest::prelude::*;

/// One call. Paths and open files are selected by number.
#[derive(Clone, Copy, Debug)]
pub enum DirectOp {
    Open {
        path: usize,
        flags: u32,
        mode: u32,
    },
    /// Relative to an open file, which may be no directory.
    OpenIn {
        dir: usize,
        path: usize,
        flags: u32,
        mode: u32,
    },
    /// Another descriptor of an open file; both share one position.
    Dup {
        file: usize,
    },
    /// Sets or clears `O_APPEND`.
    Append {
        file: usize,
        on: bool,
    },
    Close {
        file: usize,
    },
    Read {
        file: usize,
        len: usize,
    },
    Write {
        file: usize,
        len: usize,
        byte: u8,
    },
    Pread {
        file: usize,
        len: usize,
        offset: u64,
    },
    Pwrite {
        file: usize,
        len: usize,
        offset: u64,
        byte: u8,
    },
    Seek {
        file: usize,
        offset: i64,
        whence: u32,
    },
    Ftruncate {
        file: usize,
        length: i64,
    },
    Fallocate {
        file: usize,
        mode: u32,
        offset: i64,
        length: i64,
    },
    Copy {
        from: usize,
        to: usize,
        len: usize,
    },
    List {
        file: usize,
    },
    Fstat {
        file: usize,
    },
    Fchmod {
        file: usize,
        mode: u32,
    },
    Stat {
        path: usize,
        follow: bool,
    },
    Access {
        path: usize,
        mask: u32,
    },
    Chmod {
        path: usize,
        mode: u32,
    },
    Chown {
        path: usize,
        uid: u32,
        gid: u32,
        follow: bool,
    },
    Utimens {
        path: usize,
        now: bool,
        follow: bool,
    },
    Truncate {
        path: usize,
        length: i64,
    },
    Mkdir {
        path: usize,
        mode: u32,
    },
    Mknod {
        path: usize,
        mode: u32,
    },
    Rmdir {
        path: usize,
    },
    Unlink {
        path: usize,
    },
    Symlink {
        target: usize,
        path: usize,
    },
    Readlink {
        path: usize,
    },
    Link {
        from: usize,
        to: usize,
        follow: bool,
    },
    Rename {
        from: usize,
        to: usize,
        flags: u32,
    },
    /// Between two open files that may be directories.
    RenameIn {
        dirs: (usize, usize),
        from: usize,
        to: usize,
    },
    UnlinkIn {
        dir: usize,
        path: usize,
    },
    SetXattr {
        path: usize,
        name: usize,
        len: usize,
        flags: u32,
    },
    GetXattr {
        path: usize,
        name: usize,
        room: usize,
    },
    ListXattr {
        path: usize,
    },
    RemoveXattr {
        path: usize,
        name: usize,
    },
    SetAcl {
        path: usize,
        perm: u8,
    },
}

/// Paths that interfere: through links, `..`, trailing slashes, and files that are no directory.
pub const PATHS: &[&str] = &[
    "a",
    "b",
    "d",
    "d/a",
    "d/b",
    "d/c",
    "d/../a",
    "d/",
    "a/",
    "b/",
    "l",
    "l/",
    "l/a",
    "l/b",
    "l/../b",
    "./b",
    "d/.",
    "d/..",
    "d/l",
    "d/l/",
    "o",
    "o/x",
    "missing/x",
    "",
    ".",
    "d//c/",
    "d/c/e",
    "d/c/../b",
    "s",
    "s/a",
    "s/b",
    "g",
    "g/a",
    "g/b",
    "g/c",
    "g/c/a",
    "x/a",
    "x/b",
    "x",
    "n",
    "n/a",
    "n/../a",
    "n/b",
    "d/c/l",
    "k",
    "k/a",
    "a/..",
    "a/.",
    "d/b/..",
    "m",
    "m/a",
    "m/b",
    "m/../a",
    "m/.",
    "d/../m/b/",
];

/// Attributes of all namespaces.
pub const XATTRS: &[&str] =
    &["user.a", "user.b", "trusted.a", "security.a", "system.x", "bad", "user.", ""];

/// Link texts.
pub const TARGETS: &[&str] = &["a", "d", "../a", "d/", "b", "l", "missing", "../g", "."];

fn flags() -> impl Strategy<Value = u32> {
    // 3 requests the permissions of reading and writing, and permits neither.
    let access = prop_oneof![9 => 0..3u32, 2 => Just(3)];
    let more = prop_oneof![
        4 => Just(0),
        4 => Just(0o100),           // CREAT
        2 => Just(0o300),           // CREAT EXCL
        2 => Just(0o1100),          // CREAT TRUNC
        1 => Just(0o1000),          // TRUNC
        2 => Just(0o200000),        // DIRECTORY
        1 => Just(0o200100),        // DIRECTORY CREAT
        2 => Just(0o400000),        // NOFOLLOW
        1 => Just(0o400100),        // NOFOLLOW CREAT
        2 => Just(0o2000),          // APPEND
        1 => Just(0o2100),          // APPEND CREAT
        1 => Just(0o1000000),       // NOATIME
        1 => Just(0o10000000),      // PATH
        1 => Just(0o10400000),      // PATH NOFOLLOW
        1 => Just(0o20200000),      // TMPFILE
    ];
    (access, more).prop_map(|(access, more)| access | more)
}

fn mode() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0o644), Just(0o755), Just(0o2755), Just(0o777), 0..0o10000u32]
}

fn id() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), Just(5000), Just(6000), Just(6001), Just(u32::MAX)]
}

/// Up to 40 calls.
pub fn sequence() -> impl Strategy<Value = Vec<DirectOp>> {
    vec(prop_oneof![5 => files(), 6 => names(), 4 => attributes()], 1..40)
}

fn files() -> impl Strategy<Value = DirectOp> {
    let (path, file, len) = (0..PATHS.len(), 0..4usize, 0..6000usize);
    let offset = prop_oneof![0..9000i64, Just(-1), Just(i64::MAX)];
    let range = prop_oneof![Just(0), Just(1), Just(3), Just(4096), Just(8192)];
    prop_oneof![
        6 => (path, flags(), mode())
            .prop_map(|(path, flags, mode)| DirectOp::Open { path, flags, mode }),
        2 => (file.clone(), 0..PATHS.len(), flags(), mode())
            .prop_map(|(dir, path, flags, mode)| DirectOp::OpenIn { dir, path, flags, mode }),
        1 => file.clone().prop_map(|file| DirectOp::Dup { file }),
        1 => (file.clone(), any::<bool>()).prop_map(|(file, on)| DirectOp::Append { file, on }),
        1 => file.clone().prop_map(|file| DirectOp::Close { file }),
        2 => (file.clone(), len.clone()).prop_map(|(file, len)| DirectOp::Read { file, len }),
        3 => (file.clone(), len.clone(), any::<u8>())
            .prop_map(|(file, len, byte)| DirectOp::Write { file, len, byte }),
        1 => (file.clone(), len.clone(), 0..9000u64)
            .prop_map(|(file, len, offset)| DirectOp::Pread { file, len, offset }),
        1 => (file.clone(), len.clone(), 0..9000u64, any::<u8>())
            .prop_map(|(file, len, offset, byte)| DirectOp::Pwrite { file, len, offset, byte }),
        2 => (file.clone(), offset.clone(), 0..6u32)
            .prop_map(|(file, offset, whence)| DirectOp::Seek { file, offset, whence }),
        1 => (file.clone(), offset.clone()).prop_map(|(file, length)| DirectOp::Ftruncate {
            file,
            length: length.min(100_000)
        }),
        1 => (file.clone(), range, offset, 0..9000i64).prop_map(|(file, mode, offset, length)| {
            let (mode, offset) = (mode as u32 & 0x13, offset.min(100_000));
            DirectOp::Fallocate { file, mode, offset, length }
        }),
        1 => (file.clone(), file.clone(), len)
            .prop_map(|(from, to, len)| DirectOp::Copy { from, to, len }),
        1 => file.clone().prop_map(|file| DirectOp::List { file }),
        1 => file.clone().prop_map(|file| DirectOp::Fstat { file }),
        1 => (file, mode()).prop_map(|(file, mode)| DirectOp::Fchmod { file, mode }),
    ]
}

fn names() -> impl Strategy<Value = DirectOp> {
    let path = 0..PATHS.len();
    let flags = prop_oneof![4 => Just(0u32), 1 => 0..9u32];
    let kind = prop_oneof![Just(0u32), Just(0o100000), Just(0o140000), Just(0o020000)];
    prop_oneof![
        3 => (path.clone(), mode()).prop_map(|(path, mode)| DirectOp::Mkdir { path, mode }),
        1 => (path.clone(), kind, mode())
            .prop_map(|(path, kind, mode)| DirectOp::Mknod { path, mode: kind | mode }),
        2 => path.clone().prop_map(|path| DirectOp::Rmdir { path }),
        2 => path.clone().prop_map(|path| DirectOp::Unlink { path }),
        2 => (0..TARGETS.len(), path.clone())
            .prop_map(|(target, path)| DirectOp::Symlink { target, path }),
        1 => path.clone().prop_map(|path| DirectOp::Readlink { path }),
        2 => (path.clone(), path.clone(), any::<bool>())
            .prop_map(|(from, to, follow)| DirectOp::Link { from, to, follow }),
        1 => ((0..4usize, 0..4usize), path.clone(), path.clone())
            .prop_map(|(dirs, from, to)| DirectOp::RenameIn { dirs, from, to }),
        1 => (0..4usize, path.clone()).prop_map(|(dir, path)| DirectOp::UnlinkIn { dir, path }),
        4 => (path.clone(), path, flags)
            .prop_map(|(from, to, flags)| DirectOp::Rename { from, to, flags }),
    ]
}

fn attributes() -> impl Strategy<Value = DirectOp> {
    let (path, name) = (0..PATHS.len(), 0..XATTRS.len());
    prop_oneof![
        3 => (path.clone(), any::<bool>())
            .prop_map(|(path, follow)| DirectOp::Stat { path, follow }),
        2 => (path.clone(), 0..8u32).prop_map(|(path, mask)| DirectOp::Access { path, mask }),
        3 => (path.clone(), mode()).prop_map(|(path, mode)| DirectOp::Chmod { path, mode }),
        3 => (path.clone(), id(), id(), any::<bool>())
            .prop_map(|(path, uid, gid, follow)| DirectOp::Chown { path, uid, gid, follow }),
        2 => (path.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(path, now, follow)| DirectOp::Utimens { path, now, follow }),
        1 => (path.clone(), -1..20_000i64)
            .prop_map(|(path, length)| DirectOp::Truncate { path, length }),
        2 => (path.clone(), name.clone(), 0..100usize, 0..3u32)
            .prop_map(|(path, name, len, flags)| DirectOp::SetXattr { path, name, len, flags }),
        1 => (path.clone(), name.clone(), 0..60usize)
            .prop_map(|(path, name, room)| DirectOp::GetXattr { path, name, room }),
        1 => path.clone().prop_map(|path| DirectOp::ListXattr { path }),
        1 => (path.clone(), name).prop_map(|(path, name)| DirectOp::RemoveXattr { path, name }),
        1 => (path, 0..8u8).prop_map(|(path, perm)| DirectOp::SetAcl { path, perm }),
    ]
}

/// An ACL that gives the tests' group `GROUP` the permissions `perm`.
pub fn acl(perm: u8) -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] = [
        (0x01, 6, u32::MAX),
        (0x04, 4, u32::MAX),
        (0x08, perm.into(), 6001),
        (0x10, 6, u32::MAX),
        (0x20, 1, u32::MAX),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// An item of the initial tree of both sides.
pub struct InitialItem {
    pub path: &'static str,
    pub what: ItemKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

pub enum ItemKind {
    Dir,
    File,
    Link(&'static str),
}

impl InitialItem {
    pub fn content(&self) -> String {
        self.path.repeat(100)
    }
}

const fn item(path: &'static str, what: ItemKind, mode: u32, uid: u32, gid: u32) -> InitialItem {
    InitialItem { path, what, mode, uid, gid }
}

pub const USER: u32 = 5000;
pub const GROUP: u32 = 6000;
pub const EXTRA: u32 = 6001;

/// The initial tree, in the order of creation.
pub const ITEMS: &[InitialItem] = &[
    item("", ItemKind::Dir, 0o777, 0, 0),
    item("d", ItemKind::Dir, 0o777, 0, 0),
    item("s", ItemKind::Dir, 0o1777, 0, 0),
    item("g", ItemKind::Dir, 0o2775, USER, EXTRA),
    item("x", ItemKind::Dir, 0o711, 0, 0),
    item("n", ItemKind::Dir, 0o700, 0, 0),
    item("a", ItemKind::File, 0o644, 0, 0),
    item("s/a", ItemKind::File, 0o666, 0, 0),
    item("x/a", ItemKind::File, 0o640, 0, EXTRA),
    item("n/a", ItemKind::File, 0o666, 0, 0),
    item("d/a", ItemKind::File, 0o6755, USER, GROUP),
    item("g/a", ItemKind::File, 0o604, 0, GROUP),
    item("l", ItemKind::Link("d"), 0, 0, 0),
    item("d/l", ItemKind::Link("../a"), 0, 0, 0),
    item("o", ItemKind::Link("o"), 0, 0, 0),
];
