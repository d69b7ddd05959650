//! Real mounts, as root. No process serves them, so that tests access them only through functions
//! that are guaranteed not to hang.

use super::*;
use std::fs;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A directory whose mounts are removed when it is dropped.
struct MountDirectory {
    dir: TempDir,
}

impl MountDirectory {
    /// Creates a place; prints the reason and returns `None` if mounting is not possible.
    fn new() -> Option<MountDirectory> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: needs root and /dev/fuse");
            return None;
        }
        let place = MountDirectory { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(place.path_of("mnt")).unwrap();
        Some(place)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for MountDirectory {
    fn drop(&mut self) {
        // Uses the kernel's list, so that a failed test leaves no mount behind, and removing the
        // directory cannot hang.
        for mount in fuse_mounts().unwrap() {
            if mount.mount_point.starts_with(self.dir.path()) {
                let _ = unmount(&mount.mount_point, true);
            }
        }
    }
}

fn entry(path: &Path) -> MountEntry {
    info::mount_at(path).unwrap().expect("mounted")
}

#[test]
fn a_mount_is_listed_dies_and_is_removed() {
    let Some(place) = MountDirectory::new() else { return };
    let path = place.path_of("mnt");
    let options = MountOptions {
        fsname: "my, disk".to_owned(),
        nosuid: true,
        nosymfollow: true,
        access_times: defuse_fs::posix::AccessTimeRule::Never,
        default_permissions: true,
        max_read: 65536,
        ..Default::default()
    };
    let mounted = mount(&path, &options).unwrap();
    assert_eq!((&mounted.mountpoint, &mounted.how), (&path, &MountMethod::Fsopen));
    let seen = entry(&path);
    assert_eq!((seen.fstype.as_str(), seen.source.to_str()), ("fuse.defuse", Some("my, disk")));
    for option in ["nosuid", "nosymfollow", "noatime"] {
        assert!(seen.mount_options.contains(option), "{seen:?}");
    }
    for option in ["user_id=0", "default_permissions", "max_read=65536"] {
        assert!(seen.super_options.contains(option), "{seen:?}");
    }
    assert_eq!(connection_id(&path), Some(seen.minor));
    assert!(fuse_mounts().unwrap().contains(&seen));
    assert_eq!(liveness(&path), ServerLiveness::Silent);
    let error = mount(&path, &options).unwrap_err();
    assert!(matches!(error, MountError::SilentMount { .. }), "{error}");

    drop(mounted);
    assert!(is_dead_mount(&path));
    let error = mount(&path, &options).unwrap_err();
    assert_eq!(error, MountError::DeadMount { path: path.clone() });
    assert!(error.to_string().contains(&format!("run `defuse umount {}`", path.display())));
    unmount_when_idle(&path).unwrap();
    assert_eq!(liveness(&path), ServerLiveness::NotFuse);
    assert_eq!(unmount(&path, false), Err(UnmountError::NotMounted { path }));
}

/// Unmounts. A process that another test starts has the same files open as this process, until it
/// executes its program.
fn unmount_when_idle(path: &Path) -> Result<(), UnmountError> {
    let begun = std::time::Instant::now();
    loop {
        match unmount(path, false) {
            Err(UnmountError::Busy { .. }) if begun.elapsed().as_secs() < 2 => {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

#[test]
fn the_first_request_is_init() {
    let Some(place) = MountDirectory::new() else { return };
    let mounted = mount(&place.path_of("mnt"), &MountOptions::default()).unwrap();
    let mut buf = vec![0; defuse_wire::abi::FUSE_MIN_READ_BUFFER];
    let len = rustix::io::read(&mounted.device, &mut buf).unwrap();
    let request =
        defuse_wire::request::DecodedRequest::parse(&buf[..len], &Default::default()).unwrap();
    let defuse_wire::request::RequestBody::Init(init) = request.body else { panic!("{request:?}") };
    assert_eq!(init.major, defuse_wire::abi::FUSE_KERNEL_VERSION);
    assert!(init.minor >= defuse_wire::abi::MINOR_MIN, "{init:?}");
}

#[test]
fn mounting_by_the_old_system_call_works() {
    let Some(place) = MountDirectory::new() else { return };
    let path = place.path_of("mnt");
    let options = MountOptions { ro: true, allow_other: true, ..Default::default() };
    let target = check::target(&path, &options).unwrap();
    let mounted = kernel::mount_by_syscall(&target, &options).unwrap();
    let seen = entry(&path);
    assert_eq!(seen.fstype, "fuse.defuse");
    assert!(seen.super_options.contains("allow_other"), "{seen:?}");
    assert!(seen.mount_options.starts_with("ro"), "{seen:?}");
    drop(mounted);
    drop(target);
    unmount_when_idle(&path).unwrap();
}

#[test]
fn a_mount_in_use_is_busy_until_detached() {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let Some(place) = MountDirectory::new() else { return };
    let path = place.path_of("mnt");
    let _mounted = mount(&path, &MountOptions::default()).unwrap();
    let user = openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    assert_eq!(unmount(&path, false), Err(UnmountError::Busy { path: path.clone() }));
    unmount(&path, true).unwrap();
    drop(user);
    assert_eq!(liveness(&path), ServerLiveness::NotFuse);
}

#[test]
fn a_root_that_is_a_file_is_mounted_on_a_file() {
    let Some(place) = MountDirectory::new() else { return };
    let file = place.path_of("file");
    fs::write(&file, "").unwrap();
    let root_is_file = MountOptions { root: RootKind::File, ..Default::default() };
    let error = mount(&file, &MountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::NotADirectory { .. }), "{error}");
    let error = mount(&place.path_of("mnt"), &root_is_file).unwrap_err();
    assert!(matches!(error, MountError::NotAFile { .. }), "{error}");
    let _mounted = mount(&file, &root_is_file).unwrap();
    assert_eq!(entry(&file).mount_point, file);
    unmount(&file, false).unwrap();
}

#[test]
fn mount_points_are_checked_first() {
    let Some(place) = MountDirectory::new() else { return };
    let options = MountOptions::default();
    let error = mount(&place.path_of("missing"), &options).unwrap_err();
    assert!(error.to_string().contains("missing does not exist: create it"), "{error}");
    fs::write(place.path_of("mnt/file"), "").unwrap();
    let error = mount(&place.path_of("mnt"), &options).unwrap_err();
    assert!(matches!(error, MountError::NotEmpty { .. }), "{error}");
    let nonempty = MountOptions { nonempty: true, ..options };
    let _mounted = mount(&place.path_of("mnt"), &nonempty).unwrap();
}

#[test]
fn a_link_leads_to_the_mount_point() {
    let Some(place) = MountDirectory::new() else { return };
    symlink("mnt", place.path_of("link")).unwrap();
    let mounted = mount(&place.path_of("link"), &MountOptions::default()).unwrap();
    assert_eq!(mounted.mountpoint, place.path_of("mnt"));
    assert!(connection_id(&place.path_of("link")).is_some());
    unmount(&place.path_of("link"), false).unwrap();
}

#[test]
fn an_inherited_device_is_taken_over() {
    let Some(_place) = MountDirectory::new() else { return };
    let device = open_device(Path::new("/mnt")).unwrap().into_raw_fd();
    let path = PathBuf::from(format!("/dev/fd/{device}"));
    let mounted = mount(&path, &MountOptions::default()).unwrap();
    assert_eq!((mounted.how, mounted.mountpoint), (MountMethod::Inherited, path));
    for wrong in ["/dev/fd/999999", "/dev/fd/99999999999999999999"] {
        assert!(mount(Path::new(wrong), &MountOptions::default()).is_err(), "{wrong}");
    }
    let null = fs::File::open("/dev/null").unwrap();
    let path = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&null));
    let error = mount(Path::new(&path), &MountOptions::default()).unwrap_err();
    assert!(error.to_string().contains("is not an open /dev/fuse"), "{error}");
}

/// The owner of a directory on the way exchanges it, so that the path leads to a mount of root now
/// and then.
#[test]
fn a_path_that_changes_unmounts_and_changes_no_other_mount() {
    use rustix::fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with};
    use rustix::mount::{MountFlags, UnmountFlags, mount as mount_other};
    use std::sync::atomic::{AtomicBool, Ordering};

    const ATTEMPTS: usize = 3000;
    let Some(place) = MountDirectory::new() else { return };
    let (dir, link, victim) =
        (place.path_of("dir"), place.path_of("link"), place.path_of("victim"));
    for parent in [&dir, &victim] {
        fs::create_dir_all(parent.join("mnt")).unwrap();
    }
    symlink(&victim, &link).unwrap();
    let tmpfs = victim.join("mnt");
    mount_other("none", &tmpfs, "tmpfs", MountFlags::empty(), None).unwrap();
    let path = dir.join("mnt");
    let _mounted = mount(&path, &MountOptions::default()).unwrap();
    let own = entry(&path).mount_id;
    // In use, so that it stays.
    let user = openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                renameat_with(CWD, &dir, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let is_it = |mount: &MountEntry| mount.mount_id == own;
        for attempt in 0..ATTEMPTS {
            let _ = unmount(&path, false);
            let _ = unmount_if(&path, false, is_it);
            if let Ok(Some(place)) = HeldMountpoint::open(&path) {
                let _ = place.remount(MountFlags::RDONLY, is_it);
            }
            let victim = info::mount_at(&tmpfs).unwrap();
            let is_unchanged =
                victim.as_ref().is_some_and(|mount| mount.mount_options.starts_with("rw"));
            if !is_unchanged {
                ended.store(true, Ordering::Relaxed);
                panic!("attempt {attempt}: {victim:?}");
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    rustix::mount::unmount(&tmpfs, UnmountFlags::DETACH).unwrap();
    drop(user);
}
