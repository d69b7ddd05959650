//! The size of a row at a scale, its memory, and its estimated duration.

use std::path::Path;

use crate::engine::{EngineJob, RowPhase};
use crate::options::{DeviceChoice, StudyConfig, StudyOptions, StudyScale};
use crate::rows::{PublishedRow, StorageMedia, WorkloadFamily};

const MIB: u64 = 1 << 20;
/// The paper's data and memory (section 4).
const PAPER_DATA: u64 = 60 << 30;
const PAPER_MEMORY: u64 = 4 << 30;
/// Native duration of a cell at scale `small` on the paper's machine.
const SMALL_SECONDS: f64 = 4.0;
/// Memory that the kernel needs for the processes beside data caches: their programs, which are
/// files, too, and tables. It does not shrink with the data.
const PROCESSES: u64 = 24 * MIB;
/// Factor of scale `tiny`: 4 MiB of 60 GiB.
const TINY: f64 = 1.0 / 16384.0;
/// Factor of the file of the random rows at scale `small`: 480 MiB.
const SMALL_FILE: f64 = 1.0 / 128.0;
/// Seconds per cell for creating a file system, mounting and unmounting.
const AROUND_SECONDS: f64 = 2.0;

/// The sizes of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowSizes {
    /// Factor of all sizes and counts.
    pub factor: f64,
    /// Factor of the number of accesses of the random rows.
    pub access_factor: f64,
    /// Limit on caches, including kernel memory for the processes.
    pub caches_bytes: u64,
    /// Initial memory limit of application and daemon together.
    pub memory_limit_bytes: u64,
}

impl RowSizes {
    /// The sizes of row `number`.
    ///
    /// Scale `small` reduces each row to four seconds on the paper's machine. The published
    /// durations differ, from 2 to 55 minutes. Rows of random accesses do fewer accesses to a file
    /// as large as the file of the sequential rows, so that it remains large compared with the
    /// memory.
    pub fn for_row(number: u8, options: &StudyOptions) -> RowSizes {
        let media = media(options);
        let access_factor = match options.scale {
            StudyScale::Tiny => TINY,
            StudyScale::Small => (SMALL_SECONDS / published_seconds(number, media)).min(1.0),
            StudyScale::Paper => 1.0,
        };
        let random = matches!(
            WorkloadFamily::from_row(number),
            WorkloadFamily::RandomReads | WorkloadFamily::RandomWrites
        );
        let factor = match options.scale {
            StudyScale::Small if random => SMALL_FILE,
            _ => access_factor,
        };
        let most = most_created(number, options);
        let (factor, access_factor) = (factor.min(most), access_factor.min(most));
        let share = (PAPER_MEMORY as f64 * factor) as u64;
        RowSizes {
            factor,
            access_factor,
            caches_bytes: (share + PROCESSES) & !4095,
            memory_limit_bytes: (share + PROCESSES + buffers(number)) & !4095,
        }
    }

    /// The job of the engine.
    pub fn job(&self, row: u8, dir: &Path, phase: RowPhase, options: &StudyOptions) -> EngineJob {
        EngineJob {
            row,
            media: media(options),
            factor: self.factor,
            access_factor: self.access_factor,
            dir: dir.to_owned(),
            seed: options.seed,
            phase,
        }
    }
}

/// The largest factor at which a daemon can hold all files of a row open. All configurations create
/// the same number.
fn most_created(number: u8, options: &StudyOptions) -> f64 {
    let creates = WorkloadFamily::from_row(number) == WorkloadFamily::Creates;
    if !creates || !options.configs.iter().any(StudyConfig::holds_inodes_open) {
        return f64::INFINITY;
    }
    // The rest is for other descriptors of a daemon, and for directories.
    options.open_files as f64 * 0.8 / files(number, 1.0) as f64
}

/// The published native duration of a row.
fn published_seconds(number: u8, media: StorageMedia) -> f64 {
    PublishedRow::get(number).map_or(1.0, |row| {
        row.published_operations(media) as f64 / row.published_results(media).native_ops_per_s
    })
}

/// The device whose amounts of work are used.
fn media(options: &StudyOptions) -> StorageMedia {
    match options.device {
        DeviceChoice::Emulated(media) => media,
        DeviceChoice::None => StorageMedia::Ssd,
    }
}

/// Rough size of the buffers of the application's threads; the actual size is measured during the
/// run.
fn buffers(number: u8) -> u64 {
    let io_bytes = [4 << 10, 32 << 10, 128 << 10, MIB][usize::from(number.saturating_sub(1) % 4)];
    match number {
        5..=12 | 17..=20 | 25..=28 | 33..=36 => 32 * io_bytes,
        43 => 600 * MIB,
        44 => 128 * MIB,
        45 => 1200 * MIB,
        _ => io_bytes,
    }
}

/// The estimated requirements of a study.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StudyEstimate {
    /// Approximate duration in seconds.
    pub seconds: f64,
    /// Size of the image, most of which will be used.
    pub image_bytes: u64,
    /// Maximum number of files.
    pub inodes: u64,
}

