//! The kernel's file systems tracefs and fusectl, mounted or not.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::TraceError;

/// The root of such a file system.
#[derive(Debug)]
pub(crate) struct PseudoFileSystem {
    root: PathBuf,
    /// A detached mount, which lives as long as this value.
    _detached: Option<OwnedFd>,
}

impl PseudoFileSystem {
    /// Opens the file system of type `fstype`: at one of `usual` if `probe` accepts it, otherwise
    /// by mounting it for this process alone. Errors: [`TraceError::File`].
    pub(crate) fn open(
        fstype: &'static str,
        usual: &[&str],
        is_there: fn(&Path) -> bool,
    ) -> Result<PseudoFileSystem, TraceError> {
        let at = usual.iter().map(Path::new).find(|path| is_there(path));
        if let Some(root) = at {
            return Ok(PseudoFileSystem { root: root.into(), _detached: None });
        }
        let mounted = fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC).and_then(|context| {
            fsconfig_create(&context)?;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        });
        let mounted = mounted.map_err(|errno| TraceError::File {
            path: usual.first().unwrap_or(&fstype).into(),
            cause: errno.into(),
        })?;
        let root = format!("/proc/self/fd/{}", mounted.as_raw_fd()).into();
        Ok(PseudoFileSystem { root, _detached: Some(mounted) })
    }

    /// The root, valid as long as this value.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
}
