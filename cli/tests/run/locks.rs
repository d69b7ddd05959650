//! Locks of open files, shared by the processes of a run.

use std::path::Path;
use std::process::Command;

use super::{compare, compare_with};

/// The kinds of mount, and the options of the run.
const MOUNTS: [(&str, &[&str]); 5] = [
    ("passthrough:SRC", &[]),
    ("passthrough:SRC,backing=off", &[]),
    ("passthrough:SRC,backing=off", &["--fork", "reopen"]),
    ("passthrough:SRC", &["--fork", "server"]),
    // In a server, which dropped a lock with the connection of the process that had taken it.
    ("memory:", &[]),
];

fn run_on_every_mount(name: &str, needs: &[&str], script: &str) {
    for (mount, options) in MOUNTS {
        compare_with(options, name, needs, mount, script);
    }
}

/// The end of any child released its parent's locks, and an executed program had another open file
/// than its predecessor: two jobs that exclude each other by flock(1) ran at the same time.
#[test]
fn a_lock_holds_as_long_as_some_process_has_the_open_file() {
    super::compare_c("locks", include_str!("locks.c"), run_on_every_mount);
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
    run_on_every_mount("flock", &["flock", "bash"], script);
    compare(
        "flock of a directory",
        &["flock"],
        "passthrough:SRC,ro,backing=off",
        "flock . echo ok",
    );
}

/// A served passthrough kept no locks itself, and each process of the run kept its own.
#[test]
fn processes_of_a_served_directory_exclude_each_other() {
    let script =
        "exec 9>l; flock 9; flock -n l echo taken || echo held; exec 9>&-; flock -n l echo free";
    let options = ["--fork", "server"];
    compare_with(&options, "flock", &["flock"], "passthrough:SRC", script);
}

/// A child kept the locks of its parent after the parent's end. A child forked while its parent
/// waited for a lock hung: it waited for a thread or a mutex of its parent.
#[test]
fn locks_of_a_process_end_with_it_and_its_children_wait_for_their_own() {
    super::compare_c("records", include_str!("records.c"), run_on_every_mount);
}

/// For a second, a program of a served directory saw what its child had replaced or removed:
/// `[ -e f ]; rm f; [ -e f ]` in a shell was true twice.
#[test]
fn a_program_sees_the_changes_of_its_children_at_once() {
    let script = r#"
        for i in 1 2 3; do
            echo old >f; [ -e f ] && rm f; [ -e f ] && echo "removed and there"; [ -e f ]; touch f
            [ -e f ] || echo "created and not there"; echo longer >g; [ -s f ]; mv g f
            [ -s f ] || echo "replaced and empty"; mkdir d; [ -d d ]; rmdir d; [ -d d ] && echo "no directory"
        done; echo end
    "#;
    run_on_every_mount("changes", &["bash"], script);
}

/// A directory within a path may hold for a second, but not after a change by another program of
/// the run.
#[test]
fn a_program_sees_at_once_what_others_of_the_run_do_to_directories() {
    let script = format!("{MAKE_LOOK}\npython3 look.py .");
    run_on_every_mount("directories", &["python3"], &script);
}

/// Programs of a run may change the directory below a passthrough by its own path.
#[test]
fn a_program_sees_at_once_what_others_of_the_run_do_below_a_mount() {
    let place = super::TestPlace::new();
    let source = place.path("src");
    std::fs::create_dir_all(&source).unwrap();
    let look = |below: &Path, run: &mut Command| {
        let script = format!("{MAKE_LOOK}\npython3 look.py {}", below.display());
        let output = run.args(["bash", "-c", &script]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let native = look(Path::new("."), Command::new("env").current_dir(place.path(".")));
    let mount = format!("/defuse-test=passthrough:{}", source.display());
    let mut run = Command::new(super::PROGRAM);
    run.args(["run", "-C", "/defuse-test", "--mount", &mount, "--"]);
    assert_eq!(look(&source, &mut run), native);
}

/// Makes a program that looks through directories which others change, in the directory of its
/// argument.
const MAKE_LOOK: &str = r#"
    mkdir -p d/e; echo old >d/e/f
    cat > look.py <<'END'
import os, subprocess, sys
below = sys.argv[1]
def do(command):
    subprocess.run(["sh", "-c", "cd " + below + "; " + command], check=True)
def see(path):
    try:
        return open(path).read().strip()
    except OSError as error:
        return error.strerror
print(see("d/e/f"))
do("mv d/e d/g"); print(see("d/e/f"), see("d/g/f"))
do("mkdir d/e; echo new >d/e/f"); print(see("d/e/f"), see("d/g/f"))
open("d/e/own", "w").write("own"); print(sorted(os.listdir("d/e")), sorted(os.listdir("d/g")))
do("rm -r d/e; ln -s g d/e"); print(see("d/e/f"))
do("rm d/e; mv d/g d/e; chmod 0 d/e"); print(os.stat("d/e").st_mode & 0o777)
do("chmod 755 d/e"); print(see("d/e/f"))
do("mv d/e d/h; mkdir d/e"); print(see("d/e/f"), see("d/h/f"))
do("rmdir d/e; mkdir d/e; echo last >d/e/f"); print(see("d/e/f"))
END
"#;
