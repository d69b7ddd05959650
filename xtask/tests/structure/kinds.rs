//! Kinds of sources: each is described by its crate, and listed in one place.

use crate::project::{packages, relative, sources};
use crate::source::{code_only, has_word};
use crate::{complain, read};

/// The files that list the kinds of sources which programs link.
const KINDS_ARE_LISTED_IN: &[&str] =
    &["compose/src/kinds.rs", "compose/bound/src/kinds.rs", "cli/src/sources.rs"];

/// A description of a kind of source.
struct DescribedKind {
    /// The crate that describes it, as code names it, and its folder.
    krate: String,
    folder: String,
    /// The name of the static.
    item: String,
    /// The word before the colon of a source.
    name: String,
}

/// All kinds that backends describe: `pub static ITEM: SourceDescription<...>`, with `name: "..."`
/// after it.
fn described_kinds() -> Vec<DescribedKind> {
    let mut found = Vec::new();
    for package in packages().into_iter().filter(|package| package.folder != "fs") {
        let folder = format!("{}/src/", package.folder);
        for path in sources().into_iter().filter(|path| relative(path).starts_with(&folder)) {
            let text = read(&path);
            for part in text.split("pub static ").skip(1) {
                let Some((item, rest)) = part.split_once(": SourceDescription<") else { continue };
                let name = rest.split("name: \"").nth(1).and_then(|rest| rest.split('"').next());
                found.push(DescribedKind {
                    krate: package.name.replace('-', "_"),
                    folder: folder.clone(),
                    item: item.to_owned(),
                    name: name.expect("a description has a name").to_owned(),
                });
            }
        }
    }
    found
}

/// A backend is added by its own crate and one line in a list of kinds.
#[test]
fn kinds_of_sources_are_described_in_their_crate_and_listed_once() {
    let kinds = described_kinds();
    assert!(kinds.len() >= 4, "only {} kinds are described", kinds.len());
    let code: Vec<(String, String)> =
        sources().iter().map(|path| (relative(path), code_only(&read(path)))).collect();
    let mut complaints = Vec::new();
    for kind in &kinds {
        let (krate, item) = (&kind.krate, &kind.item);
        let mut listed = 0;
        for (file, code) in &code {
            // A crate that opens sources of others lists its own kinds.
            let own = file.starts_with(&kind.folder);
            if own && !KINDS_ARE_LISTED_IN.contains(&file.as_str()) {
                continue;
            }
            let of_crate = |line: &&str| has_word(line, if own { "crate" } else { krate });
            let names_it = |line: &&str| of_crate(line) && has_word(line, item);
            let lines = code.lines().filter(names_it).count();
            match KINDS_ARE_LISTED_IN.contains(&file.as_str()) {
                true => listed += lines,
                false if lines > 0 => complaints.push(format!("{file} names {krate}::{item}")),
                false => {}
            }
        }
        if listed != 1 {
            complaints.push(format!("{krate}::{item} is in {listed} lists of kinds, not in one"));
        }
    }
    complain(complaints);
}

/// Programs decide by the facts of a description. By its name they would have to know the kind.
#[test]
fn nobody_decides_by_the_name_of_a_kind() {
    const PROGRAMS: [&str; 5] = ["compose/src/", "capi/src/", "cli/src/", "preload/", "frontends/"];
    const DECIDES: [&str; 7] =
        ["==", "!=", "=>", "matches!", "starts_with(", "strip_prefix(", "eq("];
    let kinds = described_kinds();
    let mut complaints = Vec::new();
    for path in sources() {
        let file = relative(&path);
        let is_program = PROGRAMS.iter().any(|program| file.starts_with(program));
        // The kernel's name for the type of a mount, which a kind happens to have.
        if !is_program || file == "frontends/fuse/src/mount/info.rs" {
            continue;
        }
        let text = read(&path);
        let mut in_tests = false;
        for (number, line) in text.lines().enumerate() {
            in_tests = line == "mod tests {" || in_tests && line != "}";
            if in_tests {
                continue;
            }
            let line = line.split("//").next().unwrap_or_default();
            let decides = DECIDES.iter().any(|word| line.contains(word));
            let named = |kind: &&DescribedKind| {
                [format!("\"{}\"", kind.name), format!("\"{}:", kind.name)]
                    .iter()
                    .any(|literal| line.contains(literal))
            };
            if let Some(kind) = kinds.iter().find(named).filter(|_| decides) {
                let (at, name) = (number + 1, &kind.name);
                complaints.push(format!("{file}:{at} decides by the name of the kind {name}"));
            }
        }
    }
    complain(complaints);
}
