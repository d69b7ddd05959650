//! `defuse run`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use defuse_direct::LinkProtection;
use defuse_fuse::process;
use defuse_preload_plan::analysis::{self, ObjectFile};
use defuse_preload_plan::cache::AnalysisCache;
use defuse_preload_plan::reach::ExportedFunctions;
use defuse_preload_plan::{
    ForkPolicy, InheritedDescriptors, MountPlan, ObjectSites, ProgramPlan, VARIABLE, layout,
};
use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::pipe::PipeFlags;

use crate::check;
use crate::completions;
use crate::error::{CommandFailure, Result, show_warnings, warn};
use crate::inherited::OwnLimits;

mod attend;
pub mod library;
mod mounts;

/// Run a program on file systems in its own process
///
/// The program is not changed, and the kernel mounts nothing. A library is loaded into the program
/// and all programs that it starts, and serves the calls on files of the mounts.
#[derive(clap::Args, Clone, Debug)]
pub struct RunArgs {
    /// A mount: TARGET=TYPE:REST[,OPTION...], where TARGET is an absolute path or a name with a
    /// colon, such as /data=passthrough:/srv or mem:=memory:,size=1G; may be repeated
    #[arg(short, long, value_name = "MOUNT", add = completions::run_mounts())]
    pub mount: Vec<OsString>,
    /// The effect of a fork on file systems with state in the process
    #[arg(long, value_name = "POLICY", value_parser = policy, default_value = "auto")]
    pub fork: ForkPolicy,
    /// The working directory, which may be in a mount
    #[arg(short = 'C', long, value_name = "DIRECTORY")]
    pub directory: Option<OsString>,
    /// Also serve system calls that bypass the C library, and static programs (Linux 5.11). Each
    /// such call takes about two microseconds longer, and every other call about fifty nanoseconds
    #[arg(long)]
    pub dispatch: bool,
    /// The effect on remaining programs when the run ends or is killed: they continue, with errors
    /// from mounts that the run served, or are killed
    #[arg(long, value_name = "WHAT", value_enum, default_value = "error")]
    pub on_death: OnDeath,
    /// At the end, write to the standard error which calls were served, and which the kernel
    /// handled
    #[arg(long)]
    pub report: bool,
    /// Patch nothing, as with a C library that cannot be analysed. For tests
    #[arg(long, hide = true)]
    pub symbols_only: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    #[arg(add = completions::command())]
    pub command: Vec<OsString>,
}

/// The effect on programs that outlive the run.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDeath {
    /// They continue, and calls on mounts that the run served fail with `ENOTCONN`
    #[default]
    Error,
    /// They are killed
    End,
}

fn policy(text: &str) -> std::result::Result<ForkPolicy, String> {
    let names: Vec<_> = ForkPolicy::NAMES.iter().map(|(name, _)| *name).collect();
    ForkPolicy::from_name(text).ok_or_else(|| format!("known are {}", names.join(", ")))
}

/// Runs the program. Returns its exit code, or as shells do: 128 plus the signal that ended it, 127
/// for an unknown program, 126 for one that cannot be executed.
pub fn run(args: &RunArgs) -> Result<u8> {
    let program = &args.command[0];
    refuse(program, args.dispatch)?;
    let library = library::find()?;
    let mounts = args.mount.iter().map(|text| mounts::parse(text, args.fork));
    let mut mounts = mounts.collect::<Result<Vec<_>>>()?;
    mounts::refuse_twice(&mounts)?;
    let limits = OwnLimits::raise();
    if let Some(why) = OwnLimits::lacks_descriptors(mounts.len()) {
        return Err(CommandFailure::Failed(why));
    }
    show_warnings();
    let servers = mounts::serve(&mut mounts)?;
    if let Some(warning) = limits.warn_of_address_space().filter(|_| !servers.sockets.is_empty()) {
        warn(&warning);
    }
    let all = args.dispatch;
    let binaries = if args.symbols_only { Vec::new() } else { objects(&args.command[0]) };
    if !all {
        warn_of_left_calls(&binaries, &mounts);
    }
    let (objects, images) = images(&binaries, all);
    let paths: Vec<PathBuf> = binaries.into_iter().map(|binary| binary.path).collect();
    let plan = ProgramPlan {
        library: library.into_os_string().into_vec(),
        mounts,
        objects,
        protected: read_protection(),
        dispatch: args.dispatch,
        report: args.report,
        token: token()?,
    };
    let (memory, sealed) = (memory()?, seal_plan(&plan, &images)?);
    let mut command = if lies_in_a_mount(&plan, program, args.directory.as_deref())
        || args.dispatch && !is_dynamic(program)
    {
        // The kernel cannot find the program, or cannot load a library into it. So this program,
        // with the library, executes it.
        let mut own = Command::new(std::env::current_exe().map_err(CommandFailure::from_error)?);
        own.args(["inside", "--"]).args(&args.command);
        own
    } else {
        let mut command = Command::new(program);
        command.args(&args.command[1..]);
        command
    };
    let leash = (args.on_death == OnDeath::End).then(make_lifetime_pipe).transpose()?;
    let inherited = InheritedDescriptors {
        memory: memory.as_raw_fd(),
        plan: sealed.as_raw_fd(),
        sockets: servers.sockets.iter().map(AsRawFd::as_raw_fd).collect(),
        leash: leash.as_ref().map(|(inherited, _)| inherited.as_raw_fd()),
        state: None,
    };
    prepare(&mut command, &plan, &inherited, args.directory.as_deref());
    let status = match attend::run_to_end(command, &limits) {
        Ok(status) => status,
        Err(error) => return report_not_executed(program, &error),
    };
    let ended = servers.end();
    let is_served = has_begun(&memory);
    remove_nodes(&memory, plan.token);
    if args.report {
        report(&memory, &plan, &paths);
    }
    ended?;
    if !is_served && status.code().is_some_and(|code| code != BEGIN_FAILED) {
        return Err(CommandFailure::Failed(format!(
            "{}: the library was not loaded into it, so that it has used the files of the kernel in place of mounts: \
             use `defuse mount` for its files",
            program.display()
        )));
    }
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(u8::try_from(code.unwrap_or(1)).unwrap_or(u8::MAX))
}

