//! The settings of a connection in the file system fusectl (`filesystems/fuse.rst` of the kernel).

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::TraceError;
use crate::pseudo::PseudoFileSystem;

const USUAL: &str = "/sys/fs/fuse/connections";

/// A setting that can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusectlSetting {
    /// Maximum number of background requests that the daemon has at once.
    MaxBackground,
    /// Number of background requests from which the kernel delays read-ahead and write-back.
    CongestionThreshold,
}

impl FusectlSetting {
    /// All settings.
    pub const ALL: [FusectlSetting; 2] =
        [FusectlSetting::MaxBackground, FusectlSetting::CongestionThreshold];

    /// The name, in fusectl and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            FusectlSetting::MaxBackground => "max_background",
            FusectlSetting::CongestionThreshold => "congestion_threshold",
        }
    }
}

/// The settings of a connection at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FusectlValues {
    /// Number of requests waiting to be sent or answered, including background requests.
    pub waiting: u64,
    /// Maximum number of background requests that the daemon has at once.
    pub max_background: u64,
    /// Number of background requests from which the kernel delays read-ahead and write-back.
    pub congestion_threshold: u64,
}

/// An open fusectl file system.
#[derive(Debug)]
pub struct FusectlMount {
    fusectl: PseudoFileSystem,
}

impl FusectlMount {
    /// Opens fusectl. If it is not mounted, mounts it for this process alone. Errors:
    /// [`TraceError::File`].
    pub fn open() -> Result<FusectlMount, TraceError> {
        // An empty directory is either an unused mount point, or fusectl without connections.
        // Mounting the same file system once more is harmless then.
        let has_any = |path: &Path| fs::read_dir(path).is_ok_and(|mut dir| dir.next().is_some());
        Ok(FusectlMount { fusectl: PseudoFileSystem::open("fusectl", &[USUAL], has_any)? })
    }

    /// All connections of the machine. Errors: [`TraceError::File`].
    pub fn connections(&self) -> Result<Vec<u32>, TraceError> {
        let dir = fs::read_dir(self.fusectl.root()).map_err(|cause| settings_error("", cause))?;
        let names = dir.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut found: Vec<u32> = names.collect();
        found.sort_unstable();
        Ok(found)
    }

    /// The settings of a connection. Only its owner and root may read them. Errors:
    /// [`TraceError::File`].
    pub fn values(&self, connection: u32) -> Result<FusectlValues, TraceError> {
        Ok(FusectlValues {
            waiting: self.read(connection, "waiting")?,
            max_background: self.read(connection, FusectlSetting::MaxBackground.name())?,
            congestion_threshold: self
                .read(connection, FusectlSetting::CongestionThreshold.name())?,
        })
    }

    /// Changes a setting. The kernel accepts 1 to 65535; users other than root are limited by the
    /// parameters of the module `fuse`. Errors: [`TraceError::File`].
    pub fn set(&self, connection: u32, knob: FusectlSetting, value: u16) -> Result<(), TraceError> {
        self.write(connection, knob.name(), &value.to_string())
    }

    /// Aborts the connection: all current and future requests fail until it is unmounted. Errors:
    /// [`TraceError::File`].
    pub fn abort(&self, connection: u32) -> Result<(), TraceError> {
        self.write(connection, "abort", "1")
    }

    fn read(&self, connection: u32, name: &str) -> Result<u64, TraceError> {
        let file = format!("{connection}/{name}");
        let text = fs::read_to_string(self.fusectl.root().join(&file));
        let text = text.map_err(|cause| settings_error(&file, cause))?;
        let wrong = || settings_error(&file, std::io::ErrorKind::InvalidData.into());
        text.trim().parse().map_err(|_| wrong())
    }

    fn write(&self, connection: u32, name: &str, value: &str) -> Result<(), TraceError> {
        let file = format!("{connection}/{name}");
        fs::write(self.fusectl.root().join(&file), value)
            .map_err(|cause| settings_error(&file, cause))
    }
}

/// Errors name the usual path of the file.
fn settings_error(file: &str, cause: std::io::Error) -> TraceError {
    TraceError::File { path: PathBuf::from(USUAL).join(file), cause }
}
