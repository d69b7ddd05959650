//! A file system in this process as the target of a workload.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use defuse_compose::{OpenSource, SourceSettings};
use defuse_direct::{ClientMountArgs, ClientOptions, DirectClient};
use defuse_fs::source::{CallingThreads, FrontendProperties};
use defuse_wml::WorkloadPlan;
use defuse_wml_direct::DirectDriver;

use crate::sources::SOURCES;
use defuse_command::{CommandFailure, Result};

/// Opens `source`, with options after commas, and mounts it for this process on the directory that
/// all file sets of `plan` have in common.
pub(super) fn open(source: &OsString, plan: &WorkloadPlan) -> Result<DirectDriver> {
    let target = common_directory(plan)?;
    let frontend = FrontendProperties {
        threads: CallingThreads::Application,
        ..FrontendProperties::default()
    };
    let OpenSource { source, settings, fs } =
        SOURCES.open(source, SourceSettings::for_frontend(frontend))?;
    let client =
        DirectClient::new(ClientOptions { kernel_links: false, ..ClientOptions::default() });
    let source = source.text().to_string_lossy().into_owned();
    let args =
        ClientMountArgs { read_only: settings.read_only, source, ..ClientMountArgs::default() };
    let failed = |error: defuse_fs::Errno| {
        let target = target.display();
        CommandFailure::Failed(format!("{} could not be mounted on {target}: {error}", args.source))
    };
    client.mount(target.as_os_str().as_bytes(), fs, &args).map_err(failed)?;
    DirectDriver::new(Arc::new(client)).map_err(failed)
}

/// The deepest directory above all file sets.
fn common_directory(plan: &WorkloadPlan) -> Result<PathBuf> {
    let mut common: Option<PathBuf> = None;
    for set in &plan.filesets {
        let path = std::path::absolute(&set.path).map_err(CommandFailure::from_error)?;
        common = Some(match common {
            None => path,
            Some(before) => {
                before.ancestors().find(|one| path.starts_with(one)).map_or(path, Into::into)
            }
        });
    }
    common.filter(|path| path.parent().is_some()).ok_or_else(|| {
        let name = &plan.name;
        CommandFailure::Usage(format!(
            "{name}: --direct needs all file sets in one directory other than /; set it with --dir"
        ))
    })
}
