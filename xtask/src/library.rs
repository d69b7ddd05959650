//! `cargo xtask library`: installs libdefuse for C programs, with header and manual pages.
//!
//! The shared library is linked here from the static library that cargo builds: rustc passes its
//! own version script to the linker, which does not accept a second one with named versions.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::command;
use crate::install::InstallTarget;

/// Build libdefuse for C and install it with header, pkg-config file and manual pages
#[derive(clap::Args)]
pub struct LibraryArgs {
    /// Directory for the installation, such as /usr/local [default: libdefuse in cargo's target
    /// directory]
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Build without optimization, which is faster
    #[arg(long)]
    debug: bool,
}

/// The name that programs are linked to. It changes when they would no longer run.
pub const SONAME: &str = "libdefuse.so.0";
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Libraries that the static library needs.
const NEEDED: [&str; 6] = ["-lgcc_s", "-lpthread", "-ldl", "-lrt", "-lm", "-lc"];

/// Builds and installs.
pub fn run(args: &LibraryArgs) -> Result<()> {
    let target = command::target_dir()?;
    let prefix = match &args.prefix {
        Some(prefix) => std::path::absolute(prefix)?,
        None => target.join("libdefuse"),
    };
    let mut cargo = command::cargo();
    let profile = if args.debug {
        // With the workspace and one of its tests, dependencies have the features that they have in
        // `cargo test --workspace`, so that its build is taken. The package alone would be built
        // anew with all below it.
        cargo.args(["build", "--workspace", "--lib", "--test", "header"]);
        "debug"
    } else {
        cargo.args(["build", "--package", "defuse-capi", "--lib", "--release"]);
        "release"
    };
    command::run(&mut cargo)?;
    let built = target.join(profile).join("libdefuse.a");
    let library = LibraryInstall { prefix: &prefix, libdir: "lib", compiler: &compiler() };
    library.install(&built, &InstallTarget::new(&prefix, None))?;
    println!("installed libdefuse {VERSION} to {}", prefix.display());
    println!(
        "a program is compiled by: cc program.c $(PKG_CONFIG_PATH={0}/lib/pkgconfig pkg-config --cflags \
         --libs defuse) -Wl,-rpath,{0}/lib",
        prefix.display()
    );
    Ok(())
}

/// Where libdefuse is installed, and the linker of its shared library.
pub struct LibraryInstall<'a> {
    /// Users will find it below this path.
    pub prefix: &'a Path,
    /// The directory of libraries below the prefix: `lib`, or another one for a distribution.
    pub libdir: &'a str,
    pub compiler: &'a OsStr,
}

/// The C compiler of this machine, which `CC` overrides.
pub fn compiler() -> OsString {
    std::env::var_os("CC").unwrap_or_else(|| "cc".into())
}

impl LibraryInstall<'_> {
    /// Links the shared library from the static one, and installs it with its other files at `at`.
    pub fn install(&self, built: &Path, at: &InstallTarget) -> Result<()> {
        let linked = built.with_extension("so.linked");
        self.link(built, &linked)?;
        self.install_shared(&linked, 0o755, at)?;
        fs::remove_file(&linked)?;
        self.development(built, at)
    }

    /// Installs the shared library, which was linked, with its name for programs.
    pub fn install_shared(&self, linked: &Path, mode: u32, at: &InstallTarget) -> Result<()> {
        let (libdir, real) = (self.libdir, format!("libdefuse.so.{VERSION}"));
        at.copy(linked, &format!("{libdir}/{real}"), mode)?;
        at.link(&format!("{libdir}/{SONAME}"), &real)
    }

    /// Installs the files for compilers, and the manual pages.
    pub fn development(&self, built: &Path, at: &InstallTarget) -> Result<()> {
        let (libdir, capi) = (self.libdir, command::root().join("capi"));
        at.link(&format!("{libdir}/libdefuse.so"), SONAME)?;
        at.copy(built, &format!("{libdir}/libdefuse.a"), 0o644)?;
        at.copy(&capi.join("include/defuse.h"), "include/defuse.h", 0o644)?;
        at.write(&format!("{libdir}/pkgconfig/defuse.pc"), self.pkg_config().as_bytes(), 0o644)?;
        manual(&capi.join("man"), at)
    }

    /// Links the shared library from the static one.
    pub fn link(&self, built: &Path, library: &Path) -> Result<()> {
        let versions = command::root().join("capi/libdefuse.map");
        let mut cc = Command::new(self.compiler);
        cc.args(["-shared", "-fPIC", "-o"]).arg(library);
        cc.arg(format!("-Wl,-soname,{SONAME}"));
        cc.arg(format!("-Wl,--version-script={}", versions.display()));
        cc.args(["-Wl,--gc-sections", "-Wl,--no-undefined", "-Wl,-z,relro,-z,now"]);
        cc.arg("-Wl,--whole-archive").arg(built).arg("-Wl,--no-whole-archive").args(NEEDED);
        command::run(&mut cc)
    }

    fn pkg_config(&self) -> String {
        format!(
            "prefix={}\nlibdir=${{prefix}}/{}\nincludedir=${{prefix}}/include\n\n\
             Name: defuse\n\
             Description: File systems inside of the application's own process\n\
             Version: {VERSION}\n\
             Cflags: -I${{includedir}}\n\
             Libs: -L${{libdir}} -ldefuse\n\
             Libs.private: {}\n",
            self.prefix.display(),
            self.libdir,
            NEEDED.join(" ")
        )
    }
}

/// Copies the manual pages, and creates a page that refers to them for each further name.
fn manual(pages: &Path, at: &InstallTarget) -> Result<()> {
    for page in fs::read_dir(pages)? {
        let page = page?;
        let file = page.file_name().to_string_lossy().into_owned();
        at.copy(&page.path(), &format!("share/man/man3/{file}"), 0o644)?;
        let text = fs::read_to_string(page.path())?;
        let names = text.lines().skip_while(|line| *line != ".SH NAME").nth(1);
        let names = names.and_then(|line| line.split(" \\- ").next()).unwrap_or("");
        for name in names.split(", ").filter(|name| format!("{name}.3") != file) {
            let page = format!(".so man3/{file}\n");
            at.write(&format!("share/man/man3/{name}.3"), page.as_bytes(), 0o644)?;
        }
    }
    Ok(())
}
