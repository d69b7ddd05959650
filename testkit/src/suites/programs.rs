//! Real programs that use a file system.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{MountedStage, SuiteTally};
use crate::mounted::succeed;

/// The programs, each with its Debian package.
pub(super) const PACKAGES: &[(&str, &str)] = &[
    ("git", "git"),
    ("sqlite3", "sqlite3"),
    ("gcc", "gcc"),
    ("make", "make"),
    ("tar", "tar"),
    ("rsync", "rsync"),
    ("setfattr", "attr"),
    ("setfacl", "acl"),
    ("python3", "python3"),
];

/// Python's tests about files.
const PYTHON: &[&str] = &["test_shutil", "test_mmap", "test_os", "test_tarfile"];

type ProgramCheck = fn(&ProgramDirectory) -> Result<()>;

const CHECKS: &[(&str, ProgramCheck)] = &[
    ("git", git),
    ("sqlite3 with a write-ahead log", sqlite),
    ("make and gcc", make),
    ("tar", tar),
    ("rsync", rsync),
];

/// A directory on the file system under test, one beside it, and the amount of work.
struct ProgramDirectory {
    dir: PathBuf,
    beside: PathBuf,
    quick: bool,
}

/// Each program is a case, and so is each of Python's tests.
pub(super) fn run(stage: &MountedStage, quick: bool) -> Result<SuiteTally> {
    let mut tally = SuiteTally::default();
    for (number, (name, check)) in CHECKS.iter().enumerate() {
        let dir = stage.path().join(format!("program{number}"));
        fs::create_dir(&dir)?;
        let beside = stage.make_beside(&format!("program{number}"))?;
        let bench = ProgramDirectory { dir, beside, quick };
        tally.add(name, check(&bench));
        let removed = fs::remove_dir_all(&bench.dir).context("what it left cannot be removed");
        tally.add(&format!("{name}: removed"), removed);
    }
    python(stage, if quick { &PYTHON[..2] } else { PYTHON }, &mut tally)?;
    Ok(tally)
}

/// Runs lines of shell in `dir`, each of which must succeed.
fn shell(dir: &Path, script: &str) -> Result<String> {
    let mut command = Command::new("sh");
    command.args(["-e", "-u", "-c", script]).current_dir(dir).env("HOME", dir);
    succeed(command.env("LC_ALL", "C").env("GIT_CONFIG_NOSYSTEM", "1"))
}

/// `count` files in directories of fifty, of different sizes.
fn tree(dir: &Path, count: usize) -> Result<()> {
    for number in 0..count {
        let parent = dir.join(format!("d{}", number / 50));
        if number % 50 == 0 {
            fs::create_dir_all(&parent)?;
        }
        let text = format!("file {number}\n").repeat(number % 300 + 1);
        fs::write(parent.join(format!("f{number}")), text)?;
    }
    Ok(())
}

/// A tree with every property that an archive keeps.
fn rich_tree(dir: &Path, count: usize) -> Result<()> {
    tree(dir, count)?;
    shell(
        dir,
        "mkdir special empty
         ln d0/f1 special/hard; ln -s ../d0/f2 special/soft; ln -s nowhere special/dangling
         mkfifo special/fifo; mknod special/null c 1 3
         truncate -s 10M special/sparse; printf end >> special/sparse
         touch 'special/odd name' \"special/$(printf 'new\\nline')\"
         chmod 4751 d0/f3; chmod 1777 empty; chown 1234:4321 d0/f4; chown -h 99:98 special/soft
         touch -d '2001-02-03 04:05:06.123456789' d0/f5; touch -d '1969-07-20' d0/f6
         find . -depth -exec touch -h -d '2020-05-05 05:05:05.5' {} +",
    )
    .map(drop)
}

/// Names, types, modes, owners, sizes, links and timestamps in nanoseconds.
fn listing(dir: &Path) -> Result<String> {
    let format = r"%p %y %m %U %G %s %n %l %T@\0";
    shell(dir, &format!("find . ! -type d -printf '{format}' | sort -z"))
}

