//! The files of a package, in a directory with their paths and modes.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command;
use crate::install::{self, InstallTarget};
use crate::library::{LibraryInstall, VERSION};

/// The files of a build from which packages are made.
pub struct BuiltFiles {
    pub program: PathBuf,
    pub study: PathBuf,
    /// The library for programs of a run. Its bytes are those that the program carries: another one
    /// would not be loaded.
    pub preload: PathBuf,
    /// libdefuse.a.
    pub library: PathBuf,
    /// The module for Python.
    pub module: PathBuf,
    /// Programs that print the manual pages and completions: those of the build, unless tests have
    /// smaller ones.
    pub printers: [PathBuf; 2],
    /// The C compiler, which links libdefuse.so.
    pub compiler: PathBuf,
}

impl BuiltFiles {
    /// The files of cargo's directory of a profile.
    pub fn from_dir(dir: &Path, compiler: PathBuf) -> BuiltFiles {
        let (program, study) = (dir.join("defuse"), dir.join("defuse-study"));
        BuiltFiles {
            printers: [program.clone(), study.clone()],
            preload: dir.join("deps/libdefuse_preload.so"),
            library: dir.join("libdefuse.a"),
            module: dir.join("libdefuse_python.so"),
            program,
            study,
            compiler,
        }
    }
}

impl BuiltFiles {
    /// Checks that the files are of one build: the program would load no other library than the one
    /// that it carries.
    pub fn check(&self) -> Result<()> {
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        let (program, library) = (read(&self.program)?, read(&self.preload)?);
        // The first page has the build id.
        let page = &library[..library.len().min(4096)];
        let carries = program.windows(page.len()).any(|part| part == page);
        ensure!(
            carries,
            "{} is not the library that {} carries: build both at once",
            self.preload.display(),
            self.program.display()
        );
        Ok(())
    }
}

/// A part of the project that is a package of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackagePart {
    Program,
    Study,
    Library,
    Development,
    Python,
}

impl PackagePart {
    /// The parts that all kinds of packages have.
    pub const ALL: [PackagePart; 4] =
        [PackagePart::Program, PackagePart::Study, PackagePart::Library, PackagePart::Development];

    /// The parts of Debian, whose directory for modules is that of all its versions of Python 3.
    pub const OF_DEBIAN: [PackagePart; 5] = [
        PackagePart::Program,
        PackagePart::Study,
        PackagePart::Library,
        PackagePart::Development,
        PackagePart::Python,
    ];

    /// The summary, and the description.
    pub fn description(self) -> (&'static str, &'static str) {
        match self {
            PackagePart::Program => (
                "user-space file systems without the cost of FUSE",
                "Programs reach a file system by a kernel mount, without FUSE within their own process, over a socket or \
                 through shared memory. File systems are a directory, memory, an image or a device, a GlusterFS volume \
                 and any FUSE program.",
            ),
            PackagePart::Study => (
                "measurements of the cost of user-space file systems",
                "The commands study, advise, bench and workload of defuse: they measure file systems and FUSE mounts, also \
                 of other programs.",
            ),
            PackagePart::Library => (
                "user-space file systems in the application's own process",
                "The shared library by which programs in C use the file systems of defuse without a mount.",
            ),
            PackagePart::Development => (
                "user-space file systems in the application's own process (development)",
                "The header, the static library, the description for pkg-config and the manual pages of libdefuse.",
            ),
            PackagePart::Python => (
                "user-space file systems in the process of a Python program",
                "The module defuse_fs: files and the functions of os on the file systems of defuse without a mount, \
                 defuse:// for fsspec, and file systems that are written in Python.",
            ),
        }
    }
}

/// The paths of a kind of packages.
#[derive(Clone, Copy, Debug)]
pub struct PackageLayout {
    /// The directory below which programs will find their files.
    pub prefix: &'static str,
    /// The directory of libraries, below the prefix.
    pub libdir: &'static str,
    /// The mode of shared libraries. Debian wants them not executable, and rpm finds the needs of
    /// executable files only.
    pub library_mode: u32,
    /// Manual pages are compressed.
    pub compressed: bool,
    /// The directory of documents of a package, below share/doc; its name by default.
    pub doc: Option<&'static str>,
}

/// Puts the files of `part` into the directory `base`, which stands for the prefix. `name` is the
/// package's.
pub fn fill(
    base: &Path,
    part: PackagePart,
    name: &str,
    built: &BuiltFiles,
    layout: &PackageLayout,
) -> Result<()> {
    let at = InstallTarget::for_package(base);
    let doc = format!("share/doc/{}", layout.doc.unwrap_or(name));
    let library = LibraryInstall {
        prefix: Path::new(layout.prefix),
        libdir: layout.libdir,
        compiler: built.compiler.as_os_str(),
    };
    match part {
        PackagePart::Program => program(base, built, (&at, layout.library_mode), &doc)?,
        PackagePart::Study => {
            strip(&built.study, &base.join("bin/defuse-study"), &["--strip-unneeded"], 0o755)?;
            install::manual(&built.printers[1], "study-man", &at)?;
        }
        PackagePart::Library => {
            let linked = base.join("libdefuse.so.linked");
            fs::create_dir_all(base)?;
            let unstripped = base.join("libdefuse.so.unstripped");
            library.link(&built.library, &unstripped)?;
            strip(&unstripped, &linked, &["--strip-unneeded"], 0o755)?;
            library.install_shared(&linked, layout.library_mode, &at)?;
            [linked, unstripped].iter().try_for_each(fs::remove_file)?;
        }
        PackagePart::Development => {
            let stripped = base.join("libdefuse.a.stripped");
            strip(
                &built.library,
                &stripped,
                &["--strip-debug", "--enable-deterministic-archives"],
                0o644,
            )?;
            library.development(&stripped, &at)?;
            fs::remove_file(stripped)?;
        }
        PackagePart::Python => module(&base.join("lib/python3/dist-packages"), &built.module)?,
    }
    if layout.compressed {
        compress(&base.join("share/man"))?;
    }
    Ok(())
}

