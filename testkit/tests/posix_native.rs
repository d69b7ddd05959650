//! Validates the suite on the kernel's own file systems: a case that fails there is wrong.

use std::path::{Path, PathBuf};
use std::process::Command;

use defuse_testkit::posix;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

fn check(dir: &Path) {
    let report = posix::run(dir, "");
    let (passed, failed, skipped) = report.counts();
    assert_eq!(failed, 0, "\n{report}");
    assert!(passed + skipped >= 100, "only {passed} passed and {skipped} skipped");
}

/// Unmounts when dropped, also after a failed assertion.
struct NativeMount(PathBuf);

impl Drop for NativeMount {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// One test, because the suite must be alone in its process.
#[test]
fn native_file_systems_pass() {
    let place = tempfile::tempdir().unwrap();
    if !rustix::process::geteuid().is_root() {
        println!("not root: only the directory of temporary files is tried");
        check(place.path());
        return;
    }
    tmpfs(place.path());
    ext4(place.path());
}

fn tmpfs(place: &Path) {
    let dir = place.join("tmpfs");
    std::fs::create_dir(&dir).unwrap();
    if let Err(error) = mount("none", &dir, "tmpfs", MountFlags::empty(), None) {
        println!("not here: tmpfs: {error}");
        return;
    }
    println!("---- tmpfs");
    let mounted = NativeMount(dir);
    check(&mounted.0);
}

fn ext4(place: &Path) {
    let (image, dir) = (place.join("image"), place.join("ext4"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    let steps = [
        Command::new("mkfs.ext4").args(["-q", "-b", "4096"]).arg(&image).status(),
        Command::new("mount").args(["-o", "loop,acl,user_xattr"]).arg(&image).arg(&dir).status(),
    ];
    for step in steps {
        match step {
            Ok(status) if status.success() => {}
            other => {
                println!("not here: ext4: {other:?}");
                return;
            }
        }
    }
    println!("---- ext4");
    let mounted = NativeMount(dir);
    check(&mounted.0);
}
