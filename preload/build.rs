//! Links the unwinder into the library.
//!
//! Otherwise every program of a run would load libgcc_s.so.1 for it: one library more for the
//! loader, and sixty microseconds in its constructor alone, for CPUID, on a virtual machine.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=CC");
    // Calls of our own lead to the functions of this library, also where a program has some of
    // these names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    match unwinder() {
        // `-bundle`: as a separate library it comes before the library that the standard library
        // names, which is then not needed.
        Some(folder) => {
            println!("cargo:rustc-link-search=native={}", folder.display());
            println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
        }
        None => println!(
            "cargo:warning=no libgcc_eh.a: programs of a run load libgcc_s.so.1; it comes with gcc"
        ),
    }
}

/// Where the compiler has its unwinder as a static library.
fn unwinder() -> Option<PathBuf> {
    const NAME: &str = "libgcc_eh.a";
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let printed = Command::new(compiler).arg(format!("-print-file-name={NAME}")).output().ok()?;
    let text = String::from_utf8(printed.stdout).ok()?;
    // The compiler prints the bare name of a file that it does not have.
    let path = Path::new(text.trim());
    path.is_file().then(|| path.parent().map(Path::to_owned))?
}
