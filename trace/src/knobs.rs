//! The knobs of a connection, in the file system fusectl (`filesystems/fuse.rst` of the kernel).

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::Error;
use crate::pseudo::Pseudo;

const USUAL: &str = "/sys/fs/fuse/connections";

/// A value that can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knob {
    /// How many background requests may be with the daemon.
    MaxBackground,
    /// From how many on the kernel holds back read-ahead and write-back.
    CongestionThreshold,
}

impl Knob {
    /// Every knob.
    pub const ALL: [Knob; 2] = [Knob::MaxBackground, Knob::CongestionThreshold];

    /// Its name, in fusectl and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Knob::MaxBackground => "max_background",
            Knob::CongestionThreshold => "congestion_threshold",
        }
    }
}

/// The values of a connection at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Values {
    /// Requests that wait to be sent or answered, the background ones included.
    pub waiting: u64,
    /// How many background requests may be with the daemon.
    pub max_background: u64,
    /// From how many on the kernel holds back read-ahead and write-back.
    pub congestion_threshold: u64,
}

/// fusectl, opened.
#[derive(Debug)]
pub struct Knobs {
    fusectl: Pseudo,
}

impl Knobs {
    /// Opens fusectl; where it is not mounted, for this process alone. Errors: [`Error::File`].
    pub fn open() -> Result<Knobs, Error> {
        // An empty directory is the mount point with nothing mounted, or without connections:
        // then another look at the same file system does no harm.
        let has_any = |path: &Path| fs::read_dir(path).is_ok_and(|mut dir| dir.next().is_some());
        Ok(Knobs { fusectl: Pseudo::open("fusectl", &[USUAL], has_any)? })
    }

    /// All connections of the machine. Errors: [`Error::File`].
    pub fn connections(&self) -> Result<Vec<u32>, Error> {
        let dir = fs::read_dir(self.fusectl.root()).map_err(|cause| failed("", cause))?;
        let names = dir.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut found: Vec<u32> = names.collect();
        found.sort_unstable();
        Ok(found)
    }

    /// The values of a connection. Only its owner and root may know. Errors: [`Error::File`].
    pub fn values(&self, connection: u32) -> Result<Values, Error> {
        Ok(Values {
            waiting: self.read(connection, "waiting")?,
            max_background: self.read(connection, Knob::MaxBackground.name())?,
            congestion_threshold: self.read(connection, Knob::CongestionThreshold.name())?,
        })
    }

    /// Changes a value. The kernel takes 1 to 65535, and from others than root no more than the
    /// parameters of the module `fuse` allow. Errors: [`Error::File`].
    pub fn set(&self, connection: u32, knob: Knob, value: u16) -> Result<(), Error> {
        self.write(connection, knob.name(), &value.to_string())
    }

    /// Ends the connection: all requests, now and later, get errors until it is unmounted. Errors:
    /// [`Error::File`].
    pub fn abort(&self, connection: u32) -> Result<(), Error> {
        self.write(connection, "abort", "1")
    }

    fn read(&self, connection: u32, name: &str) -> Result<u64, Error> {
        let file = format!("{connection}/{name}");
        let text = fs::read_to_string(self.fusectl.root().join(&file));
        let text = text.map_err(|cause| failed(&file, cause))?;
        let wrong = || failed(&file, std::io::ErrorKind::InvalidData.into());
        text.trim().parse().map_err(|_| wrong())
    }

    fn write(&self, connection: u32, name: &str, value: &str) -> Result<(), Error> {
        let file = format!("{connection}/{name}");
        fs::write(self.fusectl.root().join(&file), value).map_err(|cause| failed(&file, cause))
    }
}

/// Errors name the file as one finds it where fusectl is mounted.
fn failed(file: &str, cause: std::io::Error) -> Error {
    Error::File { path: PathBuf::from(USUAL).join(file), cause }
}
