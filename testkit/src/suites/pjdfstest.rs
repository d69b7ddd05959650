//! The suite `pjdfstest`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{MountedStage, SuiteTally, tools};

/// Enables all features of Linux. The users exist on Debian.
const SETTINGS: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
[settings]
naptime = 0.01
"#;

/// Remounts through the kernel (`-i`), because mount(8) would call a helper that cannot do it. It
/// retries for a while, because files that were just closed may still be being released.
const MOUNT: &str = "#!/bin/sh
tries=0
until /bin/mount -i \"$@\"; do
    tries=$((tries + 1))
    [ $tries -lt 40 ] || exit 1
    sleep 0.05
done
";

/// Runs the whole suite. Cases that remount run in separate processes, because others leave files
/// open in the process of the suite, which prevents a remount.
pub(super) fn run(stage: &MountedStage) -> Result<SuiteTally> {
    let place = stage.make_beside("pjdfstest")?;
    let all = place.join("all.toml");
    fs::write(&all, SETTINGS)?;
    let mut tally = SuiteTally::default();
    let output = suite(stage, &place)?.arg("-c").arg(&all).output()?;
    read(&String::from_utf8_lossy(&output.stdout), &mut tally);
    ensure!(tally.passed > 300, "{}", String::from_utf8_lossy(&output.stderr));
    // A remount needs the mount point.
    if stage.is_in_process() || stage.is_one_of_many() {
        return Ok(tally);
    }
    let remounting = place.join("remounting.toml");
    fs::write(&remounting, format!("{SETTINGS}allow_remount = true\n"))?;
    let is_remount = |(_, why): &(String, String)| why.contains("allow_remount");
    let (again, skipped) = tally.skipped.drain(..).partition(is_remount);
    tally.skipped = skipped;
    for (case, _) in Vec::<(String, String)>::from_iter(again) {
        let mut command = suite(stage, &place)?;
        // It prints names without their prefix, but compares the whole.
        let whole = format!("pjdfstest::tests::{case}");
        let output = command.arg("-c").arg(&remounting).args(["-e", &whole]).output()?;
        let before = tally.cases();
        read(&String::from_utf8_lossy(&output.stdout), &mut tally);
        ensure!(tally.cases() == before + 1, "{case} was not run");
    }
    Ok(tally)
}

fn suite(stage: &MountedStage, place: &Path) -> Result<Command> {
    let mut command = stage.command(&tools::path("pjdfstest"))?;
    command.arg("-s").arg(place).arg("-p").arg(stage.path());
    if let Ok(path) = with_mount(place) {
        command.env("PATH", path);
    }
    command.env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// A `PATH` in which our `mount` comes first.
fn with_mount(place: &Path) -> Result<String> {
    let program = place.join("mount");
    if !program.exists() {
        fs::write(&program, MOUNT)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    }
    let path = std::env::var("PATH").context("PATH")?;
    Ok(format!("{}:{path}", place.display()))
}

/// Parses lines of a name and `ok`, `FAILED` or `skipped`, with the reason on the next line.
fn read(output: &str, tally: &mut SuiteTally) {
    let mut lines = output.lines().peekable();
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace();
        let (Some(case), Some(word), None) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let mut reason = || lines.peek().map_or("", |line| line.trim()).to_owned();
        match word {
            "ok" => tally.passed += 1,
            "FAILED" => tally.failed.push((case.to_owned(), reason())),
            "skipped" => tally.skipped.push((case.to_owned(), reason())),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let output = "a::b        ok\nc::d    FAILED\n\tcalled it\ne::f  skipped\n\tno x\n\
                      \nSummary: 1 failed, 1 skipped\n";
        let mut tally = SuiteTally::default();
        read(output, &mut tally);
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failed, [("c::d".to_owned(), "called it".to_owned())]);
        assert_eq!(tally.skipped, [("e::f".to_owned(), "no x".to_owned())]);
    }
}
