//! The tree that the programs use: real files of this machine.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::dir::DemoDir;
use crate::children::ChildPrograms;

/// Size in bytes of the part that git uses.
const SUBSET: u64 = 12_000_000;

/// The copied tree.
pub struct DemoTree {
    from: PathBuf,
    all: TreeSize,
    subset: TreeSize,
}

#[derive(Clone, Copy, Default)]
struct TreeSize {
    files: u64,
    bytes: u64,
}

impl fmt::Display for DemoTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoTree { from, all, subset } = self;
        let mb = |bytes: u64| bytes as f64 / 1e6;
        write!(
            f,
            "{} files ({:.0} MB) of {}; for git {} files ({:.0} MB)",
            all.files,
            mb(all.bytes),
            from.display(),
            subset.files,
            mb(subset.bytes)
        )
    }
}

/// Copies the largest available tree, up to `limit` bytes, to `tree` in the source, and a part of
/// it to `subset`.
pub fn copy(children: &ChildPrograms, place: &DemoDir, limit: u64) -> Result<DemoTree> {
    let largest = candidates().into_iter().max_by_key(|dir| measure(dir).bytes.min(limit));
    let from = largest.context("neither cargo's sources nor /usr/include are there")?;
    let (tree, subset) = (place.source().join("tree"), place.source().join("subset"));
    let copy = |from: &Path, to: &Path, limit| {
        fs::create_dir(to)?;
        let mut size = TreeSize::default();
        for entry in list_sorted(from)? {
            let more = measure(&entry);
            if size.bytes + more.bytes > limit {
                continue;
            }
            let mut cp = Command::new("cp");
            cp.args(["-R", "-P", "--"]).arg(&entry).arg(to);
            children.run(&mut cp, &place.path("errors"))?;
            size = TreeSize { files: size.files + more.files, bytes: size.bytes + more.bytes };
        }
        anyhow::Ok(size)
    };
    let all = copy(&from, &tree, limit)?;
    let subset = copy(&tree, &subset, SUBSET)?;
    // Write back now, so that it does not slow down later programs.
    children.run(Command::new("sync").arg("-f").arg(place.source()), &place.path("errors"))?;
    Ok(DemoTree { from, all, subset })
}

/// Directories that usually have many real files.
fn candidates() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).or(home);
    let registries = cargo.and_then(|cargo| list_sorted(&cargo.join("registry/src")).ok());
    let include = PathBuf::from("/usr/include");
    registries.unwrap_or_default().into_iter().chain([include]).filter(|dir| dir.is_dir()).collect()
}

fn list_sorted(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = dir.read_dir().with_context(|| dir.display().to_string())?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

/// Number and size of the files below `path` (or of `path`), without following symbolic links.
fn measure(path: &Path) -> TreeSize {
    let Ok(data) = path.symlink_metadata() else { return TreeSize::default() };
    if !data.is_dir() {
        return TreeSize { files: 1, bytes: data.len() };
    }
    let add = |size: TreeSize, more: TreeSize| TreeSize {
        files: size.files + more.files,
        bytes: size.bytes + more.bytes,
    };
    let entries = list_sorted(path).unwrap_or_default();
    entries.iter().map(|path| measure(path)).fold(TreeSize::default(), add)
}
