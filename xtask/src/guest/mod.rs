//! `cargo xtask test nvme-guest`: the NVMe driver in a guest of QEMU, by vfio-pci and behind an
//! IOMMU.
//!
//! The guest has Debian's kernel, an initial file system that is made here, and two controllers.
//! QEMU interprets its code (TCG), so that this needs no rights and no virtualization. `init.sh` is
//! what the guest does; it reports line by line.

mod archive;
mod kernel;
mod machine;
mod speed;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::packages::RequiredTool;
use crate::parts::RunRecord;
use crate::{apt, command};
use archive::CpioArchive;
use kernel::UnpackedKernel;
use machine::{GuestLine, GuestMachine, MachineFiles};

/// The tools of the step.
pub const TOOLS: &[RequiredTool] = &[
    RequiredTool::package("qemu-system-x86", "qemu-system-x86_64"),
    RequiredTool::package("kmod", "depmod"),
    RequiredTool::package("xz-utils", "xz"),
    RequiredTool::package("busybox-static", "busybox"),
    RequiredTool::package("binutils", "strip"),
    RequiredTool::package("e2fsprogs", "mkfs.ext4"),
    RequiredTool::package("xfsprogs", "mkfs.xfs"),
    RequiredTool::package("f2fs-tools", "mkfs.f2fs"),
];

/// The package of the kernel, which is downloaded and not installed.
pub const KERNEL: &str = kernel::PACKAGE;

/// Modules of the kernel.
const MODULES: &[&str] = &["nvme", "vfio_pci", "fuse", "ext4", "xfs", "f2fs"];

/// Modules that some kernels lack: those by which file systems compute checksums, and the IOMMU of
/// type 1 beside iommufd.
const OPTIONAL: &[&str] = &["crc32c_generic", "crc32_generic", "crc32c_intel", "vfio_iommu_type1"];

/// Power cuts, each of a new file system.
const POWER_CUTS: usize = 3;

/// Bytes of each disk.
const DISK: u64 = 512 << 20;

/// The longest time of a job: most take half a minute on an idle machine.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs all jobs.
pub fn check(parts: &mut RunRecord) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        parts.record_missing_part("the guest has the processor of a PC");
        return Ok(());
    }
    if !apt::is_there() {
        parts.skip("the kernel of the guest is a package of Debian, and there is no apt");
        return Ok(());
    }
    let place = tempfile::Builder::new().prefix("defuse-guest-").tempdir()?;
    let files = prepare(place.path())?;
    job(&files, "driver")?;
    job(&files, "owner")?;
    for _ in 0..POWER_CUTS {
        power_cut(&files)?;
    }
    job(&files, "unplug")?;
    let values = job(&files, "surprise")?;
    let durable = values.iter().find(|(name, _)| name == "durable");
    let durable: Option<u32> = durable.and_then(|(_, text)| text.parse().ok());
    let durable = durable.context("guest, surprise: it reports no durable files")?;
    job(&files, &format!("after durable={durable},0"))?;
    job(&files, "bound")?;
    speed::report(&job(&files, "speed")?);
    Ok(())
}

/// Builds what the guest needs below `dir`.
fn prepare(dir: &Path) -> Result<MachineFiles> {
    let target = command::target_dir()?;
    let kept = target.join("guest");
    fs::create_dir_all(&kept)?;
    let kernel = UnpackedKernel::get(&kept)?;
    command::run(command::cargo().args(["build", "--release", "--package", "defuse"]))?;
    let initial = dir.join("initial");
    fs::write(&initial, initial_files(&kernel, &target.join("release/defuse"), dir)?)?;
    let disks = ["disk0", "disk1"].map(|name| dir.join(name));
    for disk in &disks {
        File::create(disk)?.set_len(DISK)?;
    }
    println!("the guest has Linux {}", kernel.version());
    Ok(MachineFiles { kernel: kernel.image(), initial, disks, dir: dir.to_owned() })
}

fn initial_files(kernel: &UnpackedKernel, program: &Path, dir: &Path) -> Result<Vec<u8>> {
    let mut archive = CpioArchive::default();
    archive.file("/init", include_bytes!("init.sh"), 0o755)?;
    archive.program(&find("busybox")?, "/bin/busybox")?;
    let small = dir.join("defuse");
    command::run(Command::new("strip").arg("-o").arg(&small).arg(program))?;
    archive.program(&small, "/usr/bin/defuse")?;
    // With a file, sync(1) is fsync(2).
    archive.program(&find("sync")?, "/usr/bin/fsync")?;
    for name in ["mkfs.ext4", "mkfs.xfs", "mkfs.f2fs"] {
        archive.program(&find(name)?, &format!("/usr/sbin/{name}"))?;
    }
    archive.file("/small.f", include_bytes!("small.f"), 0o644)?;
    let mut names = kernel.filter_existing(OPTIONAL)?;
    names.extend(MODULES);
    let modules = kernel.with_needed(&names)?;
    let mut order = String::new();
    for (name, content) in &modules {
        archive.file(&format!("/modules/{name}.ko"), content, 0o644)?;
        order += &format!("{name}\n");
    }
    archive.file("/modules/order", order.as_bytes(), 0o644)?;
    archive.finish()
}

fn find(program: &str) -> Result<PathBuf> {
    command::find(program).with_context(|| format!("{program} is missing"))
}

/// Cuts the power of a guest whose two programs write, and looks for what was durable.
fn power_cut(files: &MachineFiles) -> Result<()> {
    let mut machine = GuestMachine::boot(files, "load", LIMIT)?;
    let mut durable = [0; 2];
    // By chance, but some files of each.
    let enough = fastrand::u32(20..80);
    while durable[0].min(durable[1]) < enough {
        match machine.next()? {
            GuestLine::Durable(writer @ 1..=2, file) => durable[writer as usize - 1] = file,
            GuestLine::Passed(_) => {}
            said => bail!("guest, load: {said:?} is not expected"),
        }
    }
    std::thread::sleep(Duration::from_micros(fastrand::u64(..20_000)));
    machine.cut_power()?;
    println!("guest, load: the power is cut when {durable:?} files are durable");
    job(files, &format!("after durable={},{}", durable[0], durable[1])).map(drop)
}

/// Runs the job that is the first word of `line`, whose further words are for the guest. Returns
/// the values that it reports.
fn job(files: &MachineFiles, line: &str) -> Result<Vec<(String, String)>> {
    let mut machine = GuestMachine::boot(files, line, LIMIT)?;
    let name = machine.job().to_owned();
    let (mut passed, mut values) = (0, Vec::new());
    loop {
        match machine.next()? {
            GuestLine::Passed(check) => {
                println!("guest, {name}: {check}");
                passed += 1;
            }
            GuestLine::Value(what, text) => values.push((what, text)),
            GuestLine::Wants(what) if what == "device_del" => machine.take_out()?,
            GuestLine::Wants(what) if what == "device_add" => machine.put_in()?,
            GuestLine::End => break,
            said => bail!("guest, {name}: {said:?} is not expected"),
        }
    }
    ensure!(passed > 0, "guest, {name}: it checked nothing");
    Ok(values)
}
