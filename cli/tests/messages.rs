//! Error messages and exit codes of the program.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use common::{TestPlace, from_output};

#[test]
fn wrong_command_lines_exit_with_2() {
    let place = TestPlace::new();
    for (line, text) in [
        ("mount nfs:x mnt", "known are passthrough:DIR, memory:"),
        ("mount src mnt", "write passthrough:src"),
        ("mount memory mnt", "has no type"),
        ("mount passthrough: mnt", "names no path"),
        ("mount memory: mnt -o sice=1", "did you mean size?"),
        ("mount memory: mnt -o exclusive", "for sources of type passthrough"),
        ("mount memory: mnt -o max_write=12", "from 4096"),
        ("mount memory: mnt --workers 0", "a number from 1 to 1024"),
        ("mount memory:x mnt", "nothing may follow the colon"),
        ("help nothing", "there is no help about nothing"),
    ] {
        place.expect_failure(2, &line.split(' ').collect::<Vec<_>>(), text);
    }
    for line in ["", "mount", "mount memory:", "umount", "frob", "stat --watch x", "stat --frob"] {
        let words: Vec<_> = line.split(' ').filter(|word| !word.is_empty()).collect();
        assert_eq!(place.run(&words).code, Some(2), "{line}");
    }
}

#[test]
fn failed_operations_exit_with_1() {
    let place = TestPlace::new();
    fs::write(place.path("src/file"), "").unwrap();
    for (line, text) in [
        ("umount mnt", "is not mounted"),
        ("umount missing", "is not mounted"),
        ("umount /proc", "use umount(8)"),
        ("stat mnt", "is neither the mount point of a FUSE file system"),
        ("stat", "nothing is mounted"),
        ("mount passthrough:missing mnt", "does not exist"),
        ("mount passthrough:src/file mnt", "is not a directory"),
        ("mount memory: mnt --log-file=no/log", "cannot write the log file"),
        ("man src/file", "cannot write"),
    ] {
        place.expect_failure(1, &line.split(' ').collect::<Vec<_>>(), text);
    }
}

#[test]
fn unusable_mount_points_are_named() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::write(place.path("src/file"), "").unwrap();
    for (line, text) in [
        ("mount memory: missing", "create it first (mkdir)"),
        ("mount memory: src", "-o nonempty"),
        ("mount memory: src/file", "is not a directory"),
        ("mount memory: missing -f", "create it first (mkdir)"),
    ] {
        let said = place.run(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(said.code, Some(1), "{line}");
        assert!(said.err.contains(text), "{line}: {}", said.err);
    }
    assert!(place.list().is_empty());
    place.expect_success(&["mount", "memory:", "src", "-o", "nonempty"]);
    assert_eq!(fs::read_dir(place.path("src")).unwrap().count(), 0);
    place.expect_success(&["umount", "src"]);
    assert!(place.path("src/file").exists());
}

