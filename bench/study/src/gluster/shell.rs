//! A shell that runs one program after another for the whole measurement, so that a run of
//! `defuse run` connects to the volume once.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::interrupt::InterruptFlag;

/// Interval at which an interrupt is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// A shell. Dropping it ends it.
#[derive(Debug)]
pub struct TargetShell {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    output: PathBuf,
    log: PathBuf,
    /// Bytes of errors of earlier programs.
    seen: usize,
}

impl TargetShell {
    /// Starts a shell: the last of `words` is the program `sh`. `name` is the name of its files in
    /// `work`.
    ///
    /// # Errors
    ///
    /// Fails if it does not answer within `patience`, with its output.
    pub fn start(
        name: &str,
        words: &[OsString],
        work: &Path,
        env: &[(&str, OsString)],
        patience: Duration,
    ) -> Result<TargetShell> {
        let log = work.join(format!("{name}.shell.log"));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(File::create(&log)?).process_group(0);
        command.envs(env.iter().map(|(name, value)| (name, value)));
        let started = command.spawn();
        let mut child =
            started.with_context(|| format!("{} could not be started", words[0].display()))?;
        let orders = child.stdin.take().context("a shell without input")?;
        let said = child.stdout.take().context("a shell without output")?;
        let (sender, answers) = channel();
        // Reading has no time limit, so a thread reads. It ends with the shell.
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let output = work.join(format!("{name}.output"));
        let mut shell = TargetShell { child, orders, answers, output, log, seen: 0 };
        shell.perform(&["true".into()], patience, &InterruptFlag::default())?;
        Ok(shell)
    }

    /// The process id: the id of `defuse run`, or of the shell itself.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a program to its end, and returns its standard output.
    ///
    /// # Errors
    ///
    /// Fails if the program does, with its output, after `patience`, and if the user requests the
    /// end.
    pub fn perform(
        &mut self,
        words: &[OsString],
        patience: Duration,
        interrupt: &InterruptFlag,
    ) -> Result<String> {
        let quoted: Vec<String> = words.iter().map(|word| quote(&word.to_string_lossy())).collect();
        let (program, output) = (quoted.join(" "), quote_path(&self.output));
        self.seen = fs::metadata(&self.log).map_or(0, |log| log.len() as usize);
        // If the shell has ended, the error is reported below, with its output.
        let _ = writeln!(self.orders, "{program} >{output} </dev/null; echo $?");
        let end = Instant::now() + patience;
        let status = loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(status) => break status,
                Err(RecvTimeoutError::Timeout) if interrupt.is_set() => bail!("interrupted"),
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} did not end within {patience:?}", words[0].display())
                }
                Err(RecvTimeoutError::Disconnected) => bail!("{}", self.error_lines()),
            }
        };
        let name = words[0].display();
        ensure!(status == "0", "{name} ended with {status}; its output: {}", self.error_lines());
        fs::read_to_string(&self.output).with_context(|| self.output.display().to_string())
    }

    /// The first lines of errors of the last program.
    fn error_lines(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let errors = String::from_utf8_lossy(text.get(self.seen..).unwrap_or_default());
        // Some programs report errors on their output.
        let output = fs::read_to_string(&self.output).unwrap_or_default();
        let text = if errors.trim().is_empty() { output.as_str() } else { &errors };
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        match lines.as_slice() {
            [] => "(nothing)".to_owned(),
            lines => lines[..lines.len().min(4)].join("; "),
        }
    }
}

impl Drop for TargetShell {
    fn drop(&mut self) {
        // A program that does not end is in the process group.
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }
}

fn quote_path(path: &Path) -> String {
    quote(&path.to_string_lossy())
}

fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn shell(dir: &Path) -> TargetShell {
        TargetShell::start("test", &["sh".into()], dir, &[], PATIENCE).unwrap()
    }

    fn perform(shell: &mut TargetShell, words: &[&str]) -> Result<String> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        shell.perform(&words, PATIENCE, &InterruptFlag::default())
    }

    #[test]
    fn programs_run_one_after_another() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = shell(dir.path());
        assert_eq!(perform(&mut shell, &["echo", "it's", "$HOME"]).unwrap(), "it's $HOME\n");
        let error = perform(&mut shell, &["ls", "/no/such"]).unwrap_err().to_string();
        assert!(error.contains("/no/such"), "{error}");
        assert_eq!(perform(&mut shell, &["echo", "next"]).unwrap(), "next\n");
    }

    #[test]
    fn a_shell_that_has_ended_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = shell(dir.path());
        let pid = shell.pid().to_string();
        assert!(perform(&mut shell, &["kill", "-9", &pid]).is_err());
        let begun = Instant::now();
        let late = shell.perform(&["true".into()], PATIENCE, &InterruptFlag::default());
        assert!(late.is_err() && begun.elapsed() < PATIENCE);
    }
}
