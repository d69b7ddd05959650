//! File systems by the path of their image: opening, making, checking, growing and showing them,
//! with errors for people. Each follows the path once.

mod contents;
mod dump;
mod grow;
mod make;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_block::{
    BlockDevice, DeviceAccess, DeviceOpenError, Errno, FileDevice, OpenDeviceFile, WorkerDevice,
    driver_of,
};
use defuse_fs::source::{
    CheckResult, DumpTable, GrowthResult, ImageGrowth, ImageOperations, NewImage, NewestChanges,
    SourceImage, SourceOpenError, SourceResult, WorkWatch,
};

use crate::check::check_watched;
use crate::commit::CommitRules;
use crate::format::BLOCK;
use crate::format::superblock::{CHUNK_TABLE, PADDED_RECORDS, SuperblockError};
use crate::names::LoadProblem;
use crate::repair::repair_watched;
use crate::{StoreError, Uhs, UhsOptions, store};

pub(crate) use dump::tables;

/// The operations on images of this kind.
pub(crate) struct ImageFiles;

/// An image that is open.
struct OpenImage {
    path: PathBuf,
    /// `None` for a device of a driver.
    file: Option<OpenDeviceFile>,
    device: Arc<dyn BlockDevice>,
    watch: Arc<dyn WorkWatch>,
}

impl ImageOperations for ImageFiles {
    fn open(
        &self,
        image: &Path,
        writes: bool,
        watch: Arc<dyn WorkWatch>,
    ) -> SourceResult<Option<Box<dyn SourceImage>>> {
        let access = if writes { DeviceAccess::ReadWrite } else { DeviceAccess::Read };
        let (file, device) = open_device(image, access)?;
        let contents = contents::detect(&*device);
        refuse_short(image, contents, &*device)?;
        let is_uhs = contents.is_some_and(|found| found.is_uhs());
        let opened = || Box::new(OpenImage { path: image.to_owned(), file, device, watch });
        Ok(is_uhs.then(opened).map(|opened| opened as Box<dyn SourceImage>))
    }

    fn make(&self, image: &Path, new: &NewImage, watch: &dyn WorkWatch) -> SourceResult<()> {
        make::make(image, new, watch)
    }
}

/// The features of the format, as SPEC.md names them.
const FEATURE_NAMES: [(u64, &str); 2] =
    [(PADDED_RECORDS, "padded records"), (CHUNK_TABLE, "table of chunks")];

impl OpenImage {
    fn unusable(&self, error: &StoreError) -> SourceOpenError {
        unusable(&self.path, &*self.device, error)
    }
}

impl SourceImage for OpenImage {
    fn check(&self) -> SourceResult<CheckResult> {
        let report = check_watched(&self.device, &*self.watch);
        let report = report.map_err(|error| self.unusable(&error))?;
        let block = u64::from(self.device.properties().block_size);
        let copies = report.lost_superblocks.iter();
        let copies = copies.map(|block| format!("block {block}: a copy of the superblock is lost"));
        let tables = report.lost_tables.iter();
        let tables =
            tables.map(|block| format!("block {block}: a copy of a list of inode slots is lost"));
        let snapshot = "the snapshot of the last clean end is damaged".to_owned();
        let snapshot = report.has_damaged_snapshot.then_some(snapshot);
        Ok(CheckResult {
            problems: report
                .problems
                .iter()
                .map(ToString::to_string)
                .chain(copies)
                .chain(tables)
                .chain(snapshot)
                .collect(),
            figures: vec![
                ("inodes", report.inodes),
                ("unfinished_slots", report.unfinished as u64),
                ("unfinished_superblocks", report.unfinished_superblocks.len() as u64),
                ("size_bytes", report.blocks * block),
                ("free_bytes", report.free_blocks * block),
            ],
        })
    }

    fn repair(&self, newest: Option<NewestChanges>) -> SourceResult<Vec<String>> {
        let repairs = repair_watched(&self.device, newest, random(), &*self.watch);
        let repairs = repairs.map_err(|error| self.unusable(&error))?;
        Ok(repairs.iter().map(ToString::to_string).collect())
    }

