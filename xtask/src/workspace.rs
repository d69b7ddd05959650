//! The packages of the workspace, as cargo describes them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// A package of the workspace.
#[derive(Debug, Default)]
pub struct CargoPackage {
    /// Its name.
    pub name: String,
    /// Its directory, relative to the root of the project.
    pub dir: PathBuf,
    /// The directories of the packages that it names, also for its tests.
    pub needs: Vec<PathBuf>,
    /// True if it has a library, which can have tests inside.
    pub has_library: bool,
    /// The test programs that need no feature which is off by default.
    pub tests: Vec<String>,
    /// The other test programs.
    pub tests_with_features: Vec<String>,
}

/// The packages of the workspace.
pub fn packages() -> Result<Vec<CargoPackage>> {
    let metadata = command::metadata()?;
    let packages = metadata["packages"].as_array().context("cargo names no packages")?;
    packages.iter().map(package).collect()
}

fn package(described: &Value) -> Result<CargoPackage> {
    let relative = |path: &Path| path.strip_prefix(command::root()).map(Path::to_owned);
    let list = |name: &str| described[name].as_array().cloned().unwrap_or_default();
    let manifest = described["manifest_path"].as_str().map(Path::new).context("a manifest")?;
    let dir = manifest.parent().and_then(|dir| relative(dir).ok());
    let needs = list("dependencies");
    let needs = needs.iter().filter_map(|need| relative(Path::new(need["path"].as_str()?)).ok());
    let targets = list("targets");
    let has_library = targets.iter().any(|target| target["kind"].to_string().contains("lib"));
    let tests = targets.iter().filter(|target| target["kind"][0] == "test");
    let (tests, with_features): (Vec<&Value>, Vec<&Value>) =
        tests.partition(|test| test["required-features"].as_array().is_none_or(Vec::is_empty));
    let names = |tests: Vec<&Value>| {
        tests.into_iter().filter_map(|test| test["name"].as_str().map(str::to_owned)).collect()
    };
    Ok(CargoPackage {
        name: described["name"].as_str().context("a package without a name")?.to_owned(),
        dir: dir.context("a manifest outside of the project")?,
        needs: needs.collect(),
        has_library,
        tests: names(tests),
        tests_with_features: names(with_features),
    })
}
