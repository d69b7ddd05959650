//! Power failures of uhs by chance, without an end.

use anyhow::Result;

use crate::command;

/// Cut the power of simulated devices until a state is wrong, or until it is stopped
#[derive(clap::Args)]
pub struct CrashArgs {
    /// The seed to begin with, which a failure names; by chance without it
    seed: Option<u64>,
}

/// Runs seed after seed.
pub fn run(args: &CrashArgs) -> Result<()> {
    let mut cargo = command::cargo();
    cargo.args(["test", "--package", "defuse-uhs", "--lib", "--"]);
    cargo.args(["--ignored", "--nocapture", "random_operations_and_power_failures_until_stopped"]);
    if let Some(seed) = args.seed {
        cargo.env("DEFUSE_SEED", seed.to_string());
    }
    command::run(&mut cargo)
}
