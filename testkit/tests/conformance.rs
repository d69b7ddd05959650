//! The quick version of every third-party suite and of real programs, on both backends and on
//! native ext4. The program `conformance` runs longer versions, on every configuration.

use std::path::Path;

use defuse_testkit::mounted;
use defuse_testkit::suites::{CONFIGS, ConformanceSuite, StageConfig, exclusions, run};

/// One test, because the suites share two processors and one set of tools.
#[test]
fn no_case_fails_that_passes_on_native_ext4() {
    if let Some(reason) = mounted::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    // Configurations without a mount are a step of `cargo xtask test`, whose runner is an optimised
    // build.
    let plain: Vec<&StageConfig> = CONFIGS.iter().filter(|config| config.args.is_empty()).collect();
    for suite in [ConformanceSuite::Pjdfstest, ConformanceSuite::Fsx, ConformanceSuite::Programs] {
        if let Err(error) = suite.install() {
            println!("skipped: {}: {error:#}", suite.name());
            continue;
        }
        let fits = |config: &&&StageConfig| suite.runs_on(config);
        let plain: Vec<&StageConfig> = plain.iter().filter(fits).copied().collect();
        let rows = run(suite, &plain, true, &mut |row| println!("{row}")).unwrap();
        for row in rows {
            assert!(row.unexpected.is_empty(), "{row}\n{:#?}", row.unexpected);
        }
    }
}

/// The document lists the exclusions in the same words.
#[test]
fn the_documentation_lists_every_exclusion() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/conformance.md");
    let page = std::fs::read_to_string(page).unwrap();
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = words(&page);
    for exclusion in exclusions::all() {
        assert!(page.contains(exclusion.case), "{}", exclusion.case);
        assert!(page.contains(&words(exclusion.reason)), "the reason of {}", exclusion.case);
    }
}
