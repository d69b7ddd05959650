//! Names the libraries for programs, which the program carries (`src/run/library.rs`,
//! `src/fuse.rs`).
//!
//! Cargo builds these libraries before it links this program, because this program depends on their
//! crates. This script runs earlier, and where cargo only checks code there is no library: then the
//! program would have an empty file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The variable for the code, and the file.
const LIBRARIES: [(&str, &str); 3] = [
    ("DEFUSE_BUILT_LIBRARY", "libdefuse_preload.so"),
    ("DEFUSE_BUILT_LIBFUSE2", "libdefuse_libfuse2.so"),
    ("DEFUSE_BUILT_LIBFUSE3", "libdefuse_libfuse3.so"),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (variable, name) in LIBRARIES {
        let library = find_built(&out, name).unwrap_or_else(|| out.join(name));
        // An existing one is left as it is: the library may have been built before.
        if let Err(error) = File::create_new(&library)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            panic!("cannot create {}: {error}", library.display());
        }
        println!("cargo:rustc-env={variable}={}", library.display());
    }
}

/// The place of a library in cargo's directory `PROFILE/deps`, beside `PROFILE/build/CRATE/out`.
fn find_built(out: &Path, name: &str) -> Option<PathBuf> {
    let dependencies = out.ancestors().nth(3)?.join("deps");
    fs::metadata(&dependencies).is_ok_and(|meta| meta.is_dir()).then(|| dependencies.join(name))
}