/// The exit code of a program in which the library could not begin. The library has printed the
/// reason.
const BEGIN_FAILED: i32 = 125;

/// True if the library has begun in a program of the run.
fn has_begun(memory: &OwnedFd) -> bool {
    let mut taken = [0; 4];
    rustix::io::pread(memory, &mut taken, layout::HIGH_WATER as u64).is_ok() && taken != [0; 4]
}

/// Warns of system calls of the program and its libraries that cannot be replaced. Of files without
/// a build id the library warns.
fn warn_of_left_calls(binaries: &[ObjectFile], mounts: &[MountPlan]) {
    let targets = mounts.iter().map(|mount| String::from_utf8_lossy(&mount.target));
    let targets = targets.collect::<Vec<_>>().join(", ");
    for binary in binaries.iter().filter(|binary| binary.left > 0 && !binary.build_id.is_empty()) {
        warn(&format!(
            "{}: makes system calls without the C library that are not served: they see the files of the kernel in \
             place of {targets}. --dispatch serves them",
            binary.path.display()
        ));
    }
}

/// Reports that a program was not executed, and returns the exit code of a shell.
fn report_not_executed(program: &OsStr, error: &std::io::Error) -> Result<u8> {
    let Some((code, next)) = attend::explain_not_executed(error) else {
        return Err(CommandFailure::Failed(format!("{}: {error}", program.display())));
    };
    warn(&format!("{}: {error}: {next}", program.display()));
    Ok(code)
}

/// A pipe that closes with this process: the end that programs inherit, and the end that stays
/// here.
fn make_lifetime_pipe() -> Result<(OwnedFd, OwnedFd)> {
    let failed =
        |error| CommandFailure::Failed(format!("no pipe for the programs of the run: {error}"));
    let (inherited, held) = rustix::pipe::pipe_with(PipeFlags::empty()).map_err(failed)?;
    rustix::io::fcntl_setfd(&held, rustix::io::FdFlags::CLOEXEC).map_err(failed)?;
    // Programs open it again, also as other users. No other process may write to it.
    rustix::fs::fchmod(&inherited, Mode::from_raw_mode(0o644)).map_err(failed)?;
    Ok((inherited, held))
}

fn read_protection() -> [u8; 3] {
    let now = LinkProtection::read();
    [now.symlinks.into(), now.hardlinks.into(), now.regular]
}

/// Refuses a program that cannot be served: it would use other files than it names.
fn refuse(program: &OsStr, dispatch: bool) -> Result {
    let shown = program.display();
    if program.as_bytes().starts_with(b"-") {
        return Err(CommandFailure::Usage(format!(
            "{shown} is no option of defuse run: see `defuse run --help`; for a program of this name, write \
             ./{shown}"
        )));
    }
    let Some(path) = find_program(program).filter(|path| path.is_file()) else { return Ok(()) };
    let path = check::find_executed(&path)?;
    let Ok(binary) = ObjectFile::read_outline(&path) else { return refuse_foreign(shown, &path) };
    let obstacles = check::obstacles(&path, &binary);
    if dispatch && check::is_dispatchable(&binary, &obstacles) {
        return Ok(());
    }
    match obstacles.into_iter().next() {
        None => Ok(()),
        Some(why) => {
            Err(CommandFailure::Failed(format!("{shown}: {why}: use `defuse mount` for its files")))
        }
    }
}

