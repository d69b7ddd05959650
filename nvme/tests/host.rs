//! Controllers of a machine, by a tree of files like sysfs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use defuse_nvme::host::{HostError, PciAddress, SysfsHost};
use defuse_nvme::{ControllerTransport, VfioController};

const ADDRESS: &str = "0000:01:00.0";

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn read(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path)).unwrap()
}

/// Assigns a driver to the device.
fn drive(root: &Path, driver: &str) {
    let link = root.join(format!("sys/bus/pci/devices/{ADDRESS}/driver"));
    let _ = fs::remove_file(&link);
    symlink(format!("../../../../bus/pci/drivers/{driver}"), link).unwrap();
}

/// A machine with an unused controller of two partitions, and a network card.
fn machine() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let device = format!("sys/bus/pci/devices/{ADDRESS}");
    for (name, text) in [
        ("class", "0x010802\n"),
        ("vendor", "0x144d\n"),
        ("device", "0xa808\n"),
        ("numa_node", "-1\n"),
        ("driver_override", "-"),
        ("nvme/nvme0/nvme0n1/dev", "259:0\n"),
        ("nvme/nvme0/hwmon0/name", "nvme\n"),
    ] {
        write(root, &format!("{device}/{name}"), text);
    }
    write(root, "sys/bus/pci/devices/0000:02:00.0/class", "0x020000\n");
    symlink("../../../../kernel/iommu_groups/7", root.join(&device).join("iommu_group")).unwrap();
    for driver in ["nvme", "vfio-pci"] {
        write(root, &format!("sys/bus/pci/drivers/{driver}/unbind"), "");
    }
    write(root, "sys/bus/pci/drivers_probe", "");
    for (part, number) in [("nvme0n1", "259:0"), ("nvme0n1/nvme0n1p1", "259:1")] {
        write(root, &format!("sys/block/{part}/dev"), number);
        fs::create_dir_all(root.join(format!("sys/block/{part}/holders"))).unwrap();
        let node = part.rsplit('/').next().unwrap();
        write(root, &format!("dev/{node}"), "");
    }
    write(root, "proc/self/mountinfo", "22 1 254:0 / / rw - ext4 /dev/vda rw\n");
    write(root, "proc/swaps", "Filename Type Size Used Priority\n");
    drive(root, "nvme");
    dir
}

fn bind(root: &Path) -> Result<(), HostError> {
    SysfsHost::with_root(root).bind(&PciAddress::parse(ADDRESS).unwrap())
}

#[test]
fn controllers_are_listed_with_driver_and_users() {
    let dir = machine();
    let found = SysfsHost::with_root(dir.path()).controllers().unwrap();
    assert_eq!(found.len(), 1, "a network card is none: {found:?}");
    let found = &found[0];
    assert_eq!((found.address.to_string().as_str(), found.id.as_str()), (ADDRESS, "144d:a808"));
    assert_eq!((found.driver.as_deref(), found.iommu_group), (Some("nvme"), Some(7)));
    assert_eq!((found.numa_node, found.namespaces.as_slice()), (None, &["nvme0n1".to_owned()][..]));
    assert!(found.holders.is_empty());
    assert_eq!(SysfsHost::with_root(Path::new("/nowhere")).controllers().unwrap(), []);
}

#[test]
fn a_controller_in_use_is_refused_with_its_user_and_keeps_its_driver() {
    type ControllerUse = fn(&Path);
    let uses: [(&str, ControllerUse); 4] = [
        ("nvme0n1p1 is mounted at /home", |root| {
            let line = "30 22 259:1 / /home rw - ext4 /dev/nvme0n1p1 rw\n";
            write(root, "proc/self/mountinfo", line);
        }),
        ("nvme0n1p1 is mounted at /data", |root| {
            // btrfs has device numbers of its own.
            let line = "30 22 0:40 /data /data rw - btrfs /dev/nvme0n1p1 rw\n";
            write(root, "proc/self/mountinfo", line);
        }),
        ("nvme0n1 is part of dm-0", |root| {
            fs::create_dir(root.join("sys/block/nvme0n1/holders/dm-0")).unwrap();
        }),
        ("nvme0n1p1 is used as swap", |root| {
            write(root, "proc/swaps", "Filename\n/dev/nvme0n1p1 partition 8 0 -2\n");
        }),
    ];
    for (sentence, make) in uses {
        let dir = machine();
        make(dir.path());
        let error = bind(dir.path()).unwrap_err();
        assert!(matches!(error, HostError::Used { .. }), "{error:?}");
        assert!(error.to_string().contains(sentence), "{error}");
        let driver_override = format!("sys/bus/pci/devices/{ADDRESS}/driver_override");
        assert_eq!(read(dir.path(), &driver_override), "-", "{sentence}");
        assert_eq!(read(dir.path(), "sys/bus/pci/drivers/nvme/unbind"), "", "{sentence}");
    }
}