/// Puts the package for Python into a directory of modules, with the description by which programs
/// find its entry points.
fn module(to: &Path, module: &Path) -> Result<()> {
    let (at, python) = (InstallTarget::for_package(to), command::root().join("python"));
    strip(module, &to.join("defuse_fs/_core.abi3.so"), &["--strip-unneeded"], 0o644)?;
    for file in files_in(&python.join("defuse_fs"))? {
        if file.extension().is_some_and(|end| end == "py") {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            at.copy(&file, &format!("defuse_fs/{name}"), 0o644)?;
        }
    }
    let about = format!("defuse_fs-{VERSION}.dist-info");
    let metadata = format!("Metadata-Version: 2.1\nName: defuse-fs\nVersion: {VERSION}\n");
    at.write(&format!("{about}/METADATA"), metadata.as_bytes(), 0o644)?;
    let project = fs::read_to_string(python.join("pyproject.toml"))?;
    let points = entry_points(&project).context("pyproject.toml has no entry points")?;
    at.write(&format!("{about}/entry_points.txt"), points.as_bytes(), 0o644)
}

/// The file entry_points.txt that a wheel has for a pyproject.toml with one group of entry points.
fn entry_points(project: &str) -> Option<String> {
    let (_, rest) = project.split_once("[project.entry-points.")?;
    let (group, rest) = rest.split_once("]\n")?;
    let points = rest.lines().take_while(|line| !line.is_empty());
    let points: String = points.map(|line| line.replace('"', "") + "\n").collect();
    Some(format!("[{}]\n{points}", group.trim_matches('"')))
}

fn program(
    base: &Path,
    built: &BuiltFiles,
    (at, library_mode): (&InstallTarget, u32),
    doc: &str,
) -> Result<()> {
    strip(&built.program, &base.join("bin/defuse"), &["--strip-unneeded"], 0o755)?;
    at.copy(&built.preload, "lib/defuse/libdefuse_preload.so", library_mode)?;
    install::links(at, "../bin/defuse")?;
    install::manual(&built.printers[0], "man", at)?;
    install::completions(&built.printers[0], at)?;
    let root = command::root();
    for unit in units()? {
        let file = unit.file_name().unwrap_or_default().to_string_lossy().into_owned();
        at.copy(&unit, &format!("lib/systemd/system/{file}"), 0o644)?;
    }
    for document in files_in(&root.join("docs"))? {
        let file = document.file_name().unwrap_or_default().to_string_lossy().into_owned();
        at.copy(&document, &format!("{doc}/docs/{file}"), 0o644)?;
    }
    for document in ["README.md", "SECURITY.md", "CHANGELOG.md"] {
        at.copy(&root.join(document), &format!("{doc}/{document}"), 0o644)?;
    }
    Ok(())
}

/// The units of systemd.
pub fn units() -> Result<Vec<PathBuf>> {
    files_in(&command::root().join("cli/systemd"))
}

/// The files of a directory, sorted.
fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        let mut files: Vec<PathBuf> =
            fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        files.sort();
        Ok(files)
    };
    read().with_context(|| dir.display().to_string())
}

/// Copies an object file without its symbols for debuggers.
fn strip(from: &Path, to: &Path, options: &[&str], mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(to))?;
    command::run(Command::new("strip").args(options).arg("-o").arg(to).arg(from))?;
    Ok(fs::set_permissions(to, Permissions::from_mode(mode))?)
}

/// Compresses every file below `dir`, and follows no link.
fn compress(dir: &Path) -> Result<()> {
    if !dir.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => compress(&entry.path())?,
            false => gzip(&entry.path())?,
        }
    }
    Ok(())
}

/// Compresses a file without its name and time. The result has `.gz` in its name.
pub fn gzip(file: &Path) -> Result<()> {
    command::run(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(file))
}

/// All files and links below `dir`, as paths relative to it, sorted.
pub fn paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    collect(dir, dir, &mut found)?;
    found.sort();
    Ok(found)
}

fn collect(dir: &Path, base: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    // The mode of directories would be that of the packager's umask(2).
    fs::set_permissions(dir, Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => collect(&entry.path(), base, found)?,
            false => found.push(entry.path().strip_prefix(base)?.to_owned()),
        }
    }
    Ok(())
}
