//! Third-party suites under `defuse run`: Python's own tests about files, and fio, with their
//! working directory in a mount and natively for comparison. With `DEFUSE_FULL=1` all modules run
//! on all mounts, and fio uses files of 256 MiB; otherwise only fast ones run.

use std::path::Path;

use defuse_testkit::inside::{
    EXCLUSIONS, MOUNTS, PYTHON, ProgramPlace, fio, has, python, python_failures, python_tests,
};

fn is_full() -> bool {
    std::env::var_os("DEFUSE_FULL").is_some()
}

#[test]
fn python_passes_its_own_tests_as_natively() {
    let Some(python) = python() else {
        println!("skipped: no Python with the package `test` (libpython3.*-testsuite)");
        return;
    };
    let mut unexpected = Vec::new();
    for (at, module) in PYTHON.into_iter().enumerate() {
        // The first module on every mount; slow modules only with DEFUSE_FULL.
        let mounts = match at {
            _ if is_full() => &MOUNTS[..],
            0..4 => &MOUNTS[..],
            4..8 => &MOUNTS[..1],
            _ => continue,
        };
        let native = python_tests(&python, module, ProgramPlace::Native).unwrap();
        for mount in mounts {
            let new = python_failures(&python, module, &native, *mount).unwrap();
            println!("{module} on {}: {} tests, {} unexpected", mount.0, native.ran, new.len());
            unexpected.extend(new.into_iter().map(|case| format!("{case} on {}", mount.0)));
        }
    }
    assert!(unexpected.is_empty(), "{unexpected:#?}");
}

#[test]
fn fio_verifies_its_data_with_every_engine() {
    if !has("fio") {
        println!("skipped: fio is not installed");
        return;
    }
    let size = if is_full() { "256m" } else { "8m" };
    for engine in ["psync", "pvsync", "pvsync2", "mmap", "posixaio", "libaio", "io_uring"] {
        if let Some(why) = fio(ProgramPlace::Native, engine, size).unwrap() {
            println!("not here: {engine}: {why}");
            continue;
        }
        for (name, source) in MOUNTS {
            let said = fio(ProgramPlace::Mount(source), engine, size).unwrap();
            println!("{engine} on {name}: {said:?}");
            // I/O that the kernel performs needs a backing descriptor; without one, programs get an
            // error.
            let by_kernel = ["libaio", "io_uring"].contains(&engine) && name != "passthrough";
            match said {
                Some(said) if by_kernel => {
                    assert!(said.contains("Function not implemented"), "{said}");
                }
                Some(said) => panic!("{engine} on {name}: {said}"),
                None => assert!(!by_kernel, "{engine} on {name} wrote somewhere else"),
            }
        }
    }
}

/// The document lists the exclusions in the same words.
#[test]
fn the_documentation_lists_every_exclusion() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/conformance.md");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = words(&std::fs::read_to_string(page).unwrap());
    for exclusion in EXCLUSIONS {
        assert!(page.contains(exclusion.case), "{}", exclusion.case);
        assert!(page.contains(&words(exclusion.reason)), "the reason of {}", exclusion.case);
    }
}
