//! The C example compiles, links with the shared library, and runs; the library has its soname.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the shared library as cargo would, and returns the directory with it.
fn library() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let status = Command::new(env!("CARGO"))
        .args(["build", "--offline", "-p", "defuse-capi", "--lib"])
        .current_dir(root)
        .status()
        .unwrap();
    assert!(status.success());
    // The test itself lies in target/PROFILE/deps.
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("../target"), PathBuf::from);
    target.join("debug")
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_c_example_compiles_and_runs() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: there is no C compiler (cc)");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (lib, dir) = (library(), tempfile::tempdir().unwrap());
    let program = dir.path().join("hello");
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]);
    cc.arg("-I").arg(root.join("include")).arg(root.join("examples/hello.c"));
    cc.arg("-L").arg(&lib).arg("-ldefuse").arg("-o").arg(&program);
    output(&mut cc);
    // What an installation does: the library under its soname.
    std::os::unix::fs::symlink(
        lib.canonicalize().unwrap().join("libdefuse.so"),
        dir.path().join("libdefuse.so.0"),
    )
    .unwrap();
    let text = output(Command::new(&program).env("LD_LIBRARY_PATH", dir.path()));
    assert_eq!(text, "hello, world\n");
}

#[test]
fn the_library_has_a_soname() {
    if Command::new("readelf").arg("--version").output().is_err() {
        eprintln!("skipped: there is no readelf");
        return;
    }
    let lib = library().join("libdefuse.so");
    let dynamic = output(Command::new("readelf").arg("-dW").arg(&lib));
    assert!(dynamic.contains("[libdefuse.so.0]"), "{dynamic}");
}
