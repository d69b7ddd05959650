//! io_uring in a run.

use std::fs;

use super::{TestPlace, compare_c, compare_with, finish, is_there, run_on_passthrough};

/// A program in a run created a ring, and the operations of the ring affected the directory in
/// which the run was started, because the kernel does not know the mount. The program tries every
/// operation with a path, on rings of every kind, also on those that it restricts and enables
/// itself.
#[test]
fn a_ring_opens_and_makes_nothing_outside_of_the_mount() {
    compare_c("rings", include_str!("rings.c"), |_, _, program| {
        let place = TestPlace::new();
        let mount = format!("/defuse-test=passthrough:{}", place.path("src").display());
        let here = || fs::read_dir(place.path("")).unwrap().count();
        let before = here();
        for options in [&["-C", "/defuse-test"][..], &["-C", "/defuse-test", "--dispatch"]] {
            let mut run = place.command(&["run", "--mount", &mount]);
            run.args(options).args(["--", program]);
            let seen = finish(run);
            if seen.out.contains("not implemented") {
                println!("not here: the kernel makes no rings: {}", seen.out);
                return;
            }
            assert_eq!((seen.code, seen.out.as_str()), (Some(0), "done\n"), "{}", seen.err);
            assert_eq!(here(), before, "a ring made something where the run was started");
            let left = fs::read_dir(place.path("src")).unwrap();
            let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
            left.sort();
            assert_eq!(left, ["inside", "victim"]);
        }
    });
}

/// The library uses a ring for files if it believes that the kernel supports it.
#[test]
fn a_runtime_that_prefers_rings_falls_back_to_system_calls() {
    let script = r#"
        export UV_USE_IO_URING=1
        node -e '
            const fs = require("fs").promises;
            (async () => {
                await fs.mkdir("d"); await fs.writeFile("d/x", "hello"); await fs.rename("d/x", "d/y");
                console.log(await fs.readFile("d/y", "utf8"), (await fs.stat("d/y")).size);
                await fs.symlink("y", "d/l"); await fs.link("d/y", "d/z"); await fs.unlink("d/l");
                const h = await fs.open("d/w", "w+");
                await h.write("abc"); await h.datasync(); await h.close();
                console.log(await fs.readdir("d"), (await fs.lstat("d/w")).size);
            })();'
    "#;
    run_on_passthrough("node", &["node"], script);
    compare_with(&[], "node", &["node"], "memory:", script);
}

/// A ring reads and writes the file directly, at the kernel's speed.
#[test]
fn a_ring_reads_and_writes_files_of_a_mount() {
    if !is_there("fio") {
        println!("skipped: fio is not installed");
        return;
    }
    let place = TestPlace::new();
    let mount = format!("/defuse-test=passthrough:{}", place.path("src").display());
    let run = ["run", "-C", "/defuse-test", "--mount", &mount, "--", "fio", "--name=rings"];
    for options in [&["--fixedbufs", "--registerfiles"][..], &["--iodepth=8"]] {
        let mut run = place.command(&run);
        run.args(["--ioengine=io_uring", "--rw=randrw", "--size=4m", "--bs=4k", "--verify=crc32c"]);
        let seen = finish({
            run.args(options);
            run
        });
        if seen.err.contains("not implemented") || seen.out.contains("not implemented") {
            println!("not here: the kernel makes no rings");
            return;
        }
        assert_eq!(seen.code, Some(0), "{seen:?}");
    }
}
