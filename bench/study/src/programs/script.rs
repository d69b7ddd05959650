//! The script that runs the programs on a tree and takes the time, and the decoding of its output.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The script. Arguments: the directory of the tree, the archive, and a directory for counts of
/// system calls. It writes a line `NAME MICROSECONDS TICKS` for each program; the ticks are those
/// that the processors worked, 100 a second.
///
/// git compares the times of files with its index, so that a first `git status` brings the index up
/// to date.
pub const TEXT: &str = r#"set -eu
export LC_ALL=C PYTHONDONTWRITEBYTECODE=1 GIT_OPTIONAL_LOCKS=1
dir=$1 archive=$2 counts=${3:-}
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
ticks() {
    local word user nice system idle iowait irq softirq rest
    read -r word user nice system idle iowait irq softirq rest </proc/stat
    worked=$((user + nice + system + irq + softirq))
}
timed() {
    local name=$1 begin end before
    shift
    ticks
    before=$worked
    if [ -n "$counts" ]; then set -- strace -f -c -o "$counts/$name" "$@"; fi
    begin=$EPOCHREALTIME
    "$@" >/dev/null
    end=$EPOCHREALTIME
    ticks
    echo "$name $((${end/./} - ${begin/./})) $((worked - before))"
}
# A python3 in PATH may be a script of a version manager, which starts a dozen programs.
python=$(python3 -c 'import sys; print(sys.executable)')
mkdir "$dir/tree"
tar xf "$archive" -C "$dir/tree"
cd "$dir/tree"
git status >/dev/null
timed git-status git status
timed find-cat bash -c 'for half in a b; do find $half -type f -print0 | xargs -0 cat >/dev/null & done; wait'
timed imports env PYTHONPATH="$dir/tree/modules" "$python" -c 'import all_of_them'
timed make make -s -j2 -C build
mkdir "$dir/other"
timed tar-x tar xf "$archive" -C "$dir/other"
timed rm-r rm -r "$dir/other"
"#;

/// The programs in the order of the script.
pub const NAMES: [&str; 6] = ["git-status", "find-cat", "imports", "make", "tar-x", "rm-r"];

/// Checks that all programs are installed.
pub fn check_programs() -> Result<()> {
    for name in ["bash", "git", "find", "xargs", "cat", "python3", "make", "cc", "tar", "rm"] {
        ensure!(is_installed(name), "{name} is not installed: install it to measure it");
    }
    Ok(())
}

/// True if system calls can be counted.
pub fn has_strace() -> bool {
    is_installed("strace")
}

fn is_installed(name: &str) -> bool {
    let mut find = Command::new("sh");
    find.args(["-c", "command -v \"$0\"", name]).stdout(Stdio::null()).stderr(Stdio::null());
    find.status().is_ok_and(|status| status.success())
}

/// The times of one program.
#[derive(Debug, PartialEq, Eq)]
pub struct ProgramTimes {
    /// The program.
    pub program: String,
    /// The duration in nanoseconds.
    pub ns: u64,
    /// The processor time of the machine in nanoseconds.
    pub cpu_ns: u64,
}

/// The times in the output of the script.
pub fn durations(output: &str) -> Result<Vec<ProgramTimes>> {
    let all: Option<Vec<_>> = output.lines().map(duration).collect();
    let all = all.with_context(|| format!("the script of the programs wrote: {output}"))?;
    let names: Vec<&str> = all.iter().map(|took| took.program.as_str()).collect();
    ensure!(names == NAMES, "the script of the programs measured {names:?}, not {NAMES:?}");
    Ok(all)
}

fn duration(line: &str) -> Option<ProgramTimes> {
    let [name, us, ticks] = line.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let [us, ticks] = [us.parse::<u64>().ok()?, ticks.parse::<u64>().ok()?];
    Some(ProgramTimes { program: name.to_owned(), ns: us * 1000, cpu_ns: ticks * 10_000_000 })
}

/// The system calls of each program, from the tables that strace wrote to `counts`.
pub fn read_counts(counts: &Path) -> Result<BTreeMap<String, u64>> {
    let count = |name: &str| {
        let table = fs::read_to_string(counts.join(name))?;
        let total = total(&table).with_context(|| format!("strace wrote no total for {name}"))?;
        Ok((name.to_owned(), total))
    };
    NAMES.into_iter().map(count).collect()
}

/// The calls in the last line of the table of `strace -c`:
/// `100.00 SECONDS [USECS] CALLS [ERRORS] total`.
fn total(table: &str) -> Option<u64> {
    let line = table.lines().rev().find(|line| line.ends_with(" total"))?;
    // Without a fraction: the time for each call, the calls, and the errors, if there were any.
    let whole: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    whole.get(1).or(whole.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_complete_or_an_error() {
        let line = |name: &&str| format!("{name} 1500 2\n");
        let all: String = NAMES.iter().map(line).collect();
        let rm = ProgramTimes { program: "rm-r".into(), ns: 1_500_000, cpu_ns: 20_000_000 };
        assert_eq!(durations(&all).unwrap()[5], rm);
        let all: String = NAMES[..5].iter().map(line).collect();
        assert!(durations(&all).is_err());
        assert!(durations("git-status 1\n").is_err());
    }

    #[test]
    fn the_total_of_strace_is_found() {
        let table = "% time     seconds  usecs/call     calls    errors syscall\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                     100.00    0.000301           3       100         6 openat\n\
                     ------ ----------- ----------- --------- --------- ----------------\n\
                     100.00    0.000301           3       104         6 total\n";
        assert_eq!(total(table), Some(104));
        assert_eq!(total("100.00    0.000301           3       104           total\n"), Some(104));
        assert_eq!(total("nothing\n"), None);
    }
}
