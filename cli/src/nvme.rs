//! `defuse nvme`.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use defuse_block::{BlockDevice, DeviceAccess, FileDevice, RamDevice};
use defuse_nvme::host::{HostController, PciAddress, SysfsHost};
use defuse_nvme::measure::{InstantController, RandomReadTest, ReadCost};
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions, VfioController};
use serde::Serialize;

use crate::error::{CommandFailure, Result, print};

/// NVMe controllers, and the driver for them in user space
#[derive(clap::Args)]
pub struct NvmeArgs {
    /// The root directory of the machine
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
    #[command(subcommand)]
    command: NvmeCommand,
}

#[derive(clap::Subcommand)]
enum NvmeCommand {
    /// List the controllers of this machine, with the driver and the users of each
    List(JsonArgs),
    /// Give a controller to user space (vfio-pci)
    ///
    /// Refuses a controller in use (mounted, swap, part of another device).
    Bind(AddressArgs),
    /// Give a controller back to the kernel
    Unbind(AddressArgs),
    /// Show what a controller says of itself; user space must have it
    Identify(ControllerArgs),
    /// Show the state of health of a controller; user space must have it
    Smart(ControllerArgs),
    /// Compare blocks with a file, in the controller; user space must have it
    ///
    /// The exit code is 0 where they are equal, and 1 where they differ.
    Compare(CompareArgs),
    /// Measure random reads of 4 KiB: CPU time and operations per second
    Bench(NvmeBenchArgs),
}

#[derive(clap::Args)]
struct JsonArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct AddressArgs {
    /// The address of the controller, such as 0000:01:00.0
    #[arg(value_parser = address)]
    address: PciAddress,
}

#[derive(clap::Args)]
struct ControllerArgs {
    #[command(flatten)]
    which: AddressArgs,
    /// The namespace
    #[arg(long, default_value_t = 1)]
    namespace: u32,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(clap::Args)]
struct CompareArgs {
    #[command(flatten)]
    which: AddressArgs,
    /// The namespace
    #[arg(long, default_value_t = 1)]
    namespace: u32,
    /// The file, which has whole blocks
    file: PathBuf,
    /// The first block
    #[arg(long, default_value_t = 0)]
    block: u64,
}

#[derive(clap::Args)]
struct NvmeBenchArgs {
    /// The address of a controller that user space has
    #[arg(value_parser = address)]
    address: Option<PciAddress>,
    /// The driver alone, on a controller that answers at once
    #[arg(long)]
    driver: bool,
    /// A file or block device by io_uring, to compare; several are possible
    #[arg(long, value_name = "PATH")]
    file: Vec<PathBuf>,
    /// Reads in flight
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=512))]
    depth: u32,
    /// Seconds for each
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    #[command(flatten)]
    json: JsonArgs,
}

/// Bytes that `defuse nvme compare` compares at a time.
const COMPARED: usize = 1 << 20;

/// A row of `defuse nvme list`.
#[derive(Serialize)]
struct ControllerRow {
    address: String,
    id: String,
    driver: Option<String>,
    iommu_group: Option<u32>,
    numa_node: Option<u32>,
    namespaces: Vec<String>,
    holders: Vec<String>,
}

/// A row of `defuse nvme bench`.
#[derive(Serialize)]
struct DeviceMeasurement {
    device: String,
    operations: u64,
    cpu_ns_per_operation: f64,
    operations_per_second: f64,
}

/// Performs the command.
pub fn run(args: &NvmeArgs) -> Result {
    let host = SysfsHost::with_root(&args.root);
    match &args.command {
        NvmeCommand::List(json) => list(&host, json),
        NvmeCommand::Bind(args) => host.bind(&args.address).map_err(CommandFailure::from_error),
        NvmeCommand::Unbind(args) => host.unbind(&args.address).map_err(CommandFailure::from_error),
        NvmeCommand::Identify(args) => identify(&open(&host, &args.which, args.namespace)?, args),
        NvmeCommand::Smart(args) => smart(&open(&host, &args.which, args.namespace)?, args),
        NvmeCommand::Compare(args) => compare(&host, args),
        NvmeCommand::Bench(args) => bench(&host, args),
    }
}

fn address(text: &str) -> std::result::Result<PciAddress, String> {
    PciAddress::parse(text).ok_or_else(|| "write it as 0000:01:00.0; `defuse nvme list`".to_owned())
}

