//! Programs of 32 bits without large-file support, on kernel mounts.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::TestPlace;

/// Lists a directory, then goes to the positions of a hundred entries in another order, also in a
/// second open directory, and begins again.
const LISTING: &str = r#"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char *names[100000];
static long at[100000];
static int list(DIR *d)
{
    int n = 0;
    for (;;) {
        errno = 0;
        at[n] = telldir(d);
        struct dirent *e = readdir(d);
        if (!e && errno) { perror("readdir"); exit(1); }
        if (!e) return n;
        free(names[n]);
        names[n++] = strdup(e->d_name);
    }
}
static void check_at(DIR *d, int i)
{
    seekdir(d, at[i]);
    struct dirent *e = readdir(d);
    if (!e || strcmp(e->d_name, names[i])) {
        printf("%d: %s at %lx is %s\n", i, names[i], at[i], e ? e->d_name : strerror(errno));
        exit(1);
    }
}
int main(int argc, char **argv)
{
    DIR *d = opendir(argv[1]), *other = opendir(argv[1]);
    int wanted = atoi(argv[2]), n = list(d);
    if (n != wanted) { printf("%d entries\n", n); return 1; }
    for (int i = 0; i < n; i += 1 + n / 100) {
        check_at(d, (i * 7919L) % n);
        check_at(other, (i * 104729L) % n);
    }
    rewinddir(d);
    if ((n = list(d)) != wanted) { printf("%d entries after rewinddir\n", n); return 1; }
    seekdir(d, at[n]);
    if (readdir(d)) { puts("an entry after the end"); return 1; }
    return 0;
}
"#;

/// Programs for the listing: of 32 bits, and of this machine.
fn programs(place: &TestPlace) -> Option<[std::path::PathBuf; 2]> {
    let of_32_bits = common::compile(place, "list32", LISTING, &["-m32"])?;
    Some([of_32_bits, common::compile(place, "list", LISTING, &[])?])
}

fn sh(script: &str, dir: &Path) {
    let status = Command::new("sh").args(["-e", "-c", script]).current_dir(dir).status().unwrap();
    assert!(status.success(), "{script}");
}

fn check(programs: &[std::path::PathBuf], dir: &Path, entries: usize, what: &str) {
    for program in programs {
        let output = Command::new(program).arg(dir).arg(entries.to_string()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let failed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}, {}: {said}{failed}", program.display());
    }
}

/// The daemon, a process of 64 bits, gets positions of 63 bits from ext4 and passed them to all
/// programs: a program of 32 bits that has no large-file support listed nothing on a passthrough of
/// ext4, and failed with `EOVERFLOW`.
#[test]
fn programs_of_32_bits_list_seek_and_begin_again_on_every_mount() {
    const FILES: usize = 3000;
    let Some(place) = TestPlace::new_to_mount() else { return };
    let Some(programs) = programs(&place) else { return };
    // Directories with hashed names and without, of one block and more. Layers of an overlay on two
    // devices have inode numbers beyond 32 bits.
    sh(
        "truncate -s 64M ext4.img; mkfs.ext4 -q -N 20000 ext4.img; mkdir src/ext4; mount -o loop ext4.img src/ext4
         truncate -s 64M plain.img; mkfs.ext4 -q -N 20000 -O ^dir_index plain.img; mkdir src/plain; mount -o loop plain.img src/plain
         mkdir src/tmpfs; mount -t tmpfs tmpfs src/tmpfs
         mkdir src/overlay src/ext4/up src/ext4/work src/ext4/low; seq 1 3000 | sed s/^/low/ | (cd src/ext4/low; xargs touch)
         mount -t overlay -o lowerdir=src/ext4/low,upperdir=src/ext4/up,workdir=src/ext4/work overlay src/overlay",
        &place.path(""),
    );
    let kinds = ["ext4", "plain", "tmpfs", "overlay"];
    for kind in kinds {
        for (dir, files) in [("many", FILES), ("few", 9), ("none", 0)] {
            let path = place.path("src").join(kind).join(dir);
            fs::create_dir(&path).unwrap();
            (0..files).for_each(|n| fs::write(path.join(format!("file {n}")), "").unwrap());
        }
    }
    let merged = 2 + FILES + 3;
    for options in ["rw", "cache=direct", "no_do_readdirplus", "handles=off,workers=1"] {
        for kind in kinds {
            place.expect_success(&[
                "mount",
                &format!("passthrough:src/{kind}"),
                "mnt",
                "-o",
                options,
            ]);
            for (dir, files) in [("many", FILES), ("few", 9), ("none", 0)] {
                let what = format!("{kind}/{dir}, {options}");
                check(&programs, &place.path("mnt").join(dir), files + 2, &what);
            }
            if kind == "overlay" {
                check(&programs, &place.path("mnt"), merged, &format!("merged, {options}"));
            }
            place.expect_success(&["umount", "mnt"]);
        }
    }
    place.expect_success(&["mkfs", "uhs", "uhs.img", "--size", "64M"]);
    for source in ["memory:", "uhs:uhs.img"] {
        place.expect_success(&["mount", source, "mnt"]);
        fs::create_dir(place.path("mnt/many")).unwrap();
        (0..FILES).for_each(|n| fs::write(place.path("mnt/many").join(n.to_string()), "").unwrap());
        check(&programs, &place.path("mnt/many"), FILES + 2, source);
        place.expect_success(&["umount", "mnt"]);
    }
    sh("umount src/overlay src/ext4 src/plain src/tmpfs", &place.path(""));
}
