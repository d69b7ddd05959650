//! Random combinations of modes, owners, groups, ACLs and operations, by a user with supplementary
//! groups: on kernel mounts and in programs under `defuse run`. Results and remaining state must
//! equal those on native ext4.
//!
//! `DEFUSE_SEED=N` runs another sequence.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use defuse_testkit::mounted::{Ext4Mount, ServedMount, program, scratch, unavailable_reason};

const COMBINATIONS: &str = "2000";
const SCRIPT: &str = include_str!("permissions/combinations.py");

/// The path of Python, if installed.
fn python() -> Option<&'static str> {
    let works = |python: &&&str| {
        let output = Command::new(python).args(["-c", "import os; os.copy_file_range"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    ["/usr/bin/python3", "python3"].iter().find(works).copied()
}

/// The output, one line for each combination.
fn lines(output: Output) -> Vec<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}", output.status);
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The reason why a line may differ from the native one: missing information in the FUSE protocol,
/// or an exclusion of docs/preload.md. `None` if it may not differ.
fn reason(target: &str, native: &str, ours: &str) -> Option<&'static str> {
    // It depends on the groups of the writer. Its meaning, mandatory locks, was removed from Linux.
    let differs_by_mark = strip_marks(native) == strip_marks(ours);
    match target {
        // The daemon of a passthrough acts for the user without supplementary groups.
        "passthrough" | "no_passthrough" | "writeback" | "run-served" if differs_by_mark => {
            return Some("set-group-id without execution by the group, for supplementary groups");
        }
        // The process has become another user without executing a program: it acts by the
        // connection of root, which does not send its groups.
        "run-memory" | "run-uhs" if differs_by_mark => {
            return Some(
                "set-group-id without execution by the group, for users of a root's process",
            );
        }
        _ => {}
    }
    let what = |text: &str| native.contains(text);
    if !target.starts_with("run") && what("chown: EPERM") && strip_capability(native) == ours {
        // Removed by a request of the kernel that looks like the one before a truncation.
        return Some("whoever may write may have file capabilities removed by a refused chown");
    }
    if !target.starts_with("run") && what(" acl") && what("] link: ") {
        return Some(
            "the kernel protects hard links by the mode that it knew before a list was set",
        );
    }
    None
}

/// The line without set-group-id where the group may not execute.
fn strip_marks(line: &str) -> String {
    let clear = |word: &str| match u32::from_str_radix(word, 8) {
        Ok(mode) if word.len() == 6 && mode & 0o2010 == 0o2000 => format!("{:o}", mode & !0o2000),
        _ => word.to_owned(),
    };
    line.split(' ').map(clear).collect::<Vec<_>>().join(" ")
}

fn strip_capability(line: &str) -> String {
    let words = line.split(' ').filter(|word| !word.starts_with("security.capability="));
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn a_user_has_exactly_the_native_permissions() {
    let python = match (unavailable_reason(), python()) {
        (None, Some(python)) => python,
        (why, _) => {
            println!("skipped: {}", why.unwrap_or("there is no python3"));
            return;
        }
    };
    let seed = std::env::var("DEFUSE_SEED").unwrap_or_else(|_| "1".to_owned());
    println!("DEFUSE_SEED={seed}");
    let place = scratch().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let ext4 = Ext4Mount::new(&place.path().join("ext4"), 256 << 20, 65536).unwrap();
    let fresh = |name: &str| {
        let dir = ext4.path().join(name);
        fs::create_dir(&dir).unwrap();
        dir
    };
    let script = ["-c", SCRIPT, &seed, COMBINATIONS];
    let at =
        |dir: &Path| lines(Command::new(python).args(script).current_dir(dir).output().unwrap());
    let native = at(&fresh("native"));
    let mut wrong = Vec::new();
    let mut compare = |target: &str, ours: &[String]| {
        assert_eq!(ours.len(), native.len(), "{target}");
        let pairs = native.iter().zip(ours).filter(|(native, ours)| native != ours);
        let unexplained = pairs.filter(|(native, ours)| reason(target, native, ours).is_none());
        wrong.extend(unexplained.map(|(n, o)| format!("{target}\n  native {n}\n  ours   {o}")));
    };
    let make_image = |name: &str| {
        let image = place.path().join(name);
        let mut mkfs = Command::new(program().unwrap());
        mkfs.args(["mkfs", "uhs", "--size", "256M", "--sparse"]).arg(&image);
        assert!(mkfs.output().unwrap().status.success());
        image
    };
    let image = make_image("image");
    for option in ["passthrough", "no_passthrough", "writeback", "memory", "uhs"] {
        let source = match option {
            "memory" => OsString::from("memory:"),
            "uhs" => [OsString::from("uhs:"), image.clone().into()].into_iter().collect(),
            _ => [OsString::from("passthrough:"), fresh(option).into()].into_iter().collect(),
        };
        let has_options = !["memory", "uhs"].contains(&option);
        let args: &[&str] = if has_options { &["-o", option] } else { &[] };
        let mount = ServedMount::new(&source, place.path(), args).unwrap();
        compare(option, &at(mount.path()));
        mount.end().unwrap();
    }
    let runs = [
        ("run", "", &[][..]),
        ("run-backing", ",backing=off", &[]),
        ("run-memory", "", &[]),
        ("run-uhs", "", &[]),
        ("run-served", "", &["--fork", "server"]),
    ];
    for (name, options, args) in runs {
        let source = match name {
            "run-memory" => "memory:".to_owned(),
            "run-uhs" => format!("uhs:{}", make_image(name).display()),
            _ => format!("passthrough:{}{options}", fresh(name).display()),
        };
        let mount = format!("/defuse-permissions={source}");
        let mut run = Command::new(program().unwrap());
        run.args(["run", "--mount", &mount, "-C", "/defuse-permissions"]).args(args);
        run.args(["--", python]);
        compare(name, &lines(run.args(script).output().unwrap()));
    }
    assert!(wrong.is_empty(), "DEFUSE_SEED={seed}, {} differ:\n{}", wrong.len(), wrong.join("\n"));
}
