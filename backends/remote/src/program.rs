//! Unmodified FUSE programs, started with one end of a socket in place of an open /dev/fuse.
//!
//! The program `defuse` starts them: with its libraries in the place of libfuse, which serve the
//! socket (`defuse fuse`), or where that is not possible with the socket as mount point. libfuse 3
//! and go-fuse take a mount point of the form `/dev/fd/N` for a descriptor of an existing mount,
//! mount.fuse3(8), and speak the protocol on it without checking its type.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use defuse_fs::Errno;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

use super::RemoteError;
use crate::sys::errno;

/// The placeholder for the mount point. Without it, the mount point is appended.
const PLACE: &str = "{}";
/// The time for a program to end by itself, and then by a signal.
const PATIENCE: Duration = Duration::from_secs(5);

/// The program `defuse`, which starts FUSE programs.
static STARTER: OnceLock<PathBuf> = OnceLock::new();

/// Sets the file of the program `defuse`, which starts FUSE programs with its libraries. Without
/// one, it is searched in PATH; if it is not there, programs get `/dev/fd/N` as their mount point.
/// The first call counts.
pub fn set_starter(defuse: PathBuf) {
    let _ = STARTER.set(defuse);
}

fn find_starter() -> Option<PathBuf> {
    STARTER.get().cloned().or_else(|| find_in(&std::env::var_os("PATH")?))
}

/// The program `defuse` in these folders, as in `PATH`. The working directory is not searched.
fn find_in(folders: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(folders)
        .map(|folder| folder.join("defuse"))
        .find(|path| path.is_absolute() && path.is_file())
}

/// The reason why a program does not serve a file system.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The command line is empty.
    #[error("no program is named: write its command line, without a mount point")]
    Empty,
    /// No socket could be created.
    #[error("no socket for {program}: {errno}")]
    Socket {
        /// The program.
        program: String,
        /// The error.
        errno: Errno,
    },
    /// The program cannot be started.
    #[error("cannot start {program}: {error}; is it installed?")]
    Start {
        /// The program.
        program: String,
        /// The error.
        error: std::io::Error,
    },
    /// The program ended before it served.
    #[error(
        "{program} has ended ({status}) before it served a file system: see its output; a program without libfuse must accept /dev/fd/N as a mount point"
    )]
    Ended {
        /// The program.
        program: String,
        /// Its exit status.
        status: std::process::ExitStatus,
    },
    /// The program runs, but does not speak FUSE.
    #[error("{program}: {error}")]
    Remote {
        /// The program.
        program: String,
        /// The error.
        error: RemoteError,
    },
}

/// A running FUSE program. Dropping it ends the program and waits for it.
#[derive(Debug)]
pub struct FuseProgram {
    name: String,
    child: Child,
    socket: Option<OwnedFd>,
}

impl FuseProgram {
    /// Starts the program `words[0]` with its arguments. The word `{}` becomes the mount point;
    /// without one, `-f` (stay in the foreground) and the mount point are appended.
    pub fn start(words: &[OsString]) -> Result<FuseProgram, ProgramError> {
        FuseProgram::start_through(find_starter().as_deref(), words)
    }

    /// [`start`](Self::start), through the program `defuse` if there is one.
    fn start_through(
        starter: Option<&Path>,
        words: &[OsString],
    ) -> Result<FuseProgram, ProgramError> {
        let (program, args) = words.split_first().ok_or(ProgramError::Empty)?;
        let name = program.to_string_lossy().into_owned();
        let flags = SocketFlags::CLOEXEC;
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let failed = |error| ProgramError::Socket { program: name.clone(), errno: errno(error) };
        let (ours, theirs) = pair.map_err(failed)?;
        let mut command = match starter {
            Some(starter) => {
                let inode = rustix::fs::fstat(&theirs).map_err(failed)?.st_ino;
                let connection = format!("--connection={}:{inode}", theirs.as_raw_fd());
                let mut command = Command::new(starter);
                command.args(["fuse", &connection, "--"]).args(words);
                command
            }
            None => {
                let mut command = Command::new(program);
                command.args(place_mount_point(args, &inherited_mount_point(theirs.as_raw_fd())));
                command
            }
        };
        command.stdin(Stdio::null());
        // The standard output is not for the program: another process may read it.
        let said = std::io::stderr().as_fd().try_clone_to_owned();
        command.stdout(said.map_or_else(|_| Stdio::null(), Stdio::from));
        // SAFETY: between fork and exec this runs one system call, fcntl(2), which is
        // async-signal-safe, on a descriptor that the closure owns until the program is started.
        unsafe {
            command.pre_exec(move || Ok(rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?));
        }
        let child = command.spawn();
        // The closure owns the program's end. While that is open, the end of the program is not
        // noticed.
        drop(command);
        let child = child.map_err(|error| ProgramError::Start { program: name.clone(), error })?;
        Ok(FuseProgram { name, child, socket: Some(ours) })
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes this process's end of the socket. A further call returns a socket whose other end is
    /// closed.
    pub(super) fn take_socket(&mut self) -> OwnedFd {
        self.socket.take().unwrap_or_else(|| {
            let flags = SocketFlags::CLOEXEC;
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map(|(one, _)| one)
                .expect("a socket that was there once can be made again")
        })
    }

    /// The error for a program that did not answer INIT.
    pub(super) fn into_error(mut self, error: RemoteError) -> ProgramError {
        let program = self.name.clone();
        match self.wait(Duration::from_secs(1)) {
            Some(status) => ProgramError::Ended { program, status },
            None => ProgramError::Remote { program, error },
        }
    }

    fn wait(&mut self, patience: Duration) -> Option<std::process::ExitStatus> {
        let begun = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begun.elapsed() < patience => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                _ => return None,
            }
        }
    }
}

