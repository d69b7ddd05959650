//! File systems by the path of their image: opening, making, checking, growing and showing them, with errors for
//! people. Each follows the path once.

mod contents;
mod dump;
mod grow;
mod make;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_block::{Access, Device, Errno, File, OpenError, OpenFile, Worker, driver_of};
use defuse_fs::source::{
    Checked, Error, Grown, Growth, Image, Images, NewImage, Newest, Result, Table, Watch,
};

use crate::check::check_watched;
use crate::commit::Rules;
use crate::format::BLOCK;
use crate::format::superblock::Unusable;
use crate::repair::repair_watched;
use crate::{Options, StoreError, Uhs};

pub(crate) use dump::tables;

/// The operations on images of this kind.
pub(crate) struct ImageFiles;

/// An image that is open.
struct Opened {
    path: PathBuf,
    /// `None` for a device of a driver.
    file: Option<OpenFile>,
    device: Arc<dyn Device>,
    watch: Arc<dyn Watch>,
}

impl Images for ImageFiles {
    fn open(
        &self,
        image: &Path,
        writes: bool,
        watch: Arc<dyn Watch>,
    ) -> Result<Option<Box<dyn Image>>> {
        let access = if writes { Access::ReadWrite } else { Access::Read };
        let (file, device) = open_device(image, access)?;
        let contents = contents::of(&*device);
        refuse_short(image, contents, &*device)?;
        let is_uhs = contents.is_some_and(|found| found.is_uhs());
        let opened = || Box::new(Opened { path: image.to_owned(), file, device, watch });
        Ok(is_uhs.then(opened).map(|opened| opened as Box<dyn Image>))
    }

    fn make(&self, image: &Path, new: &NewImage, watch: &dyn Watch) -> Result<()> {
        make::make(image, new, watch)
    }
}

impl Opened {
    fn unusable(&self, error: &StoreError) -> Error {
        unusable(&self.path, &*self.device, error)
    }
}

impl Image for Opened {
    fn check(&self) -> Result<Checked> {
        let report = check_watched(&self.device, &*self.watch);
        let report = report.map_err(|error| self.unusable(&error))?;
        let block = u64::from(self.device.facts().block_size);
        let copies = report.lost_superblocks.iter();
        let copies = copies.map(|block| format!("block {block}: a copy of the superblock is lost"));
        let snapshot = "the snapshot of the last clean end is damaged".to_owned();
        let snapshot = report.has_damaged_snapshot.then_some(snapshot);
        Ok(Checked {
            problems: report
                .problems
                .iter()
                .map(ToString::to_string)
                .chain(copies)
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

    fn repair(&self, newest: Option<Newest>) -> Result<Vec<String>> {
        let repairs = repair_watched(&self.device, newest, random(), &*self.watch);
        let repairs = repairs.map_err(|error| self.unusable(&error))?;
        Ok(repairs.iter().map(ToString::to_string).collect())
    }

    fn grow(&self, growth: &Growth) -> Result<Grown> {
        grow::grow(self, growth)
    }

    fn dump(&self, ino: Option<u64>) -> Result<Vec<Table>> {
        dump::dump(self, ino)
    }
}

/// Opens the file system in `image`. Logs what is wrong with it; then it is read-only.
pub(crate) fn open(image: &Path, options: Options) -> Result<Uhs> {
    let access = if options.read_only { Access::Read } else { Access::ReadWrite };
    let (_, device) = open_device(image, access)?;
    let device = if options.worker { with_worker(image, device)? } else { device };
    let watch = Logged::new(image);
    let opened = Uhs::open_watched(Arc::clone(&device), options, (Rules::ALL, random()), &watch);
    let (fs, problems) = opened.map_err(|error| unusable(image, &*device, &error))?;
    let shown = image.display();
    for problem in &problems {
        log::warn!("uhs:{shown}: {problem}");
    }
    if !problems.is_empty() {
        log::warn!(
            "uhs:{shown} is damaged, and read-only: `defuse fsck --repair {shown}` repairs it"
        );
    }
    Ok(fs)
}

/// Work on an image was ended; `left` says what that leaves.
fn interrupted(image: &Path, left: &str) -> Error {
    Error::Interrupted(format!("{}: interrupted; {left}", image.display()))
}

/// The time between two lines of the log about one mount.
const LOGGED: Duration = Duration::from_secs(5);

/// Tells the log how far a mount is that takes long.
struct Logged<'a> {
    image: &'a Path,
    told: Mutex<Instant>,
}

impl Logged<'_> {
    fn new(image: &Path) -> Logged<'_> {
        Logged { image, told: Mutex::new(Instant::now()) }
    }
}

