//! Limits of the process and signals that it ignores, as its starter has left them.

use std::sync::Arc;

use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;

/// Makes a write beyond the limit of file sizes an error of this process, and not its end by a
/// signal. A program that it starts is not affected.
pub fn survive_file_sizes() {
    // A signal that is ignored stays ignored in programs.
    if getrlimit(Resource::Fsize).current.is_some() && !is_ignored(SIGXFSZ) {
        let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    }
}

/// The limit of this process that may be the reason of an error with this text, and the next step.
pub fn limit_behind(error: &str) -> Option<String> {
    let error = error.to_lowercase();
    let is = |texts: [&str; 2]| texts.iter().any(|text| error.contains(text));
    if is(["file too large", "efbig"]) {
        let limit = getrlimit(Resource::Fsize).current?;
        return Some(format!(
            "the limit of file sizes is {limit} bytes here (ulimit -f), and holds for shared memory and images, too: raise it"
        ));
    }
    if is(["cannot allocate memory", "enomem"]) {
        let limit = getrlimit(Resource::As).current?;
        return Some(format!(
            "the limit of address space is {limit} bytes here (ulimit -v): raise it"
        ));
    }
    None
}

/// True if this process ignores the signal (proc_pid_status(5)).
fn is_ignored(signal: i32) -> bool {
    ignored_signals() & 1 << (signal - 1) != 0
}

/// The signals that this process ignores, one bit each; 0 if unknown.
pub fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    field.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}