fn compare_files(left: &Path, right: &Path) -> Result<()> {
    let mut diff = Command::new("diff");
    // diff compares only files, directories and links; `listing` compares the rest.
    diff.args(["-r", "--no-dereference", "--exclude=fifo", "--exclude=null"]);
    succeed(diff.arg(left).arg(right))?;
    let (left, right) = (listing(left)?, listing(right)?);
    let other = left.split('\0').zip(right.split('\0')).find(|(left, right)| left != right);
    ensure!(left == right, "metadata differs: {other:?}");
    Ok(())
}

fn git(bench: &ProgramDirectory) -> Result<()> {
    let count = if bench.quick { 1000 } else { 5000 };
    shell(&bench.dir, "git init -q repository")?;
    let repository = bench.dir.join("repository");
    tree(&repository, count)?;
    shell(
        &repository,
        "git config user.name a; git config user.email a@example.org; git config gc.auto 0
         git add .; git commit -q -m one
         for d in d1 d2 d3; do echo more >> $d/f*1; done 2>/dev/null || true
         git mv d4 moved; git rm -q -r d5; git add .; git commit -q -m two
         git branch side HEAD~1; git checkout -q side; echo x > new; git add new
         git commit -q -m three; git checkout -q -; git merge -q -m four side
         git gc -q; git repack -q -a -d -f; git fsck --full --strict
         git reset -q --hard HEAD~1; git stash list; git clone -q . ../clone
         test -z \"$(git status --porcelain)\"; test -z \"$(git -C ../clone status --porcelain)\"
         git -C ../clone fsck --full",
    )
    .map(drop)
}

fn sqlite(bench: &ProgramDirectory) -> Result<()> {
    let rows = if bench.quick { 20_000 } else { 200_000 };
    let script = format!(
        "sqlite3 a.db 'pragma journal_mode=wal; create table t(a integer primary key, b text);
             with recursive n(i) as (select 1 union all select i + 1 from n where i < {rows})
             insert into t select i, hex(randomblob(50)) from n;'
         for writer in 1 2 3; do
             (for i in $(seq 1 40); do
                 echo \"begin immediate; insert into t(b) values ('$writer $i'); commit;\"
             done | sqlite3 -cmd '.timeout 20000' a.db) &
         done
         for i in $(seq 1 20); do sqlite3 -cmd '.timeout 20000' a.db 'select count(*) from t' ; done
         wait
         sqlite3 a.db 'delete from t where a % 3 = 0; vacuum; pragma wal_checkpoint(truncate);'
         test \"$(sqlite3 a.db 'pragma integrity_check')\" = ok
         test \"$(sqlite3 a.db \"select count(*) from t where b like '_ %'\")\" -ge 79
         sqlite3 a.db 'pragma journal_mode=delete; update t set b = 1; pragma integrity_check'"
    );
    shell(&bench.dir, &script).map(drop)
}

fn make(bench: &ProgramDirectory) -> Result<()> {
    let count = if bench.quick { 20 } else { 100 };
    let mut main =
        String::from("#include <stdio.h>\n#include \"all.h\"\nint main(void) { int n = 0;\n");
    let mut header = String::new();
    for number in 0..count {
        let text = format!("#include \"all.h\"\nint f{number}(void) {{ return {number}; }}\n");
        fs::write(bench.dir.join(format!("f{number}.c")), text)?;
        header += &format!("int f{number}(void);\n");
        main += &format!("n += f{number}();\n");
    }
    fs::write(bench.dir.join("all.h"), header)?;
    fs::write(bench.dir.join("main.c"), main + "printf(\"%d\\n\", n); return 0; }\n")?;
    fs::write(
        bench.dir.join("Makefile"),
        "O := $(patsubst %.c,%.o,$(wildcard *.c))\nrun: liball.a main.o\n\tgcc -o $@ main.o -L. -lall\n\
         liball.a: $(filter-out main.o,$(O))\n\tar rcs $@ $^\n%.o: %.c all.h\n\tgcc -c -o $@ $<\n",
    )?;
    let sum = count * (count - 1) / 2;
    let script = format!(
        "make -s -j2; test \"$(./run)\" = {sum}
         make -q; touch f1.c; ! make -q; make -s; make -q; test \"$(./run)\" = {sum}"
    );
    shell(&bench.dir, &script).map(drop)
}

