//! How a command fails, and with which exit code.

use std::fmt;
use std::io;
use std::process::ExitCode;

use crate::terminal;

/// Why a command failed. The text names the object and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// What was asked for cannot be meant: exit code 2.
    Usage(String),
    /// What was asked for could not be done: exit code 1.
    Failed(String),
    /// Nobody reads the output any more, so that nothing is left to do: exit code 0.
    OutputClosed,
}

/// The outcome of a command.
pub type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    /// An operation that failed.
    pub fn failed(error: impl fmt::Display) -> Self {
        Failure::Failed(error.to_string())
    }

    /// A mistake in what was asked for.
    pub fn usage(error: impl fmt::Display) -> Self {
        Failure::Usage(error.to_string())
    }

    /// The exit code of the program, as its manual documents it.
    pub fn code(&self) -> u8 {
        match self {
            Failure::OutputClosed => 0,
            Failure::Failed(_) => 1,
            Failure::Usage(_) => 2,
        }
    }

    /// The same failure, as it was told by a process that ended with `code`.
    pub fn from_code(code: u8, message: String) -> Self {
        if code == 2 { Failure::Usage(message) } else { Failure::Failed(message) }
    }
}

impl From<defuse_compose::Error> for Failure {
    fn from(error: defuse_compose::Error) -> Self {
        match error {
            defuse_compose::Error::Usage(text) => Failure::Usage(text),
            defuse_compose::Error::Failed(text) => Failure::Failed(text),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(text) | Failure::Failed(text) => f.write_str(text),
            Failure::OutputClosed => f.write_str("the output was closed"),
        }
    }
}

/// Writes to the standard output. A reader that has gone away is no failure. Control characters but line feeds
/// and tabs are written out: what is shown may have been named by anybody.
pub fn print(text: &str) -> Result {
    use io::Write;
    let mut out = io::stdout().lock();
    match out.write_all(terminal::lines(text).as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::OutputClosed),
        Err(error) => Err(Failure::Failed(format!("cannot write to the standard output: {error}"))),
    }
}

/// Says why a command failed, and gives its exit code.
pub fn report(result: Result) -> ExitCode {
    match result {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(failure) => {
            warn(&failure);
            ExitCode::from(failure.code())
        }
    }
}

/// Writes a line to the standard error, where there is one: a closed one is no reason to panic.
pub fn warn(message: &dyn fmt::Display) {
    use io::Write;
    // Nobody is left to be told.
    let _ = writeln!(io::stderr(), "defuse: {}", terminal::foreign(&message.to_string()));
}
