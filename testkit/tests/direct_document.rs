//! The examples of docs/direct.md.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The first code block of this language.
fn block<'a>(page: &'a str, language: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

/// The page had a few lines of a program that could not be compiled, and no manifest.
#[test]
fn the_program_of_the_document_can_be_copied_built_and_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = fs::read_to_string(root.join("docs/direct.md")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let hello = place.path().join("hello");
    fs::create_dir_all(hello.join("src")).unwrap();
    std::os::unix::fs::symlink(root, place.path().join("defuse")).unwrap();
    fs::write(hello.join("Cargo.toml"), block(&page, "toml")).unwrap();
    fs::write(hello.join("src/main.rs"), block(&page, "rust")).unwrap();
    // Uses the crate versions that are already downloaded.
    fs::copy(root.join("Cargo.lock"), hello.join("Cargo.lock")).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--offline", "--quiet"]).current_dir(&hello);
    cargo.env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("direct_document"));
    let output = cargo.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "mem:/hello has 5 bytes\n");
}
