//! Generates the header and the manual pages from `src/calls/`: cbindgen translates each family to
//! C, and both are composed of the result.

pub mod manual;

use std::path::{Path, PathBuf};

/// The families, in the order of the header; each is a file of `src/calls/` and a manual page.
const FAMILIES: [&str; 13] = [
    "mount",
    "open",
    "data",
    "mapping",
    "storage",
    "status",
    "attributes",
    "names",
    "directory",
    "workdir",
    "xattrs",
    "locks",
    "aio",
];

/// The directory of the crate.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

/// A family of functions, with their types.
pub struct FunctionFamily {
    pub name: &'static str,
    /// The title, one line.
    pub title: String,
    /// The description, in paragraphs.
    pub about: String,
    /// The output of cbindgen.
    pub declarations: String,
}

/// An item of a header.
pub struct HeaderItem {
    /// The lines of its comment.
    pub comment: Vec<String>,
    /// A declaration, definition or constant.
    pub code: String,
}

impl HeaderItem {
    /// The name, if it is a function.
    pub fn function(&self) -> Option<&str> {
        let before = self.code.split('(').next().filter(|_| self.code.contains('('))?;
        let name = before.rsplit([' ', '*']).next()?;
        (!self.code.starts_with("typedef") && !self.code.starts_with('#')).then_some(name)
    }
}

/// All families.
pub fn families() -> Vec<FunctionFamily> {
    let there = std::fs::read_dir(root().join("src/calls")).unwrap().count();
    assert_eq!(there, FAMILIES.len() + 1, "a file of src/calls/ is missing in FAMILIES");
    FAMILIES.into_iter().map(family).collect()
}

fn family(name: &'static str) -> FunctionFamily {
    let source = std::fs::read_to_string(root().join(format!("src/calls/{name}.rs"))).unwrap();
    let doc: Vec<&str> = source.lines().map_while(|line| line.strip_prefix("//!")).collect();
    let title = doc[0].trim().to_owned();
    let about = doc[1..].iter().map(|line| line.trim()).collect::<Vec<_>>().join("\n");
    let declarations = convert_to_c(name, &pointers(&source));
    FunctionFamily { name, title, about: about.trim().to_owned(), declarations }
}

/// Replaces the wrapper types by the C pointers that they stand for.
fn pointers(source: &str) -> String {
    let mut source =
        source.replace(": CStringArg", ": *const c_char").replace("locks::FcntlArgument", "usize");
    source = source.replace(": IovecArray", ": *const iovec");
    let wrapped = [("OutPointer<", "*mut "), ("OutBuffer<", "*mut "), ("ObjectHandle<", "*mut ")];
    for (wrapper, pointer) in
        wrapped.into_iter().chain([("InPointer<", "*const "), ("InBuffer<", "*const ")])
    {
        let wrapper = format!(": {wrapper}");
        while let Some(start) = source.find(&wrapper) {
            let inner = start + wrapper.len();
            let end = inner + source[inner..].find('>').unwrap();
            let inside = source[inner..end].to_owned();
            source.replace_range(start..=end, &format!(": {pointer}{inside}"));
        }
    }
    source
}

fn convert_to_c(name: &str, source: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("{name}.rs"));
    std::fs::write(&path, source).unwrap();
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        no_includes: true,
        usize_is_size_t: true,
        documentation: true,
        ..Default::default()
    };
    let structures = ["stat", "statx", "statvfs", "iovec", "dirent", "timespec", "open_how"];
    let mut rename = |name: &str, to: &str| config.export.rename.insert(name.into(), to.into());
    for name in structures {
        rename(name, &format!("struct {name}"));
    }
    rename("statfs64", "struct statfs");
    let mut made = Vec::new();
    let builder = cbindgen::Builder::new().with_config(config).with_src(&path);
    builder.generate().expect("the functions can be said in C").write(&mut made);
    let text = String::from_utf8(made).unwrap();
    let variable = |text: String, name: &str, last: &str| {
        let Some(start) = text.find(name) else { return text };
        let end = start + text[start..].find(");").unwrap();
        format!("{}{}{}", &text[..start], text[start..end].replace(last, "..."), &text[end..])
    };
    let text = variable(text, "defuse_open(", "mode_t mode");
    let text = variable(text, "defuse_openat(", "mode_t mode");
    let text = variable(text, "defuse_ioctl(", "void *argument");
    variable(text, "defuse_fcntl(", "size_t argument").trim().to_owned()
}

