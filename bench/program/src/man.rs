//! The manual pages of the commands, generated from the definitions of the parser.
//! `cargo xtask install` writes them.

use std::path::PathBuf;

use clap::CommandFactory;
use clap_mangen::Man;
use defuse_command::man::{make_directory, pages, write};
use defuse_command::{CommandFailure, Result};

use crate::StudyCli;

/// Write the manual pages
#[derive(clap::Args)]
pub struct StudyManArgs {
    /// The directory
    dir: PathBuf,
}

/// Writes the manual pages.
pub fn run(args: &StudyManArgs) -> Result {
    let mut command = StudyCli::command();
    command.build();
    make_directory(&args.dir)?;
    for (name, subcommand) in pages(&command, "defuse") {
        let mut page = Vec::new();
        let man = Man::new(subcommand.clone().name(name.clone()));
        man.render(&mut page).map_err(CommandFailure::from_error)?;
        write(&args.dir, &format!("{name}.1"), &String::from_utf8_lossy(&page))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_within_commands_have_pages() {
        let mut command = StudyCli::command();
        command.build();
        let names: Vec<String> =
            pages(&command, "defuse").into_iter().map(|(name, _)| name).collect();
        for expected in ["defuse-study", "defuse-bench", "defuse-bench-direct"] {
            assert!(names.iter().any(|name| name == expected), "{names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("worker")), "{names:?}");
    }
}
