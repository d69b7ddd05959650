//! Disk space that is reserved for root.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use super::common::TestPlace;
use super::users::{NOBODY, as_user};

const MIB: u64 = 1 << 20;
const IMAGE: u64 = 32 * MIB;

/// An ext4 with half of its blocks reserved for root, mounted on `src` of a place.
struct ReservedExt4<'a>(&'a TestPlace);

impl ReservedExt4<'_> {
    fn mount(place: &TestPlace) -> Option<ReservedExt4<'_>> {
        let image = place.path("image");
        File::create(&image).unwrap().set_len(IMAGE).unwrap();
        let done =
            |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        let options = ["-q", "-F", "-b", "4096", "-m", "50", "-O", "^has_journal"];
        let mut mount = Command::new("mount");
        mount.args(["-t", "ext4", "-o", "loop"]).args([&image, &place.path("src")]);
        if !done(Command::new("mkfs.ext4").args(options).arg(&image)) || !done(&mut mount) {
            println!("skipped: no ext4 image can be made and mounted");
            return None;
        }
        for (name, mode) in [("", 0o755), ("src", 0o777)] {
            fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        Some(ReservedExt4(place))
    }
}

impl Drop for ReservedExt4<'_> {
    fn drop(&mut self) {
        let _ = self.0.command(&["umount", "--lazy", "mnt"]).output();
        let _ = Command::new("umount").arg(self.0.path("src")).status();
    }
}

/// Writes to `path` until no space is left. Returns the number of bytes.
fn fill(path: &Path) -> u64 {
    let mut file = File::options().append(true).open(path).unwrap();
    let piece = vec![7; 64 << 10];
    let mut written = 0;
    while let Ok(count @ 1..) = file.write(&piece) {
        // Delayed allocation reports missing space here at the latest.
        if file.sync_data().is_err() {
            break;
        }
        written += count as u64;
    }
    written
}

/// Fills `path` as a user, while root uses the same mount and daemon threads.
fn fill_beside_root(path: &Path) -> u64 {
    as_user(NOBODY, &[], || drop(File::create(path).unwrap()));
    let beside = path.with_extension("beside");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                drop(File::create(&beside).unwrap());
                fs::remove_file(&beside).unwrap();
            }
        });
        let filled = as_user(NOBODY, &[], || fill(path));
        done.store(true, Ordering::Relaxed);
        root.join().unwrap();
        filled
    })
}

/// The daemon runs as root and may use the reserved blocks of ext4 (and CAP_SYS_RESOURCE overrides
/// quotas). A thread that had acted for root before let a user write to the reserved blocks, and
/// fill the file system through a mount.
#[test]
fn a_user_cannot_fill_the_blocks_that_are_reserved_for_root() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(_reserved) = ReservedExt4::mount(&place) else { return };
    for options in ["", ",no_passthrough", ",writeback", ",locks=filesystem"] {
        let options = format!("allow_other{options}");
        place.expect_success(&["mount", "passthrough:src", "mnt", "--workers=1", "-o", &options]);
        let user = fill_beside_root(&place.path("mnt/user"));
        assert!((6 * MIB..18 * MIB).contains(&user), "{options}: {user} bytes");
        // Write-back by the kernel is not done for a certain user.
        if !options.contains("writeback") {
            File::create(place.path("mnt/root")).unwrap();
            let root = fill(&place.path("mnt/root"));
            assert!(root > 8 * MIB, "{options}: root has {root} bytes");
        }
        for name in ["user", "root"] {
            let _ = fs::remove_file(place.path("mnt").join(name));
        }
        place.expect_success(&["umount", "mnt"]);
    }
}
