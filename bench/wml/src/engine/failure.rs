//! The reason why a run failed.

use std::fmt;
use std::io;
use std::path::Path;

use crate::plan::FlowopPlan;

/// The reason why a run failed. The text names the object and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFailure {
    text: String,
    /// The system error, if there was one.
    pub errno: Option<i32>,
}

impl RunFailure {
    pub(crate) fn new(text: String) -> Self {
        RunFailure { text, errno: None }
    }

    pub(crate) fn create(path: &Path, error: &io::Error) -> Self {
        let text = format!("{}: {error}", path.display());
        RunFailure { text, errno: error.raw_os_error() }
    }

    pub(crate) fn outside_root(root: &Path, inside: &Path) -> Self {
        let (root, inside) = (root.display(), inside.display());
        RunFailure::new(format!(
            "{root} would be replaced, but {inside} is in it, which no workload has made: move it \
             away, or choose another directory"
        ))
    }

    pub(crate) fn no_room(path: &Path, needed: u64, limit: u64) -> Self {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        RunFailure::new(format!(
            "the files in {} would take {} MiB, and there is room for {} MiB: nothing was made; use a \
             smaller size or number of files, --scale, or another directory",
            path.display(),
            mib(needed),
            limit >> 20
        ))
    }

    pub(crate) fn command(line: &str, why: &str) -> Self {
        RunFailure::new(format!("the command `{line}` failed: {why}"))
    }

    pub(crate) fn flowop(step: &FlowopPlan, path: Option<&Path>, error: &io::Error) -> Self {
        let FlowopPlan { name, line, .. } = step;
        let path = path.map(|path| format!(": {}", path.display())).unwrap_or_default();
        let text = format!("flowop {name} (line {line}){path}: {error}");
        RunFailure { text, errno: error.raw_os_error() }
    }

    pub(crate) fn wrong_use(step: &FlowopPlan, what: &str) -> Self {
        let FlowopPlan { name, line, fd, .. } = step;
        RunFailure::new(format!("flowop {name} (line {line}) {what} descriptor {fd}"))
    }

    pub(crate) fn no_file(step: &FlowopPlan) -> Self {
        let FlowopPlan { name, line, .. } = step;
        RunFailure::new(format!(
            "flowop {name} (line {line}) found no file: give the set more entries, run for a \
             shorter time, or say `set mode quit alldone` or `firstdone`"
        ))
    }
}

impl fmt::Display for RunFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for RunFailure {}
