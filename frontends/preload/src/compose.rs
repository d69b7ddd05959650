//! The one place where this frontend meets backends: which file systems a plan can name.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_direct::MountArgs;
use defuse_fs::FileSystem;
use defuse_fs::layer::ReadOnly;
use defuse_memory::Memory;
use defuse_passthrough::{Credentials, Passthrough};
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

/// Makes the file system of `plan`. The error is for people.
pub fn open(plan: &MountPlan, floor: u32) -> Result<Composed, String> {
    let (fs, fork): (Arc<dyn FileSystem>, _) = match plan.kind.as_str() {
        "passthrough" => (passthrough(plan, floor)?, ForkPolicy::Share),
        "memory" => (memory(plan)?, ForkPolicy::Deny),
        other => return Err(format!("there are no file systems of type {other:?}")),
    };
    let read_only = plan.options.iter().any(|option| option == "ro");
    let fs = if read_only { Arc::new(ReadOnly::new(fs)) } else { fs };
    let args = MountArgs {
        read_only,
        noexec: plan.options.iter().any(|option| option == "noexec"),
        source: format!("{}:{}", plan.kind, String::from_utf8_lossy(&plan.rest)),
        ..MountArgs::default()
    };
    let fork = if plan.fork == ForkPolicy::Auto { fork } else { plan.fork };
    Ok(Composed { fs, args, fork })
}

fn passthrough(plan: &MountPlan, floor: u32) -> Result<Arc<dyn FileSystem>, String> {
    let mut options = defuse_passthrough::Options {
        // Other processes of the run change the same directory, and nobody tells this one.
        attr_valid_for: Duration::ZERO,
        entry_valid_for: Duration::ZERO,
        credentials: Credentials::Restore,
        fd_cache: 256,
        descriptors_from: floor,
        ..defuse_passthrough::Options::default()
    };
    for option in &plan.options {
        match option.split_once('=').unwrap_or((option, "")) {
            ("ro" | "noexec", "") => {}
            ("backing", "on") => options.backing_files = true,
            ("backing", "off") => options.backing_files = false,
            _ => return Err(unknown(option, plan, "ro, noexec, backing=on|off")),
        }
    }
    let path = Path::new(OsStr::from_bytes(&plan.rest));
    Passthrough::new(path, options).map(|fs| Arc::new(fs) as _).map_err(|error| error.to_string())
}

fn memory(plan: &MountPlan) -> Result<Arc<dyn FileSystem>, String> {
    let mut options = defuse_memory::Options::default();
    let (uid, gid) = crate::process::ids();
    (options.root_uid, options.root_gid) = (uid, gid);
    for option in &plan.options {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let number = || value.parse::<u64>().ok();
        match name {
            "ro" | "noexec" if value.is_empty() => {}
            "size" => options.size = Some(size(value).ok_or_else(|| bad(option, plan))?),
            "inodes" => options.inodes = Some(number().ok_or_else(|| bad(option, plan))?),
            "mode" => {
                let mode = u32::from_str_radix(value, 8).ok().filter(|mode| *mode <= 0o7777);
                options.root_perm = mode.ok_or_else(|| bad(option, plan))?;
            }
            _ => return Err(unknown(option, plan, "ro, noexec, size, inodes, mode")),
        }
    }
    Ok(Arc::new(Memory::new(options)))
}

/// Bytes, with K, M, G or T for powers of 1024.
fn size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let shift =
        ["", "K", "M", "G", "T"].iter().position(|known| unit.eq_ignore_ascii_case(known))?;
    digits.parse::<u64>().ok()?.checked_mul(1 << (10 * shift))
}

fn unknown(option: &str, plan: &MountPlan, known: &str) -> String {
    format!("{} has no option {option}: known are {known}", plan.kind)
}

fn bad(option: &str, plan: &MountPlan) -> String {
    format!("{}: the value of {option} is not understood", plan.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!((size("10"), size("2k"), size("1G")), (Some(10), Some(2048), Some(1 << 30)));
        assert_eq!((size("x"), size("1X"), size("")), (None, None, None));
    }

    #[test]
    fn options_that_a_file_system_lacks_are_refused_by_name() {
        let plan = MountPlan {
            kind: "memory".into(),
            options: vec!["sise=1G".into()],
            ..MountPlan::default()
        };
        let error = open(&plan, 0).err().unwrap();
        assert!(error.contains("sise=1G") && error.contains("size"), "{error}");
    }
}
