//! The path by which a file was opened.

use std::sync::Arc;

use defuse_direct::{ClientTask, DirectClient, WorkDir};

/// The path by which a file was opened. A directory of a mount does not know its own path, and few
/// programs need the path of what they opened by a relative one.
#[derive(Clone)]
pub struct OpenPath {
    /// Where a relative path begins.
    from: Option<Arc<WorkDir>>,
    path: Vec<u8>,
}

impl OpenPath {
    /// This absolute path.
    pub fn from_absolute(path: Vec<u8>) -> OpenPath {
        OpenPath { from: None, path }
    }

    /// This working directory.
    pub fn work_dir(dir: Arc<WorkDir>) -> OpenPath {
        OpenPath { from: Some(dir), path: Vec::new() }
    }

    /// A relative path from here.
    pub fn join(mut self, relative: &[u8]) -> OpenPath {
        if !matches!(relative, b"" | b".") {
            if self.from.is_none() || !self.path.is_empty() {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(relative);
        }
        self
    }

    /// The absolute path. A directory that was removed has an empty one.
    pub fn path(&self, client: &DirectClient, task: &ClientTask) -> Vec<u8> {
        let Some(from) = &self.from else { return self.path.clone() };
        let from = client.path_of_work_dir(task, from).unwrap_or_default();
        match self.path.is_empty() {
            true => from,
            false => [&from[..], b"/", &self.path].concat(),
        }
    }
}
