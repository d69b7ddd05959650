//! FUSE over io_uring, which the administrator must enable.

use std::fs;

use anyhow::Result;

use crate::command;
use crate::parts::RunRecord;

/// The module parameter, which applies to new mounts.
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Enables it until dropped, if this program may and the kernel supports it (Linux 6.14).
pub struct UringSetting {
    before: Option<String>,
}

impl UringSetting {
    /// Applies the setting, see [`UringSetting`]. Prints a message if it is not possible.
    pub fn apply() -> UringSetting {
        let before = fs::read_to_string(PARAMETER).ok();
        let allowed = before.is_some() && fs::write(PARAMETER, "1").is_ok();
        if !allowed {
            println!("left out: FUSE over io_uring ({PARAMETER} cannot be set)");
        }
        UringSetting { before: before.filter(|_| allowed) }
    }

    /// True if it is enabled now.
    pub fn is_so(&self) -> bool {
        self.before.is_some()
    }
}

impl Drop for UringSetting {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = fs::write(PARAMETER, before.trim())
        {
            eprintln!("{PARAMETER} is not {} again: {error}", before.trim());
        }
    }
}

/// Runs the tests that mount over io_uring. By default, tests use /dev/fuse.
pub fn test(parts: &mut RunRecord) -> Result<()> {
    if !command::is_root() {
        parts.skip("FUSE over io_uring: only root may enable it and mount");
        return Ok(());
    }
    let allowed = UringSetting::apply();
    if !allowed.is_so() {
        parts.record_missing_part(&format!(
            "FUSE over io_uring: {PARAMETER} cannot be set (Linux 6.14)"
        ));
        return Ok(());
    }
    // All of the workspace, so that dependencies have the features that they have in step `test`,
    // whose build is taken then. A package alone would be built anew with all below it.
    let session = ["test", "--workspace", "--no-fail-fast", "--test", "session"];
    parts.run_tests(command::cargo().args(session))?;
    let mut mounted = command::cargo();
    let tests = ["--test", "mounted_posix", "--test", "faults"];
    mounted.args(["test", "--workspace", "--no-fail-fast"]).args(tests);
    mounted.env("DEFUSE_PROGRAM", command::program_under_test()?);
    parts.run_tests(mounted.env("DEFUSE_TRANSPORT", "io_uring"))
}
