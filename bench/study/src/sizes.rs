//! How large a row is at a scale, how much memory it gets, and what that will take.

use std::path::Path;

use crate::engine::{Job, Phase};
use crate::options::{Config, DeviceChoice, Options, Scale};
use crate::rows::{Family, Media, Row};

const MIB: u64 = 1 << 20;
/// The paper's data and memory (section 4).
const PAPER_DATA: u64 = 60 << 30;
const PAPER_MEMORY: u64 = 4 << 30;
/// How long a cell at scale `small` would take on the paper's machine, natively.
const SMALL_SECONDS: f64 = 4.0;
/// What the kernel needs for the processes beside caches of data: their programs, which are files too, and tables. It does
/// not shrink with the data.
const PROCESSES: u64 = 24 * MIB;
/// Factor of scale `tiny`: 4 MiB of 60 GiB.
const TINY: f64 = 1.0 / 16384.0;
/// Factor of the file of the random rows at scale `small`: 480 MiB.
const SMALL_FILE: f64 = 1.0 / 128.0;
/// Seconds of making a file system, mounting and ending, in a cell.
const AROUND_SECONDS: f64 = 2.0;

/// Sizes of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizes {
    /// Factor of all sizes and counts.
    pub factor: f64,
    /// Factor of the number of accesses of the random rows.
    pub access_factor: f64,
    /// What caches may take, with what the kernel holds for the processes.
    pub caches_bytes: u64,
    /// Memory of application and daemon together, to begin with.
    pub memory_limit_bytes: u64,
}

impl Sizes {
    /// The sizes of row `number`.
    ///
    /// Scale `small` makes each row so small that it would take the paper's machine four seconds: rows differ in how long
    /// they were published to run, from 2 to 55 minutes. Rows of random accesses get their four seconds by fewer accesses
    /// to a file that is as large as that of the sequential ones, so that it stays large against the memory.
    pub fn of(number: u8, options: &Options) -> Sizes {
        let media = media(options);
        let access_factor = match options.scale {
            Scale::Tiny => TINY,
            Scale::Small => (SMALL_SECONDS / published_seconds(number, media)).min(1.0),
            Scale::Paper => 1.0,
        };
        let random = matches!(Family::of(number), Family::RandomReads | Family::RandomWrites);
        let factor = match options.scale {
            Scale::Small if random => SMALL_FILE,
            _ => access_factor,
        };
        let most = most_created(number, options);
        let (factor, access_factor) = (factor.min(most), access_factor.min(most));
        let share = (PAPER_MEMORY as f64 * factor) as u64;
        Sizes {
            factor,
            access_factor,
            caches_bytes: (share + PROCESSES) & !4095,
            memory_limit_bytes: (share + PROCESSES + buffers(number)) & !4095,
        }
    }

