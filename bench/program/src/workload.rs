//! `defuse workload`.

mod direct;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{IsTerminal, stderr};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use defuse_wml::{
    LanguageDiagnostic, LoadOptions, ROWS, RowDevice, RunObserver, RunReport, RunSettings,
    WorkloadPlan, WorkloadRow,
};
use indicatif::{ProgressBar, ProgressStyle};

use defuse_command::{CommandFailure, Result, print, warn};

/// Run and measure a workload in the language of Filebench
#[derive(clap::Args)]
#[command(after_long_help = AFTER)]
pub struct WorkloadArgs {
    /// A workload file, or the name of a built-in workload or row
    #[arg(required_unless_present = "list")]
    workload: Option<String>,
    /// List the built-in workloads
    #[arg(long)]
    list: bool,
    /// The directory for the files: the variable $dir
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Use a file system in this process, such as memory: or passthrough:/srv,OPTION=VALUE, without
    /// the kernel
    #[arg(long, value_name = "SOURCE")]
    direct: Option<OsString>,
    /// Override a variable that the file sets
    #[arg(short = 'D', value_name = "VAR=VALUE")]
    define: Vec<String>,
    /// Factor for data, files and amount of work
    #[arg(long, value_name = "FACTOR", default_value = "1")]
    scale: f64,
    /// Seed of all random choices
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// The device of a row of the table
    #[arg(long, value_name = "hdd|ssd", default_value = "ssd", value_parser = device)]
    device: RowDevice,
    /// Run a file without `run` for this many seconds; 0: until its threads end
    #[arg(long, value_name = "SECS")]
    run: Option<u32>,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
    /// Show no progress, no periods and no `echo`
    #[arg(long)]
    quiet: bool,
    /// Allow the file to run shell commands
    #[arg(long)]
    allow_system: bool,
    /// End a run after this many seconds
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    timeout: Option<Duration>,
}

const AFTER: &str = "Files are made below DIR, in a directory for each file set; one that is there \
already is replaced, unless something is in it that no workload has made. They stay after the run. \
Nothing is made or run when the file has a mistake.";

fn device(text: &str) -> std::result::Result<RowDevice, String> {
    match text {
        "hdd" => Ok(RowDevice::Hdd),
        "ssd" => Ok(RowDevice::Ssd),
        _ => Err("write hdd or ssd".into()),
    }
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let wanted = defuse_fs::source::seconds(text).filter(|time| !time.is_zero());
    wanted.ok_or_else(|| "write seconds, such as 60 or 0.5".into())
}

/// Runs a workload, or lists the built-in ones.
pub fn run(args: &WorkloadArgs) -> Result {
    let Some(name) = args.workload.as_ref().filter(|_| !args.list) else {
        return print(&list(args.json)?);
    };
    let plan = load(name, args)?;
    if !plan.runs() {
        warn(&format!("{name} has no `run`: nothing will be measured; --run SECS runs it"));
    }
    let show = ProgressDisplay::new(args);
    let settings = RunSettings { timeout: args.timeout, ..RunSettings::default() };
    let outcome = match &args.direct {
        Some(source) => {
            let direct = direct::open(source, &plan)?;
            defuse_wml::execute(&plan, &direct, settings, &show)
        }
        None => defuse_wml::execute(&plan, &defuse_wml::SystemCallDriver, settings, &show),
    };
    show.clear();
    let reports = outcome.map_err(|error| CommandFailure::Failed(format!("{name}: {error}")))?;
    if args.json {
        return print(
            &(serde_json::to_string(&reports).map_err(CommandFailure::from_error)? + "\n"),
        );
    }
    for report in &reports {
        let changes: String =
            report.scaling.changes.iter().map(|c| format!("scaled {c}\n")).collect();
        print(&format!("{changes}{report}"))?;
    }
    Ok(())
}

/// Reads a file, a built-in workload, or a row of the table.
fn load(name: &str, args: &WorkloadArgs) -> Result<WorkloadPlan> {
    let row = WorkloadRow::find_by_name(name).filter(|_| !std::path::Path::new(name).exists());
    let builtin = defuse_wml::builtin(row.map_or(name, |row| row.workload));
    let (text, file) = match builtin.filter(|_| !std::path::Path::new(name).exists()) {
        Some(builtin) => (builtin.text.to_owned(), format!("{name}.f")),
        None => (read(name)?, name.to_owned()),
    };
    let mut variables = row.map(|row| row.variables_on(args.device)).unwrap_or_default();
    variables.extend(args.define.iter().cloned());
    if let Some(dir) = &args.dir {
        variables.push(directory(dir)?);
    }
    let options = LoadOptions {
        variables,
        scale: args.scale,
        seed: args.seed,
        allow_system: args.allow_system,
        run_seconds: args.run.map(u64::from),
    };
    defuse_wml::load(&text, &file, &options)
        .map_err(|mistake: LanguageDiagnostic| CommandFailure::usage(mistake))
}