#[test]
fn a_closed_output_is_not_a_failure() {
    let place = TestPlace::new();
    for arguments in [&["help", "options"][..], &["--help"], &["man"], &["completions", "bash"]] {
        let mut child = place.command(arguments);
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let result = from_output(child.wait_with_output().unwrap());
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn help_manual_and_completions_are_generated() {
    let place = TestPlace::new();
    assert!(place.expect_success(&["--version"]).starts_with("defuse "));
    assert!(place.expect_success(&["help", "options"]).contains("fd_cache=N"));
    assert!(place.expect_success(&["help", "umount"]).contains("--lazy"));
    assert!(place.expect_success(&["mount", "--help"]).contains("max_write=BYTES"));
    assert!(!place.expect_success(&["mount", "-h"]).contains("max_write=BYTES"));
    place.expect_success(&["man", "pages"]);
    let pages = ["defuse.1", "defuse-mount.1", "defuse-umount.1", "mount.fuse.defuse.8"];
    for page in pages.into_iter().chain(["umount.fuse.defuse.8"]) {
        assert!(place.path("pages").join(page).exists(), "{page}");
    }
    for text in [
        place.expect_success(&["man"]),
        place.expect_success(&["--help"]),
        place.expect_success(&["mount", "--help"]),
    ] {
        assert!(!text.contains('\u{1b}') && !text.contains("--daemon"));
    }
}

/// The words of a line as bash divides them, and its answer by the function of the script.
const COMPLETE_LINE: &str = r#"
source <(defuse completions bash)
COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=() rest="$1"
while [[ $rest =~ ^[[:blank:]]*([:=]+|[^[:blank:]:=]+)(.*)$ ]]; do
    COMP_WORDS+=("${BASH_REMATCH[1]}")
    rest="${BASH_REMATCH[2]}"
done
[[ "$1" == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_defuse
printf '%s\n' "${COMPREPLY[@]}"
"#;

#[test]
fn shells_complete_sources_options_and_mounts() {
    let place = TestPlace::new();
    fs::write(place.path("an image"), "").unwrap();
    let programs = Path::new(common::PROGRAM).parent().unwrap();
    let mut path = programs.as_os_str().to_owned();
    path.push(":/usr/bin:/bin");
    let complete = |line: &str| {
        let mut bash = place.command_of(Path::new("/bin/bash"), &["-c", COMPLETE_LINE, "-", line]);
        let said = from_output(bash.env("PATH", &path).output().unwrap());
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{line}");
        said.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for (line, expected) in [
        ("defuse umo", "umount"),
        ("defuse mount mem", "memory:"),
        ("defuse mount uhs:an", "an\\ image"),
        ("defuse mount memory: mnt -o ro,siz", "ro,size="),
        ("defuse run --mount /x=uh", "uhs:"),
        ("defuse run -m /x=uhs:an", "an\\ image"),
        ("defuse run -m /x=memory:,siz", ",size="),
        ("defuse mkfs u", "uhs"),
    ] {
        assert_eq!(complete(line), [expected], "{line}");
    }
    // Any user may name a directory so that a shell which inserts the name executes it.
    for name in ["a\n/bin/evil", "b;evil", "c$(evil)", "!evil", "~root", "e{a,b}"] {
        fs::create_dir_all(place.path("names").join(name)).unwrap();
    }
    let inside = place.path("names");
    let inside = inside.to_string_lossy();
    let proposed = complete(&format!("defuse stat {inside}/"));
    let words =
        proposed.iter().map(|word| word.strip_prefix(&format!("{inside}/")).unwrap_or(word));
    let words: std::collections::BTreeSet<_> =
        words.map(|word| word.trim_end_matches('/')).collect();
    let expected = ["\\!evil", "b\\;evil", "c\\$\\(evil\\)", "e\\{a\\,b\\}", "~root"];
    assert_eq!(words, expected.into_iter().collect(), "{proposed:?}");
    assert!(complete("defuse run -m /x=memory: -- bas").contains(&"bash".to_owned()));
    assert!(complete("defuse mount memory: mnt -o ro,no").contains(&"ro,noatime".to_owned()));
    let at = place.path("mnt").to_string_lossy().into_owned();
    assert!(!complete("defuse umount ").contains(&at));
    place.expect_success(&["mount", "memory:", "mnt"]);
    for command in ["umount", "stat", "trace", "breakdown", "tune"] {
        assert!(complete(&format!("defuse {command} ")).contains(&at), "{command}");
    }
    for shell in ["zsh", "fish", "elvish"] {
        let script = place.expect_success(&["completions", shell]);
        assert!(script.contains("DEFUSE_COMPLETE") && script.contains("defuse"), "{script}");
        let mut answer = place.command(&["--", "defuse", "umount", ""]);
        let answer = answer.env("DEFUSE_COMPLETE", shell).env("_CLAP_COMPLETE_INDEX", "2");
        assert!(from_output(answer.output().unwrap()).out.contains(&at), "{shell}");
    }
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn the_helper_has_the_exit_codes_of_mount_8() {
    let place = TestPlace::new();
    let helper = place.path("mount.fuse.defuse");
    symlink(common::PROGRAM, &helper).unwrap();
    let run =
        |arguments: &[&str]| from_output(place.command_of(&helper, arguments).output().unwrap());
    assert_eq!(run(&["memory:"]).code, Some(1));
    assert_eq!(run(&["memory:", "mnt", "-o", "remount"]).code, Some(32));
    assert_eq!(run(&["passthrough:missing", "mnt"]).code, Some(32));
}

/// The commands that measure are in a program of their own, beside this one or in `PATH`.
#[test]
fn commands_that_measure_are_those_of_the_program_for_them() {
    use std::os::unix::fs::PermissionsExt;
    let place = TestPlace::new();
    let program = place.install_for_all_users();
    let run = |arguments: &[&str]| {
        let mut command = place.command_of(&program, arguments);
        common::from_output(command.env("PATH", place.path("")).output().unwrap())
    };
    for command in ["study", "advise", "bench", "workload"] {
        let missing = run(&[command, "--json"]);
        assert_eq!(missing.code, Some(1), "{}", missing.err);
        assert!(missing.err.contains("defuse-study") && missing.err.contains("install"));
    }
    let other = place.path("defuse-study");
    std::fs::write(&other, "#!/bin/sh\necho \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (words, expected) in [
        (&["study", "--help"][..], "study --help\n"),
        (&["bench", "uhs", "--only", "names"], "bench uhs --only names\n"),
        (&["advise", "/dir", "--", "tar", "--help"], "advise /dir -- tar --help\n"),
        (&["workload", "-D", "a=b", "x.f"], "workload -D a=b x.f\n"),
        (&["help", "bench"], "bench --help\n"),
    ] {
        let said = run(words);
        assert_eq!((said.code, said.out.as_str()), (Some(7), expected), "{}", said.err);
    }
    assert!(run(&["--help"]).out.contains("45 workloads"));
}
