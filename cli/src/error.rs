//! The report of a failure.

use std::process::ExitCode;

pub use defuse_command::{Failure, Result, print, warn};

use crate::inherited;

/// Reports a failure, and returns the exit code.
pub fn report(result: Result) -> ExitCode {
    match result {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            match inherited::limit_behind(&text) {
                Some(limit) => warn(&format!("{text}; {limit}")),
                None => warn(&text),
            }
            ExitCode::from(failure.code())
        }
    }
}
