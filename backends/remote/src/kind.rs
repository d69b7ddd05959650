//! The kinds of source `socket`, `shared` and `fuse`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::FileSystem;
use defuse_fs::source::{
    FileAccess, OptionValue, SourceDescription, SourceFacts, SourceOpenError, SourceOption,
    SourceRest, SourceResult, SourceSharing,
};

use crate::{FuseProgram, LaneUse, ReconnectingClient, RemoteClient, RemoteOptions};

/// Settings of a server's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerSettings {
    remote: RemoteOptions,
    /// The time to wait for another server, if the first one ends.
    reconnect: Option<Duration>,
}

const OPTIONS: &[SourceOption<ServerSettings>] = &[SourceOption::new(
    "reconnect",
    OptionValue::Seconds(|s, limit| s.reconnect = Some(limit).filter(|limit| !limit.is_zero())),
    "if the server ends, calls wait so long for another one at the same path (default: 0)",
)];

/// `socket:PATH`.
pub static SOCKET: SourceDescription<ServerSettings> = SourceDescription {
    about: SourceFacts {
        name: "socket",
        form: "socket:PATH",
        help: "a file system that another process serves on this socket (defuse serve)",
        rest: SourceRest::Path,
        sharing: SourceSharing::Remote,
        rings: false,
        network: false,
        // With `reconnect` it connects again, by the path.
        files: FileAccess::Any,
    },
    options: OPTIONS,
    defaults: |_| ServerSettings::default(),
    open: open_socket,
    images: None,
};

/// `shared:PATH`.
pub static SHARED: SourceDescription<ServerSettings> = SourceDescription {
    about: SourceFacts {
        name: "shared",
        form: "shared:PATH",
        help: "as socket:PATH, but through shared memory (defuse serve --shared)",
        rest: SourceRest::Path,
        sharing: SourceSharing::Remote,
        rings: false,
        network: false,
        // With `reconnect` it connects again, by the path.
        files: FileAccess::Any,
    },
    options: OPTIONS,
    defaults: |_| ServerSettings {
        remote: RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() },
        ..ServerSettings::default()
    },
    open: open_socket,
    images: None,
};

/// `fuse:COMMAND`.
pub static PROGRAM: SourceDescription<RemoteOptions> = SourceDescription {
    about: SourceFacts {
        name: "fuse",
        form: "fuse:COMMAND",
        help: "a FUSE program, such as fuse:sshfs host:/dir, without a mount of its own",
        rest: SourceRest::Text,
        sharing: SourceSharing::NeedsServer,
        rings: false,
        network: false,
        files: FileAccess::Any,
    },
    options: &[],
    defaults: |_| RemoteOptions { lanes: LaneUse::IfOffered, ..RemoteOptions::default() },
    open: open_program,
    images: None,
};

fn open_socket(rest: &OsStr, settings: ServerSettings) -> SourceResult<Arc<dyn FileSystem>> {
    let (path, options) = (Path::new(rest), settings.remote);
    Ok(match settings.reconnect {
        Some(limit) => Arc::new(
            ReconnectingClient::connect(path, options, limit)
                .map_err(SourceOpenError::from_error)?,
        ),
        None => {
            Arc::new(RemoteClient::connect(path, options).map_err(SourceOpenError::from_error)?)
        }
    })
}

fn open_program(rest: &OsStr, options: RemoteOptions) -> SourceResult<Arc<dyn FileSystem>> {
    let words = rest.to_str().and_then(shlex::split).ok_or_else(|| {
        let command = rest.display();
        SourceOpenError::Usage(format!("fuse:{command} has an open quote or is not valid UTF-8"))
    })?;
    let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    let program = FuseProgram::start(&words).map_err(SourceOpenError::from_error)?;
    let remote =
        RemoteClient::start_program(program, options).map_err(SourceOpenError::from_error)?;
    Ok(Arc::new(remote))
}
