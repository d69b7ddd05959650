//! The kernel's own file systems (tracefs, fusectl), also where nobody has mounted them.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::Error;

/// The root of one of them.
#[derive(Debug)]
pub(crate) struct Pseudo {
    root: PathBuf,
    /// A mount that is seen nowhere and lives as long as this.
    _detached: Option<OwnedFd>,
}

impl Pseudo {
    /// That of type `fstype`: at one of `usual` if `probe` is there, otherwise mounted for this
    /// process alone. Errors: [`Error::File`].
    pub(crate) fn open(
        fstype: &'static str,
        usual: &[&str],
        is_there: fn(&Path) -> bool,
    ) -> Result<Pseudo, Error> {
        let at = usual.iter().map(Path::new).find(|path| is_there(path));
        if let Some(root) = at {
            return Ok(Pseudo { root: root.into(), _detached: None });
        }
        let mounted = fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC).and_then(|context| {
            fsconfig_create(&context)?;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        });
        let mounted = mounted.map_err(|errno| Error::File {
            path: usual.first().unwrap_or(&fstype).into(),
            cause: errno.into(),
        })?;
        let root = format!("/proc/self/fd/{}", mounted.as_raw_fd()).into();
        Ok(Pseudo { root, _detached: Some(mounted) })
    }

    /// Its root, for as long as this lives.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
}
