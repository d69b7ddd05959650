//! `defuse check`.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use defuse_preload_plan::analysis::{self, ObjectFile};
use defuse_preload_plan::calls;

use crate::completions;
use crate::error::{CommandFailure, Result, print};
use crate::run::{find_program, is_loader_of_linux};

/// Show the system calls of a program that `defuse run` will intercept
///
/// Analyses the program and its libraries, and runs nothing. Exits with 0 if all calls that concern
/// files are intercepted, 1 otherwise.
#[derive(clap::Args, Clone, Debug)]
pub struct CheckArgs {
    /// The program: a path, or a name in PATH
    #[arg(add = completions::command())]
    pub program: OsString,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The result of the analysis.
#[derive(serde::Serialize)]
struct CheckFindings {
    program: PathBuf,
    /// A library can be loaded into the program.
    preloadable: bool,
    /// `--dispatch` serves the program, and then all its calls that concern files.
    dispatchable: bool,
    reasons: Vec<String>,
    objects: Vec<CheckedObject>,
}

#[derive(serde::Serialize)]
struct CheckedObject {
    path: PathBuf,
    /// Number of `syscall` instructions.
    calls: usize,
    /// Number of those that are replaced: they concern files, or their number is known only at run
    /// time.
    replaced: usize,
    /// Instructions that concern files and cannot be replaced, with their addresses.
    missed: Vec<String>,
    /// Number of those whose system call is only known at run time, and that are not replaced.
    unknown: usize,
}

/// Analyses a program, and prints the result.
pub fn run(args: &CheckArgs) -> Result {
    let shown = args.program.display();
    let path = find_program(&args.program).ok_or_else(|| {
        CommandFailure::Failed(format!("{shown}: there is no such program: write its path"))
    })?;
    let path = find_executed(&path)?;
    let findings = find(&path)?;
    let missed = findings.objects.iter().any(|object| !object.missed.is_empty());
    if args.json {
        let text = serde_json::to_string_pretty(&findings).map_err(CommandFailure::from_error)?;
        print(&format!("{text}\n"))?;
    } else {
        print(&text(&findings))?;
    }
    match findings.preloadable && !missed {
        true => Ok(()),
        false if findings.dispatchable => Err(CommandFailure::Failed(format!(
            "{shown}: not all of its files can be reached: run it by `defuse run --dispatch`, or \
             mount them by `defuse mount`"
        ))),
        false => Err(CommandFailure::Failed(format!(
            "{shown}: not all of its calls can be served: use `defuse mount`"
        ))),
    }
}

/// The file that is executed for a program: for a script, the interpreter.
pub fn find_executed(path: &Path) -> Result<PathBuf> {
    let failed = |error| CommandFailure::Failed(format!("{}: {error}", path.display()));
    let mut head = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    // The kernel reads as much.
    file.take(256).read_to_end(&mut head).map_err(failed)?;
    let Some(line) = head.strip_prefix(b"#!") else { return Ok(path.to_owned()) };
    let end = line.iter().position(|&byte| byte == b'\n').unwrap_or(line.len());
    let words: Vec<&[u8]> =
        line[..end].split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty()).collect();
    // env(1) executes its argument.
    let word = match words.as_slice() {
        [env, program, ..] if env.ends_with(b"/env") => program,
        [program, ..] => program,
        [] => return Ok(path.to_owned()),
    };
    Ok(find_program(OsStr::from_bytes(word)).unwrap_or(path.to_owned()))
}

/// The loader of a program, if it belongs to another C library than the preloaded library does.
fn foreign_loader(program: &ObjectFile) -> Option<&Path> {
    program.interpreter.as_deref().filter(|loader| !is_loader_of_linux(loader))
}

/// True if `defuse run --dispatch` serves a program with these [`obstacles`].
pub fn is_dispatchable(program: &ObjectFile, obstacles: &[String]) -> bool {
    let needs_it = program.is_static || foreign_loader(program).is_some();
    obstacles.is_empty() || needs_it && obstacles.len() == 1
}

/// The reasons why no library can be loaded into the program `path`; empty if one can.
pub fn obstacles(path: &Path, program: &ObjectFile) -> Vec<String> {
    let mut reasons = Vec::new();
    if program.is_static {
        reasons.push(
            "it is linked statically: no library can be loaded into it; `defuse run --dispatch` \
             serves it"
                .to_owned(),
        );
    }
    if let Some(loader) = foreign_loader(program) {
        reasons.push(format!(
            "its loader is {}, and the library is made for programs of the GNU C library; `defuse run \
             --dispatch` serves it",
            loader.display()
        ));
    }
    let mode = std::fs::metadata(path).map(|meta| meta.permissions().mode()).unwrap_or(0);
    if mode & 0o6000 != 0 && !rustix::process::geteuid().is_root() {
        reasons.push(
            "it is set-user-id or set-group-id: the loader ignores LD_PRELOAD, and --dispatch does \
             not change that"
                .to_owned(),
        );
    }
    reasons
}

fn find(path: &Path) -> Result<CheckFindings> {
    let program = ObjectFile::read_sites(path).map_err(CommandFailure::from_error)?;
    let reasons = obstacles(path, &program);
    let dispatchable = is_dispatchable(&program, &reasons);
    let mut next = vec![path.to_owned()];
    next.extend(analysis::find_library("libc.so.6", &[]).filter(|_| reasons.is_empty()));
    let (mut objects, mut seen) = (Vec::new(), Vec::new());
    while let Some(path) = next.pop() {
        if seen.contains(&path) {
            continue;
        }
        if let Ok(binary) = ObjectFile::read_sites(&path) {
            let find = |name: &String| analysis::find_library(name, &binary.run_path);
            next.extend(binary.needed.iter().filter_map(find));
            let is_loader = crate::run::is_loader(&path);
            if !binary.raw_calls.is_empty() && !is_loader {
                objects.push(object(&path, &binary));
            }
        }
        seen.push(path);
    }
    let preloadable = reasons.is_empty();
    Ok(CheckFindings { program: path.to_owned(), preloadable, dispatchable, reasons, objects })
}

fn object(path: &Path, binary: &ObjectFile) -> CheckedObject {
    let missed = binary.unreachable.iter().map(|&(address, number)| {
        format!("{} at {address:#x}", calls::name(number).unwrap_or("?"))
    });
    CheckedObject {
        path: path.to_owned(),
        calls: binary.raw_calls.len(),
        replaced: binary.count_replaced(),
        missed: missed.collect(),
        unknown: binary.raw_calls.iter().filter(|number| number.is_none()).count()
            - (binary.count_replaced() - binary.sites.len()),
    }
}

fn text(findings: &CheckFindings) -> String {
    let mut text = format!("{}\n", findings.program.display());
    for reason in &findings.reasons {
        text += &format!("  {reason}\n");
    }
    for object in &findings.objects {
        let CheckedObject { path, calls, replaced, missed, unknown } = object;
        let path = path.display();
        let how = if findings.preloadable { "are" } else { "could be" };
        if findings.dispatchable && !findings.preloadable {
            text += &format!(
                "  {path}: {calls} system calls: with --dispatch all are served, each by a signal\n"
            );
            continue;
        }
        text += &format!(
            "  {path}: {calls} system calls, {replaced} may concern files and {how} replaced, {unknown} \
             have a number that is not told\n"
        );
        if findings.dispatchable && unknown + missed.len() > 0 {
            text += "    with --dispatch all are served: those that are not replaced by a signal\n";
        }
        for call in missed {
            text += &format!("    not replaced: {call}\n");
        }
    }
    text
}
