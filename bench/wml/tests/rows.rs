//! The 45 rows and the personalities at a tiny scale: each does exactly the work it should.

use std::path::Path;

use defuse_wml::{
    BuiltinWorkload, LoadOptions, ROWS, RowDevice, RunReport, RunSettings, SystemCallDriver,
    WorkloadPlan, WorkloadRow, builtin, builtins, execute, load,
};

/// Small enough for a test, and large enough for more than one of everything.
const SCALE: f64 = 0.0001;

fn plan(builtin: &BuiltinWorkload, variables: Vec<String>, dir: &Path, scale: f64) -> WorkloadPlan {
    let mut options = LoadOptions { variables, scale, ..LoadOptions::default() };
    options.variables.push(format!("dir=\"{}\"", dir.display()));
    load(builtin.text, builtin.name, &options).unwrap_or_else(|mistake| panic!("{mistake}"))
}

fn run(row: &WorkloadRow) -> (WorkloadPlan, RunReport) {
    let dir = tempfile::tempdir().unwrap();
    let workload = builtin(row.workload).unwrap();
    let plan = plan(workload, row.variables_on(RowDevice::Ssd), dir.path(), SCALE);
    let reports = execute(&plan, &SystemCallDriver, RunSettings::default(), &());
    let mut reports = reports.unwrap_or_else(|failure| panic!("{}: {failure}", row.name));
    (plan, reports.remove(0))
}

fn operations(report: &RunReport, name: &str) -> u64 {
    report.flowop(name).unwrap_or_else(|| panic!("no {name}")).operations
}

/// The number of threads and the I/O size in the name of a row.
fn parse_name(row: &WorkloadRow) -> (u64, u64) {
    let threads = if row.name.contains("32th") { 32 } else { 1 };
    let sizes =
        [("-4KB-", 4 << 10), ("-32KB-", 32 << 10), ("-128KB-", 128 << 10), ("-1MB-", 1 << 20)];
    let size = sizes.iter().find(|(name, _)| row.name.contains(name));
    (threads, size.map_or(0, |(_, size)| *size))
}

#[test]
fn there_are_45_rows_with_the_work_of_the_table() {
    assert_eq!(ROWS.len(), 45);
    let dir = Path::new("/nowhere");
    for (row, number) in ROWS.iter().zip(1..) {
        assert_eq!(row.number, number);
        let workload = builtin(row.workload).unwrap();
        for device in [RowDevice::Hdd, RowDevice::Ssd] {
            // Loading at full size proves that the sizes are consistent.
            plan(workload, row.variables_on(device), dir, 1.0);
        }
    }
    let data = |name: &str| {
        let row = WorkloadRow::find_by_name(name).unwrap();
        plan(builtin(row.workload).unwrap(), row.variables_on(RowDevice::Ssd), dir, 1.0)
            .data_bytes()
    };
    assert_eq!(data("seq-rd-4KB-32th-32f"), 64 << 30);
    assert_eq!(data("rnd-wr-1MB-1th-1f"), 60 << 30);
    assert_eq!(data("files-cr-1th"), 4_000_000 * 4096);
    assert_eq!(data("file-server"), 200_000 * (128 << 10));
    assert_eq!(data("mail-server"), 1_500_000 * (16 << 10));
    assert_eq!(data("web-server"), 1_250_000 * (16 << 10) + (16 << 10));
}

#[test]
fn sequential_reads_read_every_byte_once_for_each_thread() {
    for row in ROWS.iter().filter(|row| row.workload == "seq-rd") {
        let (threads, iosize) = parse_name(row);
        let (plan, report) = run(row);
        let readers = if row.name.contains("-1f") { threads } else { 1 };
        let read = report.flowop("read").unwrap();
        assert_eq!(read.bytes, plan.data_bytes() * readers, "{}", row.name);
        assert_eq!(read.operations, read.bytes / iosize, "{}", row.name);
        assert_eq!(operations(&report, "open"), threads, "{}", row.name);
        assert_eq!(operations(&report, "close"), threads, "{}", row.name);
        assert_eq!(report.total.operations, read.operations + 2 * threads, "{}", row.name);
    }
}

#[test]
fn sequential_writes_write_every_byte_of_every_file() {
    for row in ROWS.iter().filter(|row| row.workload == "seq-wr") {
        let (threads, iosize) = parse_name(row);
        let (plan, report) = run(row);
        let write = report.flowop("write").unwrap();
        assert_eq!(write.bytes, plan.data_bytes(), "{}", row.name);
        assert_eq!(write.operations, write.bytes / iosize, "{}", row.name);
        assert_eq!(operations(&report, "create"), threads, "{}", row.name);
        assert_eq!(operations(&report, "close"), threads, "{}", row.name);
    }
}