impl Drop for FuseProgram {
    fn drop(&mut self) {
        drop(self.socket.take());
        if self.wait(PATIENCE).is_some() {
            return;
        }
        log::warn!("{} does not end: sending SIGTERM", self.name);
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if self.wait(PATIENCE).is_none() {
            log::warn!("{} does not end: killing it", self.name);
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The mount point by which libfuse 3 and go-fuse know an open device.
pub fn inherited_mount_point(fd: RawFd) -> OsString {
    OsString::from(format!("/dev/fd/{fd}"))
}

/// The arguments of a program with its mount point: in the place of each `{}`, or at their end,
/// after `-f`.
pub fn place_mount_point(args: &[OsString], mountpoint: &OsStr) -> Vec<OsString> {
    if args.iter().any(|arg| arg == PLACE) {
        let place = |arg: &OsString| {
            if arg == PLACE { mountpoint.to_os_string() } else { arg.clone() }
        };
        return args.iter().map(place).collect();
    }
    let appended = [OsString::from("-f"), mountpoint.to_os_string()];
    args.iter().cloned().chain(appended).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn the_mount_point_replaces_the_placeholder_or_is_appended() {
        let of = |text| place_mount_point(&words(text), OsStr::new("/dev/fd/9"));
        assert_eq!(of("host:/dir -o x"), words("host:/dir -o x -f /dev/fd/9"));
        assert_eq!(of("-fg cipher {}"), words("-fg cipher /dev/fd/9"));
    }

    /// The descriptor and the inode are those of the socket that the program inherits.
    #[test]
    fn the_program_defuse_gets_the_socket_with_its_inode_and_the_whole_command() {
        let script = "test \"$1\" = fuse && test \"$3 $4 $5 $6\" = '-- program {} x' && \
            fd=${2#--connection=} && test \"$(stat -Lc %i /dev/fd/${fd%:*})\" = ${fd#*:} && exit 7";
        let path = std::env::temp_dir().join(format!("defuse-starter-{}", std::process::id()));
        // Not written by this process: a child that another test starts meanwhile would have it
        // open for writing (ETXTBSY).
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 700 \"$0\"";
        let mut shell = Command::new("sh");
        assert!(shell.args(["-c", write]).arg(&path).arg(script).status().unwrap().success());
        let program = FuseProgram::start_through(Some(&path), &words("program {} x"));
        let mut program = program.unwrap();
        let status = program.wait(PATIENCE);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(status.unwrap().code(), Some(7));
    }

    #[test]
    fn the_program_defuse_is_searched_in_absolute_folders() {
        let folder = std::env::temp_dir().join(format!("defuse-folder-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = OsString::from(format!(":.:/nonexistent:{}", folder.display()));
        assert_eq!(find_in(&path), None);
        std::fs::write(folder.join("defuse"), "").unwrap();
        assert_eq!(find_in(&path), Some(folder.join("defuse")));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_missing_program_and_one_that_does_not_serve_are_named() {
        assert!(matches!(FuseProgram::start(&[]), Err(ProgramError::Empty)));
        let start = |text| FuseProgram::start_through(None, &words(text));
        let missing = start("/nonexistent/program").unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/program") && missing.contains("installed"));
        let program = start("/bin/false").unwrap();
        let error =
            super::super::RemoteClient::start_program(program, Default::default()).err().unwrap();
        assert!(matches!(&error, ProgramError::Ended { .. }), "{error}");
    }
}
