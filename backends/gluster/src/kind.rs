//! The kind of source `gluster`.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::FileSystem;
use defuse_fs::source::OptionValue::{Choice, Number, Seconds, Text};
use defuse_fs::source::{
    CallingThreads, FileAccess, FrontendProperties, LockPlace, SourceDescription, SourceFacts,
    SourceOpenError, SourceOption, SourceRest, SourceResult, SourceSharing,
};

use crate::address::VolumeAddress;
use crate::{GlusterOptions, ManagementTransport, connect};

/// `gluster://HOST[,HOST...]/VOLUME[/DIR]`.
pub static KIND: SourceDescription<GlusterOptions> = SourceDescription {
    about: SourceFacts {
        name: "gluster",
        form: "gluster://HOST/VOLUME",
        help: "a GlusterFS volume, without its own client; also HOST,HOST and a directory after VOLUME",
        rest: SourceRest::Text,
        sharing: SourceSharing::NeedsServer,
        rings: false,
        network: true,
        files: FileAccess::Any,
    },
    options: OPTIONS,
    defaults,
    open,
    images: None,
};

#[rustfmt::skip]
const OPTIONS: &[SourceOption<GlusterOptions>] = &[
    SourceOption::new("log-level", Choice(&[
            ("none", |o| o.log_level = 0),
            ("critical", |o| o.log_level = 3),
            ("error", |o| o.log_level = 4),
            ("warning", |o| o.log_level = 5),
            ("info", |o| o.log_level = 7),
            ("debug", |o| o.log_level = 8),
            ("trace", |o| o.log_level = 9),
        ]),
        "messages of libgfapi in the log of the program (default critical)"),
    SourceOption::new("transport", Choice(&[
            ("tcp", |o| o.transport = ManagementTransport::Tcp),
            ("unix", |o| o.transport = ManagementTransport::Unix),
        ]),
        "reach the servers by TCP (default), or the one of this machine by its socket"),
    SourceOption::new("port", Number(1, 65535, |o, n| o.port = n as u16),
        "port of the servers (default 24007)"),
    SourceOption::new("volfile-server-port", Number(1, 65535, |o, n| o.port = n as u16),
        "the same as port, as GlusterFS's own client has it"),
    SourceOption::new("sub-directory", Text("PATH", "a directory of the volume",
            |o, path| {
                o.sub_directory = Some(path.to_owned());
                (!path.is_empty()).then_some(())
            }),
        "the same as a directory after VOLUME, as GlusterFS's own client has it"),
    SourceOption::new("ping-timeout", Number(1, 1013, |o, n| o.ping_timeout = Some(n as u16)),
        "seconds without an answer after which a brick is given up (default: as the volume says)"),
    SourceOption::new("acl", Choice(&[("yes", |o| o.acl = true), ("no", |o| o.acl = false)]),
        "no: access lists are neither shown nor set, and ls asks for none (default yes)"),
    SourceOption::new("valid", Seconds(|o, time| (o.valid_for, o.untold_for) = (time, Duration::ZERO)),
        "changes of other clients are seen after at most this time (default 1)"),
    SourceOption::new("upcalls", Seconds(|o, time| o.upcall_time = time),
        "files are cached for this time if servers report changes (default 300, 0: never)"),
];

fn defaults(frontend: &FrontendProperties) -> GlusterOptions {
    let base = GlusterOptions::default();
    GlusterOptions {
        valid_for: if frontend.concurrent { Duration::ZERO } else { base.valid_for },
        in_application: frontend.threads != CallingThreads::Serving,
        submits: frontend.threads == CallingThreads::Serving
            || frontend.locks == LockPlace::Frontend,
        // If processes open the volume separately, no process receives messages about the changes
        // of the others in time.
        upcall_time: match frontend.concurrent && frontend.locks != LockPlace::FileSystem {
            true => Duration::ZERO,
            false => base.upcall_time,
        },
        keeps_here: frontend.locks == LockPlace::FileSystem,
        // The programs of a run cache nothing, because they see each other's changes at once: all
        // changes come through here.
        untold_for: match frontend.concurrent {
            true => base.valid_for,
            false => Duration::ZERO,
        },
        ..base
    }
}

fn open(rest: &OsStr, options: GlusterOptions) -> SourceResult<Arc<dyn FileSystem>> {
    let text = rest.to_str().ok_or_else(|| {
        SourceOpenError::Usage(format!("source gluster:{} is not valid UTF-8", rest.display()))
    })?;
    let address = VolumeAddress::with_options(text, &options).map_err(SourceOpenError::Usage)?;
    Ok(Arc::new(connect::open(&address, &options).map_err(SourceOpenError::Failed)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_reach_their_settings() {
        let with = |options: &[&str]| KIND.settings(&FrontendProperties::default(), options);
        assert_eq!(with(&[]), Ok(GlusterOptions::default()));
        let set = with(&["log-level=debug", "transport=unix", "port=7", "valid=0.5", "upcalls=9"]);
        let set = set.unwrap();
        let expected = GlusterOptions {
            log_level: 8,
            transport: ManagementTransport::Unix,
            port: 7,
            valid_for: Duration::from_millis(500),
            upcall_time: Duration::from_secs(9),
            ..GlusterOptions::default()
        };
        assert_eq!(set, expected);
        let set = with(&["ping-timeout=5", "acl=no"]).unwrap();
        assert_eq!((set.ping_timeout, set.acl), (Some(5), false));
        assert_eq!(with(&["volfile-server-port=7"]).map(|set| set.port), Ok(7));
        let below = with(&["sub-directory=/a/b"]).map(|set| set.sub_directory);
        assert_eq!(below, Ok(Some("/a/b".to_owned())));
        assert!(with(&["sub-directory="]).unwrap_err().to_string().contains("a directory"));
        let of = |frontend: FrontendProperties| KIND.settings(&frontend, &[] as &[&str]).unwrap();
        let server =
            FrontendProperties { locks: LockPlace::FileSystem, ..FrontendProperties::default() };
        let of_server = of(server.clone());
        assert!(of_server.submits && of_server.keeps_here && !of_server.valid_for.is_zero());
        let of_run = of(FrontendProperties { concurrent: true, ..server.clone() });
        assert!(of_run.keeps_here && of_run.valid_for.is_zero() && !of_run.upcall_time.is_zero());
        assert!(!of_run.untold_for.is_zero() && of_server.untold_for.is_zero());
        // One of several processes that each open the volume.
        let own = FrontendProperties { locks: LockPlace::Inherited, concurrent: true, ..server };
        let of_process = of(own);
        assert!(of_process.upcall_time.is_zero() && !of_process.keeps_here);
        assert!(with(&["port=0"]).unwrap_err().to_string().contains("from 1 to 65535"));
    }
}
