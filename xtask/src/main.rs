//! The project's own commands.

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("test") => {
            let ok = Command::new("cargo")
                .args(["test", "--workspace"])
                .status()
                .is_ok_and(|status| status.success());
            if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        _ => {
            eprintln!("usage: cargo xtask test");
            ExitCode::from(2)
        }
    }
}
