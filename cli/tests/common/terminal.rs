//! A pseudoterminal for tests.

// Every test program uses another part of this module.
#![allow(dead_code)]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::common::TestPlace;

/// The program on a terminal of its own.
pub struct TestTerminal {
    pub child: Child,
    master: OwnedFd,
    pub shown: String,
}

impl TestTerminal {
    pub fn start(place: &TestPlace, arguments: &[&str]) -> TestTerminal {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let size = rustix::termios::Winsize { ws_row: 24, ws_col: 140, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&master, size).unwrap();
        let slave = || File::options().read(true).write(true).open(&name).unwrap();
        let mut command = place.command(arguments);
        // The tests may run without a terminal, and without TERM.
        command.env("TERM", "xterm").stdin(slave()).stdout(slave()).stderr(slave());
        let child = command.spawn().unwrap();
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        TestTerminal { child, master, shown: String::new() }
    }

    /// Reads until `text` is shown.
    pub fn wait_for_text(&mut self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.shown.contains(text) {
            assert!(Instant::now() < deadline, "{text:?} is not in {:.2000?}", self.shown);
            let mut part = [0; 4096];
            match rustix::io::read(&self.master, &mut part) {
                Ok(len) => self.shown.push_str(&String::from_utf8_lossy(&part[..len])),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    pub fn types(&mut self, keys: &[u8]) {
        self.shown.clear();
        rustix::io::write(&self.master, keys).unwrap();
    }
}

impl Drop for TestTerminal {
    fn drop(&mut self) {
        // The process has ended, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
