//! `defuse fuse --report`: the functions of libfuse that a program uses.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use defuse_preload_plan::analysis::{ObjectFile, find_library};
use serde::Serialize;

use super::LIBRARIES_MOST;
use crate::error::{CommandFailure, Result, print};
use crate::terminal;

/// A function of libfuse that a program or one of its libraries uses.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct FunctionUse {
    /// The library of libfuse that is needed.
    library: String,
    function: String,
    /// False for a function that fails with the reason.
    served: bool,
    /// The file that uses it.
    file: String,
}

/// Prints the functions of libfuse that the program at `path` uses, also through its libraries.
///
/// # Errors
///
/// Fails if the file cannot be read, or is no program for this processor.
pub fn print_functions(path: &Path, as_json: bool) -> Result {
    let functions = find_functions(path)?;
    if as_json {
        let text = serde_json::to_string_pretty(&functions).map_err(CommandFailure::from_error)?;
        return print(&format!("{text}\n"));
    }
    if functions.is_empty() {
        return print(
            "no function of libfuse is named; what is loaded later by its name is not known\n",
        );
    }
    let width = functions.iter().map(|one| one.function.len()).max().unwrap_or(0).max(8);
    let mut text = format!("{:<13}  {:width$}  {:<6}  FILE\n", "LIBRARY", "FUNCTION", "SERVED");
    for FunctionUse { library, function, served, file } in &functions {
        let [library, function, file] =
            [library, function, file].map(|text| terminal::escape_controls(text));
        let served = if *served { "yes" } else { "no" };
        let _ = writeln!(text, "{library:<13}  {function:width$}  {served:<6}  {file}");
    }
    print(&text)
}

fn find_functions(path: &Path) -> Result<BTreeSet<FunctionUse>> {
    let program = ObjectFile::read(path)
        .map_err(|error| CommandFailure::Failed(format!("{error}: name a program of ELF")))?;
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    let mut next = vec![program];
    while let Some(file) = next.pop() {
        let library = file.needed.iter().find(|name| name.starts_with("libfuse"));
        let functions = file.imports.iter().filter(|name| is_of_libfuse(name));
        found.extend(library.into_iter().flat_map(|library| {
            functions.clone().map(|function| FunctionUse {
                library: library.clone(),
                function: function.clone(),
                served: is_served(function),
                file: file.path.display().to_string(),
            })
        }));
        let others = file.needed.iter().filter(|name| !name.starts_with("libfuse"));
        for name in others {
            if seen.len() < LIBRARIES_MOST && seen.insert(name.clone()) {
                let library = find_library(name, &file.run_path);
                let outline = library
                    .filter(|path| ObjectFile::read_outline(path).is_ok_and(|it| leads_on(&it)));
                next.extend(outline.and_then(|path| ObjectFile::read(&path).ok()));
            }
        }
    }
    Ok(found)
}

/// True for a library that needs libfuse, or others beside the C library.
fn leads_on(library: &ObjectFile) -> bool {
    const BASE: [&str; 5] =
        ["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"];
    library
        .needed
        .iter()
        .any(|name| !BASE.contains(&name.as_str()) && !name.starts_with("ld-linux"))
}

fn is_of_libfuse(function: &str) -> bool {
    function.starts_with("fuse_") || function.starts_with("cuse_")
}

/// False for functions of `libfuse/src/refused.rs`.
fn is_served(function: &str) -> bool {
    const REFUSED: [&str; 3] =
        ["fuse_register_module", "fuse_loop_mt_proc", "fuse_chan_new_compat24"];
    !function.starts_with("cuse_")
        && !function.starts_with("fuse_fs_")
        && !REFUSED.contains(&function)
}
