//! `defuse nvme`.

mod common;

use std::fs;
use std::os::unix::fs::symlink;

use common::TestPlace;

/// A machine with one controller, whose only block device is mounted.
fn machine(place: &TestPlace) -> String {
    let root = place.path("src");
    let device = root.join("sys/bus/pci/devices/0000:01:00.0");
    fs::create_dir_all(device.join("nvme/nvme0/nvme0n1")).unwrap();
    fs::write(device.join("class"), "0x010802\n").unwrap();
    fs::write(device.join("vendor"), "0x1b36\n").unwrap();
    fs::write(device.join("device"), "0x0010\n").unwrap();
    symlink("../drivers/nvme", device.join("driver")).unwrap();
    symlink("../../iommu_groups/3", device.join("iommu_group")).unwrap();
    fs::create_dir_all(root.join("sys/bus/pci/drivers/vfio-pci")).unwrap();
    fs::create_dir_all(root.join("proc/self")).unwrap();
    let mounts = "30 22 259:0 / /ho\\033me rw - ext4 /dev/nvme0n1 rw\n";
    fs::write(root.join("proc/self/mountinfo"), mounts).unwrap();
    root.to_str().unwrap().to_owned()
}

#[test]
fn controllers_are_listed_and_one_in_use_is_not_bound() {
    let place = TestPlace::new();
    let root = machine(&place);
    let nvme = |arguments: &[&str]| place.run(&[&["nvme", "--root", &root], arguments].concat());
    let list = nvme(&["list"]);
    assert_eq!(list.code, Some(0), "{}", list.err);
    assert!(list.out.contains("0000:01:00.0  1b36:0010  nvme"), "{}", list.out);
    assert!(list.out.contains("nvme0n1 is mounted at /ho"), "{}", list.out);
    let json: serde_json::Value = serde_json::from_str(&nvme(&["list", "--json"]).out).unwrap();
    assert_eq!((&json[0]["driver"], &json[0]["iommu_group"]), (&"nvme".into(), &3.into()));
    let bind = nvme(&["bind", "01:00.0"]);
    assert_eq!(bind.code, Some(1), "{}", bind.out);
    assert!(bind.err.contains("in use: nvme0n1 is mounted"), "{}", bind.err);
    for command in
        [&["identify", "01:00.0"][..], &["smart", "01:00.0"], &["compare", "01:00.0", "/dev/null"]]
    {
        let said = nvme(command);
        assert!(
            said.code == Some(1) && said.err.contains("nvme bind 0000:01:00.0"),
            "{}",
            said.err
        );
    }
    let wrong = nvme(&["bind", "../x"]);
    assert!(wrong.code == Some(2) && wrong.err.contains("0000:01:00.0"), "{}", wrong.err);
}

/// There is no such controller here, but each command looks for a controller and not for a file.
#[test]
fn a_controller_is_named_in_place_of_an_image() {
    let place = TestPlace::new();
    let (image, mnt) = ("nvme:0000:ff:1f.7", place.path("mnt"));
    let none = "there is no device 0000:ff:1f.7: `defuse nvme list`";
    place.expect_failure(1, &["mkfs", "uhs", image], none);
    place.expect_failure(1, &["dump", image], none);
    place.expect_failure(1, &["mount", "uhs:nvme:0000:ff:1f.7", mnt.to_str().unwrap()], none);
    place.expect_failure(
        1,
        &["mkfs", "uhs", "nvme:x"],
        "x is no address: write it as 0000:01:00.0",
    );
    place.expect_success(&["mkfs", "uhs", "./nvme:x", "--size", "16M", "--sparse"]);
    assert!(place.path("nvme:x").exists());
}

#[test]
fn the_driver_is_measured_beside_a_file() {
    let place = TestPlace::new();
    let file = place.path("image");
    fs::write(&file, vec![0; 1 << 20]).unwrap();
    let arguments = ["nvme", "bench", "--driver", "--seconds", "0.05", "--json", "--file"];
    let said = place.run(&[&arguments[..], &[file.to_str().unwrap()]].concat());
    assert_eq!(said.code, Some(0), "{}", said.err);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&said.out).unwrap();
    assert_eq!(rows.len(), 2, "{}", said.out);
    for row in rows {
        assert!(row["operations"].as_u64().unwrap() > 0, "{row}");
        assert!(row["cpu_ns_per_operation"].as_f64().unwrap() > 1.0, "{row}");
    }
    assert_eq!(place.run(&["nvme", "bench"]).code, Some(2));
}
