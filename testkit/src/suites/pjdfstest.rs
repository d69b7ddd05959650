//! The suite `pjdfstest`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Stage, Tally, tools};

/// Everything that Linux has. Debian has the users, and none of them must be made.
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

/// Remounting is the kernel's business (`-i`): mount(8) would call a helper, which cannot do it. What
/// has just been closed may still be on its way out, so it is tried again for a while.
const MOUNT: &str = "#!/bin/sh
tries=0
until /bin/mount -i \"$@\"; do
    tries=$((tries + 1))
    [ $tries -lt 40 ] || exit 1
    sleep 0.05
done
";

/// Runs all of it. Cases that remount run in processes of their own: some of the others leave files
/// open in the suite's process, with which nothing can be remounted.
pub(super) fn run(stage: &Stage) -> Result<Tally> {
    let place = stage.beside("pjdfstest")?;
    let all = place.join("all.toml");
    fs::write(&all, SETTINGS)?;
    let mut tally = Tally::default();
    let output = suite(stage, &place)?.arg("-c").arg(&all).output()?;
    read(&String::from_utf8_lossy(&output.stdout), &mut tally);
    ensure!(tally.passed > 300, "{}", String::from_utf8_lossy(&output.stderr));
    if stage.is_in_process() {
        return Ok(tally);
    }
    let remounting = place.join("remounting.toml");
    fs::write(&remounting, format!("{SETTINGS}allow_remount = true\n"))?;
    let is_remount = |(_, why): &(String, String)| why.contains("allow_remount");
    let (again, skipped) = tally.skipped.drain(..).partition(is_remount);
    tally.skipped = skipped;
    for (case, _) in Vec::<(String, String)>::from_iter(again) {
        let mut command = suite(stage, &place)?;
        // It prints names without their beginning, but compares the whole.
        let whole = format!("pjdfstest::tests::{case}");
        let output = command.arg("-c").arg(&remounting).args(["-e", &whole]).output()?;
        let before = tally.cases();
        read(&String::from_utf8_lossy(&output.stdout), &mut tally);
        ensure!(tally.cases() == before + 1, "{case} was not run");
    }
    Ok(tally)
}

fn suite(stage: &Stage, place: &Path) -> Result<Command> {
    let mut command = stage.command(&tools::path("pjdfstest"))?;
    command.arg("-s").arg(place).arg("-p").arg(stage.path());
    if let Ok(path) = with_mount(place) {
        command.env("PATH", path);
    }
    command.env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// A `PATH` that has our `mount` before the others.
fn with_mount(place: &Path) -> Result<String> {
    let program = place.join("mount");
    if !program.exists() {
        fs::write(&program, MOUNT)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    }
    let path = std::env::var("PATH").context("PATH")?;
    Ok(format!("{}:{path}", place.display()))
}

/// Reads lines of a name and `ok`, `FAILED` or `skipped`, with the reason on the line below.
fn read(output: &str, tally: &mut Tally) {
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
        let mut tally = Tally::default();
        read(output, &mut tally);
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failed, [("c::d".to_owned(), "called it".to_owned())]);
        assert_eq!(tally.skipped, [("e::f".to_owned(), "no x".to_owned())]);
    }
}
