//! The settings of a source, and lists of options.

use defuse_fs::source::FrontendProperties;

/// The settings with which a source is opened.
#[derive(Clone, Debug, Default)]
pub struct SourceSettings {
    /// How the frontend will use the file system.
    pub frontend: FrontendProperties,
    /// Options of the kind, in the order in which they apply.
    pub options: Vec<String>,
    /// Refuse all changes.
    pub read_only: bool,
}

impl SourceSettings {
    /// The settings for `frontend`, without options.
    pub fn for_frontend(frontend: FrontendProperties) -> Self {
        SourceSettings { frontend, ..SourceSettings::default() }
    }

    /// Adds one option: `ro` and `rw`, which every kind has, or one of the kind.
    pub(crate) fn add(&mut self, option: String) {
        match option.as_str() {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            _ => self.options.push(option),
        }
    }
}

/// Splits a list of options at its commas. A backslash makes the next character part of the option
/// (fuse(8)).
pub fn split(list: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut escaped = false;
    for c in list.chars() {
        match (c, options.last_mut()) {
            ('\\', _) if !escaped => escaped = true,
            (',', _) if !escaped => options.push(String::new()),
            (c, Some(option)) => {
                option.push(c);
                escaped = false;
            }
            (_, None) => {}
        }
    }
    options.retain(|option| !option.is_empty());
    options
}
