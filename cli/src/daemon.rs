//! The background process: the program executes itself again, and the first process waits until the
//! mount is ready.
//!
//! fork(2) is unsafe in a program with threads; executing the program again is safe. The second
//! process has a pipe to the first as its standard output until it is ready. It sends one byte with
//! the exit code, then the text to print (notes, one per line, or the error).

use std::ffi::{CString, OsString};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::{fs, io};

use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};

use crate::error::{self, CommandFailure, Result};
use crate::inherited;

/// The receiver of the message that the mount is ready or has failed.
pub enum ReadyReceiver {
    /// No process that waits: this one stays in the foreground. A service manager may want to know.
    Foreground(Option<ServiceManager>),
    /// The waiting process, and notes for the user so far.
    Parent(Vec<String>),
}

/// Starts the program in the background, and returns when its mount is ready.
pub fn start(command_line: &[OsString]) -> Result {
    let failed =
        |error: io::Error| CommandFailure::Failed(format!("cannot start the daemon: {error}"));
    inherited::keep_descriptors(command_line);
    let mut child = Command::new("/proc/self/exe")
        .arg0("defuse")
        .args(command_line)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let mut said = Vec::new();
    if let Some(mut pipe) = child.stdout.take() {
        pipe.read_to_end(&mut said).map_err(failed)?;
    }
    match said.split_first() {
        Some((b'0', notes)) => {
            String::from_utf8_lossy(notes).lines().for_each(|note| error::warn(&note));
            Ok(())
        }
        Some((code, text)) => {
            let text = String::from_utf8_lossy(text).into_owned();
            Err(CommandFailure::from_code(code.wrapping_sub(b'0'), text))
        }
        None => Err(early_end_error(&mut child)),
    }
}

fn early_end_error(child: &mut Child) -> CommandFailure {
    let how = match child.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("with exit code {code}"),
            (_, Some(signal)) => format!("by signal {signal}"),
            _ => "for no known reason".to_owned(),
        },
        Err(error) => error.to_string(),
    };
    CommandFailure::Failed(format!(
        "the daemon ended before it was ready, {how}: start it with --foreground to see why"
    ))
}

/// Leaves the session, the directory and the terminal of the process that started this one. `notes`
/// are for the user.
pub fn detach(notes: Vec<String>) -> Result<ReadyReceiver> {
    // A process that gives up waiting, as by Ctrl-C while an image is loaded, wants no mount any
    // more. If it has ended already, its end of the pipe shows that later.
    let _ = set_parent_process_death_signal(Some(Signal::TERM));
    // Fails only for the leader of a process group. A new process is none.
    let _ = rustix::process::setsid();
    // A process that was started as /proc/self/exe is shown as `exe` in ps(1) and top(1).
    let _ = rustix::thread::set_name(c"defuse");
    std::env::set_current_dir("/").map_err(CommandFailure::from_error)?;
    Ok(ReadyReceiver::Parent(notes))
}

/// Shows in the name of the process that it has nothing to serve any more: `block` waits for such a
/// process that has an image. Only for the first thread, whose name it is.
pub fn show_the_end() {
    if let Ok(name) = CString::new(defuse_block::ENDING) {
        let _ = rustix::thread::set_name(&name);
    }
}

/// The service manager that has started this process and waits until it is ready, sd_notify(3).
pub struct ServiceManager(UnixDatagram);

impl ServiceManager {
    /// The manager that the variable `NOTIFY_SOCKET` names. Comes before the process leaves its
    /// mount namespace, in which the socket has a path.
    pub fn from_environment() -> Option<ServiceManager> {
        let name = std::env::var_os("NOTIFY_SOCKET")?;
        let connect = || -> io::Result<UnixDatagram> {
            let address = match name.as_bytes().strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name)?,
                None => SocketAddr::from_pathname(&name)?,
            };
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            Ok(socket)
        };
        let failed = |error| error::warn(&format!("NOTIFY_SOCKET={}: {error}", name.display()));
        connect().map_err(failed).map(ServiceManager).ok()
    }

    /// By write(2), which the filter of the sandbox permits.
    fn tell(&self, state: &str) {
        if let Err(error) = rustix::io::write(&self.0, state.as_bytes()) {
            log::warn!("the service manager does not learn that this process is ready: {error}");
        }
    }
}

impl ReadyReceiver {
    /// Sends the result of mounting: notes for the user, or the failure. Afterwards the two
    /// processes are independent.
    pub fn tell(self, outcome: std::result::Result<&[String], &CommandFailure>) {
        let first = match self {
            ReadyReceiver::Parent(first) => first,
            ReadyReceiver::Foreground(manager) => {
                outcome.unwrap_or_default().iter().for_each(|note| log::warn!("{note}"));
                if let Some(manager) = manager.filter(|_| outcome.is_ok()) {
                    manager.tell("READY=1\n");
                }
                return;
            }
        };
        let said = match outcome {
            Ok(notes) => format!("0{}", [&first, notes].concat().join("\n")),
            Err(failure) => format!("{}{failure}", failure.code()),
        };
        let mut out = io::stdout();
        let _ = set_parent_process_death_signal(None);
        let written = out.write_all(said.as_bytes()).and_then(|()| out.flush());
        if written.is_err() && outcome.is_ok() {
            log::warn!("the process that waited has ended: so does this one");
            // In order, as after any SIGTERM.
            let _ = kill_process(getpid(), Signal::TERM);
        }
        let null = fs::OpenOptions::new().write(true).open("/dev/null");
        if let Err(error) = null.and_then(|null| Ok(rustix::stdio::dup2_stdout(null)?)) {
            log::warn!("the standard output stays open: {error}");
        }
    }
}