/// The items of a header.
pub fn items(text: &str) -> Vec<HeaderItem> {
    let mut items = Vec::new();
    let (mut comment, mut code) = (Vec::new(), String::new());
    let mut in_comment = false;
    for line in text.lines() {
        if code.is_empty() && line == "/**" {
            in_comment = true;
        } else if in_comment {
            in_comment = line != " */";
            if in_comment {
                comment.push(line.trim_start_matches(" *").trim().to_owned());
            }
        } else if !(line.is_empty() && code.is_empty()) {
            code.push_str(line);
            code.push('\n');
            let structure = code.starts_with("typedef struct") && code.contains('{');
            let ends = if structure { line.starts_with('}') } else { line.ends_with(';') };
            if ends || line.starts_with("#define") {
                let comment = std::mem::take(&mut comment);
                items.push(HeaderItem {
                    comment,
                    code: std::mem::take(&mut code).trim().to_owned(),
                });
            }
        }
    }
    items
}

const PREAMBLE: &str = "\
/* libdefuse: user-space file systems inside of the application's own process.
 *
 * The functions are those of POSIX with a prefix: -1 (or NULL) and errno where they fail. Descriptors
 * are numbers of a table of their own, and mean nothing to the functions without the prefix. A path
 * outside of all mounts gives EXDEV. All of them may be called from any thread. The manual page
 * defuse(3) is an overview.
 *
 * Made of capi/src/calls/ by capi/tests/header.rs, which says when it is out of date. */

#ifndef DEFUSE_H
#define DEFUSE_H

#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>

#ifdef __cplusplus
extern \"C\" {
#endif

/* Of <time.h> and <sys/stat.h>, where a feature test macro asks for them, and <linux/openat2.h>. */
struct timespec;
struct statx;
struct open_how;
";

const END: &str = "
/* What the library was built with. */
#if defined(__cplusplus) && __cplusplus >= 201103L
#define DEFUSE_ASSERT(fact) static_assert(fact, #fact)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define DEFUSE_ASSERT(fact) _Static_assert(fact, #fact)
#endif
#ifdef DEFUSE_ASSERT
DEFUSE_ASSERT(sizeof(off_t) == 8);
DEFUSE_ASSERT(sizeof(((struct stat *)0)->st_size) == 8);
DEFUSE_ASSERT(sizeof(((struct dirent *)0)->d_ino) == 8);
DEFUSE_ASSERT(sizeof(defuse_aio_event) == 16);
DEFUSE_ASSERT(offsetof(defuse_aio_event, result) == 8);
DEFUSE_ASSERT(sizeof(defuse_aio_op) == 48);
DEFUSE_ASSERT(offsetof(defuse_aio_op, offset) == 24);
DEFUSE_ASSERT(offsetof(defuse_aio_op, callback) == 40);
#undef DEFUSE_ASSERT
#endif

#ifdef __cplusplus
}
#endif

#endif /* DEFUSE_H */
";

/// The version script, which lists the exported symbols. A function added later gets a new version
/// node.
pub fn version_script(families: &[FunctionFamily]) -> String {
    let mut names: Vec<String> = families
        .iter()
        .flat_map(|family| items(&family.declarations))
        .filter_map(|item| item.function().map(str::to_owned))
        .collect();
    names.sort();
    let names: String = names.iter().map(|name| format!("    {name};\n")).collect();
    format!("DEFUSE_0.1 {{\n  global:\n{names}  local:\n    *;\n}};\n")
}

/// `include/defuse.h`.
pub fn header(families: &[FunctionFamily]) -> String {
    let mut text = PREAMBLE.to_owned();
    for FunctionFamily { name, title, declarations, .. } in families {
        text.push_str(&format!("\n/* ---- {title}: defuse_{name}(3) ---- */\n\n{declarations}\n"));
    }
    text + END
}
