//! The header is what the functions say: `include/defuse.h` is made of `src/calls.rs` by cbindgen.

use std::path::Path;

const PREAMBLE: &str = "\
/* libdefuse: user-space file systems inside of the application's own process.
 *
 * The functions are those of POSIX with a prefix: -1 and errno where they fail. Descriptors are
 * numbers of a table of their own, and mean nothing to the functions without the prefix. A path
 * outside of all mounts gives EXDEV. All of them may be called from any thread.
 *
 * Made of capi/src/calls.rs by capi/tests/header.rs, which says when it is out of date. */";

/// With DEFUSE_WRITE_HEADER set, the header is written; otherwise it has to be right already.
#[test]
fn the_header_says_what_the_library_has() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("DEFUSE_H".to_owned()),
        header: Some(PREAMBLE.to_owned()),
        no_includes: true,
        usize_is_size_t: true,
        documentation: true,
        ..Default::default()
    };
    config.sys_includes = ["stddef.h", "stdint.h", "sys/stat.h", "sys/types.h", "sys/uio.h"]
        .map(str::to_owned)
        .into();
    for name in ["stat", "iovec"] {
        config.export.rename.insert(name.to_owned(), format!("struct {name}"));
    }
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/calls.rs"));
    let mut made = Vec::new();
    builder.generate().expect("the functions can be said in C").write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = root.join("include/defuse.h");
    if std::env::var_os("DEFUSE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == made,
        "include/defuse.h is out of date: DEFUSE_WRITE_HEADER=1 cargo test -p defuse-capi --test header"
    );
}
