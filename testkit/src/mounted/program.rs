//! Finds the program `defuse`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};

/// The built program. It is built first if it is out of date, because the tests of a package do not
/// get the programs of another one. `DEFUSE_PROGRAM` selects another program.
pub fn program() -> Result<&'static Path> {
    static PROGRAM: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let found = PROGRAM.get_or_init(|| find().map_err(|error| format!("{error:#}")));
    found.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

fn find() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("DEFUSE_PROGRAM") {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    // Tests and examples are one directory below programs.
    let below = ["deps", "examples"].map(std::ffi::OsStr::new);
    let dir = own.parent().context("a program is in a directory")?;
    let dir = if dir.file_name().is_some_and(|name| below.contains(&name)) {
        dir.parent().context("deps is in a directory")?
    } else {
        dir
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "defuse", "--bin", "defuse"]);
    if dir.file_name().is_some_and(|name| name == "release") {
        cargo.arg("--release");
    }
    let status = cargo.current_dir(root()).status().context("cargo")?;
    ensure!(status.success(), "the program defuse cannot be built");
    Ok(dir.join("defuse"))
}

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}