fn tar(bench: &ProgramDirectory) -> Result<()> {
    let (outside, inside) = (bench.beside.join("tree"), bench.dir.join("tree"));
    fs::create_dir(&outside)?;
    rich_tree(&outside, if bench.quick { 500 } else { 5000 })?;
    let copy = bench.beside.join("copy");
    for dir in [&inside, &copy] {
        fs::create_dir(dir)?;
    }
    let mut archive = Command::new("sh");
    archive.args([
        "-e",
        "-c",
        "tar -C \"$1\" --format=posix -S -cf - . | tar -C \"$2\" -xpSf -",
        "sh",
    ]);
    succeed(archive.arg(&outside).arg(&inside))?;
    compare_files(&outside, &inside)?;
    let mut archive = Command::new("sh");
    archive.args([
        "-e",
        "-c",
        "tar -C \"$1\" --format=posix -S -cf \"$1/../a.tar\" .; tar -C \"$2\" -xpSf \"$1/../a.tar\"",
        "sh",
    ]);
    succeed(archive.arg(&inside).arg(&copy))?;
    compare_files(&outside, &copy)
}

fn rsync(bench: &ProgramDirectory) -> Result<()> {
    let (outside, inside) = (bench.beside.join("tree"), bench.dir.join("tree"));
    fs::create_dir(&outside)?;
    rich_tree(&outside, if bench.quick { 500 } else { 5000 })?;
    let copy = |from: &Path, to: &Path| {
        let mut rsync = Command::new("rsync");
        let from = format!("{}/", from.display());
        succeed(
            rsync.args(["-aHS", "--numeric-ids", "--delete", "--itemize-changes", &from]).arg(to),
        )
    };
    copy(&outside, &inside)?;
    compare_files(&outside, &inside)?;
    let again = copy(&outside, &inside)?;
    ensure!(again.is_empty(), "a second run finds changes: {again}");
    shell(&outside, "echo change >> d0/f7; rm -r d1; mv d2 d2-moved; chmod 600 d3/f150")?;
    copy(&outside, &inside)?;
    compare_files(&outside, &inside)?;
    let back = bench.beside.join("back");
    copy(&inside, &back)?;
    compare_files(&outside, &back)
}

/// Each failed Python test is a case; the passed tests of a module are counted.
fn python(stage: &MountedStage, modules: &[&str], tally: &mut SuiteTally) -> Result<()> {
    let Some(python) = python_with_tests() else {
        let why = "no Python with the package `test` (libpython3.*-testsuite)".to_owned();
        println!("skipped: {why}");
        tally.skipped.push(("python".to_owned(), why));
        return Ok(());
    };
    for module in modules {
        let dir = stage.path().join(module);
        fs::create_dir(&dir)?;
        let mut command = Command::new(python);
        command.args(["-m", "unittest", &format!("test.{module}")]);
        command.current_dir(&dir).env("TMPDIR", &dir).stdin(std::process::Stdio::null());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let failures = failures(&said);
        tally.passed += count(&said).saturating_sub(failures.len());
        if failures.is_empty() && !output.status.success() {
            tally.failed.push(((*module).to_owned(), format!("{}: {said}", output.status)));
        }
        let failed = failures.into_iter().map(|test| (format!("python: {test}"), String::new()));
        tally.failed.extend(failed);
    }
    Ok(())
}

fn python_with_tests() -> Option<&'static str> {
    ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let mut command = Command::new(python);
        command.args(["-c", "import test.test_os, test.test_tarfile"]);
        command.output().is_ok_and(|output| output.status.success())
    })
}

/// The tests after `FAIL:` and `ERROR:` in the output of unittest.
fn failures(said: &str) -> BTreeSet<String> {
    let named = |line: &str| {
        let rest = line.strip_prefix("FAIL: ").or_else(|| line.strip_prefix("ERROR: "))?;
        Some(rest.to_owned())
    };
    said.lines().filter_map(named).collect()
}

/// The number in `Ran 323 tests in 6.5s`.
fn count(said: &str) -> usize {
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran "));
    ran.and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unittest_is_understood() {
        let said =
            "..F\nFAIL: test_a (test.test_os.A)\n----\nERROR: test_b (x)\nRan 7 tests in 1s\n";
        assert_eq!(count(said), 7);
        assert_eq!(Vec::from_iter(failures(said)), ["test_a (test.test_os.A)", "test_b (x)"]);
    }
}
