//! Workers: processes that execute orders on one file each during the whole measurement.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};

use super::worker::{WorkerMeasurement, WorkerOrder};

/// Time limit of an order. The slowest takes a tenth of a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit for a worker to exit.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// A worker process. Dropping it ends it with all its children.
#[derive(Debug)]
pub struct WorkerProcess {
    name: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    log: PathBuf,
}

impl WorkerProcess {
    /// Starts a worker in its own process group, so that Ctrl-C reaches only this program.
    pub fn start(name: &str, words: &[OsString], work: &Path) -> Result<WorkerProcess> {
        let log = work.join(format!("{name}.log"));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(File::create(&log)?).process_group(0);
        let mut child = command
            .spawn()
            .with_context(|| format!("{} could not be started", words[0].display()))?;
        let orders = child.stdin.take();
        let output = child.stdout.take().context("a worker without output")?;
        let (sender, answers) = channel();
        // Reading has no time limit, so a thread reads. It ends with the worker.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(WorkerProcess { name: name.to_owned(), child, orders, answers, log })
    }

    /// Makes the worker execute an order.
    pub fn perform(&mut self, order: WorkerOrder) -> Result<WorkerMeasurement> {
        let mut line = serde_json::to_vec(&order)?;
        line.push(b'\n');
        // If the worker has ended, the error is reported below, with its output.
        let _ = self.orders.as_mut().map(|orders| orders.write_all(&line));
        let (name, op, block) = (&self.name, order.op.name(), order.block);
        match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => serde_json::from_str(&answer)
                .with_context(|| format!("{name} answered {answer:?} to {op} {block}")),
            Err(RecvTimeoutError::Timeout) => {
                bail!("{name} did not finish {op} of {block} bytes within {PATIENCE:?}")
            }
            Err(RecvTimeoutError::Disconnected) => {
                let said = std::fs::read_to_string(&self.log).unwrap_or_default();
                let tail = said.trim().lines().last().unwrap_or("(nothing)");
                bail!("{name} ended at {op} of {block} bytes; its output: {tail}")
            }
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // The worker exits at the end of its input.
        drop(self.orders.take());
        let end = Instant::now() + END_PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > end {
                let _ =
                    rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::KILL);
                let _ = self.child.wait();
                return;
            }
            sleep(Duration::from_millis(2));
        }
    }
}