fn list(host: &SysfsHost, args: &JsonArgs) -> Result {
    let found = host.controllers().map_err(|error| {
        CommandFailure::Failed(format!("cannot read the devices of this machine: {error}"))
    })?;
    if args.json {
        let row = |found: HostController| ControllerRow {
            address: found.address.to_string(),
            id: found.id,
            driver: found.driver,
            iommu_group: found.iommu_group,
            numa_node: found.numa_node,
            namespaces: found.namespaces,
            holders: found.holders,
        };
        return json(&found.into_iter().map(row).collect::<Vec<_>>());
    }
    let mut text =
        format!("{:12}  {:9}  {:9}  {:>5}  IN USE\n", "ADDRESS", "ID", "DRIVER", "IOMMU");
    for HostController { address, id, driver, iommu_group, namespaces, holders, .. } in found {
        let driver = driver.unwrap_or_else(|| "-".to_owned());
        let group = iommu_group.map_or_else(|| "-".to_owned(), |group| group.to_string());
        let used = match (holders.is_empty(), namespaces.is_empty()) {
            (false, _) => holders.join(", "),
            (true, false) => format!("no ({})", namespaces.join(", ")),
            (true, true) => "no".to_owned(),
        };
        let _ =
            writeln!(text, "{:12}  {id:9}  {driver:9}  {group:>5}  {used}", address.to_string());
    }
    print(&text)
}

fn open(host: &SysfsHost, which: &AddressArgs, namespace: u32) -> Result<NvmeDevice> {
    let options = NvmeOptions { namespace, ..NvmeOptions::default() };
    let vfio = VfioController::open(host, &which.address).map_err(CommandFailure::from_error)?;
    NvmeDevice::open(vfio, &options).map_err(CommandFailure::from_error)
}

fn compare(host: &SysfsHost, args: &CompareArgs) -> Result {
    let path = args.file.display();
    let failed = |error| CommandFailure::Failed(format!("cannot read {path}: {error}"));
    let mut file = std::fs::File::open(&args.file).map_err(failed)?;
    let disk = open(host, &args.which, args.namespace)?;
    let size = disk.properties().block_size as usize;
    let most = COMPARED.next_multiple_of(size);
    let mut part = Vec::with_capacity(most);
    let mut block = args.block;
    loop {
        part.clear();
        let len = file.by_ref().take(most as u64).read_to_end(&mut part).map_err(failed)?;
        if len % size != 0 {
            let why = format!("{path} has no whole number of blocks of {size} bytes: pad it");
            return Err(CommandFailure::Failed(why));
        }
        if len == 0 {
            return Ok(());
        }
        if !disk.compare(block, &part).map_err(CommandFailure::from_error)? {
            let end = block + (len / size) as u64;
            let why = format!("the blocks from {block} to before {end} differ from {path}");
            return Err(CommandFailure::Failed(why));
        }
        block += (len / size) as u64;
    }
}

fn identify(disk: &NvmeDevice, args: &ControllerArgs) -> Result {
    let (controller, facts) = (disk.controller_facts(), disk.properties());
    let rows = [
        ("model", controller.model.clone()),
        ("serial", controller.serial.clone()),
        ("firmware", controller.firmware.clone()),
        ("namespaces", controller.namespaces.to_string()),
        ("block_size_bytes", facts.block_size.to_string()),
        ("size_bytes", facts.bytes().to_string()),
        ("atomic_write_bytes", facts.atomic_write.to_string()),
        ("max_transfer_bytes", facts.max_transfer.to_string()),
        ("volatile_cache", facts.volatile_cache.to_string()),
        ("deallocates", controller.deallocates.to_string()),
        ("writes_zeroes", controller.writes_zeroes.to_string()),
        ("compares", controller.compares.to_string()),
        ("queues", facts.max_queues.to_string()),
        ("priorities_of_queues", disk.has_priorities().to_string()),
    ];
    pairs(&rows, args.json.json)
}

