//! Arguments of openat2(2).

/// Restrictions of a walk, `RESOLVE_*` of openat2(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResolveFlags(pub u64);

impl ResolveFlags {
    /// `RESOLVE_NO_XDEV`.
    pub const NO_XDEV: u64 = 0x01;
    /// `RESOLVE_NO_MAGICLINKS`. Mounts contain no magic links.
    pub const NO_MAGICLINKS: u64 = 0x02;
    /// `RESOLVE_NO_SYMLINKS`.
    pub const NO_SYMLINKS: u64 = 0x04;
    /// `RESOLVE_BENEATH`.
    pub const BENEATH: u64 = 0x08;
    /// `RESOLVE_IN_ROOT`.
    pub const IN_ROOT: u64 = 0x10;
    /// `RESOLVE_CACHED`: always fails with `EAGAIN`, which callers must expect.
    pub const CACHED: u64 = 0x20;

    pub(crate) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }
}

/// Arguments of open, like `struct open_how` of openat2(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenHow {
    /// The flags of open(2).
    pub flags: u32,
    /// Permission bits of a new file, before the umask is applied.
    pub mode: u32,
    /// Restrictions of the walk.
    pub resolve: ResolveFlags,
}
