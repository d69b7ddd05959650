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
/// be in use. The exit code is that of fsck(8): 0 without errors, 1 if all errors were repaired, 4
/// with errors, 8 if the image could not be checked, 16 for a wrong command line, 32 after Ctrl-C. Changes that a
/// power failure has interrupted are no errors: the next mount removes them.
#[derive(clap::Args)]
pub struct FsckArgs {
    /// The file or block device
    image: PathBuf,
    /// Repair all errors; nothing that can be read is deleted
    #[arg(long)]
    repair: bool,
    /// Keep or undo the newest changes if parts of them cannot be read, so that nobody knows if they were
    /// complete; without this, nothing is repaired then
    #[arg(long, requires = "repair", value_enum)]
    newest: Option<RepairChoice>,
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
    let opened = images::open(&image, args.repair)?;
    let repairs = match args.repair {
        true => opened.repair(args.newest.map(NewestChanges::from))?,
        false => Vec::new(),
    };
    let checked = opened.check()?;
    match args.json {
        true => print(&format!("{:#}\n", as_json(&image, &repairs, &checked)))?,
        false => print(&text(&image, &repairs, &checked))?,
    }
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

fn text(image: &Path, repairs: &[String], checked: &CheckResult) -> String {
    let figures =
        checked.figures.iter().map(|(name, value)| format!("{value} {}", name.replace('_', " ")));
    let figures = figures.collect::<Vec<_>>().join(", ");
    let (shown, problems) = (image.display(), checked.problems.len());
    let repaired: String = repairs.iter().map(|change| format!("  repaired: {change}\n")).collect();
    if problems == 0 {
        return format!("{shown}: clean: {figures}\n{repaired}");
    }
    let lines: String = checked.problems.iter().map(|problem| format!("  {problem}\n")).collect();
    format!("{shown}: {problems} problems: {figures}\n{repaired}{lines}")
}

fn as_json(image: &Path, repairs: &[String], checked: &CheckResult) -> Value {
    let figures: Map<String, Value> =
        checked.figures.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    json!({
        "image": image.to_string_lossy(),
        "clean": checked.problems.is_empty(),
        "problems": checked.problems,
        "repairs": repairs,
        "figures": figures,
    })
}
