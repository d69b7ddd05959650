//! `fuse:COMMAND`: Debian's programs of libfuse 2 and 3 in a run of a user without rights, without
//! /dev/fuse, and without a mount.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use common::TestPlace;

/// A user without rights.
const NOBODY: u32 = 65534;

/// A program, and what its files are.
struct ProgramTrial {
    name: &'static str,
    /// A command of the shell that makes what the program needs.
    before: &'static str,
    /// The command after `fuse:`.
    command: &'static str,
    files: FileTrial,
}

/// The files that a program shows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileTrial {
    /// Those of `src`, which cannot be changed.
    Shown,
    /// Those of `src`, which can be changed, also in the directory or image behind.
    Kept,
    /// None before they are written.
    Written,
}

const TRIALS: &[ProgramTrial] = {
    use FileTrial::*;
    const fn of(
        name: &'static str,
        before: &'static str,
        command: &'static str,
        files: FileTrial,
    ) -> ProgramTrial {
        ProgramTrial { name, before, command, files }
    }
    &[
        of("bindfs", "", "bindfs SRC", Kept),
        of("unionfs-fuse", "", r"unionfs-fuse -o cow\,dirs=SRC=RW", Kept),
        of(
            "archivemount",
            "tar cf a.tar -C src .",
            "archivemount PLACE/a.tar {} -f -o nobackup",
            Kept,
        ),
        of(
            "fuse2fs",
            "mkfs.ext4 -q -O ^has_journal -E root_owner -d src a.ext4 8M",
            "fuse2fs PLACE/a.ext4 {} -f",
            Kept,
        ),
        of("fuseiso", "genisoimage -quiet -R -o a.iso src", "fuseiso -n PLACE/a.iso", Shown),
        // Its root belongs to root.
        of("fuse-zip", "cd src && zip -qry ../a.zip .", "fuse-zip PLACE/a.zip", Shown),
        // It speaks the protocol by itself, and writes at the offset that it gets.
        of(
            "gocryptfs",
            "mkdir crypt && echo secret >word && gocryptfs -q -scryptn 10 -init -passfile word crypt",
            "gocryptfs -q -fg -passfile PLACE/word PLACE/crypt {}",
            Written,
        ),
        of(
            "encfs",
            "mkdir cipher",
            "encfs --standard --extpass='echo secret' -f PLACE/cipher {}",
            Written,
        ),
        of(
            "sshfs",
            r#"printf '#!/bin/sh\nexec /usr/lib/openssh/sftp-server\n' >ssh && chmod +x ssh"#,
            "sshfs -o ssh_command=PLACE/ssh host:SRC",
            Kept,
        ),
        of("squashfuse", "mksquashfs src a.sqfs -quiet", "squashfuse PLACE/a.sqfs", Shown),
        of("squashfuse_ll", "mksquashfs src b.sqfs -quiet", "squashfuse_ll PLACE/b.sqfs", Shown),
        of(
            "fuse-overlayfs",
            "mkdir upper work",
            r"fuse-overlayfs -o lowerdir=SRC\,upperdir=PLACE/upper\,workdir=PLACE/work",
            Kept,
        ),
    ]
};

const LOOK: &str = "cat f d/inner && cmp big ../src/big && readlink l && ls";
const LOOKED: &str = "helloinnerf\nbig\nd\nf\nl\n";
const CHANGE: &str = "mkdir new && echo written >new/x && mv new/x new/y && cat new/y && \
    head -c 400000 big >new/z && cmp -n 400000 new/z big && rm new/z && echo more >>new/y && cat new/y && rm -r new && ls";
const CHANGED: &str = "written\nwritten\nmore\nbig\nd\nf\nl\n";
const WRITE: &str = "echo hello >f && echo more >>f && mkdir d && echo inner >d/inner && mv f g && cat g d/inner && ls";

/// A command of the shell by a user without rights, in a mount namespace in which nothing is behind
/// /dev/fuse.
fn without_rights(place: &TestPlace, command: &str) -> Output {
    let root = place.path("");
    let rights = "--no-new-privs --inh-caps=-all";
    let script = if rustix::process::geteuid().is_root() {
        format!(
            "mount --bind /dev/null /dev/fuse && exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups \
             --bounding-set=-all {rights} sh -c \"$0\""
        )
    } else {
        format!("exec setpriv {rights} sh -c \"$0\"")
    };
    let mut shell = match rustix::process::geteuid().is_root() {
        true => place.command_of(Path::new("unshare"), &["-m", "sh", "-c", &script, command]),
        false => place.command_of(Path::new("sh"), &["-c", &script, command]),
    };
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    shell.current_dir(&root).env("PATH", path).env("HOME", &root).env_remove("XDG_RUNTIME_DIR");
    shell.stdin(Stdio::null()).output().unwrap()
}

fn is_there(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin"]).any(|folder| Path::new(folder).join(program).exists())
}

/// A place of a user without rights, with files, and the program there.
fn place_of_nobody() -> (TestPlace, PathBuf) {
    let place = TestPlace::new();
    let program = place.install_for_all_users();
    let src = place.path("src");
    fs::create_dir(src.join("d")).unwrap();
    fs::write(src.join("d/inner"), "inner").unwrap();
    fs::write(src.join("f"), "hello").unwrap();
    fs::write(src.join("big"), vec![7; 1_500_001]).unwrap();
    symlink("f", src.join("l")).unwrap();
    if rustix::process::geteuid().is_root() {
        let all = ["", "src", "src/d", "src/d/inner", "src/f", "src/big", "mnt"];
        all.iter().for_each(|path| chown(place.path(path), Some(NOBODY), Some(NOBODY)).unwrap());
    }
    (place, program)
}

