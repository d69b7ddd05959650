//! Users of a block device: mounts, swap, and devices that are built on it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::SysfsHost;

/// Entries of a directory, by name; none if it cannot be read.
fn names(directory: &Path) -> Vec<String> {
    let entries = directory.read_dir().into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The block devices of the namespaces of a controller.
pub(super) fn namespaces(device: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for controller in names(&device.join("nvme")) {
        let children = names(&device.join("nvme").join(&controller));
        found.extend(children.iter().filter_map(|child| block_name(&controller, child)));
    }
    found.sort();
    found.dedup();
    found
}

/// The block device of the directory `child` of a controller, such as `nvme0n1`. With multipath
/// `nvme0c1n1` is a path to `nvme0n1`.
fn block_name(controller: &str, child: &str) -> Option<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if let Some(number) = child.strip_prefix(controller)
        && let Some(number) = number.strip_prefix('n')
    {
        return is_number(number).then(|| child.to_owned());
    }
    let rest = child.strip_prefix("nvme")?;
    let (subsystem, rest) = rest.split_once('c')?;
    let (path, number) = rest.split_once('n')?;
    let fits = [subsystem, path, number].into_iter().all(is_number);
    fits.then(|| format!("nvme{subsystem}n{number}"))
}

impl SysfsHost {
    /// The block device `name` and its partitions.
    fn parts(&self, name: &str) -> Vec<String> {
        let children = names(&self.path("sys/block").join(name));
        let partitions = children.into_iter().filter(|child| child.starts_with(name));
        std::iter::once(name.to_owned()).chain(partitions).collect()
    }

    /// Users of the block device `name` and its partitions, as sentences.
    pub(super) fn users(&self, name: &str) -> Vec<String> {
        let mounts = std::fs::read_to_string(self.path("proc/self/mountinfo")).unwrap_or_default();
        let swaps = std::fs::read_to_string(self.path("proc/swaps")).unwrap_or_default();
        let mut users = Vec::new();
        for part in self.parts(name) {
            let directory = match part == name {
                true => self.path("sys/block").join(name),
                false => self.path("sys/block").join(name).join(&part),
            };
            for holder in names(&directory.join("holders")) {
                users.push(format!("{part} is part of {holder}"));
            }
            let number = std::fs::read_to_string(directory.join("dev")).unwrap_or_default();
            let node = format!("/dev/{part}");
            for line in mounts.lines() {
                if let Some(place) = parse_mount(line, number.trim(), &node) {
                    users.push(format!("{part} is mounted at {place}"));
                }
            }
            if swaps.lines().any(|line| line.split_whitespace().next() == Some(&node)) {
                users.push(format!("{part} is used as swap"));
            }
        }
        users.dedup();
        users
    }

    /// Opens the block device `name` and its partitions exclusively, so that they cannot be
    /// mounted, or become a part of another device, meanwhile.
    pub(super) fn claim(&self, name: &str) -> Result<Vec<File>, (String, io::Error)> {
        let claim = |part: String| {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK | libc::O_NOFOLLOW);
            match options.open(self.path("dev").join(&part)) {
                Ok(file) => Ok(Some(file)),
                // A device without a node cannot be opened.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err((part, error)),
            }
        };
        // A claim of the whole device would conflict with the claims of its partitions.
        let parts = self.parts(name);
        let parts = if parts.len() > 1 { parts[1..].to_vec() } else { parts };
        let claims: Result<Vec<Option<File>>, _> = parts.into_iter().map(claim).collect();
        Ok(claims?.into_iter().flatten().collect())
    }
}

/// The mount point in a line of mountinfo, if it mounts the device with this number (`259:1`) or
/// node.
fn parse_mount(line: &str, number: &str, node: &str) -> Option<String> {
    let (before, after) = line.split_once(" - ")?;
    let fields: Vec<&str> = before.split(' ').collect();
    let source = after.split(' ').nth(1)?;
    let is_it = (!number.is_empty() && *fields.get(2)? == number) || source == node;
    is_it.then(|| fields.get(4).map_or_else(String::new, |place| (*place).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_namespaces_are_those_of_their_block_devices() {
        let name = |child| block_name("nvme0", child);
        assert_eq!(name("nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(name("nvme3c0n12").as_deref(), Some("nvme3n12"));
        for other in ["hwmon1", "ng0n1", "nvme0n1p1", "nvme0", "power", "nvme0nx"] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn a_mount_is_found_by_number_or_by_node() {
        let line = "36 35 259:2 / /mnt\\0401 rw,noatime shared:1 - ext4 /dev/nvme0n1p2 rw";
        let place = Some("/mnt\\0401".to_owned());
        assert_eq!(parse_mount(line, "259:2", "/dev/other"), place);
        assert_eq!(parse_mount(line, "0:5", "/dev/nvme0n1p2"), place);
        assert_eq!(parse_mount(line, "", "/dev/nvme0n1"), None);
        assert_eq!(parse_mount("garbage - x", "259:2", "/dev/x"), None);
    }
}
