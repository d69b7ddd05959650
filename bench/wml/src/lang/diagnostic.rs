//! Errors in a workload file, and their positions.

use std::fmt;

/// A position in a workload file. Lines and columns (in characters) begin at 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourcePosition {
    /// The line.
    pub line: u32,
    /// The column.
    pub column: u32,
}

/// An error in a workload file. Nothing was run or created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanguageDiagnostic {
    /// The name of the file, as the caller gave it.
    pub file: String,
    /// The position of the error.
    pub place: SourcePosition,
    /// The text found there, or the error.
    pub found: String,
    /// The expected text, or the next step.
    pub expected: String,
    /// A known name similar to the text.
    pub suggestion: Option<String>,
}

impl fmt::Display for LanguageDiagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LanguageDiagnostic { file, place, found, expected, .. } = self;
        write!(f, "{file}:{}:{}: {found}; expected {expected}", place.line, place.column)?;
        match &self.suggestion {
            Some(name) => write!(f, " (did you mean {name}?)"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for LanguageDiagnostic {}

/// The result of reading a workload.
pub(crate) type LanguageResult<T> = Result<T, LanguageError>;

/// An error without the name of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LanguageError {
    pub place: SourcePosition,
    pub found: String,
    pub expected: String,
    pub suggestion: Option<String>,
}

impl LanguageError {
    pub fn new(
        place: SourcePosition,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        LanguageError { place, found: found.into(), expected: expected.into(), suggestion: None }
    }

    /// Suggests the name of `known` that is similar to `written`, if any.
    pub fn suggest<'a>(mut self, written: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        self.suggestion = closest(written, known);
        self
    }

    pub fn with_file(self, file: &str) -> LanguageDiagnostic {
        let LanguageError { place, found, expected, suggestion } = self;
        LanguageDiagnostic { file: file.to_owned(), place, found, expected, suggestion }
    }
}

/// The name of `known` that was probably meant by `written`.
pub(crate) fn closest<'a>(
    written: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<String> {
    known
        .into_iter()
        .map(|name| (similarity(written, name), name))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// The similarity of two words, 0 to 1. Short words with two letters swapped are similar, too.
fn similarity(written: &str, name: &str) -> f64 {
    let one_slip = written.len() > 1 && strsim::damerau_levenshtein(written, name) == 1;
    strsim::jaro_winkler(written, name).max(if one_slip { 0.85 } else { 0.0 })
}
