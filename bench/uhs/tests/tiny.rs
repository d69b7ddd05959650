//! Everything once, small.

use defuse_bench_uhs::results::{FigureRow, table};
use defuse_bench_uhs::{UhsBenchOptions, UhsBenchPart, UhsBenchScale, run};

#[test]
fn every_part_runs_and_gives_figures_for_all_targets() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, for loop devices and mounts");
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let options = UhsBenchOptions {
        scale: UhsBenchScale::tiny(),
        parts: UhsBenchPart::default_parts(),
        rounds: 1,
        work: work.path().to_owned(),
        program: None,
    };
    let mut finished = Vec::new();
    let results =
        run(&options, &mut |_| (), &mut |rows: &[FigureRow]| finished.push(rows.len())).unwrap();
    // Each part reports its rows when it is done.
    assert_eq!(finished.len(), options.parts.len());
    assert_eq!(finished.iter().sum::<usize>(), results.rows.len());
    for name in ["create, one directory", "create, write 1 KiB, fsync; 16 threads"] {
        let row = results.rows.iter().find(|row| row.name == name).unwrap();
        let targets: Vec<&str> = row.figures.keys().map(String::as_str).collect();
        assert_eq!(targets, ["ext4", "uhs", "xfs"], "{name}");
    }
    let finite = |row: &FigureRow| row.figures.values().flatten().all(|figure| figure.is_finite());
    assert!(results.rows.iter().all(finite), "{}", table(&results.rows));
    for (start, targets) in [
        ("table 6", 4),
        ("driver, table 6", 4),
        ("driver, no limits, table 6", 5),
        ("loop device, table 6", 5),
    ] {
        let rows = results.rows.iter().filter(|row| row.name.starts_with(start));
        assert!(rows.clone().count() > 0 && rows.clone().all(|row| row.figures.len() == targets));
    }
    assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn the_separation_of_queues_is_measured_on_a_throttled_drive_of_qemu() {
    let options = UhsBenchOptions {
        scale: UhsBenchScale::tiny(),
        parts: vec![UhsBenchPart::QueuesOnQemu],
        rounds: 1,
        work: std::env::temp_dir(),
        program: None,
    };
    let results = match run(&options, &mut |_| (), &mut |_| ()) {
        Ok(results) => results,
        Err(error) if error.to_string().contains("qemu-system-x86") => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error:?}"),
    };
    // Five workloads at two depths, of which three have small reads.
    assert_eq!(results.rows.len(), 16, "{}", table(&results.rows));
    for row in &results.rows {
        assert_eq!(row.figures.len(), 6, "{row:?}");
        assert!(row.figures.values().flatten().all(|figure| figure.is_finite() && *figure > 0.0));
    }
}

#[test]
fn the_separation_of_queues_is_the_same_every_time() {
    let measured = || {
        let options = UhsBenchOptions {
            scale: UhsBenchScale::tiny(),
            parts: vec![UhsBenchPart::Queues, UhsBenchPart::QueuesOnDriver],
            rounds: 1,
            work: std::env::temp_dir(),
            program: None,
        };
        table(&run(&options, &mut |_| (), &mut |_| ()).unwrap().rows)
    };
    assert_eq!(measured(), measured());
}
