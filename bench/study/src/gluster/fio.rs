//! fio: its command line, and its results.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cases::{CaseWork, FioEngine, GlusterCase, IoPattern};
use super::results::RequestLatency;

/// The measurement of a run of fio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FioMeasurement {
    /// Number of requests.
    pub operations: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// CPU time of all jobs, in nanoseconds.
    pub app_ns: u64,
    /// Latency of requests, over all jobs.
    pub latency: RequestLatency,
}

/// Options of every run. Data goes past all caches, as in the paper.
const FIXED: [&str; 10] = [
    "--name=job",
    "--direct=1",
    "--filename_format=job.$jobnum",
    "--allow_file_create=0",
    "--group_reporting=1",
    "--output-format=json",
    "--randrepeat=0",
    "--norandommap",
    "--fallocate=none",
    "--invalidate=0",
];

/// The command line for a case, on the files of [`layout`].
pub fn command(case: &GlusterCase, dir: &Path, file_bytes: u64, time: Duration) -> Vec<OsString> {
    let CaseWork::Io { pattern, block, engine } = case.work else { return Vec::new() };
    let mut words: Vec<OsString> = vec!["fio".into()];
    words.extend(FIXED.map(OsString::from));
    let depth = if engine == FioEngine::Libaio { case.depth } else { 1 };
    words.extend([
        format!("--rw={}", pattern.name()).into(),
        format!("--bs={block}").into(),
        format!("--ioengine={}", engine.name()).into(),
        format!("--numjobs={}", case.jobs).into(),
        format!("--iodepth={depth}").into(),
        format!("--size={file_bytes}").into(),
        "--time_based=1".into(),
        format!("--runtime={}ms", time.as_millis()).into(),
        directory(dir),
    ]);
    words
}

/// The command line that writes a file for each of `jobs` jobs.
pub fn layout(dir: &Path, jobs: u32, file_bytes: u64) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["fio".into()];
    let fixed = FIXED.into_iter().filter(|word| !word.starts_with("--allow_file_create"));
    words.extend(fixed.map(OsString::from));
    words.extend([
        "--rw=write".into(),
        format!("--bs={}", file_bytes.min(1 << 20)).into(),
        "--ioengine=sync".into(),
        format!("--numjobs={jobs}").into(),
        format!("--size={file_bytes}").into(),
        directory(dir),
    ]);
    words
}

fn directory(dir: &Path) -> OsString {
    let mut word = OsString::from("--directory=");
    word.push(dir);
    word
}

/// Parses the output of fio.
///
/// # Errors
///
/// Fails if it is not the output of a run without errors.
pub fn parse(text: &str, case: &GlusterCase) -> Result<FioMeasurement> {
    let CaseWork::Io { pattern, .. } = case.work else { anyhow::bail!("fio does no such work") };
    // Warnings may precede the results.
    let begin = text.find('{').context("fio printed no results")?;
    let value: Value = serde_json::from_str(&text[begin..]).context("the results of fio")?;
    let job = &value["jobs"][0];
    ensure!(job["error"].as_i64() == Some(0), "fio reports error {}", job["error"]);
    let side = match pattern {
        IoPattern::Read | IoPattern::RandRead => &job["read"],
        IoPattern::Write | IoPattern::RandWrite => &job["write"],
    };
    let whole = |value: &Value, name: &str| {
        value[name].as_u64().with_context(|| format!("the results of fio have no {name}"))
    };
    let share = |name: &str| {
        job[name].as_f64().with_context(|| format!("the results of fio have no {name}"))
    };
    // Per cent of the sum of the times of all jobs.
    let cpu = (share("usr_cpu")? + share("sys_cpu")?) / 100.0;
    let run_ns = whole(job, "job_runtime")? as f64 * 1e6;
    let percentile = |name: &str| side["clat_ns"]["percentile"][name].as_u64().unwrap_or(0);
    let outcome = FioMeasurement {
        operations: whole(side, "total_ios")?,
        bytes: whole(side, "io_bytes")?,
        ns: whole(side, "runtime")? * 1_000_000,
        app_ns: (cpu * run_ns) as u64,
        latency: RequestLatency {
            median_ns: percentile("50.000000"),
            p99_ns: percentile("99.000000"),
        },
    };
    ensure!(outcome.operations > 0 && outcome.ns > 0, "fio made no request");
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::super::cases::VolumeKind;
    use super::*;

    fn case(pattern: IoPattern) -> GlusterCase {
        let work = CaseWork::Io { pattern, block: 4096, engine: FioEngine::Libaio };
        GlusterCase { place: VolumeKind::Dist, work, jobs: 16, depth: 32 }
    }

    #[test]
    fn the_results_of_all_jobs_are_added() {
        let text = r#"fio: a warning
            {"jobs": [{"error": 0, "job_runtime": 2000, "usr_cpu": 10.0, "sys_cpu": 15.0,
            "read": {"total_ios": 100, "io_bytes": 409600, "runtime": 1000,
                     "clat_ns": {"percentile": {"50.000000": 7, "99.000000": 9}}},
            "write": {"total_ios": 0, "io_bytes": 0, "runtime": 0}}]}"#;
        let outcome = parse(text, &case(IoPattern::RandRead)).unwrap();
        let latency = RequestLatency { median_ns: 7, p99_ns: 9 };
        let ns = 1_000_000_000;
        let expected =
            FioMeasurement { operations: 100, bytes: 409_600, ns, app_ns: ns / 2, latency };
        assert_eq!(outcome, expected);
        assert!(parse(text, &case(IoPattern::Write)).is_err());
        assert!(
            parse(&text.replace("\"error\": 0", "\"error\": 5"), &case(IoPattern::Read)).is_err()
        );
        assert!(parse("fio: no such file", &case(IoPattern::Read)).is_err());
    }

    #[test]
    fn the_depth_is_that_of_libaio() {
        let words = |engine| {
            let work = CaseWork::Io { pattern: IoPattern::Read, block: 4096, engine };
            let case = GlusterCase { work, ..case(IoPattern::Read) };
            let words = command(&case, Path::new("/d"), 1 << 20, Duration::from_millis(50));
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert!(words(FioEngine::Libaio).contains(&"--iodepth=32".to_owned()));
        assert!(words(FioEngine::Sync).contains(&"--iodepth=1".to_owned()));
        assert!(words(FioEngine::Sync).contains(&"--runtime=50ms".to_owned()));
    }
}
