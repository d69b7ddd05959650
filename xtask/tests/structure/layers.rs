//! The layers of a crate, and the cycles of imports within them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::source::code_only;
use crate::{project, read};

/// The source folder of the preloaded library.
const PRELOAD: &str = "preload/src";

/// The layers of the preloaded library, the lowest first. A layer names itself and lower ones.
const LAYERS: [&str; 4] = ["machine", "process", "serve", "catch"];

/// The most files of a cycle of imports.
const LONGEST_CYCLE: usize = 4;

/// The cycles of imports within a layer, each with the reason for it. There is none today.
const CYCLES: &[(&[&str], &str)] = &[];

#[test]
fn a_layer_of_the_preloaded_library_names_itself_and_lower_ones() {
    let imports = imports(&project::root().join(PRELOAD));
    let mut complaints = Vec::new();
    for (file, others) in imports.iter().filter(|(file, _)| rank(file).is_some()) {
        let above =
            others.iter().filter(|other| rank(other).is_none_or(|r| r > rank(file).unwrap()));
        complaints.extend(above.map(|other| format!("{PRELOAD}/{file} must not name {other}")));
    }
    assert!(imports.keys().filter(|file| rank(file).is_some()).count() > 40, "files are missing");
    assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 200, "imports are missing");
    crate::complain(complaints);
}

#[test]
fn cycles_of_imports_in_the_preloaded_library_are_listed_and_short() {
    let imports = imports(&project::root().join(PRELOAD));
    let found = cycles(&imports);
    let mut complaints = Vec::new();
    for cycle in &found {
        let listed = CYCLES.iter().any(|(files, why)| files == cycle && !why.is_empty());
        if !listed || cycle.len() > LONGEST_CYCLE {
            complaints.push(format!("import each other: {}", cycle.join(", ")));
        }
    }
    for (files, _) in CYCLES.iter().filter(|(files, _)| !found.iter().any(|cycle| cycle == files)) {
        complaints.push(format!("listed as a cycle, but is none: {}", files.join(", ")));
    }
    crate::complain(complaints);
}

/// The place of a file's layer; `None` for a file of no layer.
fn rank(file: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| Some(*layer) == file.split('/').next())
}

/// The files that each file below `folder` names, all relative to `folder`.
fn imports(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let relative = |path: &PathBuf| Some(path.strip_prefix(folder).ok()?.to_str()?.to_owned());
    let files: BTreeSet<String> = project::sources().iter().filter_map(relative).collect();
    let of = |file: &String| {
        let code = code_only(&read(&folder.join(file)));
        let named = paths(&code).into_iter().filter_map(|path| resolve(&files, file, &path));
        (file.clone(), named.filter(|other| other != file).collect())
    };
    files.iter().map(of).collect()
}

/// The file that `path`, written in `file`, leads to.
fn resolve(files: &BTreeSet<String>, file: &str, path: &[String]) -> Option<String> {
    let module: Vec<&str> =
        file.trim_end_matches(".rs").trim_end_matches("/mod").split('/').collect();
    let is_folder = file.ends_with("/mod.rs");
    let rest: Vec<&str> = path.iter().skip(1).map(String::as_str).collect();
    let full = match path[0].as_str() {
        "crate" => rest,
        "self" => [&module[..], &rest].concat(),
        // In a module within the file, it is the file itself.
        "super" if rest.first() == Some(&"*") => return None,
        "super" => [&module[..module.len() - 1], &rest].concat(),
        // A child of this folder.
        first if is_folder => [&module[..], &[first], &rest].concat(),
        _ => return None,
    };
    let candidates = (1..=full.len()).rev().flat_map(|len| {
        let stem = full[..len].join("/");
        [format!("{stem}.rs"), format!("{stem}/mod.rs")]
    });
    candidates.into_iter().find(|name| files.contains(name))
}