    /// What the engine is told.
    pub fn job(&self, row: u8, dir: &Path, phase: Phase, options: &Options) -> Job {
        Job {
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

/// The largest factor at which the files that a row makes can all be open in a daemon that holds them so: all
/// configurations make as many.
fn most_created(number: u8, options: &Options) -> f64 {
    let creates = Family::of(number) == Family::Creates;
    if !creates || !options.configs.iter().any(Config::holds_inodes_open) {
        return f64::INFINITY;
    }
    // The rest is for everything else that a daemon has open, and for directories.
    options.open_files as f64 * 0.8 / files(number, 1.0) as f64
}

/// How long a row was published to run natively.
fn published_seconds(number: u8, media: Media) -> f64 {
    Row::get(number).map_or(1.0, |row| {
        row.published_operations(media) as f64 / row.published(media).native_ops_per_s
    })
}

/// Whose amounts of work are used.
fn media(options: &Options) -> Media {
    match options.device {
        DeviceChoice::Emulated(media) => media,
        DeviceChoice::None => Media::Ssd,
    }
}

/// Buffers of the application's threads, roughly: what they really take is seen when they run.
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

/// What a study will need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Roughly how long it takes.
    pub seconds: f64,
    /// Size of the image, most of which will be used.
    pub image_bytes: u64,
    /// How many files there can be at once.
    pub inodes: u64,
}

impl Estimate {
    /// For everything that was asked for.
    pub fn of(options: &Options) -> Estimate {
        let sizes = || options.rows.iter().map(|&row| (row, Sizes::of(row, options)));
        let files = sizes().map(|(row, sizes)| files(row, sizes.factor)).max().unwrap_or(0);
        let data = sizes().map(|(row, sizes)| data(row, sizes.factor)).max().unwrap_or(0);
        let inodes = 16_384 + files + files / 4;
        // Inodes, journal, directories, and room that ext4 keeps for root.
        let image_bytes = (data + data / 4 + inodes * 512 + 512 * MIB).next_multiple_of(MIB);
        let cells = f64::from(options.runs) * options.configs.len() as f64;
        let seconds = sizes().map(|(row, sizes)| cells * seconds(row, &sizes, options)).sum();
        Estimate { seconds, image_bytes, inodes }
    }
}

/// Seconds of one cell.
pub fn seconds(row: u8, sizes: &Sizes, options: &Options) -> f64 {
    let published = published_seconds(row, media(options));
    // Half of the configurations are slower than native, some rows by a factor of five.
    AROUND_SECONDS + sizes.access_factor * published * 1.6 + data(row, sizes.factor) as f64 / 400e6
}

/// Files of a row.
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

/// Bytes of data that a row has at once.
fn data(row: u8, factor: f64) -> u64 {
    let one = match Family::of(row) {
        Family::Creates | Family::SmallFileReads | Family::Deletes => 4_096,
        Family::Servers if row == 43 => 160 << 10,
        Family::Servers => 32 << 10,
        _ => return ((PAPER_DATA as f64 * factor) as u64).max(64 * MIB),
    };
    files(row, factor) * one.max(4_096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(scale: Scale) -> Options {
        Options {
            rows: (1..=45).collect(),
            scale,
            configs: ["native", "base", "opt"].map(|name| Config::named(name).unwrap()).to_vec(),
            runs: 1,
            device: DeviceChoice::Emulated(Media::Ssd),
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
        let paper = Sizes::of(1, &options(Scale::Paper));
        assert_eq!(paper.factor, 1.0);
        assert!(paper.memory_limit_bytes - PAPER_MEMORY < PAPER_MEMORY / 100);
        let small = Sizes::of(1, &options(Scale::Small));
        let share = (small.caches_bytes - PROCESSES) as f64;
        let data = PAPER_DATA as f64 * small.factor;
        assert!((share / data * 15.0 - 1.0).abs() < 0.01);
    }

    #[test]
    fn no_more_files_are_made_than_can_be_open() {
        let mut options = options(Scale::Small);
        let all = Sizes::of(37, &options);
        assert!(files(37, all.factor) > 20_000);
        options.open_files = 20_000;
        let fewer = Sizes::of(37, &options);
        assert!((15_000..=16_000).contains(&files(37, fewer.factor)), "{fewer:?}");
        assert_eq!(
            Sizes::of(1, &options).factor,
            Sizes::of(1, &self::options(Scale::Small)).factor
        );
        options.configs = vec![Config::native(), Config::named("default").unwrap()];
        assert_eq!(Sizes::of(37, &options), all);
    }

    #[test]
    fn all_rows_for_three_configurations_fit_into_half_an_hour() {
        let estimate = Estimate::of(&options(Scale::Small));
        assert!((600.0..1800.0).contains(&estimate.seconds), "{} s", estimate.seconds);
        assert!(estimate.image_bytes < 4 << 30, "{} MiB", estimate.image_bytes / MIB);
    }

    #[test]
    fn the_published_size_is_estimated_as_published() {
        let estimate = Estimate::of(&options(Scale::Paper));
        assert!(estimate.image_bytes > 60 << 30);
        assert!(estimate.inodes > 4_000_000);
    }
}
