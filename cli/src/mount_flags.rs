//! Mount options that are flags of the kernel (mount(8), "filesystem-independent mount options").

use rustix::mount::MountFlags;

/// An option that changes flags.
pub struct MountFlagOption {
    name: &'static str,
    clear: MountFlags,
    set: MountFlags,
}

impl MountFlagOption {
    const fn new(name: &'static str, clear: MountFlags, set: MountFlags) -> Self {
        MountFlagOption { name, clear, set }
    }

    /// The flags that this option makes of `flags`.
    pub fn apply(&self, flags: MountFlags) -> MountFlags {
        (flags - self.clear) | self.set
    }
}

const FLAGS: &[MountFlagOption] = {
    const NONE: MountFlags = MountFlags::empty();
    const ATIME: MountFlags =
        MountFlags::NOATIME.union(MountFlags::RELATIME).union(MountFlags::STRICTATIME);
    &[
        MountFlagOption::new("ro", NONE, MountFlags::RDONLY),
        MountFlagOption::new("rw", MountFlags::RDONLY, NONE),
        MountFlagOption::new("nosuid", NONE, MountFlags::NOSUID),
        MountFlagOption::new("suid", MountFlags::NOSUID, NONE),
        MountFlagOption::new("nodev", NONE, MountFlags::NODEV),
        MountFlagOption::new("dev", MountFlags::NODEV, NONE),
        MountFlagOption::new("noexec", NONE, MountFlags::NOEXEC),
        MountFlagOption::new("exec", MountFlags::NOEXEC, NONE),
        MountFlagOption::new("sync", NONE, MountFlags::SYNCHRONOUS),
        MountFlagOption::new("async", MountFlags::SYNCHRONOUS, NONE),
        MountFlagOption::new("dirsync", NONE, MountFlags::DIRSYNC),
        MountFlagOption::new("nosymfollow", NONE, MountFlags::NOSYMFOLLOW),
        MountFlagOption::new("symfollow", MountFlags::NOSYMFOLLOW, NONE),
        MountFlagOption::new("noatime", ATIME, MountFlags::NOATIME),
        MountFlagOption::new("atime", MountFlags::NOATIME, NONE),
        MountFlagOption::new("relatime", ATIME, MountFlags::RELATIME),
        MountFlagOption::new("strictatime", ATIME, MountFlags::STRICTATIME),
        MountFlagOption::new("nodiratime", NONE, MountFlags::NODIRATIME),
        MountFlagOption::new("diratime", MountFlags::NODIRATIME, NONE),
    ]
};

/// The option with this name; `None` for an option that is no flag.
pub fn find(name: &str) -> Option<&'static MountFlagOption> {
    FLAGS.iter().find(|option| option.name == name)
}

/// The flags in a list of options of mountinfo.
pub fn parse(list: &str) -> MountFlags {
    let set = list.split(',').filter_map(find);
    set.fold(MountFlags::empty(), |flags, option| flags | option.set)
}
