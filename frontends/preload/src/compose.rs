//! The one place where this frontend meets backends: how a file system of the plan is made.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use defuse_compose::{APPLICATION_THREADS, Settings, open_text};
use defuse_direct::MountArgs;
use defuse_fs::FileSystem;
use defuse_preload_plan::{ForkPolicy, MountPlan};

/// A file system of a plan.
pub struct Composed {
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// How it is mounted.
    pub args: MountArgs,
    /// What a fork does to it: never [`ForkPolicy::Auto`].
    pub fork: ForkPolicy,
}

/// Makes the file system of `plan`; descriptors that it keeps get numbers from `floor` on. The error
/// is for people.
pub fn open(plan: &MountPlan, floor: u32) -> Result<Composed, String> {
    let mut settings = Settings::default();
    // Other processes of the run change the same directory, and nobody tells this one.
    settings.passthrough.attr_valid_for = Duration::ZERO;
    settings.passthrough.entry_valid_for = Duration::ZERO;
    settings.passthrough.credentials = APPLICATION_THREADS;
    settings.passthrough.fd_cache = 256;
    settings.passthrough.descriptors_from = floor;
    let text = OsStr::from_bytes(&plan.source);
    let (source, settings, fs) = open_text(text, settings).map_err(|error| error.to_string())?;
    // What a passthrough knows is in the directory; anything else keeps its files in this process.
    let outside = source.backend.name == "passthrough";
    let own = if outside { ForkPolicy::Share } else { ForkPolicy::Deny };
    let args = MountArgs {
        read_only: settings.read_only,
        source: text.display().to_string(),
        ..MountArgs::default()
    };
    Ok(Composed { fs, args, fork: if plan.fork == ForkPolicy::Auto { own } else { plan.fork } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_a_file_system_lacks_are_refused_by_name() {
        let plan = MountPlan { source: b"memory:,sise=1G".to_vec(), ..MountPlan::default() };
        let error = open(&plan, 0).err().unwrap();
        assert!(error.contains("sise"), "{error}");
    }

    #[test]
    fn what_is_kept_in_the_process_is_not_shared() {
        let plan = MountPlan { source: b"memory:".to_vec(), ..MountPlan::default() };
        assert_eq!(open(&plan, 0).unwrap().fork, ForkPolicy::Deny);
    }
}
