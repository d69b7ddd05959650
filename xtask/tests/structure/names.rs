//! Names of types: one name is one type.

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
