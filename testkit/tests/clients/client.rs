//! The clients of one volume: mounts of this program, one of GlusterFS's own client, and a program
//! in a run.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use defuse_testkit::agent::{FileAgent, errno};

/// A client.
pub struct ComparedClient {
    pub name: &'static str,
    /// The longest time for which it may not know of a change by another client.
    promise: Duration,
    /// Its directory for the test.
    dir: String,
    way: ClientBackend,
    /// Calls that took long, with their ends.
    slow: Mutex<Vec<(Instant, Duration)>>,
}

enum ClientBackend {
    /// A mount.
    Mount(FileAgent),
    /// A program in a run.
    Program(Mutex<AgentProgram>),
}

struct AgentProgram {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Calls that take less are not noted: the clocks of the kernel are not finer.
const SLOW: Duration = Duration::from_millis(20);

/// Time for which calls are noted.
const NOTED: Duration = Duration::from_secs(30);

impl ComparedClient {
    /// A client by a mount.
    pub fn start_mounted(name: &'static str, dir: &Path, promise: Duration) -> ComparedClient {
        ComparedClient::start_by(name, dir, promise, ClientBackend::Mount(FileAgent::default()))
    }

    /// A client by a program that answers operations (`file_agent`), in a run with `dir`.
    pub fn program(
        name: &'static str,
        dir: &Path,
        promise: Duration,
        mut command: Command,
    ) -> ComparedClient {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let program = AgentProgram { child, input, output };
        ComparedClient::start_by(name, dir, promise, ClientBackend::Program(Mutex::new(program)))
    }

    /// True for GlusterFS's own client, which promises nothing.
    pub fn is_native(&self) -> bool {
        self.promise.is_zero()
    }

    /// True if the kernel is between a program and the client.
    pub fn is_mount(&self) -> bool {
        matches!(self.way, ClientBackend::Mount(_))
    }

    fn start_by(
        name: &'static str,
        dir: &Path,
        promise: Duration,
        way: ClientBackend,
    ) -> ComparedClient {
        let dir = format!("{}/", dir.display());
        ComparedClient { name, promise, dir, way, slow: Mutex::default() }
    }

    /// Carries out an operation in words of [`FileAgent`]: the words of its answer, or the number
    /// of its error. `@` is the directory of the client.
    pub fn call(&self, words: &str) -> Result<Vec<String>, i32> {
        let line = words.replace('@', &self.dir);
        let begun = Instant::now();
        let answer = match &self.way {
            ClientBackend::Mount(agent) => {
                let words: Vec<&str> = line.split(' ').collect();
                agent.run(&words).map_err(|error| errno(&error))
            }
            ClientBackend::Program(program) => {
                program.lock().unwrap_or_else(PoisonError::into_inner).call(&line)
            }
        };
        let (ended, took) = (Instant::now(), begun.elapsed());
        if took > SLOW {
            let mut slow = self.slow.lock().unwrap_or_else(PoisonError::into_inner);
            slow.retain(|(at, _)| at.elapsed() < NOTED);
            slow.push((ended, took));
        }
        Ok(answer?.split_whitespace().map(str::to_owned).collect())
    }

    /// The time after which a look that began at `begun` must know of a change by another client. A
    /// client may keep an answer for the promised time, which was on its way for as long as its
    /// call took, on a machine with other work.
    pub fn promise(&self, begun: Instant) -> Duration {
        let slow = self.slow.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = slow.iter().filter(|(ended, took)| *ended + 2 * self.promise + *took >= begun);
        self.promise + recent.map(|(_, took)| *took).max().unwrap_or(SLOW)
    }
}

impl AgentProgram {
    fn call(&mut self, line: &str) -> Result<String, i32> {
        let input = self.input.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        let answer = answer.trim_end_matches('\n');
        match answer.split_once(' ') {
            Some(("ok", answer)) => Ok(answer.to_owned()),
            Some(("error", number)) => Err(number.parse().unwrap()),
            _ => panic!("the program in the run has ended: {answer:?}"),
        }
    }
}

impl Drop for AgentProgram {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