/// All paths of two names at least, in `use` and elsewhere.
fn paths(code: &str) -> Vec<Vec<String>> {
    let words = words(code);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < words.len() {
        if words[at] == "use" {
            at = tree(&words, at + 1, &[], &mut found);
        } else if is_name(&words[at]) && words.get(at + 1).is_some_and(|word| word == "::") {
            let mut path = vec![words[at].clone()];
            while words.get(at + 1).is_some_and(|word| word == "::")
                && words.get(at + 2).is_some_and(|word| is_name(word))
            {
                path.push(words[at + 2].clone());
                at += 2;
            }
            found.push(path);
            at += 1;
        } else {
            at += 1;
        }
    }
    found.retain(|path| path.len() > 1);
    found
}

/// Adds the paths of the `use` tree at `at`, below `prefix`; returns where it ends.
fn tree(words: &[String], mut at: usize, prefix: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = prefix.to_vec();
    while let Some(word) = words.get(at) {
        match word.as_str() {
            "{" => {
                at += 1;
                while words.get(at).is_some_and(|word| word != "}") {
                    at = tree(words, at, &path, found);
                    at += usize::from(words.get(at).is_some_and(|word| word == ","));
                }
                return at + 1;
            }
            "," | "}" | ";" => break,
            "as" => at += 1,
            "::" => {}
            "self" if !path.is_empty() => {}
            name => path.push(name.to_owned()),
        }
        at += 1;
    }
    found.push(path);
    at
}

/// Names and signs: `::` is one of them.
fn words(code: &str) -> Vec<String> {
    let spaced = code.replace("::", " \u{1} ");
    let mut words: Vec<String> = Vec::new();
    let mut in_name = false;
    for c in spaced.chars() {
        let of_name = c.is_alphanumeric() || c == '_';
        match words.last_mut() {
            Some(last) if of_name && in_name => last.push(c),
            _ if c.is_whitespace() => {}
            _ => words.push(if c == '\u{1}' { "::".to_owned() } else { c.to_string() }),
        }
        in_name = of_name;
    }
    words
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// The sets of files that import each other, directly or by others.
fn cycles(imports: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<&str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (file.as_str(), reach_all(imports, file))).collect();
    let mut found: Vec<Vec<&str>> = Vec::new();
    for (file, there) in reach.iter().filter(|(file, there)| there.contains(**file)) {
        let cycle: Vec<&str> = there.iter().copied().filter(|o| reach[o].contains(file)).collect();
        if !found.contains(&cycle) {
            found.push(cycle);
        }
    }
    found
}

fn reach_all<'a>(
    imports: &'a BTreeMap<String, BTreeSet<String>>,
    from: &'a str,
) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        next.extend(imports[file].iter().map(String::as_str).filter(|other| seen.insert(*other)));
    }
    seen
}

#[test]
fn imports_are_read_as_the_compiler_reads_them() {
    let code = "use crate::a::{self, b::C as D, e::{f, g}}; use std::io;\n\
                fn x() { crate::h::i(); j.k(); l::<M>(); super::n::O }";
    let found: Vec<String> = paths(code).iter().map(|path| path.join("::")).collect();
    let b = "crate::a::b::C";
    let all = ["crate::a", b, "crate::a::e::f", "crate::a::e::g", "std::io", "crate::h::i"];
    assert_eq!(found, [&all[..], &["super::n::O"]].concat());
    let files = ["a/mod.rs", "a/b.rs", "h.rs"].map(str::to_owned).into();
    let path = |text: &str| text.split("::").map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(resolve(&files, "h.rs", &path(b)).as_deref(), Some("a/b.rs"));
    assert_eq!(resolve(&files, "a/b.rs", &path("super::X")).as_deref(), Some("a/mod.rs"));
    assert_eq!(resolve(&files, "a/mod.rs", &path("b::X")).as_deref(), Some("a/b.rs"));
    assert_eq!(resolve(&files, "h.rs", &path("std::io")), None);
}

#[test]
fn cycles_are_found() {
    let one = |from: &str, to: &[&str]| {
        (from.to_owned(), to.iter().map(|to| (*to).to_owned()).collect::<BTreeSet<_>>())
    };
    let imports = [one("a", &["b"]), one("b", &["c"]), one("c", &["b", "d"]), one("d", &[])].into();
    assert_eq!(cycles(&imports), [["b", "c"]]);
}
