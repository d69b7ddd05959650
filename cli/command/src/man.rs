//! Files of manual pages.

use std::fs;
use std::path::Path;

use clap::Command;

use crate::{CommandFailure, Result};

/// The commands that have a page, and their subcommands, with the names of the pages.
pub fn pages<'a>(command: &'a Command, name: &str) -> Vec<(String, &'a Command)> {
    let mut pages = Vec::new();
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("{name}-{}", subcommand.get_name());
        pages.extend(self::pages(subcommand, &name));
        pages.push((name, subcommand));
    }
    pages
}

/// Makes the directory for pages.
///
/// # Errors
///
/// Where it cannot be made.
pub fn make_directory(dir: &Path) -> Result {
    fs::create_dir_all(dir).map_err(|error| write_error(dir, &error))
}

/// Writes a page into a directory.
///
/// # Errors
///
/// Where it cannot be written.
pub fn write(dir: &Path, name: &str, text: &str) -> Result {
    let path = dir.join(name);
    fs::write(&path, text).map_err(|error| write_error(&path, &error))
}

fn write_error(path: &Path, error: &std::io::Error) -> CommandFailure {
    CommandFailure::Failed(format!("cannot write {}: {error}", path.display()))
}
