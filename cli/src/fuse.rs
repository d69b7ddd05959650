//! `defuse fuse`: a program of libfuse with this project's libraries in the place of libfuse.
//!
//! The libraries are carried by this program, as the library for `defuse run` is. The loader finds
//! them first by LD_LIBRARY_PATH.

mod report;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use defuse_preload_plan::analysis::{ObjectFile, find_library};
use defuse_preload_plan::trusted_directory::find_trusted_file;
use defuse_remote::{inherited_mount_point, place_mount_point};

use crate::completions;
use crate::error::{CommandFailure, Result, warn};
use crate::run::library;

/// The libraries, by the names by which programs need them. They are empty in a build that cargo
/// has made elsewhere than in a checkout.
const CARRIED: [(&str, &[u8]); 2] = [
    ("libfuse.so.2", include_bytes!(env!("DEFUSE_BUILT_LIBFUSE2"))),
    ("libfuse3.so.3", include_bytes!(env!("DEFUSE_BUILT_LIBFUSE3"))),
];

/// The variable with the directory of the libraries.
const VARIABLE: &str = "DEFUSE_LIBFUSE_DIRECTORY";

/// The variable by which the libraries find the socket to serve.
const CONNECTION: &str = "DEFUSE_FUSE_CONNECTION";

/// Most libraries of a program that are looked at.
const LIBRARIES_MOST: usize = 1000;

/// Start a program written for libfuse, with libraries of this program in the place of libfuse
///
/// The program is not changed. It mounts as it does with libfuse 2 or 3, and its mount is served by
/// a session of this program.
#[derive(clap::Args, Clone, Debug)]
pub struct FuseCommandArgs {
    /// Let the program serve this socket, which it inherits, in the place of a mount: its
    /// descriptor and its inode
    #[arg(long, hide = true, value_name = "FD:INODE")]
    pub connection: Option<InheritedSocket>,
    /// Print the functions of libfuse that the program uses, and do not start it
    #[arg(long, conflicts_with = "connection")]
    pub report: bool,
    /// Print JSON
    #[arg(long, requires = "report")]
    pub json: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    #[arg(add = completions::command())]
    pub command: Vec<OsString>,
}

/// A socket that a program inherits (`fuse:COMMAND`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedSocket {
    fd: i32,
    inode: u64,
}

impl FromStr for InheritedSocket {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let parts = text.split_once(':');
        let numbers = parts.and_then(|(fd, inode)| Some((fd.parse().ok()?, inode.parse().ok()?)));
        numbers.map(|(fd, inode)| InheritedSocket { fd, inode }).ok_or("write FD:INODE")
    }
}

/// Starts the program in the place of this process. Returns only an error.
///
/// # Errors
///
/// Fails if the program is not there, or if it cannot use these libraries and is to mount.
pub fn run(args: &FuseCommandArgs) -> Result {
    let (program, words) = args.command.split_first().expect("clap requires one");
    let path = program_path(program).ok_or_else(|| {
        CommandFailure::Failed(format!(
            "{}: there is no such program: is it installed, and in PATH?",
            program.to_string_lossy()
        ))
    })?;
    if args.report {
        return report::print_functions(&path, args.json);
    }
    let mut command = Command::new(&path);
    command.arg0(program);
    match args.connection {
        Some(socket) => connect(&mut command, &path, words, socket)?,
        None => {
            let libraries = libraries_for(&path)?;
            if libraries.needed.is_empty() && libraries.is_program {
                warn(&format!(
                    "{} names no libfuse among its libraries: only what it loads later by its name is served",
                    path.display()
                ));
            }
            command.args(words).env("LD_LIBRARY_PATH", libraries.search);
        }
    }
    let error = command.exec();
    Err(CommandFailure::Failed(format!("cannot start {}: {error}", path.display())))
}

/// Lets a program serve `socket`. One that needs libfuse gets a mount point that is a directory,
/// because it may look at it, and our libraries find the socket by the variable. Any other gets the
/// descriptor as its mount point.
fn connect(
    command: &mut Command,
    path: &Path,
    words: &[OsString],
    socket: InheritedSocket,
) -> Result {
    let of_descriptor = place_mount_point(words, &inherited_mount_point(socket.fd));
    let libraries = match libraries_for(path) {
        Ok(libraries) => libraries,
        Err(refusal) => {
            log::info!("{refusal}; it gets the descriptor as its mount point");
            command.args(of_descriptor);
            return Ok(());
        }
    };
    let directory = match libraries.needed.is_empty() {
        true => None,
        false => library::find_empty_directory(&library::homes()),
    };
    let words = match directory {
        Some(directory) => place_mount_point(words, directory.as_os_str()),
        None => of_descriptor,
    };
    command.args(words).env("LD_LIBRARY_PATH", libraries.search);
    command.env(CONNECTION, format!("{}:{}", socket.fd, socket.inode));
    Ok(())
}

/// The libraries for a program.
struct LibrariesInFront {
    /// The path for the loader.
    search: OsString,
    /// The libraries of libfuse that the program needs.
    needed: BTreeSet<String>,
    /// False for a script.
    is_program: bool,
}

