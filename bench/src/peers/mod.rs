//! The targets: resolves names of the command line, and builds missing programs.

mod defuse;
mod fuser;
mod libfuse;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::args::BenchmarkArgs;
use crate::target::{TargetRole, TargetSpec};

/// The targets of the command line, each ready to start.
pub fn specs(args: &BenchmarkArgs) -> Result<Vec<TargetSpec>> {
    let mut specs = Vec::new();
    for name in &args.targets {
        match name.as_str() {
            "native" => specs.push(native()),
            "libfuse" => specs.push(libfuse::spec(libfuse::LibfuseBuild::Package, args.timeout)?),
            "libfuse-xattr" => {
                specs.push(libfuse::spec(libfuse::LibfuseBuild::Xattr, args.timeout)?)
            }
            "fuser" => {
                for threads in ["fuser-1", "fuser-4"] {
                    specs.push(fuser::spec(threads, args.timeout)?);
                }
            }
            name if name.starts_with("fuser-") => specs.push(fuser::spec(name, args.timeout)?),
            "defuse" => specs.extend(defuse::specs(args)?),
            "defuse-uring" => specs.extend(defuse::targets_over_rings(args)?),
            other => bail!("there is no target {other}; --help lists them"),
        }
    }
    if specs.is_empty() {
        bail!("there is no target to measure");
    }
    Ok(specs)
}

fn native() -> TargetSpec {
    let version = "the directory itself".to_owned();
    TargetSpec { name: "native".into(), role: TargetRole::Native, command: None, version }
}

/// The directory of this program, which is cargo's directory for all programs.
fn program_dir() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.parent().context("this program is in no directory")?;
    // Test programs are one level deeper.
    Ok(if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir }.to_owned())
}
