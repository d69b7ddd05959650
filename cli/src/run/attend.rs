//! Waiting for a program: signals are forwarded to it, and its exit status is returned.

use std::io;
use std::process::{Child, Command, ExitStatus};

use defuse_command::limits;
use defuse_fuse::process;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;

use crate::inherited::OwnLimits;

/// Signals that are forwarded to the program.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// `si_code` of signals that the kernel sends, sigaction(2). Signals of a terminal go to the whole
/// foreground process group, so the program receives them, too.
const SI_KERNEL: i32 = 0x80;

/// Runs a program to its end, under the limits that this process was given. Forwards signals that
/// another process sends.
pub fn run_to_end(mut command: Command, limits: &OwnLimits) -> io::Result<ExitStatus> {
    // Signals that are ignored, as by nohup(1), stay ignored in the program.
    let ignored = limits::ignored_signals();
    let heard = FORWARDED.into_iter().filter(|signal| ignored & 1 << (signal - 1) == 0);
    let mut signals = SignalsInfo::<WithRawSiginfo>::new(heard)?;
    limits.give(&mut command);
    process::keep_closed();
    let mut child = command.spawn()?;
    // The program has the mask of the starter. A blocked SIGCHLD would never announce its end.
    process::unblock_signals();
    // A SIGCHLD before the start is not from the program.
    signals.add_signal(SIGCHLD)?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        for signal in signals.wait() {
            if signal.si_signo != SIGCHLD && signal.si_code != SI_KERNEL {
                forward(&child, signal.si_signo);
            }
        }
    }
}

fn forward(child: &Child, signal: i32) {
    let Some(signal) = Signal::from_named_raw(signal) else { return };
    // Only this thread waits for the program, so the number is still its own, even if it has ended.
    let _ = kill_process(Pid::from_child(child), signal);
}

/// The exit code of a shell for a program that could not be executed, and the next step: 127 for a
/// missing file, 126 for one that cannot be executed. `None` for other errors of the system.
pub fn explain_not_executed(error: &io::Error) -> Option<(u8, &'static str)> {
    use io::ErrorKind::{NotFound, OutOfMemory, WouldBlock};
    match error.kind() {
        NotFound => Some((127, "is it installed, and in PATH?")),
        WouldBlock | OutOfMemory => None,
        _ => Some((126, "is it a program, and executable?")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_executed_has_the_exit_code_of_a_shell() {
        let code = |errno| {
            explain_not_executed(&io::Error::from_raw_os_error(errno)).map(|(code, _)| code)
        };
        let [enoent, eacces, enoexec, eagain] = [2, 13, 8, 11].map(code);
        assert_eq!([enoent, eacces, enoexec, eagain], [Some(127), Some(126), Some(126), None]);
    }
}