    fn upgrade(&self) -> SourceResult<Vec<&'static str>> {
        let report = check_watched(&self.device, &*self.watch);
        let report = report.map_err(|error| self.unusable(&error))?;
        if !report.problems.is_empty() {
            let shown = self.path.display();
            return Err(SourceOpenError::Failed(format!(
                "{shown} is damaged: upgrade it after `defuse fsck --repair {shown}`"
            )));
        }
        let lacking = store::upgrade(&*self.device).map_err(|error| self.unusable(&error))?;
        Ok(FEATURE_NAMES
            .into_iter()
            .filter(|(feature, _)| lacking & feature != 0)
            .map(|(_, name)| name)
            .collect())
    }

    fn grow(&self, growth: &ImageGrowth) -> SourceResult<GrowthResult> {
        grow::grow(self, growth)
    }

    fn dump(&self, ino: Option<u64>) -> SourceResult<Vec<DumpTable>> {
        dump::dump(self, ino)
    }
}

/// Opens the file system in `image`. Logs its problems; if there are any, it is read-only.
pub(crate) fn open(image: &Path, options: UhsOptions) -> SourceResult<Uhs> {
    let access = if options.read_only { DeviceAccess::Read } else { DeviceAccess::ReadWrite };
    let (_, device) = open_device(image, access)?;
    // A manager opens the file that it holds already. People know it by its name.
    let named = std::fs::read_link(image).ok().filter(|_| image.starts_with("/proc/self/fd"));
    let image = named.as_deref().unwrap_or(image);
    let device = if options.worker { with_worker(image, device)? } else { device };
    let watch = ProgressLogger::new(image);
    let opened =
        Uhs::open_watched(Arc::clone(&device), options, (CommitRules::ALL, random()), &watch);
    let (fs, problems) = opened.map_err(|error| unusable(image, &*device, &error))?;
    let shown = image.display();
    for problem in &problems {
        log::warn!("uhs:{shown}: {problem}");
    }
    if problems.contains(&LoadProblem::NoRoot) {
        return Err(SourceOpenError::Failed(format!(
            "{shown} has no root directory that can be read, so that no file can be reached: \
             `defuse fsck --repair {shown}` makes one, and keeps the files"
        )));
    }
    if !problems.is_empty() {
        log::warn!(
            "uhs:{shown} is damaged, and read-only: `defuse fsck --repair {shown}` repairs it"
        );
    }
    Ok(fs)
}

/// The error of interrupted work on an image; `left` describes the state of the image.
fn interruption_error(image: &Path, left: &str) -> SourceOpenError {
    SourceOpenError::Interrupted(format!("{}: interrupted; {left}", image.display()))
}

/// The time between two lines of the log about one mount.
const LOGGED: Duration = Duration::from_secs(5);

/// Logs the progress of a mount that takes long.
struct ProgressLogger<'a> {
    image: &'a Path,
    reported: Mutex<Instant>,
}

impl ProgressLogger<'_> {
    fn new(image: &Path) -> ProgressLogger<'_> {
        ProgressLogger { image, reported: Mutex::new(Instant::now()) }
    }
}

impl WorkWatch for ProgressLogger<'_> {
    fn report_progress(&self, step: &'static str, done: u64, all: u64) -> bool {
        // A thread that holds this lock now logs the same progress.
        if let Ok(mut reported) = self.reported.try_lock()
            && reported.elapsed() >= LOGGED
        {
            *reported = Instant::now();
            let shown = self.image.display();
            log::info!("uhs:{shown}: {step}: {} %", 100 * done / all.max(1));
        }
        false
    }
}

/// Wraps the device so that one thread performs all its I/O.
fn with_worker(image: &Path, device: Arc<dyn BlockDevice>) -> SourceResult<Arc<dyn BlockDevice>> {
    let shown = image.display();
    let worker = WorkerDevice::start_for(device).map_err(|errno| {
        SourceOpenError::Failed(format!(
            "{shown}: no thread for its I/O ({errno}): open it without the option worker"
        ))
    })?;
    log::info!("uhs:{shown}: one thread does its I/O, {}", worker.placement());
    Ok(Arc::new(worker))
}

/// An unpredictable generator of random numbers: the seed comes from the keys of the standard
/// library's hash tables, which the kernel generates.
fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(RandomState::new().hash_one(0))
}

/// The device that a driver of this program has for `image`; `None` for a path.
fn open_driven(image: &Path, access: DeviceAccess) -> SourceResult<Option<Arc<dyn BlockDevice>>> {
    let Some((driver, name)) = driver_of(image.as_os_str()) else { return Ok(None) };
    let device = (driver.open)(name, access).map_err(SourceOpenError::Failed)?;
    check_block_size(image, &*device)?;
    Ok(Some(device))
}

