//! The attributes of each statement, as tables, so that messages can suggest similar names.

use super::SourcePosition;
use super::diagnostic::LanguageError;

/// The attributes of one kind of statement.
pub(crate) struct AttributeSchema {
    /// The name of the statement in messages.
    pub of: &'static str,
    /// The attributes. Each row begins with the canonical name, followed by synonyms.
    pub names: &'static [&'static [&'static str]],
    /// `$name=value` is allowed, too.
    pub has_locals: bool,
}

impl AttributeSchema {
    /// The canonical name of `written`.
    pub fn canonical(&self, written: &str) -> Option<&'static str> {
        self.names.iter().find(|row| row.contains(&written)).map(|row| row[0])
    }

    pub fn unknown_name_error(&self, written: &str, place: SourcePosition) -> LanguageError {
        let known = || self.names.iter().flat_map(|row| row.iter().copied());
        let list: Vec<&str> = self.names.iter().map(|row| row[0]).collect();
        let expected = format!("an attribute of {}: {}", self.of, list.join(", "));
        LanguageError::new(place, format!("found `{written}`"), expected).suggest(written, known())
    }
}

pub(crate) const FILE: AttributeSchema = AttributeSchema {
    of: "a file",
    names: &[
        &["name"],
        &["path"],
        &["size", "filesize"],
        &["prealloc"],
        &["paralloc"],
        &["reuse"],
        &["readonly"],
        &["writeonly"],
        &["cached"],
        &["trusttree"],
        &["filesizegamma"],
    ],
    has_locals: false,
};

pub(crate) const FILESET: AttributeSchema = AttributeSchema {
    of: "a file set",
    names: &[
        &["name"],
        &["path"],
        &["entries"],
        &["size", "filesize"],
        &["dirwidth"],
        &["dirdepthrv"],
        &["dirgamma"],
        &["leafdirs"],
        &["prealloc"],
        &["paralloc"],
        &["reuse"],
        &["readonly"],
        &["writeonly"],
        &["cached"],
        &["trusttree"],
        &["filesizegamma", "sizegamma"],
    ],
    has_locals: false,
};

pub(crate) const PROCESS: AttributeSchema = AttributeSchema {
    of: "a process",
    names: &[&["name"], &["instances"], &["nice"]],
    has_locals: false,
};

pub(crate) const THREAD: AttributeSchema = AttributeSchema {
    of: "a thread",
    names: &[&["name"], &["instances"], &["memsize"], &["useism"], &["ioprio"], &["procname"]],
    has_locals: false,
};

pub(crate) const FLOWOP: AttributeSchema = AttributeSchema {
    of: "a flowop",
    names: &[
        &["name"],
        &["filename", "filesetname"],
        &["fd"],
        &["srcfd"],
        &["opennext", "rotatefd"],
        &["iosize"],
        &["iters"],
        &["random"],
        &["indexed"],
        &["workingset", "wss"],
        &["dsync"],
        &["directio"],
        &["noreadahead"],
        &["value"],
        &["target"],
        &["highwater"],
        &["blocking"],
    ],
    has_locals: true,
};

pub(crate) const COMPOSITE: AttributeSchema =
    AttributeSchema { of: "a composite flowop", names: &[&["name"], &["iters"]], has_locals: true };

pub(crate) const EVENT_GENERATOR: AttributeSchema =
    AttributeSchema { of: "the event generator", names: &[&["rate"]], has_locals: false };

pub(crate) const RANDVAR: AttributeSchema = AttributeSchema {
    of: "a random variable",
    names: &[
        &["name"],
        &["type"],
        &["seed"],
        &["gamma"],
        &["mean"],
        &["min"],
        &["round"],
        &["randsrc"],
        &["randtable"],
    ],
    has_locals: false,
};

pub(crate) const CVAR: AttributeSchema = AttributeSchema {
    of: "a custom variable",
    names: &[&["type"], &["parameters"], &["min"], &["max"], &["round"]],
    has_locals: false,
};