#[test]
fn programs_of_debian_serve_a_run_without_rights_and_without_a_mount() {
    for needed in ["setpriv", "unshare"] {
        if !is_there(needed) {
            return println!("skipped: {needed} is not installed");
        }
    }
    let (place, program) = place_of_nobody();
    let root = place.path("");
    let root = root.to_str().unwrap().trim_end_matches('/');
    for ProgramTrial { name, before, command, files } in TRIALS {
        let tool = before.split(' ').find(|word| !["cd", "src", "&&", ""].contains(word));
        let tool =
            tool.filter(|tool| tool.starts_with("mk") || ["zip", "genisoimage"].contains(tool));
        if let Some(lacks) = [Some(*name), tool].into_iter().flatten().find(|tool| !is_there(tool))
        {
            println!("skipped: {lacks} is not installed");
            continue;
        }
        let made = without_rights(&place, before);
        assert!(made.status.success(), "{name}: {made:?}");
        let source = command.replace("PLACE", root).replace("SRC", &format!("{root}/src"));
        let run = |script: &str| {
            let quoted = source.replace('\'', r#"'"'"'"#);
            let words = format!(
                "{} run --mount '{root}/x=fuse:{quoted}' -- sh -c 'cd {root}/x && {script}'",
                program.display()
            );
            let said = without_rights(&place, &words);
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.status.success(), "{name}: {script}: {text}");
            String::from_utf8(said.stdout).unwrap()
        };
        if *files == FileTrial::Written {
            assert_eq!(run(WRITE), "hello\nmore\ninner\nd\ng\n", "{name}");
            // Another process of the program reads what the first one has written.
            assert_eq!(run("cat g d/inner && ls"), "hello\nmore\ninner\nd\ng\n", "{name}");
            continue;
        }
        let (script, shown) = match files {
            FileTrial::Kept => (format!("{LOOK} && {CHANGE}"), [LOOKED, CHANGED].concat()),
            _ => (LOOK.to_owned(), LOOKED.to_owned()),
        };
        assert_eq!(run(&script).replace("lost+found\n", ""), shown, "{name}");
    }
}

/// The program looks at its mount point, and finds an empty directory.
#[test]
fn the_mount_point_of_a_program_is_a_directory_and_its_end_ends_the_program() {
    if !is_there("bindfs") {
        return println!("skipped: bindfs is not installed");
    }
    let place = TestPlace::new();
    fs::write(place.path("src/f"), "hello").unwrap();
    let source = format!("/x=fuse:bindfs {}", place.path("src").display());
    let words = ["run", "--mount", &source, "--", "sh", "-c", "cat /x/f; pgrep -P $PPID -a bindfs"];
    let said = place.run(&words);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let (text, process) = said.out.split_once("hello").unwrap();
    assert!(text.is_empty());
    let (pid, command) = process.split_once(' ').unwrap();
    let mount_point = Path::new(command.trim().rsplit(' ').next().unwrap());
    assert!(fs::read_dir(mount_point).unwrap().next().is_none(), "{command}");
    assert!(!Path::new("/proc").join(pid).exists(), "{command}");
}

/// The kernel would refuse changes of a mount with the option `ro`.
#[test]
fn programs_of_paths_and_of_inodes_refuse_changes_if_they_are_started_with_ro() {
    let place = TestPlace::new();
    fs::write(place.path("src/f"), "hello").unwrap();
    fs::create_dir(place.path("work")).unwrap();
    let root = place.path("");
    let overlay = r"fuse-overlayfs -o ro\,lowerdir=ROOT/mnt\,upperdir=ROOT/src\,workdir=ROOT/work";
    for (name, command) in [("bindfs", "bindfs -o ro ROOT/src"), ("fuse-overlayfs", overlay)] {
        if !is_there(name) {
            println!("skipped: {name} is not installed");
            continue;
        }
        let command = command.replace("ROOT", root.to_str().unwrap().trim_end_matches('/'));
        let script = "cat /x/f && ! touch /x/new && ! rm /x/f && ! mkdir /x/d && ! chmod 700 /x/f";
        let words = ["run", "--mount", &format!("/x=fuse:{command}"), "--", "sh", "-c", script];
        let said = place.run(&words);
        assert_eq!((said.code, &said.out[..]), (Some(0), "hello"), "{name}: {}", said.err);
        assert_eq!(said.err.matches("Read-only file system").count(), 4, "{name}: {}", said.err);
        assert_eq!(fs::read_dir(place.path("src")).unwrap().count(), 1);
    }
}

/// Programs that no library of ours can serve get the descriptor as their mount point, as before.
#[test]
fn a_program_that_needs_another_library_gets_the_descriptor() {
    let place = TestPlace::new();
    let script = place.path("program");
    fs::write(&script, "#!/bin/sh\necho \"got $*\" >&2\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let source = format!("/x=fuse:{} one", script.display());
    let said = place.run(&["run", "--mount", &source, "--", "true"]);
    assert_ne!(said.code, Some(0));
    assert!(said.err.contains("got one -f /dev/fd/"), "{}", said.err);
    assert!(said.err.contains("before it served a file system"), "{}", said.err);
    let missing = place.run(&["run", "--mount", "/x=fuse:no-such-program", "--", "true"]);
    assert!(missing.err.contains("no-such-program: there is no such program"), "{}", missing.err);
}

#[test]
fn commas_of_a_command_are_refused_with_their_escape() {
    let place = TestPlace::new();
    let said = place.run(&["run", "--mount", "/x=fuse:p -o a=1,b=2", "--", "true"]);
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert!(said.err.contains(r"fuse:p -o a=1\,b=2"), "{}", said.err);
}
