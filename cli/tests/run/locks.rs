//! Locks of open files, shared by the processes of a run.

use super::{same, same_with};

/// The kinds of mount, and the options of the run.
const MOUNTS: [(&str, &[&str]); 5] = [
    ("passthrough:SRC", &[]),
    ("passthrough:SRC,backing=off", &[]),
    ("passthrough:SRC,backing=off", &["--fork", "reopen"]),
    ("passthrough:SRC", &["--fork", "server"]),
    // In a server, which dropped a lock with the connection of the process that had taken it.
    ("memory:", &[]),
];

fn on_every_mount(name: &str, needs: &[&str], script: &str) {
    for (mount, options) in MOUNTS {
        same_with(options, name, needs, mount, script);
    }
}

/// The end of any child released its parent's locks, and an executed program had another open file
/// than its predecessor: two jobs that exclude each other by flock(1) ran at the same time.
#[test]
fn a_lock_holds_as_long_as_some_process_has_the_open_file() {
    super::same_c("locks", include_str!("locks.c"), on_every_mount);
    let script = r#"
        exec 9>l; flock 9; flock -n l echo taken || echo held
        (flock -n 9 && echo mine); flock -n l echo taken || echo held
        bash -c 'flock -n l echo taken || echo held'; (exec 9>&-; flock -n l echo taken || echo held)
        exec 9>&-; flock -n l echo free
        (flock 8; flock -n m echo taken || echo held) 8>m; flock -n m echo free
        bash -c 'exec 7>e; flock 7; exec bash -c "flock -n e echo taken || echo held"'; flock -n e echo free
        mkdir d; exec 6<d; flock 6; flock -n d echo taken || echo held; exec 6<&-; flock -n d echo free
        flock l bash -c 'flock -n l echo taken || echo held; (exit 0); flock -n l echo taken || echo held'
        i=0; (for j in 1 2 3 4; do (for k in 1 2 3 4 5; do
            (flock 5; n=$(cat c 2>/dev/null || echo 0); echo $((n + 1)) > c) 5>lock; done) & done; wait); cat c
    "#;
    on_every_mount("flock", &["flock", "bash"], script);
    same("flock of a directory", &["flock"], "passthrough:SRC,ro,backing=off", "flock . echo ok");
}

/// A served passthrough kept no locks itself, and each process of the run kept its own.
#[test]
fn processes_of_a_served_directory_exclude_each_other() {
    let script =
        "exec 9>l; flock 9; flock -n l echo taken || echo held; exec 9>&-; flock -n l echo free";
    let options = ["--fork", "server"];
    same_with(&options, "flock", &["flock"], "passthrough:SRC", script);
}

/// A child kept the locks of its parent after the parent's end. A child forked while its parent
/// waited for a lock hung: it waited for a thread or a mutex of its parent.
#[test]
fn locks_of_a_process_end_with_it_and_its_children_wait_for_their_own() {
    super::same_c("records", include_str!("records.c"), on_every_mount);
}

/// For a second, a program of a served directory saw what its child had replaced or removed: `[ -e f ]; rm f; [ -e f ]` in a
/// shell was true twice.
#[test]
fn a_program_sees_the_changes_of_its_children_at_once() {
    let script = r#"
        for i in 1 2 3; do
            echo old >f; [ -e f ] && rm f; [ -e f ] && echo "removed and there"; [ -e f ]; touch f
            [ -e f ] || echo "created and not there"; echo longer >g; [ -s f ]; mv g f
            [ -s f ] || echo "replaced and empty"; mkdir d; [ -d d ]; rmdir d; [ -d d ] && echo "no directory"
        done; echo end
    "#;
    on_every_mount("changes", &["bash"], script);
}
