//! The text of a configuration: TOML, in which each mistake has its place.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::error::{CommandFailure, Result};

/// A file, and its text.
pub struct ConfigText {
    file: PathBuf,
    text: String,
}

impl ConfigText {
    /// Reads `file`. `help` is the command that explains its keys.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read.
    pub fn read(file: &Path, help: &str) -> Result<ConfigText> {
        let text = std::fs::read_to_string(file).map_err(|error| {
            let shown = file.display();
            let next = format!("`{help}` shows a configuration");
            CommandFailure::Failed(format!(
                "cannot read the configuration {shown}: {error}; {next}"
            ))
        })?;
        Ok(ConfigText { file: file.to_path_buf(), text })
    }

    /// A text as if it were in `file`.
    #[cfg(test)]
    pub fn new(file: &Path, text: String) -> ConfigText {
        ConfigText { file: file.to_path_buf(), text }
    }

    /// Parses the text. Each failure names the file, the line and the key.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        toml::from_str(&self.text).map_err(|error| {
            let place = error.span().map_or(0, |span| span.start);
            self.locate_failure(place, &CommandFailure::usage(error.message().replace('\n', "; ")))
        })
    }

    /// The failure with file, line, and the key in this line.
    pub fn locate_failure(&self, place: usize, failure: &CommandFailure) -> CommandFailure {
        let place = place.min(self.text.len());
        let before = self.text.as_bytes()[..place].iter();
        let line = before.filter(|byte| **byte == b'\n').count();
        let words = self.text.lines().nth(line).unwrap_or_default();
        let key = words.split(['=', '#']).next().unwrap_or_default().trim();
        let key = if key.is_empty() { String::new() } else { format!("{key}: ") };
        let text = format!("{}:{}: {key}{failure}", self.file.display(), line + 1);
        CommandFailure::from_code(failure.code(), text)
    }
}