/// The creator of a link in /dev could choose the device that is claimed.
#[test]
fn a_node_that_cannot_be_claimed_is_refused() {
    let dir = machine();
    let node = dir.path().join("dev/nvme0n1p1");
    fs::remove_file(&node).unwrap();
    symlink("/dev/null", &node).unwrap();
    let error = bind(dir.path()).unwrap_err().to_string();
    assert!(error.contains("nvme0n1p1 cannot be had exclusively"), "{error}");
}

#[test]
fn a_free_controller_is_taken_from_one_driver_and_given_to_the_other() {
    let dir = machine();
    let root = dir.path();
    // No kernel acts on the files here, so that the driver stays, which is noticed.
    let error = bind(root).unwrap_err();
    assert!(matches!(error, HostError::Refused { .. }), "{error:?}");
    let driver_override = format!("sys/bus/pci/devices/{ADDRESS}/driver_override");
    assert_eq!(read(root, &driver_override), "vfio-pci");
    assert_eq!(read(root, "sys/bus/pci/drivers/nvme/unbind"), ADDRESS);
    assert_eq!(read(root, "sys/bus/pci/drivers_probe"), ADDRESS);
    drive(root, "vfio-pci");
    bind(root).unwrap();
    let host = SysfsHost::with_root(root);
    let address = PciAddress::parse("01:00.0").unwrap();
    host.unbind(&address).unwrap();
    assert_eq!(read(root, "sys/bus/pci/drivers/vfio-pci/unbind"), ADDRESS);
    drive(root, "nvme");
    let error = host.unbind(&address).unwrap_err();
    assert!(error.to_string().contains("the driver nvme has 0000:01:00.0"), "{error}");
}

#[test]
fn what_cannot_be_bound_says_why() {
    let dir = machine();
    let root = dir.path();
    let of = |address: &str| {
        SysfsHost::with_root(root).bind(&PciAddress::parse(address).unwrap()).unwrap_err()
    };
    assert!(matches!(of("0000:09:00.0"), HostError::None(_)));
    assert!(matches!(of("0000:02:00.0"), HostError::NotNvme(_)));
    fs::remove_dir_all(root.join("sys/bus/pci/drivers/vfio-pci")).unwrap();
    assert!(of(ADDRESS).to_string().contains("modprobe vfio-pci"));
    fs::remove_file(root.join(format!("sys/bus/pci/devices/{ADDRESS}/iommu_group"))).unwrap();
    assert!(of(ADDRESS).to_string().contains("intel_iommu=on"));
    for text in
        ["", "01:00", "0000:01:00.8", "../../etc/passwd", "0000:01:00.0/x", "1:0.0", "a:b:c.0"]
    {
        assert_eq!(PciAddress::parse(text), None, "{text}");
    }
}

#[test]
fn without_vfio_a_controller_is_not_opened() {
    let dir = machine();
    let (host, address) = (SysfsHost::with_root(dir.path()), PciAddress::parse(ADDRESS).unwrap());
    let error = |host: &SysfsHost| match VfioController::open(host, &address) {
        Ok(vfio) => panic!("{} was opened", vfio.name()),
        Err(error) => error.to_string(),
    };
    assert!(error(&host).contains("`defuse nvme bind 0000:01:00.0`"));
    drive(dir.path(), "vfio-pci");
    assert!(error(&host).contains("dev/vfio/vfio"), "{}", error(&host));
    // A file that is no device of VFIO.
    write(dir.path(), "dev/vfio/vfio", "");
    write(dir.path(), "dev/vfio/7", "");
    assert!(error(&host).contains("dev/vfio/vfio: Inappropriate"), "{}", error(&host));
    // Unless both files of iommufd exist, the group is used.
    let device = format!("sys/bus/pci/devices/{ADDRESS}/vfio-dev/vfio3/dev");
    write(dir.path(), &device, "511:3\n");
    write(dir.path(), "dev/vfio/devices/vfio3", "");
    assert!(error(&host).contains("dev/vfio/vfio: Inappropriate"), "{}", error(&host));
    write(dir.path(), "dev/iommu", "");
    assert!(error(&host).contains("dev/vfio/devices/vfio3: Inappropriate"), "{}", error(&host));
}
