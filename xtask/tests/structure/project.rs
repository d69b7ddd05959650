//! The files of the project, and its crates as cargo sees them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The root of the project.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A path as the rules write it: from the root.
pub fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// All files of the project, without build results and downloads.
pub fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(root(), &mut found);
    found.sort();
    found
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    const FOREIGN: [&str; 5] = [".git", "target", "corpus", "artifacts", "seeds"];
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if FOREIGN.contains(&name.as_str()) {
            continue;
        }
        match path.symlink_metadata().unwrap().is_dir() {
            true => walk(&path, found),
            false => found.push(path),
        }
    }
}

/// The source files of all crates.
pub fn sources() -> Vec<PathBuf> {
    files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs")).collect()
}

/// A crate of the workspace.
pub struct WorkspaceCrate {
    /// The name.
    pub name: String,
    /// The folder, relative to the root.
    pub folder: String,
    /// The licence.
    pub license: Option<String>,
    /// The dependencies, including those for tests and build scripts.
    pub dependencies: Vec<CrateDependency>,
    /// The first file of each of its targets.
    pub roots: Vec<TargetRoot>,
}

/// One dependency.
pub struct CrateDependency {
    /// Name of the other crate.
    pub name: String,
    /// `normal`, `dev` or `build`.
    pub kind: String,
}

/// The root of a target.
pub struct TargetRoot {
    /// `lib`, `bin`, `test`, ...
    pub kind: String,
    /// The file.
    pub file: PathBuf,
}

/// The crates of the workspace.
pub fn packages() -> Vec<WorkspaceCrate> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--format-version=1", "--offline"]).current_dir(root());
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

fn package(value: &Value) -> WorkspaceCrate {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let manifest = PathBuf::from(text(&value["manifest_path"]).unwrap());
    let dependency = |value: &Value| CrateDependency {
        name: text(&value["name"]).unwrap(),
        kind: text(&value["kind"]).unwrap_or("normal".to_owned()),
    };
    let target = |value: &Value| TargetRoot {
        kind: text(&value["kind"][0]).unwrap(),
        file: text(&value["src_path"]).unwrap().into(),
    };
    WorkspaceCrate {
        name: text(&value["name"]).unwrap(),
        folder: relative(manifest.parent().unwrap()),
        license: text(&value["license"]),
        dependencies: value["dependencies"].as_array().unwrap().iter().map(dependency).collect(),
        roots: value["targets"].as_array().unwrap().iter().map(target).collect(),
    }
}