/// Refuses an ELF file that is none for this machine. The kernel can execute it: one of 32 bits,
/// and with binfmt_misc any other.
fn refuse_foreign(shown: std::ffi::os_str::Display<'_>, path: &Path) -> Result {
    let mut head = [0; 7];
    let is_read = File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok();
    // Class, order of bytes and version: the kernel refuses others.
    if !is_read || !matches!(head, [0x7f, b'E', b'L', b'F', 1 | 2, 1 | 2, 1]) {
        return Ok(());
    }
    Err(CommandFailure::Failed(format!(
        "{shown}: a program of 32 bits or of another machine, into which the library cannot be loaded: use `defuse \
         mount` for its files"
    )))
}

/// The C library of this machine, the program, and its other libraries: they can have `syscall`
/// instructions, too.
fn objects(program: &OsStr) -> Vec<ObjectFile> {
    let cache = AnalysisCache::open_for_user();
    let mut objects = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut next: Vec<PathBuf> = find_program(program).into_iter().collect();
    next.extend(analysis::find_library("libc.so.6", &[]));
    while let Some(path) = next.pop() {
        if seen.contains(&path) || seen.len() > MOST_LIBRARIES {
            continue;
        }
        // A file that is no ELF file, such as a script, has no sites.
        if let Ok(binary) = ObjectFile::read_for_run(&path, cache.as_ref()) {
            let find = |name: &String| analysis::find_library(name, &binary.run_path);
            next.extend(binary.needed.iter().filter_map(find));
            if !is_loader(&path) {
                objects.push(binary);
            }
        }
        seen.push(path);
    }
    objects
}

/// The sites of these files for the plan, and their images, which follow each other in memory. With
/// `all`, system calls that do not concern files are patched, too.
fn images(binaries: &[ObjectFile], all: bool) -> (Vec<ObjectSites>, Vec<Vec<u8>>) {
    let (mut images, mut place) = (Vec::new(), 0);
    let objects = binaries.iter().map(|binary| {
        let image = binary.image(all, place);
        let image = image.map(|(image, bytes)| {
            place += bytes.len() as u64;
            images.push(bytes);
            image
        });
        ObjectSites { image, ..binary.to_sites(all) }
    });
    (objects.collect(), images)
}

/// Maximum number of libraries of a program. Real programs have fewer.
const MOST_LIBRARIES: usize = 512;

/// True for the dynamic loader. It runs before the preloaded library, and must not be patched while
/// it runs.
pub fn is_loader(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-"))
}

/// The file that the kernel would execute for the name of a program.
pub fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return fs::canonicalize(program).ok();
    }
    let path = std::env::var_os("PATH")?;
    let files = std::env::split_paths(&path).map(|folder| folder.join(program));
    files.filter_map(|file| fs::canonicalize(file).ok()).find(|file| file.is_file())
}

/// True if the loader will load the library into the program, and the program needs other
/// libraries, too: one that needs none has no use for the C library, and sets FS for itself. For a
/// script, this is assumed of the interpreter.
fn is_dynamic(program: &OsStr) -> bool {
    let binary = find_program(program).map(|path| ObjectFile::read_outline(&path));
    let takes_it = |binary: ObjectFile| {
        let has_libraries = !binary.needed.is_empty();
        has_libraries && binary.interpreter.is_some_and(|loader| is_loader_of_linux(&loader))
    };
    binary.is_none_or(|binary| binary.is_ok_and(takes_it))
}

/// True for the loader of the C library with which the preloaded library was built.
pub fn is_loader_of_linux(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-linux"))
}

/// The memory that all processes of the run share. It is sealed against shrinking, which would kill
/// the processes that access it.
fn memory() -> Result<OwnedFd> {
    let memory = sealable("defuse-run")?;
    // Pages that are never written take no memory.
    rustix::fs::ftruncate(&memory, layout::LEN as u64).map_err(memory_error)?;
    rustix::io::pwrite(&memory, &layout::VERSION.to_le_bytes(), 0).map_err(memory_error)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals).map_err(memory_error)?;
    Ok(memory)
}

/// The plan and the images, sealed against changes, also by a program of the run that has become
/// another user.
fn seal_plan(plan: &ProgramPlan, images: &[Vec<u8>]) -> Result<OwnedFd> {
    let mut file = File::from(sealable("defuse-plan")?);
    let plan = plan.encode();
    let mut head = layout::with_head(&plan);
    head.resize(layout::images_at(plan.len()), 0);
    let mut all = [head.as_slice()].into_iter().chain(images.iter().map(Vec::as_slice));
    let written = all.try_for_each(|bytes| file.write_all(bytes));
    written.map_err(|error| CommandFailure::Failed(format!("no shared memory: {error}")))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(memory_error)?;
    Ok(file.into())
}

