//! The kind of source `example`.

use std::sync::Arc;

use defuse_fs::source::{
    FileAccess, OptionValue, SourceDescription, SourceFacts, SourceOption, SourceRest,
    SourceSharing,
};

use crate::Example;

/// `example:`. The settings are one number: the most inodes.
pub static KIND: SourceDescription<usize> = SourceDescription {
    about: SourceFacts {
        name: "example",
        form: "example:",
        help: "one directory of small files in memory: the example for authors of file systems",
        rest: SourceRest::Nothing,
        sharing: SourceSharing::NeedsServer,
        rings: false,
        network: false,
        files: FileAccess::None,
    },
    options: &[SourceOption::new(
        "files",
        OptionValue::Number(1, 1 << 20, |most, n| *most = n as usize),
        "most files, with the root directory (default 1024)",
    )],
    defaults: |_| 1024,
    open: |_, most| Ok(Arc::new(Example::new(most))),
    images: None,
};
