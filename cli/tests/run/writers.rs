//! Shared mappings of a file in several processes.

use super::{compare, compare_c, compare_compiled, compare_with, finish};

/// Each process had a copy, and the last write-back replaced the others: of 400 records of four
/// writers, a database kept 3 (`backing=off`), and all writers exited with code 0.
#[test]
fn data_written_by_several_processes_through_mappings_is_in_the_file() {
    compare_c("writers", include_str!("writers.c"), |name, needs, script| {
        compare(name, needs, "passthrough:SRC", script);
        compare(name, needs, "passthrough:SRC,backing=off", script);
        compare(name, needs, "memory:", script);
        compare_with(&["--fork", "reopen"], name, needs, "passthrough:SRC,backing=off", script);
    });
    let script = "
        mkdir db; mdb_load -T db < /dev/null
        for i in 1 2 3 4; do
            (for j in $(seq 100); do echo k$i-$j; echo v$j; done) | mdb_load -T db &
        done; wait; mdb_stat db | grep Entries; rm -r db";
    for mount in ["passthrough:SRC", "passthrough:SRC,backing=off", "memory:"] {
        compare("lmdb", &["mdb_load"], mount, script);
    }
    let options = ["--fork", "reopen"];
    compare_with(&options, "lmdb", &["mdb_load"], "passthrough:SRC,backing=off", script);
}

/// A file system of which each process has its own instance cannot share a mapping, and refuses it.
#[test]
fn a_shared_mapping_that_would_be_a_copy_is_refused() {
    compare_compiled(&[], "mapping", MAPS, |_, _, program| {
        let place = super::TestPlace::new();
        let run = |options: &[&str]| {
            let mut run = place.command(&["run", "-C", "/defuse-test"]);
            run.args(["--mount", "/defuse-test=memory:"]).args(options).args(["--", program]);
            finish(run).out
        };
        assert_eq!(run(&["--fork", "reopen"]), "shared: No such device\nread: x\nprivate: x\n");
        // A single process cannot lose the data of another.
        assert_eq!(run(&["--fork", "deny"]), "shared: y\nread: y\nprivate: y\n");
        assert_eq!(run(&[]), "shared: y\nread: y\nprivate: y\n");
    });
}

const MAPS: &str = r#"
    #include <errno.h>
    #include <fcntl.h>
    #include <stdio.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>
    static char *map(const char *how, int fd, int protection, int flags) {
        char *at = mmap(0, 4096, protection, flags, fd, 0);
        if (at == MAP_FAILED) printf("%s: %s\n", how, strerror(errno));
        return at == MAP_FAILED ? 0 : at;
    }
    int main(void) {
        int fd = open("f", O_RDWR | O_CREAT, 0644);
        write(fd, "x", 1);
        char *at = map("shared", fd, PROT_READ | PROT_WRITE, MAP_SHARED);
        if (at) at[0] = 'y', msync(at, 4096, MS_SYNC), printf("shared: %c\n", at[0]);
        int reads = open("f", O_RDONLY);
        at = map("read", reads, PROT_READ, MAP_SHARED);
        if (at) printf("read: %c\n", at[0]);
        at = map("private", fd, PROT_READ | PROT_WRITE, MAP_PRIVATE);
        if (at) printf("private: %c\n", at[0]);
        return 0;
    }
"#;