#[test]
fn in_random_rows_every_thread_does_its_share_of_operations() {
    let (mut most, mut least) = (0, u64::MAX);
    for row in ROWS.iter().filter(|row| row.workload.starts_with("rnd")) {
        let (threads, iosize) = parse_name(row);
        let (plan, report) = run(row);
        let name = if row.workload == "rnd-rd" { "read" } else { "write" };
        let io = report.flowop(name).unwrap();
        assert_eq!(io.bytes, io.operations * iosize, "{}", row.name);
        assert_eq!(io.operations % threads, 0, "{}", row.name);
        if row.workload == "rnd-rd" && threads == 1 {
            let whole = plan.data_bytes() / iosize;
            assert!(io.operations.abs_diff(whole) <= 1, "{}: {}", row.name, io.operations);
        }
        (most, least) = (most.max(io.operations), least.min(io.operations));
    }
    assert!(least >= 1 && most > 1000);
}

#[test]
fn every_file_of_many_is_created_written_and_closed_exactly_once() {
    for name in ["files-cr-1th", "files-cr-32th"] {
        let (plan, report) = run(WorkloadRow::find_by_name(name).unwrap());
        let files = plan.filesets[0].entries;
        assert_eq!(files, 400);
        for flowop in ["create", "write", "close"] {
            assert_eq!(operations(&report, flowop), files, "{name}: {flowop}");
        }
        assert_eq!(report.total.operations, 3 * files);
        assert_eq!(report.total.bytes, files * 4096);
    }
}

#[test]
fn many_files_are_deleted_exactly_once() {
    for name in ["files-del-1th", "files-del-32th"] {
        let (plan, report) = run(WorkloadRow::find_by_name(name).unwrap());
        assert_eq!(report.total.operations, plan.filesets[0].entries, "{name}");
        assert_eq!(operations(&report, "delete"), 400, "{name}");
    }
}

#[test]
fn reading_many_files_ends_at_the_given_count() {
    let (_, report) = run(WorkloadRow::find_by_name("files-rd-1th").unwrap());
    // 4,000,000 / 10,000; open, read, close and the count itself are 4 operations.
    assert_eq!(operations(&report, "finish"), 101);
    assert_eq!(operations(&report, "read"), 101);
    assert_eq!(report.flowop("read").unwrap().bytes, 101 * 4096);
    let (_, report) = run(WorkloadRow::find_by_name("files-rd-32th").unwrap());
    let all = report.total.operations + operations(&report, "finish");
    assert!((400..400 + 32 * 5).contains(&all), "{all}");
}

#[test]
fn servers_end_at_the_given_count_and_do_the_expected_work() {
    for (name, wanted, threads) in
        [("file-server", 300, 50), ("mail-server", 700, 16), ("web-server", 800, 100)]
    {
        let (_, report) = run(WorkloadRow::find_by_name(name).unwrap());
        let all = report.total.operations + operations(&report, "finish");
        let longest = report.flowops.len() as u64;
        assert!(all >= wanted && all <= wanted + threads * longest, "{name}: {all}");
        for flowop in report.flowops.iter().filter(|flowop| flowop.kind == "readwholefile") {
            assert_eq!(flowop.operations > 0, flowop.bytes > 0, "{name}: {}", flowop.name);
        }
    }
}

#[test]
fn the_personalities_run() {
    for name in ["fileserver", "varmail", "webserver", "webproxy"] {
        let dir = tempfile::tempdir().unwrap();
        let mut plan = plan(builtin(name).unwrap(), vec!["seconds=1".into()], dir.path(), 0.2);
        plan.seed = 3;
        let reports = execute(&plan, &SystemCallDriver, RunSettings::default(), &());
        let reports = reports.unwrap_or_else(|failure| panic!("{name}: {failure}"));
        for flowop in reports[0].flowops.iter().filter(|flowop| flowop.io) {
            assert!(flowop.operations > 0, "{name}: {}", flowop.name);
        }
        let mean = plan.filesets[0].size.mean();
        assert!([131_072.0, 16_384.0].contains(&mean), "{name}: {mean}");
    }
}

#[test]
fn every_workload_has_a_use() {
    for one in builtins() {
        let is_row = ROWS.iter().any(|row| row.workload == one.name);
        assert!(is_row || ["fileserver", "varmail", "webserver", "webproxy"].contains(&one.name));
    }
}
