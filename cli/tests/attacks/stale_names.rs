//! What the kernel still knows of a name when it checks permissions, and what the name leads to by now.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};

use super::common::Place;
use super::users::{NOBODY, as_user, printed_for_nobody};

/// A directory of `place` that everybody may reach and change.
fn share(place: &Place, mode: u32) {
    for (name, mode) in [("", 0o755), ("src", mode)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// A user asks for a name that is not there, which the kernel remembers. Then root makes a private
/// file of that name in the source. The user's `open(O_CREAT)` reached the file system as CREATE, which
/// opened the file with the rights of the daemon; the kernel asks for no permission of what it takes
/// for new. By racing it worked without `negative_timeout`, too.
#[test]
fn creating_a_file_never_opens_the_file_of_another_user() {
    let Some(place) = Place::to_mount() else { return };
    share(&place, 0o777);
    for options in ["", ",no_passthrough", ",writeback"] {
        let options = format!("allow_other,negative_timeout=60{options}");
        place.ok(&["mount", "passthrough:src", "mnt", "-o", &options]);
        for name in ["secret", "own"] {
            let seen = as_user(NOBODY, &[], || fs::metadata(place.path("mnt").join(name)));
            assert_eq!(seen.unwrap_err().kind(), ErrorKind::NotFound);
            fs::write(place.path("src").join(name), name).unwrap();
            let private = fs::Permissions::from_mode(0o600);
            fs::set_permissions(place.path("src").join(name), private).unwrap();
        }
        chown(place.path("src/own"), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut create = OpenOptions::new();
        create.read(true).write(true).create(true).mode(0o666);
        for truncate in [false, true] {
            create.truncate(truncate);
            let open = |name| as_user(NOBODY, &[], || create.open(place.path("mnt").join(name)));
            assert_eq!(open("secret").unwrap_err().kind(), ErrorKind::PermissionDenied);
            assert_eq!(fs::read(place.path("src/secret")).unwrap(), b"secret");
            // One's own file is opened, although the kernel took it for absent.
            open("own").unwrap();
            let left = if truncate { "" } else { "own" };
            let path = place.path("mnt/own");
            assert_eq!(printed_for_nobody("cat", &[path.to_str().unwrap()]), left);
        }
        place.ok(&["umount", "mnt"]);
        for name in ["secret", "own"] {
            fs::remove_file(place.path("src").join(name)).unwrap();
        }
    }
}
