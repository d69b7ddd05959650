//! Stores through mappings that the file system has no space for, and mappings of nothing but a
//! server's memory.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use super::{TestPlace, compare, compare_c, compare_compiled, compare_with, finish};

/// The ways of `stores.c` that a process without children can go, with the ends that they have.
const ALONE: [(&str, &str); 11] = [
    ("0", "BUS"),
    ("1", "BUS"),
    ("2", "BUS"),
    ("3", "BUS"),
    ("4", "BUS"),
    ("5", "BUS"),
    ("6", "BUS"),
    ("7", "BUS"),
    ("8", "told"),
    ("9", "told"),
    ("10", "told"),
];

/// The store succeeded, munmap(2), close(2) and exit succeeded without a message, and the bytes
/// were nowhere. With `--fork deny` msync(2) took a short write for all.
#[test]
fn stores_that_find_no_space_end_their_program_or_fail_a_call() {
    compare_compiled(&[], "stores", include_str!("stores.c"), |_, _, program| {
        let place = TestPlace::new();
        place.expect_success(&["mkfs", "uhs", "image", "--size", "64M"]);
        let image = format!("uhs:{}", place.path("image").display());
        for source in ["memory:,size=4M", &image] {
            let mount = format!("/defuse-test={source}");
            let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--", program];
            let seen = finish(place.command(&run));
            for line in seen.out.lines() {
                let right = [": BUS", ": told"].iter().any(|end| line.ends_with(end));
                assert!(right, "{source}: {line}");
            }
            assert_eq!((seen.out.lines().count(), seen.code), (13, Some(0)), "{seen:?}");
            assert!(seen.out.starts_with("unmapped: BUS\n"), "as natively: {}", seen.out);
        }
        for (way, end) in ALONE {
            let mount = "/defuse-test=memory:,size=4M";
            let run = ["run", "--fork", "deny", "-C", "/defuse-test", "--mount", mount, "--"];
            let mut run = place.command(&run);
            let status = run.args([program, way]).stderr(Stdio::null()).status().unwrap();
            let seen = match (status.code(), status.signal()) {
                (Some(135), _) | (_, Some(libc::SIGBUS)) => "BUS",
                (Some(7), _) => "told",
                _ => "LOST",
            };
            assert_eq!(seen, end, "{way}: {status}");
        }
    });
}

/// A private mapping was a copy: a page that was dropped became zeros, later writes were not seen,
/// and each process had a copy of its own. A mapping beyond the end of a file was memory of the
/// server.
#[test]
fn private_mappings_are_of_the_file_and_no_mapping_goes_beyond_its_end() {
    compare_c("private", include_str!("private.c"), |name, needs, script| {
        compare(name, needs, "passthrough:SRC", script);
        compare(name, needs, "passthrough:SRC,backing=off", script);
        compare(name, needs, "memory:", script);
        compare_with(&["--fork", "server"], name, needs, "passthrough:SRC", script);
    });
    // A process alone has a copy, which knows the bytes of the file, but no later ones.
    compare_compiled(&[], "private", include_str!("private.c"), |_, _, program| {
        let place = TestPlace::new();
        let native = finish(place.command_of(program.as_ref(), &["alone"])).out;
        assert!(native.starts_with("stored o") && native.ends_with("f B\n"), "{native}");
        for policy in ["deny", "reopen"] {
            let mount = "/defuse-test=memory:";
            let run = ["run", "--fork", policy, "-C", "/defuse-test", "--mount", mount, "--"];
            let mut run = place.command(&run);
            assert_eq!(
                {
                    run.args([program, "alone"]);
                    finish(run)
                }
                .out,
                native,
                "{policy}"
            );
        }
    });
}
