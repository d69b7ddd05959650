//! Names of types: one name is one type. Names of functions say what these do.

use std::collections::BTreeMap;

use crate::project::{relative, sources};
use crate::source::code_only;
use crate::{complain, read};

/// Aliases that each crate may have, as the standard library's modules do.
const SHARED: &[&str] = &["Result"];

/// The type that a line defines. An associated type is indented, and is none.
fn defined_type(line: &str) -> Option<&str> {
    let begins = line.trim_start();
    let rest = match begins.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1.trim_start(),
        Some(rest) => rest.trim_start(),
        None => begins,
    };
    let (keyword, rest) = rest.split_once(' ')?;
    let defines = match keyword {
        "struct" | "enum" | "union" | "trait" => true,
        "type" => begins.len() == line.len(),
        _ => false,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    let name = &rest[..end];
    (defines && name.starts_with(char::is_uppercase)).then_some(name)
}

/// `struct State` had 28 answers in this workspace, and `Told` nine.
#[test]
fn a_name_of_a_type_is_defined_once_in_the_workspace() {
    let mut places = BTreeMap::<String, Vec<String>>::new();
    for path in sources() {
        let code = code_only(&read(&path));
        for (number, line) in code.lines().enumerate() {
            if let Some(name) = defined_type(line).filter(|name| !SHARED.contains(name)) {
                let place = format!("{}:{}", relative(&path), number + 1);
                places.entry(name.to_owned()).or_default().push(place);
            }
        }
    }
    assert!(places.len() > 2000, "only {} types are found", places.len());
    let shared = places.into_iter().filter(|(_, places)| places.len() > 1);
    complain(
        shared
            .map(|(name, places)| {
                format!(
                    "{name} is defined in {}: two words say what each of them is",
                    places.join(", ")
                )
            })
            .collect(),
    );
}

#[test]
fn a_definition_is_found_in_its_line() {
    for (line, name) in [
        ("pub struct OpenFile {", Some("OpenFile")),
        ("    pub(crate) enum LockState<'a> {", Some("LockState")),
        ("trait Peer: Send {", Some("Peer")),
        ("type Reply<T> = Result<T>;", Some("Reply")),
        ("    type Item = u8;", None),
        ("let structure = 1;", None),
        ("use crate::structs::OpenFile;", None),
    ] {
        assert_eq!(defined_type(line), name, "{line}");
    }
}

/// Participles and words of place or time, which say nothing of what a function does. Words that
/// end in `ed` are refused by their end.
const NO_VERBS: &[&str] = &[
    "after",
    "around",
    "aside",
    "before",
    "begun",
    "below",
    "beside",
    "built",
    "done",
    "drawn",
    "during",
    "elsewhere",
    "everywhere",
    "found",
    "given",
    "gone",
    "held",
    "here",
    "hidden",
    "inside",
    "kept",
    "known",
    "left",
    "lent",
    "lost",
    "made",
    "once",
    "others",
    "ours",
    "outside",
    "said",
    "saw",
    "seen",
    "shown",
    "since",
    "taken",
    "then",
    "there",
    "told",
    "torn",
    "until",
    "who",
    "within",
    "without",
    "written",
    "wrote",
];

/// Names that end in `ed` and are verbs, or names of the standard library, of a trait of another
/// crate, or of a callback in C.
const VERBS: &[&str] = &["done", "elapsed", "enabled", "speed", "succeed", "unchecked", "zeroed"];

/// Words that the project had for things with a name in the field: docs/glossary.md has these
/// names.
const METAPHORS: &[&str] = &[
    "bell", "clerk", "desk", "door", "doors", "heir", "heirs", "mender", "seat", "seats", "teller",
    "told",
];

/// The words of an identifier. Longer ones are sentences, which tests have for names.
const MOST_WORDS: usize = 4;

/// All words of code that are no keywords of a type: identifiers and keywords.
fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase() || c == '_'))
}

fn is_refused_function(name: &str) -> bool {
    !name.contains('_')
        && (name.ends_with("ed") || NO_VERBS.contains(&name))
        && !VERBS.contains(&name)
}

fn is_metaphor(name: &str) -> bool {
    name.split('_').count() <= MOST_WORDS && name.split('_').any(|word| METAPHORS.contains(&word))
}

/// `added`, `closes` and `around` left it to the comment what a function does.
#[test]
fn a_name_of_a_function_is_no_participle_and_no_identifier_is_a_metaphor() {
    let mut problems = Vec::new();
    let mut functions = 0;
    for path in sources() {
        let code = code_only(&read(&path));
        for (number, line) in code.lines().enumerate() {
            let place = format!("{}:{}", relative(&path), number + 1);
            let words: Vec<&str> = identifiers(line).collect();
            for pair in words.windows(2).filter(|pair| pair[0] == "fn") {
                functions += 1;
                if is_refused_function(pair[1]) {
                    problems.push(format!("{place}: fn {}: a name says what it does", pair[1]));
                }
            }
            for word in words.into_iter().filter(|word| is_metaphor(word)) {
                problems.push(format!("{place}: {word}: docs/glossary.md has the field's term"));
            }
        }
    }
    assert!(functions > 10_000, "only {functions} functions are found");
    complain(problems);
}

#[test]
fn participles_and_metaphors_are_found() {
    for name in ["added", "attached", "told", "without", "inside"] {
        assert!(is_refused_function(name), "{name}");
    }
    for name in ["add", "succeed", "elapsed", "is_interrupted", "newest_written"] {
        assert!(!is_refused_function(name), "{name}");
    }
    assert!(is_metaphor("told_names") && is_metaphor("heir") && !is_metaphor("doorbell"));
    assert!(!is_metaphor("a_closed_mapping_is_told_to_the_server"));
    let code = "pub(crate) fn added(&self, Heir: u64) -> Told";
    assert_eq!(
        identifiers(code).collect::<Vec<_>>(),
        ["pub", "crate", "fn", "added", "self", "u64"]
    );
}
