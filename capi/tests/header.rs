//! The header and the manual pages are generated from `src/calls/`. `DEFUSE_WRITE=1 cargo test -p
//! defuse-capi --test header` writes them; without the variable the test compares them.

mod made;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use made::{families, header, items, manual, root, version_script};

/// Writes the file if requested, otherwise compares it.
fn is_right(path: &Path, made: &str) {
    if std::env::var_os("DEFUSE_WRITE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, made).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    let path = path.display();
    assert!(
        there == made,
        "{path} is out of date: DEFUSE_WRITE=1 cargo test -p defuse-capi --test header"
    );
}

#[test]
fn the_header_matches_the_library() {
    is_right(&root().join("include/defuse.h"), &header(&families()));
}

#[test]
fn the_version_script_names_every_function() {
    is_right(&root().join("libdefuse.map"), &version_script(&families()));
}

#[test]
fn every_function_has_a_manual_page_with_its_description() {
    let families = families();
    let pages = manual::pages(&families);
    for (name, text) in &pages {
        is_right(&root().join("man").join(name), text);
    }
    let there = std::fs::read_dir(root().join("man")).unwrap();
    assert_eq!(there.count(), pages.len(), "a page in man/ belongs to no family");
    // Everything that the header declares is named and described by a manual page.
    let functions: BTreeSet<String> = families
        .iter()
        .flat_map(|family| items(&family.declarations))
        .filter_map(|item| item.function().map(str::to_owned))
        .collect();
    assert!(functions.len() > 100, "{functions:?}");
    for function in functions {
        let is_in = |page: &&manual::ManualPage| {
            let names = page.1.lines().skip_while(|line| *line != ".SH NAME").nth(1).unwrap();
            let named = names.split(" \\- ").next().unwrap().split(", ").any(|n| n == function);
            named && page.1.contains(&format!("\n.BR {function} ()\n"))
        };
        assert_eq!(pages.iter().filter(is_in).count(), 1, "pages with {function}");
    }
}

fn is_there(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: there is no {program}");
    }
    found
}

#[test]
fn manual_pages_are_formatted_without_a_warning() {
    if !is_there("groff") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in manual::pages(&families()) {
        let page = dir.path().join(name);
        std::fs::write(&page, text).unwrap();
        let mut groff = Command::new("groff");
        let output = groff.args(["-man", "-Tutf8", "-ww", "-z"]).arg(&page).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{}: {said}", page.display());
    }
}

#[test]
fn the_header_is_c11_and_cpp17_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    for (compiler, standard, extension) in
        [("cc", "-std=c11", "c"), ("cc", "-std=c99", "c"), ("c++", "-std=c++17", "cpp")]
    {
        if !is_there(compiler) {
            continue;
        }
        let source = dir.path().join(format!("header.{extension}"));
        // Twice, and alone: it includes what it needs.
        std::fs::write(&source, "#include <defuse.h>\n#include <defuse.h>\n").unwrap();
        let mut command = Command::new(compiler);
        command.args([standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]);
        let output = command.arg("-I").arg(root().join("include")).arg(&source).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler} {standard}: {said}");
    }
}
