//! `defuse fsck`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use defuse_fs::source::{CheckResult, NewestChanges};
use serde_json::{Map, Value, json};

use crate::error::{self, CommandFailure, Result, print};
use crate::{images, paths};

/// Exit codes of fsck(8).
const CLEAN: u8 = 0;
const REPAIRED: u8 = 1;
const ERRORS: u8 = 4;
const FAILED: u8 = 8;
const CANCELED: u8 = 32;
/// The exit code of fsck(8) for a wrong command line.
pub const USAGE: u8 = 16;

/// Check the file system in an image, and repair it
///
/// Reads all of it but the data of files, and changes nothing without --repair. The image must not
/// be in use. The exit code is as of fsck(8): 0 without errors, 1 if all errors were repaired, 4
/// with errors, 8 if the image could not be checked, 16 for a wrong command line, 32 after Ctrl-C.
/// Changes that a power failure has interrupted are no errors: the next mount removes them.
#[derive(clap::Args)]
pub struct FsckArgs {
    /// The file or block device
    image: PathBuf,
    /// Repair all errors; nothing that can be read is deleted
    #[arg(long)]
    repair: bool,
    /// Keep or undo the newest changes if parts of them cannot be read, so that it is unknown if
    /// they were complete; without this, nothing is repaired then
    #[arg(long, requires = "repair", value_enum)]
    newest: Option<RepairChoice>,
    /// Give an image without errors the features of new images; older versions of defuse then
    /// refuse it
    #[arg(long)]
    upgrade: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The choice of [`NewestChanges`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RepairChoice {
    /// Keep what can be read of them
    Keep,
    /// Undo them
    Undo,
}

impl From<RepairChoice> for NewestChanges {
    fn from(choice: RepairChoice) -> Self {
        match choice {
            RepairChoice::Keep => NewestChanges::Keep,
            RepairChoice::Undo => NewestChanges::Undo,
        }
    }
}

/// Checks the image, and prints the findings. Returns the exit code.
pub fn run(args: &FsckArgs) -> Result<u8> {
    let image = paths::image(&args.image);
    let opened = images::open(&image, args.repair || args.upgrade)?;
    let repairs = match args.repair {
        true => opened.repair(args.newest.map(NewestChanges::from))?,
        false => Vec::new(),
    };
    let checked = opened.check()?;
    let upgrades = match args.upgrade && checked.problems.is_empty() {
        true => opened.upgrade()?,
        false => Vec::new(),
    };
    let report = FsckReport { image: &image, repairs, upgrades, checked: &checked };
    match args.json {
        true => print(&format!("{:#}\n", report.as_json()))?,
        false => print(&report.text())?,
    }
    let repairs = report.repairs;
    Ok(match (checked.problems.is_empty(), repairs.is_empty()) {
        (true, true) => CLEAN,
        (true, false) => REPAIRED,
        (false, _) => ERRORS,
    })
}

/// Reports the outcome of [`run`], and returns the exit code.
pub fn report(outcome: Result<u8>) -> ExitCode {
    let code = match outcome {
        Ok(code) => code,
        // The reader of the output has closed it, and needs no more lines.
        Err(CommandFailure::OutputClosed) => CLEAN,
        Err(failure) => {
            error::warn(&failure);
            match failure {
                CommandFailure::Usage(_) => USAGE,
                CommandFailure::Interrupted(_) => CANCELED,
                _ => FAILED,
            }
        }
    };
    ExitCode::from(code)
}

/// The outcome of a check, and of what was done before and after it.
struct FsckReport<'a> {
    image: &'a Path,
    /// Changes of a repair, a line each.
    repairs: Vec<String>,
    /// Features that the image did not have.
    upgrades: Vec<&'static str>,
    checked: &'a CheckResult,
}

impl FsckReport<'_> {
    fn text(&self) -> String {
        let (shown, problems) = (self.image.display(), &self.checked.problems);
        let figures = self.checked.figures.iter();
        let figures = figures.map(|(name, value)| format!("{value} {}", name.replace('_', " ")));
        let figures = figures.collect::<Vec<_>>().join(", ");
        let first = match problems.len() {
            0 => format!("{shown}: clean: {figures}\n"),
            count => format!("{shown}: {count} problems: {figures}\n"),
        };
        let repairs = self.repairs.iter().map(|change| format!("  repaired: {change}\n"));
        let upgrades = self.upgrades.iter().map(|name| format!("  upgraded: {name}\n"));
        let problems = problems.iter().map(|problem| format!("  {problem}\n"));
        std::iter::once(first).chain(repairs).chain(upgrades).chain(problems).collect()
    }

    fn as_json(&self) -> Value {
        let figures = self.checked.figures.iter();
        let figures: Map<String, Value> =
            figures.map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        json!({
            "image": self.image.to_string_lossy(),
            "clean": self.checked.problems.is_empty(),
            "problems": self.checked.problems,
            "repairs": self.repairs,
            "upgrades": self.upgrades,
            "figures": figures,
        })
    }
}
