//! The kind of source `example`.

use std::sync::Arc;

use defuse_fs::source::{About, Description, Files, Opt, Rest, Sharing, Value};

use crate::Example;

/// `example:`. The settings are one number: the most inodes.
pub static KIND: Description<usize> = Description {
    about: About {
        name: "example",
        form: "example:",
        help: "one directory of small files in memory: the example for authors of file systems",
        rest: Rest::Nothing,
        sharing: Sharing::NeedsServer,
        rings: false,
        network: false,
        files: Files::None,
    },
    options: &[Opt::new(
        "files",
        Value::Number(1, 1 << 20, |most, n| *most = n as usize),
        "most files, with the root directory (default 1024)",
    )],
    defaults: |_| 1024,
    open: |_, most| Ok(Arc::new(Example::new(most))),
    images: None,
};