impl Watch for Logged<'_> {
    fn ends(&self, step: &'static str, done: u64, all: u64) -> bool {
        // Another thread that looks at the clock now tells as much.
        if let Ok(mut told) = self.told.try_lock()
            && told.elapsed() >= LOGGED
        {
            *told = Instant::now();
            let shown = self.image.display();
            log::info!("uhs:{shown}: {step}: {} %", 100 * done / all.max(1));
        }
        false
    }
}

/// The device, whose I/O one thread does from now on.
fn with_worker(image: &Path, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
    let shown = image.display();
    let worker = Worker::over(device).map_err(|errno| {
        Error::Failed(format!(
            "{shown}: no thread for its I/O ({errno}): open it without the option worker"
        ))
    })?;
    log::info!("uhs:{shown}: one thread does its I/O, {}", worker.seat());
    Ok(Arc::new(worker))
}

/// Random numbers that nobody can guess: the seed comes from the keys of the standard library's hash tables,
/// which the kernel makes.
fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(RandomState::new().hash_one(0))
}

/// The device that a driver of this program has for `image`; `None` for a path.
fn driven(image: &Path, access: Access) -> Result<Option<Arc<dyn Device>>> {
    let Some((driver, name)) = driver_of(image.as_os_str()) else { return Ok(None) };
    let device = (driver.open)(name, access).map_err(Error::Failed)?;
    fits_blocks(image, &*device)?;
    Ok(Some(device))
}

/// Fails for a device with larger blocks than those of a file system. Smaller ones are gathered.
fn fits_blocks(image: &Path, device: &dyn Device) -> Result<()> {
    match device.facts().block_size {
        bytes if bytes as usize == BLOCK => Ok(()),
        bytes => Err(Error::Failed(format!(
            "{} has blocks of {bytes} bytes (`blockdev --getss`), and uhs takes devices with blocks of \
             512 to {BLOCK}: format the device with such blocks, or use an image file on it",
            image.display()
        ))),
    }
}

/// Opens a device of a driver, or a file with the device in it.
fn open_device(image: &Path, access: Access) -> Result<(Option<OpenFile>, Arc<dyn Device>)> {
    if let Some(device) = driven(image, access)? {
        return Ok((None, device));
    }
    let file = OpenFile::open(image, access).map_err(cannot_open)?;
    let device = device(&file, image)?;
    Ok((Some(file), device))
}

/// The device in an open file, with the size that it has now.
fn device(file: &OpenFile, image: &Path) -> Result<Arc<dyn Device>> {
    let device: File = file.device().map_err(cannot_open)?;
    if !device.is_direct() {
        log::info!("{}: no direct I/O here: it goes through the page cache", image.display());
    }
    if let Some(note) = device.note() {
        log::info!("{note}");
    }
    fits_blocks(image, &device)?;
    Ok(Arc::new(device))
}

/// The error of a device that cannot be opened, with the next step.
fn cannot_open(error: OpenError) -> Error {
    let next = match &error {
        OpenError::Busy { holder: Some(_), .. } => {
            return Error::Busy(format!("{error} (EBUSY): unmount it, or end that process"));
        }
        OpenError::Busy { holder: None, .. } => {
            return Error::Busy(format!("{error} (EBUSY): `fuser -v` may show by whom"));
        }
        OpenError::OfLoopDevice { device, .. } => {
            let device = device.display();
            return Error::Busy(format!(
                "{error} (EBUSY): use uhs:{device}, or detach it with `losetup --detach {device}`"
            ));
        }
        OpenError::System { path, errno: Errno::NOENT, .. } => {
            format!("make it with `defuse mkfs uhs {} --size 1G`", path.display())
        }
        OpenError::System { errno: Errno::ACCESS | Errno::PERM | Errno::ROFS, .. } => {
            "an image is opened with the rights of the user who mounts it".to_owned()
        }
        OpenError::System { errno: Errno::ISDIR, .. } | OpenError::WrongKind { .. } => {
            "name an image, which `defuse mkfs` makes".to_owned()
        }
        OpenError::System { path, .. } => format!("`ls -l {}` shows what it is", path.display()),
        OpenError::TooSmall { path, .. } => {
            format!("make a file system in it with `defuse mkfs uhs {} --size 1G`", path.display())
        }
        OpenError::NoRing { .. } => return Error::failed(error),
    };
    Error::Failed(format!("{error}; {next}"))
}

