//! NVMe controllers of this machine, and their drivers: by sysfs(5), below a root directory that
//! tests choose.

mod bind;
mod usage;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub use bind::HostError;

/// The class of NVMe controllers.
const CLASS: &str = "0x010802";

/// The driver that gives a device to user space.
pub(crate) const VFIO: &str = "vfio-pci";

/// The address of a device on PCI, such as `0000:01:00.0`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress(String);

/// A controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostController {
    /// The address of the controller.
    pub address: PciAddress,
    /// The vendor and the device, such as `144d:a808`.
    pub id: String,
    /// The driver of the controller.
    pub driver: Option<String>,
    /// The IOMMU group.
    pub iommu_group: Option<u32>,
    /// The NUMA node.
    pub numa_node: Option<u32>,
    /// Block devices of its namespaces, while the driver of the kernel has the controller.
    pub namespaces: Vec<String>,
    /// Users of these block devices, each as `nvme0n1p1 is mounted at /home`.
    pub holders: Vec<String>,
}

/// The machine with the root directory `root`.
#[derive(Clone, Debug)]
pub struct SysfsHost {
    pub(crate) root: PathBuf,
}

impl Default for SysfsHost {
    fn default() -> Self {
        SysfsHost::with_root(Path::new("/"))
    }
}

impl PciAddress {
    /// Parses an address, with its domain or without (`01:00.0`). `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let parts: Vec<&str> = rest.split(':').collect();
        let (domain, bus, slot) = match parts[..] {
            [domain, bus, slot] => (domain, bus, slot),
            [bus, slot] => ("0000", bus, slot),
            _ => return None,
        };
        let fits = |part: &str, len: usize| {
            part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let is_function = matches!(function.as_bytes(), [b'0'..=b'7']);
        let fits = fits(domain, 4) && fits(bus, 2) && fits(slot, 2) && is_function;
        fits.then(|| PciAddress(format!("{domain}:{bus}:{slot}.{function}").to_ascii_lowercase()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl SysfsHost {
    /// The machine below `root`.
    pub fn with_root(root: &Path) -> Self {
        SysfsHost { root: root.to_owned() }
    }

    /// All NVMe controllers, by address.
    ///
    /// # Errors
    ///
    /// Fails with the errors of reading sysfs. A machine without PCI has no controllers.
    pub fn controllers(&self) -> io::Result<Vec<HostController>> {
        let entries = match self.path("sys/bus/pci/devices").read_dir() {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let address = name.to_str().and_then(PciAddress::parse);
            found.extend(
                address
                    .filter(|address| self.is_nvme(address))
                    .map(|a| self.describe_controller(&a)),
            );
        }
        found.sort_by(|a, b| a.address.cmp(&b.address));
        Ok(found)
    }

    /// The controller at `address`.
    ///
    /// # Errors
    ///
    /// [`HostError::None`] and [`HostError::NotNvme`].
    pub fn controller(&self, address: &PciAddress) -> Result<HostController, HostError> {
        if !self.device(address).exists() {
            return Err(HostError::None(address.clone()));
        }
        match self.is_nvme(address) {
            true => Ok(self.describe_controller(address)),
            false => Err(HostError::NotNvme(address.clone())),
        }
    }

    fn describe_controller(&self, address: &PciAddress) -> HostController {
        let device = self.device(address);
        let hex = |name| self.attribute(address, name).unwrap_or_default().replace("0x", "");
        let namespaces = usage::namespaces(&device);
        HostController {
            address: address.clone(),
            id: format!("{}:{}", hex("vendor"), hex("device")),
            driver: target(&device.join("driver")),
            iommu_group: target(&device.join("iommu_group")).and_then(|name| name.parse().ok()),
            numa_node: self.attribute(address, "numa_node").and_then(|node| node.parse().ok()),
            holders: namespaces.iter().flat_map(|name| self.users(name)).collect(),
            namespaces,
        }
    }

    /// The name of a device's own file in `dev/vfio/devices`, where the kernel has such files.
    pub(crate) fn vfio_name(&self, address: &PciAddress) -> Option<String> {
        let entries = self.device(address).join("vfio-dev").read_dir().ok()?;
        let name = entries.map_while(io::Result::ok).next()?.file_name();
        name.into_string().ok()
    }

    fn is_nvme(&self, address: &PciAddress) -> bool {
        self.attribute(address, "class").is_some_and(|class| class == CLASS)
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    fn device(&self, address: &PciAddress) -> PathBuf {
        self.path("sys/bus/pci/devices").join(&address.0)
    }

    fn attribute(&self, address: &PciAddress, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.device(address).join(name)).ok()?;
        Some(text.trim().to_owned())
    }
}

/// The last part of the target path of a symbolic link.
fn target(link: &Path) -> Option<String> {
    let path = std::fs::read_link(link).ok()?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}