impl StudyEstimate {
    /// The estimate for all cells.
    pub fn compute(options: &StudyOptions) -> StudyEstimate {
        let sizes = || options.rows.iter().map(|&row| (row, RowSizes::for_row(row, options)));
        let files = sizes().map(|(row, sizes)| files(row, sizes.factor)).max().unwrap_or(0);
        let data = sizes().map(|(row, sizes)| data(row, sizes.factor)).max().unwrap_or(0);
        let inodes = 16_384 + files + files / 4;
        // Inodes, journal, directories, and space that ext4 reserves for root.
        let image_bytes = (data + data / 4 + inodes * 512 + 512 * MIB).next_multiple_of(MIB);
        let cells = |row| f64::from(options.runs_of(row)) * options.configs.len() as f64;
        let seconds = sizes().map(|(row, sizes)| cells(row) * seconds(row, &sizes, options)).sum();
        StudyEstimate { seconds, image_bytes, inodes }
    }
}

/// Duration of one cell in seconds.
pub fn seconds(row: u8, sizes: &RowSizes, options: &StudyOptions) -> f64 {
    let published = published_seconds(row, media(options));
    // Half of the configurations are slower than native, some rows by a factor of five.
    AROUND_SECONDS + sizes.access_factor * published * 1.6 + data(row, sizes.factor) as f64 / 400e6
}

/// Number of files of a row.
fn files(row: u8, factor: f64) -> u64 {
    let paper = match row {
        37..=38 | 41..=42 => 4_000_000,
        39..=40 => 1_000_000,
        43 => 200_000,
        44 => 1_500_000,
        45 => 1_250_000,
        _ => 32,
    };
    ((f64::from(paper) * factor) as u64).max(1_000)
}

/// Size of the data of a row in bytes.
fn data(row: u8, factor: f64) -> u64 {
    let one = match WorkloadFamily::from_row(row) {
        WorkloadFamily::Creates | WorkloadFamily::SmallFileReads | WorkloadFamily::Deletes => 4_096,
        WorkloadFamily::Servers if row == 43 => 160 << 10,
        WorkloadFamily::Servers => 32 << 10,
        _ => return ((PAPER_DATA as f64 * factor) as u64).max(64 * MIB),
    };
    files(row, factor) * one.max(4_096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scale: StudyScale) -> StudyOptions {
        StudyOptions {
            rows: (1..=45).collect(),
            scale,
            configs: ["native", "base", "opt"]
                .map(|name| StudyConfig::from_name(name).unwrap())
                .to_vec(),
            runs: Some(1),
            device: DeviceChoice::Emulated(StorageMedia::Ssd),
            out: "/tmp".into(),
            work: "/tmp".into(),
            seed: 1,
            resume: false,
            program: "defuse".into(),
            kernel_stages: true,
            open_files: 1 << 20,
        }
    }

    #[test]
    fn memory_keeps_the_proportion_of_the_paper() {
        let paper = RowSizes::for_row(1, &options(StudyScale::Paper));
        assert_eq!(paper.factor, 1.0);
        assert!(paper.memory_limit_bytes - PAPER_MEMORY < PAPER_MEMORY / 100);
        let small = RowSizes::for_row(1, &options(StudyScale::Small));
        let share = (small.caches_bytes - PROCESSES) as f64;
        let data = PAPER_DATA as f64 * small.factor;
        assert!((share / data * 15.0 - 1.0).abs() < 0.01);
    }

    #[test]
    fn no_more_files_are_created_than_can_be_open() {
        let mut options = options(StudyScale::Small);
        let all = RowSizes::for_row(37, &options);
        assert!(files(37, all.factor) > 20_000);
        options.open_files = 20_000;
        let fewer = RowSizes::for_row(37, &options);
        assert!((15_000..=16_000).contains(&files(37, fewer.factor)), "{fewer:?}");
        assert_eq!(
            RowSizes::for_row(1, &options).factor,
            RowSizes::for_row(1, &self::options(StudyScale::Small)).factor
        );
        options.configs = vec![StudyConfig::native(), StudyConfig::from_name("default").unwrap()];
        assert_eq!(RowSizes::for_row(37, &options), all);
    }

    #[test]
    fn all_rows_for_three_configurations_fit_into_half_an_hour() {
        let estimate = StudyEstimate::compute(&options(StudyScale::Small));
        assert!((600.0..1800.0).contains(&estimate.seconds), "{} s", estimate.seconds);
        assert!(estimate.image_bytes < 4 << 30, "{} MiB", estimate.image_bytes / MIB);
    }

    #[test]
    fn the_estimate_of_the_published_size_matches() {
        let estimate = StudyEstimate::compute(&options(StudyScale::Paper));
        assert!(estimate.image_bytes > 60 << 30);
        assert!(estimate.inodes > 4_000_000);
    }
}
