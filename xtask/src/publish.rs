//! The crates that authors of file systems use, as a registry would take them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

use crate::command;

/// Crates that authors use, and those that they need. All other crates have `publish = false`.
const PUBLISHED: [&str; 7] = [
    "defuse-fs",
    "defuse-probe",
    "defuse-process",
    "defuse-wire",
    "defuse-session",
    "defuse-fuse",
    "defuse-direct",
];

/// Packs all of them together, so that the ones on which others depend need not be in a registry:
/// without a build, which takes seconds.
pub fn check() -> Result<()> {
    let found = publishable(&command::metadata()?)?;
    let expected: BTreeSet<String> = PUBLISHED.map(str::to_owned).into();
    let more: Vec<_> = found.symmetric_difference(&expected).collect();
    ensure!(
        more.is_empty(),
        "{more:?}: give `publish = false`, or a place in the list of xtask/src/publish.rs"
    );
    package(&["--offline", "--no-verify"])
}

/// Packs them, and builds each from its package.
pub fn build() -> Result<()> {
    package(&[])
}

fn package(options: &[&str]) -> Result<()> {
    let mut cargo = command::cargo();
    // The state is that of the test, committed or not.
    cargo.args(["package", "--quiet", "--allow-dirty"]).args(options);
    command::run(cargo.args(PUBLISHED.iter().flat_map(|name| ["--package", name])))
}

/// The crates whose manifests do not forbid it.
fn publishable(metadata: &serde_json::Value) -> Result<BTreeSet<String>> {
    let packages = metadata["packages"].as_array().context("cargo names no packages")?;
    let forbids =
        |package: &serde_json::Value| package["publish"].as_array().is_some_and(Vec::is_empty);
    let name = |package: &serde_json::Value| package["name"].as_str().map(str::to_owned);
    Ok(packages.iter().filter(|package| !forbids(package)).filter_map(name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_is_published_unless_its_manifest_forbids_it() {
        let metadata = serde_json::json!({"packages": [
            {"name": "a", "publish": null}, {"name": "b", "publish": []}, {"name": "c", "publish": ["here"]}
        ]});
        assert_eq!(
            publishable(&metadata).unwrap(),
            BTreeSet::from(["a".to_owned(), "c".to_owned()])
        );
    }
}
