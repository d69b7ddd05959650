//! Warnings of little free space. A full disk makes tests fail in ways that do not name it.

use std::path::{Path, PathBuf};

use crate::command;

/// Disk space of a regular run, most of it in cargo's target directory: 10 GiB.
pub const RUN: u64 = 10 << 30;

/// Less free space than this after a failure may be its cause: 1 GiB.
pub const REST: u64 = 1 << 30;

/// Prints a warning for each directory of the steps that has less than `needed` bytes free.
pub fn warn(needed: u64) {
    for dir in directories() {
        if let Some(free) = free(&dir).filter(|&free| free < needed) {
            println!("{}", warning(&dir, free, needed));
        }
    }
}

/// The directories that steps write to, of which some may not exist yet.
fn directories() -> Vec<PathBuf> {
    command::target_dir().into_iter().chain([std::env::temp_dir()]).collect()
}

/// The bytes that this user may still write below `dir`, or below its first ancestor that exists.
fn free(dir: &Path) -> Option<u64> {
    let stat = dir.ancestors().find_map(|dir| rustix::fs::statvfs(dir).ok())?;
    Some(stat.f_bavail * stat.f_frsize)
}

fn warning(dir: &Path, free: u64, needed: u64) -> String {
    let [free, needed] = [free, needed].map(|bytes| bytes as f64 / f64::from(1 << 30));
    format!(
        "little space: {} has {free:.1} GiB free, and tests may fail with less than {needed:.0}: \
         make space there, or name another directory (CARGO_TARGET_DIR, TMPDIR)",
        dir.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_does_not_exist_yet_has_the_space_of_its_parent() {
        let root = Path::new("/");
        assert!(free(root).is_some_and(|free| free > 0));
        let stat = |dir| rustix::fs::statvfs(dir).unwrap();
        let free = free(Path::new("/no such/directory")).unwrap();
        assert!(free <= stat(root).f_blocks * stat(root).f_frsize);
    }

    #[test]
    fn a_warning_names_the_directory_and_what_to_do() {
        let said = warning(Path::new("/some/target"), 3 << 28, RUN);
        assert!(said.contains("/some/target has 0.8 GiB free"), "{said}");
        assert!(said.contains("less than 10") && said.contains("CARGO_TARGET_DIR"), "{said}");
    }
}
