//! Child processes: started in control groups, awaited with a time limit, and killed by id.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::interrupt::InterruptFlag;

/// Interval at which a child is polled.
const LOOK: Duration = Duration::from_millis(5);

/// The shell joins the groups before it executes the program, so that the program is never outside
/// of them.
const ENTER: &str =
    "for file in $DEFUSE_STUDY_GROUPS; do echo $$ > \"$file\" || exit 125; done; exec \"$@\"";

/// A process that is killed, if still running, when this value is dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    name: String,
    log: PathBuf,
}

/// How to start a process.
#[derive(Debug)]
pub struct ProcessStart<'a> {
    /// Its name in messages.
    pub name: &'a str,
    /// Program and arguments.
    pub words: &'a [OsString],
    /// Files to which it writes its process id.
    pub groups: &'a [PathBuf],
    /// File for its standard error, and for its standard output unless `output` is set.
    pub log: &'a Path,
    /// File for its standard output.
    pub output: Option<&'a Path>,
    /// Additional environment variables.
    pub env: &'a [(&'a str, OsString)],
    /// Its working directory.
    pub dir: Option<&'a Path>,
}

impl ChildProcess {
    /// Starts a process in its own process group, so that Ctrl-C reaches only this program.
    pub fn start(start: &ProcessStart<'_>) -> Result<ChildProcess> {
        let log = File::create(start.log)
            .with_context(|| format!("cannot write {}", start.log.display()))?;
        let output = match start.output {
            Some(path) => File::create(path)?,
            None => log.try_clone()?,
        };
        let mut command = if start.groups.is_empty() {
            Command::new(&start.words[0])
        } else {
            let mut shell = Command::new("sh");
            let files: Vec<&OsStr> = start.groups.iter().map(|file| file.as_os_str()).collect();
            shell.args(["-c", ENTER, "sh"]).arg(&start.words[0]);
            shell.env("DEFUSE_STUDY_GROUPS", files.join(OsStr::new(" ")));
            shell
        };
        command.args(&start.words[1..]).envs(start.env.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = start.dir {
            command.current_dir(dir);
        }
        command.stdin(Stdio::null()).stdout(output).stderr(log).process_group(0);
        let child = command.spawn().with_context(|| {
            format!("{} could not be started: is it installed?", start.words[0].to_string_lossy())
        })?;
        Ok(ChildProcess { child, name: start.name.to_owned(), log: start.log.to_owned() })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits for it to exit successfully, until `patience` is over or the user requests the end.
    pub fn finish(&mut self, patience: Duration, interrupt: &InterruptFlag) -> Result<()> {
        let status = self.wait(patience, interrupt)?;
        if !status.success() {
            bail!("{} ended with {status}; its output: {}", self.name, self.log_tail());
        }
        Ok(())
    }

    /// Waits for it to exit with any status.
    pub fn wait(&mut self, patience: Duration, interrupt: &InterruptFlag) -> Result<ExitStatus> {
        let end = Instant::now() + patience;
        loop {
            if let Some(status) = self.exit_status() {
                return Ok(status);
            }
            if interrupt.is_set() {
                bail!("interrupted");
            }
            if Instant::now() > end {
                bail!(
                    "{} did not end within {} s, so it was killed",
                    self.name,
                    patience.as_secs()
                );
            }
            sleep(LOOK);
        }
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let tail =
            String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).trim().to_owned();
        if tail.is_empty() { "(nothing)".into() } else { tail }
    }

    /// Kills it. A process that cannot be killed (it waits for a file system that does not answer)
    /// is left alone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let end = Instant::now() + Duration::from_secs(5);
        while self.exit_status().is_none() && Instant::now() < end {
            sleep(LOOK);
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if self.exit_status().is_none() {
            self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(dir: &Path, script: &str) -> ChildProcess {
        let words = ["sh", "-c", script].map(OsString::from);
        let log = dir.join("log");
        let start = ProcessStart {
            name: "it",
            words: &words,
            groups: &[],
            log: &log,
            output: None,
            env: &[],
            dir: None,
        };
        ChildProcess::start(&start).unwrap()
    }

    #[test]
    fn a_failure_includes_the_output() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = start(dir.path(), "echo no room >&2; exit 3");
        let error = process.finish(Duration::from_secs(60), &InterruptFlag::default()).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
    }

    #[test]
    fn a_process_that_does_not_end_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = start(dir.path(), "exec sleep 1000");
        assert!(process.finish(Duration::ZERO, &InterruptFlag::default()).is_err());
        let pid = process.pid();
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_process_joins_its_groups_before_it_executes_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let groups = [dir.path().join("a"), dir.path().join("b")];
        let words = ["sh", "-c", "echo $$"].map(OsString::from);
        let (log, output) = (dir.path().join("log"), dir.path().join("out"));
        let start = ProcessStart {
            name: "it",
            words: &words,
            groups: &groups,
            log: &log,
            output: Some(&output),
            env: &[],
            dir: None,
        };
        let mut process = ChildProcess::start(&start).unwrap();
        process.finish(Duration::from_secs(60), &InterruptFlag::default()).unwrap();
        let pid = process.pid().to_string();
        for file in [&groups[0], &groups[1], &output] {
            assert_eq!(fs::read_to_string(file).unwrap().trim(), pid);
        }
    }
}
