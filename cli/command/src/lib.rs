//! Commands of the programs: their failures with exit codes, and their output.

#![forbid(unsafe_code)]

pub mod limits;
pub mod man;
pub mod terminal;

use std::fmt;
use std::io;
use std::process::ExitCode;

/// The failure of a command. The text names the object and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandFailure {
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// The operation failed: exit code 1.
    Failed(String),
    /// Ctrl-C has ended the operation: exit code 130, as of a program that SIGINT ends.
    Interrupted(String),
    /// The reader of the output has closed it, which ends the command: exit code 0.
    OutputClosed,
}

/// The result of a command.
pub type Result<T = ()> = std::result::Result<T, CommandFailure>;

impl CommandFailure {
    /// A failed operation.
    pub fn from_error(error: impl fmt::Display) -> Self {
        CommandFailure::Failed(error.to_string())
    }

    /// A wrong command line.
    pub fn usage(error: impl fmt::Display) -> Self {
        CommandFailure::Usage(error.to_string())
    }

    /// The exit code, see the manual.
    pub fn code(&self) -> u8 {
        match self {
            CommandFailure::OutputClosed => 0,
            CommandFailure::Failed(_) => 1,
            CommandFailure::Usage(_) => 2,
            CommandFailure::Interrupted(_) => 130,
        }
    }

    /// The failure that another process reported with the exit code `code`.
    pub fn from_code(code: u8, message: String) -> Self {
        if code == 2 { CommandFailure::Usage(message) } else { CommandFailure::Failed(message) }
    }
}

impl From<defuse_compose::SourceOpenError> for CommandFailure {
    fn from(error: defuse_compose::SourceOpenError) -> Self {
        match error {
            defuse_compose::SourceOpenError::Usage(text) => CommandFailure::Usage(text),
            defuse_compose::SourceOpenError::Failed(text)
            | defuse_compose::SourceOpenError::Busy(text) => CommandFailure::Failed(text),
            defuse_compose::SourceOpenError::Interrupted(text) => CommandFailure::Interrupted(text),
        }
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandFailure::Usage(text)
            | CommandFailure::Failed(text)
            | CommandFailure::Interrupted(text) => f.write_str(text),
            CommandFailure::OutputClosed => f.write_str("the output was closed"),
        }
    }
}

/// A failed operation with the whole chain of its causes, in one line.
pub fn or_failed(
    error: impl fmt::Debug + Into<Box<dyn std::error::Error + Send + Sync>>,
) -> CommandFailure {
    let error: Box<dyn std::error::Error + Send + Sync> = error.into();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    CommandFailure::Failed(text)
}

/// Writes to the standard output. A closed output is no failure. Control characters except line
/// feeds and tabs are escaped, because any user may have chosen a name in the text.
///
/// # Errors
///
/// Where the output is closed, or cannot be written.
pub fn print(text: &str) -> Result {
    use io::Write;
    let mut out = io::stdout().lock();
    match out.write_all(terminal::lines(text).as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(CommandFailure::OutputClosed)
        }
        Err(error) => {
            Err(CommandFailure::Failed(format!("cannot write to the standard output: {error}")))
        }
    }
}

/// Reports a failure, and returns the exit code.
pub fn report(result: Result) -> ExitCode {
    match result {
        Ok(()) | Err(CommandFailure::OutputClosed) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            match limits::limit_behind(&text) {
                Some(limit) => warn(&format!("{text}; {limit}")),
                None => warn(&text),
            }
            ExitCode::from(failure.code())
        }
    }
}

/// Writes a line to the standard error. A closed one is ignored.
pub fn warn(message: &dyn fmt::Display) {
    use io::Write;
    // There is no other output for the error.
    let _ = writeln!(io::stderr(), "defuse: {}", terminal::escape_controls(&message.to_string()));
}