fn smart(disk: &NvmeDevice, args: &ControllerArgs) -> Result {
    let smart = disk.smart().map_err(CommandFailure::from_error)?;
    let errors = disk.errors().map_err(CommandFailure::from_error)?;
    let bytes = |units: u128| units.saturating_mul(512_000).to_string();
    let rows = [
        ("critical_warning", format!("{:#x}", smart.critical_warning)),
        ("temperature_celsius", (i32::from(smart.temperature_k) - 273).to_string()),
        ("available_spare_percent", smart.available_spare_percent.to_string()),
        ("used_percent", smart.used_percent.to_string()),
        ("read_bytes", bytes(smart.data_units_read)),
        ("written_bytes", bytes(smart.data_units_written)),
        ("power_on_hours", smart.power_on_hours.to_string()),
        ("power_cycles", smart.power_cycles.to_string()),
        ("unsafe_shutdowns", smart.unsafe_shutdowns.to_string()),
        ("media_errors", smart.media_errors.to_string()),
        ("errors_logged", errors.len().to_string()),
    ];
    pairs(&rows, args.json.json)
}

fn bench(host: &SysfsHost, args: &NvmeBenchArgs) -> Result {
    if !args.seconds.is_finite() || !(0.01..=3600.0).contains(&args.seconds) {
        return Err(CommandFailure::usage("--seconds takes a number from 0.01 to 3600"));
    }
    let reads = RandomReadTest { depth: args.depth, time: Duration::from_secs_f64(args.seconds) };
    let mut rows = Vec::new();
    if args.driver {
        rows.push(measure_driver(&reads)?);
    }
    if let Some(address) = &args.address {
        let vfio = VfioController::open(host, address).map_err(CommandFailure::from_error)?;
        let disk =
            NvmeDevice::open(vfio, &NvmeOptions::default()).map_err(CommandFailure::from_error)?;
        rows.push(measure_device(&reads, &disk)?);
    }
    for path in &args.file {
        rows.push(measure_file(&reads, path)?);
    }
    if rows.is_empty() {
        return Err(CommandFailure::usage(
            "nothing to measure: name a controller, --driver or --file PATH",
        ));
    }
    if args.json.json {
        return json(&rows);
    }
    let mut text = format!("{:>9}  {:>12}  DEVICE\n", "CPU ns/op", "op/s");
    for row in rows {
        let (cpu, rate) = (row.cpu_ns_per_operation, row.operations_per_second);
        let _ = writeln!(text, "{cpu:9.0}  {rate:12.0}  {}", row.device);
    }
    print(&text)
}

/// The cost of the driver alone: the controller answers at once and moves no data.
fn measure_driver(reads: &RandomReadTest) -> Result<DeviceMeasurement> {
    let model = ControllerModel::new(&RamDevice::new(4096, 1 << 16), 1)
        .map_err(CommandFailure::from_error)?;
    let disk = NvmeDevice::open(InstantController::new(model), &NvmeOptions::default())
        .map_err(CommandFailure::from_error)?;
    let cost = reads.run(&disk).map_err(CommandFailure::from_error)?;
    Ok(row("the driver, on a controller that answers at once", cost))
}

fn measure_file(reads: &RandomReadTest, path: &Path) -> Result<DeviceMeasurement> {
    let file = FileDevice::open(path, DeviceAccess::Read).map_err(CommandFailure::from_error)?;
    measure_device(reads, &file)
}

fn measure_device(reads: &RandomReadTest, device: &dyn BlockDevice) -> Result<DeviceMeasurement> {
    let cost = reads.run(device).map_err(|errno| {
        let why = device.shortage().unwrap_or_else(|| errno.to_string());
        CommandFailure::Failed(format!("{} cannot be read: {why}", device.properties().name))
    })?;
    Ok(row(&device.properties().name, cost))
}

fn row(device: &str, cost: ReadCost) -> DeviceMeasurement {
    DeviceMeasurement {
        device: device.to_owned(),
        operations: cost.operations,
        cpu_ns_per_operation: cost.cpu_ns(),
        operations_per_second: cost.operations as f64 / cost.wall.as_secs_f64().max(1e-9),
    }
}

/// Prints names with values.
fn pairs(rows: &[(&str, String)], as_json: bool) -> Result {
    if as_json {
        let map: serde_json::Map<String, serde_json::Value> =
            rows.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
        return json(&map);
    }
    let line = |(name, value): &(&str, String)| format!("{name:24}  {value}\n");
    print(&rows.iter().map(line).collect::<String>())
}

fn json(value: &impl Serialize) -> Result {
    let text = serde_json::to_string_pretty(value).map_err(CommandFailure::from_error)?;
    print(&format!("{text}\n"))
}
