//! Carries out operations on files, which are lines of its input (`defuse_testkit::agent`), until
//! the input ends.

use std::process::ExitCode;

fn main() -> ExitCode {
    match defuse_testkit::agent::FileAgent::default()
        .serve(std::io::stdin().lock(), std::io::stdout())
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("file_agent: {error}");
            ExitCode::FAILURE
        }
    }
}
