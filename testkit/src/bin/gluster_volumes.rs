//! Runs volumes of GlusterFS: `gluster_volumes up`, `gluster_volumes down`, or
//! `gluster_volumes run COMMAND...`. `cargo xtask gluster` starts it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use defuse_testkit::gluster::{GlusterServers, HOST, VOLUMES, unavailable_reason};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

/// A directory that only root can make and open.
const STATE: &str = "/run/defuse-gluster";

/// Time limit for `up` to end.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["up"] => run_volumes().map(|()| ExitCode::SUCCESS),
        ["down"] => end_volumes().map(|()| ExitCode::SUCCESS),
        ["run", program, arguments @ ..] => run(program, arguments),
        _ => {
            eprintln!("usage: gluster_volumes up|down|run COMMAND...");
            return ExitCode::from(2);
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("gluster: {error:#}");
        ExitCode::FAILURE
    })
}

/// Runs volumes until it is interrupted.
fn run_volumes() -> Result<()> {
    let mut file = state()?;
    ensure!(is_free(&file), "volumes are up already: `cargo xtask gluster down` ends them");
    let servers = start()?;
    file.set_len(0)?;
    file.rewind()?;
    write!(file, "{}", std::process::id())?;
    let inside = servers.network_prefix().join(" ");
    for volume in VOLUMES {
        println!("{inside} defuse mount gluster://{HOST}/{volume} DIRECTORY");
    }
    println!("Ctrl-C or `cargo xtask gluster down` ends the volumes.");
    servers.wait()
}

/// Ends the volumes of `up`.
fn end_volumes() -> Result<()> {
    let mut file = state()?;
    if is_free(&file) {
        println!("no volumes are up");
        return Ok(());
    }
    // The process is alive, because it holds the lock.
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    let pid = pid.context("the volumes are still starting: try again")?;
    kill_process(pid, Signal::TERM)?;
    let begun = Instant::now();
    while !is_free(&file) {
        ensure!(begun.elapsed() < PATIENCE, "process {text} does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Runs a program in the network of new volumes.
fn run(program: &str, arguments: &[&str]) -> Result<ExitCode> {
    let servers = start()?;
    // The program ends with this one, also after SIGKILL: there is nothing left to work on.
    let mut command = servers.command(Path::new("setpriv"));
    command.args(["--pdeathsig", "KILL", "--", program]);
    let status = command.args(arguments).status()?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn start() -> Result<GlusterServers> {
    match unavailable_reason() {
        Some(reason) => bail!("{reason}: `cargo xtask test packages` names the Debian packages"),
        None => GlusterServers::start(),
    }
}

/// Takes the lock that `up` holds as long as it lives.
fn is_free(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// The file with the process of `up`.
fn state() -> Result<File> {
    if let Err(error) = DirBuilder::new().mode(0o700).create(STATE)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(error).context(STATE);
    }
    let owner = std::fs::symlink_metadata(STATE)?;
    ensure!(owner.is_dir() && owner.uid() == 0, "{STATE} is not a directory of root: remove it");
    let path = Path::new(STATE).join("up");
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    opened.with_context(|| path.display().to_string())
}
