//! The file systems that are measured, each on a loop device of its own.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use defuse_block::{DeviceAccess, FileDevice};
use defuse_direct::{ClientMountArgs, DirectClient};
use defuse_measure::command;
use defuse_measure::loop_device::ImageLoopDevice;
use defuse_uhs::Uhs;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::UhsBenchOptions;
use crate::files::{InProcessFiles, KernelFiles, NAME, TimedFiles};

/// Bytes of a block and of a sector.
pub(crate) const BLOCK: u32 = 4096;

/// The kinds of file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UhsBenchTarget {
    /// mkfs.ext4(8).
    Ext4,
    /// mkfs.xfs(8).
    Xfs,
    /// This project's, inside of this process.
    Uhs,
}

impl UhsBenchTarget {
    pub(crate) const ALL: [UhsBenchTarget; 3] =
        [UhsBenchTarget::Ext4, UhsBenchTarget::Xfs, UhsBenchTarget::Uhs];

    pub(crate) fn name(self) -> &'static str {
        match self {
            UhsBenchTarget::Ext4 => "ext4",
            UhsBenchTarget::Xfs => "xfs",
            UhsBenchTarget::Uhs => "uhs",
        }
    }
}

/// Memory for images, and a device in it.
pub(crate) struct TargetStage {
    device: Option<ImageLoopDevice>,
    mountpoint: PathBuf,
    ram: PathBuf,
    work: ImageDirectory,
}

/// A directory that goes with its value.
struct ImageDirectory(PathBuf);

impl Drop for ImageDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl TargetStage {
    pub(crate) fn new(options: &UhsBenchOptions) -> Result<TargetStage> {
        let name = format!("defuse-bench-uhs-{}-{:016x}", std::process::id(), fastrand::u64(..));
        let work = options.work.join(name);
        // No other user may put anything below: this process is root.
        let made = fs::DirBuilder::new().mode(0o700).create(&work);
        made.with_context(|| format!("cannot make {}", work.display()))?;
        let work = ImageDirectory(work);
        let (ram, mountpoint) = (work.0.join("ram"), work.0.join("mnt"));
        fs::create_dir(&ram)?;
        fs::create_dir(&mountpoint)?;
        // A slot for each file, the data, and as much again for copies of inodes on the way.
        let of_names = options.scale.files as u64 * 3 * u64::from(BLOCK);
        let bytes =
            (of_names + options.scale.data_bytes * 3 + (512 << 20)).next_multiple_of(1 << 21);
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        // The image, and a copy of the part that is in use.
        let size = std::ffi::CString::new(format!("size={}", 2 * bytes))?;
        rustix::mount::mount("tmpfs", &ram, "tmpfs", flags, size.as_c_str())
            .context("cannot mount a tmpfs: be root")?;
        let mut stage = TargetStage { device: None, mountpoint, ram, work };
        let image = stage.ram.join("image");
        stage.device = Some(ImageLoopDevice::create(&image, bytes, BLOCK)?);
        fill(&image, bytes)?;
        Ok(stage)
    }

    pub(crate) fn device(&self) -> Result<&ImageLoopDevice> {
        self.device.as_ref().context("the device is gone")
    }

    /// The node of the device.
    pub(crate) fn node(&self) -> Result<&Path> {
        Ok(self.device()?.node())
    }

