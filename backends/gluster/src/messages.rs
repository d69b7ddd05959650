//! The messages of libgfapi.
//!
//! libgfapi writes its messages to a file that it opens by name. The standard error has no such
//! name if it is a socket, as under systemd, and may belong to another user, as after su(1). A
//! daemon therefore gives libgfapi a pipe, and a thread passes each message on to the log of the
//! program. In an application, whose descriptors may be closed at any time, libgfapi gets a
//! duplicate of the standard error.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Number of messages that are kept for the error of a failed start.
const LAST: usize = 4;

/// The longest part of a line that is passed on at once.
const LONGEST: u64 = 4096;

/// Time for messages to arrive that were written before a call returned.
const ARRIVE_WITHIN: Duration = Duration::from_millis(50);

/// The last messages of libgfapi.
#[derive(Clone, Debug, Default)]
pub struct LastMessages(Arc<Mutex<VecDeque<String>>>);

/// A pipe to which libgfapi writes its messages.
#[derive(Debug)]
pub struct LogPipe {
    writer: PipeWriter,
    pub last: LastMessages,
}

impl LogPipe {
    /// Makes the pipe and starts the thread that passes messages on, until libgfapi has closed its
    /// end.
    ///
    /// # Errors
    ///
    /// The errors of pipe(2) and of a new thread.
    pub fn start() -> Result<LogPipe> {
        let (reader, writer) = std::io::pipe()?;
        let last = LastMessages::default();
        let kept = last.clone();
        let thread = std::thread::Builder::new().name("gluster-log".to_owned());
        thread.spawn(move || pass_on(reader, &kept))?;
        Ok(LogPipe { writer, last })
    }

    /// The name by which this process can open the pipe, until this value is dropped.
    pub fn path(&self) -> CString {
        let path = format!("/proc/self/fd/{}", self.writer.as_raw_fd());
        CString::new(path).unwrap_or_default()
    }
}

impl LastMessages {
    /// The last messages as a part of an error; empty if there are none.
    pub fn quote_last(&self) -> String {
        std::thread::sleep(ARRIVE_WITHIN);
        let last: Vec<String> = self.lock().iter().cloned().collect();
        if last.is_empty() { String::new() } else { format!("; libgfapi: {}", last.join("; ")) }
    }

    fn add(&self, text: &str) {
        let mut last = self.lock();
        if last.len() == LAST {
            last.pop_front();
        }
        last.push_back(text.to_owned());
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pass_on(reader: PipeReader, last: &LastMessages) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.is_empty() {
            continue;
        }
        last.add(text);
        let level = level(text);
        if log::log_enabled!(level) {
            log::log!(level, "libgfapi: {text}");
        } else {
            // A user who asked for more messages gets them also where the program has no log for
            // them.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}

/// The level of a message: a letter after the time, as in
/// `[2026-01-02 03:04:05.678901 +0000] W [...`.
fn level(text: &str) -> log::Level {
    let letter = text.split_once("] ").and_then(|(_, rest)| rest.split(' ').next());
    match letter {
        Some("M" | "A" | "C" | "E") => log::Level::Error,
        Some("W") => log::Level::Warn,
        _ => log::Level::Info,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_level_of_its_letter() {
        let with = |letter: &str| {
            level(&format!("[2026-11-29 14:00:00.1 +0000] {letter} [x.c:1:f] 0-v: a"))
        };
        assert_eq!(with("E"), log::Level::Error);
        assert_eq!(with("C"), log::Level::Error);
        assert_eq!(with("W"), log::Level::Warn);
        assert_eq!(with("T"), log::Level::Info);
        assert_eq!(level("the end of a longer message"), log::Level::Info);
    }

    #[test]
    fn messages_arrive_by_the_name_of_the_pipe_and_the_last_ones_are_quoted() {
        let pipe = LogPipe::start().unwrap();
        let mut file =
            std::fs::OpenOptions::new().append(true).open(pipe.path().to_str().unwrap()).unwrap();
        let last = pipe.last.clone();
        drop(pipe);
        assert_eq!(last.quote_last(), "");
        for number in 0..LAST + 3 {
            writeln!(file, "message {number}").unwrap();
        }
        drop(file);
        let expected = "; libgfapi: message 3; message 4; message 5; message 6";
        let begun = std::time::Instant::now();
        while last.quote_last() != expected && begun.elapsed() < Duration::from_secs(30) {}
        assert_eq!(last.quote_last(), expected);
    }
}
