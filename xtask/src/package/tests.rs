//! Packages of small stand-ins for the programs and libraries, in seconds.

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;

/// Prints what the programs print: pages of the manual and a completion.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <string.h>
#include <pthread.h>
static void page(const char *dir, const char *name, int section) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%d", dir, name, section);
    FILE *file = fopen(path, "w");
    fprintf(file, ".TH %s %d\n.SH NAME\n%s \\- a stand-in for a test\n", name, section, name);
    fclose(file);
}
static void *nothing(void *of) { return of; }
int main(int count, char **words) {
    pthread_t thread;
    if (count == 3 && strcmp(words[1], "study-man") == 0) page(words[2], "defuse-study", 1);
    else if (count == 3 && strcmp(words[1], "man") == 0) {
        page(words[2], "defuse", 1);
        page(words[2], "mount.fuse.defuse", 8);
        page(words[2], "umount.fuse.defuse", 8);
    } else if (count == 3) printf("completions for %s\n", words[2]);
    else return pthread_create(&thread, NULL, nothing, NULL);
    return 0;
}
"#;

const LIBRARY: &str = "#include <stdlib.h>\nvoid *defuse_access(void) { return malloc(7); }\n";

fn compile(dir: &Path, text: &str, options: &[&str], name: &str) -> PathBuf {
    let (source, to) = (dir.join(format!("{name}.c")), dir.join(name));
    fs::write(&source, text).unwrap();
    command::run(Command::new("cc").args(options).arg("-o").arg(&to).arg(source)).unwrap();
    to
}

/// The files of a build. The manual is that of the program, if the tests of all crates have built
/// it.
fn stand_ins(dir: &Path) -> BuiltFiles {
    let program = compile(dir, PROGRAM, &["-g", "-pthread"], "defuse");
    let study = compile(dir, PROGRAM, &["-g", "-pthread"], "defuse-study");
    let preload = compile(dir, LIBRARY, &["-shared", "-fPIC", "-s"], "libdefuse_preload.so");
    let module = compile(dir, LIBRARY, &["-shared", "-fPIC", "-g"], "libdefuse_python.so");
    let object = compile(dir, LIBRARY, &["-c", "-fPIC", "-g"], "library.o");
    let library = dir.join("libdefuse.a");
    command::run(Command::new("ar").arg("rcD").arg(&library).arg(object)).unwrap();
    let real = command::program_under_test().unwrap();
    let real = [real.clone(), real.with_file_name("defuse-study")];
    let printers = if real.iter().all(|path| path.is_file()) {
        real
    } else {
        [program.clone(), study.clone()]
    };
    BuiltFiles { program, study, preload, library, module, printers, compiler: "cc".into() }
}

fn facts() -> ReleaseFacts {
    ReleaseFacts {
        version: "0.1.0~git20260102.030405.abcdef12".to_owned(),
        time: 1_767_323_045,
        maintainer: "Packager <packager@debian.org>".to_owned(),
        homepage: String::new(),
        copyright: release::copyright(&[]),
        notices: "none\n".to_owned(),
        level: 1,
    }
}

fn find_kind(made: &[PathBuf], name: &str, end: &str) -> PathBuf {
    let is_it = |file: &&PathBuf| {
        let file = file.file_name().unwrap().to_string_lossy().into_owned();
        file.starts_with(name) && file.ends_with(end)
    };
    made.iter().find(is_it).unwrap_or_else(|| panic!("no {name}{end}: {made:?}")).clone()
}

fn run_tool(program: &str, arguments: &[&str], file: &Path) -> String {
    command::output(Command::new(program).args(arguments).arg(file)).unwrap()
}

/// A line of a listing without size and time: mode, owner and path.
fn entries(listing: &str) -> BTreeSet<String> {
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        format!("{} {} {}", words[0], words[1], words[5..].join(" "))
    };
    listing.lines().map(entry).collect()
}