/// Fails where the device could not be read for lack of memory: nothing is known about its contents then.
fn refuse_short(
    image: &Path,
    found: Option<contents::Contents>,
    device: &dyn Device,
) -> Result<()> {
    match (found, device.shortage()) {
        (Some(contents::Contents::Unreadable), Some(why)) => {
            Err(Error::Failed(format!("{} cannot be read: {why}", image.display())))
        }
        _ => Ok(()),
    }
}

/// An error, with the limit of this process that is the reason for it.
fn with_limit(error: &StoreError, device: &dyn Device) -> String {
    let is_short = matches!(error, StoreError::Device { errno: Errno::NOMEM, .. });
    match device.shortage() {
        Some(why) if is_short => format!("{error}: {why}"),
        _ => error.to_string(),
    }
}

/// The error of a device that cannot be used as a file system, with its contents and the next step.
fn unusable(image: &Path, device: &dyn Device, error: &StoreError) -> Error {
    let shown = image.display();
    let text = match error {
        StoreError::Unusable(Unusable::Other) => match contents::of(device) {
            None => {
                format!("{shown} is empty: make a file system with `defuse mkfs uhs {shown}`")
            }
            Some(found) => format!("{shown} is no uhs image: it has {found}; use it as such"),
        },
        StoreError::Unusable(Unusable::Newer { .. }) => {
            format!("{shown}: {error}: use the version of defuse that made it, or a newer one")
        }
        StoreError::Unusable(Unusable::Damaged) => {
            format!("{shown}: {error}, in all copies: restore the image from a backup")
        }
        StoreError::Short { blocks, wanted } => {
            let bytes = |blocks: &u64| blocks * u64::from(device.facts().block_size);
            let (has, wants) = (bytes(blocks), bytes(wanted));
            format!(
                "{shown} has {has} bytes and its file system {wants}: it was cut short; restore the rest"
            )
        }
        StoreError::Interrupted => return interrupted(image, "nothing is half done"),
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
    Error::Failed(text)
}

impl fmt::Display for contents::Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use defuse_block::{Driver, Facts, Queue, Ram, Region, add_driver};
    use defuse_fs::source::Unwatched;

    use super::*;

    static DRIVER: Driver = Driver {
        scheme: "uhs-test",
        open: |name, _| {
            static DISK: OnceLock<Ram> = OnceLock::new();
            let disk = DISK.get_or_init(|| Ram::new(4096, 8192)).clone();
            match name {
                "disk" => Ok(Arc::new(disk)),
                "no-queues" => Ok(Arc::new(Short { disk, has_queues: false })),
                "no-regions" => Ok(Arc::new(Short { disk, has_queues: true })),
                "large-blocks" => Ok(Arc::new(Ram::new(8192, 4096))),
                name => Err(format!("there is no {name}")),
            }
        },
    };

    /// A disk for which the process has too little memory.
    struct Short {
        disk: Ram,
        has_queues: bool,
    }

    impl Device for Short {
        fn facts(&self) -> &Facts {
            self.disk.facts()
        }

        fn register(&self, _: &Arc<Region>) -> defuse_block::Result<()> {
            Err(Errno::NOMEM)
        }

        fn queue(&self, depth: u32) -> defuse_block::Result<Box<dyn Queue>> {
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
            let made = ImageFiles.make(image, &new, &Unwatched).unwrap_err();
            assert!(made.to_string().ends_with("raise the limit"), "{name}: {made}");
            let opened = open(image, Options::default()).map(drop).unwrap_err();
            assert!(opened.to_string().ends_with("raise the limit"), "{name}: {opened}");
        }
        let opened = ImageFiles.open(Path::new("uhs-test:no-queues"), true, Arc::new(Unwatched));
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
        let error = |result: Result<()>| result.unwrap_err().to_string();
        assert!(
            ImageFiles.open(disk, false, Arc::new(Unwatched)).unwrap().is_none(),
            "there is nothing yet"
        );
        assert!(
            error(ImageFiles.make(disk, &new(Some(64 << 20)), &Unwatched))
                .contains("leave out --size")
        );
        ImageFiles.make(disk, &new(None), &Unwatched).unwrap();
        assert!(error(ImageFiles.make(disk, &new(None), &Unwatched)).contains("--force"));
        let image = ImageFiles.open(disk, true, Arc::new(Unwatched)).unwrap().unwrap();
        assert_eq!(image.check().unwrap().problems, [""; 0]);
        let grown = image.grow(&Growth::default()).unwrap_err();
        assert!(grown.to_string().contains("does not change"), "{grown}");
        drop(open(disk, Options { commit: None, ..Options::default() }).unwrap());
        let other = ImageFiles.open(Path::new("uhs-test:other"), false, Arc::new(Unwatched));
        assert!(error(other.map(drop)).contains("there is no other"));
    }

    /// Ends the step of this name at its first look.
    struct Ends(&'static str);

    impl Watch for Ends {
        fn ends(&self, step: &'static str, _: u64, _: u64) -> bool {
            step == self.0
        }
    }

    #[test]
    fn work_that_somebody_ends_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let new = NewImage { size: Some(16 << 20), root_perm: 0o755, ..NewImage::default() };
        let is_interrupted = |error: &Error| match error {
            Error::Interrupted(text) => text.contains("image: interrupted"),
            _ => false,
        };
        let ended = ImageFiles.make(&path, &new, &Ends("allocating MiB")).unwrap_err();
        assert!(is_interrupted(&ended) && !path.exists(), "{ended}");
        ImageFiles.make(&path, &new, &Unwatched).unwrap();
        let before = std::fs::read(&path).unwrap();
        let ends = |step| ImageFiles.open(&path, true, Arc::new(Ends(step))).unwrap().unwrap();
        for step in ["reading inodes", "loading inodes"] {
            let image = ends(step);
            for error in [image.check().map(drop), image.dump(None).map(drop)] {
                assert!(is_interrupted(&error.unwrap_err()), "{step}");
            }
        }
        assert!(is_interrupted(&ends("reading inodes").repair(None).unwrap_err()));
        let larger = Growth { size: Some(32 << 20), sparse: false };
        assert!(is_interrupted(&ends("allocating MiB").grow(&larger).unwrap_err()));
        // The file may be longer, and its file system is as it was.
        assert!(std::fs::read(&path).unwrap().starts_with(&before));
        let image = ends("nothing");
        assert_eq!(image.check().unwrap().problems, [""; 0]);
        assert_eq!(image.grow(&larger).unwrap(), Grown { before: 16 << 20, now: 32 << 20 });
    }

    /// A block of the file system is written whole or torn at a sector, and never shares a block of the device.
    #[test]
    fn a_device_with_larger_blocks_is_refused_with_its_size() {
        add_driver(&DRIVER);
        let image = Path::new("uhs-test:large-blocks");
        let new = NewImage { force: true, root_perm: 0o755, ..NewImage::default() };
        let errors = [
            ImageFiles.make(image, &new, &Unwatched).unwrap_err(),
            ImageFiles.open(image, true, Arc::new(Unwatched)).map(drop).unwrap_err(),
            open(image, Options::default()).map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().contains("has blocks of 8192 bytes"), "{error}");
        }
        // Also without a path.
        let device: Arc<dyn Device> = Arc::new(Ram::new(8192, 4096));
        let opened = Uhs::open(device, Options::default(), random());
        assert_eq!(opened.map(drop), Err(StoreError::BlockSize(8192)));
    }
}
