//! A listing of a tree with all visible properties.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;

/// The attribute that the exerciser sets.
pub(super) const ATTRIBUTE: &str = "user.exercise";

/// A tree, without timestamps.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TreeListing(BTreeMap<PathBuf, TreeEntry>);

#[derive(Debug, PartialEq, Eq)]
struct TreeEntry {
    ino: u64,
    mode: u32,
    owner: (u32, u32),
    links: u64,
    /// For a directory, the size is up to the file system.
    size: u64,
    /// The target of a link, or a digest of a file's data.
    content: String,
    attribute: Option<Vec<u8>>,
}

impl TreeListing {
    /// Lists all of `dir`.
    ///
    /// # Errors
    ///
    /// Fails if an entry is listed that does not exist, or is listed twice, or if link counts are
    /// wrong.
    pub(super) fn list(dir: &Path) -> Result<TreeListing> {
        let mut listing = TreeListing(BTreeMap::new());
        listing.add(dir, Path::new(""))?;
        listing.check_links()?;
        Ok(listing)
    }

    fn add(&mut self, root: &Path, dir: &Path) -> Result<()> {
        let mut names = BTreeSet::new();
        let entries = root.join(dir).read_dir().with_context(|| dir.display().to_string())?;
        for entry in entries {
            let entry = entry.with_context(|| dir.display().to_string())?;
            let path = dir.join(entry.file_name());
            ensure!(names.insert(entry.file_name()), "{} is listed twice", path.display());
            let metadata = root.join(&path).symlink_metadata();
            let metadata = metadata.with_context(|| path.display().to_string())?;
            let kind = entry.file_type()?;
            ensure!(kind == metadata.file_type(), "{} is listed as {kind:?}", path.display());
            let seen = TreeEntry::from_metadata(&root.join(&path), &metadata);
            self.0.insert(path.clone(), seen.with_context(|| path.display().to_string())?);
            if kind.is_dir() {
                self.add(root, &path)?;
            }
        }
        Ok(())
    }

    /// All names of a file are in the tree, so their number must equal the link count.
    fn check_links(&self) -> Result<()> {
        let mut names: HashMap<u64, Vec<&Path>> = HashMap::new();
        for (path, entry) in self.0.iter().filter(|(_, entry)| !entry.is_dir()) {
            names.entry(entry.ino).or_default().push(path);
        }
        for (path, entry) in &self.0 {
            let Some(names) = names.get(&entry.ino) else { continue };
            let (path, links) = (path.display(), entry.links);
            ensure!(
                names.len() as u64 == links,
                "{path} has {links} links, and the names {names:?}"
            );
        }
        Ok(())
    }
}

impl TreeEntry {
    fn from_metadata(path: &Path, metadata: &std::fs::Metadata) -> Result<TreeEntry> {
        let kind = metadata.file_type();
        let content = if kind.is_symlink() {
            path.read_link()?.display().to_string()
        } else if kind.is_file() {
            let bytes = std::fs::read(path)?;
            ensure!(bytes.len() as u64 == metadata.len(), "{} bytes are read", bytes.len());
            let mut hasher = DefaultHasher::new();
            bytes.hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        } else {
            ensure!(kind.is_dir() || kind.is_fifo(), "{kind:?}");
            String::new()
        };
        Ok(TreeEntry {
            ino: metadata.ino(),
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            links: if kind.is_dir() { 0 } else { metadata.nlink() },
            size: if kind.is_dir() { 0 } else { metadata.len() },
            content,
            attribute: attribute(path)?,
        })
    }

    fn is_dir(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }
}

fn attribute(path: &Path) -> Result<Option<Vec<u8>>> {
    let mut room = vec![0; 256];
    match rustix::fs::lgetxattr(path, ATTRIBUTE, &mut room) {
        Ok(len) => Ok(Some(room[..len].to_vec())),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM | Errno::NOSYS) => Ok(None),
        Err(error) => Err(error).context("getxattr"),
    }
}

/// Prints a line for each entry, without inode numbers, which may differ in a new mount.
impl fmt::Display for TreeListing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, TreeEntry { mode, owner, links, size, content, attribute, .. }) in &self.0 {
            let (path, (uid, gid)) = (path.display(), owner);
            writeln!(f, "{path} {mode:o} {uid} {gid} {links} {size} {content} {attribute:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_visible_in_the_listing() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a"), "x").unwrap();
        std::fs::create_dir(at("d")).unwrap();
        let see = || TreeListing::list(dir.path()).unwrap().to_string();
        let mut seen = BTreeSet::from([see()]);
        std::fs::write(at("a"), "y").unwrap();
        assert!(seen.insert(see()), "bytes");
        std::fs::hard_link(at("a"), at("d/b")).unwrap();
        assert!(seen.insert(see()), "links");
        std::os::unix::fs::symlink("a", at("c")).unwrap();
        assert!(seen.insert(see()), "a symbolic link");
    }

    #[test]
    fn a_link_count_without_a_name_is_an_error() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(dir.path().join("a"), "x").unwrap();
        std::fs::hard_link(dir.path().join("a"), other.path().join("b")).unwrap();
        let error = TreeListing::list(dir.path()).unwrap_err().to_string();
        assert!(error.contains("2 links"), "{error}");
    }
}
