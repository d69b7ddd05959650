//! Runs the POSIX cases on a directory: `posix DIRECTORY [FILTER]`.
//!
//! Exits with 0 if all cases passed or were skipped, 1 if one failed, and 2 for a wrong command
//! line. The cases create and remove their own directories below the directory.

use std::path::Path;
use std::process::ExitCode;

use defuse_testkit::posix;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (dir, filter) = match args.as_slice() {
        [dir] => (dir, ""),
        [dir, filter] => (dir, filter.as_str()),
        _ => {
            eprintln!("usage: posix DIRECTORY [FILTER]");
            return ExitCode::from(2);
        }
    };
    let report = posix::run(Path::new(dir), filter);
    println!("\n{report}");
    if report.failed_cases().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