#[test]
fn packages_are_equal_when_made_again_and_complete_and_leave_nothing() {
    if let Some(tool) = BUILD_TOOLS.iter().find(|tool| !tool.is_there()) {
        println!("skipped: there is no {}", tool.name);
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let built = stand_ins(place.path());
    let made = make(&built, &facts(), TargetGlibc::Own, place.path()).unwrap();
    check_reproducible(&built, &made);
    check_debian(&made);
    check_rpm(place.path(), &made);
    archive(place.path(), &built, &made);
}

fn check_reproducible(built: &BuiltFiles, first: &[PathBuf]) {
    // Times of files would differ.
    std::thread::sleep(Duration::from_millis(1100));
    let place = tempfile::tempdir().unwrap();
    let second = make(built, &facts(), TargetGlibc::Own, place.path()).unwrap();
    assert_eq!(first.len(), 10, "{first:?}");
    for (one, other) in first.iter().zip(&second) {
        assert_eq!(one.file_name(), other.file_name());
        assert!(fs::read(one).unwrap() == fs::read(other).unwrap(), "{} differs", one.display());
    }
}

fn check_debian(made: &[PathBuf]) {
    let deb = |name| find_kind(made, name, ".deb");
    let program = deb("defuse_");
    let listed = entries(&run_tool("dpkg-deb", &["--contents"], &program));
    for entry in [
        "-rwxr-xr-x root/root ./usr/bin/defuse",
        "-rw-r--r-- root/root ./usr/lib/defuse/libdefuse_preload.so",
        "lrwxrwxrwx root/root ./usr/sbin/mount.fuse.defuse -> ../bin/defuse",
        "lrwxrwxrwx root/root ./usr/sbin/umount.fuse.defuse -> ../bin/defuse",
        "-rw-r--r-- root/root ./usr/lib/systemd/system/defuse@.service",
        "-rw-r--r-- root/root ./usr/lib/systemd/system/defuse-manager.service",
        "-rw-r--r-- root/root ./usr/share/man/man1/defuse.1.gz",
        "-rw-r--r-- root/root ./usr/share/man/man8/mount.fuse.defuse.8.gz",
        "-rw-r--r-- root/root ./usr/share/bash-completion/completions/defuse",
        "-rw-r--r-- root/root ./usr/share/zsh/site-functions/_defuse",
        "-rw-r--r-- root/root ./usr/share/fish/vendor_completions.d/defuse.fish",
        "-rw-r--r-- root/root ./usr/share/doc/defuse/docs/operating.md",
        "-rw-r--r-- root/root ./usr/share/doc/defuse/copyright",
        "drwxr-xr-x root/root ./usr/bin/",
    ] {
        assert!(listed.contains(entry), "{entry}: {listed:#?}");
    }
    let listed = entries(&run_tool("dpkg-deb", &["--contents"], &deb("libdefuse-dev_")));
    for path in ["include/defuse.h", "lib/x86_64-linux-gnu/libdefuse.a"] {
        assert!(listed.contains(&format!("-rw-r--r-- root/root ./usr/{path}")), "{listed:#?}");
    }
    let python = deb("python3-defuse-fs_");
    let listed = entries(&run_tool("dpkg-deb", &["--contents"], &python));
    let modules = "./usr/lib/python3/dist-packages";
    for path in ["defuse_fs/__init__.py", "defuse_fs/fsspec.py", "defuse_fs/_core.abi3.so"] {
        assert!(listed.contains(&format!("-rw-r--r-- root/root {modules}/{path}")), "{listed:#?}");
    }
    let place = tempfile::tempdir().unwrap();
    let mut unpack = Command::new("dpkg-deb");
    command::run(unpack.arg("--extract").arg(&python).arg(place.path())).unwrap();
    let points = "usr/lib/python3/dist-packages/defuse_fs-0.1.0.dist-info/entry_points.txt";
    let points = fs::read_to_string(place.path().join(points)).unwrap();
    assert_eq!(points, "[fsspec.specs]\ndefuse = defuse_fs.fsspec:DefuseFileSystem\n");
    let field = |file: &Path, name: &str| {
        let mut ask = Command::new("dpkg-deb");
        command::output(ask.arg("--field").arg(file).arg(name)).unwrap()
    };
    // The stand-in needs what a thread needs: dpkg-shlibdeps says which glibc that is.
    assert!(field(&program, "Depends").contains("libc6 (>= 2."), "{}", field(&program, "Depends"));
    let version = facts().version;
    let development = field(&deb("libdefuse-dev_"), "Depends");
    assert_eq!(development.trim(), format!("libdefuse0 (= {version})"));
    assert!(field(&python, "Depends").starts_with("python3 (>= 3.9), libc6 (>= 2."));
    assert!(
        field(&deb("defuse-study_"), "Depends").starts_with(&format!("defuse (= {version}), "))
    );
    if command::find("lintian").is_none() {
        println!("skipped: there is no lintian");
        return;
    }
    let packages: Vec<PathBuf> =
        ["defuse_", "defuse-study_", "libdefuse0_", "libdefuse-dev_", "python3-defuse-fs_"]
            .map(deb)
            .into();
    let errors = deb::errors(&packages).unwrap();
    assert!(errors.is_empty(), "{errors}");
}

fn check_rpm(place: &Path, made: &[PathBuf]) {
    let program = find_kind(made, "defuse-0", ".rpm");
    let needs = run_tool("rpm", &["--query", "--requires", "--package"], &program);
    assert!(needs.contains("libc.so.6(GLIBC_2."), "{needs}");
    let root = place.join("root");
    fs::create_dir(&root).unwrap();
    let rpm = |words: &[&str], files: &[PathBuf]| {
        let mut rpm = Command::new("rpm");
        rpm.arg("--root").arg(&root).args(["--nodeps", "--noscripts"]).args(words);
        command::run(rpm.args(files)).unwrap();
    };
    let all: Vec<PathBuf> = made
        .iter()
        .filter(|file| file.extension().is_some_and(|end| end == "rpm"))
        .cloned()
        .collect();
    if !command::is_root() {
        println!("skipped: rpm installs as root alone");
        return;
    }
    rpm(&["--install"], &all);
    let there = |path: &str| root.join(path).symlink_metadata().is_ok();
    for path in ["usr/bin/defuse", "usr/sbin/mount.fuse.defuse", "usr/lib64/libdefuse.so.0"] {
        assert!(there(path), "{path}");
    }
    rpm(&["--erase", "defuse", "defuse-study", "libdefuse0", "libdefuse-devel"], &[]);
    let left: Vec<PathBuf> = tree::paths(&root).unwrap();
    let is_ours = |path: &&PathBuf| path.to_string_lossy().contains("defuse");
    assert_eq!(left.iter().filter(is_ours).collect::<Vec<_>>(), Vec::<&PathBuf>::new());
    for dir in ["usr/lib/defuse", "usr/share/doc/defuse", "usr/share/licenses/defuse"] {
        assert!(!there(dir), "{dir}");
    }
}

fn archive(place: &Path, built: &BuiltFiles, made: &[PathBuf]) {
    let archive = find_kind(made, "defuse-0", ".tar.gz");
    let needed = TargetGlibc::Own.find_needed(&[&built.program]).unwrap();
    let name = archive.file_name().unwrap().to_string_lossy().into_owned();
    assert!(name.ends_with(&format!("-x86_64-linux-glibc{needed}.tar.gz")), "{name}");
    let to = place.join("unpacked");
    fs::create_dir(&to).unwrap();
    let mut unpack = Command::new("tar");
    unpack.args(["--extract", "--strip-components=1", "--directory"]).arg(&to).arg("--file");
    command::run(unpack.arg(&archive)).unwrap();
    for path in ["bin/defuse-study", "lib/libdefuse.so.0", "lib/pkgconfig/defuse.pc", "INSTALL"] {
        assert!(to.join(path).exists(), "{path}");
    }
    assert_eq!(
        fs::read(to.join("lib/defuse/libdefuse_preload.so")).unwrap(),
        fs::read(&built.preload).unwrap()
    );
    let unit = fs::read_to_string(to.join("lib/systemd/system/defuse@.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/usr/local/bin/defuse mount") && !unit.contains("/usr/bin"),
        "{unit}"
    );
}

/// The most that systemd-analyze(1) may find, in tenths: a mount must be seen by others, so that
/// its unit has no namespace for mounts.
const EXPOSURE: [(&str, u32); 2] = [("defuse@.service", 58), ("defuse-manager.service", 52)];

#[test]
fn the_units_are_valid_and_confined() {
    if command::find("systemd-analyze").is_none() {
        println!("skipped: there is no systemd-analyze");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let units = tree::units().unwrap();
    assert_eq!(units.len(), EXPOSURE.len());
    for (name, exposure) in EXPOSURE {
        let text = fs::read_to_string(command::root().join("cli/systemd").join(name)).unwrap();
        let unit = place.path().join(name);
        // The program need not be installed.
        fs::write(&unit, text.replace("/usr/bin/defuse", "/bin/true")).unwrap();
        let analyze = |words: &[&str]| {
            let output = Command::new("systemd-analyze").args(words).arg(&unit).output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            (output.status.success(), String::from_utf8_lossy(&said).into_owned())
        };
        assert_eq!(analyze(&["verify", "--man=no"]), (true, String::new()), "{name}");
        let threshold = format!("--threshold={exposure}");
        let (is_confined, said) = analyze(&["security", "--offline=yes", "--no-pager", &threshold]);
        assert!(is_confined, "{name}: {said}");
    }
}

#[test]
fn descriptions_are_broken_into_lines() {
    assert_eq!(deb::lines("aa bb  cc\ndd", 6), ["aa bb", "cc dd"]);
    assert_eq!(deb::lines("longer-than-a-line x", 6), ["longer-than-a-line", "x"]);
}
