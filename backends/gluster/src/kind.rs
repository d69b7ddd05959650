//! The kind of source `gluster`.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::FileSystem;
use defuse_fs::source::Value::{Choice, Number, Seconds};
use defuse_fs::source::{
    About, Description, Error, Files, Frontend, Locks, Opt, Rest, Result, Sharing, Threads,
};

use crate::address::Address;
use crate::{Options, Transport, connect};

/// `gluster://HOST[,HOST...]/VOLUME[/DIR]`.
pub static KIND: Description<Options> = Description {
    about: About {
        name: "gluster",
        form: "gluster://HOST/VOLUME",
        help: "a GlusterFS volume, without its own client; also HOST,HOST and a directory after VOLUME",
        rest: Rest::Text,
        sharing: Sharing::NeedsServer,
        rings: false,
        network: true,
        files: Files::Any,
    },
    options: OPTIONS,
    defaults,
    open,
    images: None,
};

#[rustfmt::skip]
const OPTIONS: &[Opt<Options>] = &[
    Opt::new("log-level", Choice(&[
            ("none", |o| o.log_level = 0),
            ("critical", |o| o.log_level = 3),
            ("error", |o| o.log_level = 4),
            ("warning", |o| o.log_level = 5),
            ("info", |o| o.log_level = 7),
            ("debug", |o| o.log_level = 8),
            ("trace", |o| o.log_level = 9),
        ]),
        "what libgfapi writes to the standard error (default critical)"),
    Opt::new("transport", Choice(&[
            ("tcp", |o| o.transport = Transport::Tcp),
            ("unix", |o| o.transport = Transport::Unix),
        ]),
        "reach the servers by TCP (default), or the one of this machine by its socket"),
    Opt::new("port", Number(1, 65535, |o, n| o.port = n as u16),
        "port of the servers (default 24007)"),
    Opt::new("valid", Seconds(|o, time| o.valid_for = time),
        "changes of other clients are seen after at most this time (default 1)"),
    Opt::new("upcalls", Seconds(|o, time| o.told_for = time),
        "files are cached for this time if servers tell of changes (default 300, 0: never)"),
];

fn defaults(frontend: &Frontend) -> Options {
    let base = Options::default();
    Options {
        valid_for: if frontend.concurrent { Duration::ZERO } else { base.valid_for },
        in_application: frontend.threads == Threads::Application,
        // A server passes locks on, because it has several clients.
        submits: frontend.locks == Locks::Frontend,
        told_for: if frontend.concurrent || frontend.locks != Locks::Frontend {
            Duration::ZERO
        } else {
            base.told_for
        },
        ..base
    }
}

fn open(rest: &OsStr, options: Options) -> Result<Arc<dyn FileSystem>> {
    let text = rest.to_str().ok_or_else(|| {
        Error::Usage(format!("source gluster:{} is not valid UTF-8", rest.display()))
    })?;
    let address = Address::parse(text).map_err(Error::Usage)?;
    Ok(Arc::new(connect::open(&address, &options).map_err(Error::Failed)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_reach_their_settings() {
        let of = |options: &[&str]| KIND.settings(&Frontend::default(), options);
        assert_eq!(of(&[]), Ok(Options::default()));
        let set = of(&["log-level=debug", "transport=unix", "port=7", "valid=0.5", "upcalls=9"]);
        let set = set.unwrap();
        let expected = Options {
            log_level: 8,
            transport: Transport::Unix,
            port: 7,
            valid_for: Duration::from_millis(500),
            told_for: Duration::from_secs(9),
            ..Options::default()
        };
        assert_eq!(set, expected);
        let server = Frontend { locks: Locks::FileSystem, ..Frontend::default() };
        let of_server = KIND.settings(&server, &[] as &[&str]).unwrap();
        assert!(!of_server.submits && of_server.told_for.is_zero());
        assert!(of(&["port=0"]).unwrap_err().to_string().contains("from 1 to 65535"));
    }
}