/// Returns the libraries for a program.
///
/// # Errors
///
/// Fails if the program cannot use them.
fn libraries_for(path: &Path) -> Result<LibrariesInFront> {
    let usage = check(path)?;
    let directory = directory()?;
    let mut search = directory.clone().into_os_string();
    if let Some(earlier) = std::env::var_os("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) {
        search.push(":");
        search.push(earlier);
    }
    let Some((interpreter, needed)) = usage else {
        return Ok(LibrariesInFront { search, needed: BTreeSet::new(), is_program: false });
    };
    if let Some(interpreter) = interpreter.filter(|_| !needed.is_empty())
        && let Some((name, other)) = found_elsewhere(&interpreter, path, &search, &directory)
    {
        return Err(CommandFailure::Failed(format!(
            "{}: the loader finds its {name} at {other}, by a path of the program (DT_RPATH) that comes before LD_LIBRARY_PATH: \
             remove the path (`patchelf --remove-rpath`) from a copy of the program",
            path.display()
        )));
    }
    Ok(LibrariesInFront { search, needed, is_program: true })
}

/// The file of a program: the path itself, or the first one of this name in PATH.
fn program_path(program: &OsStr) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let path = Path::new(program);
    if path.components().count() > 1 {
        return Some(path.to_path_buf()).filter(executable);
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(path)).find(executable)
}

/// The interpreter of a program, and the libraries of libfuse that it needs.
type LibraryUse = (Option<PathBuf>, BTreeSet<String>);

/// Refuses programs that these libraries cannot serve. Returns `None` for a script, whose
/// interpreter may load libfuse later.
fn check(path: &Path) -> Result<Option<LibraryUse>> {
    let refused =
        |reason: &str| Err(CommandFailure::Failed(format!("{}: {reason}", path.display())));
    if gains_rights(path) {
        return refused(
            "is set-user-id or set-group-id, or has capabilities, so that the loader ignores LD_LIBRARY_PATH: start it as its \
             owner, or as root",
        );
    }
    let Ok(file) = ObjectFile::read_outline(path) else { return Ok(None) };
    if file.is_static {
        return refused(
            "is linked statically, and loads no libfuse: `defuse mount fuse:COMMAND` serves it by its messages",
        );
    }
    let interpreter = file.interpreter.clone();
    let needed = libfuse_of(file);
    if needed.contains("libfuse3.so.4") {
        return refused("needs libfuse3.so.4; this program has libfuse.so.2 and libfuse3.so.3");
    }
    Ok(Some((interpreter, needed)))
}

/// A library of libfuse that the loader of this program finds outside of `directory`, as it lists
/// libraries, ld.so(8).
fn found_elsewhere(
    interpreter: &Path,
    program: &Path,
    search: &OsStr,
    directory: &Path,
) -> Option<(String, String)> {
    let mut loader = Command::new(interpreter);
    let listed = loader.arg("--list").arg(program).env("LD_LIBRARY_PATH", search).output().ok()?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    text.lines().filter_map(|line| line.trim().split_once(" => ")).find_map(|(name, place)| {
        let place = place.split(" (0x").next().unwrap_or(place);
        let is_carried = CARRIED.iter().any(|(carried, _)| *carried == name);
        let is_other =
            is_carried && place.starts_with('/') && !Path::new(place).starts_with(directory);
        is_other.then(|| (name.to_owned(), place.to_owned()))
    })
}

/// True if the program would have other rights than this process, so that the loader is in secure
/// mode (`AT_SECURE`, getauxval(3)).
fn gains_rights(path: &Path) -> bool {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let is_set_id = path.metadata().is_ok_and(|meta| {
        let sets_user = meta.mode() & 0o4000 != 0 && meta.uid() != user.as_raw();
        let sets_group = meta.mode() & 0o2010 == 0o2010 && meta.gid() != group.as_raw();
        sets_user || sets_group
    });
    let mut capabilities = [0; 64];
    let mut has_capabilities =
        || rustix::fs::getxattr(path, "security.capability", &mut capabilities).is_ok();
    is_set_id || !user.is_root() && has_capabilities()
}

/// The libraries of libfuse among those that a program needs, also through others.
fn libfuse_of(program: ObjectFile) -> BTreeSet<String> {
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    let mut next = vec![program];
    while let Some(file) = next.pop() {
        for name in file.needed {
            if name.starts_with("libfuse") {
                found.insert(name);
            } else if seen.len() < LIBRARIES_MOST && seen.insert(name.clone()) {
                let library = find_library(&name, &file.run_path);
                next.extend(library.and_then(|path| ObjectFile::read_outline(&path).ok()));
            }
        }
    }
    found
}

/// The directory with the libraries: the one in the variable, or one to which they are unpacked.
fn directory() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        let directory = PathBuf::from(named);
        if !library::can_be_named(&directory) {
            return Err(CommandFailure::Failed(format!(
                "{}: LD_LIBRARY_PATH can name no directory with a space, a colon or a dollar sign: correct {VARIABLE}",
                directory.display()
            )));
        }
        for (name, _) in CARRIED {
            if let Err(error) = find_trusted_file(&directory.join(name))
                && error.kind() == io::ErrorKind::PermissionDenied
            {
                return Err(CommandFailure::Failed(format!(
                    "{}: {VARIABLE} is not used, as {error}: unset it, or keep the libraries in a directory that only root and you can \
                     write to",
                    directory.display()
                )));
            }
        }
        let lacks = CARRIED.iter().find(|(name, _)| !directory.join(name).is_file());
        return match lacks {
            None => Ok(directory),
            Some((name, _)) => Err(CommandFailure::Failed(format!(
                "{}: {name} is not there: correct {VARIABLE}, or unset it",
                directory.display()
            ))),
        };
    }
    if CARRIED.iter().any(|(_, content)| content.is_empty()) {
        return Err(CommandFailure::Failed(format!(
            "the libraries for programs of libfuse are not in this program: build it from a checkout (`cargo xtask \
             install`), or set their directory in {VARIABLE}"
        )));
    }
    library::unpack(&library::homes(), &CARRIED)
}
