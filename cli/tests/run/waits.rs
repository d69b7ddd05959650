//! Calls that wait, and signals.

use super::{compare, compare_c, compare_static, compare_with, run_on_passthrough};

fn run_on_all(name: &str, needs: &[&str], script: &str) {
    run_on_passthrough(name, needs, script);
    compare(name, needs, "memory:", script);
    compare_with(&["--fork", "server"], name, needs, "passthrough:SRC", script);
    compare_with(&["--dispatch"], name, needs, "memory:", script);
    compare_with(&["--dispatch"], name, needs, "passthrough:SRC,backing=off", script);
}

/// Waits for a lock on a served mount failed with EINTR in spite of `SA_RESTART`. Others went on,
/// and the handler ran when they were over: a program whose SIGTERM handler was set by signal(3)
/// did not end while it waited for a lock or a fifo.
#[test]
fn a_signal_is_handled_while_a_call_waits_which_then_goes_on_or_fails_as_natively() {
    compare_c("waits", include_str!("waits.c"), run_on_all);
}

#[test]
fn a_signal_is_handled_while_a_call_of_a_static_program_waits() {
    compare_static("waits, static", include_str!("waits.c"), |name, needs, script| {
        compare_with(&["--dispatch"], name, needs, "memory:", script);
        compare_with(&["--dispatch"], name, needs, "passthrough:SRC", script);
    });
}