    /// A directory for small files, not on the device.
    pub(crate) fn scratch(&self) -> Result<PathBuf> {
        let dir = self.work.0.join("scratch");
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Where file systems are mounted.
    pub(crate) fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Bytes that were written to the device since it was made.
    pub(crate) fn bytes_written(&self) -> Result<u64> {
        sectors(self.device()?, 6)
    }

    /// Makes an empty file system of a kind, and calls `work` with it mounted.
    pub(crate) fn with<T>(
        &mut self,
        target: UhsBenchTarget,
        work: impl FnOnce(&TargetStage, &dyn TimedFiles) -> Result<T>,
    ) -> Result<T> {
        self.device()?.wait_until_free()?;
        let node = self.node()?.to_owned();
        let node = node.to_string_lossy();
        match target {
            UhsBenchTarget::Ext4 => {
                let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
                let files = ["-q", "-F", "-b", "4096", "-i", "8192", "-E", options, &node];
                command::output("mkfs.ext4", &files)?;
            }
            UhsBenchTarget::Xfs => {
                command::output("mkfs.xfs", &["-q", "-f", "-K", &node])?;
            }
            UhsBenchTarget::Uhs => return self.with_uhs(with_much_memory(), work),
        }
        rustix::mount::mount(
            self.node()?,
            &self.mountpoint,
            target.name(),
            MountFlags::empty(),
            None::<&std::ffi::CStr>,
        )
        .with_context(|| format!("cannot mount {}", target.name()))?;
        let done = work(self, &KernelFiles::new(&self.mountpoint)?);
        rustix::mount::unmount(&self.mountpoint, UnmountFlags::empty())?;
        done
    }

    /// Makes an empty uhs, and calls `work` with it opened by `options`.
    pub(crate) fn with_uhs<T>(
        &mut self,
        options: defuse_uhs::UhsOptions,
        work: impl FnOnce(&TargetStage, &dyn TimedFiles) -> Result<T>,
    ) -> Result<T> {
        let mut random = fastrand::Rng::new();
        {
            let device = Arc::new(FileDevice::open(self.node()?, DeviceAccess::ReadWrite)?);
            Uhs::make(device, (0o755, 0, 0), &mut random)?;
        }
        // The kernel ends an io_uring, which holds the device, a moment after its close.
        self.device()?.wait_until_free()?;
        let device = Arc::new(FileDevice::open(self.node()?, DeviceAccess::ReadWrite)?);
        let (uhs, problems) = Uhs::open(device, options, random)?;
        anyhow::ensure!(problems.is_empty(), "the new file system is damaged: {problems:?}");
        let client = Arc::new(DirectClient::new(Default::default()));
        client.mount(NAME, Arc::new(uhs), &ClientMountArgs::default())?;
        let done = work(self, &InProcessFiles::new(Arc::clone(&client))?);
        client.unmount(NAME, false)?;
        done
    }
}

/// Options with memory for pages as the others have it: the kernel caches them in all memory, and
/// lets a tenth of that wait for the device before it begins to write (vm.dirty_background_ratio in
/// Documentation/admin-guide/sysctl/vm.rst).
fn with_much_memory() -> defuse_uhs::UhsOptions {
    let info = rustix::system::sysinfo();
    let pages = (info.totalram as usize).saturating_mul(info.mem_unit as usize) / BLOCK as usize;
    defuse_uhs::UhsOptions {
        cache_pages: pages / 4,
        dirty_pages: pages / 10,
        ..defuse_uhs::UhsOptions::default()
    }
}

/// Writes all of the image once: memory that is used first costs more than the write, above all on
/// a virtual machine whose host gives it then. File systems that write more places would pay for
/// the memory of the device.
fn fill(image: &Path, bytes: u64) -> Result<()> {
    let file = fs::OpenOptions::new().write(true).open(image)?;
    let zeros = vec![0; 1 << 20];
    for at in (0..bytes).step_by(zeros.len()) {
        let len = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(zeros.len());
        file.write_all_at(&zeros[..len], at).context("cannot fill the image")?;
    }
    Ok(())
}

/// Bytes in a field of sectors of a device (Documentation/block/stat.rst of the kernel).
pub(crate) fn sectors(device: &ImageLoopDevice, field: usize) -> Result<u64> {
    let text = fs::read_to_string(format!("/sys/block/{}/stat", device.name()))?;
    let sectors = text.split_whitespace().nth(field).context("stat has a field of sectors")?;
    Ok(sectors.parse::<u64>()? * 512)
}

impl Drop for TargetStage {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.mountpoint, UnmountFlags::DETACH);
        drop(self.device.take());
        let _ = rustix::mount::unmount(&self.ram, UnmountFlags::DETACH);
    }
}
