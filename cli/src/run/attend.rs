//! A program while it runs: signals that reach the run reach the program, and its end is told.

use std::io;
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;

/// What a program is sent in place of the run.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// `si_code` of signals that the kernel sends, sigaction(2): those of a terminal reach all processes of
/// its foreground group, hence also the program.
const SI_KERNEL: i32 = 0x80;

/// Runs a program to its end. A signal that somebody sends to this process goes on to the program.
pub fn to_the_end(mut command: Command) -> io::Result<ExitStatus> {
    // What was ignored, as by nohup(1), stays ignored in the program, which inherits that.
    let ignored = ignored();
    let heard = FORWARDED.into_iter().filter(|signal| ignored & 1 << (signal - 1) == 0);
    let mut signals = SignalsInfo::<WithRawSiginfo>::new(heard)?;
    let mut child = command.spawn()?;
    // Before the program is there, its end is no news.
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
    // Nobody else waits for it, so that the number is still its own. It may have ended: then it is told
    // next.
    let _ = kill_process(Pid::from_child(child), signal);
}

/// The signals that this process ignores, a bit for each (proc_pid_status(5)); none where that cannot
/// be told.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    field.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// The exit code of a shell for a program that could not be executed: 127 where it is not there, 126
/// where it is no program or may not be executed; and what to do. `None` where the system is to blame.
pub fn not_executed(error: &io::Error) -> Option<(u8, &'static str)> {
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
        let code = |errno| not_executed(&io::Error::from_raw_os_error(errno)).map(|(code, _)| code);
        let [enoent, eacces, enoexec, eagain] = [2, 13, 8, 11].map(code);
        assert_eq!([enoent, eacces, enoexec, eagain], [Some(127), Some(126), Some(126), None]);
    }
}
