//! A file system in this process as the target of a workload.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use defuse_compose::{Opened, Settings};
use defuse_direct::{Client, MountArgs, Options};
use defuse_fs::source::{Frontend, Threads};
use defuse_wml::WorkloadPlan;
use defuse_wml_direct::DirectDriver;

use crate::sources::SOURCES;
use defuse_command::{Failure, Result};

/// Opens `source`, with options after commas, and mounts it for this process on the directory that
/// all file sets of `plan` have in common.
pub(super) fn open(source: &OsString, plan: &WorkloadPlan) -> Result<DirectDriver> {
    let target = common_directory(plan)?;
    let frontend = Frontend { threads: Threads::Application, ..Frontend::default() };
    let Opened { source, settings, fs } = SOURCES.open(source, Settings::of(frontend))?;
    let client = Client::new(Options { kernel_links: false, ..Options::default() });
    let source = source.text().to_string_lossy().into_owned();
    let args = MountArgs { read_only: settings.read_only, source, ..MountArgs::default() };
    let failed = |error: defuse_fs::Errno| {
        let target = target.display();
        Failure::Failed(format!("{} could not be mounted on {target}: {error}", args.source))
    };
    client.mount(target.as_os_str().as_bytes(), fs, &args).map_err(failed)?;
    DirectDriver::new(Arc::new(client)).map_err(failed)
}

/// The deepest directory above all file sets.
fn common_directory(plan: &WorkloadPlan) -> Result<PathBuf> {
    let mut common: Option<PathBuf> = None;
    for set in &plan.filesets {
        let path = std::path::absolute(&set.path).map_err(Failure::failed)?;
        common = Some(match common {
            None => path,
            Some(before) => {
                before.ancestors().find(|one| path.starts_with(one)).map_or(path, Into::into)
            }
        });
    }
    common.filter(|path| path.parent().is_some()).ok_or_else(|| {
        let name = &plan.name;
        Failure::Usage(format!(
            "{name}: --direct needs all file sets in one directory other than /; set it with --dir"
        ))
    })
}
