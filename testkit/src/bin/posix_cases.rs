//! Runs the POSIX cases in a directory: `posix_cases DIRECTORY [FILTER]`. For file systems without
//! a mount, such as in a program under `defuse run`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(directory) = args.next() else {
        eprintln!("usage: posix_cases DIRECTORY [FILTER]");
        return ExitCode::from(2);
    };
    let filter = args.next().unwrap_or_default();
    let report = defuse_testkit::posix::run(Path::new(&directory), &filter);
    println!("{report}");
    let (_, failed, _) = report.counts();
    ExitCode::from(u8::from(failed > 0))
}