fn read(name: &str) -> Result<String> {
    std::fs::read_to_string(name).map_err(|error| {
        CommandFailure::Usage(format!(
            "{name}: {error}; name a file, or one of `defuse workload --list`"
        ))
    })
}

/// `dir="..."`, with all characters of the path quoted.
fn directory(dir: &std::path::Path) -> Result<String> {
    let dir = std::path::absolute(dir).map_err(CommandFailure::from_error)?;
    let Some(text) = dir.to_str() else {
        return Err(CommandFailure::Usage(format!("{}: a path that is not UTF-8", dir.display())));
    };
    let mut value = String::from("dir=\"");
    for c in text.chars() {
        if matches!(c, '"' | '$' | '\\') {
            value.push('\\');
        }
        value.push(c);
    }
    Ok(value + "\"")
}

fn list(json: bool) -> Result<String> {
    if json {
        let entry = |builtin: &defuse_wml::BuiltinWorkload| serde_json::json!({"name": builtin.name, "about": builtin.about});
        let row = |row: &WorkloadRow| {
            serde_json::json!({
                "number": row.number,
                "name": row.name,
                "workload": row.workload,
                "hdd": row.variables_on(RowDevice::Hdd),
                "ssd": row.variables_on(RowDevice::Ssd),
            })
        };
        let workloads: Vec<_> = defuse_wml::builtins().iter().map(entry).collect();
        let rows: Vec<_> = ROWS.iter().map(row).collect();
        let all = serde_json::json!({"workloads": workloads, "rows": rows});
        return Ok(all.to_string() + "\n");
    }
    let mut text = String::new();
    for builtin in defuse_wml::builtins() {
        let _ = writeln!(text, "{:22} {}", builtin.name, builtin.about);
    }
    let _ = writeln!(text, "\nRows of the table (FAST '17), also valid as names:");
    for row in ROWS {
        let variables = row.variables.join(" ");
        let _ = writeln!(text, "{:>2} {:22} {} {variables}", row.number, row.name, row.workload);
    }
    Ok(text)
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Shows progress on a terminal, and the periods of `psrun` on any output.
struct ProgressDisplay {
    quiet: bool,
    bar: Option<ProgressBar>,
    making: Mutex<String>,
}

impl ProgressDisplay {
    fn new(args: &WorkloadArgs) -> Self {
        let wanted = !args.quiet && stderr().is_terminal();
        ProgressDisplay {
            quiet: args.quiet || args.json,
            bar: wanted.then(ProgressBar::new_spinner),
            making: Mutex::new(String::new()),
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Writes a line, above the bar if there is one.
    fn line(&self, text: &str) {
        if self.quiet {
            return;
        }
        let write = || {
            // A closed output is reported when the result is printed.
            let _ = print(&format!("{text}\n"));
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl RunObserver for ProgressDisplay {
    fn report_files(&self, fileset: &str, done: u64, total: u64) {
        let Some(bar) = &self.bar else { return };
        let mut making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if *making != fileset {
            fileset.clone_into(&mut making);
            // The template is constant and valid.
            if let Ok(style) = ProgressStyle::with_template("{msg} [{wide_bar}] {percent}% {eta}") {
                bar.set_style(style);
            }
            bar.set_message(format!("making {fileset}"));
        }
        drop(making);
        bar.set_length(total);
        bar.set_position(done);
    }

    fn begin(&self, limit: Option<Duration>) {
        let Some(bar) = &self.bar else { return };
        let timed = ProgressStyle::with_template("{msg} [{wide_bar}] {percent}%");
        match (limit, timed) {
            (Some(limit), Ok(style)) => {
                bar.set_style(style);
                bar.set_length(milliseconds(limit));
            }
            // The duration is unknown, so a bar would be wrong.
            _ => {
                bar.set_style(ProgressStyle::default_spinner());
                bar.unset_length();
            }
        }
        bar.set_message("running");
        bar.set_position(0);
    }

    fn report_run(&self, seconds: f64, operations: u64) {
        let Some(bar) = &self.bar else { return };
        bar.set_message(format!("running for {seconds:.0} s: {operations} operations"));
        match bar.length() {
            Some(_) => bar.set_position((seconds * 1e3) as u64),
            None => bar.tick(),
        }
    }

    fn interval(&self, report: &RunReport) {
        self.line(&report.summary());
    }

    fn echo(&self, text: &str) {
        self.line(text);
    }
}