/// Fails if the blocks of the device are larger than the blocks of a file system. Smaller blocks
/// are gathered.
fn check_block_size(image: &Path, device: &dyn BlockDevice) -> SourceResult<()> {
    match device.properties().block_size {
        bytes if bytes as usize == BLOCK => Ok(()),
        bytes => Err(SourceOpenError::Failed(format!(
            "{} has blocks of {bytes} bytes (`blockdev --getss`), and uhs takes devices with blocks of \
             512 to {BLOCK}: format the device with such blocks, or use an image file on it",
            image.display()
        ))),
    }
}

/// Opens a device of a driver, or a file with the device in it.
fn open_device(
    image: &Path,
    access: DeviceAccess,
) -> SourceResult<(Option<OpenDeviceFile>, Arc<dyn BlockDevice>)> {
    if let Some(device) = open_driven(image, access)? {
        return Ok((None, device));
    }
    let file = OpenDeviceFile::open(image, access).map_err(open_error)?;
    let device = device(&file, image)?;
    Ok((Some(file), device))
}

/// The device in an open file, with the size that it has now.
fn device(file: &OpenDeviceFile, image: &Path) -> SourceResult<Arc<dyn BlockDevice>> {
    let device: FileDevice = file.device().map_err(open_error)?;
    if !device.is_direct() {
        log::info!("{}: no direct I/O here: it goes through the page cache", image.display());
    }
    if let Some(note) = device.note() {
        log::info!("{note}");
    }
    check_block_size(image, &device)?;
    Ok(Arc::new(device))
}

/// The error of a device that cannot be opened, with the next step.
fn open_error(error: DeviceOpenError) -> SourceOpenError {
    let next = match &error {
        DeviceOpenError::Busy { holder: Some(_), .. } => {
            return SourceOpenError::Busy(format!(
                "{error} (EBUSY): unmount it, or end that process"
            ));
        }
        DeviceOpenError::Busy { holder: None, .. } => {
            return SourceOpenError::Busy(format!("{error} (EBUSY): `fuser -v` may show by whom"));
        }
        DeviceOpenError::OfLoopDevice { device, .. } => {
            let device = device.display();
            return SourceOpenError::Busy(format!(
                "{error} (EBUSY): use uhs:{device}, or detach it with `losetup --detach {device}`"
            ));
        }
        DeviceOpenError::System { path, errno: Errno::NOENT, .. } => {
            format!("make it with `defuse mkfs uhs {} --size 1G`", path.display())
        }
        DeviceOpenError::System { errno: Errno::ACCESS | Errno::PERM | Errno::ROFS, .. } => {
            "an image is opened with the rights of the user who mounts it".to_owned()
        }
        DeviceOpenError::System { errno: Errno::ISDIR, .. } | DeviceOpenError::WrongKind { .. } => {
            "name an image, which `defuse mkfs` makes".to_owned()
        }
        DeviceOpenError::System { path, .. } => {
            format!("`ls -l {}` shows what it is", path.display())
        }
        DeviceOpenError::TooSmall { path, .. } => {
            format!("make a file system in it with `defuse mkfs uhs {} --size 1G`", path.display())
        }
        DeviceOpenError::NoRing { .. } => return SourceOpenError::from_error(error),
    };
    SourceOpenError::Failed(format!("{error}; {next}"))
}

/// Fails where the device could not be read for lack of memory: nothing is known about its contents
/// then.
fn refuse_short(
    image: &Path,
    found: Option<contents::DeviceContents>,
    device: &dyn BlockDevice,
) -> SourceResult<()> {
    match (found, device.shortage()) {
        (Some(contents::DeviceContents::Unreadable), Some(why)) => {
            Err(SourceOpenError::Failed(format!("{} cannot be read: {why}", image.display())))
        }
        _ => Ok(()),
    }
}

/// An error, with the limit of this process that is the reason for it.
fn with_limit(error: &StoreError, device: &dyn BlockDevice) -> String {
    let is_short = matches!(error, StoreError::Device { errno: Errno::NOMEM, .. });
    match device.shortage() {
        Some(why) if is_short => format!("{error}: {why}"),
        _ => error.to_string(),
    }
}

