//! `defuse-bench`: compares defuse with its peers. The command line is in `args`, the rest in the
//! library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use defuse_bench::args::BenchmarkArgs;
use defuse_bench::{report, runner};

fn main() -> anyhow::Result<ExitCode> {
    let args = BenchmarkArgs::parse();
    if args.list {
        report::print_text(&report::catalogue())?;
        return Ok(ExitCode::SUCCESS);
    }
    let results = runner::run(&args)?;
    report::publish(&results, &args)?;
    let failed = args.check && !report::is_acceptable(&results);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
