//! The manual pages of the commands, generated from the definitions of the parser. `cargo xtask install` writes them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use defuse_command::{Failure, Result};

use crate::Cli;

/// Write the manual pages
#[derive(clap::Args)]
pub struct ManArgs {
    /// The directory
    dir: PathBuf,
}

/// Writes the manual pages.
pub fn run(args: &ManArgs) -> Result {
    let mut command = Cli::command();
    command.build();
    fs::create_dir_all(&args.dir).map_err(|error| cannot_write(&args.dir, &error))?;
    for (name, subcommand) in pages(&command, "defuse") {
        let mut page = Vec::new();
        let man = Man::new(subcommand.clone().name(name.clone()));
        man.render(&mut page).map_err(Failure::failed)?;
        let path = args.dir.join(format!("{name}.1"));
        fs::write(&path, page).map_err(|error| cannot_write(&path, &error))?;
    }
    Ok(())
}

/// The commands that have a page, and their subcommands, with the names of the pages.
fn pages<'a>(command: &'a Command, name: &str) -> Vec<(String, &'a Command)> {
    let mut pages = Vec::new();
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("{name}-{}", subcommand.get_name());
        pages.extend(self::pages(subcommand, &name));
        pages.push((name, subcommand));
    }
    pages
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_within_commands_have_pages() {
        let mut command = Cli::command();
        command.build();
        let names: Vec<String> =
            pages(&command, "defuse").into_iter().map(|(name, _)| name).collect();
        for expected in ["defuse-study", "defuse-bench", "defuse-bench-direct"] {
            assert!(names.iter().any(|name| name == expected), "{names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("worker")), "{names:?}");
    }
}