/// The error of a device that cannot be used as a file system, with its contents and the next step.
fn unusable(image: &Path, device: &dyn BlockDevice, error: &StoreError) -> SourceOpenError {
    let shown = image.display();
    let text = match error {
        StoreError::Unusable(SuperblockError::Other) => match contents::detect(device) {
            None => {
                format!("{shown} is empty: make a file system with `defuse mkfs uhs {shown}`")
            }
            Some(found) => format!("{shown} is no uhs image: it has {found}; use it as such"),
        },
        StoreError::Unusable(SuperblockError::Newer { .. }) => {
            format!("{shown}: {error}: use the version of defuse that made it, or a newer one")
        }
        StoreError::Unusable(SuperblockError::Table { .. }) => {
            format!("{shown}: {error}: restore the image from a backup")
        }
        StoreError::Unusable(SuperblockError::Damaged) => {
            format!("{shown}: {error}, in all copies: restore the image from a backup")
        }
        StoreError::Short { blocks, wanted } => {
            let bytes = |blocks: &u64| blocks * u64::from(device.properties().block_size);
            let (has, wants) = (bytes(blocks), bytes(wanted));
            format!(
                "{shown} has {has} bytes and its file system {wants}: it was cut short; restore the rest"
            )
        }
        StoreError::Interrupted => return interruption_error(image, "nothing is half done"),
        StoreError::Index { bytes, .. } | StoreError::Space { bytes, .. } => {
            format!(
                "{shown}: {error}: use `-o index={bytes}` or more, on a machine that has so much"
            )
        }
        StoreError::Doubtful(doubt) => format!(
            "{shown}: {doubt}\nNothing was changed. `defuse fsck --repair --newest keep {shown}` keeps what can \
             be read of these changes, and `--newest undo` undoes them; copy the image first if it matters"
        ),
        other => format!("{shown}: {}", with_limit(other, device)),
    };
    SourceOpenError::Failed(text)
}

