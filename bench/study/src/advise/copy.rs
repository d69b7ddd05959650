//! The copy that runs use, and a check for changes to it.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use defuse_measure::command;

/// A summary of a tree: names, types, sizes, permissions, owners and timestamps, but no data.
/// Writing a file changes its timestamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeFingerprint {
    entries: u64,
    sum: u64,
}

impl TreeFingerprint {
    /// The fingerprint of `root` and of the files below it.
    pub fn from_tree(root: &Path) -> Result<TreeFingerprint> {
        let mut fingerprint = TreeFingerprint { entries: 0, sum: 0 };
        walk(root, &mut |path, metadata| {
            let mut hasher = DefaultHasher::new();
            let name = path.strip_prefix(root).unwrap_or(path).as_os_str();
            name.as_bytes().hash(&mut hasher);
            let (mode, size) = (metadata.mode(), metadata.size());
            (mode, size, metadata.uid(), metadata.gid(), metadata.nlink()).hash(&mut hasher);
            (metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
            fingerprint.entries += 1;
            // A sum, because directories list their entries in any order.
            fingerprint.sum = fingerprint.sum.wrapping_add(hasher.finish());
        })?;
        Ok(fingerprint)
    }
}

/// Size of a copy in bytes.
pub fn size_of(root: &Path) -> Result<u64> {
    let mut bytes = 0;
    walk(root, &mut |_, metadata| bytes += metadata.blocks() * 512)?;
    Ok(bytes)
}

/// Replaces `to` by a copy of a tree with all attributes. Data is shared if the file system can do
/// that.
pub fn make(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to).with_context(|| format!("cannot remove {}", to.display()))?;
    }
    let source = from.join(".");
    fs::create_dir(to)?;
    let words = [
        OsStr::new("-a"),
        OsStr::new("--reflink=auto"),
        OsStr::new("--"),
        source.as_os_str(),
        to.as_os_str(),
    ];
    command::output("cp", &words)
        .with_context(|| format!("{} could not be copied to {}", from.display(), to.display()))?;
    Ok(())
}

fn walk(path: &Path, each: &mut dyn FnMut(&Path, &fs::Metadata)) -> Result<()> {
    let metadata =
        fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    each(path, &metadata);
    if metadata.is_dir() {
        for entry in
            fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?
        {
            walk(&entry?.path(), each)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_same_fingerprint_until_it_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(from.join("a/b")).unwrap();
        fs::write(from.join("a/b/c"), "text").unwrap();
        std::os::unix::fs::symlink("a", from.join("l")).unwrap();
        make(&from, &to).unwrap();
        let before = TreeFingerprint::from_tree(&to).unwrap();
        assert_eq!(TreeFingerprint::from_tree(&from).unwrap(), before);
        fs::read(to.join("a/b/c")).unwrap();
        assert_eq!(TreeFingerprint::from_tree(&to).unwrap(), before, "reading changes nothing");
        fs::write(to.join("a/b/c"), "texts").unwrap();
        assert_ne!(TreeFingerprint::from_tree(&to).unwrap(), before);
        make(&from, &to).unwrap();
        assert_eq!(TreeFingerprint::from_tree(&to).unwrap(), before);
        assert!(size_of(&to).unwrap() >= 4096);
    }
}
