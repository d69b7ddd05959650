//! The suite `fsx`.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{MountedStage, SuiteTally, tools};

/// The sets of operations, by name.
#[rustfmt::skip]
const SETS: &[(&str, &str)] = &[
    ("read and write", "
flen = 262144
[weights]
close_open = 1.0
invalidate = 0.0
mapread = 0.0
mapwrite = 0.0
read = 10.0
write = 10.0
truncate = 5.0
fsync = 1.0
fdatasync = 1.0
"),
    ("mmap", "
flen = 1048576
[weights]
close_open = 1.0
invalidate = 1.0
mapread = 10.0
mapwrite = 10.0
read = 10.0
write = 10.0
truncate = 5.0
"),
    ("space", "
flen = 1048576
[weights]
close_open = 1.0
mapread = 3.0
mapwrite = 3.0
read = 10.0
write = 10.0
truncate = 3.0
posix_fallocate = 5.0
punch_hole = 5.0
copy_file_range = 5.0
"),
    ("all", "
flen = 4194304
[opsize]
max = 262144
[weights]
close_open = 1.0
invalidate = 1.0
mapread = 10.0
mapwrite = 10.0
read = 10.0
write = 10.0
truncate = 5.0
fsync = 1.0
fdatasync = 1.0
posix_fallocate = 2.0
punch_hole = 3.0
sendfile = 3.0
posix_fadvise = 2.0
copy_file_range = 5.0
"),
];

/// Every set with every seed is a case.
pub(super) fn run(stage: &MountedStage, quick: bool) -> Result<SuiteTally> {
    let (seeds, operations) = if quick { (1..=1, "3000") } else { (1..=5, "20000") };
    let place = stage.make_beside("fsx")?;
    let mut tally = SuiteTally::default();
    for (name, set) in SETS {
        let file = place.join("set.toml");
        fs::write(&file, set)?;
        for seed in seeds.clone() {
            let mut command = stage.command(&tools::path("fsx"))?;
            command.args(["-N", operations, "-S", &seed.to_string(), "-f"]).arg(&file);
            command.arg("-P").arg(&place).arg(stage.path().join("fsx"));
            tally.add(&format!("{name}, seed {seed}"), succeed(&mut command));
        }
    }
    Ok(tally)
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().context("fsx cannot be run")?;
    if output.status.success() {
        return Ok(());
    }
    // The history of the file comes last, and is long.
    let said = String::from_utf8_lossy(&output.stderr);
    let first: Vec<&str> = said.lines().filter(|line| line.contains("rror")).take(5).collect();
    bail!("{}: {}", output.status, first.join("; "))
}
