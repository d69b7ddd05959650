//! The kinds of source `socket`, `shared` and `fuse`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;

use defuse_fs::FileSystem;
use defuse_fs::source::{About, Description, Error, Rest, Result, Sharing};

use crate::{LaneUse, Program, Remote, RemoteOptions};

/// `socket:PATH`.
pub static SOCKET: Description<RemoteOptions> = Description {
    about: About {
        name: "socket",
        form: "socket:PATH",
        help: "a file system that another process serves on this socket (defuse serve)",
        rest: Rest::Path,
        sharing: Sharing::Remote,
        rings: false,
        network: false,
    },
    options: &[],
    defaults: |_| RemoteOptions::default(),
    open: open_socket,
    images: None,
};

/// `shared:PATH`.
pub static SHARED: Description<RemoteOptions> = Description {
    about: About {
        name: "shared",
        form: "shared:PATH",
        help: "as socket:PATH, but through shared memory (defuse serve --shared)",
        rest: Rest::Path,
        sharing: Sharing::Remote,
        rings: false,
        network: false,
    },
    options: &[],
    defaults: |_| RemoteOptions { lanes: LaneUse::Required, ..RemoteOptions::default() },
    open: open_socket,
    images: None,
};

/// `fuse:COMMAND`.
pub static PROGRAM: Description<RemoteOptions> = Description {
    about: About {
        name: "fuse",
        form: "fuse:COMMAND",
        help: "a FUSE program, such as fuse:sshfs host:/dir, without a mount of its own",
        rest: Rest::Text,
        sharing: Sharing::NeedsServer,
        rings: false,
        network: false,
    },
    options: &[],
    defaults: |_| RemoteOptions::default(),
    open: open_program,
    images: None,
};

fn open_socket(rest: &OsStr, options: RemoteOptions) -> Result<Arc<dyn FileSystem>> {
    let remote = Remote::connect(Path::new(rest), options).map_err(Error::failed)?;
    Ok(Arc::new(remote))
}

fn open_program(rest: &OsStr, options: RemoteOptions) -> Result<Arc<dyn FileSystem>> {
    let words = rest.to_str().and_then(shlex::split).ok_or_else(|| {
        let command = rest.display();
        Error::Usage(format!("fuse:{command} has an open quote or is not valid UTF-8"))
    })?;
    let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    let program = Program::start(&words).map_err(Error::failed)?;
    let remote = Remote::of_program(program, options).map_err(Error::failed)?;
    Ok(Arc::new(remote))
}