impl fmt::Display for contents::DeviceContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use defuse_block::{
        DeviceDriver, DeviceProperties, DeviceQueue, MemoryRegion, RamDevice, add_driver,
    };
    use defuse_fs::source::NoWatch;

    use super::*;

    static DRIVER: DeviceDriver = DeviceDriver {
        scheme: "uhs-test",
        open: |name, _| {
            static DISK: OnceLock<RamDevice> = OnceLock::new();
            let disk = DISK.get_or_init(|| RamDevice::new(4096, 8192)).clone();
            match name {
                "disk" => Ok(Arc::new(disk)),
                "no-queues" => Ok(Arc::new(LowMemoryDisk { disk, has_queues: false })),
                "no-regions" => Ok(Arc::new(LowMemoryDisk { disk, has_queues: true })),
                "large-blocks" => Ok(Arc::new(RamDevice::new(8192, 4096))),
                name => Err(format!("there is no {name}")),
            }
        },
    };

    /// A disk whose process has too little memory.
    struct LowMemoryDisk {
        disk: RamDevice,
        has_queues: bool,
    }

    impl BlockDevice for LowMemoryDisk {
        fn properties(&self) -> &DeviceProperties {
            self.disk.properties()
        }

        fn register(&self, _: &Arc<MemoryRegion>) -> defuse_block::Result<()> {
            Err(Errno::NOMEM)
        }

        fn queue(&self, depth: u32) -> defuse_block::Result<Box<dyn DeviceQueue>> {
            if self.has_queues { self.disk.queue(depth) } else { Err(Errno::NOMEM) }
        }

        fn shortage(&self) -> Option<String> {
            Some("raise the limit".to_owned())
        }
    }

    #[test]
    fn a_limit_of_memory_is_named_with_the_next_step() {
        add_driver(&DRIVER);
        for name in ["no-queues", "no-regions"] {
            let image = format!("uhs-test:{name}");
            let image = Path::new(&image);
            let new = NewImage { force: true, root_perm: 0o755, ..NewImage::default() };
            let made = ImageFiles.make(image, &new, &NoWatch).unwrap_err();
            assert!(made.to_string().ends_with("raise the limit"), "{name}: {made}");
            let opened = open(image, UhsOptions::default()).map(drop).unwrap_err();
            assert!(opened.to_string().ends_with("raise the limit"), "{name}: {opened}");
        }
        let opened = ImageFiles.open(Path::new("uhs-test:no-queues"), true, Arc::new(NoWatch));
        let error = opened.map(drop).unwrap_err().to_string();
        assert!(error.ends_with("uhs-test:no-queues cannot be read: raise the limit"), "{error}");
    }

    #[test]
    fn a_device_of_a_driver_is_an_image() {
        add_driver(&DRIVER);
        let disk = Path::new("uhs-test:disk");
        let new = |size| NewImage {
            size,
            sparse: false,
            force: false,
            root_perm: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        let error = |result: SourceResult<()>| result.unwrap_err().to_string();
        assert!(
            ImageFiles.open(disk, false, Arc::new(NoWatch)).unwrap().is_none(),
            "there is nothing yet"
        );
        assert!(
            error(ImageFiles.make(disk, &new(Some(64 << 20)), &NoWatch))
                .contains("leave out --size")
        );
        ImageFiles.make(disk, &new(None), &NoWatch).unwrap();
        assert!(error(ImageFiles.make(disk, &new(None), &NoWatch)).contains("--force"));
        let image = ImageFiles.open(disk, true, Arc::new(NoWatch)).unwrap().unwrap();
        assert_eq!(image.check().unwrap().problems, [""; 0]);
        let grown = image.grow(&ImageGrowth::default()).unwrap_err();
        assert!(grown.to_string().contains("does not change"), "{grown}");
        drop(open(disk, UhsOptions { commit: None, ..UhsOptions::default() }).unwrap());
        let other = ImageFiles.open(Path::new("uhs-test:other"), false, Arc::new(NoWatch));
        assert!(error(other.map(drop)).contains("there is no other"));
    }

    /// Ends the step of this name at its first look.
    struct StepInterrupt(&'static str);

    impl WorkWatch for StepInterrupt {
        fn report_progress(&self, step: &'static str, _: u64, _: u64) -> bool {
            step == self.0
        }
    }

    #[test]
    fn work_that_somebody_ends_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let new = NewImage { size: Some(16 << 20), root_perm: 0o755, ..NewImage::default() };
        let is_interrupted = |error: &SourceOpenError| match error {
            SourceOpenError::Interrupted(text) => text.contains("image: interrupted"),
            _ => false,
        };
        let ended = ImageFiles.make(&path, &new, &StepInterrupt("allocating MiB")).unwrap_err();
        assert!(is_interrupted(&ended) && !path.exists(), "{ended}");
        ImageFiles.make(&path, &new, &NoWatch).unwrap();
        let before = std::fs::read(&path).unwrap();
        let ends =
            |step| ImageFiles.open(&path, true, Arc::new(StepInterrupt(step))).unwrap().unwrap();
        for step in ["reading inodes", "loading inodes"] {
            let image = ends(step);
            for error in [image.check().map(drop), image.dump(None).map(drop)] {
                assert!(is_interrupted(&error.unwrap_err()), "{step}");
            }
        }
        assert!(is_interrupted(&ends("reading inodes").repair(None).unwrap_err()));
        let larger = ImageGrowth { size: Some(32 << 20), sparse: false };
        assert!(is_interrupted(&ends("allocating MiB").grow(&larger).unwrap_err()));
        // The file may be longer, and its file system is as it was.
        assert!(std::fs::read(&path).unwrap().starts_with(&before));
        let image = ends("nothing");
        assert_eq!(image.check().unwrap().problems, [""; 0]);
        assert_eq!(image.grow(&larger).unwrap(), GrowthResult { before: 16 << 20, now: 32 << 20 });
    }

    /// A block of the file system is written whole or torn at a sector, and never shares a block of
    /// the device.
    #[test]
    fn a_device_with_larger_blocks_is_refused_with_its_size() {
        add_driver(&DRIVER);
        let image = Path::new("uhs-test:large-blocks");
        let new = NewImage { force: true, root_perm: 0o755, ..NewImage::default() };
        let errors = [
            ImageFiles.make(image, &new, &NoWatch).unwrap_err(),
            ImageFiles.open(image, true, Arc::new(NoWatch)).map(drop).unwrap_err(),
            open(image, UhsOptions::default()).map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().contains("has blocks of 8192 bytes"), "{error}");
        }
        // A device without a path is refused, too.
        let device: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(8192, 4096));
        let opened = Uhs::open(device, UhsOptions::default(), random());
        assert_eq!(opened.map(drop), Err(StoreError::BlockSize(8192)));
    }
}
