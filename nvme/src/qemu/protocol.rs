//! The test protocol of QEMU ("qtest"): a line for each access, and a line for each answer.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The longest time for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// The longest line of an answer.
const LINE: u64 = 256;

pub(super) struct QtestConnection {
    send: UnixStream,
    receive: BufReader<UnixStream>,
}

impl QtestConnection {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        Ok(QtestConnection { send: stream.try_clone()?, receive: BufReader::new(stream) })
    }

    /// Sends a command, and returns the value in the answer; 0 where it has none.
    pub(super) fn call(&mut self, command: &str) -> io::Result<u64> {
        self.send.write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        io::Read::take(&mut self.receive, LINE).read_line(&mut line)?;
        let invalid = || io::Error::other(format!("QEMU answers {line:?} to {command:?}"));
        let mut words = line.split_whitespace();
        if words.next() != Some("OK") {
            return Err(invalid());
        }
        let Some(value) = words.next() else { return Ok(0) };
        let digits = value.strip_prefix("0x").ok_or_else(invalid)?;
        u64::from_str_radix(digits, 16).map_err(|_| invalid())
    }
}
