//! The programs of the demo. A new program is an entry in [`PROGRAMS`].

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::dir::DemoDir;
use crate::children::{ChildPrograms, ProgramOutput};
use crate::command;

/// Transactions of the database, each of a few rows.
const TRANSACTIONS: usize = 4000;

/// A program of the demo.
pub struct DemoProgram {
    /// Its name in the tables.
    pub name: &'static str,
    /// Runs it on one target. Its result must be the same on every target.
    pub run: fn(&mut DemoJob<'_>) -> Result<String>,
    /// Checks the files that it made, and removes large ones. It is neither timed nor counted; its
    /// result must be the same on every target.
    pub finish: Option<fn(&DemoJob<'_>) -> Result<String>>,
}

/// All programs, in the order in which they run.
pub const PROGRAMS: &[DemoProgram] = &[
    DemoProgram { name: "tar to a pipe", run: tar_to_a_pipe, finish: None },
    DemoProgram { name: "tar to a file", run: tar_to_a_file, finish: Some(remove_tar) },
    DemoProgram { name: "grep -r", run: grep, finish: None },
    DemoProgram { name: "git init, add", run: git_add, finish: None },
    DemoProgram { name: "git commit", run: git_commit, finish: None },
    DemoProgram { name: "git gc", run: git_gc, finish: Some(check_repository) },
    DemoProgram { name: "sqlite3", run: sqlite, finish: None },
];

/// One program on one target.
pub struct DemoJob<'a> {
    /// Running time of its programs.
    pub elapsed: Duration,
    children: &'a ChildPrograms,
    place: &'a DemoDir,
    target: &'static str,
    /// The shared directory, as programs of the target see it.
    root: PathBuf,
    /// The directory of this target in it.
    own: PathBuf,
    /// The directory of this target, as this process sees it.
    real_own: PathBuf,
    /// A file outside of all targets.
    errors: PathBuf,
    script: PathBuf,
}

impl<'a> DemoJob<'a> {
    /// Creates a job on a target.
    pub fn new(
        children: &'a ChildPrograms,
        place: &'a DemoDir,
        target: &'static str,
    ) -> Result<DemoJob<'a>> {
        let root = place.root(target);
        let own = root.join("own").join(target);
        let real_own = place.real_root(target).join("own").join(target);
        fs::create_dir_all(&real_own).with_context(|| real_own.display().to_string())?;
        let (errors, script) = (place.path("errors"), place.path("load.sql"));
        if !script.exists() {
            fs::write(&script, load())?;
        }
        let elapsed = Duration::ZERO;
        Ok(DemoJob { elapsed, children, place, target, root, own, real_own, errors, script })
    }

    /// A program to run in `directory`.
    fn program(&self, program: &str, directory: Option<&Path>) -> Command {
        self.place.program(self.target, program, directory)
    }

    /// Runs a program, adds its running time, and returns its output.
    fn run(&mut self, command: &mut Command) -> Result<ProgramOutput> {
        command.env("LC_ALL", "C");
        let (printed, took) = self.children.run(command, &self.errors)?;
        self.elapsed += took;
        Ok(printed)
    }
}

/// Through a pipe, because tar reads no files if its output is /dev/null.
fn tar_to_a_pipe(job: &mut DemoJob<'_>) -> Result<String> {
    let mut tar = job.program("tar", None);
    tar.arg("-C").arg(&job.root).args(["-cf", "-", "tree"]);
    let printed = job.run(&mut tar)?;
    Ok(format!("{} bytes", printed.bytes))
}

fn tar_to_a_file(job: &mut DemoJob<'_>) -> Result<String> {
    let mut tar = job.program("tar", None);
    tar.arg("-C").arg(&job.root).arg("-cf").arg(job.own.join("tree.tar")).arg("tree");
    job.run(&mut tar)?;
    Ok(String::new())
}

fn remove_tar(job: &DemoJob<'_>) -> Result<String> {
    let tar = job.real_own.join("tree.tar");
    let bytes = tar.metadata()?.len();
    fs::remove_file(tar).context("tree.tar")?;
    Ok(format!("{bytes} bytes"))
}

fn grep(job: &mut DemoJob<'_>) -> Result<String> {
    let mut grep = job.program("grep", Some(&job.root));
    grep.args(["-r", "-I", "-e", "static"]).arg("tree");
    let printed = job.run(&mut grep)?;
    Ok(format!("{} bytes", printed.bytes))
}

/// git with a repository per target, on the files that all targets share.
fn git(job: &DemoJob<'_>, arguments: &[&str]) -> Command {
    let mut git = job.program("git", Some(&job.root.join("subset")));
    git.arg("-c").arg("gc.auto=0").args(arguments);
    git.env("GIT_DIR", job.own.join("git")).env("GIT_WORK_TREE", job.root.join("subset"));
    // No settings of the user, and the same commit on every target.
    git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
    for who in ["AUTHOR", "COMMITTER"] {
        git.env(format!("GIT_{who}_NAME"), "demo")
            .env(format!("GIT_{who}_EMAIL"), "demo@localhost");
        git.env(format!("GIT_{who}_DATE"), "2000-01-01T00:00:00Z");
    }
    git
}

fn git_add(job: &mut DemoJob<'_>) -> Result<String> {
    job.run(&mut git(job, &["init", "--quiet"]))?;
    // Includes files that the projects ignore.
    job.run(&mut git(job, &["add", "--all", "--force"]))?;
    Ok(String::new())
}

fn git_commit(job: &mut DemoJob<'_>) -> Result<String> {
    job.run(&mut git(job, &["commit", "--quiet", "--message=demo"]))?;
    Ok(String::new())
}

fn git_gc(job: &mut DemoJob<'_>) -> Result<String> {
    job.run(&mut git(job, &["gc", "--quiet"]))?;
    Ok(String::new())
}

fn check_repository(job: &DemoJob<'_>) -> Result<String> {
    command::output(&mut git(job, &["fsck", "--no-progress"]))?;
    let commit = command::output(&mut git(job, &["rev-parse", "HEAD"]))?;
    Ok(commit.trim().to_owned())
}

fn sqlite(job: &mut DemoJob<'_>) -> Result<String> {
    let script = fs::File::open(&job.script)?;
    let mut sqlite = job.program("sqlite3", None);
    sqlite.arg("-batch").arg(job.own.join("load.db")).stdin(Stdio::from(script));
    let text = job.run(&mut sqlite)?.start;
    ensure!(text.starts_with("wal\n"), "the database is not in WAL mode: {text}");
    Ok(text.trim().replace('\n', " "))
}

/// A load of short transactions, as programs make it, and a sum over all rows.
fn load() -> String {
    let mut sql = String::from(
        "PRAGMA journal_mode=WAL;\nPRAGMA synchronous=NORMAL;\n\
         CREATE TABLE log(id INTEGER PRIMARY KEY, who INTEGER, text TEXT);\n\
         CREATE INDEX log_who ON log(who);\n",
    );
    for number in 0..TRANSACTIONS {
        let who = number * 7919 % 1000;
        let _ = writeln!(
            sql,
            "BEGIN; INSERT INTO log(who, text) VALUES({who}, hex(zeroblob({}))); \
             UPDATE log SET text = text || 'x' WHERE who = {who}; COMMIT;",
            20 + number % 200
        );
    }
    sql.push_str("SELECT count(*), sum(length(text)) FROM log;\nPRAGMA integrity_check;\n");
    sql
}
