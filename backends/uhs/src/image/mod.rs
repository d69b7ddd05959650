//! File systems by the path of their image: opening, making and checking them, with errors for people.

mod contents;
mod make;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use defuse_block::{Access, Device, Errno, File, OpenError};
use defuse_fs::source::{Checked, Error, Images, NewImage, Result};

use crate::format::superblock::Unusable;
use crate::{Options, StoreError, Uhs, check, repair};

/// The operations on images of this kind.
pub(crate) struct ImageFiles;

impl Images for ImageFiles {
    fn recognises(&self, image: &Path) -> Result<bool> {
        Ok(contents::of(&*device(image, Access::Read)?).is_some_and(|found| found.is_uhs()))
    }

    fn make(&self, image: &Path, new: &NewImage) -> Result<()> {
        make::make(image, new)
    }

    fn check(&self, image: &Path) -> Result<Checked> {
        let device: Arc<dyn Device> = device(image, Access::Read)?;
        let report = check(&device).map_err(|error| unusable(image, &*device, &error))?;
        let block = u64::from(device.facts().block_size);
        Ok(Checked {
            problems: report.problems.iter().map(ToString::to_string).collect(),
            figures: vec![
                ("inodes", report.inodes),
                ("unfinished_slots", report.unfinished as u64),
                ("size_bytes", report.blocks * block),
                ("free_bytes", report.free_blocks * block),
            ],
        })
    }

    fn repair(&self, image: &Path) -> Result<Vec<String>> {
        let device: Arc<dyn Device> = device(image, Access::ReadWrite)?;
        let repairs = repair(&device, random());
        let repairs = repairs.map_err(|error| unusable(image, &*device, &error))?;
        Ok(repairs.iter().map(ToString::to_string).collect())
    }
}

/// Opens the file system in `image`. Logs what is wrong with it; then it is read-only.
pub(crate) fn open(image: &Path, options: Options) -> Result<Uhs> {
    let access = if options.read_only { Access::Read } else { Access::ReadWrite };
    let device: Arc<dyn Device> = device(image, access)?;
    let opened = Uhs::open(Arc::clone(&device), options, random());
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

/// Random numbers that nobody can guess: the seed comes from the keys of the standard library's hash tables,
/// which the kernel makes.
fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(RandomState::new().hash_one(0))
}

fn device(image: &Path, access: Access) -> Result<Arc<File>> {
    let file = File::open(image, access).map_err(cannot_open)?;
    if !file.is_direct() {
        log::info!("{}: no direct I/O here: it goes through the page cache", image.display());
    }
    Ok(Arc::new(file))
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
        other => format!("{shown}: {other}"),
    };
    Error::Failed(text)
}

impl fmt::Display for contents::Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
