//! Failures and output of commands, and the warnings of file systems that commands show.

pub use defuse_command::{CommandFailure, Result, print, report, warn};

/// Shows warnings of the log on the standard error, for a command that serves without a log of its
/// own.
pub fn show_warnings() {
    struct WarningLogger;
    impl log::Log for WarningLogger {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }

        fn log(&self, record: &log::Record<'_>) {
            if !self.enabled(record.metadata()) {
                return;
            }
            let text = record.args().to_string();
            // Peers decide when other warnings of a server come, and their users may be strangers.
            let of_peers = ["defuse_socket", "defuse_probe::limited"]
                .iter()
                .any(|target| record.target().starts_with(target));
            if !of_peers || text.contains("limit of processes") {
                warn(&text);
            }
        }

        fn flush(&self) {}
    }
    if log::set_logger(&WarningLogger).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}
