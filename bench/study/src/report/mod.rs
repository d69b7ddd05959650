//! The results for readers: a table for the terminal and a self-contained HTML file.

mod analysis;
pub(crate) mod html;
pub(crate) mod plot;
mod sections;
mod table;
mod verdict;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::results::{StudyResults, write_atomically};

pub use analysis::{RowFigure, median};
pub use html::html;
pub use table::table;
pub use verdict::{FamilyVerdict, judge_all as verdicts};

/// The name of the report in the directory of results.
pub const FILE: &str = "report.html";

/// Writes the report of results into a directory, and returns its path.
pub fn write(results: &StudyResults, dir: &Path) -> Result<PathBuf> {
    let path = dir.join(FILE);
    write_atomically(&path, html(results).as_bytes())?;
    Ok(path)
}
