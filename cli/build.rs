//! Names the library for programs of a run, which the program carries (`src/run/library.rs`).
//!
//! Cargo builds that library before it links this program, because this program depends on its crate. This script runs
//! earlier, and where cargo only checks code there is no library: then the program would have an empty file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

const LIBRARY: &str = "libdefuse_preload.so";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let library = built(&out).unwrap_or_else(|| out.join(LIBRARY));
    // An existing one is left as it is: the library may have been built before.
    if let Err(error) = File::create_new(&library)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        panic!("cannot create {}: {error}", library.display());
    }
    println!("cargo:rustc-env=DEFUSE_BUILT_LIBRARY={}", library.display());
}

/// The place of the library in cargo's directory `PROFILE/deps`, beside `PROFILE/build/CRATE/out`.
fn built(out: &Path) -> Option<PathBuf> {
    let dependencies = out.ancestors().nth(3)?.join("deps");
    fs::metadata(&dependencies).is_ok_and(|meta| meta.is_dir()).then(|| dependencies.join(LIBRARY))
}
