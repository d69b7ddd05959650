//! The process that starts the servers, and this program among them.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::command::{self, find_own_program};
use defuse_measure::gluster::{GlusterServers, unavailable_reason};
use serde::{Deserialize, Serialize};

use super::GlusterStudyOptions;
use super::cases::VolumeKind;
use super::results::{GlusterResults, SCHEMA};
use crate::interrupt::InterruptFlag;
use crate::results::MachineFacts;

/// The order for the process among the servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InsideOrder {
    /// The options.
    pub options: GlusterStudyOptions,
    /// The results, without measurements.
    pub results: GlusterResults,
}

/// Interval at which an interrupt is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// Runs all measurements. `tell` receives lines of progress.
///
/// After a signal, the measurements of complete cases are the result.
///
/// # Errors
///
/// Fails if a requirement is missing, before creating anything; if no target can be measured.
pub fn run(options: &GlusterStudyOptions, tell: &mut dyn FnMut(&str)) -> Result<GlusterResults> {
    check_requirements(options)?;
    let interrupt = InterruptFlag::catch()?;
    let volumes: Vec<_> = options.choice.places.iter().filter_map(|place| place.volume()).collect();
    tell(&format!("{} measurements", count(options)));
    let servers = GlusterServers::with(&volumes)?;
    let order = InsideOrder { options: options.clone(), results: begin_results(options) };
    let mut inside = servers.command_within(&find_own_program()?);
    inside.arg("bench-gluster").arg(serde_json::to_string(&order)?);
    // Ctrl-C reaches this process alone, which ends the other one by the end of its input.
    inside.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
    let path = std::env::var("PATH").unwrap_or_default();
    inside.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let mut child = inside.spawn().context("nsenter of util-linux")?;
    let mut input = child.stdin.take();
    let mut output = child.stdout.take().context("a pipe")?;
    let (send, read) = channel();
    thread::spawn(move || {
        let mut text = String::new();
        let _ = send.send(output.read_to_string(&mut text).map(|_| text));
    });
    let text = loop {
        match read.recv_timeout(LOOK) {
            Ok(text) => break text?,
            Err(RecvTimeoutError::Timeout) if interrupt.is_set() => drop(input.take()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the measurement said nothing"),
        }
    };
    let status = child.wait()?;
    ensure!(status.success(), "the measurement among the servers ended with {status}");
    serde_json::from_str(&text).context("the results are invalid")
}

/// Checks the requirements before creating anything.
fn check_requirements(options: &GlusterStudyOptions) -> Result<()> {
    if let Some(reason) = unavailable_reason() {
        bail!(
            "{reason}: install the packages glusterfs-server and glusterfs-cli, and run it as root"
        );
    }
    ensure!(options.rounds > 0, "--rounds 0 measures nothing: write 1 or more");
    ensure!(!options.targets.is_empty(), "--targets names no target");
    let numbers = options.choice.jobs.iter().chain(&options.choice.depths);
    ensure!(numbers.clone().all(|&number| number > 0), "--jobs and --depths are 1 or more");
    ensure!(options.file_bytes >= 1 << 20, "--file-size is at least 1 MiB, the largest request");
    ensure!(count(options) > 0, "--only leaves no case: names are like randread-4k-sync-32");
    let needed = memory(options);
    let available = crate::direct::read_available_memory();
    ensure!(
        available.is_none_or(|available| available > needed),
        "{} MiB of memory are needed for bricks: use a smaller --file-size or fewer --jobs",
        needed >> 20
    );
    command::output("fio", &["--version"]).context("install the package fio")?;
    Ok(())
}

/// Number of measurements.
fn count(options: &GlusterStudyOptions) -> usize {
    let cases = options.choice.places.iter().map(|&place| options.choice.cases(place).len());
    cases.sum::<usize>() * options.targets.len() * options.rounds as usize
}

/// Memory for the files of all volumes, in bytes.
fn memory(options: &GlusterStudyOptions) -> u64 {
    let of = |place: &VolumeKind| {
        let jobs = options.choice.cases(*place).iter().map(|case| u64::from(case.jobs)).max();
        let copies = match place {
            VolumeKind::Dist | VolumeKind::Slow => 1,
            VolumeKind::Repl => 2,
            VolumeKind::Graph => 2 * options.targets.len() as u64,
        };
        copies * jobs.unwrap_or(0) * options.file_bytes
    };
    options.choice.places.iter().map(of).sum()
}

fn begin_results(options: &GlusterStudyOptions) -> GlusterResults {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    GlusterResults {
        schema: SCHEMA.into(),
        program: env!("CARGO_PKG_VERSION").into(),
        optimised: !cfg!(debug_assertions),
        glusterfs: version("/usr/sbin/glusterd"),
        fio: version("fio"),
        started_unix_ms: u64::try_from(now.as_millis()).unwrap_or(0),
        machine: MachineFacts::read_machine(),
        load: load.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0),
        rounds: options.rounds,
        time_ms: options.time_ms,
        file_bytes: options.file_bytes,
        files: options.files,
        targets: options.targets.iter().map(super::targets::GlusterTargetSpec::target).collect(),
        left_out: Vec::new(),
        interrupted: false,
        cells: Vec::new(),
    }
}

/// The first line that a program prints about its version.
fn version(program: &str) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.ok().and_then(|text| text.lines().next().map(str::to_owned)).unwrap_or_default()
}