/// A memfd that the programs of the run inherit.
fn sealable(name: &str) -> Result<OwnedFd> {
    rustix::fs::memfd_create(name, MemfdFlags::ALLOW_SEALING).map_err(memory_error)
}

fn memory_error(error: rustix::io::Errno) -> CommandFailure {
    CommandFailure::Failed(format!("no shared memory: {error}"))
}

/// A random number that identifies the run, and cannot be guessed.
fn token() -> Result<u128> {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| CommandFailure::Failed(format!("/dev/urandom: {error}")))?;
    Ok(u128::from_ne_bytes(bytes))
}

/// Removes the nodes that processes of the run left behind; as root, also the nodes of other users.
fn remove_nodes(memory: &OwnedFd, token: u128) {
    let mut noted = [0; 4];
    let noted_at = layout::NODES as u64;
    if rustix::io::pread(memory, &mut noted, noted_at).is_ok() && noted == [0; 4] {
        return;
    }
    let prefix = layout::node_prefix(token);
    let Ok(entries) = fs::read_dir(layout::NODES_IN) else { return };
    for entry in entries.flatten() {
        if entry.file_name().as_bytes().starts_with(prefix.as_bytes()) {
            // This follows no links. Nodes of other users stay.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn prepare(
    command: &mut Command,
    plan: &ProgramPlan,
    inherited: &InheritedDescriptors,
    directory: Option<&OsStr>,
) {
    let mut preload = OsString::from_vec(plan.library.clone());
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload).env(VARIABLE, inherited.to_string());
    if let Some(directory) = directory {
        command.env(defuse_preload_plan::DIRECTORY, directory);
    }
}

/// True if the path of a program may lead into a mount.
fn lies_in_a_mount(plan: &ProgramPlan, program: &OsStr, directory: Option<&OsStr>) -> bool {
    let is_below = |path: &Path, target: &[u8]| path.starts_with(OsStr::from_bytes(target));
    let within = |path: &OsStr| {
        let text = path.as_bytes();
        plan.mounts.iter().any(|mount| {
            let named = mount.target.ends_with(b":") && text.starts_with(&mount.target);
            named || is_below(Path::new(path), &mount.target)
        })
    };
    let relative = program.as_bytes().contains(&b'/') && !program.as_bytes().starts_with(b"/");
    within(program) || relative && directory.is_some_and(within)
}

/// Run a program within a run, as `defuse run` does for a program in a mount
#[derive(clap::Args, Clone, Debug)]
pub struct RunInsideArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// Executes the program. Returns only on failure.
pub fn run_inside(args: &RunInsideArgs) -> Result<u8> {
    let program = &args.command[0];
    process::keep_closed();
    let error = Command::new(program).args(&args.command[1..]).exec();
    report_not_executed(program, &error)
}

/// Writes the counts by system call, and by calling function.
fn report(memory: &OwnedFd, plan: &ProgramPlan, paths: &[PathBuf]) {
    let mut bytes = vec![0; layout::STATES];
    let Ok(file) = memory.try_clone().map(File::from) else { return };
    if file.read_exact_at(&mut bytes, 0).is_err() {
        return;
    }
    let calls = defuse_preload_plan::calls::CALLS;
    let calls = calls
        .iter()
        .map(|&(number, name)| (name.to_owned(), layout::read_counts(&bytes, usize::from(number))));
    let functions = count_by_function(&bytes, plan, paths);
    let text = table("call", calls) + "\n" + &table("function", functions.into_iter());
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The counts of all sites by the exported function that contains them, or else by library.
fn count_by_function(
    bytes: &[u8],
    plan: &ProgramPlan,
    paths: &[PathBuf],
) -> BTreeMap<String, layout::CallCounts> {
    let mut all = BTreeMap::<String, layout::CallCounts>::new();
    let mut site = 0;
    for (path, object) in paths.iter().zip(&plan.objects) {
        let exports = ExportedFunctions::read_file(path).unwrap_or_default();
        let file = path.file_name().unwrap_or(path.as_os_str()).display().to_string();
        for place in &object.sites {
            let name =
                exports.name(place.address).map_or_else(|| format!("({file})"), str::to_owned);
            *all.entry(name).or_default() += layout::site_counts(bytes, site);
            site += 1;
        }
    }
    all
}

fn table(head: &str, rows: impl Iterator<Item = (String, layout::CallCounts)>) -> String {
    let mut text = format!("{head:<20} {:>12} {:>12} {:>8}\n", "served", "passed", "missed");
    for (name, counts) in rows.filter(|(_, counts)| *counts != layout::CallCounts::default()) {
        let layout::CallCounts { served, passed, missed } = counts;
        text += &format!("{name:<20} {served:>12} {passed:>12} {missed:>8}\n");
    }
    text
}
